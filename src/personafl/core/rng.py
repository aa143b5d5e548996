"""Randomness without state: every draw is a function of (seed, purpose, client, round, …).

There is no generator to save, so a crash replays, cohorts and splits are the same for every method under one
seed, and a whole cohort's shuffles are drawn in one vectorised call.
"""

import hashlib
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = NDArray[np.uint64]
Word = int | str | NDArray[np.integer]

GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as int64
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def _as_words(word: Word) -> Words:
    if isinstance(word, str):
        digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
        return np.array(int.from_bytes(digest, "little"), dtype=np.uint64)
    if isinstance(word, int):
        return np.array(word & 0xFFFFFFFFFFFFFFFF, dtype=np.uint64)
    return word.astype(np.uint64)


def mix(*words: Word) -> Words:
    """Hash words to 64 uniform bits each, broadcasting arrays (the finaliser of SplitMix64, applied per word)."""
    state = np.zeros((), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for word in words:
            z = (state ^ _as_words(word)) + _GOLDEN
            z = (z ^ (z >> np.uint64(30))) * _MIX1
            z = (z ^ (z >> np.uint64(27))) * _MIX2
            state = z ^ (z >> np.uint64(31))
    return state


def scramble(z: Tensor) -> Tensor:
    """Apply SplitMix64's finaliser to int64 (products wrap; the arithmetic shifts are masked to logical ones).

    A last word of `mix` that is on a device: mix(…, word) = scramble((mix(…) ^ word) + GOLDEN).
    """
    z = (z >> 30).bitwise_and_((1 << 34) - 1).bitwise_xor_(z).mul_(-0x40A7B892E31B1A47)
    z = (z >> 27).bitwise_and_((1 << 37) - 1).bitwise_xor_(z).mul_(-0x6B2FB644ECCEEE15)
    return (z >> 31).bitwise_and_((1 << 33) - 1).bitwise_xor_(z)


def gaussians(keys: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return standard Gaussians by keys [keys], [keys, count], wherever the keys are: they hide nothing.

    The bits are SplitMix64's from each key on. For each two numbers, r cos φ and r sin φ (Box and Muller), float32
    takes 31 bits for r and 32 for φ from a word, float64 63 and 64 from two.
    """
    pairs, exact = (count + 1) // 2, torch.float64 if dtype == torch.float64 else torch.float32
    places = torch.arange(1, (pairs if exact == torch.float32 else 2 * pairs) + 1, device=keys.device)
    words = scramble(keys.unsqueeze(1) + places * GOLDEN)
    if exact == torch.float32:
        bits, first, second = 31, words >> 32, (words << 32) >> 32
    else:
        bits, first, second = 63, words[:, :pairs], words[:, pairs:]
    radii = (first & ((1 << bits) - 1)).to(exact).add_(0.5).mul_(2.0**-bits).log_().mul_(-2).sqrt_()
    angles = second.to(exact).mul_(math.pi * 2.0**-bits)
    return torch.cat([angles.cos().mul_(radii), angles.sin_().mul_(radii)], 1)[:, :count].to(dtype)


def generator(*words: Word) -> torch.Generator:
    """Return a torch generator (CPU) for one draw site."""
    return torch.Generator().manual_seed(int(mix(*words)) >> 1)


def numpy_generator(*words: Word) -> np.random.Generator:
    """Return a numpy generator for one draw site."""
    return np.random.Generator(np.random.Philox(key=int(mix(*words))))


def uniforms(*words: Word) -> NDArray[np.float64]:
    """Return numbers in (0, 1), uniform, one per hash of the words, broadcasting arrays; neither end is ever drawn."""
    # 52 bits and a half: the largest, 1 − 2⁻⁵³, is still below 1 in float64.
    return ((mix(*words) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def permutations(sizes: NDArray[np.int64], keys: Words) -> NDArray[np.int64]:
    """Return an independent permutation of range(sizes[i]) per row, [rows, max size]; the tail is padding.

    Row i sorts the hashes of its own positions, so it depends on keys[i] and sizes[i] alone.
    """
    positions = np.arange(int(sizes.max(initial=0)))
    draws = mix(keys[:, None], positions[None, :])
    draws[positions[None, :] >= sizes[:, None]] = np.iinfo(np.uint64).max
    return np.argsort(draws, axis=1)  # no two hashes of 64 bits are equal, so any kind of sorting gives one order
