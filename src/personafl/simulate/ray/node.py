"""What runs on a node of a Ray cluster: workers, one per core, and the states of who was trained there.

Workers ask a node for states themselves, their own or another: states never come by the machine that runs the
simulation, however small they are.
"""

import contextlib
import fcntl
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from personafl.core import tree
from personafl.core.algorithm import for_returning
from personafl.core.tree import Tree
from personafl.errors import PersonaError
from personafl.simulate.trainer import New, Task, Trainer
from personafl.simulate.workers.local import Work
from personafl.simulate.workers.nodestore import lost
from personafl.storage.slab import Clients, Entry
from personafl.storage.store import Store

Answer = Any  # a ray.ObjectRef: what will be known

_PIECE = 2**26  # bytes of states that are sent at a time
_PREFIX = "personafl-states-"  # of the directory of a node's states


class Node(NamedTuple):
    """A machine of the cluster."""

    id: str
    address: str
    cores: int


class RemoteStates(NamedTuple):
    """The states that a node has, as others see them."""

    actor: Any
    node: Node

    def ask(self, what: str, *given: Any) -> Any:
        """Return what a method of them does; tensors are in memory that must not be written to."""
        return answered(getattr(self.actor, what).remote(*given), self.node)


class NodeStates:
    """Has the newest states of the clients that were trained last on its node, in a store that ends with it.

    Later states are beside them (see `nodestore`). A state that has gone to another node since keeps its row here, for
    when it comes back.
    """

    def __init__(self, budget: int) -> None:
        torch.set_num_threads(1)
        pack_tensors()
        _remove_orphans()
        self._folder = _Folder()
        self._stores = {later: Store(self._folder.path / f"later-{later}", budget) for later in (False, True)}

    def ready(self) -> None:
        """Answer, once it can work."""

    def pieces(self, clients: Clients, later: bool) -> list[Clients]:
        """Cut clients into pieces that can be taken."""
        return list(self._stores[later].pieces(clients, _PIECE))

    def take(self, clients: Clients, later: bool) -> Entry:
        """Return states of one layout, stacked."""
        return self._stores[later].take(clients)

    def put(self, clients: Clients, stacked: Entry, later: bool) -> None:
        """Replace states."""
        self._stores[later].put(clients, stacked)

    def arrive(self, clients: Clients) -> None:
        """Have later states replace the others."""
        for piece in self._stores[True].pieces(clients, _PIECE):
            self._stores[False].put(piece, self._stores[True].take(piece))

    def close(self) -> None:
        """Remove its files."""
        self._folder.remove()


class _Folder:
    """A temporary directory that is locked as long as its process lives."""

    def __init__(self) -> None:
        made = Path(tempfile.mkdtemp())
        self._lock = open(made / "lock", "w")  # noqa: SIM115 - as long as the process lives
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = made.with_name(f"{_PREFIX}{made.name}")
        made.rename(self.path)  # from now on it may be found, and is locked

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _remove_orphans() -> None:
    """Remove the directories of those that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), open(path / "lock", "r+") as lock:  # else: another's, or gone
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)


class Worker:
    """Does tasks, with one thread."""

    def __init__(self, work: Work) -> None:
        torch.set_num_threads(1)
        pack_tensors()
        self._work = work
        self._states: Sequence[RemoteStates] = ()
        self._here = 0  # the number of its node

    def ready(self) -> None:
        """Answer, once it can work."""

    def meet(self, states: Sequence[RemoteStates], here: int) -> None:
        """Know the states of all nodes, of which number `here` is that of its node."""
        self._states, self._here = states, here

    def do(self, task: Task, down: Tree) -> Any:
        """Do a task; what came is in read-only memory, so it is copied."""
        own, states, down = tree.map(torch.clone, (task.own, task.states, down))
        return self._work(task._replace(own=own, states=states, down=down))

    def do_kept(
        self, task: Task, first: Tree, sent: tuple[Clients, Entry] | None, kept: dict[int, Clients], new: New
    ) -> tuple[Any, bool]:
        """Do a task from states that came along or that nodes keep; say whether new ones are kept here.

        `first` is the broadcast, where there are newcomers with what they need.
        """
        trainer = self._work
        assert isinstance(trainer, Trainer)
        pieces = [(clients, self._states[node].ask("take", clients, False)) for node, clients in kept.items()]
        known = _Collected(pieces if sent is None else [*pieces, sent])
        own, first = tree.map(torch.clone, (task.own, first))
        task = task._replace(own=own)
        states = trainer.states(known, task.problem, first, task.clients, own)
        if new == "none":
            return trainer(task._replace(states=states, down=first)), False
        done = trainer(task._replace(states=states, down=for_returning(first)))
        if good := bool(done.finite.all()):
            self._states[self._here].ask("put", task.clients, tree.flatten(done.states), new == "later")
        return done._replace(states=()), good


class _Collected:
    """States from several places."""

    def __init__(self, pieces: list[tuple[Clients, Entry]]) -> None:
        self._pieces = pieces
        self._clients = np.concatenate([np.zeros(0, dtype=np.int64), *(clients for clients, _ in pieces)])

    def has(self, clients: Clients) -> NDArray[np.bool_]:
        """Say which clients have a state."""
        return np.isin(clients, self._clients)

    def take(self, clients: Clients) -> Entry:
        """Return the states of clients that have one, stacked, in memory of their own."""
        order = np.argsort(self._clients)
        rows = torch.from_numpy(order[np.searchsorted(self._clients, clients, sorter=order)])
        paths = self._pieces[0][1]
        stacks = {path: [stacked[path] for _, stacked in self._pieces] for path in paths}
        return {path: (torch.cat(stack) if len(stack) > 1 else stack[0])[rows] for path, stack in stacks.items()}


def answered(answer: Answer, node: Node) -> Any:
    """Return what a node's states answer; raise what went wrong, in our own words."""
    import ray

    try:
        return ray.get(answer)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, PersonaError):
            raise type(error.cause)(f"node {node.address}: {error.cause}") from None
        raise
    except ray.exceptions.RayError as error:
        raise lost(f"node {node.address} died with the states it had ({in_short(error)})") from error


def in_short(error: BaseException) -> str:
    """Return the first sentence of what Ray says."""
    words = " ".join(str(error).split())
    return words.partition(". ")[0] or type(error).__name__


class _Packed(NamedTuple):
    """A tensor's numbers in the order in which they are in memory; Ray shares arrays without copying them."""

    numbers: NDArray[np.uint8]
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def pack_tensors() -> None:
    """Have this process send tensors as they are in memory."""
    import ray

    ray.util.register_serializer(Tensor, serializer=_packed, deserializer=_unpacked)


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
