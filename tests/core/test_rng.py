"""Randomness without state: determinism, broadcasting, and sanity of the distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from personafl.core import rng

words = st.one_of(st.integers(0, 2**64 - 1), st.text(max_size=8))


@settings(max_examples=50, deadline=None)
@given(st.lists(words, min_size=1, max_size=5))
def test_mix_is_deterministic(given_words: list[int | str]) -> None:
    """Equal words give equal bits."""
    assert int(rng.mix(*given_words)) == int(rng.mix(*given_words))


def test_mix_is_a_fixed_function() -> None:
    """Known values of SplitMix64's finaliser (state 0, first outputs e220a8397b1dcdaf, and of that xor 1).

    A change here changes every run that was ever made: nobody may do it by accident.
    """
    assert int(rng.mix(0)) == 0xE220A8397B1DCDAF

    def finalise(z: int) -> int:
        mask = 2**64 - 1
        z = (z + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    assert int(rng.mix(3, 5, 7)) == finalise(finalise(finalise(3) ^ 5) ^ 7)


def test_order_kind_and_number_of_words_matter() -> None:
    """(1, 2), (2, 1), (1,), (1, 0), ("1",) and ("a", "b"), ("ab",) are all different draw sites."""
    sites = [(1, 2), (2, 1), (1,), (1, 0), (0, 1), ("1",), ("a", "b"), ("b", "a"), ("ab",), (-1,)]
    assert len({int(rng.mix(*site)) for site in sites}) == len(sites)


def test_negative_integers_are_equal_as_int_and_as_array() -> None:
    """Both wrap to two's complement."""
    assert int(rng.mix(-3)) == int(rng.mix(np.array([-3]))[0]) == int(rng.mix(2**64 - 3))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4),
    st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4),
)
def test_broadcasting_equals_element_by_element(a: list[int], b: list[int]) -> None:
    """mix(a[:, None], "p", b[None, :])[i, j] = mix(a[i], "p", b[j])."""
    grid = rng.mix(np.array(a)[:, None], "p", np.array(b)[None, :])
    assert grid.dtype == np.uint64
    assert grid.tolist() == [[int(rng.mix(x, "p", y)) for y in b] for x in a]


@pytest.mark.system
def test_bits_are_uniform_over_a_grid_of_sites() -> None:
    """Of N = 10⁶ uniforms: |mean − ½| < 5·√(1/12N), |var − 1/12| < 5·√(1/180N); each bit is set half the time; no two
    are equal (expected number of equal pairs N²/2⁶⁵ < 10⁻⁷); neighbours are uncorrelated.
    """
    grid = rng.mix(7, "site", np.arange(1000)[:, None], np.arange(1000)[None, :])
    n = grid.size
    u = grid.astype(np.float64) / 2.0**64
    assert abs(u.mean() - 0.5) < 5 * math.sqrt(1 / 12 / n)
    assert abs(u.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / n)
    assert len(np.unique(grid)) == n
    for bit in range(64):
        share = ((grid >> np.uint64(bit)) & np.uint64(1)).mean()
        assert abs(share - 0.5) < 5 * math.sqrt(0.25 / n), bit
    for left, right in ((u[:, :-1], u[:, 1:]), (u[:-1], u[1:])):
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 5 / math.sqrt(n)


def test_generators_repeat_and_differ_between_sites() -> None:
    """One draw site, one stream."""
    for make, draw in (
        (rng.generator, lambda g: torch.rand(4, generator=g).tolist()),
        (rng.numpy_generator, lambda g: g.random(4).tolist()),
    ):
        assert draw(make(0, "noise", 3)) == draw(make(0, "noise", 3))
        assert draw(make(0, "noise", 3)) != draw(make(0, "noise", 4))
        assert draw(make(0, "noise", 3)) != draw(make(1, "noise", 3))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(0, 1000))
def test_permutations_are_permutations(sizes: list[int], seed: int) -> None:
    """Row i begins with each of 0 … sizes[i]−1 once."""
    got = rng.permutations(np.array(sizes), rng.mix(seed, np.arange(len(sizes))))
    assert got.shape == (len(sizes), max(sizes))
    for row, size in zip(got, sizes, strict=True):
        assert sorted(row[:size]) == list(range(size))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 1000))
def test_a_permutation_depends_on_its_own_key_and_size(sizes: list[int], seed: int) -> None:
    """Row i of many is the row drawn alone."""
    keys = rng.mix(seed, np.arange(len(sizes)))
    together = rng.permutations(np.array(sizes), keys)
    for i, size in enumerate(sizes):
        alone = rng.permutations(np.array([size]), keys[i : i + 1])
        assert together[i, :size].tolist() == alone[0].tolist()


def test_all_orders_of_three_are_equally_frequent() -> None:
    """χ² of the 3! = 6 orders over 60 000 keys, 5 degrees of freedom: above 25.7 with probability 10⁻⁴."""
    n = 60_000
    orders = rng.permutations(np.full(n, 3), rng.mix("orders", np.arange(n)))
    counts = np.unique(orders @ np.array([100, 10, 1]), return_counts=True)[1]
    assert len(counts) == 6
    assert ((counts - n / 6) ** 2 / (n / 6)).sum() < 25.7


@pytest.mark.parametrize("purpose", ["epoch", "cohort"])
def test_purposes_do_not_share_bits(purpose: str) -> None:
    """Under one seed, two purposes agree in no draw of a thousand."""
    other = {"epoch": "cohort", "cohort": "init"}[purpose]
    assert not np.any(rng.mix(0, purpose, np.arange(1000)) == rng.mix(0, other, np.arange(1000)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gaussians_of_keys_are_gaussian(dtype: torch.dtype) -> None:
    """By Kolmogorov and Smirnov, in the tail beyond 4, of which 25 are expected, between pairs, keys and neighbours."""
    keys = torch.tensor([5, -7])
    drawn = rng.gaussians(keys, 200_001, dtype)
    assert drawn.dtype == dtype
    assert torch.equal(drawn[1:], rng.gaussians(keys[1:], 200_001, dtype))
    drawn = drawn.double()
    for row in drawn.numpy():
        assert stats.kstest(row, "norm").pvalue > 1e-3
    assert 10 < int((drawn.abs() > 4).sum()) < 50
    one, other = drawn[0, :100_000], drawn[0, 100_001:]
    for a, b in ((one, other), (drawn[0], drawn[1]), (one[1:], one[:-1]), (one.square() - 1, other.square() - 1)):
        assert abs(float((a * b).mean())) < 5 * float(b.std() * a.std()) / len(a) ** 0.5
