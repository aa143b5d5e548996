"""Expected order statistics against closed forms, brute force and simulation; the bound for large N."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scipy import special

from personafl.errors import BadInput
from personafl.latency.laws import Constant, Exponential, Law, Lognormal, Pareto, Trace, Weibull
from personafl.latency.order import expected_times, large_n_bound, simulated_ratios, weibull_bound
from personafl.latency.samples import Sample

SIZES = [1, 2, 10, 200]
SMOOTH: list[Law] = [
    Exponential(mean=2.0),
    Weibull(shape=0.5),
    Weibull(shape=2.0),
    Weibull(shape=5.0, scale=3.0),
    Pareto(shape=1.5),
    Pareto(shape=4.0),
    Lognormal(median=1.0, sigma=0.3),
    Lognormal(median=1.0, sigma=1.5),
]


def all_of(servers: int) -> np.ndarray:
    return np.arange(1, servers + 1)


def name(value: object) -> str:
    return f"{value.kind}{list(value.__dict__.values())[1]:g}" if hasattr(value, "kind") else str(value)


@pytest.mark.parametrize("servers", SIZES)
def test_exponential_is_a_sum_of_reciprocals(servers: int) -> None:
    """E[τ_(B)] = mean · Σ 1/i over N−B < i ≤ N: the gaps between arrivals are exponential with rate i/mean."""
    harmonic = np.cumsum(np.concatenate([[0.0], 1 / all_of(servers)]))
    expected = 2.0 * (harmonic[-1] - harmonic[::-1][1:])
    np.testing.assert_allclose(expected_times(Exponential(mean=2.0), servers, all_of(servers)), expected, rtol=1e-9)


@pytest.mark.parametrize("servers", SIZES)
@pytest.mark.parametrize("shape", [1.1, 1.5, 3.0])
def test_pareto_is_a_ratio_of_gammas(servers: int, shape: float) -> None:
    """E[τ_(B)] = Γ(N+1)/Γ(N−B+1) · Γ(N−B+1−1/a)/Γ(N+1−1/a), even where the tail is all that counts."""
    b = all_of(servers)
    logs = special.gammaln(servers + 1) - special.gammaln(servers - b + 1)
    logs += special.gammaln(servers - b + 1 - 1 / shape) - special.gammaln(servers + 1 - 1 / shape)
    np.testing.assert_allclose(expected_times(Pareto(shape=shape), servers, b), np.exp(logs), rtol=1e-8)


@pytest.mark.parametrize("shape", [0.3, 2.0, 10.0])
def test_first_and_last_of_weibull(shape: float) -> None:
    """The first is Weibull again, its scale N^(−1/k); the last is an alternating sum over those of fewer servers."""
    law, gamma = Weibull(shape=shape, scale=2.0), 2.0 * special.gamma(1 + 1 / shape)
    j = np.arange(1, 9)
    last = gamma * np.sum((-1.0) ** (j + 1) * special.comb(8, j) * j ** (-1 / shape))
    np.testing.assert_allclose(expected_times(law, 8, np.array([1, 8])), [gamma * 8 ** (-1 / shape), last], rtol=1e-9)


@pytest.mark.parametrize("law", SMOOTH, ids=name)
def test_order_statistics_sum_to_the_sum_of_all(law: Law) -> None:
    assert expected_times(law, 17, all_of(17)).sum() == pytest.approx(17 * law.mean, rel=1e-9)


def test_of_a_sample_by_brute_force(tmp_path: Path) -> None:
    """All 4³ ways in which three servers can draw from four times."""
    times = np.array([0.5, 5.0, 0.5, 2.0])
    expected = np.sort(list(product(times, repeat=3)), axis=1).mean(axis=0)
    np.testing.assert_allclose(expected_times(Sample.of(times), 3, all_of(3)), expected, rtol=1e-13)
    np.save(tmp_path / "t.npy", times)
    np.testing.assert_allclose(expected_times(Trace(file=str(tmp_path / "t.npy")), 3, all_of(3)), expected, rtol=1e-13)


def test_constant_times() -> None:
    np.testing.assert_allclose(expected_times(Constant(seconds=3.0), 5, all_of(5)), 3.0, rtol=1e-12)
    ratio, error = simulated_ratios(Constant(seconds=3.0), 5, all_of(5), seed=0)
    assert ratio.tolist() == [1.0] * 5
    assert error.tolist() == [0.0] * 5


@pytest.mark.parametrize("law", [Exponential(mean=2.0), Weibull(shape=2.0), Lognormal(median=1.0, sigma=0.5)], ids=name)
def test_simulation_agrees_with_the_formula(law: Law) -> None:
    times = expected_times(law, 10, all_of(10))
    ratio, error = simulated_ratios(law, 10, all_of(10), seed=1)
    assert (np.abs(ratio - times / times[-1]) <= 4 * error).all()
    assert (error[:-1] > 0).all()
    again, _ = simulated_ratios(law, 10, all_of(10), seed=1)
    other, _ = simulated_ratios(law, 10, all_of(10), seed=2)
    assert (ratio == again).all()
    assert (ratio[:-1] != other[:-1]).all()


def test_the_standard_error_is_the_spread_over_seeds() -> None:
    law, b = Exponential(mean=1.0), np.array([100, 250])
    runs = [simulated_ratios(law, 500, b, seed) for seed in range(12)]
    spread = np.std([ratio for ratio, _ in runs], axis=0, ddof=1)
    claimed = np.mean([error for _, error in runs], axis=0)
    assert (np.abs(np.log(spread / claimed)) < np.log(2)).all()  # of 12 runs, a factor of 2 is beyond 3 sigma


@pytest.mark.parametrize("law", SMOOTH, ids=name)
@pytest.mark.parametrize("servers", [2, 5, 10, 100])
def test_the_bound_is_above(law: Law, servers: int) -> None:
    times = expected_times(law, servers, all_of(servers))
    bound = large_n_bound(law, servers, all_of(servers))
    assert np.isnan(bound[-1])
    share = all_of(servers) / servers
    assert (times / times[-1] < bound * (1 + 1e-9))[(share >= 0.1) & (share < 1)].all()


def test_the_bound_is_above_for_exponential_times_always() -> None:
    for servers in (2, 10, 300):
        times = expected_times(Exponential(mean=1.0), servers, all_of(servers))
        assert (times / times[-1] < large_n_bound(Exponential(mean=1.0), servers, all_of(servers)))[:-1].all()


def test_the_bound_is_none_for_the_first_of_many() -> None:
    """Weibull, k = 1/2, the square of an exponential time: E[τ_(1)] = 2/N², but Q(1/N) = (ln(1−1/N))² ≈ 1/N².

    E[τ_(N)] = Σ 1/i² + (Σ 1/i)² = 28.54 for N = 100, and Q(1−1/N) = (ln 100)² = 21.21, so that r is 1.47 of the bound.
    """
    law, b = Weibull(shape=0.5), np.array([1, 100])
    times, bound = expected_times(law, 100, b), large_n_bound(law, 100, b)
    assert times[0] == pytest.approx(2 / 100**2)
    assert times[0] / times[1] / bound[0] == pytest.approx(2 / 1.01007 * 21.2076 / 28.5448, rel=1e-4)


def test_the_bound_is_none_for_times_with_a_gap() -> None:
    """85 of 100 times are 1 and 15 are 100: Q(0.85) = 1, but often fewer than 85 of 100 servers take 1."""
    sample = Sample.of([1.0] * 85 + [100.0] * 15)
    times = expected_times(sample, 100, np.array([85, 100]))
    assert times[0] / times[1] > large_n_bound(sample, 100, np.array([85]))[0]


def test_the_weibull_form_is_the_bound_and_its_limit_is_right() -> None:
    """Q(β)/Q(1−1/N) with Q(u) = λ(−ln(1−u))^(1/k): the scale cancels. r·(ln N)^(1/k) tends to (−ln(1−β))^(1/k)."""
    b = np.array([3, 5, 9])
    for shape in (0.7, 1.0, 3.0):
        bound = large_n_bound(Weibull(shape=shape, scale=7.0), 10, b)
        np.testing.assert_allclose(weibull_bound(shape, 10, b), bound, rtol=1e-12)
    ratios = []
    for servers in (10, 100, 1000):
        b = np.array([servers // 2, servers])
        times = expected_times(Weibull(shape=2.0), servers, b)
        ratios.append(times[0] / times[1] / weibull_bound(2.0, servers, b)[0])
    assert ratios[0] < ratios[1] < ratios[2] < 1
    assert ratios[2] > 0.93


def test_nothing_to_bound() -> None:
    assert np.isnan(large_n_bound(Exponential(mean=1.0), 1, np.array([1]))).all()
    assert np.isnan(large_n_bound(Sample.of([0.0] * 9 + [1.0]), 10, np.array([5]))).all()  # Q(1−1/N) = 0
    assert np.isnan(weibull_bound(2.0, 1, np.array([1]))).all()


@pytest.mark.parametrize(
    "law",
    [Pareto(shape=1.0), Pareto(shape=1.001), Weibull(shape=0.001), Weibull(shape=0.02), Lognormal(median=1, sigma=40)],
    ids=name,
)
def test_too_heavy_tails_are_refused(law: Law) -> None:
    with pytest.raises(BadInput, match=f"latency '{law.kind}': its tail is too heavy"):
        expected_times(law, 10, all_of(10))
