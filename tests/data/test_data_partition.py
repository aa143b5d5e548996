"""Laws of the partitioners, on random label tables."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from personafl.core.rng import numpy_generator
from personafl.data.allot import apportion, fill, label_sets, round_table
from personafl.data.federated import Ragged
from personafl.data.partition import (
    by_classes,
    by_dirichlet,
    by_diversity,
    by_quantity,
    by_users,
    iid,
)
from personafl.errors import BadInput

Labels = NDArray[np.int64]
FAST = settings(max_examples=40, deadline=None)


def rng(seed: int) -> np.random.Generator:
    return numpy_generator(seed, "partition test")


@st.composite
def labels(draw: st.DrawFn) -> Labels:
    counts = draw(st.lists(st.integers(0, 60), min_size=2, max_size=12).filter(lambda c: sum(c) >= 12))
    return rng(draw(st.integers(0, 99))).permutation(np.repeat(np.arange(len(counts)), counts))


def check_disjoint(rows: Ragged, samples: int, *, complete: bool) -> None:
    assert len(np.unique(rows.flat)) == len(rows.flat)
    assert rows.flat.min() >= 0
    assert rows.flat.max() < samples
    if complete:
        assert len(rows.flat) == samples


def same(make: Callable[[int], Ragged]) -> None:
    first, again, other = make(5), make(5), make(6)
    assert np.array_equal(first.flat, again.flat)
    assert np.array_equal(first.offset, again.offset)
    assert len(other.flat) > 0


@FAST
@given(st.integers(1, 400), st.integers(1, 40), st.integers(1, 3))
def test_iid_deals_every_row_in_even_sizes(samples: int, clients: int, minimum: int) -> None:
    if clients * minimum > samples:
        with pytest.raises(BadInput, match=r"partition\.clients"):
            iid(samples, clients, minimum, rng(0))
        return
    rows = iid(samples, clients, minimum, rng(0))
    check_disjoint(rows, samples, complete=True)
    assert np.ptp(rows.sizes) <= 1
    same(lambda seed: iid(samples, clients, minimum, rng(seed)))


@FAST
@given(st.integers(50, 400), st.integers(1, 20), st.sampled_from([1e-4, 0.01, 0.5, 100.0]))
def test_quantity_deals_every_row_and_honours_the_minimum(samples: int, clients: int, alpha: float) -> None:
    rows = by_quantity(samples, clients, alpha, 2, rng(1))
    check_disjoint(rows, samples, complete=True)
    assert rows.sizes.min() >= 2
    same(lambda seed: by_quantity(samples, clients, alpha, 2, rng(seed)))


@FAST
@given(
    labels(),
    st.integers(1, 30),
    st.sampled_from([1e-6, 0.01, 0.1, 1.0, 1000.0]),
    st.sampled_from(["equal", "natural"]),
    st.integers(1, 3),
)
def test_dirichlet_always_ends_complete_with_the_minimum(
    label: Labels, clients: int, alpha: float, sizes: str, minimum: int
) -> None:
    def make(seed: int) -> Ragged:
        return by_dirichlet(label, clients, alpha, sizes, minimum, rng(seed))  # type: ignore[arg-type]

    if clients * minimum > len(label):
        with pytest.raises(BadInput, match=r"partition\.clients"):
            make(0)
        return
    rows = make(0)
    check_disjoint(rows, len(label), complete=True)
    assert rows.sizes.min() >= minimum
    if sizes == "equal":
        assert np.ptp(rows.sizes) <= 1
    same(make)


def test_dirichlet_is_as_skewed_as_its_alpha_says() -> None:
    """The mean of max p over Dirichlet(0.1 · 1₁₀) is near 0.66; dealing whole classes must not flatten it."""
    label = np.repeat(np.arange(10), 600)
    for alpha, low, high in ((0.1, 0.6, 0.72), (100.0, 0.1, 0.2)):
        rows = by_dirichlet(label, 60, alpha, "equal", 2, rng(3))
        top = [np.bincount(label[rows[i]], minlength=10).max() / len(rows[i]) for i in range(60)]
        assert low < np.mean(top) < high


@FAST
@given(labels(), st.integers(1, 15), st.integers(1, 6))
def test_classes_are_exactly_k_in_equal_portions(label: Labels, clients: int, k: int) -> None:
    try:
        rows = by_classes(label, clients, k, None, 1, rng(0))
    except BadInput:
        # Refused only where it cannot be: even one row of k classes for each client is more than there is.
        assert np.minimum(np.bincount(label), clients).sum() < clients * k
        return
    check_disjoint(rows, len(label), complete=False)
    assert np.ptp(rows.sizes) == 0
    for client in range(clients):
        _, portion = np.unique(label[rows[client]], return_counts=True)
        assert len(portion) == k
        assert np.ptp(portion) == 0
    same(lambda seed: by_classes(label, clients, k, None, 1, rng(seed)))


def test_classes_uses_all_of_balanced_data_as_quped_does() -> None:
    """50 clients × 4 classes over 10 classes of 500: each class has 20 takers, so 25 each and 100 per client."""
    label = np.repeat(np.arange(10), 500)
    rows = by_classes(label, 50, 4, None, 2, rng(0))
    assert rows.sizes.tolist() == [100] * 50
    sets = {tuple(np.unique(label[rows[i]])) for i in range(50)}
    assert len(sets) > 30  # of 210 possible sets, many different ones
    fewer = by_classes(label, 50, 4, 42, 2, rng(0))
    assert fewer.sizes.tolist() == [40] * 50


@FAST
@given(labels(), st.integers(1, 15), st.integers(1, 6))
def test_diversity_is_exactly_k_labels_and_equal_sizes(label: Labels, clients: int, k: int) -> None:
    try:
        rows = by_diversity(label, clients, k, None, 1, rng(0))
    except BadInput:
        assert np.minimum(np.bincount(label), clients).sum() < clients * k
        return
    check_disjoint(rows, len(label), complete=False)
    assert np.ptp(rows.sizes) == 0
    assert all(len(np.unique(label[rows[client]])) == k for client in range(clients))
    same(lambda seed: by_diversity(label, clients, k, None, 1, rng(seed)))


def test_diversity_uses_every_row_of_uneven_classes() -> None:
    """MNIST's class sizes divided by ten: 100 devices with 60 digits of 3 labels use all 6,000."""
    sizes = [592, 674, 596, 613, 584, 542, 592, 627, 585, 595]
    label = np.repeat(np.arange(10), sizes)
    rows = by_diversity(label, 100, 3, 60, 2, rng(0))
    check_disjoint(rows, 6000, complete=True)
    assert rows.sizes.tolist() == [60] * 100
    assert all(len(np.unique(label[rows[i]])) == 3 for i in range(100))


@FAST
@given(st.lists(st.integers(0, 12), min_size=1, max_size=80), st.integers(1, 4))
def test_users_stay_whole(users: list[int], merge: int) -> None:
    user = np.array(users)
    rows, members = by_users(user, merge, rng(0))
    present = len(np.unique(user))
    assert len(rows) == len(members) == present // merge
    for client, group in enumerate(members):
        assert len(group) == merge
        assert np.array_equal(rows[client], np.flatnonzero(np.isin(user, group)))
    if merge == 1:
        assert len(rows.flat) == len(user)


@pytest.mark.parametrize("make", [by_classes, by_diversity])
def test_more_classes_than_exist(make: Callable[..., Ragged]) -> None:
    with pytest.raises(BadInput, match="only 3 classes; use at most 3"):
        make(np.array([0, 1, 3] * 9), 2, 4, None, 1, rng(0))


def test_samples_that_do_not_fit() -> None:
    label = np.repeat(np.arange(4), 10)
    with pytest.raises(BadInput, match=r"partition\.samples = 30.*2 to 10 samples"):
        by_classes(label, 4, 2, 30, 1, rng(0))
    with pytest.raises(BadInput, match="lower clients"):
        by_classes(label, 13, 2, None, 3, rng(0))
    with pytest.raises(BadInput, match=r"partition\.labels = 2: the rarer labels do not go round 9 clients"):
        by_diversity(np.repeat([0, 1], [37, 3]), 9, 2, None, 1, rng(0))
    uneven = np.repeat([0, 1], [37, 3])
    with pytest.raises(BadInput, match=r"partition\.samples = 20"):
        by_diversity(uneven, 2, 1, 20, 1, rng(0))


@FAST
@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.data())
def test_apportion_meets_total_and_caps(weights: list[int], data: st.DataObject) -> None:
    cap = np.array(data.draw(st.lists(st.integers(0, 9), min_size=len(weights), max_size=len(weights))))
    total = data.draw(st.integers(0, int(cap.sum())))
    share = apportion(np.array(weights), total, cap)
    assert share.sum() == total
    assert (share <= cap).all()
    assert (share >= 0).all()
    with pytest.raises(ValueError, match="cannot hold"):
        apportion(np.array(weights), int(cap.sum()) + 1, cap)


@FAST
@given(st.integers(1, 20), st.integers(1, 5), st.integers(0, 50))
def test_label_sets_are_distinct_and_fill_the_slots(clients: int, k: int, seed: int) -> None:
    cap = np.full(k + 3, clients)
    slots = apportion(rng(seed).integers(1, 9, size=k + 3), clients * k, cap)
    chosen = label_sets(slots, clients, rng(seed))
    assert chosen.shape == (clients, k)
    assert all(len(set(row)) == k for row in chosen.tolist())
    assert np.array_equal(np.bincount(chosen.ravel(), minlength=k + 3), slots)


@FAST
@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 99))
def test_round_table_rounds_every_cell_up_or_down(clients: int, classes: int, seed: int) -> None:
    expected = rng(seed).random((clients, classes)) * 4
    row = np.floor(expected.sum(axis=1)).astype(np.int64)
    column = np.ceil(expected.sum(axis=0)).astype(np.int64)
    table, lacking = round_table(expected, row, column)
    assert not lacking.any()
    assert np.array_equal(table.sum(axis=1), row)
    assert (table.sum(axis=0) <= column).all()
    assert (np.abs(table - expected) < 1).all()


def test_fill_takes_what_there_is_when_no_preference_is_left() -> None:
    preference = np.array([[1.0, 0.0], [1.0, 0.0]])
    table = fill(np.array([3, 3]), preference, np.array([4, 2]), rng(0))
    assert table.sum(axis=1).tolist() == [3, 3]
    assert table.sum(axis=0).tolist() == [4, 2]


def test_ragged() -> None:
    rows = Ragged.from_lists([[4, 2], [], [7]])
    assert len(rows) == 3
    assert rows[0].tolist() == [4, 2]
    assert rows[-1].tolist() == [7]
    assert rows.sizes.tolist() == [2, 0, 1]
    assert rows.owner.tolist() == [0, 0, 2]
    assert np.shares_memory(rows[0], rows.flat)
    assert [part.tolist() for part in rows] == [[4, 2], [], [7]]
    assert Ragged.empty(2).sizes.tolist() == [0, 0]
    assert len(Ragged.from_lists([])) == 0
    with pytest.raises(IndexError):
        rows[3]
