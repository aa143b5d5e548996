"""Differential privacy of samples where batches are drawn: who has which noise, and for how long."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from personafl.core import rng, tree
from personafl.core.batches import Batches, Padding, Steps, counted_steps, draw
from personafl.core.guard import Guard
from personafl.data.federated import Clients

SampleSampling = Literal["poisson", "epochs"]
ALWAYS = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class Protection:
    """What protects the samples of every client."""

    clip: float  # C
    noise: NDArray[np.float64]  # [clients] z_i
    until: Clients  # [clients] the round from which on a client's budget is spent, and it trains no more
    sampling: SampleSampling
    open: frozenset[str] = frozenset()  # phases that are not protected


class Protected(NamedTuple):
    """Some clients in a round: `keys` are those of their noise, [clients]."""

    protection: Protection
    clients: Clients
    round: int
    keys: rng.Words

    def batches(
        self,
        pool: tuple[Tensor, Tensor],
        rows: NDArray[np.int64],
        starts: NDArray[np.int64],
        sizes: NDArray[np.int64],
        work: Steps,
        keys: rng.Words,
        pace: rng.Words,
    ) -> Batches:
        """Draw as `core.batches.draw` does, or by Poisson sampling, and put the guard on."""
        steps = counted_steps(work, sizes, pace)
        if self.protection.sampling == "poisson":
            batches = drawn_by_coins(pool, rows, starts, sizes, work.batch, steps, keys)
            expected = np.minimum(work.batch or sizes, sizes).astype(np.float64)[:, None]
            size = np.broadcast_to(expected, (len(sizes), batches.rows.shape[1]))
        else:
            batches = draw(pool, rows, starts, sizes, work, keys, pace)
            size = batches.real.sum(-1).cpu().numpy().astype(np.float64)  # of a shuffle: known from n_i alone
        step = np.arange(batches.rows.shape[1])[None, :]
        taken = (step < steps[:, None]) & (self.round < self.protection.until[self.clients])[:, None]
        device = pool[0].device
        guard = Guard(
            clip=torch.full((len(sizes),), self.protection.clip, dtype=torch.float64, device=device),
            noise=tree.on(device, self.protection.noise[self.clients]),
            size=tree.on(device, np.maximum(size, 1.0)),
            key=tree.on(device, rng.mix(self.keys[:, None], step).view(np.int64)),
            taken=tree.on(device, taken),
        )
        real = batches.real & guard.taken.unsqueeze(-1)
        return batches._replace(real=real, guard=guard, padding=Padding(gaps=not bool(taken.all())))


def drawn_by_coins(
    pool: tuple[Tensor, Tensor],
    rows: NDArray[np.int64],
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    batch: int | None,
    steps: NDArray[np.int64],
    keys: rng.Words,
) -> Batches:
    """Draw minibatches into which each sample comes by a coin of its own, of chance batch/n_i (1 if that is more).

    As `core.batches.draw`; how many samples came is drawn first, then which: the same as throwing all the coins.
    """
    count = int(steps.max(initial=0))
    chosen: list[tuple[int, int, NDArray[np.int64]]] = []
    for client, (size, key) in enumerate(zip(sizes.tolist(), keys, strict=True)):
        generator, rate = rng.numpy_generator(key.reshape(()), "coins"), min(1.0, (batch or size) / max(size, 1))
        for step, many in enumerate(generator.binomial(size, rate, int(steps[client])).tolist()):
            chosen.append((client, step, generator.choice(size, many, replace=False, shuffle=False)))
    width = max((len(places) for _, _, places in chosen), default=0) or 1
    real = np.zeros((len(sizes), count, width), dtype=bool)
    place = np.zeros(real.shape, dtype=np.int64)
    for client, step, places in chosen:
        real[client, step, : len(places)] = True
        place[client, step, : len(places)] = places
    own = np.where(sizes > 0, starts, 0)[:, None, None]  # padding repeats the client's first row
    dropout = rng.mix(keys[:, None], "dropout", np.arange(count)[None, :]).view(np.int64)
    device = pool[0].device
    return Batches(*pool, tree.on(device, rows[own + place]), tree.on(device, real), tree.on(device, dropout))
