"""Ray without a cluster: two nodes whose actors answer at once, in this process. What is sent is copied, as there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cloudpickle


class RayError(Exception):
    """As Ray's."""


class RayTaskError(RayError):
    """As Ray's: what a task raised is its cause."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(repr(cause))
        self.cause = cause


class Reference:
    """What is known already: a value, or an error."""

    def __init__(self, value: Any = None, error: Exception | None = None) -> None:
        self.value, self.error = value, error


class Actor:
    """Calls methods of an object when it is asked to; references are values by then."""

    def __init__(self, made: Any) -> None:
        self._made = made

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *given: called(getattr(self._made, name), given))

    def __deepcopy__(self, memo: object) -> Actor:
        return self  # a handle


def resolved(given: tuple[Any, ...]) -> list[Any]:
    return [one.value if isinstance(one, Reference) else copy.deepcopy(one) for one in given]


def called(function: Callable[..., Any], given: tuple[Any, ...]) -> Reference:
    try:
        return Reference(copy.deepcopy(function(*resolved(given))))
    except Exception as error:
        return Reference(error=RayTaskError(error))


def get(reference: Reference, timeout: float | None = None) -> Any:
    if reference.error is not None:
        raise reference.error
    return reference.value


def remote(kind: Callable[..., Any]) -> Any:
    made = SimpleNamespace(remote=lambda *given: Actor(kind(*resolved(given))))
    return SimpleNamespace(options=lambda **_: made)


RAY = SimpleNamespace(
    exceptions=SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError, GetTimeoutError=TimeoutError),
    util=SimpleNamespace(
        register_serializer=lambda *_, **__: None,
        scheduling_strategies=SimpleNamespace(NodeAffinitySchedulingStrategy=lambda *_, **__: None),
    ),
    nodes=lambda: [
        {"NodeID": name, "NodeManagerAddress": name, "Resources": {"CPU": 1.0}, "Alive": True} for name in "ab"
    ],
    put=lambda value: Reference(cloudpickle.loads(cloudpickle.dumps(value))),  # as to another machine
    get=get,
    wait=lambda references, **_: ([], references),  # as if all were at work, so that both nodes are given some
    kill=lambda _: None,
    remote=remote,
)
