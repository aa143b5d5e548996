"""SCAFFOLD: control variates that correct the drift of local training.

S. P. Karimireddy et al., *SCAFFOLD: Stochastic Controlled Averaging for Federated Learning*, ICML 2020, Algorithm 1
with option II. Client i keeps a control c_i, about its gradient, and the server c, about the global one; both start
at 0. With η the learning rate of the round and K the number of minibatches that the client sees:

    client i:  y ← y − η(∇f_i(y) − c_i + c),  K steps from y = x     SGD on f_i(y) + ⟨c − c_i, y⟩
               c_i⁺ = c_i − c + (x − y)/(Kη)                         = the mean gradient of f_i on the way
    up:        y − x,  c_i⁺ − c_i
    server:    x ← x + η_g · mean_S(y − x)
               c ← c + |S|/M · mean_S(c_i⁺ − c_i)                    so that c is the mean of all M c_i

At the optimum of the global problem c = 0 and c_i = ∇f_i(x): nothing moves, whatever K and the cohort. The first round
is FedAvg's.

Deviation: uploads are weighted as the recipe says. By samples, the default, |S|/M is the cohort's share of them, c the
mean of the c_i weighted so, and the objective Σ(n_i/n)f_i; the paper's is (1/M)Σf_i, `federation.weights = "uniform"`.

Only for plain SGD is (x − y)/(Kη) the mean gradient, so momentum and adaptive optimizers are refused. Weight decay is
part of f_i. Where training.clip acts, it limits the corrected gradient, and c_i⁺ is as if f_i's had been the less for
it; near the optimum, where the corrected gradients vanish, it does not act.
"""

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from personafl.algorithms.averaging import Averaging, Shared, SharedModelClient
from personafl.algorithms.training import Between, Rate, Training, tunes
from personafl.core import tree
from personafl.core.algorithm import Algorithm, Problem, Reduced, ServerRule, own_fields
from personafl.core.batches import Data
from personafl.core.descend import Quadratic, descent
from personafl.core.optim import Sgd
from personafl.core.tree import Params
from personafl.errors import BadInput


class Controlled(NamedTuple):
    """Down: the shared model x and the server's control c."""

    model: Params
    control: Params


class Changes(NamedTuple):
    """Up: y − x, c_i⁺ − c_i, and the mean training loss on the way."""

    change: Params
    control: Params
    loss: Tensor


class Control(NamedTuple):
    """State of a client: c_i."""

    control: Params


@dataclass(frozen=True, kw_only=True)
class ScaffoldClient(SharedModelClient):
    """Client rule: train the shared model with gradients corrected by c − c_i."""

    by_gradients: ClassVar[bool] = True
    uploads_of_state: ClassVar[tuple[str, ...]] = ("control",)  # c_i's changes go up; the first one is c_i itself

    def init(self, problem: Problem, down: Controlled, generator: torch.Generator) -> Control:
        """c_i = 0."""
        return Control(tree.zeros_like(down.model))

    def update(self, problem: Problem, down: Controlled, state: Control, data: Data) -> tuple[Control, Changes]:
        """Return c_i⁺, and the changes of the model and of c_i."""
        correction = tree.sub(down.control, state.control)
        batches, optimizer = data.phases["local"], self.training.optimizer
        term = Quadratic(slope=correction)
        change, loss = descent(problem.mean_loss, down.model, batches, optimizer.at(data.round), term=term)
        length = batches.alive.sum() * optimizer.rate(data.round)  # Kη
        trained = length > 0  # else c_i stays: no data, or a schedule that has come to 0
        gradient = tree.scale(change, -1 / torch.where(trained, length, 1.0))
        control = tree.where(trained, tree.sub(gradient, correction), state.control)
        return Control(control), Changes(change, tree.sub(control, state.control), loss)


@own_fields("population")
class ScaffoldState(NamedTuple):
    """State of the server: x with its optimizer, c, and the weight of all clients."""

    shared: Shared
    control: Params
    population: Tensor


@dataclass(frozen=True, kw_only=True)
class ScaffoldServer(ServerRule):
    """Server rule: FedAvg's on x with rate η_g, and the mean of all c_i."""

    averaging: Averaging = field(default_factory=Averaging)

    def init(self, problem: Problem, start: Params, population: float) -> ScaffoldState:
        """Start at the given model with c = 0."""
        shared = self.averaging.init(problem, start, population)
        return ScaffoldState(shared, tree.zeros_like(start), torch.tensor(population, dtype=torch.float64))

    def broadcast(self, state: ScaffoldState) -> Controlled:
        """Send x and c."""
        return Controlled(state.shared.model, state.control)

    def update(self, state: ScaffoldState, uploads: Reduced, round_: int) -> ScaffoldState:
        """Step x along the mean change, and c by the cohort's share of the population."""
        share = uploads.weight / state.population.to(uploads.weight.device)
        control = tree.add(state.control, tree.scale(uploads.mean().control, share))
        return ScaffoldState(self.averaging.update(state.shared, uploads, round_), control, state.population)


@tunes(server_lr=Between(0.1, 3.0))
def scaffold(training: Training, *, server_lr: Rate = 1.0) -> Algorithm:
    """One shared model; control variates correct the drift of local training."""
    optimizer = training.optimizer
    if not isinstance(optimizer, Sgd):
        raise BadInput(f'training.optimizer: scaffold needs plain SGD, not {optimizer.optimizer!r}; set it to "sgd"')
    if optimizer.momentum:
        raise BadInput(
            f"training.momentum: scaffold needs plain SGD, for its control variates are mean gradients; set it to 0 "
            f"(given: {optimizer.momentum})"
        )
    return Algorithm(
        "scaffold", ScaffoldClient(training=training), ScaffoldServer(averaging=Averaging(optimizer=Sgd(lr=server_lr)))
    )
