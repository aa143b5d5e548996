"""What hostile clients send, by hand."""

from typing import Any

import numpy as np
import pytest
import torch

from personafl.algorithms.averaging import Change
from personafl.core import tree
from personafl.simulate.attack import STRENGTHS, Attack

HOSTILE = np.array([False, True, False, False, True])
CHUNKS = [np.array([3, 1]), np.array([4, 0, 2])]  # clients as they come: the honest are 3, 0 and 2


def vectors() -> torch.Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def trained(dtype: torch.dtype = torch.float64) -> list[tuple[Any, Any]]:
    """Row i is of client i."""
    return [(chunk, Change({"w": vectors()[chunk].to(dtype)}, torch.ones(len(chunk)))) for chunk in CHUNKS]


def mean(chunks: Any) -> Any:
    return {"w": torch.cat([uploads.change["w"] for _, uploads in chunks]).mean(0)}


def sent(kind: Any, strength: float = 1.0, number: int = 0) -> torch.Tensor:
    """What each client sends, [clients, entries]."""
    found = torch.full((5, 3), torch.nan, dtype=torch.float64)
    for clients, uploads in Attack(kind, HOSTILE, strength, 7).sent(trained(), number, mean):
        found[clients] = uploads.change["w"]
    return found


@pytest.mark.parametrize("kind", ["sign-flip", "scale", "replace", "ipm", "alie", "mimic", "infinity", "random"])
def test_the_honest_send_what_they_trained(kind: str) -> None:
    found = sent(kind, 3.0)
    assert torch.equal(found[~HOSTILE], vectors()[~HOSTILE])
    assert not torch.equal(found[HOSTILE], vectors()[HOSTILE])


def test_the_hostile_send_what_their_kind_says() -> None:
    x, honest = vectors(), vectors()[[0, 2, 3]]
    alike = lambda row: row.expand(2, 3)  # noqa: E731
    expected = {
        "sign-flip": -3 * x[HOSTILE],
        "scale": 3 * x[HOSTILE],
        "replace": 3 * x[HOSTILE],
        "ipm": alike(-3 * honest.mean(0)),
        "alie": alike(honest.mean(0) + 3 * ((honest - honest.mean(0)) ** 2).sum(0).div(2).sqrt()),
        "mimic": alike(x[0]),
        "infinity": torch.full((2, 3), torch.inf, dtype=torch.float64),
        "label-flip": x[HOSTILE],
        "label-noise": x[HOSTILE],
        "inflate": x[HOSTILE],
    }
    for kind, rows in expected.items():
        torch.testing.assert_close(sent(kind, 3.0)[HOSTILE], rows, msg=kind)


def test_free_riders_send_nothing_or_noise() -> None:
    assert (sent("free-rider", STRENGTHS["free-rider"])[HOSTILE] == 0).all()
    drawn = sent("random", 2.0)[HOSTILE]
    torch.testing.assert_close(drawn, 2 * sent("free-rider", 1.0)[HOSTILE])
    assert torch.equal(drawn, sent("random", 2.0)[HOSTILE])
    assert not torch.equal(drawn, sent("random", 2.0, number=1)[HOSTILE])
    assert not torch.equal(drawn[0], drawn[1])


def test_the_optimal_strength_does_the_most_harm() -> None:
    """A mean is moved farther the stronger it is attacked: the search ends at the largest strength."""
    honest = vectors()[[0, 2, 3]]
    torch.testing.assert_close(sent("optimal-ipm", 50.0)[HOSTILE][0], -50 * honest.mean(0))
    torch.testing.assert_close(sent("optimal-alie", 50.0)[HOSTILE][0], honest.mean(0) + 50 * honest.std(0))


def test_the_optimal_strength_is_that_of_the_server() -> None:
    """A server that leaves out uploads longer than 9: the worst is just within."""

    def careful(chunks: Any) -> Any:
        rows = torch.cat([uploads.change["w"] for _, uploads in chunks])
        return {"w": rows[rows.norm(dim=1) <= 9].mean(0)}

    attack = Attack("optimal-ipm", HOSTILE, 1e6, 7)
    length = vectors()[[0, 2, 3]].mean(0).norm()
    rows = torch.cat([uploads.change["w"] for _, uploads in attack.sent(trained(), 0, careful)])
    strongest = rows.norm(dim=1).max()
    assert strongest <= 9
    assert strongest > 9 - 2 * float(length)


def test_a_round_of_hostile_clients_alone_sends_nothing() -> None:
    for kind in ("ipm", "alie", "mimic"):
        only = [(np.array([1, 4]), Change({"w": torch.ones(2, 3)}, torch.ones(2)))]
        ((_, uploads),) = Attack(kind, HOSTILE, 1.0, 0).sent(only, 0, mean)  # type: ignore[arg-type]
        assert (uploads.change["w"] == 0).all()
        assert list(Attack(kind, HOSTILE, 1.0, 0).sent([], 0, mean)) == []  # type: ignore[arg-type]


def test_one_honest_client_has_no_spread() -> None:
    some = [(np.array([0, 1]), Change({"w": torch.tensor([[1.0], [5.0]])}, torch.ones(2)))]
    ((_, uploads),) = Attack("alie", HOSTILE, 9.0, 0).sent(some, 0, mean)
    assert uploads.change["w"].tolist() == [[1.0], [1.0]]


def test_samples_are_claimed_by_the_hostile() -> None:
    clients, samples = np.array([0, 1, 4]), np.array([5, 6, 7])
    assert Attack("inflate", HOSTILE, 10.0, 0).claimed(clients, samples).tolist() == [5, 60, 70]
    assert Attack("scale", HOSTILE, 10.0, 0).claimed(clients, samples).tolist() == [5, 6, 7]


def test_what_was_trained_is_not_changed() -> None:
    given = trained(torch.float32)
    before = tree.map(torch.clone, [uploads for _, uploads in given])
    made = list(Attack("alie", HOSTILE, 1.0, 0).sent(given, 0, mean))
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(before), tree.leaves([u for _, u in given]), strict=True))
    assert made[0][1].change["w"].dtype == torch.float32
