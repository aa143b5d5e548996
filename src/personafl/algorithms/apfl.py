"""APFL: client i uses a mixture of its own model and the shared one.

Y. Deng, M. M. Kamani, M. Mahdavi, *Adaptive Personalized Federated Learning*, 2020, Algorithm 1. Client i has a copy
w_i of the shared model, its own model v_i and a mixing weight α_i; its personal model is α_i v_i + (1 − α_i) w.

    client i:  w_i ← w_i − η ∇f_i(w_i)
               v_i ← v_i − η α_i ∇f_i(v̄_i),   v̄_i = α_i v_i + (1 − α_i) w_i
               α_i ← clip(α_i − η_α ⟨v_i − w_i, ∇f_i(v̄_i)⟩, 0, 1),   if adaptive
    server:    w ← Σ_i p_i w_i

All three step at once, with gradients at the same point: one descent on f(w) + f(αv + (1−α)·w̲), where w̲ is w as a
constant. v_i starts at the first w it receives. α = 0 leaves FedAvg, α = 1 Local training (from w); the shared path is
FedAvg's to the bit whatever α is.

The personal model mixes v_i with the *received* shared model: the paper's predictor joins a local and the global
hypothesis, and this is where its clients stand after each synchronisation. (The authors' code scores it just before
that, with w_i.)

Deviations: α moves in every local step, as the index of its equation has it, by plain SGD at the training's learning
rate unless mixing_lr sets another; the authors' code moves it once a round, with a small decay. Momentum, clipping and
weight decay, if set, act on w and v each by itself. The loss that is reported is the mean of f(w_i) and f(v̄_i). A
newcomer trains v (and α) with w fixed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, NamedTuple

import torch
from annotated_types import Ge, Le
from torch import Tensor

from personafl.algorithms.averaging import PLAIN_MEAN, Averaging, Change, Model
from personafl.algorithms.personal import fine_tuning, retrained, steady
from personafl.algorithms.training import Between, Count, Rate, Training, TunedClient, tunes
from personafl.core import tree
from personafl.core.algorithm import Algorithm, Problem
from personafl.core.batches import Batch, Data, Steps
from personafl.core.descend import descend
from personafl.core.optim import LocalOptimizer, Optimizer, OptimizerSpec, Sgd, by_block
from personafl.core.prox import box
from personafl.core.tree import Params
from personafl.errors import BadInput

Mixing = Annotated[float, Ge(0), Le(1)]


class Mixed(NamedTuple):
    """State of a client: its own model v_i and its mixing weight α_i []. Both never leave the device."""

    own: Params
    mixing: Tensor


@dataclass(frozen=True, kw_only=True)
class ApflClient(TunedClient):
    """Client rule: FedAvg's w_i, beside it v_i, and α_i too where `adapt` says how it steps."""

    by_gradients: ClassVar[bool] = True
    shared: Training = field(default_factory=Training)
    personal: LocalOptimizer = field(default_factory=Sgd)  # of v_i
    mixing: float = 0.25  # α_i at the start
    adapt: Sgd | None = None

    @property
    def phases(self) -> Mapping[str, Steps]:
        """One pass on w_i and v_i together."""
        return {"local": self.shared.work}

    def init(self, problem: Problem, down: Model, generator: torch.Generator) -> Mixed:
        """v_i = w_t."""
        like = next(iter(down.model.values()))
        return Mixed(down.model, torch.full((), self.mixing, dtype=like.dtype, device=like.device))

    def update(self, problem: Problem, down: Model, state: Mixed, data: Data) -> tuple[Mixed, Change]:
        """Train w_i, v_i and maybe α_i."""

        def objective(joint: Params, batch: Batch) -> Tensor:
            w, mixed = _block(joint, "w"), self._state(joint, state)
            constant = tree.map(torch.Tensor.detach, w)
            return problem.mean_loss(w, batch) + problem.mean_loss(_mixture(mixed, constant), batch)

        start = _named("w", down.model) | self._joint(state)
        optimizer = self._blocks(data.round, w=self.shared.optimizer, v=self.personal, mixing=self.adapt)
        joint, loss = descend(objective, start, data.phases["local"], optimizer, _clipped)
        return self._state(joint, state), Change(tree.sub(_block(joint, "w"), down.model), loss / 2)

    def personalize(self, problem: Problem, down: Model, state: Mixed, data: Data) -> Mixed:
        """Train v_i and maybe α_i with w_T fixed."""

        def objective(joint: Params, batch: Batch) -> Tensor:
            return problem.mean_loss(_mixture(self._state(joint, state), down.model), batch)

        mixing = None if self.adapt is None else steady(self.adapt)
        optimizer = self._blocks(data.round, v=self.tune.optimizer, mixing=mixing)
        joint, _ = descend(objective, self._joint(state), data.phases["tune"], optimizer, _clipped)
        return self._state(joint, state)

    def models(self, problem: Problem, down: Model, state: Mixed) -> dict[str, Params]:
        """Return w and α_i v_i + (1 − α_i) w."""
        return {"global": down.model, "personal": _mixture(state, down.model)}

    def _joint(self, state: Mixed) -> Params:
        """What is trained of a state, under names of blocks."""
        return _named("v", state.own) | ({} if self.adapt is None else {"mixing": state.mixing})

    @staticmethod
    def _state(joint: Params, before: Mixed) -> Mixed:
        return Mixed(_block(joint, "v"), joint.get("mixing", before.mixing))

    @staticmethod
    def _blocks(round_: Tensor, **blocks: LocalOptimizer | None) -> Optimizer:
        stepping = {name: spec.at(round_) for name, spec in blocks.items() if spec is not None}
        return by_block(stepping, lambda name: name.partition(".")[0])


def _mixture(state: Mixed, w: Params) -> Params:
    return tree.map(lambda v, shared: state.mixing * v + (1 - state.mixing) * shared, state.own, w)


def _clipped(joint: Params) -> Params:
    return {name: box(value, 0.0, 1.0) if name == "mixing" else value for name, value in joint.items()}


def _named(block: str, params: Params) -> Params:
    return {f"{block}.{name}": value for name, value in params.items()}


def _block(joint: Params, block: str) -> Params:
    return {name[len(block) + 1 :]: value for name, value in joint.items() if name.startswith(f"{block}.")}


@tunes(mixing=Between(0.05, 0.95, log=False))
def apfl(
    training: Training,
    *,
    mixing: Mixing = 0.25,
    adaptive: bool = False,
    mixing_lr: Rate | None = None,
    personal_lr: Rate | None = None,
    tune_epochs: Count = 5,
    server: OptimizerSpec = PLAIN_MEAN,
) -> Algorithm:
    """A personal model per client, mixed with the shared one by a fixed or learned weight."""
    if mixing_lr is not None and not adaptive:
        raise BadInput("method.mixing_lr: the mixing weight is fixed; set method.adaptive = true, or leave this out")
    spec = training.optimizer
    adapt = Sgd(lr=spec.lr if mixing_lr is None else mixing_lr, schedule=spec.schedule) if adaptive else None
    client = ApflClient(
        shared=training,
        personal=retrained(training, lr=personal_lr, epochs=None).optimizer,
        tune=fine_tuning(training, lr=personal_lr, epochs=tune_epochs),
        mixing=mixing,
        adapt=adapt,
    )
    return Algorithm("apfl", client, Averaging(optimizer=server))
