"""Singular value thresholding on a GPU, by the eigenvectors of a Gram matrix.

With A = U S Vᵀ [m, n], m ≤ n, it is A Aᵀ = U S² Uᵀ: a decomposition of m × m in float64, which a GPU does several times
as fast as that of A in float32, whose columns it rotates in pairs. Rounding the product to 2⁻⁵³ costs a singular value
s an error of about 2⁻⁵³·s₁²/s: less than that of float32 arithmetic for all s ≥ 10⁻⁵ s₁. Only those above the width are
asked for; where that is smaller, the definition is used.
"""

import torch
from torch import Tensor

from personafl.core import prox, seam

_AT_ONCE = 1024  # rows or columns up to which this is faster than looking for the leading vectors alone
_SMALL = 1e-5  # of the largest singular value: the width from which on it is exact enough


def nuclear(matrix: Tensor, width: float | Tensor, near: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return u, v with prox = u @ v, as `prox.nuclear` does."""
    if (
        matrix.device.type == "cuda"
        and matrix.dtype == torch.float32
        and (near is None or min(matrix.shape) <= _AT_ONCE)
    ):
        found = by_gram(matrix, width)
        if found is not None:
            return found
    return seam.definition(prox.nuclear)(matrix, width, near)


def by_gram(matrix: Tensor, width: float | Tensor) -> tuple[Tensor, Tensor] | None:
    """Return u, v by the Gram matrix of the shorter side; None where the width is too small for it."""
    exact = matrix.to(torch.float64)
    wide = matrix.shape[0] <= matrix.shape[1]
    squares, vectors = torch.linalg.eigh(exact @ exact.mT if wide else exact.mT @ exact)  # ascending
    s, vectors = squares.clamp(min=0).sqrt().flip(0), vectors.flip(1)
    if not bool(s[0] * _SMALL < width):
        return None
    kept = int((s > width).sum())
    s, vectors = s[:kept], vectors[:, :kept]
    u, v = (vectors, vectors.mT @ exact / s.unsqueeze(1)) if wide else (exact @ vectors / s, vectors.mT)
    return (u * (s - width)).to(matrix.dtype), v.to(matrix.dtype)
