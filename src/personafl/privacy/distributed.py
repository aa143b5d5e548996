"""Noise that clients add themselves, each a share, to vectors of which nothing but the sum is seen.

P. Kairouz, Z. Liu, T. Steinke, *The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure
Aggregation*, ICML 2021. With n clients of whom at least h are honest and in the sum, R the clip in steps of a grid, and
z the noise multiplier, client i sends

    y_i = x_i + N_Z(0, σ² I)  mod 2³²,   x_i whole with ‖x_i‖ ≤ R,   σ = ⌈zR/√h⌉

and the sum of the honest ones has noise of variance hσ² ≥ (zR)²; whatever else is in it is added to that, and makes
nothing worse. A sum of discrete Gaussians is none, but nearly: with W ~ N_Z(0, hσ²), for all v

    |log Pr[Σ_i N_Z(0, σ²) = v] / Pr[W = v]| ≤ τ = 10 Σ_{k=1}^{h−1} exp(−2π²σ² k/(k+1))   (they show)

so that one client's vector, there or zero, moves d coordinates by a Rényi divergence of at most α/2z² + τd (their
Proposition 14). Grids here are so fine that τd ≤ `EXCESS`, and accounted for is thrice that at whole orders, which
follows from the line above alone: ratios to the power α and 1 − α are off by e^((2α−1)τd), over α − 1, and α ≥ 2.

Sums are known modulo 2³². An entry of the sum without noise is within ±nR, and the noise of n clients is sub-Gaussian
with variance nσ², so that none of d entries wraps but with a chance of

    2d · exp(−(2³¹ − 1 − nR)² / 2nσ²) ≤ 2⁻⁴⁰;

R is the largest power of two for which that holds. If it happened, a model would be bad, and no less private.

Deviation: vectors go to the nearest point of the grid inside of the ball, not to a random one near them: with 32 bits a
step is far below the noise, there is nothing to gain by that, and the ball need not be larger than the clip.
"""

import hashlib
import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.tree import Tree
from personafl.errors import BadInput
from personafl.privacy.discrete import discrete_gaussians, rounded
from personafl.privacy.kinds import EXCESS

MOST = 2**31 - 1  # the largest entry of a sum
WRAPPED = 2.0**-40  # the chance that one of a sum's entries wraps, at most
LEAST_RADIUS = 2**10  # steps that a clip has, or rounding would be seen beside the noise


@dataclass(frozen=True)
class Lattice:
    """The whole numbers that clients send."""

    radius: int  # R
    sigma: int  # σ, of each client's share of the noise


def tau(shares: int, sigma: float) -> float:
    """Return τ of so many shares: how far, in logs, their sum is from one discrete Gaussian at any point."""
    k = np.arange(1, shares, dtype=np.float64)
    return float(10 * np.exp(-2 * math.pi**2 * sigma**2 * k / (k + 1)).sum())


@lru_cache(maxsize=64)
def lattice_for(noise: float, clients: int, honest: int, length: int) -> Lattice:
    """Return the grid of n clients, h of them honest and in the sum, for vectors of so many entries.

    Fail if none is fine enough that sums do not wrap.
    """
    if honest < 1:
        raise BadInput(
            f"secure.dropouts: of {clients} clients nobody is left who is sure to add noise; lower it or secure.corrupt"
        )
    radius = 2**30
    while radius >= LEAST_RADIUS:
        sigma = _share(noise, honest, radius)
        if wrapping(Lattice(radius, sigma), clients, length) <= WRAPPED:
            break
        radius //= 2
    else:
        raise BadInput(
            f"privacy.noise: a sum of {clients} clients with noise {noise:g} would wrap in 32 bits, or be too coarse; "
            "lower it, or federation.cohort"
        )
    if tau(honest, sigma) * length > EXCESS:
        raise BadInput(
            f"privacy.noise: the shares of {honest} clients with noise {noise:g} together are too far from Gaussian; "
            "raise it"
        )
    return Lattice(radius, sigma)


def _share(noise: float, honest: int, radius: int) -> int:
    """Return ⌈zR/√h⌉, or one more where that was rounded down."""
    sigma = math.ceil(noise * radius / math.sqrt(honest))
    return sigma + (sigma**2 * honest < (Fraction(noise) * radius) ** 2)


def wrapping(lattice: Lattice, clients: int, length: int) -> float:
    """Return a bound on the chance that an entry of the sum of so many clients wraps."""
    room = MOST - clients * lattice.radius
    if room <= 0:
        return 1.0
    return min(1.0, 2 * length * math.exp(-(room**2) / (2 * clients * lattice.sigma**2)))


def client_key(key: bytes, number: int) -> bytes:
    """Return the key of a simulated client's noise; a real device has one of its own, which nobody else knows."""
    return hashlib.sha256(key + f"client {number}".encode()).digest()


def length_of(upload: Any) -> int:
    """Return how many numbers of an upload are sent: all but the loss, which noise does not cover."""
    return sum(leaf.numel() for path, leaf in tree.flatten(upload).items() if path != "loss")


def sent(upload: Any, clip: float, lattice: Lattice, key: bytes, round_: int) -> Tensor:
    """Return what a client sends of its upload in a round: y_i before it is taken modulo 2³².

    The noise is that of the key, the round, σ and x_i itself: the same again for the same, and never for another.
    """
    leaves = [leaf.detach().cpu().flatten() for path, leaf in tree.flatten(upload).items() if path != "loss"]
    vector = torch.cat([leaf.to(torch.float64) for leaf in leaves])
    whole = rounded(vector[None], torch.tensor(clip, dtype=torch.float64), lattice.radius)[0]
    site = f"share/{round_}/{lattice.sigma}/{hashlib.sha256(whole.numpy().tobytes()).hexdigest()}"
    return whole + discrete_gaussians(key, site, len(whole), lattice.sigma)


def in_clips(vector: Tensor, like: Any, loss: Tensor, lattice: Lattice) -> Tree:
    """Return a sum of what clients sent as an upload in units of the clip, in float64: exact, for R is a power of 2."""
    leaves, begin = dict[str, Tensor](), 0
    for path, leaf in tree.flatten(like).items():
        if path == "loss":
            leaves[path] = loss
        else:
            part = vector[begin : begin + leaf.numel()].to(torch.float64) / lattice.radius
            leaves[path], begin = part.reshape(leaf.shape).to(leaf.device), begin + leaf.numel()
    return tree.unflatten(like, leaves)
