"""FedDBE: what is special about a client's representations is kept apart from the shared model, as a vector.

J. Zhang et al., *Eliminating Domain Bias for Federated Learning in Representation Space*, NeurIPS 2023 (DBE on FedAvg):
a personal bias memory (PRBM) and a regularization of means (MR). The network is a body θ with a linear head ψ = (W, b)
on its features z = f(x; θ); client i has a vector s_i as wide as z, 0 at first; z̄ is a mean that all agree on.

    client i:  (θ, ψ, s_i) ← − η ∇ [ mean of ℓ(ψ(z + s_i), y) + κ ½ mean_j (m − z̄)²_j ]
               m ← (1 − μ) m + μ mean of z over the minibatch,   from 0 in every round
    server:    (θ, ψ) ← Σ_i p_i (θ_i, ψ_i);   z̄ ← Σ_i p_i (the mean of client i's z), of the first round alone

W(z + s_i) + b is a linear head too: the personal model is the same network with the bias b + W s_i, and needs nothing
more on the device or in a file. κ = 0 leaves PRBM; with s_i held at 0 as well it is FedAvg. MR divides by the width of
z, as the authors' code does; κ = 50 and μ = 1 are theirs. The default κ = 5 was chosen by validation data of
clients with few samples (docs/evidence.md, Defaults).

Deviations: in the paper a period before training finds z̄; here the first round's training does, without MR (κ is 0 in
it) and with s_i, from the clients that take part in it and all minibatches. z̄ is never changed after. A newcomer learns
s_i alone. Weight decay draws s_i to 0, and momentum and clipping, if set, act on it by itself.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from personafl.algorithms.averaging import PLAIN_MEAN, Averaging, Shared
from personafl.algorithms.features import check_head, head_of, scores_and_features
from personafl.algorithms.fedspa import Density
from personafl.algorithms.personal import fine_tuning
from personafl.algorithms.training import (
    Between,
    Count,
    NonNegative,
    OnePassClient,
    Rate,
    Training,
    TunedClient,
    tunes,
)
from personafl.core.algorithm import Algorithm, Problem, Reduced, ServerRule
from personafl.core.batches import Batch, Data
from personafl.core.descend import descend
from personafl.core.losses import mean_of_real
from personafl.core.optim import OptimizerSpec, by_block, scale
from personafl.core.tree import Params

_OWN, _RUNNING, _TOTAL = "own/shift", "own/running", "own/total"  # what is trained or summed beside the model


class Consensus(NamedTuple):
    """Down: the shared model, z̄, and whether that is known, 1 or 0."""

    model: Params
    mean: Tensor  # [width]
    known: Tensor  # []


class Shift(NamedTuple):
    """State of a client: s_i [width]. It never leaves the device."""

    shift: Tensor


class Moved(NamedTuple):
    """Up: how training moved the shared model, and the mean of z on the way."""

    change: Params
    mean: Tensor  # [width]
    loss: Tensor


@dataclass(frozen=True, kw_only=True)
class DbeClient(OnePassClient, TunedClient):
    """Client rule: the model and the shift at once."""

    strength: float = 5.0  # κ
    momentum: float = 1.0  # μ

    def expects(self, problem: Problem, start: Params) -> Consensus:
        """Return the shared model, and a mean that is not known yet."""
        check_head("feddbe", problem, start, bias=True)
        return Consensus(start, _none(problem, start), torch.zeros((), device=_none(problem, start).device))

    def init(self, problem: Problem, down: Consensus, generator: torch.Generator) -> Shift:
        """s_i = 0."""
        return Shift(_none(problem, down.model))

    def update(self, problem: Problem, down: Consensus, state: Shift, data: Data) -> tuple[Shift, Moved]:
        """Train (θ, ψ, s_i); sums over z go beside them, as parameters whose gradient is what is to be added."""

        def objective(joint: Params, batch: Batch) -> Tensor:
            w = {name: value for name, value in joint.items() if name in down.model}
            scores, z = scores_and_features(problem, shifted(problem, w, joint[_OWN]), batch)
            z = z.flatten(1, -2).mean(1) if z.ndim > 2 else z  # a sequence counts by its mean
            sums = torch.where(batch.real.unsqueeze(-1), z, 0.0).sum(0)
            here = sums / batch.real.sum().clamp(min=1)
            running = (1 - self.momentum) * joint[_RUNNING].detach() + self.momentum * here
            held = 0.5 * (running - down.mean.to(running)).square().mean()
            kept = (joint[_RUNNING] * (joint[_RUNNING] - here).detach()).sum() - (joint[_TOTAL] * sums.detach()).sum()
            loss = mean_of_real(problem.loss(scores, batch.y), batch)
            return loss + self.strength * down.known.to(held) * held + kept - kept.detach()

        trained = self.training.optimizer.at(data.round)
        blocks = {"model": trained, "own": trained, "running": scale(-self.momentum), "total": scale(-1.0)}
        kinds = {_OWN: "own", _RUNNING: "running", _TOTAL: "total"}
        none = torch.zeros_like(state.shift)
        start = down.model | {_OWN: state.shift, _RUNNING: none, _TOTAL: none}
        batches = data.phases["local"]
        joint, loss = descend(objective, start, batches, by_block(blocks, lambda name: kinds.get(name, "model")))
        change = {name: joint[name] - value for name, value in down.model.items()}
        return Shift(joint[_OWN]), Moved(change, joint[_TOTAL] / batches.real.sum().clamp(min=1), loss)

    def personalize(self, problem: Problem, down: Consensus, state: Shift, data: Data) -> Shift:
        """Learn s_i under the shared model."""

        def objective(own: Params, batch: Batch) -> Tensor:
            return problem.mean_loss(shifted(problem, down.model, own[_OWN]), batch)

        optimizer = self.tune.optimizer.at(data.round)
        return Shift(descend(objective, {_OWN: state.shift}, data.phases["tune"], optimizer)[0][_OWN])

    def models(self, problem: Problem, down: Consensus, state: Shift) -> dict[str, Params]:
        """Return (θ, W, b) and (θ, W, b + W s_i)."""
        return {"global": down.model, "personal": shifted(problem, down.model, state.shift)}


def shifted(problem: Problem, w: Params, shift: Tensor) -> Params:
    """Return the network that adds a vector to what goes into its head."""
    head = head_of(problem, w)
    assert head.bias is not None  # as `expects` checked
    return w | {head.bias: w[head.bias] + w[head.weight] @ shift.to(w[head.weight])}


def _none(problem: Problem, w: Params) -> Tensor:
    weight = w[head_of(problem, w).weight]
    return weight.new_zeros(weight.shape[1])


class DbeState(NamedTuple):
    """State of the server: FedAvg's, z̄, and whether that is known."""

    shared: Shared
    mean: Tensor
    known: Tensor


@dataclass(frozen=True, kw_only=True)
class DbeServer(ServerRule):
    """Server rule: FedAvg's, and the first round's mean of z."""

    averages: ClassVar[bool] = False
    averaging: Averaging

    def init(self, problem: Problem, start: Params, population: float) -> DbeState:
        """Start at the given model; z̄ is not known."""
        none = _none(problem, start)
        return DbeState(self.averaging.init(problem, start, population), none, torch.zeros((), device=none.device))

    def broadcast(self, state: DbeState) -> Consensus:
        """Send the model and z̄; where states were mixed, that of the servers that know one."""
        some = state.known > 0
        mean = state.mean / torch.where(some, state.known, 1.0)
        return Consensus(state.shared.model, mean, some.to(state.known))

    def update(self, state: DbeState, uploads: Reduced, round_: int) -> DbeState:
        """Step the model along the mean change; take z̄ if it is not known yet."""
        sent = self.broadcast(state)
        mean = torch.where(sent.known > 0, sent.mean, uploads.mean().mean)
        return DbeState(self.averaging.update(state.shared, uploads, round_), mean, torch.ones_like(state.known))


@tunes(strength=Between(0.5, 50.0))
def feddbe(
    training: Training,
    *,
    strength: NonNegative = 5.0,
    momentum: Density = 1.0,
    tune_lr: Rate | None = None,
    tune_epochs: Count = 5,
    server: OptimizerSpec = PLAIN_MEAN,
) -> Algorithm:
    """A shared model whose features keep a common mean, and a personal vector that is added to them."""
    client = DbeClient(
        training=training,
        strength=strength,
        momentum=momentum,
        tune=fine_tuning(training, lr=tune_lr, epochs=tune_epochs),
    )
    return Algorithm("feddbe", client, DbeServer(averaging=Averaging(optimizer=server)), personal="output")
