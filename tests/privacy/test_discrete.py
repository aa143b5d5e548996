"""Noise in whole numbers: the discrete Gaussian to its pmf, the same again, and vectors rounded into the ball."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy import stats

from personafl.privacy.discrete import discrete_gaussians, rounded
from personafl.privacy.noise import make_key

KEY = make_key(3)


def pmf(sigma: int) -> Iterator[tuple[int, float]]:
    values = np.arange(-12 * sigma - 12, 12 * sigma + 13)
    weights = np.exp(-(values**2) / (2 * sigma**2))
    yield from zip(values.tolist(), (weights / weights.sum()).tolist(), strict=True)


@pytest.mark.parametrize("sigma", [1, 2, 3, 7, 20])
def test_draws_follow_the_pmf(sigma: int) -> None:
    """By χ² over all values of which 10 are expected or more, the others together."""
    drawn = discrete_gaussians(KEY, f"pmf {sigma}", 100_000, sigma).numpy()
    seen = dict(zip(*(each.tolist() for each in np.unique(drawn, return_counts=True)), strict=True))
    common = {value: 1e5 * chance for value, chance in pmf(sigma) if 1e5 * chance >= 10}
    expected = [*common.values(), 1e5 - sum(common.values())]
    counted = [seen.get(value, 0) for value in common]
    assert stats.chisquare([*counted, 100_000 - sum(counted)], expected).pvalue > 1e-3


@pytest.mark.parametrize("sigma", [1, 5, 2**24 + 1, 2**52])
def test_moments_and_tails(sigma: int) -> None:
    """Against sums over the pmf where σ is small, against the continuous Gaussian where it cannot be told from it."""
    drawn = discrete_gaussians(KEY, f"moments {sigma}", 100_000, sigma).to(torch.float64) / sigma
    table = [(value / sigma, chance) for value, chance in pmf(min(sigma, 1000))] if sigma <= 1000 else None
    second, fourth = (sum(v**p * c for v, c in table) if table else m for p, m in ((2, 1), (4, 3)))
    beyond = sum(c for v, c in table if abs(v) > 3) if table else math.erfc(3 / math.sqrt(2))
    assert abs(float(drawn.mean())) < 4 * math.sqrt(second / 1e5)
    assert float(drawn.square().mean()) == pytest.approx(second, rel=0.02)
    assert float(drawn.pow(4).mean()) == pytest.approx(fourth, rel=0.06)
    assert float((drawn.abs() > 3).double().mean()) == pytest.approx(beyond, rel=0.3)
    assert drawn.abs().max() < 6


def test_wide_draws_are_gaussian_and_use_every_bit() -> None:
    drawn = discrete_gaussians(KEY, "wide", 50_000, 2**40 + 12_345)
    assert stats.kstest((drawn.to(torch.float64) / (2**40 + 12_345)).numpy(), "norm").pvalue > 1e-3
    for modulus in (2, 3, 256):
        counts = np.bincount(drawn.numpy() % modulus, minlength=modulus)
        assert stats.chisquare(counts).pvalue > 1e-3


def test_key_and_site_decide() -> None:
    mine = discrete_gaussians(KEY, "1/a", 20_000, 100)
    assert torch.equal(mine, discrete_gaussians(KEY, "1/a", 20_000, 100))
    for key, site in ((KEY, "1/b"), (make_key(4), "1/a")):
        other = discrete_gaussians(key, site, 20_000, 100)
        assert abs(float((mine * other).double().mean())) / 1e4 < 0.035


@pytest.mark.parametrize("count", [0, 1, 2, 31])
def test_as_many_as_are_asked_for(count: int) -> None:
    drawn = discrete_gaussians(KEY, "few", count, 3)
    assert drawn.shape == (count,)
    assert drawn.dtype == torch.int64


@pytest.mark.parametrize("sigma", [0, -1, 2**52 + 1])
def test_a_sigma_that_is_none(sigma: int) -> None:
    with pytest.raises(ValueError, match="sigma must be"):
        discrete_gaussians(KEY, "site", 1, sigma)


@pytest.mark.parametrize("radius", [1, 7, 2**10, 2**24, 2**30])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_rounded_vectors_are_in_the_ball(radius: int, size: int) -> None:
    """Whatever comes: norms on the clip, far below and far above, and ones that the nearest would put outside."""
    generator, clip = torch.Generator().manual_seed(size), torch.tensor(0.3, dtype=torch.float64)
    rows = torch.randn(40, size, dtype=torch.float64, generator=generator)
    norms = torch.tensor([0.3, 1e-9, 1e30, 0.2999999], dtype=torch.float64).repeat(10)
    rows = rows / rows.norm(dim=1, keepdim=True) * norms[:, None]
    rows[-1] = 0.3 / math.sqrt(size)
    whole = rounded(rows, clip, radius)
    assert all(sum(int(v) ** 2 for v in row.tolist()) <= radius**2 for row in whole)
    if radius >= 2**24:  # a fine grid loses nothing to speak of
        back = whole.to(torch.float64) * (0.3 / radius)
        kept = rows * (0.3 / rows.norm(dim=1, keepdim=True)).clamp(max=1)
        assert (back - kept).abs().max() <= 1.5 * 0.3 / radius


def test_what_is_inside_goes_to_the_nearest() -> None:
    whole = rounded(torch.tensor([[0.1, -0.26, 0.0], [0.0, 0.0, 0.0]]), torch.tensor(1.0, dtype=torch.float64), 10)
    assert whole.tolist() == [[1, -3, 0], [0, 0, 0]]


def test_each_row_is_its_own() -> None:
    rows = torch.randn(20, 50, generator=torch.Generator().manual_seed(1)) * 3
    clip = torch.tensor(2.0, dtype=torch.float64)
    alone = torch.cat([rounded(row[None], clip, 64) for row in rows])
    assert torch.equal(alone, rounded(rows, clip, 64))


def test_numbers_that_are_not_finite_count_as_nothing() -> None:
    whole = rounded(torch.tensor([[1.0, math.inf], [math.nan, 0.0], [3.0, 4.0]]), torch.tensor(1.0), 10)
    assert whole.tolist() == [[0, 0], [0, 0], [6, 8]]
