"""A store whose newest states may be on other machines: each on the node where its client was trained last.

The files of this machine stay the truth. What is newer elsewhere is brought home before anyone here reads it, and
before a checkpoint; a state that has not changed since is not brought again. So what a node that dies takes with it is
what came after the last checkpoint.

A client that is under way (see `buffered`) leaves a state on its node that counts only when it arrives: a later one.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from personafl.errors import PersonaError
from personafl.storage.slab import Clients, Entry
from personafl.storage.store import States, Store

Places = NDArray[np.int16]  # nodes, by number, or:

HOME = -1
LOST = -2


class StatesLost(PersonaError):
    """What was computed since the last checkpoint is gone with a node."""


def lost(what: str) -> StatesLost:
    """Return the error with what is left of the run."""
    return StatesLost(f"{what}; the last checkpoint is kept, and can go on here or on a cluster")


class Nodes(Protocol):
    """Where states are besides home."""

    def fetch(self, node: int, clients: Clients, later: bool) -> Iterable[tuple[Clients, Entry]]:
        """Return the states of clients that are on a node, or the later ones, by pieces of one layout."""

    def arrive(self, node: int, clients: Clients) -> None:
        """Have the later states of clients on a node replace the others there."""


class NodeStore(States):
    """The states of clients 0 … `clients` − 1, at home and on nodes."""

    def __init__(self, home: Store, clients: int, nodes: Nodes) -> None:
        self.home = home
        self._nodes = nodes
        self._place: Places = np.full(clients, HOME, dtype=np.int16)  # that has the newest state
        self._newer = np.zeros(clients, dtype=np.bool_)  # than the one at home, or there is none at home
        self._later: Places = np.full(clients, HOME, dtype=np.int16)  # that has a later one; HOME: there is none

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
        self._place[clients], self._newer[clients] = HOME, False

    def prefetch(self, clients: Clients) -> None:
        """Begin to read the states of clients that will be taken soon, of those that have them only here."""
        self.home.prefetch(clients[self._place[clients] == HOME])

    def flush(self) -> int:
        """Make all states durable and return the number of the index that has them; 0: there are none."""
        self._bring(np.flatnonzero(self._newer))
        return self.home.flush()

    def collect(self) -> None:
        """Free what the last index does not refer to; call it after that index is committed."""
        self.home.collect()

    def places(self, clients: Clients) -> Places:
        """Return who has the newest state of each client: a node, or HOME, also for who has none."""
        return _there(self._place[clients])

    def left(self, clients: Clients, node: int, later: bool) -> None:
        """Say that the newest states of clients are on a node, or later ones."""
        if later:
            self._later[clients] = node
        else:
            self._place[clients], self._newer[clients] = node, True

    def has_later(self, clients: Clients) -> NDArray[np.bool_]:
        """Say which clients have a later state on a node."""
        later: NDArray[np.bool_] = self._later[clients] != HOME
        return later

    def arrive(self, clients: Clients) -> None:
        """Have the later states of clients be their states from now on."""
        for node, members in _by_node(clients, self._later[clients]):
            self._nodes.arrive(node, members)
            self.left(members, node, later=False)
        self._later[clients] = HOME

    def recall(self, clients: Clients) -> Iterator[tuple[Clients, Entry]]:
        """Take the later states of clients from the nodes, by pieces of one layout; they are the caller's then."""
        for node, members in _by_node(clients, self._later[clients]):
            yield from self._nodes.fetch(node, members, later=True)
        self._later[clients] = HOME

    def end(self) -> None:
        """Say that the nodes have ended. States that were only there are lost."""
        self._place[:] = np.where(self._newer, LOST, HOME)
        self._later[self._later != HOME] = LOST

    def _bring(self, clients: Clients) -> None:
        """Bring home what is newer elsewhere."""
        clients = clients[self._newer[clients]]
        for node, members in _by_node(clients, self._place[clients]):
            for piece, stacked in self._nodes.fetch(node, members, later=False):
                self.home.put(piece, stacked)
                self._newer[piece] = False


def _there(places: Places) -> Places:
    """Return places, none of which is lost."""
    gone = int((places == LOST).sum())
    if gone:
        raise lost(f"the newest states of {gone} clients ended with the workers")
    return places


def _by_node(clients: Clients, places: Places) -> Iterator[tuple[int, Clients]]:
    """Yield the clients of each node."""
    for node in np.unique(_there(places)).tolist():
        yield node, clients[places == node]
