"""FedBABU: a shared body trained under a fixed random head; each client learns a head once the body is done.

J. Oh, S. Kim, S.-Y. Yun, *FedBABU: Towards Enhanced Representation for Federated Image Classification*, ICLR 2022,
Algorithm 1. The network's parameters are (θ, ψ): the body, and the head that `model.personal` names (output).

    client i:  θ_i ← θ − η ∇_θ f_i(θ, ψ_0),   τ steps; the random head ψ_0 is the same for all, and stays as it is
    server:    θ ← Σ_i p_i θ_i
    after:     ψ_i ← ψ − η ∇_ψ f_i(θ, ψ),   from ψ_0 with θ fixed

With part = "all" fine-tuning trains θ too, from the shared one: the paper has both, and finds them alike (§5.2).
Before it a client's model is (θ, ψ_0), the shared one.

Deviation: ψ_0 is the head of the run's start model, drawn as its network draws it (the paper tries other laws as well).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from personafl.algorithms.averaging import PLAIN_MEAN, Averaging, Change
from personafl.algorithms.fedalt import Own, PartialAveraging, Parts
from personafl.algorithms.finetune import Part
from personafl.algorithms.personal import Personal, fine_tuning
from personafl.algorithms.training import LIKE_LR, Count, OnePassClient, Rate, Training, TunedClient, tunes
from personafl.core.algorithm import Algorithm, Problem
from personafl.core.batches import Data
from personafl.core.descend import descend, descent
from personafl.core.optim import OptimizerSpec
from personafl.core.tree import Params


@dataclass(frozen=True, kw_only=True)
class BabuClient(OnePassClient, TunedClient):
    """Client rule: train the body under the head that everyone was sent, once; fine-tune at the end."""

    by_gradients: ClassVar[bool] = True
    part: Part = "personal"

    def expects(self, problem: Problem, start: Params) -> Parts:
        """Return body and head."""
        return Parts(*problem.divide(start))

    def init(self, problem: Problem, down: Parts, generator: torch.Generator) -> Own:
        """Keep ψ_0."""
        return Own(down.personal)

    def update(self, problem: Problem, down: Parts, state: Own, data: Data) -> tuple[Own, Change]:
        """Return θ_i − θ."""
        optimizer = self.training.optimizer.at(data.round)
        return state, Change(
            *descent(problem.mean_loss_given(state.personal), down.shared, data.phases["local"], optimizer)
        )

    def personalize(self, problem: Problem, down: Parts, state: Own, data: Data) -> Personal:
        """Fine-tune the head, or everything."""
        whole = down.shared | state.personal
        fixed, moving = problem.divide(whole) if self.part == "personal" else ({}, whole)
        optimizer = self.tune.optimizer.at(data.round)
        tuned, _ = descend(problem.mean_loss_given(fixed), moving, data.phases["tune"], optimizer)
        return Personal(fixed | tuned)

    def models(self, problem: Problem, down: Parts, state: Own | Personal) -> dict[str, Params]:
        """Return (θ, ψ_0) and, once it is fine-tuned, the client's own."""
        own = {"personal": state.model} if isinstance(state, Personal) else {}
        return {"global": down.shared | down.personal, **own}


@tunes(tune_lr=LIKE_LR)
def fedbabu(
    training: Training,
    *,
    tune_epochs: Count = 5,
    tune_lr: Rate | None = None,
    part: Part = "personal",
    server: OptimizerSpec = PLAIN_MEAN,
) -> Algorithm:
    """A shared body trained under a fixed random head; each client then fine-tunes a head of its own."""
    client = BabuClient(training=training, tune=fine_tuning(training, lr=tune_lr, epochs=tune_epochs), part=part)
    return Algorithm("fedbabu", client, PartialAveraging(averaging=Averaging(optimizer=server)), personal="output")
