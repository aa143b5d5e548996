"""Personal states that stay on a GPU between checkpoints: they are trained there round after round.

A copy to the host and back of all that a round changed takes as long as a good part of the round. Here chunks of states
are kept as they came, beside the store, which has them when a checkpoint needs them or when there is no more room.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from personafl.data.federated import Clients
from personafl.simulate.trainer import Entry
from personafl.storage.store import States, Store

_NONE = -1


class _Chunk(NamedTuple):
    clients: Clients
    states: Entry  # stacked

    @property
    def bytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.states.values())


class ResidentStates(States):
    """States of clients, the newest ones on a GPU while they take at most so many bytes, all others in a store."""

    def __init__(self, behind: Store, clients: int, device: torch.device, budget: int) -> None:
        self._behind, self._device, self._budget = behind, device, budget
        self._chunks: dict[int, _Chunk] = {}  # by number, ascending
        self._next = 0
        self._chunk: NDArray[np.int64] = np.full(clients, _NONE, dtype=np.int64)  # that has the newest state
        self._row: NDArray[np.int64] = np.zeros(clients, dtype=np.int64)  # of it
        self._newer = np.zeros(clients, dtype=np.bool_)  # than the one in the store, or there is none there

    @property
    def clients(self) -> Clients:
        """The clients that have a state, ascending."""
        return np.union1d(self._behind.clients, np.flatnonzero(self._newer))

    def has(self, clients: Clients) -> NDArray[np.bool_]:
        """Say which clients have a state."""
        known: NDArray[np.bool_] = self._newer[clients] | self._behind.has(clients)
        return known

    def take(self, clients: Clients) -> Entry:
        """Return the states of clients that have one, all of one layout, stacked."""
        whose = self._chunk[clients]
        whole = self._chunks.get(int(whose[0]))
        if whole is not None and (whose == whose[0]).all() and np.array_equal(whole.clients, clients):
            return whole.states  # without a copy
        pieces: list[Entry] = []
        order: list[NDArray[np.int64]] = []
        for number in np.unique(whose).tolist():
            places = np.flatnonzero(whose == number)
            order.append(places)
            if number == _NONE:
                found = self._behind.take(clients[places])
                pieces.append({path: leaf.to(self._device) for path, leaf in found.items()})
            else:
                rows = torch.from_numpy(self._row[clients[places]]).to(self._device)
                pieces.append({path: leaf[rows] for path, leaf in self._chunks[number].states.items()})
        back = torch.from_numpy(np.argsort(np.concatenate(order))).to(self._device)
        return {path: torch.cat([piece[path] for piece in pieces])[back] for path in pieces[0]}

    def put(self, clients: Sequence[int] | Clients, stacked: Entry) -> None:
        """Replace the states of several clients, given stacked."""
        numbers = np.array(clients, dtype=np.int64)
        # Laid out as a checkpoint restores them: kernels may round other layouts differently.
        chunk = _Chunk(numbers, {path: leaf.contiguous() for path, leaf in stacked.items()})
        self._chunk[numbers] = _NONE
        self._let_go_of_the_replaced()
        if sum(old.bytes for old in self._chunks.values()) + chunk.bytes > self._budget:
            self._write()
            self._chunks, self._chunk[:] = {}, _NONE
        if chunk.bytes > self._budget:
            self._behind.put(numbers, chunk.states)
            self._newer[numbers] = False
            return
        self._chunks[self._next] = chunk
        self._chunk[numbers], self._row[numbers], self._newer[numbers] = self._next, np.arange(len(numbers)), True
        self._next += 1

    def prefetch(self, clients: Clients) -> None:
        """Begin to read the states of clients that will be taken soon."""
        self._behind.prefetch(clients[self._chunk[clients] == _NONE])

    def flush(self) -> int:
        """Make all states durable and return the number of the index that has them; 0: there are none."""
        self._write()
        return self._behind.flush()

    def collect(self) -> None:
        """Free what the last index does not refer to; call it after that index is committed."""
        self._behind.collect()

    def _write(self) -> None:
        """Have the store know what is newer here."""
        for number, chunk in self._chunks.items():
            mine = np.flatnonzero((self._chunk[chunk.clients] == number) & self._newer[chunk.clients])
            rows = slice(None) if len(mine) == len(chunk.clients) else torch.from_numpy(mine).to(self._device)
            if len(mine):
                self._behind.put(chunk.clients[mine], {path: leaf[rows] for path, leaf in chunk.states.items()})
                self._newer[chunk.clients[mine]] = False

    def _let_go_of_the_replaced(self) -> None:
        """Forget chunks of which no state is the newest any more."""
        used = set(np.unique(self._chunk).tolist())
        self._chunks = {number: chunk for number, chunk in self._chunks.items() if number in used}
