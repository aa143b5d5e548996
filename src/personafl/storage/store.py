"""Personal states of all clients, in memory-mapped files: in memory up to a budget, beyond it on disk.

Each layout of states has a slab, a file with a row per state. A checkpoint names an index, a file that says which row
is whose; what it refers to is not touched before the next checkpoint is committed: a new state goes to a free row. So a
crash leaves rows that nobody refers to, which are free at the next start. Clients that never took part cost nothing.

    index-N.safetensors    clients, slabs, rows and their checksums [clients with a state]; the metadata has the slabs'
                           layouts
    slab-N                 see `slab`
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
import torch
from numpy.typing import NDArray

from personafl.errors import BadInput
from personafl.storage.files import atomic_write, storage
from personafl.storage.seals import is_sealed, sealed
from personafl.storage.slab import Clients, Entry, Layout, Slab, layout_of

# Where a client's state is (slab 0: nowhere), the first index that refers to that row, the row's checksum (0: not known
# yet), and whether this process has written it, or compared that.
_PLACE = np.dtype([("slab", np.int32), ("row", np.int32), ("index", np.int32), ("sum", np.uint32), ("sound", np.bool_)])


class States(ABC):
    """Keeps one flattened state per client.

    `put` and `take` several by client number; `flush` makes all states durable and returns the number of the index, to
    put into a checkpoint; `collect` frees what that checkpoint, once it is committed, no longer needs.
    """

    def __contains__(self, client: int) -> bool:
        known: bool = self.has(np.array([client])).item()
        return known

    def __len__(self) -> int:
        return len(self.clients)

    def get(self, client: int) -> Entry:
        """Return a client's state."""
        return {path: leaf[0] for path, leaf in self.take(np.array([client])).items()}

    @property
    @abstractmethod
    def clients(self) -> Clients:
        """The clients that have a state, ascending."""

    @abstractmethod
    def has(self, clients: Clients) -> NDArray[np.bool_]:
        """Say which clients have a state."""

    @abstractmethod
    def take(self, clients: Clients) -> Entry:
        """Return the states of clients that have one, all of one layout, stacked."""

    @abstractmethod
    def put(self, clients: Sequence[int] | Clients, stacked: Entry) -> None:
        """Replace the states of several clients, given stacked."""

    @abstractmethod
    def prefetch(self, clients: Clients) -> None:
        """Begin to read the states of clients that will be taken soon."""

    @abstractmethod
    def flush(self) -> int:
        """Make all states durable and return the number of the index that has them; 0: there are none."""

    @abstractmethod
    def collect(self) -> None:
        """Free what the last index does not refer to; call it after that index is committed."""


class Store(States):
    """Keeps states in files of a directory.

    Slabs larger than the budget together are in memory only while they are used; the system caches them as it can.
    """

    def __init__(self, directory: Path, budget: int, index: int = 0) -> None:
        self._directory = directory
        self.budget = budget
        self._index = index
        self._places: NDArray[Any] = np.zeros(0, dtype=_PLACE)  # [clients up to the last one known]
        self._slabs: dict[int, Slab] = {}
        self._changed = False  # since the last flush
        self._replaced: list[NDArray[Any]] = []  # places that the next index does not refer to any more
        self._garbage: list[NDArray[Any]] = []  # places that the last index does not refer to any more
        with storage(directory):
            directory.mkdir(directory.parent.stat().st_mode & 0o777, exist_ok=True)  # for whom all of it is for
        if index:
            self._open()
        self.collect()

    @property
    def clients(self) -> Clients:
        """The clients that have a state, ascending."""
        return np.flatnonzero(self._places["slab"])

    def has(self, clients: Clients) -> NDArray[np.bool_]:
        """Say which clients have a state."""
        known: NDArray[np.bool_] = self._at(clients)["slab"] > 0
        return known

    def take(self, clients: Clients) -> Entry:
        """Return the states of clients that have one, all of one layout, stacked."""
        places = self._at(clients)
        states = self._slabs[int(places["slab"][0])].take(places["row"], clients)
        self._check(clients, places)
        self._keep_to_budget()
        return states

    def put(self, clients: Sequence[int] | Clients, stacked: Entry) -> None:
        """Replace the states of several clients, given stacked."""
        numbers = np.array(clients, dtype=np.int64)
        self._reach(numbers)
        which = self._slab_for(layout_of(stacked), len(numbers))
        before = self._places[numbers]
        moving = (before["slab"] != which) | (before["index"] <= self._index)  # the rows of others are in no index
        moved = numbers[moving]
        self._places["row"][moved] = self._slabs[which].allot(len(moved))
        self._places["slab"][moved], self._places["index"][moved] = which, self._index + 1
        self._replaced.append(before[moving & (before["slab"] > 0)])
        rows = self._places["row"][numbers]
        self._slabs[which].put(rows, numbers, stacked)
        # Later, for those that change again until then; but not from the disk.
        self._places["sum"][numbers] = self._slabs[which].sums(rows) if self._over_budget else 0
        self._places["sound"][numbers] = True
        self._changed = True
        self._keep_to_budget()

    def pieces(self, clients: Clients, most: int) -> Iterator[Clients]:
        """Cut clients that have a state into pieces of one layout and of at most so many bytes, or of one client."""
        places = self._at(clients)
        for which in np.unique(places["slab"]).tolist():
            alike = clients[places["slab"] == which]
            width = max(1, most // self._slabs[which].row_bytes)
            yield from (alike[start : start + width] for start in range(0, len(alike), width))

    def prefetch(self, clients: Clients) -> None:
        """Begin to read the states of clients that will be taken soon."""
        places = self._at(clients)
        for which, slab in self._slabs.items() if self._over_budget else ():
            slab.prefetch(places["row"][places["slab"] == which])

    def flush(self) -> int:
        """Make all states durable and return the number of the index that has them; 0: there are none."""
        if self._changed:
            for slab in self._slabs.values():
                slab.sync()
            self._index += 1
            self._sum_up()
            self._write_index()
            self._garbage, self._replaced = self._garbage + self._replaced, []
            self._changed = False
        return self._index

    def collect(self) -> None:
        """Free what the last index does not refer to; call it after that index is committed."""
        for which, slab in self._slabs.items():
            gone = [places["row"][places["slab"] == which] for places in self._garbage]
            slab.free = np.concatenate([slab.free, *gone])
        self._garbage = []
        needed = {self._index_file(), *(slab.path for slab in self._slabs.values())}
        with storage(self._directory):
            for path in set(self._directory.iterdir()) - needed:
                path.unlink()

    @property
    def _over_budget(self) -> bool:
        return sum(slab.bytes for slab in self._slabs.values()) > self.budget

    def _keep_to_budget(self) -> None:
        if self._over_budget:
            for slab in self._slabs.values():
                slab.let_go()

    def _check(self, clients: Clients, places: NDArray[Any]) -> None:
        """Compare the checksums of rows that are read back: for the first time, or from files that are not kept."""
        asked = (places["sum"] > 0) & (self._over_budget | ~places["sound"])
        for which in np.unique(places["slab"][asked]).tolist():
            here = asked & (places["slab"] == which)
            slab = self._slabs[which]
            wrong = places["sum"][here] != slab.sums(places["row"][here])
            if wrong.any():
                raise BadInput(
                    f"{slab.path}: the state of client {clients[here][wrong][0]} was damaged since it was written; put "
                    "a copy of the run directory back, or begin a new run"
                )
        self._places["sound"][clients[asked]] = True

    def _sum_up(self) -> None:
        """Have the checksums of all rows."""
        unknown = np.flatnonzero((self._places["slab"] > 0) & (self._places["sum"] == 0))
        for which, slab in self._slabs.items():
            clients = unknown[self._places["slab"][unknown] == which]
            self._places["sum"][clients] = slab.sums(self._places["row"][clients])

    def _at(self, clients: Clients) -> NDArray[Any]:
        """Return the places of clients, who may be beyond all that are known."""
        places = np.zeros(len(clients), dtype=_PLACE)
        inside = clients < len(self._places)
        places[inside] = self._places[clients[inside]]
        return places

    def _reach(self, clients: Clients) -> None:
        """Have a place for each of the clients."""
        need = int(clients.max(initial=-1)) + 1
        if need > len(self._places):
            places = np.zeros(max(need, 2 * len(self._places)), dtype=_PLACE)
            places[: len(self._places)] = self._places
            self._places = places

    def _slab_for(self, layout: Layout, rows: int) -> int:
        """Return the number of the slab for a layout; a new one begins with so many rows."""
        for which, slab in self._slabs.items():
            if slab.layout == layout:
                return which
        which = len(self._slabs) + 1
        self._slabs[which] = Slab(self._slab_file(which), layout, rows)
        return which

    def _write_index(self) -> None:
        clients = self.clients
        places = self._places[clients]
        columns = {"clients": clients, **{f"{name}s": places[name].copy() for name in ("slab", "row", "sum")}}
        layouts = {
            which: [(path, str(dtype).removeprefix("torch."), shape) for path, dtype, shape in slab.layout]
            for which, slab in self._slabs.items()
        }
        atomic_write(self._index_file(), *sealed(safetensors.numpy.save(columns, {"layouts": json.dumps(layouts)})))

    def _open(self) -> None:
        path = self._index_file()
        try:
            is_sealed(path.read_bytes())
            with safetensors.safe_open(path, framework="numpy") as file:
                clients, slabs, rows = (file.get_tensor(name) for name in ("clients", "slabs", "rows"))
                spelled = json.loads(file.metadata()["layouts"])
                sums = file.get_tensor("sums") if "sums" in file.keys() else 0  # noqa: SIM118 - it is no mapping
            layouts = {
                int(which): tuple((path, getattr(torch, dtype), tuple(shape)) for path, dtype, shape in layout)
                for which, layout in spelled.items()
            }
        except (OSError, safetensors.SafetensorError, TypeError, KeyError, ValueError, AttributeError) as error:
            raise _unreadable(path, error) from error
        self._reach(clients)
        self._places["slab"][clients], self._places["row"][clients], self._places["sum"][clients] = slabs, rows, sums
        for which, layout in layouts.items():
            self._slabs[which] = self._opened(self._slab_file(which), layout, rows[slabs == which])

    def _opened(self, path: Path, layout: Layout, used: NDArray[np.int32]) -> Slab:
        try:
            slab = Slab(path, layout)
        except (OSError, ValueError) as error:  # the latter: it is empty
            raise _unreadable(path, error) from error
        if len(slab) <= used.max(initial=-1):
            raise _unreadable(path, "it is too short")
        free = np.ones(len(slab), dtype=np.bool_)
        free[used] = False
        slab.free = slab.free[free]
        return slab

    def _index_file(self) -> Path:
        return self._directory / f"index-{self._index:06d}.safetensors"

    def _slab_file(self, number: int) -> Path:
        return self._directory / f"slab-{number}"


def _unreadable(path: Path, why: object) -> BadInput:
    return BadInput(f"{path}: the checkpoint needs this file and it cannot be read ({why}); put a copy back")
