"""FedEM: every client's data are a mixture of K laws, with a shared model of each; clients learn their own mixtures.

O. Marfoq et al., *Federated Multi-Task Learning under a Mixture of Distributions*, NeurIPS 2021, Algorithm 1. Client i
has weights π_i of the K components, 1/K at first; ℓ_k(s) is the loss of the received model w_k on sample s.

    E-step:    q_k(s) ∝ π_ik exp(−ℓ_k(s))
    M-step:    π_ik ← mean over samples of q_k(s)
               w_k,i ← τ steps of SGD on the mean over samples of q_k(s) ℓ(w_k,i; s), from w_k, for each k
    server:    w_k ← Σ_i p_i w_k,i

K = 1 is FedAvg. A newcomer learns π_i alone, by `tune_rounds` of both steps with the models fixed.

Deviations: a client's model is the component of its largest weight, one network as large as any other; the paper mixes
predictions, Σ_k π_ik h_k(x). The two are one where clients come in groups. q is computed without dropout. Starts differ
by the order of their weights' entries (`slots`).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from personafl.algorithms.averaging import PLAIN_MEAN, Averaging, Change, Model, Shared
from personafl.algorithms.personal import retrained
from personafl.algorithms.slots import SlotsClient, chosen, looked_at, losses_of, slots
from personafl.algorithms.training import Count, Training
from personafl.core import tree
from personafl.core.algorithm import Algorithm, Problem
from personafl.core.batches import Batch, Data
from personafl.core.descend import descent
from personafl.core.losses import mean_of_real
from personafl.core.optim import OptimizerSpec
from personafl.core.tree import Params


class Mixture(NamedTuple):
    """State of a client: its weights π_i. They never leave the device."""

    weights: Tensor  # [K]


@dataclass(frozen=True, kw_only=True)
class EmClient(SlotsClient):
    """Client rule: say which component each sample is of, and train all of them so."""

    tune_rounds: int = 10

    def init(self, problem: Problem, down: Model, generator: torch.Generator) -> Mixture:
        """π_i = 1/K."""
        return Mixture(tree.leaves(down.model)[0].new_full((self.count,), 1 / self.count))

    def update(self, problem: Problem, down: Model, state: Mixture, data: Data) -> tuple[Mixture, Change]:
        """One E-step and one M-step."""

        def objective(models: Params, batch: Batch) -> Tensor:
            known = losses_of(problem, down.model, batch._replace(key=None)).detach()  # type: ignore[arg-type]
            return mean_of_real((shares(state.weights, known) * losses_of(problem, models, batch)).sum(-1), batch)

        weights = stepped(state.weights, *looked_at(problem, down.model, data.phases["look"]))
        optimizer = self.training.optimizer.at(data.round)
        return Mixture(weights), Change(*descent(objective, down.model, data.phases["local"], optimizer))

    def personalize(self, problem: Problem, down: Model, state: Mixture, data: Data) -> Mixture:
        """Learn π_i."""
        weights, seen = state.weights, looked_at(problem, down.model, data.phases["tune"])
        for _ in range(self.tune_rounds):
            weights = stepped(weights, *seen)
        return Mixture(weights)

    def models(self, problem: Problem, down: Model, state: Mixture) -> dict[str, Params]:
        """Return the component of the largest weight; there is no model for all."""
        return {"personal": chosen(down.model, state.weights.argmax())}


def shares(weights: Tensor, losses: Tensor) -> Tensor:
    """Return q [samples, K] of losses [samples, K]."""
    tiny = torch.finfo(torch.float32).tiny  # a weight that came down to 0 stays there, and is no NaN
    return torch.softmax(weights.to(losses).clamp(min=tiny).log() - losses, -1)


def stepped(weights: Tensor, losses: Tensor, real: Tensor) -> Tensor:
    """Return the mean of q over the real samples; π as it is where there are none."""
    q = torch.where(real.unsqueeze(-1), shares(weights, losses), 0.0).sum(0) / real.sum().clamp(min=1)
    return torch.where(real.any(), q.to(weights), weights)


@dataclass(frozen=True, kw_only=True)
class EmServer(Averaging):
    """Server rule: FedAvg's on each component."""

    count: int = 1  # K

    def init(self, problem: Problem, start: Params, population: float) -> Shared:
        """Start at K models."""
        return super().init(problem, slots(start, self.count), population)


def fedem(
    training: Training, *, components: Count = 3, tune_rounds: Count = 10, server: OptimizerSpec = PLAIN_MEAN
) -> Algorithm:
    """Several shared models, and for each client how much of its data is of which."""
    look = retrained(training, lr=None, epochs=1).work
    client = EmClient(training=training, look=look, count=components, tune_rounds=tune_rounds)
    return Algorithm("fedem", client, EmServer(optimizer=server, count=components))
