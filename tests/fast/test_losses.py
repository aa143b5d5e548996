"""Losses of stacked clients: those of each alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional

from personafl.core.losses import correct, cross_entropy

F64 = torch.float64


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=F64)


def test_losses_under_vmap() -> None:
    """Stacked clients = one by one, for labels and for sequences."""
    for outputs, targets in (
        (normal(3, 4, 5), torch.randint(5, (3, 4), generator=torch.Generator().manual_seed(1))),
        (normal(3, 2, 4, 5), torch.randint(-1, 5, (3, 2, 4), generator=torch.Generator().manual_seed(2))),
    ):
        for function in (cross_entropy, correct):
            stacked = vmap(function)(outputs, targets)
            alone = torch.stack([function(o, t) for o, t in zip(outputs, targets, strict=True)])
            torch.testing.assert_close(stacked, alone, rtol=0, atol=1e-12)


def test_the_gradient_of_stacked_cross_entropies() -> None:
    """Large scores too, where a plain sum of powers would overflow."""
    outputs = (100 * normal(3, 4, 5)).float()
    targets = torch.randint(5, (3, 4), generator=torch.Generator().manual_seed(1))
    weights = normal(3, 4).float()

    def weighted(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        return (weights * cross_entropy(outputs, targets)).sum()

    leaf = outputs.clone().requires_grad_()
    vmap(weighted)(leaf, targets, weights).sum().backward()
    alone = outputs.double().requires_grad_()
    (weights.double() * functional.cross_entropy(alone.mT, targets, reduction="none")).sum().backward()
    torch.testing.assert_close(leaf.grad, alone.grad.float())  # type: ignore[union-attr]
