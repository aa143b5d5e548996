"""MR-MTL: personal models, each held to the mean of all of them; there is no other shared model.

Z. Liu, S. Hu, Z. S. Wu, V. Smith, *On Privacy and Personalization in Cross-Silo Federated Learning*, NeurIPS 2022
(mean-regularised multi-task learning, after T. Evgeniou and M. Pontil, KDD 2004).

    client i:  w_i ← w_i − η(∇f_i(w_i) + λ(w_i − w̄_t)),   τ steps from its last w_i; w_i starts at the first w̄_t it gets
    server:    w̄_{t+1} = Σ_i p_i w_i over the cohort

λ = 0 is Local training (from the common start), λ → ∞ with small steps goes to FedAvg. One pass over the data makes the
personal model and the mean: where samples are protected (`core.samples`), Ditto's two passes need more noise, which is
the paper's point. The penalty does not look at data, and costs no privacy.

What is sent is w_i − w̄_t: the server knows w̄_t, and so the personal model.

Deviations: the paper clips the penalty's gradient together with each sample's; here it is outside the clip. All silos
take part in the paper; with a cohort, w̄ is the mean of those who did.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from personafl.algorithms.averaging import Averaging, Change, Model
from personafl.algorithms.personal import Personal, fine_tuning
from personafl.algorithms.training import Between, Count, NonNegative, OnePassClient, Training, TunedClient, tunes
from personafl.core import tree
from personafl.core.algorithm import Algorithm, Problem
from personafl.core.batches import Data
from personafl.core.descend import Quadratic, descend


@dataclass(frozen=True, kw_only=True)
class MeanRegularizedClient(OnePassClient, TunedClient):
    """Client rule: train w_i, held to w̄_t by `pull` (λ)."""

    by_gradients: ClassVar[bool] = True
    uploads_of_state: ClassVar[tuple[str, ...]] = ("change",)  # w_i itself, but for w̄_t, which the server has
    pull: float = 1.0

    def init(self, problem: Problem, down: Model, generator: torch.Generator) -> Personal:
        """w_i = w̄_t."""
        return Personal(down.model)

    def update(self, problem: Problem, down: Model, state: Personal, data: Data) -> tuple[Personal, Change]:
        """Train w_i, and send it."""
        held = Quadratic(anchor=down.model, strength=self.pull)
        optimizer = self.training.optimizer.at(data.round)
        own, loss = descend(problem.mean_loss, state.model, data.phases["local"], optimizer, term=held)
        return Personal(own), Change(tree.sub(own, down.model), loss)

    def personalize(self, problem: Problem, down: Model, state: Personal, data: Data) -> Personal:
        """Train w_i on, held to w̄_T: a newcomer's from there."""
        held = Quadratic(anchor=down.model, strength=self.pull)
        optimizer = self.tune.optimizer.at(data.round)
        return Personal(descend(problem.mean_loss, state.model, data.phases["tune"], optimizer, term=held)[0])


@tunes(pull=Between(0.01, 10.0))
def mrmtl(training: Training, *, pull: NonNegative = 1.0, tune_epochs: Count = 5) -> Algorithm:
    """A personal model per client, held to the mean of all personal models."""
    client = MeanRegularizedClient(training=training, tune=fine_tuning(training, epochs=tune_epochs), pull=pull)
    return Algorithm("mrmtl", client, Averaging())
