"""FedAlt and FedSim: part of the network is personal, the rest is shared.

K. Pillutla et al., *Federated Learning with Partial Model Personalization*, ICML 2022, Algorithms 1–3. The network's
parameters are (u, v): u shared, v_i client i's own, divided by the problem's split.

    LocalAlt:  v ← v − γ_v ∇_v f_i(u, v),  τ_v steps with the received u fixed;
               then  u ← u − γ_u ∇_u f_i(u, v⁺),  τ_u steps with the new v⁺ fixed
    LocalSim:  (u, v) ← (u − γ_u ∇_u f_i(u, v), v − γ_v ∇_v f_i(u, v)),  τ steps, both gradients at the same point
    server:    u ← u + step of the server optimizer along Σ_i α_i (u_i − u)

v_i starts at the start model's personal part, the same for all; it is sent to a client once. Stateless clients keep
nothing: they are sent it every time and begin again (Appendix C.4). Fine-tuning trains v_i with u fixed (stage c), at a
constant rate; γ_u and γ_v follow the schedule over rounds. The paper has γ_v = γ_u; where `personal_lr` does not say
it γ_v is a tenth of that, for with few samples a client's v_i leaves the common start for what only they have.

Weight decay is the training's for u and v; `personal_decay` (μ) sets that of v alone, in rounds and in fine-tuning, so
that v_i minimises f_i(u, v) + (μ/2)‖v‖²: the regularization of Appendix C (Figures 7 and 10).

With nothing personal both are FedAvg; with everything personal FedSim is Local training from the common start.
Gradient clipping, if set, is per block (u and v).
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch

from personafl.algorithms.averaging import PLAIN_MEAN, Averaging, Change, Shared
from personafl.algorithms.personal import fine_tuning, retrained
from personafl.algorithms.training import Between, Count, NonNegative, Rate, Training, TunedClient, tunes
from personafl.core.algorithm import Algorithm, Empty, Problem, Reduced, ServerRule, sent_once
from personafl.core.batches import Data, Steps
from personafl.core.descend import descend, descent
from personafl.core.optim import OptimizerSpec, by_block
from personafl.core.tree import Params
from personafl.errors import BadInput

SLOWER = Between(0.003, 3.0, of_lr=0.1)


@sent_once("personal")
class Parts(NamedTuple):
    """Down: the shared part, and where personal parts start, which a client that has its own is not sent again."""

    shared: Params
    personal: Params


class PartsEachTime(NamedTuple):
    """Down to stateless clients: both parts, every time."""

    shared: Params
    personal: Params


class Own(NamedTuple):
    """State of a client: its personal part. It never leaves the device."""

    personal: Params


@dataclass(frozen=True, kw_only=True)
class PartialClient(TunedClient):
    """Client rule of FedAlt, and with `simultaneous` of FedSim."""

    by_gradients: ClassVar[bool] = True
    shared: Training = field(default_factory=Training)  # τ_u, γ_u
    personal: Training = field(default_factory=Training)  # τ_v, γ_v
    simultaneous: bool = False
    stateful: bool = True

    @property
    def phases(self) -> Mapping[str, Steps]:
        """FedAlt: a pass on v, then one on u. FedSim: one on both."""
        alternating = {} if self.simultaneous else {"personal": self.personal.work}
        return {**alternating, "local": self.shared.work}

    def init(self, problem: Problem, down: Parts | PartsEachTime, generator: torch.Generator) -> Own | Empty:
        """v_i is the common start; stateless clients keep nothing."""
        return Own(down.personal) if self.stateful else Empty()

    def update(
        self, problem: Problem, down: Parts | PartsEachTime, state: Own | Empty, data: Data
    ) -> tuple[Own | Empty, Change]:
        """LocalAlt or LocalSim."""
        v = self._own(down, state)
        local = self._both if self.simultaneous else self._alternately
        v, change = local(problem, down.shared, v, data)
        return (Own(v) if self.stateful else Empty()), change

    def personalize(self, problem: Problem, down: Parts | PartsEachTime, state: Own | Empty, data: Data) -> Own:
        """Fine-tune v_i with u fixed."""
        v = self._own(down, state)
        optimizer = self.tune.optimizer.at(data.round)
        return Own(descend(problem.mean_loss_given(down.shared), v, data.phases["tune"], optimizer)[0])

    def models(self, problem: Problem, down: Parts | PartsEachTime, state: Own | Empty) -> dict[str, Params]:
        """Return (u, the common start) and (u, v_i)."""
        own = {"personal": down.shared | state.personal} if isinstance(state, Own) else {}
        return {"global": down.shared | down.personal, **own}

    def expects(self, problem: Problem, start: Params) -> Parts | PartsEachTime:
        """Return the two parts."""
        return _parts(problem.divide(start), stateful=self.stateful)

    @staticmethod
    def _own(down: Parts | PartsEachTime, state: Own | Empty) -> Params:
        return state.personal if isinstance(state, Own) else down.personal

    def _alternately(self, problem: Problem, u: Params, v: Params, data: Data) -> tuple[Params, Change]:
        v, _ = descend(problem.mean_loss_given(u), v, data.phases["personal"], self.personal.optimizer.at(data.round))
        optimizer = self.shared.optimizer.at(data.round)
        return v, Change(*descent(problem.mean_loss_given(v), u, data.phases["local"], optimizer))

    def _both(self, problem: Problem, u: Params, v: Params, data: Data) -> tuple[Params, Change]:
        blocks = {"u": self.shared.optimizer.at(data.round), "v": self.personal.optimizer.at(data.round)}
        optimizer = by_block(blocks, lambda name: "v" if name in v else "u")
        w, loss = descend(problem.mean_loss, u | v, data.phases["local"], optimizer)
        return {name: w[name] for name in v}, Change({name: w[name] - u[name] for name in u}, loss)


class PartialState(NamedTuple):
    """State of the server: the shared part with its optimizer, and where personal parts start."""

    shared: Shared
    personal: Params


@dataclass(frozen=True, kw_only=True)
class PartialAveraging(ServerRule):
    """Server rule: FedAvg's on the shared part."""

    averages: ClassVar[bool] = True
    averaging: Averaging = field(default_factory=Averaging)
    stateful: bool = True

    def init(self, problem: Problem, start: Params, population: float) -> PartialState:
        """Divide the start model."""
        u, v = problem.divide(start)
        return PartialState(self.averaging.init(problem, u, population), v)

    def broadcast(self, state: PartialState) -> Parts | PartsEachTime:
        """Send the shared part, and where personal parts start."""
        return _parts((state.shared.model, state.personal), stateful=self.stateful)

    def update(self, state: PartialState, uploads: Reduced, round_: int) -> PartialState:
        """Step the shared part along the mean change."""
        return state._replace(shared=self.averaging.update(state.shared, uploads, round_))


def _parts(parts: tuple[Params, Params], *, stateful: bool) -> Parts | PartsEachTime:
    return Parts(*parts) if stateful else PartsEachTime(*parts)


@tunes(personal_lr=SLOWER)
def fedalt(
    training: Training,
    *,
    personal_lr: Rate | None = None,
    personal_epochs: Count | None = None,
    personal_steps: Count | None = None,
    personal_decay: NonNegative | None = None,
    tune_lr: Rate | None = None,
    tune_epochs: Count = 5,
    stateful: bool = True,
    server: OptimizerSpec = PLAIN_MEAN,
) -> Algorithm:
    """Personal part first, then the shared part; model.personal says which is which."""
    if personal_epochs is not None and personal_steps is not None:
        raise BadInput("method.personal_steps: give either personal_epochs or personal_steps, not both")
    lr = training.optimizer.lr * 0.1 if personal_lr is None else personal_lr
    personal = retrained(training, lr=lr, epochs=personal_epochs, steps=personal_steps, decay=personal_decay)
    tune = fine_tuning(training, lr=tune_lr, epochs=tune_epochs, decay=personal_decay)
    client = PartialClient(shared=training, personal=personal, tune=tune, stateful=stateful)
    averaging = PartialAveraging(averaging=Averaging(optimizer=server), stateful=stateful)
    return Algorithm("fedalt", client, averaging, personal="auto")


@tunes(personal_lr=SLOWER)
def fedsim(
    training: Training,
    *,
    personal_lr: Rate | None = None,
    personal_decay: NonNegative | None = None,
    tune_lr: Rate | None = None,
    tune_epochs: Count = 5,
    stateful: bool = True,
    server: OptimizerSpec = PLAIN_MEAN,
) -> Algorithm:
    """Personal and shared part at the same time; model.personal says which is which, as in fedalt."""
    alternating = fedalt(
        training,
        personal_lr=personal_lr,
        personal_decay=personal_decay,
        tune_lr=tune_lr,
        tune_epochs=tune_epochs,
        stateful=stateful,
        server=server,
    )
    client = dataclasses.replace(alternating.client, simultaneous=True)  # type: ignore[type-var]
    return dataclasses.replace(alternating, name="fedsim", client=client)
