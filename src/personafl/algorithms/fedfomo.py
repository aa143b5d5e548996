"""FedFomo: each client is sent models of others, and takes over of each as much as it is better on its own data.

M. Zhang et al., *Personalized Federated Learning with First Order Model Optimization*, ICLR 2021. Client i has θ_i,
which it began its last round with, and θ̂_i, which that became. The server sends it the θ̂_n of `models` (M) others:

    client i:  w_n = max(0, (L_i(θ_i) − L_i(θ̂_n)) / ‖θ̂_n − θ_i‖),  of those and of its own θ̂_i
               θ_i ← θ_i + Σ_n (w_n/Σ_m w_m)(θ̂_n − θ_i);  as it was, if no w_n > 0
               θ̂_i ← τ steps of SGD on f_i from θ_i
    server:    keeps θ̂_i, and p_in ← p_in + w_n/Σ_m w_m;  client i is sent the M largest p_in,
               or, with probability ε (`explore`), M that are drawn; ties are broken by draws

With M = 0 models of others it would be local training. The personal model is θ̂_i; there is none for all. A newcomer
begins with the mean of the models that there are (the paper: all with one start) and fine-tunes that.

Clients' models are seen by other clients, who are not told whose they are.

Deviations: L_i is the loss of a pass over the training data, without dropout, where the paper holds data out on the
device for it: so a client's own model, which has seen them, weighs more. ε stays as it is; the paper lowers it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
import torch
from annotated_types import Ge, Le
from numpy.typing import NDArray
from torch import Tensor

from personafl.algorithms.personal import Personal, fine_tuning, retrained
from personafl.algorithms.rows import rows_of, seed_of, with_rows
from personafl.algorithms.slots import looked_at
from personafl.algorithms.training import Count, Rate, Training, TunedClient
from personafl.core import rng, tree
from personafl.core.algorithm import Algorithm, Own, Problem, Reduced, ServerRule, sent_once
from personafl.core.batches import Batches, Data, Steps
from personafl.core.descend import descend
from personafl.core.tree import Params

Share = Annotated[float, Ge(0), Le(1)]


@sent_once("start")
class Others(NamedTuple):
    """Down: what a newcomer begins with, models of others [M, …], and which of these there are."""

    start: Params
    models: Params  # [M, …]
    real: Tensor  # [M]


class Fomo(NamedTuple):
    """State of a client: θ_i and θ̂_i."""

    begun: Params
    model: Params


class Weighed(NamedTuple):
    """Up: θ̂_i, the weights of the models of others, and the mean training loss."""

    model: Params
    weights: Tensor  # [M]
    loss: Tensor


class FomoState(NamedTuple):
    """State of the server: the start, whose models it has, these, what they are to each other, and its rounds."""

    start: Params
    clients: Tensor  # [known], ascending
    models: Params  # [known, …]
    liked: Tensor  # [known, known] p
    rounds: Tensor  # []
    seed: Tensor  # [] from which is drawn


class Heard(NamedTuple):
    """What some clients sent: their models, whom each was sent (−1: nobody), and the weights of these."""

    clients: Tensor  # [some]
    models: Params  # [some, …]
    sent: Tensor  # [some, M]
    weights: Tensor  # [some, M]


class All(NamedTuple):
    """Joined: what all sent, side by side, and the weighted sum of losses."""

    heard: tuple[Heard, ...]
    loss: Tensor


@dataclass(frozen=True, kw_only=True)
class FomoClient(TunedClient):
    """Client rule: take over what helps, then train."""

    uploads_of_state: ClassVar[tuple[str, ...]] = ("model",)
    training: Training = field(default_factory=Training)
    look: Steps = field(default_factory=lambda: Steps(epochs=1))
    count: int = 5  # M

    @property
    def phases(self) -> Mapping[str, Steps]:
        """A pass that only looks, and one of training."""
        return {"look": self.look, "local": self.training.work}

    def expects(self, problem: Problem, start: Params) -> Others:
        """Return a start, and no models."""
        return Others(start, *nobody(start, self.count))

    def init(self, problem: Problem, down: Others, generator: torch.Generator) -> Fomo:
        """θ_i = θ̂_i = the start."""
        return Fomo(down.start, down.start)

    def update(self, problem: Problem, down: Others, state: Fomo, data: Data) -> tuple[Fomo, Weighed]:
        """Move θ_i towards what is better, and train from there."""
        weights = self.weights(problem, down, state, data.phases["look"])
        models = {name: torch.cat([value, state.model[name].unsqueeze(0)]) for name, value in down.models.items()}
        begun = {name: w + torch.tensordot(weights, models[name] - w, 1) for name, w in state.begun.items()}
        optimizer = self.training.optimizer.at(data.round)
        model, loss = descend(problem.mean_loss, begun, data.phases["local"], optimizer)
        return Fomo(begun, model), Weighed(model, weights[:-1], loss)

    def weights(self, problem: Problem, down: Others, state: Fomo, batches: Batches) -> Tensor:
        """Return w_n/Σ_m w_m of the models of others and, last, of its own, [M + 1]; all 0 if none is better."""
        each = {
            name: torch.cat([value, torch.stack([state.model[name], state.begun[name]])])
            for name, value in down.models.items()
        }
        losses, real = looked_at(problem, each, batches)
        loss = torch.where(real.unsqueeze(-1), losses, 0.0).sum(0) / real.sum().clamp(min=1)  # [M + 2]
        squares = sum((value[:-1] - value[-1:]).square().flatten(1).sum(1) for value in each.values())
        assert isinstance(squares, Tensor)
        there = torch.cat([down.real, down.real.new_ones(1)]) & (squares > 0)
        better = (loss[-1] - loss[:-1]).clamp(min=0) / torch.where(there, squares, 1.0).sqrt()
        w = torch.where(there, better, 0.0)
        return w / torch.where(w.sum() > 0, w.sum(), 1.0)

    def personalize(self, problem: Problem, down: Others, state: Fomo, data: Data) -> Personal:
        """Fine-tune θ̂_i."""
        optimizer = self.tune.optimizer.at(data.round)
        return Personal(descend(problem.mean_loss, state.model, data.phases["tune"], optimizer)[0])

    def models(self, problem: Problem, down: Others, state: Fomo | Personal) -> dict[str, Params]:
        """Return θ̂_i; there is no model for all."""
        return {"personal": state.model}


def nobody(start: Params, count: int) -> tuple[Params, Tensor]:
    """Return `count` models of nobody, and that they are not there."""
    device = next(iter(start.values())).device
    models = {name: value.new_zeros(count, *value.shape) for name, value in start.items()}
    return models, torch.zeros(count, dtype=torch.bool, device=device)


@dataclass(frozen=True, kw_only=True)
class FomoServer(ServerRule):
    """Server rule: keep the models, and send each client those that helped it most."""

    needs_each: ClassVar[bool] = True
    count: int = 5  # M
    explore: float = 0.3  # ε

    def init(self, problem: Problem, start: Params, population: float) -> FomoState:
        """Know nobody."""
        like = next(iter(start.values()))
        nobodys = torch.zeros(0, dtype=torch.int64, device=like.device)
        models = {name: value.new_zeros(0, *value.shape) for name, value in start.items()}
        rounds, seed = torch.zeros_like(nobodys.sum()), torch.tensor(seed_of(start), device=like.device)
        return FomoState(start, nobodys, models, like.new_zeros(0, 0), rounds, seed)

    def broadcast(self, state: FomoState) -> Others:
        """Send who is nobody in particular no models, but what to begin with."""
        start = tree.map(lambda leaf: leaf.mean(0), state.models) if len(state.clients) else state.start
        return Others(start, *nobody(state.start, self.count))

    def address(self, state: FomoState, clients: NDArray[Any]) -> Own:
        """Send each client M models of others."""
        rows = tree.on(state.clients.device, self.chosen(state, clients))
        real = rows >= 0
        if not len(state.clients):
            models, none = nobody(state.start, self.count)
            return {"models": tree.map(lambda leaf: torch.stack([leaf] * len(clients)), models), "real": real | none}

        def sent(leaf: Tensor) -> Tensor:
            return torch.where(real.reshape(*real.shape, *[1] * (leaf.ndim - 1)), leaf[rows.clamp(min=0)], 0.0)

        return {"models": tree.map(sent, state.models), "real": real}

    def chosen(self, state: FomoState, clients: NDArray[Any]) -> NDArray[np.int64]:
        """Return the rows of the models that clients are sent, [clients, M]; −1 where there is none."""
        known, seed, number = state.clients.cpu().numpy(), int(state.seed), int(state.rounds)
        rows = np.full((len(clients), self.count), -1)
        mine = tree.on(state.clients.device, clients)
        liked = rows_of(state.clients, state.liked, mine, state.liked.new_zeros(len(clients), len(known)))
        for place, (client, own) in enumerate(zip(clients.tolist(), liked.double().cpu().numpy(), strict=True)):
            drawn = rng.uniforms(seed, "ties", number, client, known)
            ranked = np.zeros_like(own) if rng.uniforms(seed, "explore", number, client) < self.explore else -own
            order = np.lexsort((drawn, ranked))
            others = order[known[order] != client][: self.count]
            rows[place, : len(others)] = others
        return rows

    def join_from(
        self, state: FomoState, joined: Reduced | None, stacked: Any, weights: Tensor, clients: NDArray[Any], _: int
    ) -> Reduced:
        """Put uploads beside the others, with whom each client was sent."""
        device, weights = weights.device, weights.to(torch.float64)
        rows = tree.on(device, self.chosen(state, clients))
        sent = torch.where(rows >= 0, state.clients[rows.clamp(min=0)], -1) if len(state.clients) else rows
        heard = tree.map(torch.clone, Heard(tree.on(device, clients), stacked.model, sent, stacked.weights))
        part = All((heard,), (weights * stacked.loss.to(torch.float64)).sum())
        if joined is None:
            return Reduced(part, weights.sum(), len(clients), All((), stacked.loss.dtype))
        total = All(joined.total.heard + part.heard, joined.total.loss + part.loss)
        weight, count = joined.weight + weights.sum(), joined.clients + len(clients)
        return joined._replace(total=total, weight=weight, clients=count)

    def update(self, state: FomoState, uploads: Reduced, round_: int) -> FomoState:
        """Keep the models, and what each client took over of them."""
        have: Heard = tree.map(lambda *parts: torch.cat(parts), *uploads.total.heard)
        known, models = with_rows(state.clients, state.models, have.clients, have.models)
        liked = state.liked.new_zeros(len(known), len(known))
        before, now = (torch.searchsorted(known, whose) for whose in (state.clients, have.clients))
        liked[before.unsqueeze(1), before] = state.liked
        took = torch.where(have.sent >= 0, have.weights.to(liked), 0.0)
        columns = torch.searchsorted(known, have.sent.clamp(min=0)).clamp(max=len(known) - 1)
        liked[now] = liked[now].scatter_add(1, columns, took)
        return FomoState(state.start, known, models, liked, state.rounds + 1, state.seed)


def fedfomo(
    training: Training,
    *,
    models: Count = 5,
    explore: Share = 0.3,
    tune_lr: Rate | None = None,
    tune_epochs: Count = 5,
) -> Algorithm:
    """Clients are sent models of others, and take over of each what helps on their own data."""
    look = retrained(training, lr=None, epochs=1).work
    tune = fine_tuning(training, lr=tune_lr, epochs=tune_epochs)
    client = FomoClient(training=training, look=look, tune=tune, count=models)
    return Algorithm("fedfomo", client, FomoServer(count=models, explore=explore))
