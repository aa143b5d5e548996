"""FedSpa: every client trains its own sparse part of one shared model, and searches for that part.

T. Huang et al., *Achieving Personalized Federated Learning with Sparse Local Models*, 2022, Algorithms 1 and 2 (DST).
Client i's personal model is w ⊙ m_i; its mask m_i has a fixed number k_l of active entries in every layer l.

    client i:  w_i ← w_i − η ∇f_i(w_i) ⊙ m_i,   τ steps from w_t ⊙ m_i;   sends U_i = w_i − w_t ⊙ m_i
               prune   the ⌈α_t k_l⌉ active entries with the smallest |w_i| in every layer,
                       α_t = (α_0/2)(1 + cos(πt/T)), 0 after T rounds
               regrow  as many inactive entries with the largest |∇f_i(w_i)|, the dense gradient on one minibatch
    server:    w_{t+1} = w_t + Σ_i p_i U_i

Densities per layer are Erdős–Rényi-Kernel's: k_l/n_l ∝ (sum of the weight's dimensions)/(their product), at most 1, and
together the wanted density of all weights. Weights of two or more dimensions are sparse; biases and norms are dense. An
entry that was just pruned may be regrown. A regrown entry has the shared model's value in the client's next round.
α_0 = 0 keeps masks as they were drawn: the paper's random static masks (RSM). density = 1 is FedAvg.

The start mask is random and each client's own, drawn on the device, with the same number of entries for all.

U_i is 0 outside the mask and sent as the values of the active entries and where they are, wherever that is smaller.

Deviations: the whole of w_t is sent down, for the server does not know the masks; the paper's server does, and sends
w_t ⊙ m_i. T (search_rounds) is an option: set it to the number of rounds, as the paper has it. A newcomer trains
w_T ⊙ m_i with its start mask, and does not search.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from personafl.algorithms.averaging import PLAIN_MEAN, Averaging, Change, Model
from personafl.algorithms.personal import Personal, fine_tuning
from personafl.algorithms.training import Between, Count, Rate, Training, TunedClient, tunes
from personafl.core import tree, wire
from personafl.core.algorithm import Algorithm, Problem
from personafl.core.batches import Batch, Batches, Data, Steps
from personafl.core.descend import descend, gradient_and_value
from personafl.core.optim import OptimizerSpec
from personafl.core.tree import Params, Tree

Density = Annotated[float, Gt(0), Le(1)]
Share = Annotated[float, Ge(0), Le(1)]
Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class Masks(NamedTuple):
    """State of a client: 1 where a weight is active, 0 elsewhere; weights without an entry are dense."""

    mask: Params


@dataclass(frozen=True, kw_only=True)
class SpaClient(TunedClient):
    """Client rule: train the active entries, then search for better ones."""

    by_gradients: ClassVar[bool] = True
    training: Training = field(default_factory=Training)
    density: float = 0.5
    prune_rate: float = 0.5  # α_0
    search_rounds: int = 100  # T

    @property
    def phases(self) -> Mapping[str, Steps]:
        """One pass of local training, and a minibatch for the search."""
        one = dataclasses.replace(self.training.work, epochs=None, steps=1, least=None)
        return {"local": self.training.work, **({"search": one} if self.prune_rate else {})}

    def init(self, problem: Problem, down: Model, generator: torch.Generator) -> Masks:
        """Draw a mask."""
        mask = {}
        for name, active in self._active(down.model).items():
            weight = down.model[name]
            places = torch.randperm(weight.numel(), generator=generator)
            mask[name] = (places < active).to(weight).reshape(weight.shape)
        return Masks(mask)

    def update(self, problem: Problem, down: Model, state: Masks, data: Data) -> tuple[Masks, Change]:
        """Train w_t ⊙ m_i, and search."""
        w, loss = self._train(problem, down, state, data.phases["local"], self.training, data.round)
        change, active = tree.sub(w, _masked(down.model, state.mask)), self._active(down.model)
        sent: Any = dict(change)
        for name, count in active.items():  # the change at the active entries, and where they are
            places = torch.argsort(state.mask[name].reshape(-1), descending=True, stable=True)[:count]
            sent[name] = wire.kept(change[name], places)
        return self._search(problem, w, state, data) if self.prune_rate else state, Change(sent, loss)

    def personalize(self, problem: Problem, down: Model, state: Masks, data: Data) -> Personal:
        """Train w_T ⊙ m_i."""
        return Personal(self._train(problem, down, state, data.phases["tune"], self.tune, data.round)[0])

    def models(self, problem: Problem, down: Model, state: Masks | Personal) -> dict[str, Params]:
        """Return w and w ⊙ m_i, or what fine-tuning made of that."""
        own = state.model if isinstance(state, Personal) else _masked(down.model, state.mask)
        return {"global": down.model, "personal": own}

    def packed(self, problem: Problem, down: Model, state: Masks | Personal) -> dict[str, tuple[Tree, ...]]:
        """Return w, and the personal model's active entries."""
        own = self.models(problem, down, state)["personal"]
        sparse = {name: wire.compact(value) for name, value in own.items()}
        return {"global": (down.model,), "personal": (sparse,)}

    def _train(
        self, problem: Problem, down: Model, state: Masks, batches: Batches, training: Training, round_: Tensor
    ) -> tuple[Params, Tensor]:
        # The gradient of an inactive entry is 0 and it starts at 0, so no optimizer moves it.
        def objective(w: Params, batch: Batch) -> Tensor:
            return problem.mean_loss(_masked(w, state.mask), batch)

        return descend(objective, _masked(down.model, state.mask), batches, training.optimizer.at(round_))

    def _search(self, problem: Problem, w: Params, state: Masks, data: Data) -> Masks:
        """Prune and regrow; a client without data keeps its mask."""
        batches = data.phases["search"]
        gradient = tree.zeros_like(w)
        for batch in batches.each():
            gradient = tree.add(gradient, gradient_and_value(problem.mean_loss, w, batch)[0])
        progress = (data.round.to(torch.float64) / self.search_rounds).clamp(max=1.0)
        rate = self.prune_rate / 2 * (1 + torch.cos(math.pi * progress))
        mask = {
            name: _moved(state.mask[name], w[name], gradient[name], torch.ceil(rate * active))
            for name, active in self._active(w).items()
        }
        return Masks(tree.where(batches.alive.any(), mask, state.mask))

    def _active(self, params: Params) -> dict[str, int]:
        """Return k_l of the weights that are sparse."""
        shapes = tuple((name, tuple(value.shape)) for name, value in params.items() if value.ndim > 1)
        return active_entries(shapes, self.density)


def _masked(params: Params, mask: Params) -> Params:
    return {name: value * mask[name] if name in mask else value for name, value in params.items()}


def _moved(mask: Tensor, weight: Tensor, gradient: Tensor, count: Tensor) -> Tensor:
    """Return the mask with `count` [] entries moved: as many active ones as before."""
    pruned = _rank(torch.where(mask > 0, weight.abs(), torch.inf)) < count
    kept = (mask > 0) & ~pruned
    regrown = _rank(torch.where(kept, torch.inf, -gradient.abs())) < count
    return (kept | regrown).to(mask.dtype)


def _rank(values: Tensor) -> Tensor:
    """Return each entry's place in ascending order; of equal ones the first comes first."""
    order = torch.argsort(values.reshape(-1), stable=True)
    return torch.argsort(order).reshape(values.shape)


@functools.lru_cache(maxsize=64)  # every update of every client asks for the same
def active_entries(shapes: Shapes, density: float) -> dict[str, int]:
    """Return how many entries of each weight are active: Erdős–Rényi-Kernel densities, together the wanted one."""
    entries = {name: math.prod(shape) for name, shape in shapes}
    raw = {name: sum(shape) / entries[name] for name, shape in shapes}
    dense: set[str] = set()
    while True:
        rest = raw.keys() - dense
        wanted = density * sum(entries.values()) - sum(entries[name] for name in dense)
        factor = wanted / sum(raw[name] * entries[name] for name in rest) if rest else 0.0
        full = {name for name in rest if factor * raw[name] >= 1}
        if not full:
            break
        dense |= full
    return {
        name: count if name in dense else max(1, round(factor * raw[name] * count)) for name, count in entries.items()
    }


@tunes(prune_rate=Between(0.1, 0.9, log=False))
def fedspa(
    training: Training,
    *,
    density: Density = 0.5,
    prune_rate: Share = 0.5,
    search_rounds: Count = 100,
    tune_lr: Rate | None = None,
    tune_epochs: Count = 5,
    server: OptimizerSpec = PLAIN_MEAN,
) -> Algorithm:
    """Each client trains its own sparse part of the shared model, and searches for the part that fits it."""
    client = SpaClient(
        training=training,
        tune=fine_tuning(training, lr=tune_lr, epochs=tune_epochs),
        density=density,
        prune_rate=prune_rate,
        search_rounds=search_rounds,
    )
    return Algorithm("fedspa", client, Averaging(optimizer=server))
