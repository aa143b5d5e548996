"""Real numbers as integers whose sum never wraps.

An entry u of an upload that counts w times is sent as the integer

    q = round(w · u · 2^s),  cut to ±⌊w · R · 2^s⌋,    s = ⌊log₂((2³¹ − 1) / (n · W · R))⌋

with R the largest entry, W the largest weight and n the most clients of a sum. So the sum of all is within ±(2³¹ − 1),
and what is known of it modulo 2³² is the sum itself. Sums are exact, in whatever order; each upload has an error of at
most half a step of the grid, 2^-(s+1), and the mean over a total weight Ω one of at most

    n · 2^-(s+1) / Ω   (2^-(s+1) where uploads count alike: below 10⁻⁸ for n · R ≤ 32),

and no entry beyond R gets through.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LOSS_RANGE = 1024.0  # the largest training loss that is summed with uploads
Vector = NDArray[np.uint32]  # of integers modulo 2³²
_MOST = 2**31 - 1


@dataclass(frozen=True)
class Grid:
    """The integers that some clients' uploads are sent as."""

    clients: int  # n
    weight: float  # W
    range: float  # R

    @property
    def exponent(self) -> int:
        """Return s."""
        exponent = math.frexp(_MOST / (self.clients * self.weight * self.range))[1] - 1
        while self.clients * math.floor(math.ldexp(self.weight * self.range, exponent)) > _MOST:
            exponent -= 1  # the quotient was rounded
        return exponent

    def integers(self, values: Tensor, weights: Tensor) -> Tensor:
        """Return q of values [clients, …] with weights [clients], as whole numbers in float64; nan stays nan."""
        step = math.ldexp(1.0, self.exponent)
        weights = weights.to(torch.float64).reshape(-1, *[1] * (values.ndim - 1))
        most = (weights * self.range * step).floor()
        return torch.minimum(torch.maximum((values.to(torch.float64) * weights * step).round(), -most), most)

    def real(self, integers: Tensor) -> Tensor:
        """Return what a sum of integers stands for: Σ w·u, in float64."""
        return integers.to(torch.float64) * math.ldexp(1.0, -self.exponent)


def wrapped(integers: Tensor) -> Vector:
    """Return whole numbers modulo 2³²."""
    if not bool(integers.isfinite().all()):
        raise ValueError("numbers that are not finite")
    return integers.to(torch.int64).numpy().astype(np.uint32)


def unwrapped(vector: Vector) -> NDArray[np.int64]:
    """Return the numbers within ±(2³¹ − 1) that are these modulo 2³²."""
    return vector.view(np.int32).astype(np.int64)
