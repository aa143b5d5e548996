"""Losses and scores per sample; a sequence counts by its valid tokens (targets ≥ 0). `core.tasks` joins them."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from personafl.core.batches import Batch
from personafl.core.net import Net
from personafl.core.seam import replaceable
from personafl.core.tree import Params


@replaceable
def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return [batch] cross-entropies: outputs [batch, classes], targets [batch]; or sequences.

    For sequences outputs are [batch, length, classes] and targets [batch, length] (or more axes than length).
    """
    labels = targets if targets.ndim == 1 else targets.clamp(min=0)
    losses = functional.cross_entropy(outputs.flatten(0, -2), labels.flatten(), reduction="none").reshape(labels.shape)
    return losses if targets.ndim == 1 else mean_of_valid(losses, targets >= 0)


@replaceable
def divergence(teacher: Tensor, pupil: Tensor) -> Tensor:
    """Return KL(softmax(teacher) ‖ softmax(pupil)) per sample [batch], of scores [batch, …, classes]."""
    log_p, log_q = functional.log_softmax(teacher, -1), functional.log_softmax(pupil, -1)
    entries = (log_p.exp() * (log_p - log_q)).sum(-1)  # [batch, …]
    return entries.reshape(len(entries), -1).mean(-1)


@replaceable
def mean_of_real(values: Tensor, batch: Batch) -> Tensor:
    """Return the mean of values [batch] of the real samples; 0 when there are none."""
    return torch.where(batch.real, values, 0.0).sum() / batch.real.sum().clamp(min=1)


def correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return [batch] shares of correct predictions: 0 or 1 for a label, the share of valid tokens for a sequence."""
    hit = (outputs.argmax(-1) == targets).to(torch.float32)
    if targets.ndim == 1:
        return hit
    return mean_of_valid(hit, targets >= 0)


def mean_of_valid(values: Tensor, valid: Tensor) -> Tensor:
    """Mean over the valid tokens of each sample, [batch, …] -> [batch]; 0 when there are none."""
    return torch.where(valid, values, 0.0).flatten(1).sum(1) / valid.flatten(1).sum(1).clamp(min=1)


Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs [batch, …], targets [batch, …]) -> losses [batch]
# (outputs, targets) of all samples of a client -> one number, or one for each sample, of which the mean counts
Metric = Callable[[Tensor, Tensor], Tensor | float]


@dataclass(frozen=True, eq=False)
class MeanLoss:
    """f(w; B), the mean of a network's losses over the real samples of a batch; or of its other parameters, some fixed.

    A function like any other. Training that sees it is one of these knows what it computes, and may do so cheaper.
    """

    net: Net
    loss: Loss
    fixed: Params = field(default_factory=dict)

    @replaceable
    def __call__(self, params: Params, batch: Batch) -> Tensor:
        """Return f."""
        losses = self.loss(self.net.apply(self.fixed | params, batch.x, batch.real, batch.key), batch.y)
        return mean_of_real(losses, batch)
