"""Noise that later rounds take back in part, so that the sum of all rounds has less of it (DP-FTRL).

x_t is what round t adds to the model, S_t = x_0 + … + x_t. Each round draws z_t ~ N(0, I) once and adds n_t, made of it
and of what earlier rounds drew. A client takes part in rounds that are at least b apart.

**Tree** (P. Kairouz et al., *Practical and Private (Deep) Learning without Sampling or Shuffling*, ICML 2021). A binary
tree over b rounds, with noise on every node; S_t has the noise of the nodes that cover rounds 0 to t, one for each bit
of t + 1 that is set. A node that a larger one replaces is taken back: with l zeros at the end of t + 1 in base 2,

    n_t = z_t − (the nodes of levels 0 to l − 1),   and z_t is the node of level l

The next tree begins after b rounds, and the noise of the last one stays.

**Banded** (C. A. Choquette-Choo et al., *(Amplified) Banded Matrix Factorization*, NeurIPS 2023, with the coefficients
of N. Kalinin, C. Lampert, *Banded Square Root Matrix Factorization for DP Model Training*, NeurIPS 2024). The matrix A
of prefix sums is B·C, where C is lower triangular Toeplitz with 1, c_1, …, c_{p−1}, first coefficients of the square
root of A, c_i = c_{i−1} (2i − 1)/2i, over their norm ‖c‖; p ≤ b. Released is A x + B z = A (x + C⁻¹ z), so

    n_t = ‖c‖ z_t − Σ_{i=1}^{p−1} c_i n_{t−i}

Columns of C have norm 1 at most, and those of rounds that are p apart or more have no row in common: k rounds of one
client move C x by √k clips, and all together is one Gaussian mechanism with noise multiplier z/√k.
"""

import math
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

Correlated = Literal["tree", "banded"]
MOST_BANDS = 32  # as many earlier noises of every number are kept


@lru_cache(maxsize=16)
def coefficients(bands: int) -> tuple[float, ...]:
    """Return 1, c_1, …: those of (1 − x)^(−1/2)."""
    found = [1.0]
    for i in range(1, bands):
        found.append(found[-1] * (2 * i - 1) / (2 * i))
    return tuple(found)


def bands_of(apart: int) -> int:
    """Return p for a b."""
    return min(apart, MOST_BANDS)


def kept(mechanism: Correlated, apart: int) -> int:
    """Return how many numbers are kept for each that noise is added to."""
    return apart.bit_length() if mechanism == "tree" else bands_of(apart) - 1


def add(mechanism: Correlated, apart: int, step: int, memory: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
    """Return n_t and what is kept after it, from what was kept before, [kept, …], and z_t; t is `step`."""
    return _tree(apart, step, memory, drawn) if mechanism == "tree" else _banded(apart, memory, drawn)


def _tree(apart: int, step: int, memory: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
    count = step % apart + 1
    level = (count & -count).bit_length() - 1
    after = memory.clone() if count > 1 else torch.zeros_like(memory)
    noise = drawn - after[:level].sum(0)
    after[:level], after[level] = 0.0, drawn
    return noise, after


def _banded(apart: int, memory: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
    series = coefficients(bands_of(apart))
    noise = math.sqrt(sum(c * c for c in series)) * drawn
    for before, c in zip(memory, series[1:], strict=True):
        noise = noise - c * before
    return noise, torch.cat([noise.unsqueeze(0), memory])[: len(memory)]
