"""Losses and scores per sample."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from personafl.core.losses import correct, cross_entropy

F64 = torch.float64


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=F64)


def test_cross_entropy_by_hand() -> None:
    """Logits (0, log 3) give probabilities ¼, ¾: losses log 4 and log 4/3."""
    outputs = torch.tensor([[0.0, math.log(3)]] * 2, dtype=F64)
    got = cross_entropy(outputs, torch.tensor([0, 1]))
    assert got.tolist() == pytest.approx([math.log(4), math.log(4 / 3)], abs=1e-12)


def test_sequences_count_by_their_valid_tokens() -> None:
    """The mean over targets ≥ 0, token by token; −1 is ignored wherever it is; no valid token gives 0."""
    outputs = normal(3, 4, 5)
    targets = torch.tensor([[0, 4, 2, 1], [3, -1, 1, -1], [-1, -1, -1, -1]])
    expected = [
        sum(float(functional.cross_entropy(outputs[i, t], targets[i, t])) for t in tokens) / max(len(tokens), 1)
        for i, tokens in enumerate([[0, 1, 2, 3], [0, 2], []])
    ]
    assert cross_entropy(outputs, targets).tolist() == pytest.approx(expected, abs=1e-12)


def test_an_ignored_token_has_no_gradient_and_no_say() -> None:
    """Whatever the outputs there are, infinities included."""
    outputs, targets = normal(1, 3, 4), torch.tensor([[2, -1, 0]])
    gradient = torch.func.grad(lambda o: cross_entropy(o, targets).sum())(outputs)
    assert bool((gradient[0, 1] == 0).all())
    assert bool((gradient[0, [0, 2]] != 0).all())
    wild = outputs.clone()
    wild[0, 1] = float("inf")
    assert torch.equal(cross_entropy(wild, targets), cross_entropy(outputs, targets))


def test_targets_with_two_axes_per_sample() -> None:
    """[batch, height, width, classes] with height = width, where swapping the axes would go unnoticed."""
    outputs = normal(2, 3, 3, 4)
    targets = torch.randint(4, (2, 3, 3), generator=torch.Generator().manual_seed(1))
    targets[1, 0, 2] = -1
    for sample in range(2):
        valid = targets[sample] >= 0
        expected = functional.cross_entropy(outputs[sample][valid], targets[sample][valid])
        got = cross_entropy(outputs, targets)
        assert got.shape == (2,)
        assert float(got[sample]) == pytest.approx(float(expected), abs=1e-12)
    assert correct(outputs, targets).shape == (2,)


def test_correct_by_hand() -> None:
    """Labels: 0 or 1. Sequences: the share of valid tokens; 0 when there are none."""
    outputs = torch.tensor([[0.1, 0.9], [0.8, 0.2]], dtype=F64)
    assert correct(outputs, torch.tensor([1, 1])).tolist() == [1, 0]
    tokens = torch.tensor([[0, 1, 1, 0]] * 3)  # predicted classes
    sequence = functional.one_hot(tokens, 2).double()
    targets = torch.tensor([[0, 1, 0, 0], [0, -1, -1, 1], [-1, -1, -1, -1]])
    assert correct(sequence, targets).tolist() == [0.75, 0.5, 0.0]


def test_losses_under_vmap() -> None:
    """Stacked clients = one by one, for labels and for sequences."""
    for outputs, targets in (
        (normal(3, 4, 5), torch.randint(5, (3, 4), generator=torch.Generator().manual_seed(1))),
        (normal(3, 2, 4, 5), torch.randint(-1, 5, (3, 2, 4), generator=torch.Generator().manual_seed(2))),
    ):
        for function in (cross_entropy, correct):
            stacked = torch.func.vmap(function)(outputs, targets)
            alone = torch.stack([function(o, t) for o, t in zip(outputs, targets, strict=True)])
            torch.testing.assert_close(stacked, alone, rtol=0, atol=1e-12)
