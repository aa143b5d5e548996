"""Noise from a key: Gaussian, the same again, and of no use to who has another key."""

import numpy as np
import pytest
import torch
from scipy import stats

from personafl.privacy.noise import gaussians, make_key

KEY = make_key(3)


def test_it_is_gaussian() -> None:
    """By Kolmogorov and Smirnov over 10⁶ numbers, and in the tail beyond 4, of which 63 are expected."""
    drawn = gaussians(KEY, "0/weight", 1_000_000).numpy()
    assert stats.kstest(drawn, "norm").pvalue > 1e-3
    assert abs(drawn.mean()) < 5e-3
    assert abs(drawn.std() - 1) < 5e-3
    assert 30 < (np.abs(drawn) > 4).sum() < 110


def test_both_of_a_pair_are_independent() -> None:
    drawn = gaussians(KEY, "site", 200_000).reshape(2, -1)
    assert abs(float((drawn[0] * drawn[1]).mean())) < 0.015
    assert abs(float((drawn[0].square() * drawn[1].square()).mean()) - 1) < 0.03


def test_key_and_site_decide() -> None:
    assert torch.equal(gaussians(KEY, "1/a", 7), gaussians(KEY, "1/a", 7))
    others = [gaussians(KEY, "1/b", 50_000), gaussians(KEY, "2/a", 50_000), gaussians(make_key(4), "1/a", 50_000)]
    mine = gaussians(KEY, "1/a", 50_000)
    for other in others:
        assert abs(float((mine * other).mean())) < 0.025


@pytest.mark.parametrize("count", [0, 1, 2, 3, 10])
def test_as_many_as_are_asked_for(count: int) -> None:
    assert gaussians(KEY, "few", count).shape == (count,)
    assert gaussians(KEY, "few", count).dtype == torch.float64


def test_a_key_that_is_none() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        gaussians(b"short", "site", 1)
