"""QuPeD: personal models that are quantized, each with its own architecture and bits, and learn by distillation.

K. Ozkara et al., *QuPeD: Quantized Personalization via Distillation with Applications to Federated Learning*, NeurIPS
2021, Algorithm 2. Client i has a full-precision personal model x in an architecture of its own and, for each quantized
layer, centers c, of which a weight's quantization Q_c(x) takes the nearest; all share a model w, which teaches:

    F_i(x, c, w) = (1−λ_p)[f_i(x) + f_i(Q̃_c(x))] + λ_p[KD_i(x, w) + KD_i(Q̃_c(x), w)] + λ_t·R(x, c)
    KD_i(x, w)   = the mean of KL(softmax of w's scores ‖ softmax of x's scores) over client i's samples

    client i, from w_i = w_t, for each minibatch:
        x   ← prox_{η₁λ_t R(·, c)}(x − η₁ ∇_x F_i)
        c   ← prox_{η₂λ_t R(x, ·)}(c − η₂ ∇_c F_i)  at the new x, then sorted
        w_i ← w_i − η₃ ∇_w F_i                      at the new x and c: distillation alone, no cross-entropy
    server:  w_{t+1} = mean of the new w_i

The personal model is Q_c(x). Q̃ is the hard quantizer, whose gradient is 0 in the weights that it quantizes and in c_j
the sum over its members; or with `sharpness` P the soft one, which tends to it. From round `freeze_after` on, weights
stay with the centers they are then at and move with them; centers and what is not quantized go on training. Quantized
are the weights of all layers but the first and the last (`full_precision`: but the last one, or of all), with centers
for each tensor; vectors are not. Without bits there are no centers, no Q̃ terms and no prox. λ_p = 0 is training alone.

λ_t = penalty · t / growth^t, where t counts rounds, epochs, or epochs of so many steps (`penalty_unit`: where training
counts steps, a recipe must say what an epoch is). It is the number of those complete when the round begins, also for a
client that missed some of them.

η₁ and η₃ follow the training's schedule, as "the global model has the same learning schedule as the personalized
models" (D.2.2), η₂ is constant unless `center_schedule` says otherwise. Weight decay is a part of the step on x. The
step on w has none in the paper: `shared_decay` adds one. The paper has η₃ = η₁, at which w lags behind x: λ_p scales
its whole loss; where `shared_lr` does not say it, η₃ is 2η₁, so that w is a teacher, and newcomers' start, sooner.

Errata: the new w_i is sent (E2), and centers are pulled towards their members (E1; `quantize`). R's factor ½ is in
the widths here, so that `penalty` is twice the λ of the authors' runs.

Centers: ∇_c F_i sums over a center's n_j members, up to 10⁵ in a large layer, and so does the prox. Their step is that
of the paper with the rate η₂/n_j in place of η₂ (`center_scale` = "mean"): at η₂ = η₁, the default, a center goes where
the mean of its members would go if each of them took a step of SGD at its quantized value. That is this step projected
onto weights that stay equal, so it is stable wherever SGD is, in layers of every size. With "sum", the paper's plain
step and its η₂ = 1e-4, the rate of a center of 10⁵ members is in effect 10, a hundred times η₁, and on CIFAR-10 most
models end at chance; the authors' limit of ±10 for each entry of ∇_c F_i (`center_clip`) does not prevent it, and one
of ±0.1 does by holding centers still. "sqrt" is η₂/√(n_j·m) (LSQ, S. Esser et al., 2020), in between.

Variants: center_start = "unit" with center_lr = 0 is ProxQuant (Y. Bai et al., 2019; bits = 1: centers ±1). One client
with all the data and λ_p = 0 is the paper's Algorithm 1. Baselines that differ in one line, by `coupling`, are
Federated Mutual Learning (`fml`) and QuPeL (`qupel`).

x starts at the first w that the client receives if that is its architecture, else it is drawn; centers start from x.

Deviation: the authors' runs take all of ∇_x f_i(Q_c(x)) as 0, also for the layers that are not quantized, which here
learn from it.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Annotated, Literal, NamedTuple

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from personafl.algorithms import quantize
from personafl.algorithms.averaging import PLAIN_MEAN, Averaging, Change, Model
from personafl.algorithms.personal import fine_tuning, retrained, steady
from personafl.algorithms.quantize import Cells, FullPrecision
from personafl.algorithms.training import Between, Count, NonNegative, OnePassClient, Rate, Training, TunedClient, tunes
from personafl.core import tree
from personafl.core.algorithm import Algorithm, Problem
from personafl.core.batches import Batch, Batches, Data, Steps
from personafl.core.descend import gradient_and_value, moved, pull, pullback
from personafl.core.losses import mean_of_real
from personafl.core.net import Net
from personafl.core.optim import Accelerated, LocalOptimizer, OptimizerSpec, Sgd
from personafl.core.schedule import Constant, Exponential, Step
from personafl.core.tree import Params, Tree
from personafl.errors import BadInput

Share = Annotated[float, Ge(0), Le(1)]
Bits = Annotated[int, Ge(1), Le(8)]
Growth = Annotated[float, Gt(0), Le(1)]
Coupling = Literal["distillation", "mutual", "proximity"]
CenterStart = Literal["weights", "unit"]
CenterScale = Literal["mean", "sqrt", "sum"]
CenterSchedule = Constant | Exponential | Step
Unit = Literal["rounds", "epochs"] | Count
CONSTANT = Constant()
Pull = Callable[[Tensor], Params]


class Centered(NamedTuple):
    """State of a client: x, and the centers of its quantized weights. Both never leave the device."""

    model: Params
    centers: Params


@dataclass(frozen=True, kw_only=True)
class QupedClient(OnePassClient, TunedClient):
    """Client rule: proximal steps on x and c, and distillation steps on w_i, on the same minibatches."""

    shared: LocalOptimizer = field(default_factory=Sgd)  # of w
    centers: Sgd = field(default_factory=Sgd)
    center_scale: CenterScale = "mean"
    center_clip: float | None = None  # limit of each entry of ∇_c F
    bits: int | None = None  # where the problem does not say
    coupling: Coupling = "distillation"
    distillation: float = 0.25  # λ_p
    center_start: CenterStart = "weights"
    full_precision: FullPrecision = "ends"
    penalty: float = 1e-6
    growth: float = 1.0
    pace: Fraction = Fraction(1)  # what a round adds to λ's t
    sharpness: float | None = None
    freeze_after: int | None = None

    def init(self, problem: Problem, down: Model, generator: torch.Generator) -> Centered:
        """Return where x and c start."""
        own = problem.personal_net is not problem.net
        if own and self.coupling == "proximity":
            raise BadInput("devices: qupel compares weights with the shared model's, so all have its architecture")
        like = next(iter(down.model.values()))
        model = tree.map(lambda p: p.to(like), problem.personal_net.init(generator)) if own else down.model
        bits = self.bits_of(problem)
        names = quantize.quantizable(problem.personal_net.shapes, self.full_precision) if bits else ()
        return Centered(model, {name: self._first_centers(model[name], 2 ** (bits or 0)) for name in names})

    def update(self, problem: Problem, down: Model, state: Centered, data: Data) -> tuple[Centered, Change]:
        """Train x, c and w_i."""
        state, w, loss = self._train(problem, down.model, state, data.phases["local"], data.round, teach=True)
        return state, Change(tree.sub(w, down.model), loss)

    def personalize(self, problem: Problem, down: Model, state: Centered, data: Data) -> Centered:
        """Train x and c under w as it is."""
        still = dataclasses.replace(self, training=self.tune, centers=steady(self.centers))
        return still._train(problem, down.model, state, data.phases["tune"], data.round, teach=False)[0]

    def models(self, problem: Problem, down: Model, state: Centered) -> dict[str, Params]:
        """Return w and Q_c(x)."""
        return {"global": down.model, "personal": _quantized(state.model, state.centers)}

    def packed(self, problem: Problem, down: Model, state: Centered) -> dict[str, tuple[Tree, ...]]:
        """Return w, and Q_c(x) with its codes in as many bits as they need."""
        codes = {name: quantize.pack(state.model[name], centers) for name, centers in state.centers.items()}
        return {"global": (down.model,), "personal": (state.model | codes,)}

    def bits_of(self, problem: Problem) -> int | None:
        """Return the device's, or the method's for all."""
        return problem.bits or self.bits

    def _first_centers(self, weight: Tensor, levels: int) -> Tensor:
        if self.center_start == "unit":
            return torch.linspace(-1, 1, levels, dtype=weight.dtype, device=weight.device)
        return quantize.initial_centers(weight, levels)

    def _train(
        self, problem: Problem, w: Params, state: Centered, batches: Batches, round_: Tensor, *, teach: bool
    ) -> tuple[Centered, Params, Tensor]:
        """Return the new x and c, w_i, and the mean loss of x."""
        rates = self.training.optimizer.rate(round_), self.centers.rate(round_)
        time = torch.floor(round_ * self.pace.numerator / self.pace.denominator)
        penalty = self.penalty * time / self.growth**time
        widths = tuple(penalty * rate for rate in rates)
        frozen = None if self.freeze_after is None else round_ >= self.freeze_after
        on_x, on_c, on_w = (spec.at(round_) for spec in (self.training.optimizer, self.centers, self.shared))
        x, c = _settled(state.model, state.centers, frozen), state.centers
        kept = on_x.init(x), on_c.init(c), on_w.init(w)
        total = torch.zeros((), device=batches.device)
        for batch in batches.each():
            before = x, c, w, kept
            teacher, to_w = self._teacher(problem, w, batch)
            gradient, loss = gradient_and_value(partial(self._loss_of_x, problem, c, w, teacher), x, batch)
            ahead, kept_x = moved(on_x, gradient, kept[0], x)
            near = {name: quantize.prox_weights(ahead[name], centers, widths[0]) for name, centers in c.items()}
            x = ahead | (near if frozen is None else {name: torch.where(frozen, x[name], near[name]) for name in c})
            kept_c, kept_w = kept[1:]
            if c:
                slope, cells = self._slope_of_c(problem, x, c, teacher, batch)
                scale = {name: self._scale(own, c[name]) for name, own in cells.items()}
                after, kept_c = moved(on_c, tree.map(torch.mul, slope, scale), kept_c, c)
                x, c = _moved_centers(x, c, after, cells, tree.scale(scale, widths[1]), frozen)
            if teach:
                w, kept_w = moved(on_w, self._slope_of_w(problem, w, x, c, teacher, to_w, batch), kept_w, w)
            kept = kept_x, kept_c, kept_w
            if batches.padding.gaps:
                alive = batch.real.any()
                x, c, w, kept = tree.where(alive, (x, c, w, kept), before)
                loss = torch.where(alive, loss, 0.0)
            total = total + loss
        return Centered(x, c), w, total / batches.real.any(-1).sum().clamp(min=1)

    def _teacher(self, problem: Problem, w: Params, batch: Batch) -> tuple[Tensor | None, Pull | None]:
        """Return the scores of w, from which x and c learn, and what takes a gradient there to w: in the same step."""
        if self.coupling == "proximity":
            return None, None
        return pullback(partial(_scores, problem.net), w, batch)

    def _loss_of_x(
        self, problem: Problem, c: Params, w: Params, teacher: Tensor | None, x: Params, batch: Batch
    ) -> Tensor:
        loss = self._taught(problem, teacher, x, batch)
        if self.coupling == "proximity":
            loss = loss + pull(x, w, self.distillation)
        # The hard quantizer's gradient is 0 in the weights it quantizes; through this term the other layers learn to
        # serve the quantized ones.
        return loss + self._taught(problem, teacher, self._soft(x, c), batch) if c else loss

    def _slope_of_c(
        self, problem: Problem, x: Params, c: Params, teacher: Tensor | None, batch: Batch
    ) -> tuple[Params, dict[str, Cells]]:
        """Return ∇_c F, and whose members the entries of x are."""
        cells = {name: Cells.of(x[name], centers) for name, centers in c.items()}
        if self.sharpness is None:  # ∂F/∂c_j is the sum of ∂F/∂Q over the members

            def of_quantized(own: Params, batch: Batch) -> Tensor:
                return self._taught(problem, teacher, x | own, batch)

            at = {name: cells[name].pick(centers) for name, centers in c.items()}
            slope, _ = gradient_and_value(of_quantized, at, batch)
            slope = {name: cells[name].sums(slope[name]).to(centers.dtype) for name, centers in c.items()}
        else:

            def of_centers(own: Params, batch: Batch) -> Tensor:
                return self._taught(problem, teacher, self._soft(x, own), batch)

            slope, _ = gradient_and_value(of_centers, c, batch)
        if self.center_clip is not None:
            slope = {name: g.clamp(-self.center_clip, self.center_clip) for name, g in slope.items()}
        return slope, cells

    def _scale(self, cells: Cells, centers: Tensor) -> Tensor:
        """Return by what η₂ is multiplied for each center, [m]."""
        count = cells.members().clamp(min=1).to(centers.dtype)
        return {"mean": 1 / count, "sqrt": (len(centers) * count).rsqrt(), "sum": torch.ones_like(count)}[
            self.center_scale
        ]

    def _slope_of_w(
        self,
        problem: Problem,
        w: Params,
        x: Params,
        c: Params,
        scores: Tensor | None,
        to_w: Pull | None,
        batch: Batch,
    ) -> Params:
        """Return ∇_w F, by way of the scores of w unless the coupling is by weights."""
        if scores is None or to_w is None:
            return tree.scale(tree.sub(w, x), self.distillation)
        others = [_scores(problem.personal_net, own, batch) for own in ((x, self._soft(x, c)) if c else (x,))]

        def loss(own: Params, batch: Batch) -> Tensor:
            pairs = [(other, own["w"]) if self.coupling == "mutual" else (own["w"], other) for other in others]
            taught = torch.stack([mean_of_real(problem.divergence(*pair), batch) for pair in pairs]).sum()
            if self.coupling == "mutual":
                alone = mean_of_real(problem.loss(own["w"], batch.y), batch)
                return (1 - self.distillation) * alone + self.distillation * taught
            return self.distillation * taught

        return to_w(gradient_and_value(loss, {"w": scores}, batch)[0]["w"])

    def _taught(self, problem: Problem, teacher: Tensor | None, model: Params, batch: Batch) -> Tensor:
        """(1−λ_p) f + λ_p KD of a personal model; f alone where there is no teacher."""
        scores = _scores(problem.personal_net, model, batch)
        own = mean_of_real(problem.loss(scores, batch.y), batch)
        if teacher is None:
            return own
        taught = mean_of_real(problem.divergence(teacher, scores), batch)
        return (1 - self.distillation) * own + self.distillation * taught

    def _soft(self, x: Params, c: Params) -> Params:
        return _quantized(x, c, self.sharpness)


def _scores(net: Net, params: Params, batch: Batch) -> Tensor:
    return net.apply(params, batch.x, batch.real, batch.key)


def _quantized(x: Params, c: Params, sharpness: float | None = None) -> Params:
    """Return x with its quantized weights at their centers, or softly near them."""
    if sharpness is None:
        return x | {name: quantize.hard(x[name], centers) for name, centers in c.items()}
    return x | {name: quantize.soft(x[name], centers, sharpness) for name, centers in c.items()}


def _settled(x: Params, c: Params, frozen: Tensor | None) -> Params:
    """Put frozen weights on their centers."""
    if frozen is None:
        return x
    return x | {name: torch.where(frozen, quantize.hard(x[name], centers), x[name]) for name, centers in c.items()}


def _moved_centers(
    x: Params, c: Params, moved: Params, cells: dict[str, Cells], width: Params, frozen: Tensor | None
) -> tuple[Params, Params]:
    """Return the prox of the centers after a gradient step, sorted; frozen weights go with them."""
    weights, centers = dict(x), {}
    for name, before in c.items():
        after = quantize.prox_centers(moved[name], x[name], width[name], before, cells[name])
        if frozen is not None:
            weights[name] = torch.where(frozen, cells[name].pick(after), x[name])
        centers[name] = quantize.sorted_centers(after)
    return weights, centers


@tunes(distillation=Between(0.05, 0.95, log=False), penalty=Between(1e-7, 1e-3))
def quped(
    training: Training,
    *,
    bits: Bits | None = None,
    distillation: Share = 0.25,
    penalty: NonNegative = 1e-6,
    penalty_unit: Unit = "rounds",
    growth: Growth = 1.0,
    center_lr: NonNegative | None = None,
    center_schedule: CenterSchedule = CONSTANT,
    center_scale: CenterScale = "mean",
    center_clip: Rate | None = None,
    center_start: CenterStart = "weights",
    full_precision: FullPrecision = "ends",
    shared_lr: Rate | None = None,
    shared_decay: NonNegative = 0.0,
    sharpness: Rate | None = None,
    freeze_after: Count | None = None,
    tune_epochs: Count = 5,
    server: OptimizerSpec = PLAIN_MEAN,
) -> Algorithm:
    """Quantized personal models, of each client's own size, that learn from each other by distillation."""
    if isinstance(training.optimizer, Accelerated):
        raise BadInput(
            'training.optimizer: "accelerated" takes gradients ahead of the weights, where the steps on x, the centers '
            'and w in turn do not; set it to "sgd" or "adam"'
        )
    shared = retrained(training, lr=shared_lr or _teachers_rate(training), epochs=None).optimizer
    usual = 1e-4 if center_scale == "sum" else training.optimizer.lr
    client = QupedClient(
        training=training,
        tune=fine_tuning(training, epochs=tune_epochs),
        shared=dataclasses.replace(shared, weight_decay=shared_decay),
        centers=Sgd(lr=usual if center_lr is None else center_lr, schedule=center_schedule),
        center_scale=center_scale,
        center_clip=center_clip,
        bits=bits,
        distillation=distillation,
        center_start=center_start,
        full_precision=full_precision,
        penalty=penalty,
        growth=growth,
        pace=_pace(training.work, penalty_unit),
        sharpness=sharpness,
        freeze_after=freeze_after,
    )
    return Algorithm("quped", client, Averaging(optimizer=server), own_networks=True, uses_bits=True)


def _teachers_rate(training: Training) -> float:
    """Return η₃: twice the training's, but where steps do not grow with the gradient."""
    return training.optimizer.lr * (2 if isinstance(training.optimizer, Sgd) else 1)


def _pace(work: Steps, unit: Unit) -> Fraction:
    """Return how many units of time a round has."""
    key = "method.penalty_unit"
    if unit == "rounds":
        return Fraction(1)
    if work.least is not None:
        raise BadInput(
            f"{key}: with training.least_steps or least_epochs rounds differ in length; leave that out, or set this to "
            '"rounds"'
        )
    if unit == "epochs":
        if work.epochs is None:
            raise BadInput(
                f"{key}: training.steps does not say what an epoch is; give an epoch's number of steps instead, such "
                "as 40 for 1,000 samples in batches of 25, or set training.epochs"
            )
        return Fraction(work.epochs)
    if work.steps is None:
        raise BadInput(f'{key}: training counts epochs, not steps; set it to "epochs", or set training.steps')
    return Fraction(work.steps, unit)
