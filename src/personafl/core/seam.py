"""The one seam between what is computed and how it is computed sooner.

A function of core that is `replaceable` is a definition: plain PyTorch, for one client. While a table of others is in
use, calls of it go to the one that the table has in its place: equal results, up to rounding. `fast` has that table,
and executors put it to use; whoever reads or tests a definition need not know of it.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
Table = dict[Callable[..., Any], Callable[..., Any]]
_TABLE: ContextVar[Table] = ContextVar("table", default={})  # noqa: B039 - nobody writes into it


def replaceable(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that a table may have another one for."""

    @functools.wraps(function)
    def chosen(*args: P.args, **kwargs: P.kwargs) -> R:
        return _TABLE.get().get(chosen, function)(*args, **kwargs)  # type: ignore[no-any-return]

    return chosen


def definition(function: Callable[P, R]) -> Callable[P, R]:
    """Return what a replaceable function is without any table."""
    return function.__wrapped__  # type: ignore[attr-defined,no-any-return]


@contextmanager
def using(table: Table) -> Iterator[None]:
    """Have calls go to a table's functions, in this thread, until left."""
    token = _TABLE.set(table)
    try:
        yield
    finally:
        _TABLE.reset(token)
