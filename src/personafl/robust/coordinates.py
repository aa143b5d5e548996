"""Rules that look at one coordinate at a time.

D. Yin et al., *Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates*, ICML 2018 (median, trimmed
mean); C. Xie et al., *Generalized Byzantine-tolerant SGD*, 2018 (mean around the median). All hold for n ≥ 2f + 1.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from personafl.robust.rule import Rule, nearest


def median_of(rows: Tensor) -> Tensor:
    """Return the median of each column; of an even number of values, the middle between the two in the middle."""
    ordered, count = in_order(rows), len(rows)
    return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2


def in_order(rows: Tensor) -> Tensor:
    """Return the values of each column in rising order. On a CPU numpy's sort of rows takes a tenth of torch's."""
    if rows.is_cuda:
        return rows.sort(dim=0).values
    return torch.from_numpy(np.sort(rows.T.contiguous().numpy(), axis=1)).T


def mean_around(rows: Tensor, centre: Tensor, count: int) -> Tensor:
    """Return the mean of the `count` values of each column that are nearest to a centre of it."""
    places = nearest((rows - centre).abs().T, count).T
    return rows.gather(0, places).mean(0)


@dataclass(frozen=True, kw_only=True)
class Median(Rule):
    """The median of each coordinate. It needs no f, and holds while the honest are more than the hostile."""

    by_distance: ClassVar[bool] = False

    def reduce(self, rows: Tensor) -> Tensor:
        """Return the medians."""
        return median_of(rows)


@dataclass(frozen=True, kw_only=True)
class TrimmedMean(Rule):
    """The mean of each coordinate without its f largest and its f smallest values."""

    by_distance: ClassVar[bool] = False

    def reduce(self, rows: Tensor) -> Tensor:
        """Return the means of what is left."""
        return in_order(rows)[self.f : len(rows) - self.f].mean(0)


@dataclass(frozen=True, kw_only=True)
class Meamed(Rule):
    """The mean of the n − f values of each coordinate that are nearest to their median."""

    by_distance: ClassVar[bool] = False

    def reduce(self, rows: Tensor) -> Tensor:
        """Return the means around the medians."""
        return mean_around(rows, median_of(rows), len(rows) - self.f)
