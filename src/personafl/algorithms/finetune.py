"""Finetune: FedAvg, then every client fine-tunes the whole shared model on its own data.

The standard personalization baseline; see K. Pillutla et al., *Federated Learning with Partial Model Personalization*,
ICML 2022, §4 ("Finetune").

    rounds:    FedAvg, giving w_T
    client i:  x_i = τ' steps of SGD on f_i from w_T;   the personal model is x_i

With part = "personal" only the personal part of the network (model.personal) is fine-tuned: the paper's "FT (part.)".

Clients keep nothing between rounds; fine-tuning happens when a client asks for its model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from personafl.algorithms.averaging import PLAIN_MEAN, Averaging, Change, Model
from personafl.algorithms.fedavg import FedAvgClient
from personafl.algorithms.personal import Personal, fine_tuning, global_and_personal
from personafl.algorithms.training import Count, Rate, Training, TunedClient
from personafl.core.algorithm import Algorithm, Empty, Problem
from personafl.core.batches import Data, Steps
from personafl.core.descend import descend
from personafl.core.optim import OptimizerSpec
from personafl.core.tree import Params

Part = Literal["all", "personal"]


@dataclass(frozen=True, kw_only=True)
class FinetuneClient(TunedClient):
    """Client rule: FedAvg's, and fine-tuning."""

    shared: FedAvgClient = field(default_factory=FedAvgClient)
    part: Part = "all"

    @property
    def phases(self) -> Mapping[str, Steps]:
        """As FedAvg."""
        return self.shared.phases

    def init(self, problem: Problem, down: Model, generator: torch.Generator) -> Empty:
        """Keep nothing between rounds."""
        return Empty()

    def update(self, problem: Problem, down: Model, state: Empty, data: Data) -> tuple[Empty, Change]:
        """As FedAvg."""
        return self.shared.update(problem, down, state, data)

    def personalize(self, problem: Problem, down: Model, state: Empty, data: Data) -> Personal:
        """Fine-tune w_T, or its personal part with the rest fixed."""
        fixed, moving = problem.divide(down.model) if self.part == "personal" else ({}, down.model)
        optimizer = self.tune.optimizer.at(data.round)
        tuned, _ = descend(problem.mean_loss_given(fixed), moving, data.phases["tune"], optimizer)
        return Personal(fixed | tuned)

    def models(self, problem: Problem, down: Model, state: Personal | Empty) -> dict[str, Params]:
        """Return the shared model and, once fine-tuned, the client's own."""
        return global_and_personal(down, state)


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
    client = FinetuneClient(shared=FedAvgClient(training=training), tune=tune, part=part)
    return Algorithm("finetune", client, Averaging(optimizer=server))
