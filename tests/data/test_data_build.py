"""From labels and users to train, validation, test and unseen clients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from personafl.core.rng import numpy_generator
from personafl.data.build import federate, load
from personafl.data.config import DataConfig
from personafl.data.federated import FederatedData, Numbered, Ragged
from personafl.data.holdout import deal_like, hold_out, hold_out_last
from personafl.data.sources import Dataset
from personafl.data.sources.dataset import checked
from personafl.errors import BadInput

FAST = settings(max_examples=30, deadline=None)


def make(label: Any, *, user: Any = None, split: Any = None, names: tuple[str, ...] = (), width: int = 3) -> Dataset:
    y = np.asarray(label, dtype=np.int64)
    x = np.arange(len(y) * width, dtype=np.float32).reshape(len(y), width)
    return checked(
        "test",
        name="toy",
        x=x,
        y=y,
        user=None if user is None else np.asarray(user),
        split=None if split is None else np.asarray(split),
        user_names=names,
    )


def config(partition: dict[str, Any] | None = None, **values: Any) -> DataConfig:
    return DataConfig.model_validate({"partition": partition, **values})


def check_parts(data: FederatedData) -> None:
    flat = np.concatenate([data.train.flat, data.validation.flat, data.test.flat])
    assert len(np.unique(flat)) == len(flat)
    assert data.train.sizes.min() >= 1
    assert data.test.sizes.min() >= 1
    assert len(data.train) == len(data.validation) == len(data.test) == data.clients == len(data.client_names)
    both = np.concatenate([data.seen, data.unseen])
    assert np.array_equal(np.sort(both), np.arange(data.clients))


@FAST
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=12, max_size=150),
    st.sampled_from([0.1, 0.2, 0.5, 0.9]),
    st.integers(0, 99),
)
def test_hold_out_is_stratified_and_exact(pairs: list[tuple[int, int]], fraction: float, seed: int) -> None:
    owner, label = (np.array(column) for column in zip(*pairs, strict=True))
    sizes = np.bincount(owner)
    kept_users = np.flatnonzero(sizes >= 2)
    rows = Ragged.from_lists(np.flatnonzero(owner == user) for user in kept_users)
    if not len(rows):
        return
    kept, out = hold_out(rows, label, fraction, numpy_generator(seed, "hold out"))
    for client in range(len(rows)):
        n = len(rows[client])
        due = min(max(round(fraction * n), 1), n - 1)
        assert len(out[client]) == due
        assert np.array_equal(np.sort(np.concatenate([kept[client], out[client]])), np.sort(rows[client]))
        have = np.bincount(label[rows[client]], minlength=5)
        held = np.bincount(label[out[client]], minlength=5)
        assert (np.abs(held - have * due / n) < 1).all()


def test_hold_out_last_takes_the_end_of_the_text() -> None:
    kept, out = hold_out_last(Ragged.from_lists([[0, 1, 2, 3, 4], [5, 6]]), 0.4)
    assert [kept[0].tolist(), out[0].tolist()] == [[0, 1, 2], [3, 4]]
    assert [kept[1].tolist(), out[1].tolist()] == [[5], [6]]


@FAST
@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 99))
def test_dealt_test_rows_follow_the_train_mix(clients: int, classes: int, seed: int) -> None:
    """With a test half that is a fifth of each class, every cell is its fifth, rounded up or down."""
    rng = numpy_generator(seed, "deal like")
    train = rng.integers(0, 40, size=(clients, classes)) + 5 * (np.arange(classes) == 0)
    supply = -(-train.sum(axis=0) // 5)
    label = np.repeat(np.arange(classes), supply)
    rows, without = deal_like(train, label, rng)
    assert not len(without)
    assert len(np.unique(rows.flat)) == len(rows.flat)
    rate = np.minimum(supply / np.maximum(train.sum(axis=0), 1), supply.sum() / train.sum())
    for client in range(clients):
        held = np.bincount(label[rows[client]], minlength=classes)
        assert held.sum() >= 1
        assert (np.abs(held - train[client] * rate) < 1).all()
        assert (held[train[client] == 0] == 0).all()


PARTITIONS: list[dict[str, Any]] = [
    {"kind": "iid", "clients": 12},
    {"kind": "quantity", "clients": 12, "alpha": 0.3},
    {"kind": "dirichlet", "clients": 12, "alpha": 0.1},
    {"kind": "dirichlet", "clients": 12, "alpha": 0.1, "sizes": "natural"},
    {"kind": "classes", "clients": 12, "per_client": 2},
    {"kind": "diversity", "clients": 12, "labels": 3},
    {"kind": "users"},
    {"kind": "users", "merge": 3},
]


@pytest.mark.parametrize("partition", PARTITIONS, ids=lambda p: "-".join(map(str, p.values())))
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("test", ["auto", 0.3])
def test_every_partition_gives_a_sound_split(partition: dict[str, Any], halves: bool, test: str | float) -> None:
    rng = numpy_generator(1, "sound split")
    label = rng.permutation(np.repeat(np.arange(6), 150))
    user = np.arange(900) % 36
    split = (np.arange(900) % 5 == 4).astype(int) if halves else None
    dataset = make(label, user=user, split=split)
    chosen = config(partition, test=test, validation=0.25, unseen=3)
    data = federate(dataset, chosen, seed=7)
    check_parts(data)
    assert len(data.unseen) == 3
    assert data.validation.sizes.min() >= 1
    again, other = federate(dataset, chosen, seed=7), federate(dataset, chosen, seed=8)
    assert data.fingerprint == again.fingerprint != other.fingerprint
    assert np.array_equal(data.train.flat, again.train.flat)
    if halves and test == "auto" and not data.notes:
        assert split is not None
        assert (split[data.test.flat] == 1).all()
        assert (split[data.train.flat] == 0).all()


def test_official_half_follows_each_clients_mix() -> None:
    label = np.tile(np.arange(6), 200)
    split = np.arange(1200) >= 1000
    chosen = config({"kind": "dirichlet", "clients": 10, "alpha": 0.2}, test="official")
    data = federate(make(label, split=split), chosen, 0)
    check_parts(data)
    train, test = data.counts("train"), data.counts("test")
    mix, test_mix = train / train.sum(axis=1, keepdims=True), test / test.sum(axis=1, keepdims=True)
    assert np.abs(mix - test_mix).sum(axis=1).mean() < 0.2
    assert (test[train == 0] == 0).all()


def test_users_with_both_halves_keep_the_official_ones() -> None:
    user, split = np.repeat([0, 1, 2], 10), np.tile([0] * 7 + [1] * 3, 3)
    data = federate(make(np.arange(30) % 2, user=user, split=split, names=("ann", "bob", "cy")), config(), 0)
    assert data.client_names == ("ann", "bob", "cy")
    assert data.notes == ()
    assert data.train.sizes.tolist() == [7, 7, 7]
    assert (split[data.test.flat] == 1).all()


def test_test_users_that_are_other_people_are_left_out() -> None:
    """As in MNIST: users 0-3 are in the train half, 4-5 in the test half."""
    user = np.repeat(np.arange(6), 10)
    dataset = make(np.arange(60) % 5, user=user, split=user >= 4)
    data = federate(dataset, config(), 0)
    check_parts(data)
    assert data.client_names == ("0", "1", "2", "3")
    assert data.test.sizes.tolist() == [2] * 4
    assert "6 users without training or test samples" in data.notes[0]
    assert federate(dataset, config(test=0.5), 0).clients == 6
    with pytest.raises(BadInput, match=r"client '4' \(and 1 more\) has too few samples for training data \(0\); use"):
        federate(dataset, config(test="official"), 0)


def test_small_users_are_dropped_and_counted() -> None:
    user = np.repeat([0, 1, 2, 3], [9, 2, 9, 1])
    dataset = make(np.arange(21) % 3, user=user)
    data = federate(dataset, config(min_samples=5), 0)
    assert data.client_names == ("0", "2")
    assert data.notes == ("2 clients with fewer than 5 samples left out: 1, 3",)
    with pytest.raises(BadInput, match="no client of toy has min_samples = 50"):
        federate(dataset, config(min_samples=50), 0)
    with pytest.raises(BadInput, match="client '3' has too few samples for training and test data"):
        federate(dataset, config(min_samples=1), 0)
    with pytest.raises(BadInput, match=r"partition.clients = 9: toy has 3 clients"):
        federate(dataset, config({"kind": "users", "clients": 9}), 0)
    assert federate(dataset, config({"kind": "users", "clients": 2}), 0).clients == 2
    with pytest.raises(BadInput, match="client '1' has too few samples for training and validation"):
        federate(dataset, config(validation=0.5), 0)


def test_default_partition_is_users_or_dirichlet() -> None:
    assert federate(make(np.arange(40) % 2, user=np.arange(40) % 4), config(), 0).clients == 4
    assert federate(make(np.arange(400) % 4), config(), 0).clients == 50


@pytest.mark.parametrize(("unseen", "count"), [(0, 0), (3, 3), (0.25, 5), (0.001, 1)])
def test_unseen_clients(unseen: float, count: int) -> None:
    data = federate(make(np.arange(200) % 4), config({"kind": "iid", "clients": 20}, unseen=unseen), 0)
    assert (len(data.unseen), len(data.seen)) == (count, 20 - count)


def test_bad_requests() -> None:
    plain = make(np.arange(60) % 3)
    with pytest.raises(BadInput, match=r"data.unseen = 20: there are 20 clients"):
        federate(plain, config({"kind": "iid", "clients": 20}, unseen=20), 0)
    with pytest.raises(BadInput, match="has no test half"):
        federate(plain, config(test="official"), 0)
    with pytest.raises(BadInput, match="does not name its users"):
        federate(plain, config({"kind": "users"}), 0)
    with pytest.raises(BadInput, match="60 samples cannot give every client 2; use at most 30 clients"):
        federate(plain, config({"kind": "iid", "clients": 40}), 0)


def test_a_test_half_that_does_not_go_round() -> None:
    dataset = make(np.arange(60) % 3, split=np.arange(60) >= 55)
    with pytest.raises(BadInput, match=r"client \d gets no test data: the 5 official test samples"):
        federate(dataset, config({"kind": "iid", "clients": 10}, test="official"), 0)
    data = federate(dataset, config({"kind": "iid", "clients": 10}), 0)
    check_parts(data)
    assert "does not go round" in data.notes[0]
    missing = make(np.repeat([0, 1], 20), split=np.arange(40) < 5)  # no test sample of class 1
    with pytest.raises(BadInput, match=r"client \d gets no test data"):
        federate(missing, config({"kind": "classes", "clients": 4, "per_client": 1}, test="official"), 0)


def tokens() -> Dataset:
    y = np.arange(120).reshape(30, 4) % 7
    y[::3, 3] = -1
    return checked("test", name="text", x=y % 5, y=y, user=np.arange(30) // 10)


def test_next_token_tasks_are_held_out_in_order_and_counted_by_token() -> None:
    data = federate(tokens(), config(validation=0.2), 0)
    check_parts(data)
    assert data.train[0].max() < data.validation[0].min() < data.test[0].min()
    assert data.counts("test").sum() == (data.y[data.test.flat] >= 0).sum()
    assert data.counts().shape == (3, 7)
    with pytest.raises(BadInput, match="needs one label per sample, but text predicts tokens"):
        federate(tokens(), config({"kind": "dirichlet", "clients": 3}), 0)
    check_parts(federate(tokens(), config({"kind": "iid", "clients": 5}), 0))


def test_counts_by_hand() -> None:
    data = federate(make([0, 0, 1, 2, 2, 2, 0, 0], user=[0, 0, 0, 1, 1, 1, 2, 2]), config(test=0.3), 0)
    total: NDArray[np.int64] = data.counts("train") + data.counts("test")
    assert total.tolist() == [[2, 1, 0], [0, 0, 3], [2, 0, 0]]


def test_fingerprint_sees_every_part() -> None:
    one = federate(make(np.arange(40) % 2, user=np.arange(40) % 4), config(), 0)
    assert len(one.fingerprint) == 64
    changed = make(np.arange(40) % 2, user=np.arange(40) % 4)
    changed.x[3, 1] += 1
    assert federate(changed, config(), 0).fingerprint != one.fingerprint
    assert federate(make(np.arange(40) % 2, user=np.arange(40) % 4), config(unseen=1), 0).fingerprint != one.fingerprint


def test_digits_in_one_call() -> None:
    data = load(DataConfig(), seed=0)
    assert repr(data).startswith("FederatedData('digits', samples=1797, clients=50, classes=10")
    assert tuple(data.x.shape) == (1797, 1, 8, 8)
    assert 0 <= float(data.x.min()) < float(data.x.max()) == 1.0
    check_parts(data)
    assert len(data.train.flat) + len(data.test.flat) == 1797


def test_clients_without_names_are_called_by_their_numbers() -> None:
    names = Numbered(12)
    assert list(names) == [str(client) for client in range(12)]
    assert (names[-1], names[np.int64(3)], names[9:]) == ("11", "3", ("9", "10", "11"))
    assert (names.index("7"), "12" in names, len(names)) == (7, False, 12)
    with pytest.raises(IndexError):
        names[12]
