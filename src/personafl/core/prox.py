"""Proximal operators: prox_{t·R}(v) = argmin_x R(x)·t + ½‖x − v‖², in closed form, for one tensor each.

A `Prox` used by `descend` maps the parameters after a gradient step to the parameters that are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from personafl.core.tree import Params

__all__ = ["Prox", "as_matrix", "box", "from_matrix", "group", "l1", "l2_ball", "nuclear"]

Prox = Callable[[Params], Params]


def l1(v: Tensor, width: float | Tensor) -> Tensor:
    """Soft threshold: R = ‖x‖₁, width = t. Entries within `width` of zero become zero."""
    return v.sign() * (v.abs() - width).clamp(min=0)


def box(v: Tensor, low: float, high: float) -> Tensor:
    """Projection onto [low, high] in every coordinate."""
    return v.clamp(low, high)


def l2_ball(v: Tensor, radius: float, center: Tensor | None = None) -> Tensor:
    """Projection onto {x : ‖x − center‖₂ ≤ radius}."""
    offset = v if center is None else v - center
    length: Tensor = torch.linalg.vector_norm(offset)
    inside = offset * (radius / length.clamp(min=max(radius, torch.finfo(v.dtype).tiny)))
    return inside if center is None else center + inside


def group(v: Tensor, width: float | Tensor) -> Tensor:
    """Block soft threshold: R = Σ_rows ‖x_row‖₂ over the first axis (an output unit or filter is one group)."""
    rows = v.reshape(v.shape[0], -1)
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    kept = (1 - width / lengths.clamp(min=torch.finfo(v.dtype).tiny)).clamp(min=0)
    return (rows * kept).reshape(v.shape)


def nuclear(matrix: Tensor, width: float | Tensor) -> tuple[Tensor, Tensor]:
    """Singular value thresholding: R = ‖X‖_* (the sum of singular values), width = t.

    Returns factors (u, v) with prox = u @ v, u [rows, rank], v [rank, columns]; the rank is the number of singular
    values above the width, so a low-rank result is ready to be sent as it is.
    """
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    kept = s > width
    return u[:, kept] * (s[kept] - width), v[kept]


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
