"""FedBCD and FedBCD-I: personal models held to the shared one by a quadratic penalty, as block coordinate descent.

R. Wu et al., *Federated Block Coordinate Descent Scheme for Learning Global and Personalized Models*, 2021, Algorithms
1 and 2. With X the box [−b, b] in every coordinate and p_i the weights of the mean (federation.weights):

    min Σ_i p_i [g_i(x_i) + (γ_i/2)‖x_i − z‖²]  over x_i ∈ X and z                                                (2)

A device keeps x_i and the iterate before it, x⁻, from round to round; both start at x⁽⁰⁾, which it is sent once. Its K
steps of accelerated stochastic projected gradient (ASPG), one for each minibatch (or of K epochs: below), are

    y = x + ζ(x − x⁻);   (x, x⁻) ← (Π_X(y − η_x ∇f(y)), x)                                                        (4)

    FedBCD    device:  K steps on f = g_i + (γ_i/2)‖· − z‖²
              up:      x_i − x_i as last sent
              server:  target = Σ_i p_i γ_i x_i / Σ_i p_i γ_i over all of its devices, as last sent
    FedBCD-I  device:  K steps on f = g_i; then K pulls x ← x − γ_i(x − z), together x ← z + (1 − γ_i)^K (x − z)
              up:      x_i − z
              server:  target = the same mean over the active devices
    both      server:  z ← z − η̃(z − target),  K_z times

A device of FedBCD-I may also train without contact (federation.offline): the K steps alone, nothing is sent. After four
such rounds (`wait_after`) it waits, as it is, until the next contact. One that has never been in contact has no x⁽⁰⁾
and does not train. FedBCD's devices do not train offline: their penalty needs z.

γ_i is method.penalty for all, or that of a device's kind ([[devices]] penalty), by which uploads then count.

Both upload personal models by design: FedBCD's changes add up to x_i − x⁽⁰⁾.

Errata. E18: the paper's z ← z − η_z Σ_i γ(z − x_i) with its own η_z = 0.5, γ = 1 and 10 devices multiplies the error by
1 − 5 = −4 each time, against its Assumption 4; here η_z = η̃/Σγ, 0 < η̃ ≤ 1, so that z is always between itself and
the target. E19: x⁻ is a training iterate, and rounds without contact count; the paper's indices would take it from the
pulls, and x from the last contact. E20: γ is the step of FedBCD-I's pulls itself, hence at most 1.

Pulls move x⁻ as they move x (`carry_momentum`), so that x − x⁻ is still the last step's. If x⁻ stayed, ζ(x − x⁻) would
have the pulls in it: under a constant gradient x − z would come out 1 − ζ times as large, a tenth at ζ = 0.9, and the
method would learn that much slower.

Deviations: x⁽⁰⁾ is put into X, as the paper assumes; then z and pulls stay in X and need no projection. A newcomer, and
a client that fine-tunes, starts from x = x⁻ = z: FedBCD takes its steps with the penalty, FedBCD-I its own without, and
then the K pulls of a round. With several servers and K_z > 1, states are mixed once a round; the cloud's own count of
iterations mixes before each. The reported loss is f's, at the y's.

η_x is training.lr, by the training's schedule; weight decay is part of g_i, and clip limits ∇f(y). Momentum and
adaptive optimizers are refused: ζ is method.momentum.

K of the paper's runs is "sampled from [1, 5]", anew for each device and round. It counts minibatches in the algorithms,
training.steps = 5 with least_steps = 1, and is called epochs in §5: training.epochs = 5 with least_epochs = 1. There
are K pulls either way: as many as epochs, not as minibatches, where training counts epochs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from annotated_types import Ge, Gt, Le
from numpy.typing import NDArray
from torch import Tensor

from personafl.algorithms.personal import fine_tuning
from personafl.algorithms.training import (
    Between,
    Count,
    Decay,
    NonNegative,
    OnePassClient,
    Rate,
    Training,
    TunedClient,
    tunes,
)
from personafl.core import prox, tree
from personafl.core.algorithm import Algorithm, Problem, Reduced, ServerRule, own_fields, sent_once
from personafl.core.batches import Batches, Data, Steps
from personafl.core.descend import Quadratic, descend_from
from personafl.core.optim import Accelerated, Optimizer, Sgd
from personafl.core.tree import Params
from personafl.errors import BadInput

Part = Annotated[float, Gt(0), Le(1)]
Pull = Annotated[float, Ge(0), Le(1)]
Box = Rate | Literal["none"]


@sent_once("start")
class Anchor(NamedTuple):
    """Down: z, and x⁽⁰⁾, where personal models start."""

    model: Params
    start: Params


class PersonalChange(NamedTuple):
    """Up: how a personal model differs from its last upload (FedBCD) or from z (FedBCD-I), and the mean loss."""

    change: Params
    loss: Tensor


class Iterates(NamedTuple):
    """State of a FedBCD device: x and the iterate before it."""

    model: Params
    previous: Params


class OfflineIterates(NamedTuple):
    """State of a FedBCD-I device: x, x⁻, and the rounds trained since the last contact."""

    model: Params
    previous: Params
    alone: Tensor


@dataclass(frozen=True, kw_only=True)
class _Device(OnePassClient, TunedClient):
    """What both client rules share."""

    uploads_of_state: ClassVar[tuple[str, ...]] = ("change",)  # from x⁽⁰⁾ = 0 it is x itself
    training: Training = field(default_factory=lambda: Training(optimizer=Accelerated()))
    tune: Training = field(default_factory=lambda: Training(optimizer=Accelerated()))
    penalty: float = 0.3  # γ

    def _own_penalty(self, problem: Problem) -> float:
        """γ_i."""
        return self.penalty if problem.penalty is None else problem.penalty


@dataclass(frozen=True, kw_only=True)
class FedBcdClient(_Device):
    """Client rule of FedBCD: ASPG on the penalised loss."""

    by_gradients: ClassVar[bool] = True

    def init(self, problem: Problem, down: Anchor, generator: torch.Generator) -> Iterates:
        """x = x⁻ = x⁽⁰⁾."""
        return Iterates(down.start, down.start)

    def update(self, problem: Problem, down: Anchor, state: Iterates, data: Data) -> tuple[Iterates, PersonalChange]:
        """Train x, and send how it changed."""
        optimizer = self.training.optimizer.at(data.round)
        trained, loss = self._train(problem, down.model, state, data.phases["local"], optimizer)
        return trained, PersonalChange(tree.sub(trained.model, state.model), loss)

    def introduce(self, problem: Problem, state: Iterates) -> PersonalChange:
        """Send x: another server has nothing of it in its target."""
        like = next(iter(state.model.values()))
        return PersonalChange(state.model, torch.zeros((), dtype=like.dtype, device=like.device))

    def personalize(self, problem: Problem, down: Anchor, state: Iterates, data: Data) -> Iterates:
        """Train from z."""
        start = Iterates(down.model, down.model)
        return self._train(problem, down.model, start, data.phases["tune"], self.tune.optimizer.at(data.round))[0]

    def _train(
        self, problem: Problem, z: Params, state: Iterates, batches: Batches, optimizer: Optimizer
    ) -> tuple[Iterates, Tensor]:
        held = Quadratic(anchor=z, strength=self._own_penalty(problem))
        x, previous, loss = descend_from(problem.mean_loss, state.model, state.previous, batches, optimizer, term=held)
        return Iterates(x, previous), loss


@dataclass(frozen=True, kw_only=True)
class FedBcdIClient(_Device):
    """Client rule of FedBCD-I: ASPG on one's own loss, in contact followed by pulls towards z."""

    by_gradients: ClassVar[bool] = True
    wait_after: int = 4  # rounds without contact
    carry_momentum: bool = True  # pulls move x⁻ too

    @property
    def tuning(self) -> Mapping[str, Steps]:
        """A longer pass, and a round's, which says how many pulls there are."""
        return {"tune": self.tune.work, **self.phases}

    def init(self, problem: Problem, down: Anchor, generator: torch.Generator) -> OfflineIterates:
        """x = x⁻ = x⁽⁰⁾."""
        return _in_contact(down.start, down.start)

    def update(
        self, problem: Problem, down: Anchor, state: OfflineIterates, data: Data
    ) -> tuple[OfflineIterates, PersonalChange]:
        """Train x and pull it towards z, and send where it is then."""
        batches, optimizer = data.phases["local"], self.training.optimizer.at(data.round)
        x, previous, loss = descend_from(problem.mean_loss, state.model, state.previous, batches, optimizer)
        state = self._pulled(problem, x, previous, down.model, data)
        return state, PersonalChange(tree.sub(state.model, down.model), loss)

    def offline(self, problem: Problem, state: OfflineIterates, data: Data) -> OfflineIterates:
        """Train x alone, or wait."""
        batches, optimizer = data.phases["local"], self.training.optimizer.at(data.round)
        x, previous, _ = descend_from(problem.mean_loss, state.model, state.previous, batches, optimizer)
        return tree.where(state.alone < self.wait_after, OfflineIterates(x, previous, state.alone + 1), state)

    def personalize(self, problem: Problem, down: Anchor, state: OfflineIterates, data: Data) -> OfflineIterates:
        """Train from z, then pull as in a round."""
        z, optimizer = down.model, self.tune.optimizer.at(data.round)
        x, previous, _ = descend_from(problem.mean_loss, z, z, data.phases["tune"], optimizer)
        return self._pulled(problem, x, previous, z, data)

    def _pulled(self, problem: Problem, x: Params, previous: Params, z: Params, data: Data) -> OfflineIterates:
        """Return the state after K pulls of x towards z."""
        left = (1 - self._own_penalty(problem)) ** self._pulls(data)
        pulled = tree.add(z, tree.scale(tree.sub(x, z), left))
        if self.carry_momentum:
            previous = tree.sub(pulled, tree.sub(x, previous))
        return _in_contact(pulled, previous)

    def _pulls(self, data: Data) -> Tensor:
        """Return K of a round: its minibatches, or its epochs where training counts those."""
        steps, work = data.phases["local"].alive.sum().to(torch.float64), self.training.work
        if work.epochs is None or work.batch is None:
            return steps
        return steps / (-(-data.examples // work.batch)).clamp(min=1)


def _in_contact(x: Params, previous: Params) -> OfflineIterates:
    like = next(iter(x.values()))
    return OfflineIterates(x, previous, torch.zeros((), dtype=like.dtype, device=like.device))


@own_fields("start", "sent", "target", "population")
class Block(NamedTuple):
    """State of a server: z; x⁽⁰⁾; z as its devices have it (FedBCD-I); the target; and the weight of its devices."""

    model: Params
    start: Params
    sent: Params
    target: Params
    population: Tensor


@dataclass(frozen=True, kw_only=True)
class BlockServer(ServerRule):
    """Server rule: steps of z towards the mean of x_i, over all devices or the active ones."""

    step: float = 0.5  # η̃
    iterations: int = 1  # K_z
    box: float | None = None
    everyone: bool = True  # FedBCD: uploads are changes of x_i; else offsets from z

    def init(self, problem: Problem, start: Params, population: float) -> Block:
        """Start at the given model, put into the box."""
        if self.box is not None:
            start = {name: prox.box(value, -self.box, self.box) for name, value in start.items()}
        sent = {} if self.everyone else start
        return Block(start, start, sent, start, torch.tensor(population, dtype=torch.float64))

    def broadcast(self, state: Block) -> Anchor:
        """Send z and x⁽⁰⁾."""
        return Anchor(state.model, state.start)

    def update(self, state: Block, uploads: Reduced, round_: int) -> Block:
        """Move the target, then z."""
        change = uploads.mean().change
        if self.everyone:
            share = uploads.weight / state.population.to(uploads.weight.device)
            state = state._replace(target=tree.add(state.target, tree.scale(change, share)))
        else:
            state = state._replace(target=tree.add(state.sent, change))
        for _ in range(self.iterations):
            state = self.again(state)
        return state

    def weigh(self, problem: Problem, weights: NDArray[Any]) -> NDArray[Any]:
        """Times γ_i, where devices have their own."""
        return weights if problem.penalty is None else weights * problem.penalty

    def admit(self, state: Block, weight: float, upload: PersonalChange | None) -> Block:
        """Count another device: in the target of all, by its x, or by x⁽⁰⁾ if it has not taken part yet."""
        population = state.population + weight
        if self.everyone:
            x = state.start if upload is None else upload.change
            share = weight / float(population)
            state = state._replace(target=tree.add(state.target, tree.scale(tree.sub(x, state.target), share)))
        return state._replace(population=population)

    def again(self, state: Block) -> Block:
        """z ← z − η̃(z − target)."""
        z = tree.sub(state.model, tree.scale(tree.sub(state.model, state.target), self.step))
        return state._replace(model=z, sent={} if self.everyone else z)


@tunes(penalty=Between(0.01, 10.0), server_step=Between(0.1, 1.0))
def fedbcd(
    training: Training,
    *,
    penalty: NonNegative = 0.3,
    server_step: Part = 1.0,
    momentum: Decay = 0.9,
    box: Box = 2.0,
    server_iterations: Count = 1,
    tune_epochs: Count = 5,
) -> Algorithm:
    """Personal models held to the shared one by a penalty; the server steps towards their mean."""
    side = None if box == "none" else box
    training = _accelerated(training, momentum, side)
    tune = fine_tuning(training, epochs=tune_epochs)
    client = FedBcdClient(training=training, tune=tune, penalty=penalty)
    server = BlockServer(step=server_step, iterations=server_iterations, box=side)
    return Algorithm("fedbcd", client, server, most_penalty=math.inf)


@tunes(penalty=Between(0.01, 1.0), server_step=Between(0.1, 1.0))
def fedbcdi(
    training: Training,
    *,
    penalty: Pull = 0.5,
    server_step: Part = 0.5,
    momentum: Decay = 0.9,
    box: Box = 2.0,
    server_iterations: Count = 1,
    wait_after: Count = 4,
    carry_momentum: bool = True,
    tune_epochs: Count = 5,
) -> Algorithm:
    """FedBCD whose personal models train alone, offline too, and are pulled to the shared one in contact."""
    side = None if box == "none" else box
    training = _accelerated(training, momentum, side)
    tune = fine_tuning(training, epochs=tune_epochs)
    client = FedBcdIClient(
        training=training, tune=tune, penalty=penalty, wait_after=wait_after, carry_momentum=carry_momentum
    )
    server = BlockServer(step=server_step, iterations=server_iterations, box=side, everyone=False)
    return Algorithm("fedbcdi", client, server, most_penalty=1.0)


def _accelerated(training: Training, momentum: float, box: float | None) -> Training:
    """Return the training with ASPG in place of SGD."""
    sgd = training.optimizer
    if not isinstance(sgd, Sgd):
        raise BadInput(
            f'training.optimizer: fedbcd and fedbcdi accelerate SGD themselves, by method.momentum; set it to "sgd" '
            f"(given: {sgd.optimizer!r})"
        )
    if sgd.momentum:
        raise BadInput(
            f"training.momentum: fedbcd and fedbcdi have method.momentum instead; set it to 0 (given: {sgd.momentum})"
        )
    optimizer = Accelerated(
        lr=sgd.lr, momentum=momentum, box=box, weight_decay=sgd.weight_decay, clip=sgd.clip, schedule=sgd.schedule
    )
    return Training(work=training.work, optimizer=optimizer)
