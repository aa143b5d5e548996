"""FedPAC: personal heads on a shared body whose features are drawn to the shared means of their classes.

J. Xu, X. Tong, S.-L. Huang, *Personalized Federated Learning with Feature Alignment and Classifier Collaboration*, ICLR
2023, Algorithm 1, its feature alignment. The network is (θ, φ): a shared body with features z, and a personal linear
head; client i has n_ic samples of class c, and c̄ is the shared centroid of a class.

    client i:  φ_i ← φ_i − η_φ ∇_φ f_i(θ, φ_i),   `head_epochs` with the received θ fixed
               θ_i ← θ_i − η ∇_θ [ f_i(θ_i, φ_i) + λ mean over samples of ‖z − c̄_y‖² / width ],   φ_i fixed
    server:    θ ← Σ_i p_i θ_i;   c̄_c ← Σ_i n_ic p_i (mean of client i's z of class c) / Σ_i n_ic p_i

λ = 0 is FedRep. Clients send Σ z and n_ic of each class, so a server learns how many samples of which class one has.

Deviations: the combination of classifiers is left out: it sends every client a mixture of its own of all heads, and
here a server has one message for all. Distances are divided by the width, as in PFLlib. Where uploads are
weighted by samples (p_i ∝ n_i), so are the sums of classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from personafl.algorithms.averaging import PLAIN_MEAN, Averaging
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
from personafl.algorithms.fedalt import Own, PartialAveraging, PartialState
from personafl.algorithms.personal import fine_tuning, retrained
from personafl.algorithms.training import LIKE_LR, Between, Count, NonNegative, Rate, Training, TunedClient, tunes
from personafl.core.algorithm import Algorithm, Problem, Reduced, ServerRule, sent_once
from personafl.core.batches import Batch, Data, Steps
from personafl.core.descend import descend, descent
from personafl.core.losses import mean_of_real
from personafl.core.optim import OptimizerSpec
from personafl.core.tree import Params


@sent_once("personal")
class Aligned(NamedTuple):
    """Down: the shared body, where heads start (once), and the centroids."""

    shared: Params
    personal: Params
    classes: ClassMeans


class Felt(NamedTuple):
    """Up: how training moved the body, the sums of features by class, and the mean training loss."""

    change: Params
    classes: ClassSums
    loss: Tensor


@dataclass(frozen=True, kw_only=True)
class PacClient(TunedClient):
    """Client rule: the head, then the body under it, drawn to the centroids."""

    shared: Training = field(default_factory=Training)
    personal: Training = field(default_factory=Training)
    look: Steps = field(default_factory=lambda: Steps(epochs=1))
    pull: float = 1.0  # λ

    @property
    def phases(self) -> Mapping[str, Steps]:
        """A pass on the head, one on the body, and one that only looks."""
        return {"personal": self.personal.work, "local": self.shared.work, "look": self.look}

    def expects(self, problem: Problem, start: Params) -> Aligned:
        """Return the two parts, and no centroids; the head must be a linear layer that gives the scores of classes."""
        check_classes("fedpac", problem, "fedrep")
        check_head("fedpac", problem, start)
        return Aligned(*problem.divide(start), no_means(problem, start))

    def init(self, problem: Problem, down: Aligned, generator: torch.Generator) -> Own:
        """φ_i is the common start."""
        return Own(down.personal)

    def update(self, problem: Problem, down: Aligned, state: Own, data: Data) -> tuple[Own, Felt]:
        """Train the head, then the body; then sum up features by class."""
        optimizer = self.personal.optimizer.at(data.round)
        head, _ = descend(problem.mean_loss_given(down.shared), state.personal, data.phases["personal"], optimizer)

        def objective(body: Params, batch: Batch) -> Tensor:
            scores, z = scores_and_features(problem, body | head, batch)
            return mean_of_real(problem.loss(scores, batch.y) + self.pull * down.classes.gap(z, batch), batch)

        change, loss = descent(objective, down.shared, data.phases["local"], self.shared.optimizer.at(data.round))
        body = {name: value + change[name] for name, value in down.shared.items()}
        return Own(head), Felt(change, class_sums(problem, body | head, data.phases["look"]), loss)

    def personalize(self, problem: Problem, down: Aligned, state: Own, data: Data) -> Own:
        """Fine-tune the head."""
        optimizer = self.tune.optimizer.at(data.round)
        return Own(descend(problem.mean_loss_given(down.shared), state.personal, data.phases["tune"], optimizer)[0])

    def models(self, problem: Problem, down: Aligned, state: Own) -> dict[str, Params]:
        """Return (θ, the common start) and (θ, φ_i)."""
        return {"global": down.shared | down.personal, "personal": down.shared | state.personal}


class PacState(NamedTuple):
    """State of the server: the body with its optimizer, where heads start, and the centroids."""

    parts: PartialState
    classes: ClassMeans


@dataclass(frozen=True, kw_only=True)
class PacServer(ServerRule):
    """Server rule: FedAvg's on the body, and the means of classes."""

    averaging: PartialAveraging = field(default_factory=PartialAveraging)

    def init(self, problem: Problem, start: Params, population: float) -> PacState:
        """Divide the start model; no class is known."""
        return PacState(self.averaging.init(problem, start, population), no_means(problem, start))

    def broadcast(self, state: PacState) -> Aligned:
        """Send the body, where heads start, and the centroids."""
        parts = state.parts
        return Aligned(parts.shared.model, parts.personal, state.classes.settled())

    def update(self, state: PacState, uploads: Reduced, round_: int) -> PacState:
        """Step the body along the mean change, and join the classes."""
        stepped = self.averaging.update(state.parts, uploads, round_)
        return PacState(stepped, pooled(state.classes, uploads.mean().classes))


@tunes(pull=Between(0.1, 10.0), head_lr=LIKE_LR)
def fedpac(
    training: Training,
    *,
    pull: NonNegative = 1.0,
    head_epochs: Count = 1,
    head_lr: Rate | None = None,
    tune_lr: Rate | None = None,
    tune_epochs: Count = 5,
    server: OptimizerSpec = PLAIN_MEAN,
) -> Algorithm:
    """Personal heads on a shared body whose features are drawn to shared means of classes."""
    client = PacClient(
        shared=training,
        personal=retrained(training, lr=head_lr, epochs=head_epochs),
        look=retrained(training, lr=None, epochs=1).work,
        pull=pull,
        tune=fine_tuning(training, lr=tune_lr, epochs=tune_epochs),
    )
    averaging = PartialAveraging(averaging=Averaging(optimizer=server))
    return Algorithm("fedpac", client, PacServer(averaging=averaging), personal="output")
