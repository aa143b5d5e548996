"""Weights that favour clients on which the shared model does badly, for any method whose server averages changes.

T. Li, M. Sanjabi, A. Beirami, V. Smith, *Fair Resource Allocation in Federated Learning*, ICLR 2020: q-FFL minimises

    f_q(w) = Σ_k p_k / (q + 1) · F_k(w)^{q+1},

and q-FedAvg (Algorithm 2) steps, with c_k = w̄_k − w the change of client k and L = 1/η for its learning rate η, to

    w + Σ_k p_k F_k^q c_k / Σ_k p_k (F_k^q + q L F_k^{q−1} ‖c_k‖²),

which is its w − Σ Δ_k / Σ h_k with L cancelled. q = 0 is the mean; as q grows the largest loss alone counts, as in
agnostic federated learning (M. Mohri et al., ICML 2019). Numerator and denominator are sums over clients.

Deviation: F_k is the mean training loss that a client sends with its change, over the minibatches of the round; it is
the paper's F_k(w), the loss of what was received, where a client takes one step on all its data. A loss below 1e-10
counts as that.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.algorithm import Algorithm, Reduced, reduce
from personafl.core.tree import Tree
from personafl.uploads.around import AroundServer, refusal, sends_losses_alone, uses_mean_alone

_LEAST = 1e-10  # of a loss


class Favoured(NamedTuple):
    """Of uploads: Σ p_k F_k^q up_k, Σ h_k / L, and the sum of losses, times p_k."""

    up: Tree
    height: Tensor
    loss: Tensor


@dataclass(frozen=True, kw_only=True)
class FairServer(AroundServer):
    """Server rule: another one's, which is given q-FedAvg's step in place of the mean change."""

    q: float
    slope: float  # L

    def join(self, state: Any, joined: Reduced | None, stacked: Any, weights: Tensor) -> Reduced:
        """Add up what the step is made of."""
        weights = weights.to(torch.float64)
        loss = stacked.loss.to(torch.float64)
        favour = loss.clamp(min=_LEAST)
        changes = [leaf for name, leaf in tree.flatten(stacked).items() if name != "loss"]
        squares = sum((leaf.to(torch.float64).flatten(1).square().sum(1) for leaf in changes), torch.zeros_like(loss))
        part = reduce(stacked, weights * favour**self.q)
        height = part.weight + (weights * self.q * self.slope * favour ** (self.q - 1) * squares).sum()
        dtypes = Favoured(part.dtypes, torch.float64, part.dtypes.loss)  # type: ignore[arg-type]
        total = Favoured(part.total, height, (weights * loss).sum())
        found = Reduced(total, weights.sum(), len(weights), dtypes)
        return found if joined is None else joined.plus(found)

    def update(self, state: Any, uploads: Reduced, round_: int) -> Tree:
        """Give the method the step as if it were the mean."""
        have: Any = uploads.total
        total = tree.map(lambda leaf: leaf * (uploads.weight / have.height), have.up)._replace(loss=have.loss)
        return self.rule.update(state, uploads._replace(total=total, dtypes=uploads.dtypes.up), round_)


def made_fair(algorithm: Algorithm, *, q: float, slope: float) -> Algorithm:
    """Return the method with a server that steps as q-FedAvg does; as it is, if nothing is sent but losses."""
    if sends_losses_alone(algorithm):
        return algorithm
    if not uses_mean_alone(algorithm):
        raise refusal(algorithm, "fairness", "another step in its place is not what its clients believe")
    return dataclasses.replace(algorithm, server=FairServer(rule=algorithm.server, q=q, slope=slope))
