"""Finetune: FedAvg, then every client fine-tunes the whole shared model on its own data.

The standard personalization baseline; see K. Pillutla et al., *Federated Learning with Partial Model Personalization*,
ICML 2022, §4 ("Finetune").

    rounds:    FedAvg, giving w_T
    client i:  x_i = τ' steps of SGD on f_i from w_T;   the personal model is x_i

With part = "personal" only the personal part of the network (model.personal) is fine-tuned: the paper's "FT (part.)".

Clients keep nothing between rounds; fine-tuning happens when a client asks for its model.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from personafl.algorithms.averaging import PLAIN_MEAN, Averaging, Model
from personafl.algorithms.fedavg import FedAvgClient
from personafl.algorithms.personal import Personal, fine_tuning
from personafl.algorithms.training import LIKE_LR, Count, Rate, Training, TunedClient, tunes
from personafl.core.algorithm import Algorithm, Empty, Problem
from personafl.core.batches import Data
from personafl.core.descend import descend
from personafl.core.optim import OptimizerSpec

Part = Literal["all", "personal"]


@dataclass(frozen=True, kw_only=True)
class FinetuneClient(TunedClient, FedAvgClient):
    """Client rule: FedAvg's, and fine-tuning."""

    by_gradients: ClassVar[bool] = True
    part: Part = "all"

    def personalize(self, problem: Problem, down: Model, state: Empty, data: Data) -> Personal:
        """Fine-tune w_T, or its personal part with the rest fixed."""
        fixed, moving = problem.divide(down.model) if self.part == "personal" else ({}, down.model)
        optimizer = self.tune.optimizer.at(data.round)
        tuned, _ = descend(problem.mean_loss_given(fixed), moving, data.phases["tune"], optimizer)
        return Personal(fixed | tuned)


@tunes(tune_lr=LIKE_LR)
def finetune(
    training: Training,
    *,
    tune_epochs: Count = 5,
    tune_lr: Rate | None = None,
    part: Part = "all",
    server: OptimizerSpec = PLAIN_MEAN,
) -> Algorithm:
    """FedAvg, then each client fine-tunes the shared model."""
    tune = fine_tuning(training, lr=tune_lr, epochs=tune_epochs)
    client = FinetuneClient(training=training, tune=tune, part=part)
    return Algorithm("finetune", client, Averaging(optimizer=server))
