"""Per-FedAvg: a shared model that is good after one step of each client's own.

A. Fallah et al., *Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach*, NeurIPS 2020, Algorithm 1. The shared model minimises the mean of F_i(w) = f_i(w − α∇f_i(w)), whose gradient
is (I − α∇²f_i(w)) ∇f_i(w − α∇f_i(w)). A local step uses independent minibatches D, D′ and D″:

    w̃ = w − α∇f_i(w; D),   g = ∇f_i(w̃; D′)
    first-order:    w ← w − β·g
    hessian-free:   w ← w − β(g − α·d),   d = [∇f_i(w + δg; D″) − ∇f_i(w − δg; D″)]/(2δ) ≈ ∇²f_i(w; D″)·g
    server:         w_{t+1} = Σ_i p_i w_i
    client's own:   x_i = w_T, adapted to its training data by SGD with rate α

β is the training's optimizer, of which momentum, clipping and weight decay act on the direction as on any gradient. The
inner step and the adaptation are plain SGD with the constant rate α. δ = 1e-3 keeps d's errors, O(δ²) and rounding/δ,
small in single precision. Adaptation is one minibatch step, which is what the shared model was trained for; more are an
option. Test data is never adapted to.

The reported loss is that after the inner step, f_i(w̃; D′). With α = 0 the rounds are FedAvg's. The paper draws D, D′
and D″ anew in every step; here each of the three goes through the client's data in its own order, epoch by epoch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from personafl.algorithms.averaging import PLAIN_MEAN, Averaging, Change, Model
from personafl.algorithms.finetune import FinetuneClient
from personafl.algorithms.personal import fine_tuning
from personafl.algorithms.training import Between, Count, NonNegative, Rate, Training, tunes
from personafl.core import tree
from personafl.core.algorithm import Algorithm, Empty, Problem
from personafl.core.batches import Data, Steps, Together, Zipped
from personafl.core.descend import descend, gradient_and_value
from personafl.core.optim import OptimizerSpec, Sgd
from personafl.core.seam import definition
from personafl.core.tree import Params
from personafl.errors import BadInput

Variant = Literal["first-order", "hessian-free"]


def meta_gradient(problem: Problem, w: Params, step: Together, rate: float, delta: float) -> tuple[Params, Tensor]:
    """Return g, or g − α·d if the step has a third minibatch, and f(w̃; D′)."""
    inner, outer, *hessian = step.parts
    # By torch.func, within which the sooner ways round otherwise, unless it cannot take the network.
    gradient = gradient_and_value if problem.net.unstackable else definition(gradient_and_value)
    adapted = _moved(w, gradient(problem.mean_loss, w, inner)[0], -rate)
    g, loss = gradient(problem.mean_loss, adapted, outer)
    if hessian:
        points = (_moved(w, g, shift) for shift in (delta, -delta))
        ahead, behind = (gradient(problem.mean_loss, point, hessian[0])[0] for point in points)
        g = _moved(g, tree.sub(ahead, behind), -rate / (2 * delta))
    return g, loss


def _moved(w: Params, direction: Params, length: float) -> Params:
    return tree.add(w, tree.scale(direction, length))


@dataclass(frozen=True, kw_only=True)
class MetaClient(FinetuneClient):
    """Client rule: descend on F_i; fine-tuning adapts the shared model to a client."""

    variant: Variant = "first-order"
    inner_lr: float = 0.03  # α
    delta: float = 1e-3  # δ

    @property
    def phases(self) -> Mapping[str, Steps]:
        """D, D′ ("local", as FedAvg's) and for the Hessian-free variant D″."""
        third = ("hessian",) if self.variant == "hessian-free" else ()
        return dict.fromkeys(("inner", "local", *third), self.training.work)

    def update(self, problem: Problem, down: Model, state: Empty, data: Data) -> tuple[Empty, Change]:
        """Return w_i − w_t."""

        def objective(w: Params, step: Together) -> Tensor:
            here = tree.map(torch.Tensor.detach, w)
            direction, loss = meta_gradient(problem, here, step, self.inner_lr, self.delta)
            return loss + tree.dot(direction, tree.sub(w, here))  # its value is the loss, its gradient the direction

        steps = Zipped(tuple(data.phases[name] for name in self.phases))
        w, loss = descend(objective, down.model, steps, self.training.optimizer.at(data.round))
        return state, Change(tree.sub(w, down.model), loss)


@tunes(inner_lr=Between(0.001, 1.0))
def perfedavg(
    training: Training,
    *,
    variant: Variant = "first-order",
    inner_lr: NonNegative = 0.03,
    delta: Rate = 1e-3,
    tune_steps: Count | None = None,
    tune_epochs: Count | None = None,
    server: OptimizerSpec = PLAIN_MEAN,
) -> Algorithm:
    """A shared model that is good after a few steps on a client's own data (5 epochs, tune_epochs or tune_steps)."""
    if tune_steps is not None and tune_epochs is not None:
        raise BadInput("method.tune_steps: give either tune_steps or tune_epochs, not both")
    if tune_steps is None and tune_epochs is None:
        tune_epochs = 5
    plain = Training(work=training.work, optimizer=Sgd(lr=inner_lr))
    tune = fine_tuning(plain, epochs=tune_epochs, steps=tune_steps)
    client = MetaClient(training=training, tune=tune, variant=variant, inner_lr=inner_lr, delta=delta)
    return Algorithm("perfedavg", client, Averaging(optimizer=server))
