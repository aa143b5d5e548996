"""Losses and scores per sample."""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from personafl.core import tree
from personafl.core.batches import Batch
from personafl.core.ctc import ctc_correct, ctc_frames, ctc_loss, edit_distance, word_edits
from personafl.core.losses import MeanLoss, correct, cross_entropy
from personafl.core.net import Net
from personafl.core.rng import generator
from personafl.core.shape import TaskName
from personafl.core.targets import binary_cross_entropy, binary_divergence, explained, label_f1, squared_error
from personafl.core.tasks import Weighted, task_named
from personafl.core.tree import Params
from personafl.fast.table import enabled
from personafl.models import zoo

F64 = torch.float64


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=F64)


@pytest.mark.parametrize("stacked", [False, True])
def test_places_that_do_not_count_have_no_say_in_a_minibatch(stacked: bool) -> None:
    """The mean loss and its gradient are torch's with ignore_index, where sequences have equally many targets."""
    net = Net(lambda: zoo.TextWindow(7, 7, context=3, width=2, hidden=4)).to(torch.device("cpu"), torch.float64)
    params = {name: value.double() for name, value in net.init(generator(0)).items()}
    x, y = torch.arange(24).reshape(2, 3, 4) % 7, torch.arange(24).reshape(2, 3, 4) % 5
    y[:, :, 1] = -100
    y[0, :, 3] = y[1, :, 2] = -1
    objective, real = MeanLoss(net, cross_entropy), torch.ones(3, dtype=torch.bool)

    def trained(x: torch.Tensor, y: torch.Tensor) -> Any:
        batch = Batch(x, y, real, torch.zeros((), dtype=torch.int64))
        return torch.func.grad_and_value(lambda own: objective(own, batch))(params)

    def expected(x: torch.Tensor, y: torch.Tensor) -> Any:
        def loss(own: Params) -> torch.Tensor:
            targets = torch.where(y < 0, -100, y).flatten()
            return functional.cross_entropy(net.apply(own, x, real).flatten(0, 1), targets, ignore_index=-100)

        return torch.func.grad_and_value(loss)(params)

    if stacked:
        with enabled():
            found = torch.func.vmap(trained)(x, y)
        each = [tree.take(found, client) for client in range(2)]
    else:
        each = [trained(x[client], y[client]) for client in range(2)]
    for client, (gradient, value) in enumerate(each):
        wanted, loss = expected(x[client], y[client])
        assert float(value) == pytest.approx(float(loss), abs=1e-12)
        for name in wanted:
            assert torch.allclose(gradient[name], wanted[name], atol=1e-12)


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


def sequences(*rows: list[int]) -> Tensor:
    """Targets padded with −1."""
    longest = max(map(len, rows))
    return torch.tensor([row + [-1] * (longest - len(row)) for row in rows])


def torch_ctc(outputs: Tensor, targets: Tensor) -> Tensor:
    log_probs = outputs.log_softmax(-1).transpose(0, 1)
    frames = torch.full((len(targets),), outputs.shape[1])
    return functional.ctc_loss(log_probs, targets, frames, (targets >= 0).sum(1), reduction="none")


TARGETS = sequences([1, 2, 3, 4], [1, 1], [3], [2, 2, 2], [4, 3, 3, 4], [1, 2, 1, 2])


def test_ctc_by_hand() -> None:
    """Two frames with p(blank) = ½, p(1) = ¼, p(2) = ¼ each; target 1: paths −1, 1−, 11 give ⅛ + ⅛ + 1/16 = 5/16."""
    outputs = torch.tensor([[[0.5, 0.25, 0.25]] * 2] * 3, dtype=F64).log()
    got = ctc_loss(outputs, sequences([1], [1, 2], [1, 1]))
    assert got.tolist() == pytest.approx([math.log(16 / 5), math.log(16), math.inf], abs=1e-12)


@pytest.mark.parametrize("frames", [6, 7, 15, 40])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_ctc_is_torchs(frames: int, scale: float) -> None:
    """Values and gradients, with repeated labels and unequal lengths, for mild and extreme scores."""
    outputs = scale * normal(len(TARGETS), frames, 5)
    torch.testing.assert_close(ctc_loss(outputs, TARGETS), torch_ctc(outputs, TARGETS), rtol=1e-12, atol=1e-10)
    weights = torch.arange(1.0, len(TARGETS) + 1, dtype=F64)
    ours = torch.func.grad(lambda o: ctc_loss(o, TARGETS) @ weights)(outputs)
    leaf = outputs.clone().requires_grad_()
    (theirs,) = torch.autograd.grad(torch_ctc(leaf, TARGETS) @ weights, leaf)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=5), min_size=1, max_size=4), st.integers(9, 12))
def test_ctc_is_torchs_on_random_cases(rows: list[list[int]], frames: int) -> None:
    targets = sequences(*rows)
    outputs = normal(len(rows), frames, 4)
    torch.testing.assert_close(ctc_loss(outputs, targets), torch_ctc(outputs, targets), rtol=0, atol=1e-10)


def test_ctc_without_an_alignment_is_infinite_with_gradient_zero() -> None:
    """Three equal labels need five frames; the sample beside it is not touched."""
    outputs, targets = normal(2, 4, 3), sequences([1, 1, 1], [2])
    assert ctc_frames(targets).tolist() == [5, 1]
    assert ctc_loss(outputs, targets)[0] == math.inf
    both = torch.func.grad(lambda o: ctc_loss(o, targets).sum())(outputs)
    alone = torch.func.grad(lambda o: ctc_loss(o, targets[1:]).sum())(outputs[1:])
    assert bool((both[0] == 0).all())
    torch.testing.assert_close(both[1:], alone)


def test_ctc_of_an_empty_target_is_all_blanks() -> None:
    outputs = normal(1, 4, 3)
    expected = -outputs.log_softmax(-1)[0, :, 0].sum()
    assert float(ctc_loss(outputs, torch.tensor([[-1, -1]]))) == pytest.approx(float(expected), abs=1e-12)
    assert float(ctc_loss(outputs, torch.zeros(1, 0, dtype=torch.int64))) == pytest.approx(float(expected), abs=1e-12)


def test_ctc_in_single_precision_has_finite_gradients() -> None:
    outputs = (100 * normal(len(TARGETS), 60, 5)).float()
    loss = ctc_loss(outputs, TARGETS)
    torch.testing.assert_close(loss, torch_ctc(outputs, TARGETS), rtol=1e-5, atol=1e-3)
    gradient = torch.func.grad(lambda o: ctc_loss(o, TARGETS).sum())(outputs)
    assert bool(gradient.isfinite().all())


def frames_of(*rows: list[int]) -> Tensor:
    """Scores whose best classes per frame are given."""
    return functional.one_hot(torch.tensor(rows), 4).double()


def test_ctc_decoding_by_hand() -> None:
    """Repeats are joined unless a blank lies between; blanks are dropped."""
    outputs = frames_of([0, 1, 1, 0, 1, 2], [3, 3, 3, 3, 3, 3], [0] * 6, [1, 2, 3, 0, 0, 0], [1, 2, 1, 2, 1, 2])
    right = sequences([1, 1, 2], [3], [], [1, 2, 3], [1, 2, 1, 2, 1, 2])
    assert ctc_correct(outputs, right).tolist() == [1] * 5
    wrong = sequences([1, 2], [3, 3], [1], [1, 2], [1, 2, 1, 2, 1, 3, 1, 1])
    assert ctc_correct(outputs, wrong).tolist() == [0] * 5
    assert ctc_correct(outputs, right).dtype == torch.float32


def test_error_rates_by_hand() -> None:
    """Decoded 1 1 2 for 1 2: another word. 3 is the space: words 1 | 2 for 1 | 2 2, one of two is wrong.

    Without a space each target is a word; an empty one has none, and a word too many is an edit all the same.
    """
    outputs = frames_of([1, 0, 1, 2, 0, 0], [0] * 6, [1, 3, 2, 0, 0, 0])
    targets = sequences([1, 2], [1, 2, 1], [1, 3, 2, 2])
    assert word_edits(outputs, targets).tolist() == [[1, 1, 1], [1, 1, 1]]
    assert word_edits(outputs, targets, 3).tolist() == [[1, 1, 1], [1, 1, 2]]
    assert word_edits(outputs, sequences([1, 1, 2], [], [1, 3, 2])).tolist() == [[0, 0, 0], [1, 0, 1]]
    assert word_edits(outputs, sequences([2], [], [1]), 3).tolist() == [[1, 0, 1], [1, 0, 1]]
    assert (edit_distance("kitten", "sitting"), edit_distance("", "abc"), edit_distance("abc", "")) == (3, 3, 3)


def greedy(outputs: Tensor) -> list[list[int]]:
    """The best class per frame, repeats joined, blanks dropped."""
    return [[label for label, _ in groupby(row) if label] for row in outputs.argmax(-1).tolist()]


def distance(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """The edit distance by its definition: the last words are joined, or one of them is left out."""
    if not one or not other:
        return len(one) + len(other)
    joined = distance(one[:-1], other[:-1]) + (one[-1] != other[-1])
    return min(joined, distance(one[:-1], other) + 1, distance(one, other[:-1]) + 1)


@pytest.mark.parametrize("space", [None, 2])
def test_word_edits_are_those_of_all_ways_to_edit(space: int | None) -> None:
    """Random frames and targets of three letters."""
    rng = np.random.default_rng(1)
    outputs = torch.from_numpy(rng.random((4, 6, 12, 4)))
    targets = torch.from_numpy(
        np.where(np.arange(7) < rng.integers(0, 8, (4, 6, 1)), rng.integers(1, 4, (4, 6, 7)), -1)
    )

    def words(classes: list[int]) -> tuple[str, ...]:
        text = "".join(" " if label == space else str(label) for label in classes)
        return tuple(text.split())

    expected = [
        [[distance(words(d), words(t)) for d, t in pairs], [len(words(t)) for _, t in pairs]]
        for pairs in (
            list(zip(greedy(o), [[c for c in row if c >= 0] for row in t.tolist()], strict=True))
            for o, t in zip(outputs, targets, strict=True)
        )
    ]
    assert [word_edits(o, t, space).tolist() for o, t in zip(outputs, targets, strict=True)] == expected


def test_ctc_under_vmap_and_grad() -> None:
    """Stacked clients = one by one: losses, gradients, scores."""
    outputs, targets = normal(2, 3, 9, 5), TARGETS.reshape(2, 3, 4)
    for function in (ctc_loss, ctc_correct, torch.func.grad(lambda o, t: ctc_loss(o, t).sum())):
        stacked = torch.func.vmap(function)(outputs, targets)
        alone = torch.stack([function(o, t) for o, t in zip(outputs, targets, strict=True)])
        torch.testing.assert_close(stacked, alone, rtol=0, atol=1e-12)
    # A decoding that is right for one client only.
    best = functional.one_hot(torch.tensor([[[1, 0, 1]], [[1, 1, 2]]]), 5).double()
    assert torch.func.vmap(ctc_correct)(best, torch.tensor([[[1, 1]], [[1, 1]]])).tolist() == [[1], [0]]


def test_tasks() -> None:
    names = get_args(TaskName)
    assert [task_named(name).name for name in names] == list(names)
    assert {name: (task_named(name).loss, task_named(name).correct) for name in names} == {
        "classification": (cross_entropy, correct),
        "next-token": (cross_entropy, correct),
        "ctc": (ctc_loss, ctc_correct),
        "regression": (squared_error, explained),
        "multilabel": (binary_cross_entropy, label_f1),
    }


def test_errors_of_numbers_by_hand() -> None:
    outputs, targets = torch.tensor([[1.0, 3.0], [0.0, 0.0]]), torch.tensor([[2.0, 1.0], [0.0, 0.0]])
    assert squared_error(outputs, targets).tolist() == [2.5 / 8, 0.0]  # (1 + 4) / 2 / 8
    assert explained(outputs, targets).tolist() == [-1.5, 1.0]


def test_sets_of_labels_are_torchs_losses() -> None:
    generator = torch.Generator().manual_seed(0)
    outputs = 3 * torch.randn(7, 5, generator=generator, dtype=torch.float64)
    teacher = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    targets = (torch.rand(7, 5, generator=generator) < 0.4).double()
    expected = functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none").mean(1)
    torch.testing.assert_close(binary_cross_entropy(outputs, targets), expected, rtol=1e-13, atol=0)
    one, two = (torch.distributions.Bernoulli(logits=logits) for logits in (teacher, outputs))
    expected = torch.distributions.kl_divergence(one, two).mean(1)
    torch.testing.assert_close(binary_divergence(teacher, outputs), expected, rtol=1e-11, atol=1e-13)


def test_f1_of_sets_of_labels_by_hand() -> None:
    outputs = torch.tensor([[1.0, 1.0, -1.0], [-1.0, -1.0, -1.0], [-1.0, -1.0, 1.0], [1.0, -1.0, -1.0]])
    targets = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    assert label_f1(outputs, targets).tolist() == [0.5, 1.0, 1.0, 0.0]  # 2·1 / (2 + 2); none said, none there


def test_weights_of_classes_are_torchs() -> None:
    outputs, targets = torch.randn(6, 3, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 2, 1, 0])
    weights = torch.tensor([0.5, 1.0, 3.0])
    expected = functional.cross_entropy(outputs, targets, weight=weights, reduction="none")
    torch.testing.assert_close(Weighted(cross_entropy, weights)(outputs, targets), expected)
    stacked = torch.func.vmap(Weighted(cross_entropy, weights))(outputs.expand(2, 6, 3), targets.expand(2, 6))
    torch.testing.assert_close(stacked, expected.expand(2, 6))
