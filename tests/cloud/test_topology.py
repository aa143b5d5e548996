"""Who belongs to which server, and mixing matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from personafl.cloud.mixing import among, check_mixing, full, matrices, ring
from personafl.cloud.topology import place
from personafl.data.config import DataConfig, Iid
from personafl.data.federated import FederatedData
from personafl.errors import BadInput


@pytest.fixture(scope="module")
def data() -> FederatedData:
    """Eleven clients that take part, and three that do not."""
    from personafl.data.build import load

    return load(DataConfig(partition=Iid(clients=14), unseen=3), 0)


def names(data: FederatedData, clients: Any) -> list[str]:
    return [data.client_names[client] for client in clients]


def test_clients_are_dealt_evenly_by_the_seed(data: FederatedData) -> None:
    topology = place(data, 4, None, None, 0)
    assert sorted(map(len, topology.devices)) == [2, 3, 3, 3]
    assert sorted(np.concatenate(topology.devices)) == data.seen.tolist()
    for server, devices in enumerate(topology.devices):
        assert devices.tolist() == [client for client in data.seen if topology.home[client] == server]
    assert sorted(np.bincount(topology.home[data.unseen], minlength=4)) == [0, 1, 1, 1]
    np.testing.assert_array_equal(topology.home, place(data, 4, None, None, 0).home)
    assert (topology.home != place(data, 4, None, None, 1).home).any()


def test_clients_by_name(data: FederatedData) -> None:
    """Unseen clients may be named; the others are dealt."""
    first, second = data.seen[:4], data.seen[4:]
    members = [names(data, [*first, data.unseen[0]]), names(data, second)]
    topology = place(data, 2, members, None, 0)
    assert [devices.tolist() for devices in topology.devices] == [first.tolist(), second.tolist()]
    assert topology.home[data.unseen[0]] == 0
    assert set(topology.home[data.unseen]) <= {0, 1}


def test_bad_places(data: FederatedData) -> None:
    everyone = names(data, data.seen)

    def failing(members: Any, servers: int = 2, active: int | None = None) -> str:
        with pytest.raises(BadInput) as error:
            place(data, servers, members, active, 0)
        return str(error.value)

    assert failing(None, servers=12).startswith("cloud.servers: 12 servers, but only 11 clients take part")
    assert failing([everyone, ["nobody"]]).startswith("cloud.members[1]: there is no client 'nobody'; ")
    text = failing([everyone[:4], everyone[6:]])
    assert text.startswith(f"cloud.members: 2 clients are in no server ({everyone[4]}, {everyone[5]})")
    text = failing([everyone, names(data, data.unseen)])
    assert text.startswith("cloud.members[1]: a server without devices")
    text = failing([everyone[:2], everyone[2:]], active=3)
    assert text.startswith("cloud.active: 3 devices of each server, but server 0 (from 0) has only 2")


@given(st.integers(1, 30))
def test_named_matrices_are_doubly_stochastic(servers: int) -> None:
    for matrix in (full(servers), ring(servers)):
        assert (matrix >= 0).all()
        np.testing.assert_allclose(matrix.sum(axis=0), 1, rtol=0, atol=1e-12)
        np.testing.assert_allclose(matrix.sum(axis=1), 1, rtol=0, atol=1e-12)
        np.testing.assert_array_equal(matrix, matrix.T)
    assert ((ring(servers) > 0).sum(axis=1) == min(servers, 3)).all()


@given(st.integers(1, 6), st.data())
def test_what_is_doubly_stochastic_is_accepted_and_what_is_not_is_refused(servers: int, data: st.DataObject) -> None:
    """By Birkhoff, a doubly stochastic matrix is a mean of permutations; moving weight in a row breaks the columns."""
    orders = data.draw(st.lists(st.permutations(range(servers)), min_size=1, max_size=5))
    weights = np.mean([np.eye(servers)[list(order)] for order in orders], axis=0)
    good = tuple(map(tuple, weights.tolist()))
    check_mixing(good, servers)
    check_mixing((good, good), servers)
    assert all(np.array_equal(matrix, weights) for matrix in matrices((good, good), servers))
    place_ = data.draw(st.tuples(st.integers(0, servers - 1), st.integers(0, servers - 1)))
    changed = weights.copy()
    changed[place_] += 0.25
    with pytest.raises(BadInput, match=rf"row {place_[0]} \(from 0\) sums to 1.25; make it 1"):
        check_mixing(tuple(map(tuple, changed.tolist())), servers)


def test_some_of_the_servers_mix_doubly_stochastically_too() -> None:
    """Also where a matrix is not symmetric: here each has half of the next one's model."""
    turned = (np.eye(4) + np.roll(np.eye(4), 1, axis=1)) / 2
    for weights in (ring(5), full(4), turned):
        assert among(weights, range(len(weights))) is weights
        for members in ([0, 1, 3], [2], [1, 2]):
            some = among(weights, members)
            assert (some >= 0).all()
            np.testing.assert_allclose(some.sum(axis=0), 1)
            np.testing.assert_allclose(some.sum(axis=1), 1)
    np.testing.assert_allclose(among(ring(5), [0, 1]), [[2 / 3, 1 / 3], [1 / 3, 2 / 3]])


@pytest.mark.parametrize(
    ("matrix", "text"),
    [
        (((0.5, 0.5), (0.5, 0.5)), "cloud.mixing: is 2×2, but there are 3 servers; give a row per server"),
        (((1.0, 0.0, 0.0), (0.0, 1.0, 0.0)), "cloud.mixing: is not square: 2 rows, but row 0 (from 0) has 3 entries"),
        ((), "cloud.mixing: is 0×0, but there are 3 servers; give a row per server"),
        (
            ((1.0, 0.0, 0.0), (0.5, 0.5, 0.0), (0.0, 0.0, 1.0)),
            "cloud.mixing: is not doubly stochastic: column 0 (from 0) sums to 1.5; make it 1",
        ),
        (
            ((1.5, -0.5, 0.0), (-0.5, 1.5, 0.0), (0.0, 0.0, 1.0)),
            "cloud.mixing: row 0, column 1 (from 0) is -0.5; it must be 0 or more",
        ),
        (
            ((float("nan"), 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
            "cloud.mixing: row 0, column 0 (from 0) is nan; it must be 0 or more",
        ),
    ],
)
def test_bad_matrices(matrix: Any, text: str) -> None:
    with pytest.raises(BadInput) as error:
        check_mixing(matrix, 3)
    assert str(error.value) == text


def test_the_bad_one_of_several_matrices_is_named() -> None:
    good = ((1.0, 0.0), (0.0, 1.0))
    with pytest.raises(BadInput, match=r"cloud.mixing\[1\]: is not doubly stochastic: row 1 \(from 0\) sums to 0.9"):
        check_mixing((good, ((1.0, 0.0), (0.0, 0.9))), 2)
