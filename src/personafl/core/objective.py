"""What clients minimise: the mean loss of a network on a minibatch."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from personafl.core.batches import Batch
from personafl.core.net import Net
from personafl.core.seam import replaceable
from personafl.core.tree import Params

Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs [batch, …], targets [batch, …]) -> losses [batch]


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
        return torch.where(batch.real, losses, 0.0).sum() / batch.real.sum().clamp(min=1)
