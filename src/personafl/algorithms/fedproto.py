"""FedProto: only the means of classes travel; every client has a model of its own, whose features are drawn to them.

Y. Tan et al., *FedProto: Federated Prototype Learning across Heterogeneous Clients*, AAAI 2022, Algorithm 1. A network
is a body with a linear head on its features z; client i has n_ic samples of class c, and C̄_c is the shared prototype.

    client i:  w_i ← w_i − η ∇ [ f_i(w_i) + λ mean over samples of ‖z − C̄_y‖² / width ]
               C_ic = mean of z over its samples of class c, after training
    server:    C̄_c ← Σ_i n_ic C_ic / Σ_i n_ic   over the cohort; a class that nobody in it has stays as it was

A model is scored by its head. PFLlib's figures for this method are by the nearest prototype, which is not offered here.
λ = 0 is Local training from the common start.

Clients send Σ z and n_ic of each class, so a server learns how many samples of which class a client has.

Deviations: the paper's factor 1/|N_c| before the mean of a class is left out; distances are squared, divided by the
width and of single samples, as in PFLlib (the paper has distances between means). All clients have one architecture and
start at one model, which they are sent once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from personafl.algorithms.features import (
    ClassMeans,
    ClassSums,
    check_classes,
    check_head,
    class_sums,
    no_means,
    pooled,
    scores_and_features,
)
from personafl.algorithms.personal import Personal, fine_tuning, retrained
from personafl.algorithms.training import Between, Count, NonNegative, Rate, Training, TunedClient, tunes
from personafl.core.algorithm import Algorithm, Problem, Reduced, ServerRule, sent_once
from personafl.core.batches import Batch, Batches, Data, Steps
from personafl.core.descend import descend
from personafl.core.losses import mean_of_real
from personafl.core.tree import Params


@sent_once("start")
class Prototypes(NamedTuple):
    """Down: C̄, and where models start, which a client that has its own is not sent again."""

    start: Params
    classes: ClassMeans


class Told(NamedTuple):
    """Up: the sums of features by class, and the mean training loss."""

    classes: ClassSums
    loss: Tensor


@dataclass(frozen=True, kw_only=True)
class ProtoClient(TunedClient):
    """Client rule: one's own model, whose features are drawn to the shared prototypes."""

    training: Training = field(default_factory=Training)
    look: Steps = field(default_factory=lambda: Steps(epochs=1))
    pull: float = 1.0  # λ

    @property
    def phases(self) -> Mapping[str, Steps]:
        """A pass of training, and one that only looks."""
        return {"local": self.training.work, "look": self.look}

    def expects(self, problem: Problem, start: Params) -> Prototypes:
        """Return the start and no prototypes; the head must be a linear layer that gives the scores of classes."""
        check_classes("fedproto", problem, "local")
        check_head("fedproto", problem, start)
        return Prototypes(start, no_means(problem, start))

    def init(self, problem: Problem, down: Prototypes, generator: torch.Generator) -> Personal:
        """w_i is the common start."""
        return Personal(down.start)

    def update(self, problem: Problem, down: Prototypes, state: Personal, data: Data) -> tuple[Personal, Told]:
        """Train, then sum up features by class."""
        model, loss = self._train(problem, down, state, data.phases["local"], self.training, data.round)
        return Personal(model), Told(class_sums(problem, model, data.phases["look"]), loss)

    def personalize(self, problem: Problem, down: Prototypes, state: Personal, data: Data) -> Personal:
        """Train a model towards the prototypes."""
        return Personal(self._train(problem, down, state, data.phases["tune"], self.tune, data.round)[0])

    def models(self, problem: Problem, down: Prototypes, state: Personal) -> dict[str, Params]:
        """There is no global model."""
        return {"personal": state.model}

    def _train(
        self, problem: Problem, down: Prototypes, state: Personal, batches: Batches, training: Training, round_: Tensor
    ) -> tuple[Params, Tensor]:
        def objective(w: Params, batch: Batch) -> Tensor:
            scores, z = scores_and_features(problem, w, batch)
            return mean_of_real(problem.loss(scores, batch.y) + self.pull * down.classes.gap(z, batch), batch)

        return descend(objective, state.model, batches, training.optimizer.at(round_))


class ProtoState(NamedTuple):
    """State of the server: C̄, and where models start."""

    start: Params
    classes: ClassMeans


@dataclass(frozen=True)
class ProtoServer(ServerRule):
    """Server rule: the means of classes over all samples of a cohort."""

    def init(self, problem: Problem, start: Params, population: float) -> ProtoState:
        """No class is known."""
        return ProtoState(start, no_means(problem, start))

    def broadcast(self, state: ProtoState) -> Prototypes:
        """Send C̄."""
        return Prototypes(state.start, state.classes.settled())

    def update(self, state: ProtoState, uploads: Reduced, round_: int) -> ProtoState:
        """Join the classes."""
        return state._replace(classes=pooled(state.classes, uploads.mean().classes))

    def weigh(self, problem: Problem, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Uploads are sums over samples: each counts as it is."""
        return np.ones_like(weights)


@tunes(pull=Between(0.1, 10.0))
def fedproto(
    training: Training,
    *,
    pull: NonNegative = 1.0,
    tune_lr: Rate | None = None,
    tune_epochs: Count = 20,
) -> Algorithm:
    """Every client trains a model of its own towards shared means of classes, which are all that travels."""
    client = ProtoClient(
        training=training,
        look=retrained(training, lr=None, epochs=1).work,
        pull=pull,
        tune=fine_tuning(training, lr=tune_lr, epochs=tune_epochs),
    )
    return Algorithm("fedproto", client, ProtoServer(), personal="output")
