"""The B-th of N servers to be ready: its expected time τ_(B), and r = E[τ_(B)]/E[τ_(N)] (Wu et al. 2021, §3.1).

The times of the servers are independent and alike, with quantile function Q; β = B/N. The paper prints the waiting time
of the asynchronous cloud as τ_(R); it is τ_(B).
"""

import math

import numpy as np
from numpy.typing import NDArray
from scipy import integrate, special

from personafl.core.rng import uniforms
from personafl.errors import BadInput
from personafl.latency.laws import Law, Reals, Trace
from personafl.latency.samples import Sample

Counts = NDArray[np.int64]
DRAWS = 2_000_000  # of a simulation, over all servers
LARGEST = 1e300  # stands for an infinite time, so that times zero probability it is zero


def expected_times(law: Law | Sample, servers: int, first: Counts) -> Reals:
    """Return E[τ_(B)] = ∫ Q(u) u^(B−1) (1−u)^(N−B) du / Beta(B, N−B+1) for each B of `first`, [len(first)]."""
    law = law.sample if isinstance(law, Trace) else law
    if isinstance(law, Sample):
        return _of_sample(law, servers, first)
    if math.isfinite(law.mean):
        times, exact = _integral(law, servers, first)
        known, _ = _integral(law, 1, np.array([1]))
        if exact and np.isclose(known[0], law.mean, rtol=1e-6):
            return times
    raise BadInput(f"latency {law.kind!r}: its tail is too heavy, E[τ_(N)] is infinite or nearly so; lighten it")


def _of_sample(sample: Sample, servers: int, first: Counts) -> Reals:
    """Q is a staircase, so the integral is a sum: each value times the probability that it is the B-th."""
    edges = np.linspace(0, 1, len(sample.values) + 1)
    return np.array([np.diff(special.betainc(b, servers - b + 1, edges)) @ sample.values for b in first])


def _integral(law: Law, servers: int, first: Counts) -> tuple[Reals, bool]:
    """Integrate over the hazard s = −ln(1−u), in which heavy tails are smooth; say whether the result is exact."""
    assert not isinstance(law, Trace)
    after = servers - first + 1
    scale = np.maximum(law.at(-np.log1p(-first / (servers + 1))), 1e-300)  # so that each B is as exact as any other

    def integrand(hazard: float) -> Reals:
        density = special.xlogy(first - 1, -np.expm1(-hazard)) - after * hazard - special.betaln(first, after)
        time = np.minimum(law.at(np.asarray(hazard)), LARGEST)
        return np.asarray(time * np.exp(density) / scale)

    typical = -np.log1p(-np.linspace(0.1, 0.9, 9) * servers / (servers + 1))
    with np.errstate(over="ignore", invalid="ignore"):  # the result is checked
        whole, error = integrate.quad_vec(integrand, 0, np.inf, epsabs=0, epsrel=1e-11, norm="max", points=typical)
    return whole * scale, bool(error < 1e-6 * np.abs(whole).min())


def simulated_ratios(law: Law | Sample, servers: int, first: Counts, seed: int) -> tuple[Reals, Reals]:
    """Return r for each B of `first` from simulated rounds, all servers starting afresh in each; its standard error."""
    rounds = max(100, DRAWS // servers)
    share = uniforms(seed, "latency", np.arange(rounds)[:, None], np.arange(servers)[None, :])
    ordered = np.sort(law.quantile(share), axis=1)
    chosen, last = ordered[:, first - 1], ordered[:, -1:]
    ratio = chosen.mean(axis=0) / last.mean()
    # The delta method: the error of a ratio of means is that of the mean residual.
    error = (chosen - ratio * last).std(axis=0, ddof=1) / np.sqrt(rounds) / last.mean()
    return ratio, error


def large_n_bound(law: Law | Sample, servers: int, first: Counts) -> Reals:
    """Return Q(β)/Q(1−1/N), the right side of eq. (8), for each B of `first`; NaN where it says nothing (B = N, Q = 0).

    It bounds r from above, for N ≫ 1 and a fixed β. For the exponential law it does so for every N and B: Σ 1/i over
    N−B < i ≤ N is below −ln(1−β), and E[τ_(N)] is above ln N. It can fail for the first few of many servers (Weibull
    with k = 1/2, N = 100, B = 1: r is 1.47 times the bound), and where times have gaps, as they may in a trace.
    """
    below = first < servers
    top = law.quantile(np.where(below, first / servers, 0.0))
    bottom = float(law.quantile(1 - 1 / servers))
    return np.where(below & (bottom > 0), top / (bottom or 1.0), np.nan)


def weibull_bound(shape: float, servers: int, first: Counts) -> Reals:
    """Return the same bound in closed form, (−ln(1−β))^(1/k) (ln N)^(−1/k): the scale cancels; NaN at B = N.

    The paper prints −(ln(1−β))^(1/k), the root of a negative number.
    """
    below = first < servers
    share = np.where(below, first / servers, 0.0)
    return np.where(below, (-np.log1p(-share) / np.log(max(servers, 2))) ** (1 / shape), np.nan)
