"""Losses and scores per sample of targets that are no class: real numbers, and sets of labels."""

import torch
from torch import Tensor
from torch.nn import functional


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return [batch] means over targets of (output − target)²/8: both [batch, targets].

    An eighth, for then its curvature is at most that of the logistic loss, ¼, and a learning rate that suits classes
    suits numbers too: with layers that are normed, plain SGD at 0.05 diverges on (output − target)².
    """
    return (outputs - targets).square().flatten(1).mean(1) / 8


def explained(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return [batch] 1 − (output − target)²: where targets have variance 1, its mean is R², the share explained."""
    return 1 - 8 * squared_error(outputs, targets)


def binary_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return [batch] means over labels of −log p(target), p = sigmoid(output); targets [batch, labels] are 0 or 1."""
    return (functional.softplus(outputs) - outputs * targets).flatten(1).mean(1)


def binary_divergence(teacher: Tensor, pupil: Tensor) -> Tensor:
    """Return [batch] means over labels of KL(Bernoulli(sigmoid(teacher)) ‖ Bernoulli(sigmoid(pupil)))."""
    return binary_cross_entropy(pupil, teacher.sigmoid()) - binary_cross_entropy(teacher, teacher.sigmoid())


def label_f1(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return [batch] 2·hits / (labels said + labels there), where an output above 0 says its label; 1 if none is."""
    said, there = outputs > 0, targets > 0.5
    total = said.flatten(1).sum(1) + there.flatten(1).sum(1)
    return torch.where(total > 0, 2 * (said & there).flatten(1).sum(1) / total.clamp(min=1), 1.0)
