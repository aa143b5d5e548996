"""What a client trains on: batches of a shared data pool, and how they are drawn.

Data lives once, as one tensor for all clients; a client's batches are row numbers into it. Clients with less data than
others are padded: `real` says which entries count, and a step without any real entry does nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from personafl.core import rng, tree
from personafl.core.augment import UNCHANGED, Augment, augmented
from personafl.core.guard import Guard
from personafl.core.seam import replaceable


@dataclass(frozen=True, kw_only=True)
class Steps:
    """How much a client trains in one phase: whole epochs, or a number of minibatch steps. batch None = all data.

    With `least` the number is drawn for each client and round, uniformly from least, …, steps or epochs.
    """

    epochs: int | None = None
    steps: int | None = None
    batch: int | None = 32
    least: int | None = None

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give either epochs or steps")
        if self.least is not None and not 1 <= self.least <= self.most:
            raise ValueError("least must be at least 1, and at most the steps or epochs")
        if self.batch is not None and self.batch < 1:
            raise ValueError("batch must be at least 1, or None for all data")

    @property
    def most(self) -> int:
        """The number of steps or epochs, or the largest that may be drawn."""
        return self.epochs or self.steps or 0


class Batch(NamedTuple):
    """One minibatch: inputs [batch, …], targets [batch, …], which are real [batch], and the key of its random draws."""

    x: Tensor
    y: Tensor
    real: Tensor
    key: Tensor
    full: bool = False  # known to be all real
    rows: Tensor | slice | None = None  # where in the pool they are, [batch], if that is said
    guard: Guard | tuple[()] = ()  # that protects its samples

    @property
    def alive(self) -> Tensor:
        """Whether it is a step, []."""
        return self.guard.taken if self.guard else self.real.any()


class Step(Protocol):
    """What one step of training looks at."""

    @property
    def real(self) -> Tensor:
        """Which samples count."""

    @property
    def alive(self) -> Tensor:
        """Whether the step is taken, []: it is none if no sample counts, but where samples are protected."""


S_co = TypeVar("S_co", bound=Step, covariant=True)


class Stream(Protocol[S_co]):
    """What training goes through, step by step."""

    @property
    def device(self) -> torch.device:
        """Where the data is, also if there is no step."""

    def each(self) -> Iterator[S_co]:
        """Yield the steps in order."""


@tree.constant
@dataclass(frozen=True)
class Padding:
    """What is known of how clients that train together are padded; by default nothing.

    `widths` says how many samples of each step are real for some client, from the first on, and `even` whether they are
    for all of them.
    """

    gaps: bool = True  # a step may be without real samples
    widths: tuple[int, ...] = ()
    even: tuple[bool, ...] = ()
    most: int = 0  # samples of a client at most; 0: that is not known


class Batches(NamedTuple):
    """Minibatches of one client for one phase; stacked clients have one more leading axis in all but the pool."""

    pool_x: Tensor  # [samples, …], shared by all clients
    pool_y: Tensor  # [samples, …]
    rows: Tensor  # [steps, batch] of the pool
    real: Tensor  # [steps, batch]
    key: Tensor  # [steps]
    padding: Padding = Padding()
    augment: Augment = UNCHANGED  # what is done to the inputs of each step, drawn by its key
    guard: Guard | tuple[()] = ()  # that protects samples; (): nothing does

    @property
    def device(self) -> torch.device:
        """Where the data is."""
        return self.rows.device

    @property
    def alive(self) -> Tensor:
        """Which steps are taken, [steps]."""
        return self.guard.taken if self.guard else self.real.any(-1)

    @replaceable
    def each(self) -> Iterator[Batch]:
        """Yield the minibatches in order; the pool's rows are gathered when a step needs them, never before."""
        for step, (rows, real, key) in enumerate(zip(self.rows, self.real, self.key, strict=True)):
            x = self.pool_x[rows]
            x = augmented(x, key, self.augment) if self.augment else x
            yield Batch(x, self.pool_y[rows], real, key, guard=self.guard.at(step) if self.guard else ())


class Together(NamedTuple):
    """Several minibatches that one step uses."""

    parts: tuple[Batch, ...]

    @property
    def real(self) -> Tensor:
        """Whether every one of them has a real sample, []."""
        return torch.stack([batch.real.any() for batch in self.parts]).all()

    @property
    def alive(self) -> Tensor:
        """The same."""
        return self.real


@dataclass(frozen=True)
class Zipped:
    """Phases of equally many steps gone through side by side: a step has one minibatch of each."""

    phases: tuple[Batches, ...]

    def __post_init__(self) -> None:
        if any(phase.guard for phase in self.phases):
            raise ValueError("a step of several minibatches has no gradient of each sample to protect")

    @property
    def device(self) -> torch.device:
        """Where the data is."""
        return self.phases[0].device

    def each(self) -> Iterator[Together]:
        """Yield the minibatches of each step."""
        for parts in zip(*(phase.each() for phase in self.phases), strict=True):
            yield Together(parts)


@dataclass(frozen=True)
class Repeated:
    """One minibatch for several steps."""

    batch: Batch
    times: int

    def __post_init__(self) -> None:
        if self.batch.guard:
            raise ValueError("the noise of a minibatch that protects its samples is for one step")

    @property
    def device(self) -> torch.device:
        """Where the data is."""
        return self.batch.real.device

    def each(self) -> Iterator[Batch]:
        """Yield the minibatch again and again."""
        for _ in range(self.times):
            yield self.batch


class Data(NamedTuple):
    """All that a client's update may look at besides the message: its batches per phase, n_i, and the round."""

    phases: dict[str, Batches]
    examples: Tensor  # [] number of training samples n_i
    round: Tensor  # [] round number t, from 0


def drawn_work(work: Steps, pace: rng.Words) -> NDArray[np.int64]:
    """Return how many steps clients with data take, or how many epochs where `work` is counted in those, [clients]."""
    least = work.most if work.least is None else work.least
    return least + (pace % np.uint64(work.most - least + 1)).astype(np.int64)


def counted_steps(work: Steps, sizes: NDArray[np.int64], pace: rng.Words) -> NDArray[np.int64]:
    """Return how many steps clients with so many samples take, [clients]."""
    if work.epochs is None:
        return np.where(sizes > 0, drawn_work(work, pace), 0)
    return -(-sizes // (work.batch or max(int(sizes.max(initial=1)), 1))) * drawn_work(work, pace)


def counted_samples(work: Steps, sizes: NDArray[np.int64], pace: rng.Words) -> NDArray[np.int64]:
    """Return how many samples clients with so many go through, [clients]: exactly in epochs, at most in steps."""
    if work.epochs is not None:
        return sizes * drawn_work(work, pace)
    return counted_steps(work, sizes, pace) * np.minimum(sizes, work.batch or sizes)


def draw(
    pool: tuple[Tensor, Tensor],
    rows: NDArray[np.int64],
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    work: Steps,
    keys: rng.Words,
    pace: rng.Words,
) -> Batches:
    """Draw the minibatches of many clients at once, stacked: rows and real [clients, steps, batch].

    Client c owns rows[starts[c] : starts[c] + sizes[c]]; keys[c] is its randomness for this phase, pace[c] for how many
    steps it takes in all phases. Every epoch is a fresh permutation cut into batches, the last one short; `steps` goes
    through as many epochs as it takes.
    """
    largest = int(sizes.max(initial=1))
    width = min(work.batch or largest, largest)
    per_epoch = -(-sizes // width)
    steps = counted_steps(work, sizes, pace)
    step = np.arange(int(steps.max(initial=0)))
    epoch, batch = np.divmod(step[None, :], np.maximum(per_epoch, 1)[:, None])  # [clients, steps]

    position = batch[:, :, None] * width + np.arange(width)  # [clients, steps, batch] place in the permutation
    real = (position < sizes[:, None, None]) & (step[None, :, None] < steps[:, None, None])
    epochs = -(-steps // np.maximum(per_epoch, 1))  # begun, per client
    order, first = _orders(sizes, epochs, keys)
    place = first[:, None, None] + epoch[:, :, None] * sizes[:, None, None] + position
    own = np.where(sizes > 0, starts, 0)[:, None, None]  # padding repeats the client's first row
    index = rows[own + np.where(real, order[np.where(real, place, 0)], 0)]
    dropout = rng.mix(keys[:, None], "dropout", step[None, :]).view(np.int64)
    device = pool[0].device
    return Batches(*pool, tree.on(device, index), tree.on(device, real), tree.on(device, dropout))


def _orders(
    sizes: NDArray[np.int64], epochs: NDArray[np.int64], keys: rng.Words
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return all shuffles end to end, and where each client's begin: its epoch e is at first + e·size.

    Only the epochs a client begins are drawn: a small client may go through hundreds while a large one is in its first.
    """
    first = np.cumsum(epochs * sizes) - epochs * sizes
    order = np.zeros(int((epochs * sizes).sum()) + 1, dtype=np.int64)  # + 1: there is a place 0 even without any data
    for e in range(int(epochs.max(initial=0))):
        who = np.flatnonzero(epochs > e)
        shuffled = rng.permutations(sizes[who], rng.mix(keys[who], "epoch", e))
        position = np.arange(shuffled.shape[1])
        inside = position < sizes[who, None]
        order[((first + e * sizes)[who, None] + position)[inside]] = shuffled[inside]
    return order, first
