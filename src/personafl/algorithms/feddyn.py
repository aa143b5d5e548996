"""FedDyn: local objectives whose optima agree with the global one.

D. A. E. Acar et al., *Federated Learning Based on Dynamic Regularization*, ICLR 2021, Algorithm 1.

    client i:  w_i ≈ argmin_w f_i(w) − ⟨γ_i, w⟩ + (α/2)‖w − w_t‖²,   by τ steps of SGD from w_t
               γ_i ← γ_i − α(w_i − w_t)                 at an exact minimum γ_i = ∇f_i(w_i); γ_i starts at 0
    server:    γ̄ ← γ̄ − (α/M) Σ_{i∈S}(w_i − w_t)          the mean of all M duals, taking part or not
               w_{t+1} = mean_S(w_i) − γ̄/α

Where all agree, Σ γ_i = 0 is the optimality condition of the global problem, whatever the clients' differences. The
server keeps one mean, not a dual per client. FedSLR's first phase is this with α = 1/η_g (`fedslr`).

Deviation: uploads are weighted as the recipe says. By samples, the default, 1/M becomes n_i/n: the mean stays that of
the duals, weighted as the objective Σ(n_i/n)f_i is; the paper's means are plain, `federation.weights = "uniform"`.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from personafl.algorithms.averaging import Change, Model, SharedModelClient
from personafl.algorithms.training import Between, Rate, Training, tunes
from personafl.core import tree
from personafl.core.algorithm import Algorithm, Problem, Reduced, ServerRule, own_fields
from personafl.core.batches import Data
from personafl.core.descend import Quadratic, descent
from personafl.core.tree import Params


class Dual(NamedTuple):
    """State of a client: γ_i, its gradient at the last local solution. It never leaves the device."""

    dual: Params


@dataclass(frozen=True, kw_only=True)
class DynamicClient(SharedModelClient):
    """Client rule: solve the local problem with its dual and a pull (α) towards w_t."""

    by_gradients: ClassVar[bool] = True
    pull: float = 0.1

    def init(self, problem: Problem, down: Model, generator: torch.Generator) -> Dual:
        """γ_i = 0."""
        return Dual(tree.zeros_like(down.model))

    def update(self, problem: Problem, down: Model, state: Dual, data: Data) -> tuple[Dual, Change]:
        """Return γ_i and w_i − w_t."""
        term = Quadratic(slope=tree.scale(state.dual, -1.0), anchor=down.model, strength=self.pull)
        optimizer = self.training.optimizer.at(data.round)
        change, loss = descent(problem.mean_loss, down.model, data.phases["local"], optimizer, term=term)
        return Dual(tree.sub(state.dual, tree.scale(change, self.pull))), Change(change, loss)


@own_fields("population")
class Dynamic(NamedTuple):
    """State of the server: w_t, the mean γ̄ of all duals, and the weight of all clients."""

    model: Params
    dual: Params
    population: Tensor


@dataclass(frozen=True, kw_only=True)
class DynamicServer(ServerRule):
    """Server rule: the cohort's mean, corrected by the mean of all duals."""

    pull: float = 0.1

    def init(self, problem: Problem, start: Params, population: float) -> Dynamic:
        """Start at the given model with γ̄ = 0."""
        return Dynamic(start, tree.zeros_like(start), torch.tensor(population, dtype=torch.float64))

    def broadcast(self, state: Dynamic) -> Model:
        """Send the shared model."""
        return Model(state.model)

    def update(self, state: Dynamic, uploads: Reduced, round_: int) -> Dynamic:
        """Move γ̄ by the cohort's share of the population, then w to mean_S(w_i) − γ̄/α."""
        change = uploads.mean().change
        share = uploads.weight / state.population.to(uploads.weight.device)
        dual = tree.sub(state.dual, tree.scale(change, self.pull * share))
        model = tree.sub(tree.add(state.model, change), tree.scale(dual, 1 / self.pull))
        return Dynamic(model, dual, state.population)


@tunes(pull=Between(0.001, 1.0))
def feddyn(training: Training, *, pull: Rate = 0.1) -> Algorithm:
    """One shared model; local objectives are corrected so that their optima agree."""
    return Algorithm("feddyn", DynamicClient(training=training, pull=pull), DynamicServer(pull=pull))
