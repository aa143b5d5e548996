"""pFedHN: a network at the server makes each client's model from a vector that stands for the client.

A. Shamsian et al., *Personalized Federated Learning using Hypernetworks*, ICML 2021, Algorithm 1. The server has a
hypernetwork h with weights φ, and a vector v_i for each client, drawn from N(0, 1) at first:

    server:    sends client i its own θ_i = h(v_i; φ)
    client i:  Δθ_i = θ̃_i − θ_i, where θ̃_i is θ_i after τ steps of SGD on f_i; it keeps nothing
    server:    φ ← φ + α Σ_i p_i (∂θ_i/∂φ)ᵀ Δθ_i,   v_i ← v_i + α (∂θ_i/∂v_i)ᵀ Δθ_i

    h:         z_1 = W_1 v + b_1,  z_l = W_l relu(z_{l−1}) + b_l,   θ = H z_L + θ_0: a head H for each weight of θ

One client a round is the paper's algorithm; of several, φ takes the mean step, weighted as everywhere, along its loss
Σ_i p_i f_i(h(v_i; φ)). A newcomer is sent h of the mean of all vectors, and fine-tunes that.

h has (H's width + 1) times the numbers of θ, at the server alone: it suits small networks.

Deviations: H starts at 0 and θ_0 at the shared start, so that training begins where other methods' does, also from a
pretrained model; layers start at He's variance with b = 0, so that α need not grow with their number. The server's step
is plain. The paper has one vector of 1 + n/4 numbers for n clients, and adapts the vector of a newcomer, not its model.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vjp

from personafl.algorithms.averaging import Model
from personafl.algorithms.fedavg import FedAvgClient
from personafl.algorithms.personal import Personal, fine_tuning
from personafl.algorithms.rows import rows_of, seed_of, with_rows
from personafl.algorithms.training import LIKE_LR, Between, Count, Rate, Training, TunedClient, tunes
from personafl.core import rng, tree
from personafl.core.algorithm import Algorithm, Empty, Own, Problem, Reduced, ServerRule, mean_dtypes
from personafl.core.batches import Data
from personafl.core.descend import descend
from personafl.core.tree import Params


class Hyper(NamedTuple):
    """φ: the weights and biases of the layers, and for each weight of θ its head [its shape, width] and θ_0."""

    layers: Params
    heads: Params
    start: Params


class HyperState(NamedTuple):
    """State of the server: φ, and whose vectors it has."""

    hyper: Hyper
    clients: Tensor  # [known], ascending
    vectors: Tensor  # [known, size]
    seed: Tensor  # [] from which vectors are drawn


class Pulled(NamedTuple):
    """Joined: Σ_i p_i (∂θ_i/∂φ)ᵀ Δθ_i, each client's (∂θ_i/∂v_i)ᵀ Δθ_i, and Σ_i p_i of the losses."""

    hyper: Hyper
    clients: Tensor  # [joined]
    vectors: Tensor  # [joined, size]
    loss: Tensor


@dataclass(frozen=True, kw_only=True)
class HyperClient(TunedClient, FedAvgClient):
    """Client rule: train what is received, and keep nothing; a newcomer fine-tunes it."""

    by_gradients: ClassVar[bool] = True

    def personalize(self, problem: Problem, down: Model, state: Empty, data: Data) -> Personal:
        """Fine-tune θ."""
        optimizer = self.tune.optimizer.at(data.round)
        return Personal(descend(problem.mean_loss, down.model, data.phases["tune"], optimizer)[0])

    def models(self, problem: Problem, down: Model, state: Empty | Personal) -> dict[str, Params]:
        """Return θ_i as it is received, or fine-tuned; there is no model for all."""
        return {"personal": state.model if isinstance(state, Personal) else down.model}


@dataclass(frozen=True, kw_only=True)
class HyperServer(ServerRule):
    """Server rule: make a model for each client, and learn from how the client changes it."""

    needs_each: ClassVar[bool] = True
    size: int = 16  # of v
    width: int = 100  # of the layers
    layers: int = 4  # L
    lr: float = 0.02  # α

    def init(self, problem: Problem, start: Params, population: float) -> HyperState:
        """Draw the layers; every model is the start."""
        seed, like = seed_of(start), next(iter(start.values()))
        layers: Params = {}
        for number in range(self.layers):
            wide, gain = (self.size, 1.0) if number == 0 else (self.width, 2.0)
            drawn = torch.randn(self.width, wide, generator=rng.generator(seed, "layer", number), dtype=torch.float64)
            layers[f"{number}.weight"] = (drawn * (gain / wide) ** 0.5).to(like)
            layers[f"{number}.bias"] = like.new_zeros(self.width)
        heads = {name: value.new_zeros(*value.shape, self.width) for name, value in start.items()}
        numbers = torch.zeros(0, dtype=torch.int64, device=like.device)
        kept = torch.tensor(seed, device=like.device)
        return HyperState(Hyper(layers, heads, start), numbers, like.new_zeros(0, self.size), kept)

    def broadcast(self, state: HyperState) -> Model:
        """Send who is nobody in particular h(v̄)."""
        mean = state.vectors.sum(0, keepdim=True) / max(1, len(state.vectors))
        return Model({name: value.squeeze(0) for name, value in made(state.hyper, mean).items()})

    def address(self, state: HyperState, clients: NDArray[Any]) -> Own:
        """Send each client θ_i."""
        return {"model": made(state.hyper, self.vectors_of(state, clients))}

    def vectors_of(self, state: HyperState, clients: NDArray[Any]) -> Tensor:
        """Return v_i, [clients, size]; as it is drawn, of a client that was not heard of."""
        device, dtype = state.vectors.device, state.vectors.dtype
        keys = tree.on(device, rng.mix(int(state.seed), "vector", clients).view(np.int64))
        drawn = rng.gaussians(keys, self.size, dtype)
        return rows_of(state.clients, state.vectors, tree.on(device, clients), drawn)

    def join_from(
        self, state: HyperState, joined: Reduced | None, stacked: Any, weights: Tensor, clients: NDArray[Any], _: int
    ) -> Reduced:
        """Take Δθ_i back through h."""
        vectors, weights = self.vectors_of(state, clients), weights.to(torch.float64)

        def weighted(leaf: Tensor) -> Tensor:
            return leaf * weights.to(leaf).reshape(-1, *[1] * (leaf.ndim - 1))

        back = vjp(made, state.hyper, vectors)[1]
        hyper, own = back(tree.map(weighted, stacked.change))[0], back(stacked.change)[1]
        loss = (weights * stacked.loss.to(torch.float64)).sum()
        part = Pulled(tree.map(Tensor.double, hyper), tree.on(own.device, clients), own, loss)
        dtypes = mean_dtypes(Pulled(hyper, part.clients, own, stacked.loss))
        if joined is None:
            return Reduced(part, weights.sum(), len(clients), dtypes)
        total = joined.total
        both = Pulled(
            tree.add(total.hyper, part.hyper),
            torch.cat([total.clients, part.clients]),
            torch.cat([total.vectors, part.vectors]),
            total.loss + loss,
        )
        return Reduced(both, joined.weight + weights.sum(), joined.clients + len(clients), dtypes)

    def update(self, state: HyperState, uploads: Reduced, round_: int) -> HyperState:
        """Step φ, and the vectors of those who took part."""
        have, clients = uploads.total, uploads.total.clients
        hyper = tree.map(lambda w, total: w + self.lr * (total / uploads.weight).to(w), state.hyper, have.hyper)
        vectors = self.vectors_of(state, clients.cpu().numpy()) + self.lr * have.vectors
        known, rows = with_rows(state.clients, state.vectors, clients, vectors)
        return HyperState(hyper, known, rows, state.seed)


def made(hyper: Hyper, vectors: Tensor) -> Params:
    """Return h(v; φ) of vectors [clients, size], stacked."""
    z = vectors
    for number in range(len(hyper.layers) // 2):
        z = torch.relu(z) if number else z
        z = z @ hyper.layers[f"{number}.weight"].T + hyper.layers[f"{number}.bias"]
    return {name: start + torch.tensordot(z, hyper.heads[name], ([1], [-1])) for name, start in hyper.start.items()}


@tunes(server_lr=Between(0.001, 0.1), tune_lr=LIKE_LR)
def pfedhn(
    training: Training,
    *,
    server_lr: Rate = 0.02,
    vector: Count = 16,
    width: Count = 100,
    layers: Count = 4,
    tune_lr: Rate | None = None,
    tune_epochs: Count = 5,
) -> Algorithm:
    """A network at the server makes each client's model from a vector of the client."""
    client = HyperClient(training=training, tune=fine_tuning(training, lr=tune_lr, epochs=tune_epochs))
    return Algorithm("pfedhn", client, HyperServer(size=vector, width=width, layers=layers, lr=server_lr))
