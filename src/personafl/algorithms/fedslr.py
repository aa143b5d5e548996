"""FedSLR: a low-rank model for everyone plus a sparse one for each.

T. Huang et al., *Fusion of Global and Local Knowledge for Personalized Federated Learning*, TMLR 2023, Algorithms 1–3.
Client i's model is w + p_i: the global knowledge representation w has matrices of low rank, p_i few non-zero entries.

    phase I:   w_i ≈ argmin_w f_i(w) − ⟨γ_i, w⟩ + ‖w − w_t‖²/(2η_g),   γ_i ← γ_i + (w_t − w_i)/η_g
    phase II:  p_i ← S_{μη_l}(p_i − η_l ∇f_i(w_t + p_i)),   K steps from the last p_i; S is the soft threshold
    server:    γ̄ ← γ̄ + (1/M) Σ_{i∈S}(w_t − w_i)/η_g
               w_{t+1} = prox_{λη_g‖·‖_*}(mean_S(w_i) − η_g γ̄),   layer by layer

Phase I and the mean of the duals are FedDyn's with α = 1/η_g; λ = 0 without phase II *is* FedDyn. The server keeps γ̄,
not the duals (Algorithm 3); the iterates are those of Algorithms 1 and 2. A convolution [o, i, kh, kw] counts as the
matrix (o·kh) × (i·kw). The prox comes with its factors u·v, which are sent as they are wherever they are smaller;
biases and norms have no prox and are sent whole. Errata E9 (η_g·γ̄, not γ̄/η_g) and E10 of the paper's listings are
mended.

Variants, by option:

    solver = "gpgd"           plain local SGD, w_{t+1} = prox_{λη_l‖·‖_*}(mean_S(w_i)), η_l the local rate (eq. 21)
    solver = "lpgd"           prox_{λη_l‖·‖_*} in every local step, plain mean (eqs. 18, 19)
    shared = "sparse"         ‖·‖₁ instead of ‖·‖_* at the server (S+S, S+LR)
    personal = "low-rank"     ‖·‖_* instead of ‖·‖₁ in phase II (LR+LR, S+LR)
    personal_start = "model"  p_i's weights start at w_0, as in the authors' runs; biases and norms at 0, as the rest
                              does without it: a norm's gain of 1 would come out as 2

Deviation: uploads are weighted as the recipe says; `federation.weights = "uniform"` is the paper's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from personafl.algorithms.averaging import Averaging, Change, Model
from personafl.algorithms.fedavg import FedAvgClient
from personafl.algorithms.feddyn import Dual, DynamicClient, DynamicServer
from personafl.algorithms.personal import fine_tuning, retrained
from personafl.algorithms.training import Between, Count, NonNegative, Rate, Training, TunedClient, tunes
from personafl.core import tree, wire
from personafl.core.algorithm import Algorithm, Empty, Problem, Reduced, ServerRule, sent_once
from personafl.core.batches import Batch, Batches, Data, Steps
from personafl.core.descend import descend
from personafl.core.optim import LocalOptimizer
from personafl.core.prox import Penalty, as_matrix, l1, nuclear, shrink
from personafl.core.tree import Params, Tree
from personafl.errors import Diverged

Solver = Literal["dual", "gpgd", "lpgd"]


@sent_once("start")
class LowRank(NamedTuple):
    """Down: w_t, low-rank weights as factors; and where p_i's weights start, if not at 0, which is sent once."""

    model: Params
    start: Params


class Fused(NamedTuple):
    """State of a client: its own part p_i, and what phase I keeps (γ_i). Both never leave the device."""

    own: Params
    solver: Dual | Empty


@dataclass(frozen=True, kw_only=True)
class SlrClient(TunedClient):
    """Client rule: phase I on w by the `solver`, phase II on p_i with w_t fixed."""

    by_gradients: ClassVar[bool] = True
    kept_phases: ClassVar[tuple[str, ...]] = ("personal",)
    solver: DynamicClient | FedAvgClient = field(default_factory=DynamicClient)
    personal: Training = field(default_factory=Training)
    penalty: Penalty = "sparse"
    sparsity: float = 1e-3  # μ
    start_at_model: bool = False

    @property
    def phases(self) -> Mapping[str, Steps]:
        """A pass on w, then one on p_i."""
        return {**self.solver.phases, "personal": self.personal.work}

    def init(self, problem: Problem, down: LowRank, generator: torch.Generator) -> Fused:
        """p_i = 0 (its weights w_0), γ_i = 0."""
        own = tree.zeros_like(down.model) | down.start
        return Fused(own, self.solver.init(problem, Model(down.model), generator))

    def update(self, problem: Problem, down: LowRank, state: Fused, data: Data) -> tuple[Fused, Change]:
        """Both phases from the received w_t."""
        solver: Any = self.solver
        kept, change = solver.update(problem, Model(down.model), state.solver, data)
        return Fused(self._fuse(problem, down, state, data.phases["personal"], self.personal, data.round), kept), change

    def personalize(self, problem: Problem, down: LowRank, state: Fused, data: Data) -> Fused:
        """Phase II alone."""
        own = self._fuse(problem, down, state, data.phases["tune"], self.tune, data.round)
        return state._replace(own=own)

    def models(self, problem: Problem, down: LowRank, state: Fused) -> dict[str, Params]:
        """Return w_t and w_t + p_i."""
        return {"global": down.model, "personal": tree.add(down.model, state.own)}

    def packed(self, problem: Problem, down: LowRank, state: Fused) -> dict[str, tuple[Tree, ...]]:
        """Return w_t as it was sent, and beside it p_i in its compact form."""
        own = {name: _compact(self.penalty, value) for name, value in state.own.items()}
        return {"global": (down.model,), "personal": (down.model, own)}

    def expects(self, problem: Problem, start: Params) -> LowRank:
        """Return the shared model, and where p_i starts."""
        return LowRank(start, _own_start(start) if self.start_at_model else {})

    def _fuse(
        self, problem: Problem, down: LowRank, state: Fused, batches: Batches, training: Training, round_: Tensor
    ) -> Params:
        def objective(p: Params, batch: Batch) -> Tensor:
            return problem.mean_loss(tree.add(down.model, p), batch)

        prox = shrink(self.penalty, self.sparsity * training.optimizer.rate(round_))
        return descend(objective, state.own, batches, training.optimizer.at(round_), prox)[0]


def _own_start(start: Params) -> Params:
    return {name: value for name, value in start.items() if value.ndim > 1}


def _compact(penalty: Penalty, value: Tensor) -> Tree:
    if penalty == "low-rank" and value.ndim > 1:
        noise = torch.finfo(value.dtype).eps * max(value.shape) * torch.linalg.vector_norm(value)  # not a rank
        u, v = nuclear(as_matrix(value), noise)
        return wire.Factored.of(value, u, v)
    return wire.compact(value)


class SlrState(NamedTuple):
    """State of the server: the solver's, its model in compact forms, and what of p_i does not start at 0."""

    solver: Any
    start: Params


@dataclass(frozen=True, kw_only=True)
class SlrServer(ServerRule):
    """Server rule: the solver's step, then the prox with width λ·step on every weight that has a matrix form."""

    solver: DynamicServer | Averaging = field(default_factory=DynamicServer)
    penalty: Penalty = "low-rank"
    rank_penalty: float = 1e-4  # λ; 0: no prox
    step: float | LocalOptimizer = 10.0  # η_g, or the optimizer whose learning rate it is
    start_at_model: bool = False

    def init(self, problem: Problem, start: Params, population: float) -> SlrState:
        """Start at the given model, as it is."""
        own = _own_start(start) if self.start_at_model else {}
        return SlrState(self.solver.init(problem, start, population), own)

    def broadcast(self, state: SlrState) -> LowRank:
        """Send the shared model in its compact forms."""
        return LowRank(state.solver.model, state.start)

    def update(self, state: SlrState, uploads: Reduced, round_: int) -> SlrState:
        """Step, then shrink."""
        solver, before = self.solver, state.solver.model
        stepped = solver.update(state.solver._replace(model=wire.dense(before)), uploads, round_)
        if self.rank_penalty:
            width = self.rank_penalty * self._step(round_)
            model = {
                name: self._shrunk(name, value, width, before[name], round_) if value.ndim > 1 else value
                for name, value in stepped.model.items()
            }
            stepped = stepped._replace(model=model)
        return state._replace(solver=stepped)

    def _step(self, round_: int) -> float:
        return self.step if isinstance(self.step, float) else float(self.step.rate(torch.tensor(float(round_))))

    def _shrunk(self, name: str, weight: Tensor, width: float, before: Tree, round_: int) -> Tree:
        if self.penalty == "sparse":
            return wire.compact(l1(weight, width))
        if not bool(torch.isfinite(weight).all()):
            raise Diverged(
                f"round {round_ + 1}: layer {name} has non-finite entries and so no singular values; "
                "lower training.lr, or set training.clip"
            )
        near = before.v if isinstance(before, wire.Factored) else None
        try:
            u, v = nuclear(as_matrix(weight), width, near)
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
            raise Diverged(
                f"round {round_ + 1}: the singular values of layer {name} could not be computed ({error}); "
                "lower training.lr, or set training.clip"
            ) from error
        return wire.Factored.of(weight, u, v)


class MeanSlrServer(SlrServer):
    """The same with a solver that averages, and no prox: the mean of changes is all that it uses."""

    averages: ClassVar[bool] = True


@tunes(rank_penalty=Between(1e-5, 1e-2), sparsity=Between(1e-4, 1e-2))
def fedslr(
    training: Training,
    *,
    rank_penalty: NonNegative = 1e-4,
    sparsity: NonNegative = 1e-3,
    step: Rate = 10.0,
    personal_lr: Rate | None = None,
    personal_epochs: Count = 1,
    tune_epochs: Count = 5,
    solver: Solver = "dual",
    shared: Penalty = "low-rank",
    personal: Penalty = "sparse",
    personal_start: Literal["zero", "model"] = "zero",
) -> Algorithm:
    """A low-rank shared model, and for each client a sparse one that is added to it."""
    own = retrained(training, lr=personal_lr, epochs=personal_epochs)
    at_model = personal_start == "model"
    local_penalty = rank_penalty if solver == "lpgd" else 0.0
    client = SlrClient(
        solver=DynamicClient(training=training, pull=1 / step)
        if solver == "dual"
        else FedAvgClient(training=training, rank_penalty=local_penalty),
        personal=own,
        tune=fine_tuning(own, epochs=tune_epochs),
        penalty=personal,
        sparsity=sparsity,
        start_at_model=at_model,
    )
    made = MeanSlrServer if solver == "lpgd" else SlrServer
    server = made(
        solver=DynamicServer(pull=1 / step) if solver == "dual" else Averaging(),
        penalty=shared,
        rank_penalty=0.0 if solver == "lpgd" else rank_penalty,
        step=float(step) if solver == "dual" else training.optimizer,
        start_at_model=at_model,
    )
    return Algorithm("fedslr", client, server)
