"""Personal states of all clients: in memory up to a budget, beyond it on disk.

A log of immutable segments, each a safetensors file with the states of many clients, stacked per shape. A client's
newest state is where the index says; a checkpoint names the index, so a crash between two checkpoints leaves segments
that nobody refers to, which are removed at the next start. Clients that never took part cost nothing.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from personafl.errors import BadInput
from personafl.runs.files import atomic_write, storage

__all__ = ["Store"]

Entry = dict[str, Tensor]  # a state, flattened to {path: tensor}


class Store:
    """Keeps one flattened state per client.

    `put` and `get` by client number; `flush` makes all states durable and returns the index to put into a checkpoint;
    `collect` removes what that checkpoint, once it is committed, no longer needs.
    """

    def __init__(self, directory: Path, budget: int, index: dict[int, int] | None = None) -> None:
        self._directory = directory
        self._budget = budget
        self._index = dict(index or {})  # client -> segment of its newest durable state
        self._rows: dict[int, dict[int, tuple[str, int]]] = {}  # segment -> client -> (group, row)
        self._memory: OrderedDict[int, Entry] = OrderedDict()  # least recently used first
        self._unsaved: set[int] = set()
        self._held = 0  # bytes in memory
        with storage(directory):
            directory.mkdir(exist_ok=True)
        self.collect()
        self._next = max(self._index.values(), default=-1) + 1

    def __contains__(self, client: int) -> bool:
        return client in self._memory or client in self._index

    def __len__(self) -> int:
        return len(self._index.keys() | self._memory.keys())

    def get(self, client: int) -> Entry:
        """Return a client's state."""
        if client in self._memory:
            self._memory.move_to_end(client)
            return self._memory[client]
        entry = self._read(client)
        self._remember(client, entry)
        self._fit()
        return entry

    def put(self, clients: Sequence[int], stacked: Entry) -> None:
        """Replace the states of several clients, given stacked."""
        for row, client in enumerate(clients):
            self._remember(client, {path: _own(leaf[row]) for path, leaf in stacked.items()})
            self._unsaved.add(client)
        self._fit()

    def flush(self) -> dict[int, int]:
        """Write all unsaved states and return the index."""
        self._save()
        stored = sum(len(self._directory_of(segment)) for segment in set(self._index.values()))
        if stored > 2 * len(self._index):
            self._compact()
        return dict(self._index)

    def collect(self) -> None:
        """Remove the segments that the index does not refer to; call it after the index is committed."""
        live = {self._segment(number) for number in set(self._index.values())}
        with storage(self._directory):
            for path in set(self._directory.iterdir()) - live:
                path.unlink()
        self._rows = {number: rows for number, rows in self._rows.items() if self._segment(number) in live}

    def _remember(self, client: int, entry: Entry) -> None:
        self._held += _bytes(entry) - _bytes(self._memory.get(client, {}))
        self._memory[client] = entry
        self._memory.move_to_end(client)

    def _fit(self) -> None:
        """Beyond the budget, bring memory well under it: make all durable, then forget the least recently used."""
        if self._held <= self._budget:
            return
        self._save()
        while self._held > self._budget // 2 and self._memory:
            _, entry = self._memory.popitem(last=False)
            self._held -= _bytes(entry)

    def _save(self) -> None:
        self._write({client: self._memory[client] for client in sorted(self._unsaved)})
        self._unsaved.clear()

    def _write(self, states: dict[int, Entry]) -> None:
        """Write one segment: per shape of state, the client numbers and the stacked tensors."""
        if not states:
            return
        groups: dict[tuple[tuple[str, torch.dtype, torch.Size], ...], list[int]] = {}
        for client, entry in states.items():
            shape = tuple((path, leaf.dtype, leaf.shape) for path, leaf in entry.items())
            groups.setdefault(shape, []).append(client)
        named: dict[str, Tensor] = {}
        rows: dict[int, tuple[str, int]] = {}
        for number, (shape, members) in enumerate(groups.items()):
            named[f"{number}#clients"] = torch.tensor(members)
            for path, _, _ in shape:
                named[f"{number}/{path}"] = torch.stack([states[client][path] for client in members])
            rows |= {client: (str(number), row) for row, client in enumerate(members)}
        atomic_write(self._segment(self._next), safetensors.torch.save(named))
        self._rows[self._next] = rows
        self._index.update(dict.fromkeys(states, self._next))
        self._next += 1

    def _read(self, client: int) -> Entry:
        number = self._index[client]
        rows = self._directory_of(number)
        if client not in rows:
            raise BadInput(f"{self._segment(number)}: the checkpoint expects client {client} in this file")
        group, row = rows[client]
        prefix = f"{group}/"
        with self._opened(number) as segment:
            names = [name for name in segment.keys() if name.startswith(prefix)]  # noqa: SIM118 - not a dict
            return {name.removeprefix(prefix): segment.get_slice(name)[row] for name in names}

    def _directory_of(self, number: int) -> dict[int, tuple[str, int]]:
        if number not in self._rows:
            with self._opened(number) as segment:
                lists = {
                    name.removesuffix("#clients"): segment.get_tensor(name).tolist()
                    for name in segment.keys()  # noqa: SIM118 - not a dict
                    if "/" not in name  # the others are GROUP/PATH
                }
            self._rows[number] = {c: (group, row) for group, members in lists.items() for row, c in enumerate(members)}
        return self._rows[number]

    @contextlib.contextmanager
    def _opened(self, number: int) -> Iterator[Any]:
        path = self._segment(number)
        try:
            with safetensors.safe_open(path, framework="pt") as segment:
                yield segment
        except (OSError, safetensors.SafetensorError) as error:
            raise BadInput(f"{path}: the checkpoint needs this file and it cannot be read ({error})") from error

    def _compact(self) -> None:
        """Write all states anew, in segments of half the budget."""
        batch: dict[int, Entry] = {}
        held = 0
        for client in sorted(self._index):
            batch[client] = self._memory[client] if client in self._memory else self._read(client)
            held += _bytes(batch[client])
            if held > self._budget // 2:
                self._write(batch)
                batch, held = {}, 0
        self._write(batch)

    def _segment(self, number: int) -> Path:
        return self._directory / f"segment-{number:08d}.safetensors"


def _own(leaf: Tensor) -> Tensor:
    """Return a copy that does not hold on to the whole stack, laid out as it comes back from disk."""
    return leaf.clone(memory_format=torch.contiguous_format)


def _bytes(entry: Entry) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in entry.values())
