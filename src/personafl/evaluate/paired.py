"""Whether one model is better than another: paired differences over clients and seeds, with a 95 % interval.

Client c has under seed s the difference d_cs of two models on the same samples. The estimate is the mean over seeds of
the mean over clients, as in a table. Clients and seeds are both a sample of those that there might be,

    d_cs = μ + a_c + b_s + e_cs,   S seeds, n_s clients in seed s, C clients in all, k_c seeds that client c is in

With seed means m_s, their mean m, weights w_s = 1/(S·n_s), r_cs = d_cs - m_s, and e_cs = r_cs less the mean of r over
the seeds of client c if it is in several, the parts of the variance of the estimate are

    V_A = C/(C-1) Σ_c (Σ_s w_s·r_cs)²                              by clients, C-1 degrees of freedom
    V_B = Σ_s (m_s - m)² / (S(S-1))                                by seeds, S-1 degrees of freedom
    V_E = Σ_cs w_s²·e_cs² · n_s/(n_s-1) · (k_c/(k_c-1) if k_c > 1)    by neither, which V_A and V_B both contain
    V   = max(V_A, V_E) + max(V_B, V_E) - V_E

and the interval is m ± t·√V. Its degrees of freedom are C-1 where V_B ≤ V_E, for seeds then differ no more than chance
would have it; else by Satterthwaite V²/(max(V_A, V_E)²/(C-1) + V_B²/(S-1)), no fewer than the smaller of C-1 and S-1.
Where every client is in every seed, this is the analysis of variance with two random factors; with one seed, V = V_A,
it is the paired t interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import special

Values = NDArray[np.float64]
Rows = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Paired:
    """A mean difference, half of its 95 % interval (NaN of one client), and the shares of clients above and below 0."""

    mean: float
    half: float
    better: float
    worse: float
    clients: int  # in all, each once
    seeds: int

    @property
    def told_apart(self) -> bool:
        """Whether the interval leaves out 0."""
        return abs(self.mean) > self.half  # False with NaN

    def __neg__(self) -> Paired:
        """Return the same the other way round."""
        return replace(self, mean=-self.mean, better=self.worse, worse=self.better)


def paired(differences: Sequence[Values], clients: Sequence[Rows]) -> Paired | None:
    """Compare by the differences of each seed, above 0 where the first model is better, and whose they are.

    A number of `clients` is one client under all seeds. NaN is left out; None if nothing is left.
    """
    known = [(d[np.isfinite(d)], c[np.isfinite(d)]) for d, c in zip(differences, clients, strict=True)]
    known = [(d, c) for d, c in known if len(d)]
    if not known:
        return None
    sizes = np.array([len(d) for d, _ in known])
    means = np.array([d.mean() for d, _ in known])
    everyone, whose = np.unique(np.concatenate([c for _, c in known]), return_inverse=True)
    residuals = np.concatenate([d - mean for (d, _), mean in zip(known, means, strict=True)])
    variance, freedom = _spread(means, sizes, residuals, whose, len(everyone))
    half = float(special.stdtrit(freedom, 0.975)) * math.sqrt(variance) if len(everyone) > 1 else math.nan
    return Paired(
        mean=float(means.mean()),
        half=half,
        better=float(np.mean([(d > 0).mean() for d, _ in known])),
        worse=float(np.mean([(d < 0).mean() for d, _ in known])),
        clients=len(everyone),
        seeds=len(known),
    )


def _spread(means: Values, sizes: Rows, residuals: Values, whose: Rows, count: int) -> tuple[float, float]:
    """Return the variance of the mean, and its degrees of freedom."""
    seeds = len(means)
    size = np.repeat(sizes, sizes)
    weight = 1 / (seeds * size)
    by_client = float((np.bincount(whose, weight * residuals) ** 2).sum()) * count / max(count - 1, 1)
    if seeds == 1:
        return by_client, max(count - 1, 1)
    times = np.bincount(whose)
    again = times[whose] > 1
    own = np.where(again, residuals - (np.bincount(whose, residuals) / times)[whose], residuals)
    factor = np.where(again, times[whose] / np.maximum(times[whose] - 1, 1), 1.0) * size / np.maximum(size - 1, 1)
    by_neither = float((weight**2 * own**2 * factor).sum())
    by_seed = float(means.var(ddof=1)) / seeds
    by_client = max(by_client, by_neither)
    if by_seed <= by_neither:
        return by_client, max(count - 1, 1)
    whole = by_client + by_seed - by_neither
    freedom = whole**2 / (by_client**2 / max(count - 1, 1) + by_seed**2 / (seeds - 1))
    return whole, max(freedom, min(count - 1, seeds - 1))
