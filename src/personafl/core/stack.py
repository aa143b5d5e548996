"""The vmap that stacks clients, seen from inside: what is one client's tensor there is a plain one of all beneath.

A function that is written for plain tensors [clients, …] can so be called in the middle of a rule that is written for
one client, with PyTorch's own tape underneath.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from torch._C._functorch import (
    CVmapInterpreterPtr,
    TransformType,
    _add_batch_dim,
    _remove_batch_dim,
    is_batchedtensor,
    maybe_current_level,
    maybe_get_level,
    peek_interpreter_stack,
    pop_dynamic_layer_stack,
    push_dynamic_layer_stack,
)
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

__all__ = ["Outside", "Stack", "differentiated", "stack_around", "transformed"]


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
        with Outside():
            result = function(*plain)
        return self.each(result)


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
