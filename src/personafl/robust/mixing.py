"""What is done with vectors before a rule, so that it holds where honest ones differ.

Each new vector is a sum of old ones. Rules that follow are held to as many vectors as they are given: f hostile ones
may be in f of the new ones of bucketing, and of those there are fewer.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from personafl.core import rng
from personafl.errors import BadInput
from personafl.robust.rule import Mix, mean_of, nearest, squared_distances


@dataclass(frozen=True, kw_only=True)
class NearestNeighbours(Mix):
    """Nearest-neighbour mixing: each vector becomes the mean of its n − f nearest, itself among them.

    Y. Allouah et al., *Fixing by Mixing: A Recipe for Optimal Byzantine ML under Heterogeneity*, AISTATS 2023.
    """

    def mix(self, gram: Tensor, key: int) -> Tensor:
        """Return the weights of the means."""
        return mean_of(nearest(squared_distances(gram), len(gram) - self.f), len(gram))


@dataclass(frozen=True, kw_only=True)
class Bucketing(Mix):
    """The means of buckets of `size` vectors in random order; the last one may be smaller.

    S. P. Karimireddy et al., *Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing*, ICLR 2022.
    """

    size: int = 2

    def mix(self, gram: Tensor, key: int) -> Tensor:
        """Return the weights of the means."""
        n = len(gram)
        order = torch.from_numpy(rng.permutations(np.array([n]), np.array([key], dtype=np.uint64))[0])
        weights = torch.zeros(math.ceil(n / self.size), n, dtype=torch.float64)
        for row, weighed in enumerate(weights):
            members = order[row * self.size : (row + 1) * self.size]
            weighed[members] = 1 / len(members)
        return weights


@dataclass(frozen=True, kw_only=True)
class Clip(Mix):
    """Static clipping: vectors longer than `norm` are shortened to it."""

    norm: float = 1.0

    def check(self, n: int) -> None:
        """Do it with however many."""
        if not self.norm > 0:
            raise BadInput(f"robust.clip: {self.norm:g} leaves nothing of any upload; give a norm above 0")

    def mix(self, gram: Tensor, key: int) -> Tensor:
        """Return the factors, as a diagonal."""
        return torch.diag(factors(gram.diagonal().clamp(min=0).sqrt(), self.norm))


@dataclass(frozen=True, kw_only=True)
class Arc(Mix):
    """Adaptive robust clipping: the ⌊2 (f/n) (n − f)⌋ longest are shortened to the length of the next one.

    Y. Allouah et al., *Adaptive Gradient Clipping for Robust Federated Learning*, ICLR 2025.
    """

    def mix(self, gram: Tensor, key: int) -> Tensor:
        """Return the factors, as a diagonal."""
        n = len(gram)
        norms = gram.diagonal().clamp(min=0).sqrt()
        cut = 2 * self.f * (n - self.f) // n
        return torch.diag(factors(norms, float(norms.sort().values[n - cut - 1])))


def factors(norms: Tensor, most: float) -> Tensor:
    """Return min(1, most / norm)."""
    return torch.where(norms > most, most / norms, torch.ones_like(norms))
