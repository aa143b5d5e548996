"""What methods that look at representations share: z = f(x; θ), the input of a network's linear head, and class means.

A head (W, b) with the rows of the identity below W and zeros below b gives the scores and z in one pass, of any network
whose last layer is `nn.Linear`: nothing else of it need be known.
"""

import zlib
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from personafl.core import rng
from personafl.core.algorithm import Problem
from personafl.core.batches import Batch, Batches
from personafl.core.losses import mean_of_valid
from personafl.core.tree import Params
from personafl.errors import BadInput


class Names(NamedTuple):
    """The parameters of a linear head."""

    weight: str
    bias: str | None


def head_of(problem: Problem, names: Iterable[str]) -> Names:
    """Return the names of the head's parameters, which are the personal part."""
    own = sorted(name for name in names if problem.split is not None and problem.split.is_personal(name))
    return Names(own[-1], own[0] if len(own) == 2 else None)  # "….bias" is before "….weight"


def check_head(method: str, problem: Problem, start: Params, *, bias: bool = False) -> None:
    """Refuse a personal part that is not a linear layer which gives the network's outputs."""
    _, head = problem.divide(start)
    layers = {name.rpartition(".")[0] for name in head}
    kinds = {name.rpartition(".")[2] for name in head}
    linear = len(layers) == 1 and "weight" in kinds and kinds <= {"weight", "bias"}
    if (
        not linear
        or problem.data.task == "ctc"
        or start[head_of(problem, start).weight].shape[:1] != (problem.data.classes,)
    ):
        raise BadInput(
            f"model.personal: {method} uses what goes into the network's last linear layer, so this must be that one, "
            "with an output for each class; set it to output"
        )
    if bias and "bias" not in kinds:
        raise BadInput(f"model: the last layer has no bias, and {method} needs one; give it one")


def check_classes(method: str, problem: Problem, instead: str) -> None:
    """Refuse a task without classes."""
    if not problem.data.whole:
        raise BadInput(
            f"method: {method} has means of classes, and the task {problem.data.task} has none; use {instead}"
        )


def scores_and_features(problem: Problem, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the outputs [batch, …, classes] and z [batch, …, width]."""
    head = head_of(problem, params)
    weight = params[head.weight]
    classes, width = weight.shape
    longer = {head.weight: torch.cat([weight, torch.eye(width, dtype=weight.dtype, device=weight.device)])}
    if head.bias is not None:
        bias = params[head.bias]
        longer[head.bias] = torch.cat([bias, torch.zeros(width, dtype=bias.dtype, device=bias.device)])
    both = problem.net.apply(params | longer, batch.x, batch.real, batch.key)
    return both[..., :classes], both[..., classes:]


def class_counts(problem: Problem, batches: Batches) -> Tensor:
    """Return how often each class is among the real targets, [classes]."""
    targets = batches.pool_y[batches.rows]  # [steps, batch, …]
    real = batches.real.reshape(*batches.real.shape, *[1] * (targets.ndim - 2)) & (targets >= 0)
    none = torch.zeros(problem.data.classes, device=targets.device)
    return none.index_add(0, targets.clamp(min=0).flatten(), real.expand_as(targets).flatten().to(none.dtype))


class ClassMeans(NamedTuple):
    """Prototypes: the mean of z over the samples of each class, and which classes have any.

    States of several servers may be mixed: then `means` is of those that know a class and 0s, and `known` their share.
    """

    means: Tensor  # [classes, width]
    known: Tensor  # [classes], 1 or 0

    def gap(self, z: Tensor, batch: Batch) -> Tensor:
        """Return ‖z − mean of the sample's class‖² / width [batch], 0 where it is not known; of a sequence the mean."""
        classes = batch.y.clamp(min=0)
        apart = (z - self.means.to(z)[classes]).square().mean(-1) * self.known.to(z)[classes]
        return apart if batch.y.ndim == 1 else mean_of_valid(apart, batch.y >= 0)

    def settled(self) -> "ClassMeans":
        """Return the means of what is known, after states were mixed."""
        some = self.known > 0
        means = self.means / torch.where(some, self.known, 1.0).unsqueeze(-1)
        return ClassMeans(means, some.to(self.known))


class ClassSums(NamedTuple):
    """What a client says of its classes: the sum of z over the samples of each, and their number."""

    total: Tensor  # [classes, width]
    samples: Tensor  # [classes]


def no_means(problem: Problem, start: Params) -> ClassMeans:
    """Return the prototypes before anyone has said anything."""
    weight = start[head_of(problem, start).weight]
    return ClassMeans(torch.zeros_like(weight), weight.new_zeros(len(weight)))


def class_sums(problem: Problem, params: Params, batches: Batches) -> ClassSums:
    """Go through a client's samples, and sum up z by class, without dropout."""
    total, count = (torch.zeros_like(part) for part in no_means(problem, params))
    for batch in batches.each():
        z = scores_and_features(problem, params, batch._replace(key=None))[1]  # type: ignore[arg-type]
        real = batch.real.reshape(-1, *[1] * (batch.y.ndim - 1)) & (batch.y >= 0)  # [batch, …]
        member = torch.nn.functional.one_hot(batch.y.clamp(min=0), len(count)).to(z) * real.unsqueeze(-1).to(z)
        member, z = member.flatten(0, -2), z.flatten(0, -2)
        total, count = total + member.mT @ z, count + member.sum(0)
    return ClassSums(total, count)


def pooled(before: ClassMeans, mean: ClassSums) -> ClassMeans:
    """Return the means over all samples that a cohort told of; of a class that it has none of, what was known."""
    before, found = before.settled(), mean.samples > 0
    count = torch.where(found, mean.samples, 1.0).unsqueeze(-1)
    means = torch.where(found.unsqueeze(-1), mean.total / count, before.means)
    return ClassMeans(means, torch.maximum(before.known, found.to(before.known)))


def drawn_from(weight: Tensor, purpose: str) -> torch.Generator:
    """Return a generator that follows from the start of a weight, and so from the run's seed."""
    seed = 0 if weight.is_meta else zlib.crc32(weight.cpu().double().numpy().tobytes())
    return rng.generator(purpose, seed)


def linear_start(generator: torch.Generator, like: Tensor, outputs: int) -> tuple[Tensor, Tensor]:
    """Return weight and bias of a linear layer on the inputs of another one, as torch draws them: U(±1/√inputs)."""
    inputs = like.shape[1]
    both = torch.rand(outputs, inputs + 1, generator=generator, device="cpu")  # the bias is the last column
    weight, bias = ((2 * both - 1) / inputs**0.5).to(like).split([inputs, 1], 1)
    return weight.contiguous(), bias.flatten()
