"""What every run trains on: one table of samples and, per client, the rows that are its own."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, overload

import numpy as np
import torch
from numpy.typing import NDArray

from personafl.core.augment import UNCHANGED, Augment
from personafl.core.reading import AS_FOUND, Reading
from personafl.core.shape import DataShape, TaskName
from personafl.core.split import listed
from personafl.data.config import Moments
from personafl.data.window import Window, copied
from personafl.errors import BadInput, did_you_mean

Rows = NDArray[np.int64]
Clients = NDArray[np.int64]  # by their numbers
Split = Literal["train", "validation", "test"]

SPACE_NAME = "space"  # of the class between words, where labels are spelled


@dataclass(frozen=True, eq=False)
class Ragged:
    """One run of row numbers per client: the rows of client i are flat[offset[i]:offset[i + 1]]."""

    flat: Rows  # [rows]
    offset: Rows  # [clients + 1], rising from 0 to rows

    def __len__(self) -> int:
        return len(self.offset) - 1

    def __getitem__(self, client: int) -> Rows:
        """Return the rows of one client, as a view."""
        if not -len(self) <= client < len(self):
            raise IndexError(f"client {client} of {len(self)}")
        client %= len(self)
        return self.flat[self.offset[client] : self.offset[client + 1]]

    @property
    def sizes(self) -> Rows:
        """Rows per client, [clients]."""
        return np.diff(self.offset)

    def sizes_of(self, clients: Rows) -> Rows:
        """Rows of some clients."""
        return self.offset[clients + 1] - self.offset[clients]

    def of(self, clients: Rows) -> Rows:
        """Rows of some clients, one client after the other."""
        return self.flat[runs_of(self.offset[clients], self.sizes_of(clients))]

    def among(self, clients: Rows) -> Ragged:
        """Return the rows of some clients alone, who are 0, 1, … there."""
        return Ragged(self.of(clients), _offsets(self.sizes_of(clients)))

    @property
    def owner(self) -> Rows:
        """The client of each entry of flat, [rows]."""
        return np.repeat(np.arange(len(self)), self.sizes)

    @classmethod
    def from_lists(cls, lists: Iterable[Sequence[int] | Rows]) -> Ragged:
        """Join one list of rows per client."""
        arrays = [np.asarray(rows, dtype=np.int64) for rows in lists]
        sizes = np.array([len(rows) for rows in arrays], dtype=np.int64)
        flat = np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)
        return cls(flat, _offsets(sizes))

    @classmethod
    def from_owner(cls, rows: Rows, owner: Rows, clients: int) -> Ragged:
        """Group rows by their owner; each client's rows come out in ascending order."""
        order = np.lexsort((rows, owner))
        return cls(rows[order].astype(np.int64), _offsets(np.bincount(owner, minlength=clients)))

    def divided(self, taken: NDArray[np.bool_]) -> tuple[Ragged, Ragged]:
        """Return the entries that are not taken, [rows], and those that are."""
        parts = (Ragged.from_owner(self.flat[mask], self.owner[mask], len(self)) for mask in (~taken, taken))
        return next(parts), next(parts)

    @classmethod
    def empty(cls, clients: int) -> Ragged:
        """No rows for any client."""
        return cls(np.zeros(0, dtype=np.int64), np.zeros(clients + 1, dtype=np.int64))


def _offsets(sizes: Rows) -> Rows:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def runs_of(starts: Rows, sizes: Rows) -> Rows:
    """Return start, start + 1, …, start + size − 1 for each pair, one after the other."""
    return np.repeat(starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(sizes.sum())


class Pool(NamedTuple):
    """Samples that some clients train on, where they are computed with: client c's are rows[starts[c]:] of them."""

    x: torch.Tensor
    y: torch.Tensor
    rows: Rows
    there: torch.Tensor  # the same rows, on the device
    starts: Rows  # [clients]


@dataclass(frozen=True)
class Numbered(Sequence[str]):
    """The names of clients that have none of their own: their numbers, written when they are asked for."""

    clients: int

    def __len__(self) -> int:
        return self.clients

    @overload
    def __getitem__(self, client: int) -> str: ...

    @overload
    def __getitem__(self, client: slice) -> Sequence[str]: ...

    def __getitem__(self, client: int | slice) -> str | Sequence[str]:
        """Return the name of a client, or of some."""
        number = range(self.clients)[client]
        return tuple(map(str, number)) if isinstance(number, range) else str(number)


@dataclass(frozen=True, eq=False, repr=False)
class FederatedData:
    """A data set dealt to clients. Seen clients train; unseen ones only receive and personalize a model."""

    name: str
    x: torch.Tensor  # [samples, …] float32 (images [samples, channels, height, width] in [0, 1]) or int64 tokens
    # [samples] int64, [samples, length] int64 for next-token and ctc tasks (-1 is not scored), or [samples, classes]
    # float32 for regression and multilabel ones
    y: torch.Tensor
    classes: int  # or real numbers, or labels, of a target
    train: Ragged
    validation: Ragged
    test: Ragged
    seen: Rows  # client numbers, ascending
    unseen: Rows  # client numbers, ascending
    client_names: Sequence[str]
    label_names: tuple[str, ...]
    fingerprint: str  # sha256 of x, y and every index array
    task: TaskName  # what y means
    vocabulary: int | None = None  # tokens of x lie in [0, vocabulary); None where x is not tokens
    reading: Reading = AS_FOUND  # how another file is read alike
    notes: tuple[str, ...] = ()  # what the split left out, one sentence each
    moments: Moments | None = None  # by which x was normalised; None: it was not
    scale: Moments | None = None  # by which the targets of a regression were; None: they were not
    augment: Augment = UNCHANGED  # what training does to x, each time it sees it
    numbers: Rows | None = None  # [clients] from which each one's random draws come; None: from its place
    window: Window | None = None  # where samples are brought to be computed with; None: x and y are there

    @property
    def device(self) -> torch.device:
        """Where samples are computed with."""
        return self.x.device if self.window is None else self.window.x.device

    @property
    def axis(self) -> str:
        """What axis 1 of x is: "channel" of images and series, or "feature" of tables."""
        return "channel" if self.x.ndim > 2 else "feature"

    @property
    def clients(self) -> int:
        """The number of clients, seen and unseen."""
        return len(self.train)

    def drawing(self, clients: Clients) -> Clients:
        """Return the numbers from which the random draws of some clients come."""
        return clients if self.numbers is None else self.numbers[clients]

    @functools.cached_property
    def shape(self) -> DataShape:
        """What the data look like."""
        tokens = not self.x.is_floating_point()
        return DataShape(
            input_shape=tuple(self.x.shape[1:]),
            classes=self.classes,
            task=self.task,
            target_shape=tuple(self.y.shape[1:]),
            vocabulary=(self.vocabulary or int(self.x.max()) + 1) if tokens else None,
        )

    @functools.cached_property
    def _train_rows(self) -> torch.Tensor:
        """The rows of all clients' training data, where the data is."""
        return torch.from_numpy(self.train.flat).to(self.x.device)

    def pool(self, clients: Rows) -> Pool:
        """Return the training samples of some clients, all of them or those that are brought to the window now."""
        if self.window is None:
            return Pool(self.x, self.y, self.train.flat, self._train_rows, self.train.offset[clients])
        sizes = self.train.sizes_of(clients)
        self.window.show(self.x, self.y, self.train.of(clients))
        starts = np.cumsum(sizes) - sizes
        return Pool(self.window.x, self.window.y, np.arange(sizes.sum()), self.window.places, starts)

    def fitting(self, clients: Rows) -> Iterator[Rows]:
        """Cut clients into runs whose training samples fit the window together."""
        if self.window is None:
            yield clients
            return
        start, taken = 0, 0
        for place, size in enumerate(self.train.sizes_of(clients).tolist()):
            if taken + size > self.window.samples:
                yield clients[start:place]
                start, taken = place, 0
            taken += size
        yield clients[start:]

    def samples(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x and y of these rows, [*rows.shape, …], where they are computed with."""
        return copied(self.x, rows, self.device), copied(self.y, rows, self.device)

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: client for client, name in enumerate(self.client_names)}

    def client_number(self, name: str, where: str) -> int:
        """Return the number of the client that has a name; `where` says who asks for one that nobody has."""
        if name not in self._numbers:
            hint = did_you_mean(name, self._numbers)
            hint = hint if len(hint) < 200 else f"there are {listed(list(self._numbers))}"
            raise BadInput(f"{where} no client {name!r}; {hint}")
        return self._numbers[name]

    def label_number(self, name: str) -> int | None:
        """Return the class that has a name; None: none has."""
        return self.label_names.index(name) if name in self.label_names else None

    def rows(self, split: Split) -> Ragged:
        """Return the rows of a split by its name."""
        return {"train": self.train, "validation": self.validation, "test": self.test}[split]

    def counts(self, split: Split = "train") -> NDArray[np.int64]:
        """Count labels per client, [clients, classes]; for sequences each scored token counts."""
        rows = self.rows(split)
        label = self.y.cpu().numpy()[rows.flat]
        owner = rows.owner
        if self.task == "multilabel":
            place, label = np.nonzero(label)
            owner = owner[place]
        elif label.ndim == 2:
            scored = label >= 0
            owner = np.repeat(owner, scored.sum(axis=1))
            label = label[scored]
        cells = np.bincount(owner * self.classes + label, minlength=self.clients * self.classes)
        return cells.reshape(self.clients, self.classes)

    def __repr__(self) -> str:
        return (
            f"FederatedData({self.name!r}, samples={len(self.x)}, clients={self.clients}, "
            f"classes={self.classes}, fingerprint={self.fingerprint[:12]})"
        )

    def _repr_html_(self) -> str:
        from personafl.data.picture import data_html

        return data_html(self)


def make_federated(*, task: TaskName | None = None, **fields: Any) -> FederatedData:
    """Build a FederatedData and hash its content; the task follows from y: sequences are next tokens, unless given."""
    arrays = [fields["x"].numpy(), fields["y"].numpy(), fields["seen"], fields["unseen"]]
    for split in ("train", "validation", "test"):
        arrays += [fields[split].flat, fields[split].offset]
    task = task or ("classification" if fields["y"].ndim == 1 else "next-token")
    return FederatedData(task=task, fingerprint=_sha256(arrays), **fields)


def blank(shape: DataShape, clients: int = 0) -> FederatedData:
    """Return data of a shape, without content: all that building a network needs; clients have one sample each."""
    none = Ragged.empty(clients)
    return make_federated(
        name="shape",
        x=torch.zeros(2, *shape.input_shape, dtype=torch.float32 if shape.vocabulary is None else torch.int64),
        y=torch.full((2, *shape.target_shape), -1 if shape.whole else 0.0),
        classes=shape.classes,
        train=Ragged(np.zeros(clients, dtype=np.int64), np.arange(clients + 1)),
        validation=none,
        test=none,
        seen=np.arange(clients),
        unseen=np.zeros(0, np.int64),
        client_names=tuple(str(number) for number in range(clients)),
        label_names=(),
        vocabulary=shape.vocabulary,
        task=shape.task,
    )


def _sha256(arrays: Iterable[NDArray[np.generic]]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
