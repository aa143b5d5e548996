"""Hostile clients of a simulation: who they are, and what they send in place of what they trained.

They train as all do, and know what the honest send in a round: what is worst for a server to meet. With h_i the honest
uploads of the round (all but their losses), u what the hostile client has trained, and s the strength,

    sign-flip   −s u                                   random      N(0, s² I)
    scale       s u                                    free-rider  N(0, s² I), and without a strength 0
    ipm         −s mean(h)    (Xie et al., UAI 2019)   mimic       h of the honest client with the lowest number
    alie        mean(h) + s std(h), by coordinates     infinity    ∞
                (Baruch et al., NeurIPS 2019)
    inflate     u, with s times as many samples claimed

optimal-ipm and optimal-alie know the server too: in every round they take the s, at most the strength, after which what
the server sends is farthest from what it would send if they had sent mean(h) (V. Shejwalkar & A. Houmansadr, NDSS
2021). They look for it as byzfl does: from 0 in steps that double while it gets worse, then in steps that shrink.

In the other kinds it is the data that are hostile: label-flip trains on K − 1 − y of K classes, label-noise on random
labels, and both send what comes of that. Ditto's A1 is label-noise, A2 random, and A3, which is "replace", s u after
label-noise (T. Li et al., ICML 2021). A backdoor trains on samples of which half have a trigger and the target's label,
and sends s u (E. Bagdasaryan et al., AISTATS 2020). Where a round has no honest client, the kinds that need one send 0.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from personafl.core import rng, tree, wire
from personafl.core.tree import Tree
from personafl.data.federated import Clients, Ragged
from personafl.recipe.attack import AttackKind

OF_LABELS = ("label-flip", "label-noise", "replace")
AS_TRAINED = ("label-flip", "label-noise", "inflate")
OPTIMAL: dict[str, AttackKind] = {"optimal-ipm": "ipm", "optimal-alie": "alie"}
STRENGTHS: dict[str, float] = {"replace": 10.0, "scale": 10.0, "inflate": 1e6, "ipm": 2.0, "alie": 1.5, "free-rider": 0}
STRENGTHS |= dict.fromkeys(OPTIMAL, 1e6)
_TRIALS, _FIRST, _SHRINK = 20, 10.0, 0.8  # of the search for the optimal strength
Chunks = Iterable[tuple[Clients, Tree]]  # clients, and their uploads, stacked


@dataclass(frozen=True, eq=False)
class Attack:
    """Who is hostile, [clients], and how."""

    kind: AttackKind
    hostile: NDArray[np.bool_]
    strength: float
    seed: int
    triggered: Ragged | None = None  # of a backdoor: samples of honest clients with its trigger, and its target's label

    def claimed(self, clients: Clients, samples: Clients) -> NDArray[Any]:
        """Return how many samples clients say they have."""
        if self.kind != "inflate":
            return samples
        return np.where(self.hostile[clients], self.strength * samples, samples)

    def sent(self, trained: Chunks, number: int, model: Callable[[Chunks], Tree]) -> Iterator[tuple[Clients, Tree]]:
        """Yield what clients send in a round, given what they trained; `model` is what a server makes of uploads."""
        if self.kind in AS_TRAINED:
            yield from trained
            return
        chunks = [(clients, wire.dense_each(uploads)) for clients, uploads in trained]
        if self.kind in OPTIMAL:
            yield from replace(self, kind=OPTIMAL[self.kind], strength=self._worst(chunks, number, model)).forged(
                chunks, number
            )
        else:
            yield from self.forged(chunks, number)

    def _worst(self, chunks: Chunks, number: int, model: Callable[[Chunks], Tree]) -> float:
        """Return the strength of the most harm."""
        wanted = tree.leaves(model(replace(self, kind="alie", strength=0.0).forged(chunks, number)))

        def harm(strength: float) -> float:
            tried = replace(self, kind=OPTIMAL[self.kind], strength=strength).forged(chunks, number)
            pairs = zip(tree.leaves(model(tried)), wanted, strict=True)
            return float(sum(((a.double() - b.double()) ** 2).sum() for a, b in pairs))

        return worst_strength(harm, self.strength)

    def forged(self, chunks: Chunks, number: int) -> Iterator[tuple[Clients, Tree]]:
        """Yield what clients send, given chunks of what they trained."""
        chunks = list(chunks)
        if not chunks:
            return
        numbers = np.concatenate([clients for clients, _ in chunks])
        names = [name for name in tree.flatten(chunks[0][1]) if name != "loss"]
        new: list[dict[str, Tensor]] = [dict(tree.flatten(uploads)) for _, uploads in chunks]
        for name in names:
            leaf = torch.cat([flat[name] for flat in new])
            leaf = self._forged(leaf, numbers, f"{number}/{name}")
            begin = 0
            for flat, (clients, _) in zip(new, chunks, strict=True):
                flat[name], begin = leaf[begin : begin + len(clients)], begin + len(clients)
        for (clients, uploads), flat in zip(chunks, new, strict=True):
            yield clients, tree.unflatten(uploads, flat)

    def _forged(self, leaf: Tensor, clients: Clients, site: str) -> Tensor:
        """Return one leaf of all uploads, [clients, …], with those of the hostile as they send them."""
        hostile = torch.from_numpy(self.hostile[clients]).to(leaf.device)
        forged = leaf.clone()
        if self.kind in ("random", "free-rider"):
            for place in hostile.nonzero().flatten().tolist():
                generator = rng.generator(self.seed, "attack", site, int(clients[place]))
                noise = torch.randn(leaf.shape[1:], generator=generator, dtype=torch.float64)
                forged[place] = (self.strength * noise).to(leaf)
            return forged
        forged[hostile] = self._alike(leaf, hostile, clients).to(leaf.dtype)
        return forged

    def _alike(self, leaf: Tensor, hostile: Tensor, clients: Clients) -> Tensor:
        """Return what the hostile send of a leaf, where nothing is drawn: one for all, or one for each."""
        if self.kind == "sign-flip":
            return -self.strength * leaf[hostile]
        if self.kind in ("scale", "replace", "backdoor"):
            return self.strength * leaf[hostile]
        if self.kind == "infinity":
            return torch.full_like(leaf[hostile], torch.inf)
        honest = leaf[~hostile].to(torch.float64)
        if not len(honest):
            return torch.zeros_like(leaf[hostile])
        if self.kind == "mimic":
            return honest[int(np.argmin(clients[~self.hostile[clients]]))]
        if self.kind == "ipm":
            return -self.strength * honest.mean(0)
        assert self.kind == "alie"
        mean = honest.mean(0)  # torch's std of few long rows takes several times as long
        return mean + self.strength * (honest - mean).square().sum(0).div(max(1, len(honest) - 1)).sqrt()


def worst_strength(harm: Callable[[float], float], most: float) -> float:
    """Return the strength, from 0 to the most there may be, of the most harm that 20 trials find."""
    best, worst, step, growing = 0.0, harm(0.0), _FIRST, True
    for _ in range(_TRIALS - 1):
        strength = min(best + step, most)
        found = harm(strength)
        growing = growing and found > worst
        if found > worst:
            best, worst = strength, found
        step *= 2 if growing else _SHRINK
    return best
