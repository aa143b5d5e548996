"""FedRoD: a shared model that learns all classes alike, and a personal head whose scores are added to its own.

H.-Y. Chen, W.-L. Chao, *On Bridging Generic and Personalized Federated Learning for Image Classification*, ICLR 2022
(Fed-RoD with a linear personal head and the balanced softmax). The network is a body θ with a linear head ψ on its
features z = f(x; θ); client i has a second head φ_i, and n_c samples of class c in its round.

    generic:   ĝ(x) = ψ(z),               balanced risk   −log (n_y e^{ĝ_y} / Σ_c n_c e^{ĝ_c})
    personal:  p̂(x) = ψ(z) + φ_i(z),      empirical risk  −log (e^{p̂_y} / Σ_c e^{p̂_c})
    client i:  (θ, ψ) ← (θ, ψ) − η ∇ balanced risk;   φ_i ← φ_i − η ∇_φ empirical risk;   both at the same point
    server:    (θ, ψ) ← Σ_i p_i (θ_i, ψ_i)

With as many samples of each class as of any other, the shared path is FedAvg's. A sum of two linear heads is one: the
personal model is the same network with the head ψ + φ_i, and needs no second one on the device or in a file.

n_c are counted on what a client trains on in a round: its own shares of the classes, if it trains in epochs. A class
that it does not have is left out of the softmax, so its ψ stays as it is but for weight decay.

Deviations: φ_i starts at 0 rather than at a head of its own, so that a newcomer's personal model is the shared one. A
newcomer trains φ with θ and ψ fixed. Momentum and clipping, if set, act on (θ, ψ) and on φ each by itself; weight decay
draws φ to 0. The loss that is reported is the mean of both risks.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from personafl.algorithms.averaging import PLAIN_MEAN, Averaging, Change, Model
from personafl.algorithms.features import class_counts
from personafl.algorithms.personal import fine_tuning, retrained
from personafl.algorithms.training import LIKE_LR, Count, OnePassClient, Rate, Training, TunedClient, tunes
from personafl.core import tree
from personafl.core.algorithm import Algorithm, Problem
from personafl.core.batches import Batch, Data
from personafl.core.descend import descend
from personafl.core.losses import MeanLoss
from personafl.core.optim import LocalOptimizer, OptimizerSpec, Sgd, by_block
from personafl.core.tree import Params
from personafl.errors import BadInput

_OWN = "own/"  # before the names of φ's weights, where they are trained together with the others


class Head(NamedTuple):
    """State of a client: its personal head φ_i. It never leaves the device."""

    head: Params


@dataclass(frozen=True, kw_only=True)
class RodClient(OnePassClient, TunedClient):
    """Client rule: the shared model by the balanced risk, the personal head by the empirical one."""

    personal: LocalOptimizer = field(default_factory=Sgd)  # of φ_i

    def expects(self, problem: Problem, start: Params) -> Model:
        """Return the shared model, whose head must be a linear layer that gives the scores of classes."""
        _, head = problem.divide(start)
        layers = {name.rpartition(".")[0] for name in head}
        scores = {len(value) for value in head.values()}
        if not problem.data.whole:
            raise BadInput(f"method: fedrod balances classes, and the task {problem.data.task} has none; use fedper")
        if len(layers) > 1 or scores != {problem.data.classes} or problem.data.task == "ctc":
            raise BadInput(
                "model.personal: fedrod adds the scores of two linear heads, so this must be the network's last linear "
                "layer, with a score for each class; set it to output"
            )
        return Model(start)

    def init(self, problem: Problem, down: Model, generator: torch.Generator) -> Head:
        """φ_i = 0."""
        return Head(tree.zeros_like(problem.divide(down.model)[1]))

    def update(self, problem: Problem, down: Model, state: Head, data: Data) -> tuple[Head, Change]:
        """Train both at once: neither gradient reaches the other's weights."""
        batches = data.phases["local"]
        counts = class_counts(problem, batches).to(tree.leaves(down.model)[0])
        prior = counts.clamp(min=torch.finfo(torch.float32).tiny).log()
        balanced = MeanLoss(problem.net, lambda scores, targets: problem.loss(scores + prior.to(scores), targets))

        def objective(joint: Params, batch: Batch) -> Tensor:
            w, own = _apart(joint)
            return balanced(w, batch) + problem.mean_loss(_with_head(tree.map(torch.Tensor.detach, w), own), batch)

        blocks = {"shared": self.training.optimizer.at(data.round), "own": self.personal.at(data.round)}
        optimizer = by_block(blocks, lambda name: "own" if name.startswith(_OWN) else "shared")
        start = down.model | {_OWN + name: value for name, value in state.head.items()}
        joint, loss = descend(objective, start, batches, optimizer)
        w, own = _apart(joint)
        return Head(own), Change(tree.sub(w, down.model), loss / 2)

    def personalize(self, problem: Problem, down: Model, state: Head, data: Data) -> Head:
        """Train φ_i with θ and ψ fixed."""

        def objective(own: Params, batch: Batch) -> Tensor:
            return problem.mean_loss(_with_head(down.model, own), batch)

        return Head(descend(objective, state.head, data.phases["tune"], self.tune.optimizer.at(data.round))[0])

    def models(self, problem: Problem, down: Model, state: Head) -> dict[str, Params]:
        """Return (θ, ψ) and (θ, ψ + φ_i)."""
        return {"global": down.model, "personal": _with_head(down.model, state.head)}


def _apart(joint: Params) -> tuple[Params, Params]:
    """Return (θ, ψ) and φ."""
    own = {name.removeprefix(_OWN): value for name, value in joint.items() if name.startswith(_OWN)}
    return {name: value for name, value in joint.items() if not name.startswith(_OWN)}, own


def _with_head(w: Params, own: Params) -> Params:
    return w | {name: w[name] + value for name, value in own.items()}


@tunes(personal_lr=LIKE_LR)
def fedrod(
    training: Training,
    *,
    personal_lr: Rate | None = None,
    tune_lr: Rate | None = None,
    tune_epochs: Count = 5,
    server: OptimizerSpec = PLAIN_MEAN,
) -> Algorithm:
    """A shared model trained as if classes were balanced, and a personal head added to its own."""
    client = RodClient(
        training=training,
        personal=retrained(training, lr=personal_lr, epochs=None).optimizer,
        tune=fine_tuning(training, lr=tune_lr, epochs=tune_epochs),
    )
    return Algorithm("fedrod", client, Averaging(optimizer=server), personal="output")
