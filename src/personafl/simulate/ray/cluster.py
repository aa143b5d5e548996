"""Having simulations trained by a Ray cluster: joining one, or starting one on this machine."""

import contextlib
import importlib.util
import os
import secrets
import socket
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from personafl.errors import BadInput
from personafl.simulate.ray.driver import RayWorkers, first_answer, nodes_of, on_node
from personafl.simulate.ray.node import in_short, pack_tensors
from personafl.simulate.workers.local import done_by

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
        pack_tensors()
        stack.callback(ray.util.deregister_serializer, Tensor)
        stack.enter_context(done_by(RayWorkers))
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
            f"--address {address}: cannot join ({in_short(error)}); is this machine a node of that cluster, "
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
    asked = {node: on_node(ray, ray.remote(versions), node, 0).remote() for node in nodes_of(ray)}
    for node, answer in asked.items():
        there = first_answer(ray, answer, node)
        for name, version in here.items():
            if there[name] != version:
                raise BadInput(
                    f"--engine ray: node {node.address} has {name} {there[name]}, this machine has {version}; "
                    f"install {name}=={version} there"
                )
