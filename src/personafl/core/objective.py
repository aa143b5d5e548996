"""What clients minimise: the mean loss of a network on a minibatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from personafl.core.batches import Batch
from personafl.core.net import Net
from personafl.core.tree import Params
from personafl.fast.stack import stack_around

Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs [batch, …], targets [batch, …]) -> losses [batch]


@dataclass(frozen=True, eq=False)
class MeanLoss:
    """f(w; B), the mean of a network's losses over the real samples of a batch; or of its other parameters, some fixed.

    A function like any other. Training that sees it is one of these knows what it computes, and may compute it cheaper
    (`core.descend`).
    """

    net: Net
    loss: Loss
    fixed: Params = field(default_factory=dict)

    def __call__(self, params: Params, batch: Batch) -> Tensor:
        """Return f."""
        real = None if batch.full else batch.real
        losses = self.loss(self.net.apply(self.fixed | params, batch.x, real, batch.key), batch.y)
        stack = stack_around()
        if stack is not None and stack.has(losses):
            return stack.call(_mean, losses) if real is None else stack.call(_mean, losses, real)
        return _mean(losses, real)


def _mean(losses: Tensor, real: Tensor | None = None) -> Tensor:
    """Return the mean over the last axis of those that count."""
    if real is None:
        return losses.mean(-1)
    return torch.where(real, losses, 0.0).sum(-1) / real.sum(-1).clamp(min=1)
