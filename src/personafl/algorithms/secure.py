"""What secure aggregation makes of uploads, for any method whose server averages changes.

K. Bonawitz et al., *Practical Secure Aggregation for Privacy-Preserving Machine Learning*, CCS 2017. Clients send
integers (`secure.fixed`) under masks that cancel in their sum, and the server has nothing but that:

    Σ_i w_i Δ_i  as  2^-s · Σ_i round(w_i · Δ_i · 2^s),   entries beyond the range cut to it

The rule here computes that sum to the bit, with every upload in the clear: a simulation has no one to hide them from.
Masks, keys and dropouts are of `secure.client` and `secure.server`, which a deployment runs.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from personafl.core.algorithm import Algorithm, Problem, Reduced, ServerRule, join, mean_dtypes
from personafl.core.tree import Params, Tree
from personafl.errors import BadInput
from personafl.secure.fixed import Grid
from personafl.secure.uploads import rounded


@dataclass(frozen=True, kw_only=True)
class FixedPointServer(ServerRule):
    """Server rule: another one's, whose uploads are summed in fixed point. The masking itself is not done."""

    needs_each: ClassVar[bool] = True
    rule: ServerRule
    grid: Grid

    def init(self, problem: Problem, start: Params, population: float) -> Tree:
        """Start as the method does."""
        return self.rule.init(problem, start, population)

    def broadcast(self, state: Any) -> Tree:
        """Send what the method sends."""
        return self.rule.broadcast(state)

    def join(self, state: Any, joined: Reduced | None, stacked: Any, weights: Tensor) -> Reduced:
        """Join uploads as the integers that are sent of them, times their weights."""
        weights = weights.to(torch.float64)
        before = 0.0 if joined is None else joined.weight
        made = join(joined, rounded(stacked, weights, self.grid), torch.ones_like(weights))
        return made._replace(weight=before + weights.sum(), dtypes=mean_dtypes(stacked))

    def update(self, state: Any, uploads: Reduced, round_: int) -> Tree:
        """Step as the method does."""
        return self.rule.update(state, uploads, round_)

    def weigh(self, problem: Problem, weights: NDArray[Any]) -> NDArray[Any]:
        """Weigh as the method does."""
        return self.rule.weigh(problem, weights)

    def told(self, state: Any) -> dict[str, float]:
        """Tell what the method tells."""
        return self.rule.told(state)

    @property
    def again(self) -> Callable[[Any], Tree] | None:
        """Step again as the method does."""
        return self.rule.again


def check_summable(algorithm: Algorithm) -> None:
    """Fail if a method's server needs more of uploads than the mean of changes."""
    if not algorithm.server.averages or algorithm.server.needs_each:
        raise BadInput(
            f"secure: what {algorithm.name}'s clients send is more than changes whose mean is all that is used, and "
            "one that is cut would not be what its client believes it sent; leave it out, or remove [secure]"
        )


def in_fixed_point(algorithm: Algorithm, grid: Grid) -> Algorithm:
    """Return the method with a server that has of uploads what secure sums give; as it is, if it sends but losses."""
    if algorithm.client.uploads._fields == ("loss",):
        return algorithm
    check_summable(algorithm)
    return dataclasses.replace(algorithm, server=FixedPointServer(rule=algorithm.server, grid=grid))
