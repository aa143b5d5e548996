"""Which model a device keeps: global, personal or one in between, by its own validation data and the population's.

A device has few validation samples; its candidates are the global model (candidate 0) and others, say the weights
w + a(v - w) between global w and personal v. On each sample a candidate is compared with the global model in two
statistics, z = (gain in correctness, gain in the probability of the right class). The second, exp(-loss), is much less
noisy, but not what we want: fine-tuning sharpens a model, which raises it even while accuracy falls. So it is never
taken for accuracy; the population shows how far it predicts accuracy. For each candidate apart, let dᵢ and Sᵢ be mean
and unbiased covariance of z over the nᵢ samples of device i, and δᵢ what infinitely many samples would give:

    dᵢ | δᵢ ~ N(δᵢ, S̃ᵢ/nᵢ)     what a device measures
         δᵢ ~ N(μ, T)           how devices differ

Noise.  A handful of samples that all agree has S = 0 and proves nothing, so a device's covariance is shrunk to the
pooled one, which counts as ν = 4 degrees of freedom:

    S₀ = (M + Σ(nᵢ-1)Sᵢ) / (1 + Σ(nᵢ-1)),   S̃ᵢ = (νS₀ + (nᵢ-1)Sᵢ) / (ν + nᵢ-1)

where M, the mean of zzᵀ over all samples of all devices, stands in for one more and keeps S₀ > 0. (What is
always 0 counts with variance 1, and every variance with a millionth more, so that all can be inverted.)

Prior (empirical Bayes).  K devices have samples, N = Σnᵢ, d̄ = Σnᵢdᵢ/N, c = N - Σnᵢ²/N; by the moments of
DerSimonian and Laird (1986)

    T = (Σnᵢ(dᵢ-d̄)(dᵢ-d̄)ᵀ - (K-1)S₀) / c,   with eigenvalues relative to S₀ raised to √(2(K-1))/c where they are less
    μ = Var(μ) ΣWᵢdᵢ,   Wᵢ = (T + S₀/nᵢ)⁻¹,   Var(μ) = (ΣWᵢ)⁻¹

The floor is the standard error of T where devices do not differ: spread that the population is too small to show is
assumed, not excluded. It fades as devices or samples grow.

Posterior.  With Aᵢ = T(T + S̃ᵢ/nᵢ)⁻¹, which is 0 without samples,

    mᵢ = μ + Aᵢ(dᵢ - μ),   Vᵢ = (I-Aᵢ)T + (I-Aᵢ)Var(μ)(I-Aᵢ)ᵀ

Choice.  Let m and V be those of accuracy, the first component. Among candidates with P(δ < 0) = Φ(-m/√V) below
`caution`, a device keeps the one with the greatest m > 0; without any, the global model. Ties go to the earlier one.

A device without samples of its own has the prior alone, m = μ and V = T + Var(μ): it leaves the global model only if
fewer than a share `caution` of devices are expected to lose by it. Where nobody has samples, all keep the global one.

With one statistic all this is the textbook rule with numbers in place of matrices. What the population must tell are
sums over devices: K, Σnᵢ, Σnᵢ², Σ(nᵢ-1)⁺, Σ(nᵢ-1)Sᵢ, Σnᵢdᵢ, Σnᵢdᵢdᵢᵀ and, in a second round, ΣWᵢ and ΣWᵢdᵢ. So secure
aggregation can make a `Prior`; given it, a device decides alone, newcomers too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from personafl.errors import BadInput
from personafl.evaluate import CAUTION

Values = NDArray[np.float64]

_FREEDOM = 4.0  # ν
_RIDGE = 1e-6  # relative: statistics may be multiples of each other, and sums come from float32


@dataclass(frozen=True)
class Gains:
    """Per device, over its samples: sums of what one candidate gains over the global model, z = (right, sure)."""

    right: Values  # correct under the candidate - correct under the global model
    right_squared: Values
    sure: Values  # exp(-loss) of the candidate - exp(-loss) of the global model
    sure_squared: Values
    right_sure: Values  # their product
    samples: NDArray[np.int64]


@dataclass(frozen=True)
class Evidence:
    """Validation gains over the global model; candidate 0 is the global model, its gains are 0.

    Statistic 0 is accuracy, what the choice is about; others help to predict it, or there are none. What a device
    without samples has in its row, or one with a single sample in its covariance, is not looked at.
    """

    gain: Values  # [devices, candidates, statistics] means over the device's samples
    covariance: Values  # [devices, candidates, statistics, statistics] unbiased, of the gains per sample
    samples: NDArray[np.int64]  # [devices]

    def __post_init__(self) -> None:
        shape = self.gain.shape
        if (
            len(shape) != 3
            or 0 in shape[1:]
            or self.covariance.shape != (*shape, shape[2])
            or self.samples.shape != shape[:1]
        ):
            raise BadInput(
                "evidence: needs gain [devices, candidates, statistics], covariance [devices, candidates, statistics, "
                f"statistics], samples [devices]; got {shape}, {self.covariance.shape}, {self.samples.shape}"
            )
        if (self.samples < 0).any():
            raise BadInput("evidence: samples must not be negative")
        gain, covariance = self.gain[self.samples > 0], self.covariance[self.samples > 1]
        if not (np.isfinite(gain).all() and np.isfinite(covariance).all()):
            raise BadInput("evidence: gains and covariances must be finite where there are samples")
        if gain[:, 0].any() or covariance[:, 0].any():
            raise BadInput("evidence: candidate 0 is the global model, its gains over itself must be 0")

    @classmethod
    def from_sums(cls, total: ArrayLike, products: ArrayLike, samples: ArrayLike) -> Evidence:
        """Return the evidence in each device's Σz [devices, candidates, statistics] and Σzzᵀ [..., statistics].

        Sums of batches add up and every candidate meets only the global model, so no gains per sample need be kept.
        """
        sums, squares, count = np.asarray(total, float), np.asarray(products, float), np.asarray(samples, np.int64)
        n = count[:, None, None]
        mean = sums / np.maximum(n, 1)
        inner = squares - n[..., None] * _outer(mean)
        return cls(mean, np.where(n[..., None] > 1, inner, 0.0) / np.maximum(n - 1, 1)[..., None], count)

    def __getitem__(self, devices: slice | NDArray[np.int64] | NDArray[np.bool_]) -> Evidence:
        """Return the evidence of some devices."""
        return Evidence(self.gain[devices], self.covariance[devices], self.samples[devices])


def evidence_of(candidates: Sequence[Gains]) -> Evidence:
    """Return the evidence on candidates 1, 2, …; candidate 0, the global model, is put before them."""
    if not candidates:
        raise BadInput("choice: there is no candidate beside the global model")
    total = np.stack([np.stack([c.right, c.sure], -1) for c in candidates], 1)
    rows = [[c.right_squared, c.right_sure, c.right_sure, c.sure_squared] for c in candidates]
    products = np.stack([np.stack(row, -1) for row in rows], 1).reshape(*total.shape, 2)
    first = (0, 0), (1, 0), (0, 0)
    return Evidence.from_sums(np.pad(total, first), np.pad(products, (*first, (0, 0))), candidates[0].samples)


@dataclass(frozen=True)
class Prior:
    """What the population says of each candidate; made of sums over devices."""

    mean: Values  # μ [candidates, statistics]
    mean_covariance: Values  # Var(μ) [candidates, statistics, statistics]
    spread: Values  # T, between devices
    noise: Values  # S₀, between samples of a device


@dataclass(frozen=True)
class Posterior:
    """What is known of every device's gain in accuracy, [devices, candidates]."""

    mean: Values
    variance: Values


def learn_prior(evidence: Evidence) -> Prior:
    """Estimate how gains are distributed over devices; at least one must have samples."""
    evidence = evidence[evidence.samples > 0]
    d, S, n, freedom = _parts(evidence)
    devices, count = len(n), float(n.sum())
    if not devices:
        raise BadInput("choice: no device has validation samples; set data.validation")
    within = (freedom * S).sum(0)
    mean_square = (within + (n * _outer(d)).sum(0)) / count
    noise = _positive((mean_square + within) / (1 + freedom.sum()))
    if devices > 1:
        scale = count - float((n**2).sum()) / count
        centre = (n[..., 0] * d).sum(0) / count
        excess = (n * _outer(d - centre)).sum(0) - (devices - 1) * noise
        spread = _at_least(excess / scale, noise, np.sqrt(2 * (devices - 1)) / scale)
    else:
        spread = noise  # nothing tells it, and it does not matter: μ is what the device itself measured
    weight = n * np.linalg.inv(n * spread + noise)  # (T + S₀/n)⁻¹
    mean_covariance = np.linalg.inv(weight.sum(0))
    mean = mean_covariance @ (weight @ d[..., None]).sum(0)
    return Prior(mean[..., 0], mean_covariance, spread, noise)


def posterior(evidence: Evidence, prior: Prior) -> Posterior:
    """Shrink what each device measured towards the population, the more the less it measured."""
    d, S, n, freedom = _parts(evidence)
    own = _positive((_FREEDOM * prior.noise + freedom * S) / (_FREEDOM + freedom))
    trust = n * prior.spread @ np.linalg.inv(n * prior.spread + own)  # A
    rest = np.eye(d.shape[-1]) - trust
    mean = prior.mean[..., None] + trust @ (d - prior.mean)[..., None]
    covariance = rest @ prior.spread + rest @ prior.mean_covariance @ np.swapaxes(rest, -1, -2)
    return Posterior(mean[..., 0, 0], np.maximum(covariance[..., 0, 0], 0.0))


def choose(evidence: Evidence, caution: float = CAUTION, prior: Prior | None = None) -> NDArray[np.int64]:
    """Return the candidate each device keeps, 0 for the global model.

    A device leaves the global model only for one whose probability of being worse is below `caution`, at most 0.5.
    The prior is learned from the same evidence unless given; without any samples at all every device keeps global.
    """
    if not 0 < caution <= 0.5:
        raise BadInput(f"caution: must be a probability above 0 and at most 0.5, not {caution}")
    if prior is None:
        if not evidence.samples.any():
            return np.zeros(len(evidence.samples), np.int64)
        prior = learn_prior(evidence)
    if prior.mean.shape != evidence.gain.shape[1:]:
        raise BadInput(
            f"prior: its [candidates, statistics] are {prior.mean.shape}, the evidence's {evidence.gain.shape[1:]}"
        )
    belief = posterior(evidence, prior)
    safe = belief.mean > NormalDist().inv_cdf(1 - caution) * np.sqrt(belief.variance)  # Φ(-m/√V) < caution
    worth: Values = np.where(safe, belief.mean, 0.0)  # the global model's is 0, and it comes first
    chosen: NDArray[np.int64] = np.argmax(worth, axis=1)
    return chosen


def _parts(evidence: Evidence) -> tuple[Values, Values, Values, Values]:
    """Return means and covariances, 0 where nothing was measured, and n, max(n-1, 0) as [devices, 1, 1, 1]."""
    n = evidence.samples[:, None, None, None].astype(np.float64)
    gain = np.where(n[..., 0] > 0, evidence.gain, 0.0)
    covariance = np.where(n > 1, evidence.covariance, 0.0)
    return gain, covariance, n, np.maximum(n - 1, 0.0)


def _outer(z: Values) -> Values:
    return z[..., :, None] * z[..., None, :]


def _positive(covariance: Values) -> Values:
    """Make covariances safely invertible: a little more of each variance, and 1 for that of a constant."""
    variance = np.diagonal(covariance, axis1=-2, axis2=-1)
    return covariance + np.where(variance > 0, _RIDGE * variance, 1.0)[..., None] * np.eye(covariance.shape[-1])


def _at_least(matrix: Values, unit: Values, floor: float) -> Values:
    """Raise the eigenvalues of a symmetric matrix relative to a positive `unit` to `floor`."""
    root = np.linalg.cholesky(unit)
    back = np.linalg.inv(root)
    values, axes = np.linalg.eigh(back @ matrix @ np.swapaxes(back, -1, -2))
    axes = root @ axes
    raised: Values = (axes * np.maximum(values, floor)[..., None, :]) @ np.swapaxes(axes, -1, -2)
    return raised
