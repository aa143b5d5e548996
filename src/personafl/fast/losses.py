"""Losses of stacked clients, computed beneath the vmap that stacks them: its own way takes several times as long."""

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from personafl.core import losses
from personafl.core.batches import Batch
from personafl.core.losses import MeanLoss, mean_of_valid
from personafl.core.seam import definition
from personafl.core.tree import Params
from personafl.fast.stack import stack_around


def mean_loss(objective: MeanLoss, params: Params, batch: Batch) -> Tensor:
    """Return what `MeanLoss` does; where all samples are known to be real, without looking at which are."""
    real = None if batch.full else batch.real
    values = objective.loss(objective.net.apply(objective.fixed | params, batch.x, real, batch.key), batch.y)
    return mean_of_real(values, batch)


def mean_of_real(values: Tensor, batch: Batch) -> Tensor:
    """Return what `core.losses.mean_of_real` does."""
    real, stack = None if batch.full else batch.real, stack_around()
    if stack is not None and stack.has(values):
        return stack.call(_mean, values) if real is None else stack.call(_mean, values, real)
    return _mean(values, real)


def _mean(values: Tensor, real: Tensor | None = None) -> Tensor:
    """Return the mean over the last axis of those that count."""
    if real is None:
        return values.mean(-1)
    return torch.where(real, values, 0.0).sum(-1) / real.sum(-1).clamp(min=1)


def divergence(teacher: Tensor, pupil: Tensor) -> Tensor:
    """Return what `core.losses.divergence` does."""
    stack, entropies = stack_around(), definition(losses.divergence)
    if stack is None or not (stack.has(teacher) and stack.has(pupil)):
        return entropies(teacher, pupil)

    def beneath(*scores: Tensor) -> Tensor:
        return entropies(*(each.flatten(0, 1) for each in scores)).reshape(stack.clients, -1)

    return stack.call(beneath, teacher, pupil)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return what `core.losses.cross_entropy` does."""
    if not is_functorch_wrapped_tensor(outputs):
        return definition(losses.cross_entropy)(outputs, targets)
    labels, stack = targets if targets.ndim == 1 else targets.clamp(min=0), stack_around()
    if stack is None:
        values = outputs.logsumexp(-1) - outputs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    else:
        values = stack.call(_CrossEntropy.apply, outputs.to(torch.promote_types(outputs.dtype, torch.float32)), labels)
    return values if targets.ndim == 1 else mean_of_valid(values, targets >= 0)


class _CrossEntropy(torch.autograd.Function):
    """outputs [..., classes], targets [...] ↦ −log softmax(outputs)[target], with the gradient softmax − one-hot."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, targets: Tensor) -> Tensor:
        below = outputs - outputs.amax(-1, keepdim=True)
        powers = below.exp()
        total = powers.sum(-1, keepdim=True)
        own = targets.unsqueeze(-1)
        ctx.save_for_backward(powers, total, own)
        return (total.log() - below.gather(-1, own)).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        powers, total, own = ctx.saved_tensors
        gradient = gradient.unsqueeze(-1)
        share = powers * (gradient / total)
        if share.is_cuda:  # adding at places sorts them first there, so that it repeats
            return torch.where(own == torch.arange(share.shape[-1], device=own.device), share - gradient, share), None
        return share.scatter_add_(-1, own, -gradient), None
