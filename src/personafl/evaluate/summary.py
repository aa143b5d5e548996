"""Numbers over clients: what a table shows of per-client accuracies."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


@dataclass(frozen=True)
class Summary:
    """Accuracy over clients: unweighted mean, mean weighted by samples, spread, quantiles, the worst decile's mean.

    Of further metrics the means by name, weighted by samples or not. These are the names that metrics have everywhere.
    """

    accuracy: float
    accuracy_weighted: float
    accuracy_std: float
    worst_decile: float
    quantiles: dict[str, float]
    loss: float
    count: int
    metrics: dict[str, float] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """Return what is known by name."""
        return {key: value for key, value in vars(self).items() if key != "metrics"} | self.metrics


def summarize(
    accuracy: Values, loss: Values, samples: NDArray[np.int64], metrics: Mapping[str, Values] | None = None
) -> Summary:
    """Summarise clients that have samples; all is NaN when none has. std is that of the population of clients.

    The worst decile are the worst ⌈n/10⌉ of n clients.
    """
    has = samples > 0
    accuracy, loss, samples = accuracy[has], loss[has], samples[has]
    if not len(accuracy):
        nan = math.nan
        return Summary(nan, nan, nan, nan, {f"{q:.2f}": nan for q in QUANTILES}, nan, 0)
    worst = np.sort(accuracy)[: -(-len(accuracy) // 10)]
    return Summary(
        accuracy=float(accuracy.mean()),
        accuracy_weighted=float(np.average(accuracy, weights=samples)),
        accuracy_std=float(accuracy.std()),
        worst_decile=float(worst.mean()),
        quantiles={f"{q:.2f}": float(np.quantile(accuracy, q)) for q in QUANTILES},
        loss=float(loss.mean()),
        count=len(accuracy),
        metrics=_means(metrics or {}, has, samples),
    )


def _means(metrics: Mapping[str, Values], has: NDArray[np.bool_], samples: NDArray[np.int64]) -> dict[str, float]:
    """Return the means over clients that have each metric, NAME, and the same weighted by samples, NAME_weighted."""
    found = {}
    for name, values in metrics.items():
        own = values[has]
        finite = np.isfinite(own)
        if finite.any():
            found[name] = float(own[finite].mean())
            found[f"{name}_weighted"] = float(np.average(own[finite], weights=samples[finite]))
    return found


@dataclass(frozen=True)
class Hurt:
    """Clients whose own model is worse than the shared one: their share, its 95 % interval, how much they lose."""

    share: float
    low: float
    high: float
    mean_loss: float  # of accuracy, among the hurt; 0 when nobody is


def hurt(personal: Values, shared: Values, samples: NDArray[np.int64]) -> Hurt:
    """Compare per client, on the same samples; all is NaN when no client has any."""
    has = samples > 0
    change = personal[has] - shared[has]
    if not len(change):
        return Hurt(math.nan, math.nan, math.nan, math.nan)
    worse = change < 0
    low, high = wilson(int(worse.sum()), len(change))
    return Hurt(float(worse.mean()), low, high, float(-change[worse].mean()) if worse.any() else 0.0)


def wilson(successes: int, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """Return Wilson's score interval for a binomial share (95 % by default)."""
    share, spread = successes / trials, z * z / trials
    centre = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / trials + spread / (4 * trials))
    return max(0.0, centre - half), min(1.0, centre + half)
