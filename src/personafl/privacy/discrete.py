"""Privacy in whole numbers: vectors rounded into a ball of the lattice, and exact discrete Gaussian noise.

C. Canonne, G. Kamath, T. Steinke, *The Discrete Gaussian for Differential Privacy*, NeurIPS 2020. N_Z(0, σ²) has
Pr[x] ∝ exp(−x²/2σ²) on the integers. Nothing here is rounded after the vectors are whole numbers: sums are exact, and
so are draws (coins of rational chance only, from the bits of a key), so that what is proven is what is computed.

A sum of vectors that one client changes by at most R in norm, with noise N_Z(0, σ²) on each coordinate, has Rényi
divergence α R²/2σ² at every order α (their Theorem 14), as the continuous Gaussian has. With Poisson sampling of rate q
it has at whole orders α

    log Σ_k C(α, k) (1 − q)^(α−k) q^k exp((k² − k) R²/2σ²) / (α − 1)

exactly, as again the continuous Gaussian: for Δ whole, E[exp(k x·Δ/σ²)] = exp(k²‖Δ‖²/2σ²), for shifting the lattice by
kΔ changes nothing.
"""

import hashlib
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from personafl.privacy.noise import check_key

MOST_SIGMA = 2**52  # a draw is well below 2⁶³ then
_Coin = Callable[[NDArray[np.intp]], NDArray[np.bool_]]


def discrete_gaussians(key: bytes, site: str, count: int, sigma: int) -> Tensor:
    """Return `count` draws of N_Z(0, σ²) for a draw site, as whole numbers of 64 bits; σ is whole.

    From discrete Laplace numbers |Y| = U + σV, each kept with chance exp(−(|Y| − σ)²/2σ²). With | |Y| − σ | = aσ + r
    that is e^(−1/2) to the a², times e^(−r/σ) to the a, times exp(−(r/σ)²/2): coins of chance r/σ do it all.
    """
    if not 1 <= sigma <= MOST_SIGMA:
        raise ValueError(f"sigma must be from 1 to 2**52, not {sigma}")
    bits, found, have = _Bits(key, site), [], 0
    while have < count:
        drawn = _kept(bits, _laplaces(bits, sigma, int(2.15 * (count - have)) + 32), sigma)
        found.append(drawn)
        have += len(drawn)
    return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *found])[:count])


def rounded(vectors: Tensor, clip: Tensor, radius: int) -> Tensor:
    """Return float vectors (one a row) as whole numbers, in units of clip/radius: to the nearest, of norm ≤ radius.

    What a clip or rounding leaves outside of the ball is made smaller until it is inside; that is checked in whole
    numbers. A row with numbers that are not finite is nothing. Each row is a function of that row alone, so one client
    changes a sum by at most the radius.
    """
    if not 1 <= radius <= 2**30:
        raise ValueError(f"radius must be from 1 to 2**30, not {radius}")
    rows = vectors.detach().to(torch.float64).flatten(1)
    rows = torch.where(torch.isfinite(rows).all(1, keepdim=True), rows, 0.0)
    norms = rows.norm(dim=1)
    factors = torch.minimum(radius / clip, radius / norms)  # of nothing infinite, and so that of the clip
    shrink = 2.0**-50
    while True:
        whole = (rows * factors[:, None]).round().to(torch.int64)
        lengths = whole.square().sum(1)  # exact: norms are about the radius at most, so that squares fit
        over = lengths > radius**2
        if not bool(over.any()):
            return whole.reshape(vectors.shape)
        shorter = factors * radius / lengths.clamp(min=1).to(torch.float64).sqrt() * (1 - shrink)
        factors, shrink = torch.where(over, shorter, factors), min(2 * shrink, 0.5)


class _Bits:
    """The bits of a key and a site, as SHAKE-256 has them, in as many takes as rejection needs."""

    def __init__(self, key: bytes, site: str) -> None:
        self._start, self._takes = check_key(key) + site.encode() + b"\0", 0

    def below(self, end: int, count: int) -> NDArray[np.int64]:
        """Return uniform numbers from 0 to end − 1, each from as many bits as it needs, drawn again where too large."""
        size = (end - 1).bit_length()
        if not size or not count:
            return np.zeros(count, np.int64)
        word = next(width for width in (8, 16, 32, 64) if size <= width)
        found, have = [], 0
        while have < count:
            wanted = int((count - have) * 2**size / end) + 16
            drawn = np.frombuffer(self._take(wanted * word // 8), f"<u{word // 8}") >> (word - size)
            drawn = drawn[drawn < end]
            found.append(drawn)
            have += len(drawn)
        return np.concatenate(found)[:count].astype(np.int64)

    def _take(self, size: int) -> bytes:
        self._takes += 1
        return hashlib.shake_256(self._start + self._takes.to_bytes(8, "little")).digest(size)

    def exponential(self, many: NDArray[np.intp], coin: _Coin) -> NDArray[np.bool_]:
        """Return coins of chance e^(−γ) from coins of chance γ ≤ 1: the first K of which none is 1/K of γ is odd."""
        heads, left, turn = np.zeros(len(many), np.bool_), np.arange(len(many)), 1
        while len(left):
            again = coin(many[left])
            again[again] = self.below(turn, int(again.sum())) == 0
            heads[left[~again]] = turn % 2 == 1
            left, turn = left[again], turn + 1
        return heads

    def ratio(self, parts: NDArray[np.int64], whole: int) -> _Coin:
        """Return coins of chance part/whole, for the numbers of those that toss."""
        return lambda who: self.below(whole, len(who)) < parts[who]


def _all(count: int) -> NDArray[np.intp]:
    return np.arange(count)


def _sure(who: NDArray[np.intp]) -> NDArray[np.bool_]:
    return np.ones(len(who), np.bool_)


def _laplaces(bits: _Bits, scale: int, tries: int) -> NDArray[np.int64]:
    """Return what tries give of Pr[y] ∝ exp(−|y|/scale) on the integers."""
    rest = bits.below(scale, tries)
    rest = rest[bits.exponential(_all(tries), bits.ratio(rest, scale))]
    times, left = np.zeros(len(rest), np.int64), _all(len(rest))
    while len(left):
        left = left[bits.exponential(left, _sure)]
        times[left] += 1
    value, sign = rest + scale * times, 1 - 2 * bits.below(2, len(rest))
    drawn: NDArray[np.int64] = (sign * value)[(sign > 0) | (value > 0)]  # or 0 would come twice as often
    return drawn


def _kept(bits: _Bits, values: NDArray[np.int64], sigma: int) -> NDArray[np.int64]:
    """Return those that a coin of chance exp(−(|y| − σ)²/2σ²) keeps."""
    times, rest = np.divmod(np.abs(np.abs(values) - sigma), sigma)
    of_rest = bits.ratio(rest, sigma)

    def half(who: NDArray[np.intp]) -> NDArray[np.bool_]:
        return bits.below(2, len(who)).astype(np.bool_)

    def half_of_square(who: NDArray[np.intp]) -> NDArray[np.bool_]:
        return np.logical_and(np.logical_and(of_rest(who), of_rest(who)), half(who))

    left = _all(len(values))
    left = left[bits.exponential(left, half_of_square)]
    for often, coin in ((times**2, half), (times, of_rest)):
        done, turn = [left[often[left] == 0]], 0
        left = left[often[left] > 0]
        while len(left):
            left, turn = left[bits.exponential(left, coin)], turn + 1
            done.append(left[often[left] == turn])
            left = left[often[left] > turn]
        left = np.sort(np.concatenate(done))
    return values[left]
