"""Rules that weigh the vectors by how far they are off."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from personafl.robust.rule import Rule

_EQUAL = 1e-12  # a spread that is rounding alone, of the squared size of the vectors


@dataclass(frozen=True, kw_only=True)
class Mean(Rule):
    """The mean, which one hostile vector may take anywhere."""

    by_distance: ClassVar[bool] = False

    def check(self, n: int) -> None:
        """Hold it for nothing."""

    def reduce(self, rows: Tensor) -> Tensor:
        """Return the means."""
        return rows.mean(0)


@dataclass(frozen=True, kw_only=True)
class GeometricMedian(Rule):
    """The point with the least Σ ‖z − x_i‖, by smoothed Weiszfeld steps from 0.

    K. Pillutla et al., *Robust Aggregation for Federated Learning*, IEEE TSP 2022:

        β_i = 1 / max(ν, ‖z − x_i‖),   z ← Σ β_i x_i / Σ β_i

    ν is `smoothing`, and there are so many `steps`. It needs no f, and holds for n ≥ 2f + 1.
    """

    smoothing: float = 1e-6
    steps: int = 8

    def mix(self, gram: Tensor) -> Tensor:
        """Return β/Σβ after the last step; z = Σ a_i x_i, so ‖x_i − z‖² = G_ii − 2 (G a)_i + aᵀ G a."""
        weights = torch.zeros(len(gram), dtype=torch.float64)
        for _ in range(self.steps):
            weights = 1 / _from(gram, weights).clamp(min=self.smoothing)
            weights = weights / weights.sum()
        return weights[None]


@dataclass(frozen=True, kw_only=True)
class CenteredClipping(Rule):
    """A guess v moved by the mean of the differences to it, each clipped to a radius τ.

    S. P. Karimireddy et al., *Learning from History for Byzantine Robust Optimization*, ICML 2021:

        v ← v + 1/n Σ (x_i − v) · min(1, τ / ‖x_i − v‖),   `steps` times

    The first guess is what the rule gave the round before, 0 in the first one. It needs no f; for n ≥ 2f + 1.
    """

    from_centre: ClassVar[bool] = True
    radius: float = 1.0
    steps: int = 1

    def mix(self, gram: Tensor) -> Tensor:
        """Return the weights of the vectors, and of the first guess, which is the last of them."""
        n = len(gram) - 1
        weights = torch.zeros(n + 1, dtype=torch.float64)
        weights[n] = 1
        for _ in range(self.steps):
            off = _from(gram, weights)[:n]
            factors = torch.where(off > self.radius, self.radius / off, torch.ones_like(off)) / n
            weights = weights * (1 - factors.sum())
            weights[:n] += factors
        return weights[None]


@dataclass(frozen=True, kw_only=True)
class Caf(Rule):
    """Covariance-bound agnostic filter: vectors far out along the direction of most spread lose weight.

    Y. Allouah et al., *Towards Trustworthy Federated Learning with Untrusted Participants*, ICML 2025. With weights c,
    all 1 at first, while Σ c > n − 2f:

        μ = Σ c_i x_i / Σ c,   λ, v = the largest eigenvalue of Σ c_i (x_i − μ)(x_i − μ)ᵀ / Σ c, and its vector
        τ_i = ⟨x_i − μ, v⟩²,   c_i ← c_i (1 − τ_i / max τ)

    The result is the μ of the least λ. λ and τ are exact, from the Gram matrix. For n ≥ 2f + 1. The largest τ is over
    those with c_i > 0, so that every step takes one vector out and n of them are enough. With `removed_too` it is over
    all, as byzfl has it: then a vector that is out and far off makes the steps of the others small without bound.
    """

    removed_too: bool = False

    def mix(self, gram: Tensor) -> Tensor:
        """Return c/Σc of the least λ."""
        n = len(gram)
        shares, least = torch.ones(n, dtype=torch.float64), float("inf")
        best = shares / n
        while float(shares.sum()) > n - 2 * self.f:
            mean = shares / shares.sum()
            value, projected = spread(gram, mean)
            if value < least:
                least, best = value, mean
            if value <= _EQUAL * float(gram.diagonal()[shares > 0].max()):
                break  # all that is left is the same
            among = projected if self.removed_too else projected[shares > 0]
            shares = shares * (1 - projected / among.max()).clamp(min=0)
        return best[None]


def spread(gram: Tensor, mean: Tensor) -> tuple[float, Tensor]:
    """Return the largest eigenvalue λ of a weighted covariance, and τ, [n].

    With Y the rows x_i − μ and D = diag(mean), Yᵀ D Y and √D Y Yᵀ √D have the same eigenvalues; of an eigenvector u of
    the second, v = Yᵀ √D u / √λ is that of the first, so Y v = (Y Yᵀ) √D u / √λ.
    """
    off = gram - (gram @ mean)[:, None] - (gram @ mean)[None, :] + mean @ gram @ mean
    root = mean.sqrt()
    values, vectors = torch.linalg.eigh(root[:, None] * off * root[None, :])
    value = max(0.0, float(values[-1]))
    return value, (off @ (root * vectors[:, -1])) ** 2 / max(value, 1e-300)


def _from(gram: Tensor, weights: Tensor) -> Tensor:
    """Return ‖x_i − Σ_j weights_j x_j‖."""
    along = gram @ weights
    return (gram.diagonal() - 2 * along + weights @ along).clamp(min=0).sqrt()


def capped(weights: Tensor, most: float) -> Tensor:
    """Return weights cut to the c for which none is more than a share `most` of their sum: c = most · Σ min(w_i, c).

    Where 1/n is more than that, all are alike, and weigh what one in the middle does, or the mean if that is less: so
    their sum is never more than it was.
    """
    n, ordered = len(weights), weights.sort(descending=True).values
    below = ordered.sum()
    for count, largest in enumerate(ordered.tolist()):  # so many are cut to c = most · (count · c + below)
        level = float(most * below / (1 - most * count)) if most * count < 1 else 0.0
        if largest <= level:
            return weights.clamp(max=level) if count else weights
        below = below - largest
    return torch.full_like(weights, min(float(ordered[n // 2]), float(weights.sum()) / n))
