"""Figures of others' accountants, the closed form by hand, inverses, compositions, and what is refused."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

pytest.importorskip("dp_accounting", reason="the extra privacy is not installed")
from personafl.errors import BadInput
from personafl.privacy.accounting import (
    MOST_ROUNDS,
    Spent,
    compose,
    delta_for,
    epsilon,
    noise_for,
    rounds_for,
    tree_delta_for,
    tree_epsilon,
    tree_noise_for,
    tree_rounds_for,
)
from tiers import tiered

SAMPLED = {"noise": 1.5, "rounds": 2250, "rate": 0.04}


def renyi_epsilon(noise: float, rounds: int, delta: float, rate: float, order: float) -> float:
    """Epsilon by the Rényi divergence of one order, which is integrated."""

    def integrand(x: float) -> float:
        ratio = 1 - rate + rate * math.exp((2 * x - 1) / (2 * noise**2))
        return float(norm.pdf(x, 0, noise)) * ratio**order

    whole = quad(integrand, -30, 60, epsabs=0, epsrel=1e-13, limit=500, points=[-5, 0, 5, 10])[0]
    divergence = math.log(whole) / (order - 1)
    return rounds * divergence + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)


def hockey_stick(noise: float, epsilon: float) -> float:
    """Delta of one Gaussian round by its definition: ∫ max(0, p - e^ε q) over N(1, σ²) and N(0, σ²)."""
    start = 0.5 + epsilon * noise**2  # where p = e^ε q
    value = quad(
        lambda x: norm.pdf(x, 1, noise) - math.exp(epsilon) * norm.pdf(x, 0, noise),
        start,
        start + 40 * noise,
        epsabs=1e-15,
    )[0]
    return float(value)


def test_rdp_is_the_figure_of_opacus_from_above() -> None:
    """Opacus has 7.32911117143, at order 3.9. There dp-accounting adds up absolute values of a series with signs."""
    exact = renyi_epsilon(delta=1e-5, order=3.9, **SAMPLED)
    assert exact == pytest.approx(7.32911117143, abs=1e-6)
    found = epsilon(delta=1e-5, accountant="rdp", **SAMPLED)
    assert exact <= found == pytest.approx(exact, rel=5e-5)


def test_pld_is_the_figure_of_prv() -> None:
    """Within 1 %, and not below PLD of a grid a hundred times finer, which is itself not below the true value."""
    found = epsilon(delta=1e-5, **SAMPLED)
    assert found == pytest.approx(6.777395712, rel=0.01)
    assert 6.768780597 <= found <= 6.768780597 * (1 + 2e-4)


def test_pld_is_within_the_bounds_of_prv() -> None:
    """PRV has 6.1996929 here, and with its error 0.01 the upper bound 6.20997; RDP has 6.66795."""
    found = epsilon(1.5, 1000, 1e-6, 0.05)
    assert 6.1996929 <= found <= 6.20997
    assert epsilon(1.5, 1000, 1e-6, 0.05, "rdp") == pytest.approx(6.667951752)


def test_noise_of_the_analytic_gaussian() -> None:
    assert noise_for(2.25, 4.0834087e-4, 1) == pytest.approx(math.sqrt(2), rel=1e-6)
    assert noise_for(2.25, 4.0834087e-4, 16) == pytest.approx(4 * math.sqrt(2), rel=1e-6)


def test_trees_of_dp_ftrl() -> None:
    assert 18 < tree_epsilon(1.13, 1600, 1e-6) < 19.74
    assert 1.7 < tree_epsilon(8.83, 1600, 1e-6) < 2.04
    levels = 11  # of nodes that a client is in, among 1,600 leaves
    assert tree_epsilon(8.83, 1600, 1e-6) == pytest.approx(epsilon(8.83, levels, 1e-6, accountant="rdp"))
    assert tree_epsilon(8.83, 1600, 1e-6, trees=3) == pytest.approx(epsilon(8.83, 33, 1e-6, accountant="rdp"))


@pytest.mark.parametrize(("noise", "target"), [(0.5, 3.0), (1.0, 1.0), (4.0, 0.1)])
def test_one_round_by_the_definition(noise: float, target: float) -> None:
    """Balle & Wang 2018: Φ(1/2σ - εσ) - e^ε Φ(-1/2σ - εσ), and the integral that it comes from."""
    closed = norm.cdf(0.5 / noise - target * noise) - math.exp(target) * norm.cdf(-0.5 / noise - target * noise)
    assert hockey_stick(noise, target) == pytest.approx(closed, rel=1e-6)
    assert closed <= delta_for(target, noise, 1) == pytest.approx(closed, rel=1e-7)
    assert target <= epsilon(noise, 1, closed) == pytest.approx(target, rel=1e-7)


def test_one_sampled_round_by_the_definition() -> None:
    """Of a client that was removed: ∫ max(0, mixture - e^ε q); added: the other way round. The larger one counts."""
    noise, rate, target = 1.2, 0.2, 0.3
    x = np.linspace(-15, 20, 700_001)
    without, with_it = norm.pdf(x, 0, noise), norm.pdf(x, 1, noise)
    mixed, gap = (1 - rate) * without + rate * with_it, x[1] - x[0]
    removed = np.maximum(0, mixed - math.exp(target) * without).sum() * gap
    added = np.maximum(0, without - math.exp(target) * mixed).sum() * gap
    true = max(removed, added)
    assert true * (1 - 1e-6) <= delta_for(target, noise, 1, rate) <= true * 1.01


CASES = [(rate, accountant) for rate in (0.1, 1.0) for accountant in ("pld", "rdp")]


@pytest.mark.parametrize(("rate", "accountant"), tiered(CASES, [(1.0, "pld"), (1.0, "rdp")]))
def test_every_inverse_leads_back_and_keeps_to_the_budget(rate: float, accountant: Any) -> None:
    how: dict[str, Any] = {"rate": rate, "accountant": accountant}
    spent = epsilon(1.2, 60, 1e-5, **how)
    noise = noise_for(spent, 1e-5, 60, **how)
    assert noise == pytest.approx(1.2, rel=1e-4)
    assert epsilon(noise, 60, 1e-5, **how) <= spent
    assert rounds_for(spent, 1e-5, 1.2, **how) == 60
    assert rounds_for(spent * 0.999, 1e-5, 1.2, **how) == 59
    delta = delta_for(spent, 1.2, 60, **how)
    assert delta == pytest.approx(1e-5, rel=1e-3)
    assert epsilon(1.2, 60, delta, **how) <= spent * (1 + 1e-9)


def test_every_inverse_of_a_tree_leads_back() -> None:
    spent = tree_epsilon(3.0, 100, 1e-6, trees=2)
    noise = tree_noise_for(spent, 1e-6, 100, trees=2)
    assert noise == pytest.approx(3.0, rel=1e-6)
    assert tree_epsilon(noise, 100, 1e-6, trees=2) <= spent
    assert tree_rounds_for(spent, 1e-6, 3.0, trees=2) == 127  # seven levels, as for 100
    assert tree_delta_for(spent, 3.0, 100, trees=2) == pytest.approx(1e-6, rel=1e-6)


def test_epsilon_grows_with_rounds_and_rate_and_falls_with_noise_and_delta() -> None:
    def rising(values: list[float]) -> bool:
        return all(one <= other for one, other in pairwise(values))

    assert rising([epsilon(1.2, rounds, 1e-5, 0.1) for rounds in (1, 2, 60, 61)])
    assert rising([epsilon(1.2, 60, 1e-5, rate) for rate in (0.1, 0.101, 0.999, 1.0)])
    assert rising([epsilon(noise, 60, 1e-5, 0.1) for noise in (50, 1.2, 1.19, 0.5)])
    assert rising([epsilon(1.2, 60, delta, 0.1) for delta in (0.1, 1e-3, 1e-5, 1e-9)])


def test_a_ledger_is_the_same_however_it_grew() -> None:
    grown = Spent()
    for _ in range(37):
        grown = grown.add(1.2, 0.1)
    assert grown == Spent().add(1.2, 0.1, 37)
    assert grown.epsilon(1e-5) == epsilon(1.2, 37, 1e-5, 0.1)
    assert Spent().epsilon(1e-5) == 0


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_rounds_that_differ(accountant: Any) -> None:
    """Without samples precisions add up; with them, the same rounds in parts are the same, and any order is as good."""
    assert compose([(1.0, 1.0, 3), (2.0, 1.0, 4)], 1e-5, accountant) == pytest.approx(
        epsilon(0.5, 1, 1e-5, accountant=accountant)
    )
    parts = [(1.2, 0.1, 20), (2.0, 0.3, 5), (1.2, 0.1, 40)]
    one, other = (compose(each, 1e-5, accountant) for each in (parts, parts[::-1]))
    assert one == pytest.approx(other, rel=1e-9)
    assert max(epsilon(1.2, 60, 1e-5, 0.1, accountant), epsilon(2.0, 5, 1e-5, 0.3, accountant)) < one
    assert compose([*parts, (3.0, 1.0, 1)], 1e-5, accountant) > one


@pytest.mark.parametrize(
    "given",
    [
        *({"noise": value} for value in (0, -1, math.inf, math.nan, "1", None)),
        *({"delta": value} for value in (0, 1, -0.1, math.nan, 1e-14)),
        *({"rate": value} for value in (0, -0.1, 1.1, math.nan)),
        *({"rounds": value} for value in (0, -1, 1.5, 60.0, math.nan, MOST_ROUNDS + 1)),
        {"accountant": "moments"},
    ],
    ids=str,
)
def test_what_no_rounds_have_is_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=rf"^{next(iter(given))}: .*; "):
        epsilon(**{"noise": 1.2, "rounds": 60, "rate": 0.1, "delta": 1e-5} | given)


@pytest.mark.parametrize(
    "call",
    [
        lambda: noise_for(0, 1e-5, 10),
        lambda: noise_for(math.inf, 1e-5, 10),
        lambda: rounds_for(-1, 1e-5, 1.0),
        lambda: delta_for(math.nan, 1.0, 10),
        lambda: noise_for(1e-9, 1e-9, MOST_ROUNDS),
        lambda: rounds_for(0.1, 1e-5, 1.0),
        lambda: tree_rounds_for(0.1, 1e-5, 1.0),
        lambda: tree_noise_for(0, 1e-5, 10),
    ],
)
def test_an_epsilon_that_nothing_reaches_is_refused(call: Callable[[], float]) -> None:
    with pytest.raises(BadInput, match=r"^epsilon: .*; "):
        call()


def test_a_tree_without_rounds_is_refused() -> None:
    with pytest.raises(BadInput, match=r"^trees: 0 "):
        tree_epsilon(1.0, 10, 1e-5, trees=0)
    with pytest.raises(BadInput, match=r"^rounds: 0 "):
        tree_epsilon(1.0, 0, 1e-5)


def test_the_ends_of_what_is_possible() -> None:
    assert noise_for(1e9, 0.1, 1) == 1e-3
    assert rounds_for(1.0, 1e-5, 1e6) == MOST_ROUNDS
    assert epsilon(1e6, 1, 0.5) == 0
    little = delta_for(1e-4, 31250.0, 1)
    assert epsilon(31250.0, 1, little) == pytest.approx(1e-4, rel=1e-4)
    assert math.isfinite(epsilon(1e-3, MOST_ROUNDS, 1e-5))


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(BadInput, match=r"pip install 'personafl\[privacy\]'"):
        epsilon(7.77, 3, 1e-5)
