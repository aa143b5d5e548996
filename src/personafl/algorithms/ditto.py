"""Ditto: a personal model per client, pulled towards the shared one.

T. Li et al., *Ditto: Fair and Robust Federated Learning Through Personalization*, ICML 2021, Algorithm 1.

    shared path:  FedAvg on w
    client i:     v_i ← v_i − η(∇f_i(v_i) + λ(v_i − w_t)),   s steps; v_i starts at the first w_t it receives

λ = 0 is Local training (from w), λ → ∞ the shared model. The shared path is FedAvg's to the bit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from personafl.algorithms.averaging import PLAIN_MEAN, Averaging, Change, Model
from personafl.algorithms.fedavg import FedAvgClient
from personafl.algorithms.personal import Personal, fine_tuning, retrained
from personafl.algorithms.training import LIKE_LR, Between, Count, NonNegative, Rate, Training, TunedClient, tunes
from personafl.core.algorithm import Algorithm, Empty, Problem
from personafl.core.batches import Batches, Data, Steps
from personafl.core.descend import Quadratic, descend
from personafl.core.optim import OptimizerSpec


@dataclass(frozen=True, kw_only=True)
class DittoClient(TunedClient):
    """Client rule: FedAvg's for w, and a personal model v_i held to w_t by `pull` (λ)."""

    by_gradients: ClassVar[bool] = True
    kept_phases: ClassVar[tuple[str, ...]] = ("personal",)
    shared: FedAvgClient = field(default_factory=FedAvgClient)
    personal: Training = field(default_factory=Training)
    pull: float = 0.3

    @property
    def phases(self) -> Mapping[str, Steps]:
        """FedAvg's pass, then one on v_i."""
        return {**self.shared.phases, "personal": self.personal.work}

    def init(self, problem: Problem, down: Model, generator: torch.Generator) -> Personal:
        """v_i = w_t."""
        return Personal(down.model)

    def update(self, problem: Problem, down: Model, state: Personal, data: Data) -> tuple[Personal, Change]:
        """Train w_i as FedAvg does, and v_i towards w_t."""
        _, change = self.shared.update(problem, down, Empty(), data)
        return self._train(problem, down, state, data.phases["personal"], self.personal, data.round), change

    def personalize(self, problem: Problem, down: Model, state: Personal, data: Data) -> Personal:
        """Train a newcomer's v_i towards w_T."""
        return self._train(problem, down, state, data.phases["tune"], self.tune, data.round)

    def _train(
        self, problem: Problem, down: Model, state: Personal, batches: Batches, training: Training, round_: Tensor
    ) -> Personal:
        held = Quadratic(anchor=down.model, strength=self.pull)
        return Personal(descend(problem.mean_loss, state.model, batches, training.optimizer.at(round_), term=held)[0])


@tunes(pull=Between(0.01, 10.0), personal_lr=LIKE_LR)
def ditto(
    training: Training,
    *,
    pull: NonNegative = 0.3,
    personal_lr: Rate | None = None,
    personal_epochs: Count | None = None,
    tune_epochs: Count = 5,
    server: OptimizerSpec = PLAIN_MEAN,
) -> Algorithm:
    """FedAvg, and a personal model per client pulled towards the shared one."""
    client = DittoClient(
        shared=FedAvgClient(training=training),
        personal=retrained(training, lr=personal_lr, epochs=personal_epochs),
        tune=fine_tuning(training, lr=personal_lr, epochs=tune_epochs),
        pull=pull,
    )
    return Algorithm("ditto", client, Averaging(optimizer=server))
