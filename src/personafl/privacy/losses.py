"""Distributions of the privacy loss (PLD) of rounds on Poisson-sampled cohorts, composed by dp-accounting and kept.

They are rounded up to a grid, so that no epsilon is below the true one. The grid is as fine as a round's loss asks for
(about 1e-4 of epsilon is lost by it), and as coarse as its number of points does. Its steps are powers of two: a
coarser grid has points of a finer one only and never says less, so more rounds or rate never have less epsilon, nor has
less noise.
"""

import math
from functools import lru_cache
from typing import Any

from personafl.privacy.library import library

Group = tuple[float, float, int]  # rounds of the same noise multiplier and sampling rate: noise, rate, how many


def distribution(groups: tuple[Group, ...]) -> Any:
    """Return the distribution of the loss of all rounds."""
    step = _step(groups)
    *before, (noise, rate, count) = groups
    last = _repeated(noise, rate, count, step)
    return _joined(tuple(before), step).compose(last) if before else last


@lru_cache(maxsize=4)
def _joined(groups: tuple[Group, ...], step: float) -> Any:
    first, *others = (_repeated(*group, step) for group in groups)
    for other in others:
        first = first.compose(other)
    return first


@lru_cache(maxsize=64)
def _repeated(noise: float, rate: float, count: int, step: float) -> Any:
    """Return `count` rounds, from powers of two of them: a ledger that grows by a round composes once.

    Each count is made in one way only, so that a resumed ledger has the bits of one that was never stopped.
    """
    if rate == 1.0:
        return _once(noise / math.sqrt(count), rate, step)
    if count == 1:
        return _once(noise, rate, step)
    lowest = count & -count
    if lowest == count:
        half = _repeated(noise, rate, count // 2, step)
        return half.compose(half)
    return _repeated(noise, rate, count - lowest, step).compose(_repeated(noise, rate, lowest, step))


@lru_cache(maxsize=64)
def _once(noise: float, rate: float, step: float) -> Any:
    return library().pld.privacy_loss_distribution.from_gaussian_mechanism(
        noise, value_discretization_interval=step, sampling_prob=rate
    )


def _step(groups: tuple[Group, ...]) -> float:
    """Return the grid's step: a 30th of the standard deviation of a round's loss, if the points are not too many."""
    spread = [_squared(noise, rate) for noise, rate, _ in groups]
    total = sum(count * math.log1p(each) for each, (_, _, count) in zip(spread, groups, strict=True))
    fine = min(1.0, math.sqrt(min(spread))) / 30
    widest = max(_largest(noise, rate) for noise, rate, _ in groups)
    return 2.0 ** math.floor(math.log2(max(fine, widest / 20_000, total / 100_000, 1e-9)))


def _squared(noise: float, rate: float) -> float:
    """Return the χ² divergence of a round, about the variance of its loss where that is small."""
    return rate**2 * math.expm1(min(noise**-2, 700.0))


def _largest(noise: float, rate: float) -> float:
    """Return about the largest loss of a round, at ten standard deviations of the noise."""
    exponent = 0.5 / noise**2 + 10 / noise
    return math.log1p(rate * math.exp(exponent)) if exponent < 700 else exponent + math.log(rate)
