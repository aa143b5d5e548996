"""Proximal operators: prox_{t·R}(v) = argmin_x R(x)·t + ½‖x − v‖², in closed form, for one tensor each.

A `Prox` used by `descend` maps the parameters after a gradient step to the parameters that are kept.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from personafl.core.seam import replaceable
from personafl.core.tree import Params

Prox = Callable[[Params], Params]
Penalty = Literal["low-rank", "sparse"]

_WHOLE = 256  # a matrix with fewer rows or columns is decomposed whole: that takes milliseconds
_SPARE = 16  # directions beyond those expected
_SWEEPS = 4  # of subspace iteration between two checks
_CHECKS = 3


def l1(v: Tensor, width: float | Tensor) -> Tensor:
    """Soft threshold: R = ‖x‖₁, width = t. Entries within `width` of zero become zero."""
    return v.sign() * (v.abs() - width).clamp(min=0)


def box(v: Tensor, low: float, high: float) -> Tensor:
    """Projection onto [low, high] in every coordinate."""
    return v.clamp(low, high)


@replaceable
def nuclear(matrix: Tensor, width: float | Tensor, near: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Singular value thresholding: R = ‖X‖_* (the sum of singular values), width = t.

    Returns factors (u, v) with prox = u @ v, u [rows, rank], v [rank, columns]; the rank is the number of singular
    values above the width, so a low-rank result is ready to be sent as it is.

    `near` is the v of a result that this one may be close to, such as the last round's: then only that many singular
    vectors and a few more are sought, and the whole decomposition is made if they do not turn out to be all.
    """
    if near is not None and min(matrix.shape) >= _WHOLE and 4 * (len(near) + _SPARE) <= min(matrix.shape):
        found = _leading(matrix, width, near)
        if found is not None:
            return found
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    kept = s > width
    return u[:, kept] * (s[kept] - width), v[kept]


def _leading(matrix: Tensor, width: float | Tensor, near: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the factors by subspace iteration from the rows of `near`; None if it is not sure that they are right.

    Let A v = s·u + off and uᵀA = s·vᵀ, as they are here for the kept triplets. They are exact singular triplets of
    A − off·vᵀ, and the prox is non-expansive, so the result is within ‖off‖_F of the prox of A, provided that nothing
    above the width is left in A beside them. The first is required to be as small as rounding, the second is checked
    by iterating on the rest.
    """
    random = torch.Generator().manual_seed(0)  # the same result every time
    spare = torch.randn((_SPARE, matrix.shape[1]), generator=random, dtype=torch.float64).to(matrix)
    basis = torch.linalg.qr(torch.cat([near.to(matrix), spare]).mT).Q  # [columns, tried]
    tolerance = torch.finfo(matrix.dtype).eps ** 0.75 * torch.linalg.matrix_norm(matrix)
    for _ in range(_CHECKS):
        for _ in range(_SWEEPS):
            left = torch.linalg.qr(matrix @ basis).Q
            basis = torch.linalg.qr(matrix.mT @ left).Q
        small, s, v = torch.linalg.svd(left.mT @ matrix, full_matrices=False)
        u, kept = left @ small, s > width
        if bool(kept.all()):
            return None
        off = matrix @ v[kept].mT - u[:, kept] * s[kept]
        if bool(torch.linalg.matrix_norm(off) <= tolerance):
            rest = matrix - (u * s) @ v
            probe = torch.linalg.qr(spare.mT).Q
            for _ in range(_SWEEPS):
                probe = torch.linalg.qr(rest.mT @ (rest @ probe)).Q
            missed = torch.linalg.matrix_norm(rest @ probe, ord=2) > width
            return None if bool(missed) else (u[:, kept] * (s[kept] - width), v[kept])
        basis = v.mT
    return None


def low_rank(weight: Tensor, width: float | Tensor) -> Tensor:
    """Return the prox of the nuclear norm of a weight's matrix form, in the weight's own shape."""
    u, s, v = torch.linalg.svd(as_matrix(weight), full_matrices=False)
    return from_matrix((u * (s - width).clamp(min=0)) @ v, weight.shape)


def shrink(penalty: Penalty, width: float | Tensor) -> Prox:
    """Return the prox of width·R on parameters: R = ‖x‖₁ of all, or ‖X‖_* of every weight that has a matrix form."""
    if penalty == "sparse":
        return lambda params: {name: l1(value, width) for name, value in params.items()}
    return lambda params: {name: low_rank(value, width) if value.ndim > 1 else value for name, value in params.items()}


def as_matrix(weight: Tensor) -> Tensor:
    """Matrix form of a weight: a conv kernel [o, i, kh, kw] becomes (o·kh) × (i·kw); a linear weight stays."""
    if weight.ndim == 4:
        o, i, kh, kw = weight.shape
        return weight.permute(0, 2, 1, 3).reshape(o * kh, i * kw)
    return weight.reshape(weight.shape[0], -1)


def from_matrix(matrix: Tensor, shape: torch.Size) -> Tensor:
    """Undo `as_matrix`."""
    if len(shape) == 4:
        o, i, kh, kw = shape
        return matrix.reshape(o, kh, i, kw).permute(0, 2, 1, 3)
    assert matrix.numel() == math.prod(shape)
    return matrix.reshape(shape)
