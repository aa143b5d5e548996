"""q-FedAvg's weights: against the paper's update by hand, and what they are where q is 0 or large."""

from typing import Any

import pytest
import torch

from personafl.algorithms import METHODS, Training
from personafl.algorithms.averaging import Averaging, Change
from personafl.errors import BadInput
from personafl.recipe.recipe import Recipe
from personafl.runs.build import prepare
from personafl.uploads.fair import FairServer, made_fair

PROBLEM: Any = None  # averaging does not look at it
START = {"a": torch.tensor([1.0, -2.0], dtype=torch.float64), "b": torch.tensor([[0.5]], dtype=torch.float64)}
CHANGES = {
    "a": torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0]], dtype=torch.float64),
    "b": torch.tensor([[[0.5]], [[-1.0]], [[0.0]]], dtype=torch.float64),
}
LOSSES = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
WEIGHTS = torch.tensor([3.0, 1.0, 2.0])


def stepped(q: float, slope: float = 4.0, cuts: tuple[int, ...] = (3,)) -> tuple[dict[str, torch.Tensor], float]:
    """Return the model after a round, and the loss that is told; uploads come in parts that end at `cuts`."""
    rule = FairServer(rule=Averaging(), q=q, slope=slope)
    state, joined, begin = rule.init(PROBLEM, START, 6.0), None, 0
    for end in cuts:
        part = Change({name: leaf[begin:end] for name, leaf in CHANGES.items()}, LOSSES[begin:end])
        joined, begin = rule.join(state, joined, part, WEIGHTS[begin:end]), end
    assert joined is not None
    return rule.update(state, joined, 0).model, joined.loss()


@pytest.mark.parametrize("q", [0.5, 1.0, 2.0, 5.0])
def test_a_step_is_the_papers(q: float) -> None:
    """Algorithm 2: Δw_k = L (w − w̄_k), Δ_k = F^q Δw_k, h_k = q F^{q−1} ‖Δw_k‖² + L F^q, w ← w − Σ p Δ_k / Σ p h_k."""
    found, loss = stepped(q)
    slope, top = 4.0, {name: torch.zeros_like(leaf) for name, leaf in START.items()}
    height = 0.0
    for k in range(3):
        moved = {name: slope * -leaf[k] for name, leaf in CHANGES.items()}
        square = sum(float((leaf**2).sum()) for leaf in moved.values())
        share, own = float(WEIGHTS[k]) / 6, float(LOSSES[k])
        for name, leaf in moved.items():
            top[name] += share * own**q * leaf
        height += share * (q * own ** (q - 1) * square + slope * own**q)
    for name, leaf in START.items():
        torch.testing.assert_close(found[name], leaf - top[name] / height, rtol=1e-12, atol=1e-12)
    assert loss == pytest.approx((3 * 0.5 + 2.0 + 2 * 1.0) / 6)


def test_q_of_0_is_the_mean_and_parts_do_not_matter() -> None:
    mean = Averaging()
    state = mean.init(PROBLEM, START, 6.0)
    plain = mean.update(state, mean.join(state, None, Change(CHANGES, LOSSES), WEIGHTS), 0).model
    for name, leaf in stepped(0.0)[0].items():
        torch.testing.assert_close(leaf, plain[name], rtol=1e-12, atol=1e-12)
    whole, parts = stepped(2.0)[0], stepped(2.0, cuts=(1, 3))[0]
    for name, leaf in whole.items():
        torch.testing.assert_close(leaf, parts[name], rtol=1e-12, atol=1e-12)


def test_a_large_q_goes_the_way_of_the_client_with_the_largest_loss() -> None:
    """With F = 0.5, 2 and 1, at q = 60 the second one's c_2 is all that is left, 1 + q L ‖c_2‖² / F times shorter."""
    found, _ = stepped(60.0)
    shorter = 1 + 60 * 4.0 * 5.0 / 2.0
    torch.testing.assert_close(found["a"] - START["a"], CHANGES["a"][1] / shorter, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("section", ["robust", "privacy", "secure", "buffer"])
def test_what_it_cannot_do_with_is_refused(section: str) -> None:
    needed: dict[str, Any] = {"privacy": {"noise": 1.0}, "buffer": {"size": 2}}
    values: dict[str, Any] = {"fairness": {"q": 1.0}, section: needed.get(section, {})}
    with pytest.raises(BadInput, match=rf"fairness: with \[{section}\] .*; remove one of the two"):
        Recipe.parse(values)


def test_a_method_with_more_than_changes_is_refused_by_name_and_others_have_it() -> None:
    with pytest.raises(BadInput, match=r"fairness: what scaffold's clients send is more than changes"):
        made_fair(METHODS["scaffold"].build(Training()), q=1.0, slope=1.0)
    given = {"fairness": {"q": 2.0}, "training": {"lr": 0.25}, "method": {"name": "ditto"}}
    server = prepare(Recipe.parse(given)).federation.algorithm.server
    assert isinstance(server, FairServer)
    assert (server.q, server.slope) == (2.0, 4.0)
