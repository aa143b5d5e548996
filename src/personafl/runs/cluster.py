"""Chunks of clients trained by the nodes of a Ray cluster: the same bits, in the same order.

Nothing but the place differs from `workers`: this process deals chunks and adds up, workers on the nodes train, one per
core. What decides a run is sent to each node once, and its workers share the data there. In a round a node is sent the
broadcast once, and with each chunk the states of its clients; new states and uploads come back.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import secrets
import socket
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from personafl.core import tree
from personafl.core.tree import Tree
from personafl.errors import BadInput, PersonaError
from personafl.runs.simulator import Chunk
from personafl.runs.workers import Count, Work, WorkerFailed, done_by

__all__ = ["RayCrew", "connected"]

Answer = Any  # a ray.ObjectRef: what will be known

_AHEAD = 3  # chunks a worker that are at work, on their way or waiting for an earlier one
_PATIENCE = 60.0  # seconds until a worker must have started

# Ray reads these when it is imported, and hands them on to what it starts.
_ALWAYS = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
_CONNECTING = {"RAY_NUM_REDIS_GET_RETRIES": "3"}  # seconds to try, where something answers
_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # off: the address of a node is 127.0.0.1


@contextlib.contextmanager
def connected(address: str | None = None) -> Iterator[None]:
    """Have what is run in this context trained by a Ray cluster.

    `address` is HOST:PORT of its head, or "auto": the one that this machine is a node of. None starts one on this
    machine alone, which listens on the loopback only and ends with the context.
    """
    ray = _ray(address)
    if address is not None:
        _check_there(address)
    _connect(ray, address)
    with contextlib.ExitStack() as stack:
        stack.callback(ray.shutdown)
        _check_nodes(ray)
        ray.util.register_serializer(Tensor, serializer=_packed, deserializer=_unpacked)
        stack.callback(ray.util.deregister_serializer, Tensor)
        stack.enter_context(done_by(RayCrew))
        yield


def _ray(address: str | None) -> Any:
    """Return the package, with its settings made before it is imported."""
    if importlib.util.find_spec("ray") is None:
        raise BadInput("--engine ray: ray is not installed; run: pip install 'personafl[ray]'")
    token = {"RAY_AUTH_TOKEN": secrets.token_hex(32)}  # for this process and what it starts
    for key, value in (_ALWAYS | (token if address is None else _CONNECTING)).items():
        os.environ.setdefault(key, value)
    if address is None or _host(address) in ("127.0.0.1", "localhost"):
        os.environ.update(_LOOPBACK)
    import ray

    return ray


def _connect(ray: Any, address: str | None) -> None:
    """Connect this process to a cluster, or start one."""
    if ray.is_initialized():
        raise BadInput("--engine ray: this process is connected to a cluster already; call ray.shutdown() first")
    options = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        ray.init("local", include_dashboard=False, **options)
        return
    try:
        ray.init(address, **options)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise BadInput(
            f"--address {address}: cannot join ({_in_short(error)}); is this machine a node of that cluster, "
            "with the same token (RAY_AUTH_TOKEN or ~/.ray/auth_token) and the same versions of Python and Ray?"
        ) from error


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def _check_there(address: str) -> None:
    """Fail at once if nothing is at an address: Ray itself would try for a long time."""
    if address == "auto":
        return
    port = address.rpartition(":")[2]
    if not _host(address) or not port.isdecimal():
        raise BadInput(f"--address: {address!r} is not HOST:PORT, as in 10.0.0.1:6379, nor auto")
    try:
        socket.create_connection((_host(address), int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise BadInput(f"--address {address}: nothing answers there ({error}); is its head running?") from error


def _check_nodes(ray: Any) -> None:
    """Fail if a node would compute something else than this machine."""

    def versions() -> dict[str, str]:  # sent as it is: personafl may not be there
        found = {}
        for name in ("personafl", "torch", "numpy"):
            try:
                found[name] = importlib.import_module(name).__version__
            except ImportError:
                found[name] = "none"
        return found

    here = versions()
    asked = {node: _on(ray, ray.remote(versions), node, 0).remote() for node in _nodes(ray)}
    for node, answer in asked.items():
        there = _answer(ray, answer, node)
        for name, version in here.items():
            if there[name] != version:
                raise BadInput(
                    f"--engine ray: node {node.address} has {name} {there[name]}, this machine has {version}; "
                    f"install {name}=={version} there"
                )


class _Node(NamedTuple):
    id: str
    address: str
    cores: int


def _nodes(ray: Any) -> list[_Node]:
    """Return the nodes that are there."""
    return [
        _Node(node["NodeID"], node["NodeManagerAddress"], int(node["Resources"].get("CPU", 0)))
        for node in ray.nodes()
        if node["Alive"]
    ]


class RayCrew:
    """Does chunks in order, by workers on the nodes of the cluster that this process is connected to.

    `count` "auto": one per core of each node.
    """

    def __init__(self, work: Work, count: Count) -> None:
        import ray

        self._ray = ray
        self._work = work
        self._count = count
        self._workers: list[_Worker] = []

    def map(self, tasks: Iterable[Chunk]) -> Iterator[Any]:
        """Yield the result of each chunk, in the chunks' order."""
        if not self._workers:
            self._workers = self._started()
        try:
            yield from self._in_order(tasks)
        except BaseException:
            self.close()  # workers may still be at something that nobody waits for
            raise

    def close(self) -> None:
        """End the workers; a later chunk starts others."""
        for worker in self._workers:
            self._ray.kill(worker.actor)
        self._workers = []

    def _started(self) -> list[_Worker]:
        """Start workers, by turns of the nodes, as many as were asked for or as there are cores."""
        ray = self._ray
        nodes = _nodes(ray)
        rows = itertools.zip_longest(*([node] * node.cores for node in nodes))  # by turns
        places = [node for row in rows for node in row if node is not None]
        if self._count != "auto":
            places = places[: self._count]
        if not places:
            raise BadInput("--engine ray: no node of the cluster has a core to work with; start nodes with --num-cpus")
        work = ray.put(self._work)
        kind = ray.remote(_Trainer)
        workers = [_Worker(_on(ray, kind, node, 1).remote(work), node) for node in places]
        for worker in workers:
            _answer(ray, worker.actor.ready.remote(), worker.node)
        return workers

    def _in_order(self, tasks: Iterable[Chunk]) -> Iterator[Any]:
        """Give chunks to whoever has the fewest, and yield results; a few wait for an earlier one."""
        given: deque[tuple[int, Answer, _Worker]] = deque()
        down, sent = None, None
        for number, chunk in enumerate(tasks):
            if len(given) == _AHEAD * len(self._workers):
                yield self._result(*given.popleft())
            if down is not chunk.down:
                down, sent = chunk.down, self._ray.put(chunk.down)
            worker = self._least_busy(given)
            given.append((number, worker.actor.train.remote(chunk._replace(down=None), sent), worker))
        while given:
            yield self._result(*given.popleft())

    def _least_busy(self, given: Iterable[tuple[int, Answer, _Worker]]) -> _Worker:
        owner = {answer: worker for _, answer, worker in given}
        _, waiting = self._ray.wait(list(owner), num_returns=len(owner), timeout=0) if owner else ([], [])
        load = Counter(owner[answer] for answer in waiting)
        return min(self._workers, key=lambda worker: load[worker])

    def _result(self, number: int, answer: Answer, worker: _Worker) -> Any:
        """Return what became of a chunk; raise what went wrong."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(answer)
        except errors.RayTaskError as error:
            if isinstance(error.cause, PersonaError):
                raise error.cause from None
            raise WorkerFailed(str(error), number) from error
        except errors.RayError as error:
            raise WorkerFailed(
                f"a worker on node {worker.node.address} died ({_in_short(error)}); "
                "the last checkpoint is kept: personafl resume continues, here or on a cluster",
                number,
            ) from error


class _Worker(NamedTuple):
    actor: Any
    node: _Node


class _Trainer:
    """A worker on a node."""

    def __init__(self, work: Work) -> None:
        import ray

        torch.set_num_threads(1)
        ray.util.register_serializer(Tensor, serializer=_packed, deserializer=_unpacked)
        self._work = work

    def ready(self) -> None:
        """Answer, once it can work."""

    def train(self, chunk: Chunk, down: Tree) -> tuple[Tree, Tree]:
        """Train a chunk of clients; what came is in read-only memory, so it is copied."""
        states, down = tree.map(torch.clone, (chunk.states, down))
        trained: tuple[Tree, Tree] = self._work(chunk._replace(states=states, down=down))
        return trained


def _on(ray: Any, kind: Any, node: _Node, cores: int) -> Any:
    """Return a task or an actor as one of a node."""
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node.id, soft=False)
    return kind.options(num_cpus=cores, scheduling_strategy=affinity)


def _answer(ray: Any, answer: Answer, node: _Node) -> Any:
    """Return what a node answers before any work is done."""
    try:
        return ray.get(answer, timeout=_PATIENCE)
    except ray.exceptions.GetTimeoutError as error:
        raise BadInput(
            f"--engine ray: node {node.address} started no worker in {_PATIENCE:.0f} s; are its cores taken by others?"
        ) from error
    except ray.exceptions.RayError as error:
        raise BadInput(f"--engine ray: node {node.address} cannot work ({_in_short(error)})") from error


def _in_short(error: BaseException) -> str:
    """Return the first sentence of what Ray says."""
    words = " ".join(str(error).split())
    return words.partition(". ")[0] or type(error).__name__


class _Packed(NamedTuple):
    """A tensor's numbers in the order in which they are in memory; Ray shares arrays without copying them."""

    numbers: NDArray[np.uint8]
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _packed(value: Tensor) -> _Packed:
    stride = torch.empty_like(value, device="meta").stride()
    flat = torch.empty(value.numel(), dtype=value.dtype)
    flat.as_strided(value.shape, stride).copy_(value.detach())
    return _Packed(flat.view(torch.uint8).numpy(), value.dtype, tuple(value.shape), stride)


def _unpacked(packed: _Packed) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the memory is read-only, and only read
        flat = torch.from_numpy(packed.numbers).view(packed.dtype)
    return flat.as_strided(packed.shape, packed.stride)
