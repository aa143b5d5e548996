"""In which order workers begin tasks, so that they end together: the longest first, as far as memory allows.

Results are handed on in the tasks' own order, so sums do not change; what comes too early waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

__all__ = ["in_order", "longest_first"]

T = TypeVar("T")


def longest_first(work: Sequence[int], window: int) -> list[int]:
    """Return the places of tasks in the order in which they begin: by their work, among `window` neighbours.

    No more than a window of results waits then.
    """
    order: list[int] = []
    for start in range(0, len(work), window):
        order += sorted(range(start, min(start + window, len(work))), key=lambda place: -work[place])
    return order


def in_order(places: Sequence[int], results: Iterable[T]) -> Iterator[T]:
    """Yield results, which come for these places, in the order of the places."""
    waiting: dict[int, T] = {}
    following = 0
    for place, result in zip(places, results, strict=True):
        waiting[place] = result
        while following in waiting:
            yield waiting.pop(following)
            following += 1
