"""Differential privacy of samples where batches are drawn: who has which noise, and for how long."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from personafl.core import rng, secret, tree
from personafl.core.batches import Batches, Padding, Steps, counted_steps, draw
from personafl.core.guard import Guard
from personafl.data.federated import Clients

SampleSampling = Literal["poisson", "epochs"]
Secret = Callable[[int, str, int], bytes]  # (client, phase, round) -> a key that nobody else has
ALWAYS = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class Protection:
    """What protects the samples of every client."""

    clip: float  # C
    noise: NDArray[np.float64]  # [clients] z_i
    until: Clients  # [clients] the round from which on a client's budget is spent, and it trains no more
    sampling: SampleSampling
    open: frozenset[str] = frozenset()  # phases that are not protected
    secret: Secret | None = None  # of what coins and noise are drawn; None: of the seed, which a server knows


class Protected(NamedTuple):
    """Some clients in a round: who is in which minibatch is drawn from `coins`, [clients], and noise from `keys`."""

    protection: Protection
    clients: Clients
    round: int
    coins: rng.Words
    keys: rng.Words | tuple[bytes, ...]

    @classmethod
    def of(
        cls, protection: Protection, clients: Clients, numbers: Clients, seed: int, phase: str, round_: int
    ) -> "Protected":
        """Return clients in a phase of a round; `numbers` are those that a simulation draws by."""
        if protection.secret is None:
            coins, keys = (rng.mix(seed, what, phase, round_, numbers) for what in ("batches", "noise"))
            return cls(protection, clients, round_, coins, keys)
        own = tuple(protection.secret(client, phase, round_) for client in clients.tolist())
        words = [int.from_bytes(secret.derived(key, "coins", 8), "little") for key in own]
        return cls(protection, clients, round_, np.array(words, dtype=np.uint64), own)

    def batches(
        self,
        pool: tuple[Tensor, Tensor],
        rows: NDArray[np.int64],
        starts: NDArray[np.int64],
        sizes: NDArray[np.int64],
        work: Steps,
        pace: rng.Words,
    ) -> Batches:
        """Draw as `core.batches.draw` does, or by Poisson sampling, and put the guard on."""
        steps = counted_steps(work, sizes, pace)
        if self.protection.sampling == "poisson":
            batches = drawn_by_coins(pool, rows, starts, sizes, work.batch, steps, self.coins)
            expected = np.minimum(work.batch or sizes, sizes).astype(np.float64)[:, None]
            size = np.broadcast_to(expected, (len(sizes), batches.rows.shape[1]))
        else:
            batches = draw(pool, rows, starts, sizes, work, self.coins, pace)
            size = batches.real.sum(-1).cpu().numpy().astype(np.float64)  # of a shuffle: known from n_i alone
        step = np.arange(batches.rows.shape[1])[None, :]
        taken = (step < steps[:, None]) & (self.round < self.protection.until[self.clients])[:, None]
        device = pool[0].device
        guard = Guard(
            clip=torch.full((len(sizes),), self.protection.clip, dtype=torch.float64, device=device),
            noise=tree.on(device, self.protection.noise[self.clients]),
            size=tree.on(device, np.maximum(size, 1.0)),
            key=tree.on(device, self._of_steps(step)),
            taken=tree.on(device, taken),
        )
        real = batches.real & guard.taken.unsqueeze(-1)
        return batches._replace(real=real, guard=guard, padding=Padding(gaps=not bool(taken.all())))

    def _of_steps(self, step: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the key of each step's noise [clients, steps], or the words of secret ones [clients, steps, 4]."""
        if not isinstance(self.keys, tuple):
            return rng.mix(self.keys[:, None], step).view(np.int64)
        drawn = b"".join(secret.derived(key, f"noise/{n}") for key in self.keys for n in step[0].tolist())
        return np.frombuffer(drawn, dtype="<i8").reshape(len(self.keys), step.shape[1], 4).copy()


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
