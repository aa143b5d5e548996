"""Sums in fixed point: by hand, in whatever order, and the same as the protocol's to the bit."""

from typing import Any

import pytest
import torch

from personafl.algorithms import METHODS, Training
from personafl.algorithms.averaging import Averaging, Change
from personafl.core import tree
from personafl.core.optim import Sgd
from personafl.errors import BadInput
from personafl.secure.fixed import Grid
from personafl.secure.uploads import length_of, total_of, vector_of
from personafl.testing.case import make_case
from personafl.testing.laws import LAWS
from personafl.uploads.secure import FixedPointServer, in_fixed_point

PROBLEM: Any = None  # the rules under test do not look at it
GRID = Grid(4, 10.0, 0.5)


def changes(clients: int = 4) -> Change:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(clients, 6, generator=generator) * 0.1
    return Change({"a": rows[:, :2], "b": rows[:, 2:].reshape(-1, 2, 2)}, torch.arange(1.0, clients + 1))


def test_a_round_by_hand() -> None:
    """Four that count at most ten times, entries up to ½: 4 · 10 · ½ · 2^s ≤ 2³¹ − 1, so s = 26."""
    rule = FixedPointServer(rule=Averaging(), grid=GRID)
    state = rule.init(PROBLEM, {"a": torch.zeros(1, dtype=torch.float64)}, 1.0)
    sent = Change({"a": torch.tensor([[0.1], [7.0]], dtype=torch.float64)}, torch.tensor([1.0, 2.0]))
    uploads = rule.join(state, None, sent, torch.tensor([3, 2]))
    assert GRID.exponent == 26
    expected = (round(3 * 0.1 * 2**26) + 2 * 0.5 * 2**26) / 2**26
    assert uploads.total.change["a"].tolist() == [expected]
    assert float(uploads.weight) == 5
    assert uploads.loss() == pytest.approx((3 * 1 + 2 * 2) / 5)
    assert rule.update(state, uploads, 0).model["a"].tolist() == [expected / 5]


def test_sums_are_those_of_vectors_modulo_two_to_the_32_in_any_order() -> None:
    rule, sent, weights = FixedPointServer(rule=Averaging(), grid=GRID), changes(), torch.tensor([1.0, 10.0, 3.0, 7.0])
    single = [tree.map(lambda leaf, row=row: leaf[row], sent) for row in range(4)]
    vectors = [vector_of(upload, float(weight), GRID) for upload, weight in zip(single, weights, strict=True)]
    summed = total_of(sum(vectors[1:], vectors[0]), single[0], GRID)  # uint32 wraps
    assert length_of(single[0]) == 7 == len(vectors[0])
    together = rule.join(None, None, sent, weights)
    apart = None
    for row in (2, 0, 3, 1):
        apart = rule.join(
            None, apart, tree.map(lambda leaf, row=row: leaf[row : row + 1], sent), weights[row : row + 1]
        )
    assert apart is not None
    for one, two, three in zip(*map(tree.leaves, (summed, together.total, apart.total)), strict=True):
        assert one.equal(two)
        assert one.equal(three)
    plain = Averaging().join(None, None, sent, weights)
    for one, two in zip(tree.leaves(together.mean()), tree.leaves(plain.mean()), strict=True):
        assert one.dtype == two.dtype
        torch.testing.assert_close(one, two, rtol=0, atol=1e-4 if one.ndim == 0 else 4 * 2.0**-27 / 21 + 1e-8)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_methods_whose_server_needs_more_are_refused_by_name(name: str) -> None:
    algorithm = METHODS[name].build(Training(optimizer=Sgd(lr=0.1)))
    if algorithm.client.uploads._fields == ("loss",):
        assert in_fixed_point(algorithm, GRID) is algorithm
    elif algorithm.server.averages:
        assert isinstance(in_fixed_point(algorithm, GRID).server, FixedPointServer)
    else:
        with pytest.raises(BadInput, match=f"what {name}'s clients send"):
            in_fixed_point(algorithm, GRID)


@pytest.mark.parametrize("law", ["stacked_equals_one_by_one", "state_survives_a_checkpoint"])
def test_laws_of_whole_rounds(law: str) -> None:
    fedalt = METHODS["fedalt"].build(Training(optimizer=Sgd(lr=0.1)))
    LAWS[law](make_case(in_fixed_point(fedalt, Grid(8, 64.0, 1.0))))
