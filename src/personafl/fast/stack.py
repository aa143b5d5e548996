"""The vmap that stacks clients, seen from inside: what is one client's tensor there is a plain one of all beneath.

A function that is written for plain tensors [clients, …] can so be called in the middle of a rule that is written for
one client, with PyTorch's own tape underneath.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._C import DisableTorchFunction
from torch._C._functorch import (
    CVmapInterpreterPtr,
    TransformType,
    _add_batch_dim,
    _remove_batch_dim,
    _vmap_decrement_nesting,
    _vmap_increment_nesting,
    is_batchedtensor,
    maybe_current_level,
    maybe_get_level,
    peek_interpreter_stack,
    pop_dynamic_layer_stack,
    push_dynamic_layer_stack,
)
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.func import vmap

T = TypeVar("T")


class Stack(NamedTuple):
    """A vmap: its level and how many clients it stacks."""

    level: int
    clients: int

    def plain(self, value: Tensor) -> Tensor:
        """Return [clients, …] of what is one client's under vmap; what clients share is expanded."""
        return _remove_batch_dim(value, self.level, self.clients, 0)

    def each(self, value: Tensor) -> Tensor:
        """Return the reverse."""
        return _add_batch_dim(value, 0, self.level)

    def has(self, value: Tensor) -> bool:
        """Say whether clients have different values."""
        return is_batchedtensor(value) and maybe_get_level(value) == self.level

    def call(self, function: Callable[..., Tensor], *values: Tensor) -> Tensor:
        """Return a function of plain values, as one client sees it."""
        plain = [self.plain(value) for value in values]
        with DisableTorchFunction(), Outside():  # a `TorchFunctionMode` would look at every call
            result = function(*plain)
        return self.each(result)


def stacked(clients: int, function: Callable[[Stack], T]) -> T:
    """Return what one client's code computes for several: `torch.func.vmap`, without its checks of all arguments.

    These take longer than a small step. What the code sees is to come from `Stack.each`, and what it returns to go to
    `Stack.plain`.
    """
    _load()
    level = _vmap_increment_nesting(clients, "error")
    try:
        return function(Stack(level, clients))
    finally:
        with contextlib.suppress(RuntimeError):  # Ctrl-C may come while it is left (`Outside`): then it is not there
            _vmap_decrement_nesting()


@functools.cache
def _load() -> None:
    """Have torch load what vmap needs."""
    vmap(torch.neg)(torch.zeros(1))


class Outside:
    """While it is entered, the one vmap around, if any, is not: a context made for steps that take a millisecond."""

    __slots__ = ("_inner",)

    def __enter__(self) -> None:
        """Leave the vmap."""
        self._inner = pop_dynamic_layer_stack() if maybe_current_level() == 1 else None

    def __exit__(self, *_: object) -> None:
        """Be back in it."""
        if self._inner is not None:
            push_dynamic_layer_stack(self._inner)


def transformed() -> bool:
    """Say whether any function of torch.func is around."""
    return maybe_current_level() is not None


def stack_around() -> Stack | None:
    """Return the vmap around, if it is all that is around."""
    if maybe_current_level() != 1:
        return None
    inner = peek_interpreter_stack()
    return Stack(1, CVmapInterpreterPtr(inner).batchSize()) if inner.key() == TransformType.Vmap else None


def differentiated() -> bool:
    """Say whether a function of torch.func takes a gradient through what is computed now."""
    return any(interpreter.key() != TransformType.Vmap for interpreter in retrieve_all_functorch_interpreters())
