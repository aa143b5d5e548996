"""Losses and scores per sample; a sequence counts by its valid tokens (targets ≥ 0)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["correct", "cross_entropy"]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return [batch] cross-entropies: outputs [batch, classes], targets [batch]; or sequences.

    For sequences outputs are [batch, length, classes] and targets [batch, length] (or more axes than length).
    """
    if targets.ndim == 1:
        return functional.cross_entropy(outputs, targets, reduction="none")
    valid = targets >= 0
    losses = functional.cross_entropy(outputs.movedim(-1, 1), targets.clamp(min=0), reduction="none")
    return _mean(losses, valid)


def correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return [batch] shares of correct predictions: 0 or 1 for a label, the share of valid tokens for a sequence."""
    hit = (outputs.argmax(-1) == targets).to(torch.float32)
    if targets.ndim == 1:
        return hit
    return _mean(hit, targets >= 0)


def _mean(values: Tensor, valid: Tensor) -> Tensor:
    """Mean over the valid tokens of each sample, [batch, …] -> [batch]; 0 when there are none."""
    return torch.where(valid, values, 0.0).flatten(1).sum(1) / valid.flatten(1).sum(1).clamp(min=1)
