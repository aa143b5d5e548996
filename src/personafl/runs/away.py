"""A store whose newest states may be on other machines: each on the node where its client was trained last.

The files of this machine stay the truth. What is newer elsewhere is brought home before anyone here reads it, and
before a checkpoint; a state that has not changed since is not brought again. So what a node that dies takes with it is
what came after the last checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from personafl.errors import PersonaError
from personafl.runs.slab import Clients, Entry
from personafl.runs.store import States, Store

__all__ = ["HOME", "AwayStore", "Fetch", "StatesLost"]

Nodes = NDArray[np.int16]
Fetch = Callable[[int, Clients], Iterable[tuple[Clients, Entry]]]  # of a node: states by pieces of one layout

HOME = -1  # in place of a node


class StatesLost(PersonaError):
    """What was computed since the last checkpoint is gone with a node."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; the last checkpoint is kept: personafl resume continues, here or on a cluster")


class AwayStore(States):
    """The states of clients 0 … `clients` − 1, at home and on nodes that `fetch` has them from."""

    spread = True

    def __init__(self, home: Store, clients: int, fetch: Fetch) -> None:
        self.home = home
        self._fetch = fetch
        self._node: Nodes = np.full(clients, HOME, dtype=np.int16)  # that has the newest state
        self._newer = np.zeros(clients, dtype=np.bool_)  # than the one at home, or there is none at home

    @property
    def clients(self) -> Clients:
        """The clients that have a state, ascending."""
        return np.union1d(self.home.clients, np.flatnonzero(self._newer))

    def has(self, clients: Clients) -> NDArray[np.bool_]:
        """Say which clients have a state."""
        known: NDArray[np.bool_] = self._newer[clients] | self.home.has(clients)
        return known

    def take(self, clients: Clients) -> Entry:
        """Return the states of clients that have one, all of one layout, stacked."""
        self._bring(clients)
        return self.home.take(clients)

    def put(self, clients: Sequence[int] | Clients, stacked: Entry) -> None:
        """Replace the states of several clients, given stacked."""
        self.home.put(clients, stacked)
        self._node[clients], self._newer[clients] = HOME, False

    def prefetch(self, clients: Clients) -> None:
        """Begin to read the states of clients that will be taken soon, of those that have them only here."""
        self.home.prefetch(clients[self._node[clients] == HOME])

    def flush(self) -> int:
        """Make all states durable and return the number of the index that has them; 0: there are none."""
        self._bring(np.flatnonzero(self._newer))
        return self.home.flush()

    def collect(self) -> None:
        """Free what the last index does not refer to; call it after that index is committed."""
        self.home.collect()

    def nodes(self, clients: Clients) -> Nodes:
        """Return who has the newest state of each client: a node, or HOME, also for who has none."""
        self._check_there(clients)
        return self._node[clients]

    def left(self, clients: Clients, node: int) -> None:
        """Say that the newest states of clients are on a node."""
        self._node[clients], self._newer[clients] = node, True

    def end(self) -> None:
        """Say that the nodes have ended. States that were only there are lost."""
        self._node[:] = HOME

    def _bring(self, clients: Clients) -> None:
        """Bring home what is newer elsewhere."""
        self._check_there(clients)
        clients = clients[self._newer[clients]]
        for node in np.unique(self._node[clients]).tolist():
            for piece, stacked in self._fetch(node, clients[self._node[clients] == node]):
                self.home.put(piece, stacked)
                self._newer[piece] = False

    def _check_there(self, clients: Clients) -> None:
        lost = self._newer[clients] & (self._node[clients] == HOME)
        if lost.any():
            raise StatesLost(f"the newest states of {int(lost.sum())} clients ended with the workers")
