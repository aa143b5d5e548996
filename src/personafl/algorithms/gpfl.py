"""GPFL: features that serve two tasks through a shared valve, what they have in common and what is a client's own.

J. Zhang et al., *GPFL: Simultaneously Learning Global and Personalized Feature Information for Personalized Federated
Learning*, ICCV 2023. The network is a shared body θ with features z = f(x; θ), as wide as d, and a personal linear head
φ_i. All share an embedding of each class, E [classes, d], and a valve: two layers h ↦ LayerNorm(ReLU(A h + a)), one for
γ and one for β. Client i has the share α_ic of class c among its samples.

    V(z; h) = ReLU(z ⊙ (1 + γ(h)) + β(h));   g = mean over classes of E_c;   p_i = Σ_c α_ic E_c,  of E as received
    client i:  (θ, φ_i) ← − η ∇ L;   (E, valve) ← − η (∇ L + μ (E, valve));   all at once, L the mean over samples of
               ℓ(φ_i(V(z; p_i)), y) − log softmax_c(cos(V(z; g), E_c))_y + λ ‖V(z; g) − E_y as received‖
    server:    (θ, E, valve) ← Σ_i p_i (θ_i, E_i, valve_i)

λ = 0.01 and μ = 0.1 are the authors' for small CNNs. For a client γ(p_i) and β(p_i) are numbers, so its model is a
network with a valved head (`core.heads`), 2d numbers larger than the shared one. There is no model for all: heads are
personal.

Deviations: in the authors' code g and p_i are of a client's own E after its last round, and 0 in the first; and the
norm at λ is of a whole minibatch as one vector, where here it is a mean over samples. A newcomer counts its classes
and trains its head alone. E and the valve start as torch draws them, by a generator that follows from the start of the
head. Classes are counted on what a client trains on in a round.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from personafl.algorithms.averaging import PLAIN_MEAN, Averaging, Change
from personafl.algorithms.features import (
    check_classes,
    check_head,
    class_counts,
    drawn_from,
    head_of,
    linear_start,
    scores_and_features,
)
from personafl.algorithms.fedalt import PartialAveraging, PartialState, Parts
from personafl.algorithms.personal import fine_tuning, retrained
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
from personafl.core.batches import Batch, Batches, Data
from personafl.core.descend import descend
from personafl.core.losses import cross_entropy, mean_of_real, mean_of_valid
from personafl.core.optim import LocalOptimizer, OptimizerSpec, Sgd, by_block
from personafl.core.tree import Params

_GUIDE = "guide/"  # before the names of what guides the features, where it is beside the network's weights


class Guide(NamedTuple):
    """E and the valve. A norm's scale and shift are its rows 0 and 1."""

    classes: Tensor  # E [classes, width]
    scale: Tensor  # A of γ [width, width]
    scale_bias: Tensor  # [width]
    scale_norm: Tensor  # [2, width]
    shift: Tensor  # A of β [width, width]
    shift_bias: Tensor  # [width]
    shift_norm: Tensor  # [2, width]

    def valve(self, given: Tensor) -> tuple[Tensor, Tensor]:
        """Return 1 + γ(h) and β(h) of h [width]."""
        gamma = functional.linear(given, self.scale, self.scale_bias).relu()
        beta = functional.linear(given, self.shift, self.shift_bias).relu()
        return 1 + _normed(gamma, self.scale_norm), _normed(beta, self.shift_norm)


class Known(NamedTuple):
    """State of a client: its head φ_i, and its shares of the classes α_i. They never leave the device."""

    personal: Params
    shares: Tensor  # [classes]


@dataclass(frozen=True, kw_only=True)
class GpClient(OnePassClient, TunedClient):
    """Client rule: the personal task and the common one, at once."""

    guide: LocalOptimizer = field(default_factory=Sgd)  # of E and the valve
    strength: float = 0.01  # λ

    def expects(self, problem: Problem, start: Params) -> Parts:
        """Return the body with E and the valve, and where heads start; the head must give the scores of classes."""
        check_classes("gpfl", problem, "fedper")
        check_head("gpfl", problem, start)
        body, head = problem.divide(start)
        return Parts(body | _guide_start(problem, start), head)

    def init(self, problem: Problem, down: Parts, generator: torch.Generator) -> Known:
        """φ_i is the common start; classes are alike."""
        classes = _guide(down.shared).classes
        return Known(down.personal, classes.new_full((len(classes),), 1 / len(classes)))

    def update(self, problem: Problem, down: Parts, state: Known, data: Data) -> tuple[Known, Change]:
        """Train θ, φ_i, E and the valve."""
        batches, received = data.phases["local"], _guide(down.shared).classes
        shares = _counted(problem, batches, state.shares)
        common, own = received.mean(0), shares @ received

        def objective(joint: Params, batch: Batch) -> Tensor:
            guide, w = _guide(joint), _network(joint)
            z = scores_and_features(problem, w, batch)[1]
            losses = problem.loss(_scores(problem, w, z, guide.valve(own)), batch.y)
            return mean_of_real(losses + self._common(_opened(z, guide.valve(common)), guide, received, batch), batch)

        blocks = {"network": self.training.optimizer.at(data.round), "guide": self.guide.at(data.round)}
        optimizer = by_block(blocks, lambda name: "guide" if name.startswith(_GUIDE) else "network")
        joint, loss = descend(objective, down.shared | state.personal, batches, optimizer)
        change = {name: joint[name] - value for name, value in down.shared.items()}
        return Known({name: joint[name] for name in state.personal}, shares), Change(change, loss)

    def personalize(self, problem: Problem, down: Parts, state: Known, data: Data) -> Known:
        """Count classes, and train the head under the received body and valve."""
        batches, guide, body = data.phases["tune"], _guide(down.shared), _network(down.shared)
        shares = _counted(problem, batches, state.shares)
        valve = guide.valve(shares @ guide.classes)

        def objective(head: Params, batch: Batch) -> Tensor:
            z = scores_and_features(problem, body | head, batch)[1]
            return mean_of_real(problem.loss(_scores(problem, head, z, valve), batch.y), batch)

        optimizer = self.tune.optimizer.at(data.round)
        return Known(descend(objective, state.personal, batches, optimizer)[0], shares)

    def models(self, problem: Problem, down: Parts, state: Known) -> dict[str, Params]:
        """Return the network with a valved head."""
        guide = _guide(down.shared)
        scale, shift = guide.valve(state.shares @ guide.classes)
        layer = head_of(problem, state.personal).weight.removesuffix("weight")
        return {"personal": _network(down.shared) | state.personal | {f"{layer}scale": scale, f"{layer}shift": shift}}

    def _common(self, opened: Tensor, guide: Guide, received: Tensor, batch: Batch) -> Tensor:
        """Return the losses of the common task, [batch]."""
        cosines = functional.normalize(opened, dim=-1) @ functional.normalize(guide.classes, dim=-1).mT
        apart = torch.linalg.vector_norm(opened - received[batch.y.clamp(min=0)], dim=-1)
        apart = apart if batch.y.ndim == 1 else mean_of_valid(apart, batch.y >= 0)
        return cross_entropy(cosines, batch.y) + self.strength * apart


def _normed(x: Tensor, norm: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape, norm[0], norm[1])


def _opened(z: Tensor, valve: tuple[Tensor, Tensor]) -> Tensor:
    return (z * valve[0] + valve[1]).relu()


def _scores(problem: Problem, head: Params, z: Tensor, valve: tuple[Tensor, Tensor]) -> Tensor:
    names = head_of(problem, head)
    return functional.linear(_opened(z, valve), head[names.weight], head.get(names.bias or ""))


def _counted(problem: Problem, batches: Batches, before: Tensor) -> Tensor:
    """Return the shares of the classes in some data, or those of before if there are none."""
    counts = class_counts(problem, batches).to(before)
    return torch.where(counts.sum() > 0, counts / counts.sum().clamp(min=1), before)


def _guide(params: Params) -> Guide:
    return Guide(*(params[_GUIDE + name] for name in Guide._fields))


def _network(params: Params) -> Params:
    return {name: value for name, value in params.items() if not name.startswith(_GUIDE)}


def _guide_start(problem: Problem, start: Params) -> Params:
    weight = start[head_of(problem, start).weight]
    width, generator = weight.shape[1], drawn_from(weight, "guide")
    classes = torch.randn(weight.shape, generator=generator, device="cpu").to(weight)
    (scale, scale_bias), (shift, shift_bias) = (linear_start(generator, weight, width) for _ in range(2))
    norm = torch.stack([torch.ones_like(scale_bias), torch.zeros_like(scale_bias)])
    guide = Guide(classes, scale, scale_bias, norm, shift, shift_bias, norm)
    return {_GUIDE + name: value for name, value in guide._asdict().items()}


@dataclass(frozen=True, kw_only=True)
class GpServer(PartialAveraging):
    """Server rule: FedAvg's on the body, E and the valve."""

    def init(self, problem: Problem, start: Params, population: float) -> PartialState:
        """Divide the given network, and draw E and the valve."""
        body, head = problem.divide(start)
        return PartialState(self.averaging.init(problem, body | _guide_start(problem, start), population), head)


@tunes(strength=Between(0.0001, 1.0), decay=Between(0.001, 1.0))
def gpfl(
    training: Training,
    *,
    strength: NonNegative = 0.01,
    decay: NonNegative = 0.1,
    tune_lr: Rate | None = None,
    tune_epochs: Count = 5,
    server: OptimizerSpec = PLAIN_MEAN,
) -> Algorithm:
    """A shared body whose features serve a common task and, through a shared valve, each client's own."""
    client = GpClient(
        training=training,
        guide=retrained(training, lr=None, epochs=None, decay=decay).optimizer,
        strength=strength,
        tune=fine_tuning(training, lr=tune_lr, epochs=tune_epochs),
    )
    return Algorithm("gpfl", client, GpServer(averaging=Averaging(optimizer=server)), personal="output", head="valved")
