"""FedCP: every sample's features are divided between a shared head and a personal one, by a policy that all share.

J. Zhang et al., *FedCP: Separating Feature Information for Personalized Federated Learning via Conditional Policy*, KDD
2023. The network is a body θ with a linear head (W, b) on its features z = f(x; θ), as wide as d; the head is shared,
client i has one of its own, φ_i = (W_i, b_i), and ω = (P, p, a layer norm) is the shared policy.

    v_i = Σ_c (row c of W_i), of the head with which the round begins
    r = softmax over each feature's pair (a_k, c_k),   (a, c) = ReLU(LayerNorm(P (z ⊙ v_i/‖v_i‖) + p)),  P [2d, d]
    scores = W_i (r ⊙ z) + b_i + W ((1 − r) ⊙ z) + b
    client i:  (θ, φ_i, ω) ← − η ∇ [ mean of ℓ(scores, y) + λ MMD²(z, z⁰) ],   z⁰ = f(x; θ as received), W and b fixed
    server:    θ ← Σ_i p_i θ_i;   ω ← Σ_i p_i ω_i;   (W, b) ← Σ_i p_i ½ ((W, b) + φ_i)

MMD² is of the minibatch, with the kernel Σ_a exp(−‖u − u'‖²/2a), a = 10, 15, 20, 50: a mean over all pairs of samples.
λ = 5 is the authors' for images; the default 0.5 was chosen by validation data of clients with few samples
(docs/evidence.md, Defaults). The personal model is a network with a gated head (`core.heads`), in which v_i is part
of P; it has θ, ω and the shared head as they were last received. What a client sends of the head is ½ (φ_i − (W, b)):
whoever sees it singly knows φ_i.

Deviations: the authors' code adds Gumbel noise to (a, c), in training and when it is scored; here r is what the formula
says, and a model answers alike each time. v_i is of the common head at first, where the code draws it. A newcomer
trains φ_i alone. The policy starts as torch draws a linear layer, by a generator that follows from the start of the
head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from personafl.algorithms.averaging import PLAIN_MEAN, Averaging, Change, Model, Shared
from personafl.algorithms.features import check_head, drawn_from, head_of, linear_start, scores_and_features
from personafl.algorithms.fedalt import Own
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
from personafl.core.algorithm import Algorithm, Problem
from personafl.core.batches import Batch, Data
from personafl.core.descend import descend
from personafl.core.heads import Policy
from personafl.core.losses import mean_of_real
from personafl.core.optim import OptimizerSpec
from personafl.core.tree import Params

_POLICY, _OWN = "policy/", "own/"  # before the names of ω's and φ's weights, where they are beside the network's
BANDWIDTHS = (10.0, 15.0, 20.0, 50.0)


@dataclass(frozen=True, kw_only=True)
class CpClient(OnePassClient, TunedClient):
    """Client rule: the body, the personal head and the policy at once."""

    strength: float = 0.5  # λ

    def expects(self, problem: Problem, start: Params) -> Model:
        """Return the shared network and the policy; the head must be a linear layer that gives the outputs."""
        check_head("fedcp", problem, start)
        return Model(start | _policy_start(problem, start))

    def init(self, problem: Problem, down: Model, generator: torch.Generator) -> Own:
        """φ_i is the common head."""
        return Own(problem.divide(_network(down))[1])

    def update(self, problem: Problem, down: Model, state: Own, data: Data) -> tuple[Own, Change]:
        """Train θ, φ_i and ω, with the received head fixed."""
        network, along = _network(down), _context(problem, state.personal)
        body, head = problem.divide(network)

        def objective(joint: Params, batch: Batch) -> Tensor:
            own = {name: joint[_OWN + name] for name in head}
            z = scores_and_features(problem, {name: joint[name] for name in body} | head, batch)[1]
            before = scores_and_features(problem, network, batch)[1].detach()
            losses = problem.loss(_scores(problem, z, _policy(joint), along, own, head), batch.y)
            return mean_of_real(losses, batch) + self.strength * discrepancy(z, before, batch)

        start = body | {_OWN + name: value for name, value in state.personal.items()}
        start |= {name: value for name, value in down.model.items() if name.startswith(_POLICY)}
        joint, loss = descend(objective, start, data.phases["local"], self.training.optimizer.at(data.round))
        own = {name: joint[_OWN + name] for name in head}
        halves = {name: 0.5 * (own[name] - value) for name, value in head.items()}
        change = {name: halves[name] if name in head else joint[name] - value for name, value in down.model.items()}
        return Own(own), Change(change, loss)

    def personalize(self, problem: Problem, down: Model, state: Own, data: Data) -> Own:
        """Train φ_i under the received body and policy."""
        network, along, policy = _network(down), _context(problem, state.personal), _policy(down.model)
        head = problem.divide(network)[1]

        def objective(own: Params, batch: Batch) -> Tensor:
            z = scores_and_features(problem, network, batch)[1]
            return mean_of_real(problem.loss(_scores(problem, z, policy, along, own, head), batch.y), batch)

        return Own(descend(objective, state.personal, data.phases["tune"], self.tune.optimizer.at(data.round))[0])

    def models(self, problem: Problem, down: Model, state: Own) -> dict[str, Params]:
        """Return the shared network, and that with a gated head."""
        network, policy = _network(down), _policy(down.model)
        names = head_of(problem, network)
        layer = names.weight.removesuffix("weight")
        gate = {
            f"{layer}policy.weight": policy.weight * _context(problem, state.personal),
            f"{layer}policy.bias": policy.bias,
            f"{layer}norm.weight": policy.scale,
            f"{layer}norm.bias": policy.shift,
        }
        head = {f"{layer}shared.{name.removeprefix(layer)}": network[name] for name in state.personal}
        return {"global": network, "personal": network | state.personal | gate | head}


def discrepancy(z: Tensor, other: Tensor, batch: Batch) -> Tensor:
    """Return the squared MMD of two minibatches of features [batch, …, width]; of a sequence the mean counts."""
    z, other = (part.flatten(1, -2).mean(1) if part.ndim > 2 else part for part in (z, other))
    real = batch.real.to(z)
    pairs = real.unsqueeze(1) * real

    def alike(a: Tensor, b: Tensor) -> Tensor:
        apart = a.square().sum(-1).unsqueeze(1) + b.square().sum(-1) - 2 * a @ b.mT
        kernel = torch.stack([torch.exp(-0.5 * apart / width) for width in BANDWIDTHS]).sum(0)
        return (pairs * kernel).sum()

    return (alike(z, z) + alike(other, other) - 2 * alike(z, other)) / pairs.sum().clamp(min=1)


def _network(down: Model) -> Params:
    return {name: value for name, value in down.model.items() if not name.startswith(_POLICY)}


def _policy(params: Params) -> Policy:
    return Policy(*(params[_POLICY + name] for name in Policy._fields))


def _context(problem: Problem, own: Params) -> Tensor:
    """Return v_i/‖v_i‖ [width]."""
    return functional.normalize(own[head_of(problem, own).weight].sum(0), dim=0)


def _scores(problem: Problem, z: Tensor, policy: Policy, along: Tensor, own: Params, shared: Params) -> Tensor:
    names, r = head_of(problem, own), policy.share(z * along)
    parts = ((own, r * z), (shared, (1 - r) * z))
    mine, others = (functional.linear(x, head[names.weight], head.get(names.bias or "")) for head, x in parts)
    return mine + others


def _policy_start(problem: Problem, start: Params) -> Params:
    weight = start[head_of(problem, start).weight]
    width = weight.shape[1]
    drawn, bias = linear_start(drawn_from(weight, "policy"), weight, 2 * width)
    policy = Policy(drawn, bias, torch.ones_like(bias), torch.zeros_like(bias))
    return {_POLICY + name: value for name, value in policy._asdict().items()}


class CpServer(Averaging):
    """Server rule: FedAvg's on the network and the policy."""

    def init(self, problem: Problem, start: Params, population: float) -> Shared:
        """Start at the given network, with a policy."""
        return super().init(problem, start | _policy_start(problem, start), population)


@tunes(strength=Between(0.05, 50.0))
def fedcp(
    training: Training,
    *,
    strength: NonNegative = 0.5,
    tune_lr: Rate | None = None,
    tune_epochs: Count = 5,
    server: OptimizerSpec = PLAIN_MEAN,
) -> Algorithm:
    """A policy divides the features of each sample between a shared head and a personal one."""
    client = CpClient(training=training, strength=strength, tune=fine_tuning(training, lr=tune_lr, epochs=tune_epochs))
    return Algorithm("fedcp", client, CpServer(optimizer=server), personal="output", head="gated")
