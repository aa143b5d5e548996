"""How long things take: distributions of seconds, as a recipe and the command line write them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field
from scipy import special

from personafl.options import Strict, short_form

if TYPE_CHECKING:
    from personafl.latency.samples import Sample

Reals = NDArray[np.float64]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Distribution(Strict, ABC):
    """A law of seconds."""

    @abstractmethod
    def at(self, hazard: Reals) -> Reals:
        """Return the time that one outlives with probability exp(−hazard): exact far into the tail."""

    def quantile(self, share: ArrayLike) -> Reals:
        """Return the time that a share in [0, 1) stays below; of uniform shares, independent draws."""
        return self.at(-np.log1p(-np.asarray(share, dtype=np.float64)))


class Constant(_Distribution):
    """Always the same."""

    kind: Literal["constant"] = "constant"
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]

    @property
    def mean(self) -> float:
        """The expected time."""
        return self.seconds

    def at(self, hazard: Reals) -> Reals:
        """Return the same for all."""
        return np.full_like(hazard, self.seconds)


class Exponential(_Distribution):
    """Without memory: what is left does not depend on what has passed."""

    kind: Literal["exponential"] = "exponential"
    mean: Positive

    def at(self, hazard: Reals) -> Reals:
        """Return mean · hazard."""
        return self.mean * hazard


class Weibull(_Distribution):
    """Stretched exponential: the smaller the shape k, the heavier the tail; 1 is exponential."""

    kind: Literal["weibull"] = "weibull"
    shape: Positive
    scale: Positive = 1.0

    @property
    def mean(self) -> float:
        """The expected time, scale · Γ(1 + 1/k)."""
        return self.scale * float(special.gamma(1 + 1 / self.shape))

    def at(self, hazard: Reals) -> Reals:
        """Return scale · hazard^(1/k)."""
        return self.scale * hazard ** (1 / self.shape)


class Pareto(_Distribution):
    """A power law above a minimum: P(τ > t) = (minimum/t)^shape. Its mean is infinite unless the shape is above 1."""

    kind: Literal["pareto"] = "pareto"
    shape: Positive
    minimum: Positive = 1.0

    @property
    def mean(self) -> float:
        """The expected time, minimum · a/(a − 1)."""
        return self.minimum * self.shape / (self.shape - 1) if self.shape > 1 else math.inf

    def at(self, hazard: Reals) -> Reals:
        """Return minimum · exp(hazard/a)."""
        return self.minimum * np.exp(hazard / self.shape)


class Lognormal(_Distribution):
    """The logarithm is normal around that of the median, with standard deviation sigma."""

    kind: Literal["lognormal"] = "lognormal"
    median: Positive
    sigma: Positive

    @property
    def mean(self) -> float:
        """The expected time, median · exp(σ²/2)."""
        with np.errstate(over="ignore"):
            return self.median * float(np.exp(self.sigma**2 / 2))

    def at(self, hazard: Reals) -> Reals:
        """Return median · exp(σ · z), where a standard normal exceeds z with probability exp(−hazard)."""
        z: Reals = -special.ndtri_exp(-hazard)
        return self.median * np.exp(self.sigma * z)


class Trace(Strict):
    """Measured times: drawn with replacement from a file (one number a line, or .npy)."""

    kind: Literal["trace"] = "trace"
    file: str

    @cached_property
    def sample(self) -> Sample:
        """The times in the file, read when first needed: to show a finished run needs no file."""
        from personafl.latency.samples import read_trace  # here, for a device reads no times

        return read_trace(self.file)

    @property
    def mean(self) -> float:
        """The mean time."""
        return self.sample.mean

    def quantile(self, share: ArrayLike) -> Reals:
        """Return the smallest time that at least this share of the times does not exceed."""
        return self.sample.quantile(share)


Law = Constant | Exponential | Weibull | Pareto | Lognormal | Trace
Latency = Annotated[Law, Field(discriminator="kind")]  # of a recipe

LATENCIES: dict[str, type[Law]] = {kind.model_fields["kind"].default: kind for kind in get_args(Law)}


def parse_latency(text: str) -> Law:
    """Read `kind:key=value,key=value`, for example `exponential:mean=2` or `trace:file=times.txt`."""
    return short_form(text, "latency", LATENCIES)
