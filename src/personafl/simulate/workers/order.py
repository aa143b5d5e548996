"""In which order workers begin tasks, so that they end together, as far as memory allows.

Results are handed on in the tasks' own order, so sums do not change; what comes too early waits.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def begun_order(work: Sequence[int], workers: int, window: int) -> list[int]:
    """Return the places of tasks in the order in which they begin, if an idle worker takes the next one.

    Only among `window` neighbours is it another than the tasks' own; so no more than a window of results waits.
    """
    order: list[int] = []
    for start in range(0, len(work), window):
        places = range(start, min(start + window, len(work)))
        begun: list[tuple[int, int, int]] = []  # when, by whom, what
        for worker, own in enumerate(_shared_out(places, work, workers)):
            now = 0
            for place in sorted(own, key=lambda place: -work[place]):
                begun.append((now, worker, place))
                now += work[place]
        order += [place for *_, place in sorted(begun)]
    return order


def _shared_out(places: Iterable[int], work: Sequence[int], workers: int) -> list[list[int]]:
    """Return each worker's tasks: the longest first to whoever has least, then exchanged while that evens them out.

    An exchange is between the worker with most work and another: a task, or one for a shorter one.
    """
    shares: list[list[int]] = [[] for _ in range(workers)]
    loads = [0] * workers
    for place in sorted(places, key=lambda place: -work[place]):
        least = loads.index(min(loads))
        shares[least].append(place)
        loads[least] += work[place]
    while True:
        most = loads.index(max(loads))
        exchanges = (
            (max(loads[most] - moved, loads[other] + moved), moved, other, given, taken)
            for other in range(workers)
            for given in shares[most]
            for taken in (None, *shares[other])
            if 0 < (moved := work[given] - (0 if taken is None else work[taken])) < loads[most] - loads[other]
        )
        best = min(exchanges, key=lambda exchange: exchange[0], default=None)
        if best is None:
            return shares
        _, moved, other, given, taken = best
        shares[most].remove(given)
        shares[other].append(given)
        if taken is not None:
            shares[other].remove(taken)
            shares[most].append(taken)
        loads[most] -= moved
        loads[other] += moved


def in_order(places: Sequence[int], results: Iterable[T]) -> Iterator[T]:
    """Yield results, which come for these places, in the order of the places."""
    waiting: dict[int, T] = {}
    following = 0
    for place, result in zip(places, results, strict=True):
        waiting[place] = result
        while following in waiting:
            yield waiting.pop(following)
            following += 1
