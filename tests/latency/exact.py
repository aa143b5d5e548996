"""The paper's latencies once more, with nothing of the package: by integration, and by long walks of exact draws.

    python tests/latency/exact.py [MILLIONS [SEED]]

10 servers of 10 devices; the 3 that arrive first, Exp(2), train for U{1..5} · Exp(1); τ is the last of them. With G the
distribution of K·Exp(1), and f and F that of an arrival, and given the fourth arrival a, the first three are
independent and before it:

    P(τ ≤ t) = ∫ p₄(a) [∫₀^min(a, t) f(u) G(t − u) du / F(a)]³ da

E[τ_(B)] = ∫ P(fewer than B of 10 are ready by t) dt gives r. What servers do that keep their work, or go on alone, has
memory: it is walked, with so many millions of rounds of servers for each B, and its standard error is printed.
"""

from __future__ import annotations

import sys
from math import comb

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
SERVERS, DEVICES, ACTIVE, STEPS = 10, 10, 3, 5
REPLICAS = 500


def integrated(points: int = 4001, longest: float = 100.0, nodes: int = 40) -> Array:
    """Return E[τ_(B)] for B = 1 … 10. The inner integral has a closed form; the rest is by Gauss and by Simpson."""
    t = np.linspace(0.0, longest, points)
    ready = np.array([0.0, *(_ready(float(end), nodes) for end in t[1:])])
    ways = [comb(SERVERS, count) * ready**count * (1 - ready) ** (SERVERS - count) for count in range(SERVERS)]
    weights = np.ones(points)
    weights[1:-1:2], weights[2:-1:2] = 4, 2
    return np.array([weights @ np.sum(ways[:first], axis=0) * t[1] / 3 for first in range(1, SERVERS + 1)])


def _ready(t: float, nodes: int) -> float:
    """Return P(τ ≤ t): over v = F(a), the fourth arrival's share, from 0 to F(t) and from there to 1."""
    at, weight = np.polynomial.legendre.leggauss(nodes)
    edge, total = 1 - np.exp(-t / 2), 0.0
    for low, high in ((0.0, edge), (edge, 1.0)):
        v = (low + high) / 2 + (high - low) / 2 * at
        last = np.minimum(-2 * np.log(np.maximum(1 - v, 1e-300)), t)
        inner = 1 - np.exp(-last / 2)
        for k in range(1, STEPS + 1):
            rate = 1 / k - 0.5
            grown = last if rate == 0 else np.expm1(rate * last) / rate
            inner = inner - np.exp(-t / k) * grown / (2 * STEPS)
        density = comb(DEVICES, ACTIVE) * (DEVICES - ACTIVE) * (1 - v) ** (DEVICES - ACTIVE - 1)  # over v³
        total += float(weight @ (density * inner**ACTIVE)) * (high - low) / 2
    return total


def drawn(dice: np.random.Generator, count: int) -> Array:
    """Return times of so many servers in each walk; arrivals come in their order (Rényi)."""
    shape = (REPLICAS, count, ACTIVE)
    arrivals = np.cumsum(2 * dice.standard_exponential(shape) / (DEVICES - np.arange(ACTIVE)), axis=-1)
    work = dice.integers(1, STEPS + 1, shape) * dice.standard_exponential(shape)
    times: Array = (arrivals + work).max(axis=-1)
    return times


def walked(first: int, *, rigorous: bool, millions: float, seed: int) -> tuple[float, float]:
    """Return the mean time between two mixes, and its standard error over walks."""
    dice = np.random.default_rng([seed, first, rigorous])
    each = SERVERS if rigorous else first
    mixes = int(1e6 * millions / (REPLICAS * each))
    ready, mixed = np.zeros((REPLICAS, SERVERS)), np.zeros((REPLICAS, 1))
    ready += 0 if rigorous else drawn(dice, SERVERS)
    for number in range(mixes):
        if rigorous:
            ready = np.maximum(ready, mixed) + drawn(dice, SERVERS)
            mixed = np.partition(ready, first - 1, axis=1)[:, first - 1 : first]
        else:
            who = np.argpartition(ready, first - 1, axis=1)[:, :first]
            mixed = np.take_along_axis(ready, who, axis=1).max(axis=1, keepdims=True)
            np.put_along_axis(ready, who, mixed + drawn(dice, first), axis=1)
        if number == mixes // 5:
            began = mixed
    paces = (mixed - began) / (mixes - 1 - mixes // 5)
    return float(paces.mean()), float(paces.std(ddof=1) / np.sqrt(REPLICAS))


if __name__ == "__main__":
    given = sys.argv[1:]
    millions, seed = float(given[0]) if given else 20.0, int(given[1]) if given[1:] else 0
    means = integrated()
    print(f"E[τ_(10)] = {means[-1]:.4f}")
    for first in (3, 5, 7):
        kept, alone = (walked(first, rigorous=way, millions=millions, seed=seed) for way in (False, True))
        fresh = means[first - 1] / means[-1]
        told = (f"{pace / means[-1]:.4f} ± {error / means[-1]:.4f}" for pace, error in (kept, alone))
        print(f"B = {first}: fresh {fresh:.4f}, kept {', rigorous '.join(told)}", flush=True)
