"""Keeping a GPU busy: it computes while the host prepares what comes next.

A GPU's results are there before they are computed, and whoever looks at them waits. So a chunk's results are handed on
only when the next chunk is begun, and with the last one the next round's batches are drawn.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from personafl.core.batches import Data
from personafl.data.federated import Clients

T = TypeVar("T")


class Pipeline:
    """Batches of one chunk, drawn before it is its turn. `draw` draws those of clients for a round."""

    def __init__(self, draw: Callable[[Clients, int], Data]) -> None:
        self._draw = draw
        self._ready: tuple[int, Clients, Data] | None = None

    def take(self, clients: Clients, number: int) -> Data | None:
        """Return the batches of clients for a round, if they are the ones that are ready."""
        ready, self._ready = self._ready, None
        if ready is None or ready[0] != number or not np.array_equal(ready[1], clients):
            return None
        return ready[2]

    def handed_on(self, results: Iterator[T], number: int, following: Callable[[], Clients | None]) -> Iterator[T]:
        """Yield a round's results, each once the next is begun; before the last, draw for the clients who follow."""
        for last, next_ in itertools.pairwise(itertools.chain(results, [None])):
            if next_ is None and (clients := following()) is not None:
                self._ready = number + 1, clients, self._draw(clients, number + 1)
            yield last  # type: ignore[misc]
