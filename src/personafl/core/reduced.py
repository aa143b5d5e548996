"""What a server is given of a round's uploads: sums, joined in any order."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.seam import replaceable
from personafl.core.tree import Tree


class Reduced(NamedTuple):
    """Σ weightᵢ·upᵢ, Σ weightᵢ and the number of uploads: a commutative monoid, joined with `plus`.

    Sums are kept in float64, so groups, chunks and machines may join in any order without the result moving. The mean
    of a field of real numbers has its dtype; that of integers or booleans is a real number, and stays in float64.
    """

    total: Tree
    weight: Tensor
    clients: int
    dtypes: Tree  # of the mean, one for each leaf of the total

    def plus(self, other: Reduced) -> Reduced:
        """Join the uploads of two groups."""
        return Reduced(
            tree.add(self.total, other.total), self.weight + other.weight, self.clients + other.clients, self.dtypes
        )

    def mean(self) -> Any:
        """Return Σ weightᵢ·upᵢ / Σ weightᵢ."""
        return tree.map(self._mean, self.total, self.dtypes)

    def loss(self) -> float:
        """Return the mean of the uploads' losses."""
        total, dtypes = self.total, self.dtypes
        return float(self._mean(total.loss, dtypes.loss))

    def _mean(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        return (total / self.weight).to(dtype)


def reduce(stacked: Tree, weights: Tensor) -> Reduced:
    """Reduce stacked uploads [clients, …] by weights [clients]."""
    weights = weights.to(torch.float64)
    total = tree.map(lambda leaf: weighted_sum(weights, leaf), stacked)
    return Reduced(total, weights.sum(), len(weights), mean_dtypes(stacked))


def mean_dtypes(uploads: Tree) -> Tree:
    """Return the dtype that the mean of each leaf has."""
    return tree.map(lambda leaf: leaf.dtype if leaf.is_floating_point() else torch.float64, uploads)


def join(joined: Reduced | None, stacked: Tree, weights: Tensor) -> Reduced:
    """Reduce stacked uploads onto what is joined so far; those of one or two clients in its memory."""
    if joined is None or weights.is_cuda or len(weights) > 2:
        part = reduce(stacked, weights)
        return part if joined is None else joined.plus(part)
    weights = weights.to(torch.float64)
    for row, weight in enumerate(weights.tolist()):
        tree.map(lambda total, leaf: tree.accumulate(total, leaf[row], weight), joined.total, stacked)  # noqa: B023
    return joined._replace(weight=joined.weight + weights.sum(), clients=joined.clients + len(weights))


@replaceable
def weighted_sum(weights: Tensor, stacked: Tensor) -> Tensor:
    """Return Σ_i weights_i · stacked_i in float64."""
    total: Tensor = torch.tensordot(weights, stacked.to(torch.float64), dims=1)
    return total
