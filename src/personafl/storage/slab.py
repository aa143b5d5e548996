"""States of one layout: rows of a memory-mapped file, so that a whole cohort is put and taken at once.

A row is the number of its client and the leaves of its state, end to end; its checksum is for the owner to keep. A
disk that fails while a file is mapped ends the process, as a crash does; a full one is an error before that, for rows
are reserved.
"""

import math
import mmap
import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from personafl.errors import BadInput
from personafl.storage.files import reserve, storage, sync

Clients = NDArray[np.int64]
Rows = NDArray[np.int32]
Bytes = NDArray[np.uint8]
Sums = NDArray[np.uint32]
Entry = dict[str, Tensor]  # states, stacked or one alone, flattened to {path: tensor}
Layout = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]  # of one state: its leaves, by path

_OWNER = slice(0, 8)  # where in a row the client's number is


def layout_of(stacked: Entry) -> Layout:
    """Return how each of the stacked states is laid out."""
    return tuple((path, leaf.dtype, tuple(leaf.shape[1:])) for path, leaf in sorted(stacked.items()))


class Slab:
    """Rows for states, used or free; which row a client has is for the owner to know."""

    def __init__(self, path: Path, layout: Layout, rows: int = 0) -> None:
        """Open a file; with `rows` make a new one."""
        self.path, self.layout = path, layout
        sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in layout]
        ends = (_OWNER.stop + np.cumsum(sizes)).tolist()
        self._places = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]  # of the leaves in a row
        self.row_bytes: int = ends[-1]
        if rows:
            reserve(path, rows * self.row_bytes)
        self._map()
        self.free: Rows = np.arange(len(self), dtype=np.int32)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def bytes(self) -> int:
        """The size of the file."""
        return len(self) * self.row_bytes

    def allot(self, count: int) -> Rows:
        """Return free rows, which are no longer free; where there are too few, the file grows."""
        if count > len(self.free):
            before = len(self)
            after = max(before + count - len(self.free), before * 5 // 4)
            reserve(self.path, after * self.row_bytes)
            self._map()
            self.free = np.concatenate([self.free, np.arange(before, after, dtype=np.int32)])
        rows, self.free = self.free[:count], self.free[count:]
        return rows

    def put(self, rows: Rows, clients: Clients, stacked: Entry) -> None:
        """Write the states of clients."""
        self._rows[rows, _OWNER] = _as_bytes(torch.from_numpy(clients))
        for (path, _, _), place in zip(self.layout, self._places, strict=True):
            self._rows[rows, place] = _as_bytes(stacked[path].cpu())

    def take(self, rows: Rows, clients: Clients) -> Entry:
        """Return a copy of the states of clients, stacked."""
        if not np.array_equal(self._rows[rows, _OWNER], _as_bytes(torch.from_numpy(clients))):
            raise BadInput(f"{self.path}: the checkpoint expects other clients in this file")
        return {
            path: torch.from_numpy(self._rows[rows, place].reshape(-1)).view(dtype).reshape(len(rows), *shape)
            for (path, dtype, shape), place in zip(self.layout, self._places, strict=True)
        }

    def sums(self, rows: Rows) -> Sums:
        """Return the checksums of rows; none is 0, which stands for one that is not known."""
        return np.array([zlib.crc32(self._rows[row]) or 1 for row in rows.tolist()], dtype=np.uint32)

    def prefetch(self, rows: Rows) -> None:
        """Have the system begin to read rows, and do not wait for it."""
        for row in rows.tolist():
            begin = row * self.row_bytes // mmap.PAGESIZE * mmap.PAGESIZE
            self._memory.madvise(mmap.MADV_WILLNEED, begin, (row + 1) * self.row_bytes - begin)

    def let_go(self) -> None:
        """Leave what is mapped to the system, which keeps it in its cache as long as it likes."""
        self._memory.madvise(mmap.MADV_DONTNEED)

    def sync(self) -> None:
        """Make all rows durable."""
        with storage(self.path):
            self._memory.flush()
            sync(self.path)

    def _map(self) -> None:
        with open(self.path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        count = len(self._memory) // self.row_bytes
        self._rows: Bytes = np.frombuffer(self._memory, np.uint8, count * self.row_bytes).reshape(count, -1)


def _as_bytes(leaf: Tensor) -> Bytes:
    """Return stacked values as [rows, bytes of one]."""
    size = math.prod(leaf.shape[1:])
    plain = leaf.contiguous().as_strided((len(leaf), size), (size, 1))  # a single value may have any stride
    view: Bytes = plain.view(torch.uint8).numpy()
    return view
