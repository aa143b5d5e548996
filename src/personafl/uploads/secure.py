"""What secure aggregation makes of uploads, for any method whose server averages changes.

K. Bonawitz et al., *Practical Secure Aggregation for Privacy-Preserving Machine Learning*, CCS 2017. Clients send
integers (`secure.fixed`) under masks that cancel in their sum, and the server has nothing but that:

    Σ_i w_i Δ_i  as  2^-s · Σ_i round(w_i · Δ_i · 2^s),   entries beyond the range cut to it

The rule here computes that sum to the bit, with every upload in the clear: a simulation has no one to hide them from.
Masks, keys and dropouts are of `secure.client` and `secure.server`, which a deployment runs.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from personafl.core.algorithm import Algorithm, Reduced, join, mean_dtypes
from personafl.secure.fixed import Grid
from personafl.secure.uploads import rounded
from personafl.uploads.around import AroundServer, refusal, sends_losses_alone


@dataclass(frozen=True, kw_only=True)
class FixedPointServer(AroundServer):
    """Server rule: another one's, whose uploads are summed in fixed point. The masking itself is not done."""

    grid: Grid

    def join(self, state: Any, joined: Reduced | None, stacked: Any, weights: Tensor) -> Reduced:
        """Join uploads as the integers that are sent of them, times their weights."""
        weights = weights.to(torch.float64)
        before = 0.0 if joined is None else joined.weight
        made = join(joined, rounded(stacked, weights, self.grid), torch.ones_like(weights))
        return made._replace(weight=before + weights.sum(), dtypes=mean_dtypes(stacked))


def check_summable(algorithm: Algorithm) -> None:
    """Fail if a method's server needs more of uploads than the mean of changes."""
    if not algorithm.server.averages or algorithm.server.needs_each:
        raise refusal(algorithm, "secure", "one that is cut would not be what its client believes it sent")


def in_fixed_point(algorithm: Algorithm, grid: Grid) -> Algorithm:
    """Return the method with a server that has of uploads what secure sums give; as it is, if it sends but losses."""
    if sends_losses_alone(algorithm):
        return algorithm
    check_summable(algorithm)
    return dataclasses.replace(algorithm, server=FixedPointServer(rule=algorithm.server, grid=grid))
