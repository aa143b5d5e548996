"""FedALA: every client learns, weight by weight, how much of the shared upper layers to take over before it trains.

J. Zhang et al., *FedALA: Adaptive Local Aggregation for Personalized Federated Learning*, AAAI 2023, Algorithm 1. The
network is (θ, ψ): lower layers, and the upper ones that `model.personal` names (output: the paper's p = 1). Client i
has its model of the last round, ψ_i, and weights W_i ∈ [0, 1] as large as ψ, 1 at first.

    client i:  ψ̂ = ψ_i + (ψ − ψ_i) ⊙ W_i
               W_i ← clip(W_i − η_W ∇_ψ f_i(θ, ψ̂) ⊙ (ψ − ψ_i), 0, 1),   an epoch, with θ and ψ as received
               (θ_i, ψ_i) ← τ steps of SGD on f_i from (θ, ψ̂)
    server:    (θ, ψ) ← Σ_i p_i (θ_i, ψ_i)

In a client's first round ψ_i = ψ, and there is nothing to weigh. In its second one W_i warms up: it is trained for
`warmup_epochs` more (in the paper until the loss moves no more: a device may not choose its work by what it sees). With
W_i held at 1 this is FedAvg; at 0 the upper layers are FedPer's.

The personal model is (θ, ψ̂), from the newest shared model with the weights as they were last learned; θ_i need not be
kept. Fine-tuning trains all of it, as a round does.

Deviations: W_i is learned on all data of a client, where the paper draws s = 80 % of it; the warm-up is as above.
Weights are learned by plain SGD at `weight_lr`, whatever the optimizer of the training.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from personafl.algorithms.averaging import PLAIN_MEAN, Averaging, Change, Model
from personafl.algorithms.personal import Personal, fine_tuning, retrained
from personafl.algorithms.training import Between, Count, Rate, Training, TunedClient, tunes
from personafl.core import tree
from personafl.core.algorithm import Algorithm, Problem
from personafl.core.batches import Batches, Data, Steps
from personafl.core.descend import descend, descend_from
from personafl.core.optim import Optimizer, OptimizerSpec
from personafl.core.prox import box
from personafl.core.tree import Params


class Weighed(NamedTuple):
    """State of a client: its upper layers ψ_i, the weights W_i, and how many rounds it took part in."""

    upper: Params
    weights: Params
    rounds: Tensor  # []


@dataclass(frozen=True, kw_only=True)
class AlaClient(TunedClient):
    """Client rule: weigh the shared upper layers against one's own, then train everything."""

    by_gradients: ClassVar[bool] = True
    training: Training = field(default_factory=Training)
    weigh: Steps = field(default_factory=lambda: Steps(epochs=1))
    warmup: Steps = field(default_factory=lambda: Steps(epochs=5))
    weight_lr: float = 1.0  # η_W

    @property
    def phases(self) -> Mapping[str, Steps]:
        """The warm-up, which counts in the second round alone; a pass on W; then local training."""
        return {"warmup": self.warmup, "weigh": self.weigh, "local": self.training.work}

    def expects(self, problem: Problem, start: Params) -> Model:
        """Return the shared model, which must have upper layers."""
        problem.divide(start)
        return Model(start)

    def init(self, problem: Problem, down: Model, generator: torch.Generator) -> Weighed:
        """ψ_i = ψ, W_i = 1."""
        upper = problem.divide(down.model)[1]
        device = next(iter(upper.values())).device
        return Weighed(upper, tree.map(torch.ones_like, upper), torch.zeros((), dtype=torch.int64, device=device))

    def update(self, problem: Problem, down: Model, state: Weighed, data: Data) -> tuple[Weighed, Change]:
        """Learn W_i, and train from (θ, ψ̂)."""
        again = state.rounds == 1
        warm = tree.when(again, lambda: self._learned(problem, down, state, data.phases["warmup"]), state.weights)
        state = state._replace(weights=warm)
        state = state._replace(weights=self._learned(problem, down, state, data.phases["weigh"]))
        optimizer, start = self.training.optimizer.at(data.round), _joined(problem, down, state)
        w, loss = descend(problem.mean_loss, start, data.phases["local"], optimizer)
        upper = problem.divide(w)[1]
        return Weighed(upper, state.weights, state.rounds + 1), Change(tree.sub(w, down.model), loss)

    def personalize(self, problem: Problem, down: Model, state: Weighed, data: Data) -> Personal:
        """Train (θ, ψ̂)."""
        optimizer = self.tune.optimizer.at(data.round)
        return Personal(descend(problem.mean_loss, _joined(problem, down, state), data.phases["tune"], optimizer)[0])

    def models(self, problem: Problem, down: Model, state: Weighed | Personal) -> dict[str, Params]:
        """Return the shared model and (θ, ψ̂), or what fine-tuning made of that."""
        own = state.model if isinstance(state, Personal) else _joined(problem, down, state)
        return {"global": down.model, "personal": own}

    def _learned(self, problem: Problem, down: Model, state: Weighed, batches: Batches) -> Params:
        lower, upper = problem.divide(down.model)
        start = mixed(upper, state)
        optimizer = weighing(tree.sub(upper, state.upper), self.weight_lr)
        weights: Params
        _, weights, _ = descend_from(problem.mean_loss_given(lower), start, state.weights, batches, optimizer)
        return weights


def weighing(gap: Params, lr: float) -> Optimizer:
    """Return the optimizer of ψ̂ that steps its weights W, which are its state, by their gradient ∇_ψ f ⊙ gap."""

    def update(gradient: Params, weights: Params, _: Params) -> tuple[Params, Params]:
        stepped = tree.map(lambda w, g, d: box(w - lr * g * d, 0.0, 1.0), weights, gradient, gap)
        return tree.map(lambda after, before, d: (after - before) * d, stepped, weights, gap), stepped

    def init(params: Params) -> Any:
        return tree.map(torch.ones_like, params)

    return Optimizer(init, update)


def mixed(upper: Params, state: Weighed) -> Params:
    """Return ψ̂ = ψ_i + (ψ − ψ_i) ⊙ W_i."""
    return tree.map(lambda own, shared, w: own + (shared - own) * w, state.upper, upper, state.weights)


def _joined(problem: Problem, down: Model, state: Weighed) -> Params:
    return down.model | mixed(problem.divide(down.model)[1], state)


@tunes(weight_lr=Between(0.1, 10.0))
def fedala(
    training: Training,
    *,
    weight_lr: Rate = 1.0,
    warmup_epochs: Count = 5,
    tune_lr: Rate | None = None,
    tune_epochs: Count = 5,
    server: OptimizerSpec = PLAIN_MEAN,
) -> Algorithm:
    """FedAvg whose clients learn, weight by weight, how much of the shared upper layers to start from."""
    client = AlaClient(
        training=training,
        weigh=retrained(training, lr=None, epochs=1).work,
        warmup=retrained(training, lr=None, epochs=warmup_epochs).work,
        weight_lr=weight_lr,
        tune=fine_tuning(training, lr=tune_lr, epochs=tune_epochs),
    )
    return Algorithm("fedala", client, Averaging(optimizer=server), personal="output")
