"""pFedMe: personal models by Moreau envelopes of the clients' losses.

C. T. Dinh et al., *Personalized Federated Learning with Moreau Envelopes*, NeurIPS 2020, Algorithm 1. The shared model
minimises the mean of the envelopes F_i(w) = min_θ f_i(θ) + (λ/2)‖θ − w‖², whose gradient is λ(w − θ̂_i(w)).

    client i:  w_i = θ = w_t;   for each minibatch B:
                   θ ← K steps of SGD on f_i(θ; B) + (λ/2)‖θ − w_i‖²,  from the last θ
                   w_i ← w_i − ηλ(w_i − θ)
    server:    w_{t+1} = (1 − β)w_t + β · mean_S(w_i)      (server = {lr = β}; or another optimizer)

The personal model is the last θ. The K steps are taken by the training's optimizer, made anew for each minibatch: its
rate is the paper's personal learning rate, and must be below 2/λ for the steps not to diverge. Newcomers, and clients
that fine-tune, do the same from w_T and send nothing.

The paper has λ = 15 and η = 0.005, for many hundred rounds: η is the learning rate of w, so that a short run needs a
larger one (with ηλ = 1 w_i moves to θ). The defaults λ = 1 and η = 0.5 are for such runs; K = 5 is the paper's. The
reported loss is that of the K steps, with the penalty.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from personafl.algorithms.averaging import PLAIN_MEAN, Averaging, Change, Model
from personafl.algorithms.personal import Personal, fine_tuning
from personafl.algorithms.training import Between, Count, OnePassClient, Rate, Training, TunedClient, tunes
from personafl.core import tree
from personafl.core.algorithm import Algorithm, Problem
from personafl.core.batches import Batches, Data, Repeated
from personafl.core.descend import Quadratic, descend
from personafl.core.optim import OptimizerSpec
from personafl.core.tree import Params


@dataclass(frozen=True, kw_only=True)
class MoreauClient(OnePassClient, TunedClient):
    """Client rule: gradient steps on the envelope, each from `inner_steps` on the penalised loss."""

    pull: float = 1.0  # λ
    inner_steps: int = 5  # K
    outer_lr: float = 0.5  # η

    def init(self, problem: Problem, down: Model, generator: torch.Generator) -> Personal:
        """θ_i = w_t."""
        return Personal(down.model)

    def update(self, problem: Problem, down: Model, state: Personal, data: Data) -> tuple[Personal, Change]:
        """Return the last θ and w_i − w_t."""
        w, theta, loss = self._train(problem, down.model, data.phases["local"], self.training, data.round)
        return Personal(theta), Change(tree.sub(w, down.model), loss)

    def personalize(self, problem: Problem, down: Model, state: Personal, data: Data) -> Personal:
        """Return the last θ of a longer pass."""
        return Personal(self._train(problem, down.model, data.phases["tune"], self.tune, data.round)[1])

    def _train(
        self, problem: Problem, start: Params, batches: Batches, training: Training, round_: Tensor
    ) -> tuple[Params, Params, Tensor]:
        """Return w_i, θ and the mean loss."""
        optimizer = training.optimizer.at(round_)
        w, theta = start, start
        total = torch.zeros((), device=batches.device)
        for batch in batches.each():
            held = Quadratic(anchor=w, strength=self.pull)
            again = Repeated(batch, self.inner_steps)
            theta, loss = descend(problem.mean_loss, theta, again, optimizer, term=held)
            moved = tree.sub(w, tree.scale(tree.sub(w, theta), self.outer_lr * self.pull))
            w = tree.where(batch.real.any(), moved, w)  # without real samples `descend` kept θ, and the loss is 0
            total = total + loss
        return w, theta, total / batches.real.any(-1).sum().clamp(min=1)


@tunes(pull=Between(0.1, 20.0), outer_lr=Between(0.01, 2.0))
def pfedme(
    training: Training,
    *,
    pull: Rate = 1.0,
    inner_steps: Count = 5,
    outer_lr: Rate = 0.5,
    tune_epochs: Count = 5,
    server: OptimizerSpec = PLAIN_MEAN,
) -> Algorithm:
    """A shared model of Moreau envelopes, and a personal model per client near it."""
    client = MoreauClient(
        training=training,
        tune=fine_tuning(training, epochs=tune_epochs),
        pull=pull,
        inner_steps=inner_steps,
        outer_lr=outer_lr,
    )
    return Algorithm("pfedme", client, Averaging(optimizer=server))
