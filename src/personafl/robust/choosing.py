"""Rules that choose among the vectors: those that are near to others, or close together.

Krum's score is over the n − f nearest vectors, itself included, as in Y. Allouah et al., *Fixing by Mixing*, AISTATS
2023, under which it holds for n ≥ 2f + 1; P. Blanchard et al., who proposed it, take n − f − 2 others (NeurIPS 2017).
Bulyan has that of Blanchard.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from personafl.errors import BadInput
from personafl.robust.coordinates import mean_around, median_of
from personafl.robust.rule import Rule, mean_of, nearest, squared_distances

MOST_SUBSETS = 200_000  # that are gone through in a round
_AT_ONCE = 2048
_ALIKE = 1e-9


def scores(distances: Tensor, others: int) -> Tensor:
    """Return the sum of the squared distances of each vector to its nearest `others`."""
    return distances.sort(dim=1).values[:, 1 : 1 + max(0, others)].sum(1)


@dataclass(frozen=True, kw_only=True)
class Krum(Rule):
    """The vector with the least Σ ‖x_i − x‖² over its n − f nearest, itself among them."""

    def mix(self, gram: Tensor) -> Tensor:
        """Choose it."""
        n = len(gram)
        return mean_of(nearest(scores(squared_distances(gram), n - self.f - 1)[None], 1), n)


@dataclass(frozen=True, kw_only=True)
class MultiKrum(Rule):
    """The mean of the n − f vectors with the least scores of Krum's."""

    def mix(self, gram: Tensor) -> Tensor:
        """Choose them."""
        n = len(gram)
        return mean_of(nearest(scores(squared_distances(gram), n - self.f - 1)[None], n - self.f), n)


@dataclass(frozen=True, kw_only=True)
class Monna(Rule):
    """The mean of the n − f vectors nearest to a trusted one, itself among them.

    S. Farhadkhani et al., *Robust Collaborative Learning with Linear Gradient Overhead*, ICML 2023. It is for peers,
    each of which trusts itself: a server that trusts nobody has no use for it.
    """

    trusted: int = 0

    def check(self, n: int) -> None:
        """Fail if the trusted one is not among them, too."""
        super().check(n)
        if not 0 <= self.trusted < n:
            raise BadInput(f"robust: Monna trusts vector {self.trusted}, and there are {n}; name one of 0 to {n - 1}")

    def mix(self, gram: Tensor) -> Tensor:
        """Choose them."""
        n = len(gram)
        return mean_of(nearest(squared_distances(gram)[self.trusted][None], n - self.f), n)


@dataclass(frozen=True, kw_only=True)
class _OfSubsets(Rule):
    """Base of rules that go through all sets of n − f vectors and take the mean of the first that is best."""

    def check(self, n: int) -> None:
        """Fail if there are too many, too."""
        super().check(n)
        if (many := math.comb(n, self.f)) > MOST_SUBSETS:
            raise BadInput(
                f"robust: {type(self).__name__} goes through all {many:,} sets of {n - self.f} of {n} uploads, and "
                f"{MOST_SUBSETS:,} are the most; lower robust.f, or take trimmed-mean with nnm"
            )

    def cost(self, gram: Tensor, sets: Tensor) -> Tensor:
        """Return how bad sets of vectors are, [sets], given their places [sets, n − f]."""
        raise NotImplementedError

    def mix(self, gram: Tensor) -> Tensor:
        """Choose the first set that is best; sets may share the pair that makes their cost, which rounding parts."""
        n = len(gram)
        costs = torch.cat([self.cost(gram, sets) for sets in subsets(n, n - self.f)])
        place = int((costs <= costs.min() * (1 + _ALIKE)).nonzero()[0])
        best = next(itertools.islice(itertools.combinations(range(n), n - self.f), place, None))
        return mean_of(torch.tensor(best)[None], n)


def subsets(n: int, size: int) -> Iterator[Tensor]:
    """Yield all sets of so many of n places, in lexicographic order, some [sets, size] at a time."""
    every = itertools.combinations(range(n), size)
    while some := list(itertools.islice(every, _AT_ONCE)):
        yield torch.tensor(some, dtype=torch.int64).reshape(len(some), size)


@dataclass(frozen=True, kw_only=True)
class Mda(_OfSubsets):
    """Minimum diameter averaging: the mean of the n − f vectors whose largest distance is least.

    E. M. El Mhamdi et al., *Distributed Momentum for Byzantine-resilient Learning*, ICLR 2021. Holds for n ≥ 2f + 1.
    """

    def cost(self, gram: Tensor, sets: Tensor) -> Tensor:
        """Return squared diameters."""
        return squared_distances(gram)[sets[:, :, None], sets[:, None, :]].amax((1, 2))


@dataclass(frozen=True, kw_only=True)
class Smea(_OfSubsets):
    """Smallest maximum eigenvalue averaging: the mean of the n − f vectors whose covariance has the least norm.

    Y. Allouah et al., *On the Privacy-Robustness-Utility Trilemma in Distributed Learning*, ICML 2023. The covariance
    Σ_S = 1/|S| Σ (x_i − μ)(x_i − μ)ᵀ has the eigenvalues of the centred Gram matrix over |S|, so these are exact. Holds
    for n ≥ 2f + 1.
    """

    def cost(self, gram: Tensor, sets: Tensor) -> Tensor:
        """Return the largest eigenvalues of the covariances."""
        parts = gram[sets[:, :, None], sets[:, None, :]]
        centred = parts - parts.mean(1, keepdim=True) - parts.mean(2, keepdim=True) + parts.mean((1, 2), keepdim=True)
        values: Tensor = torch.linalg.eigvalsh(centred)
        return values[:, -1] / sets.shape[1]


@dataclass(frozen=True, kw_only=True)
class Bulyan(Rule):
    """Of n − 2f vectors that Krum takes one after the other, the mean of the n − 4f values nearest to each median.

    E. M. El Mhamdi et al., *The Hidden Vulnerability of Distributed Learning in Byzantium*, ICML 2018: holds for
    n ≥ 4f + 3. With m vectors left, Krum's score is over the m − f − 2 nearest others.
    """

    @property
    def least(self) -> int:
        """4f + 3."""
        return 4 * self.f + 3

    def mix(self, gram: Tensor) -> Tensor:
        """Choose the vectors."""
        n, distances = len(gram), squared_distances(gram)
        left, taken = list(range(n)), list[int]()
        for _ in range(n - 2 * self.f):
            among = distances[left][:, left]
            place = int(nearest(scores(among, len(left) - self.f - 2)[None], 1))
            taken.append(left.pop(place))
        return mean_of(torch.tensor(taken)[:, None], n)

    def reduce(self, rows: Tensor) -> Tensor:
        """Return the means around the medians of what was chosen."""
        return mean_around(rows, median_of(rows), len(rows) - 2 * self.f)
