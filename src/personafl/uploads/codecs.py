"""How a weight of an upload is sent in fewer bytes: C of `uploads.uplink`, as recipes say it.

    sparse:    the k = ⌈keep·entries⌉ entries of greatest magnitude (to half the precision), and where they are
    low-rank:  the best approximation of rank r of the weight's matrix form (`prox.as_matrix`), as two factors

C depends on the shape alone, so all uploads of a weight have one size. Deviation from PowerSGD: u has the left singular
vectors themselves (v = uᵀa), not what one power step per round from the last ones makes of them.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Gt, Le
from torch import Tensor

from personafl.core import wire
from personafl.core.prox import as_matrix, from_matrix
from personafl.core.schedule import FORBID_UNKNOWN, Count

_COARSER = {torch.float64: torch.float32, torch.float32: torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Whole:
    """Send every weight whole."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_UNKNOWN
    form: Literal["dense"] = "dense"


@dataclass(frozen=True, kw_only=True)
class TopEntries:
    """Send the entries of greatest magnitude of every weight, a share `keep` of them."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_UNKNOWN
    form: Literal["sparse"] = "sparse"
    keep: Annotated[float, Gt(0), Le(1)] = 0.1
    error_feedback: bool = True

    def divide(self, weight: Tensor) -> tuple[wire.Sparse | wire.Masked | Tensor, Tensor]:
        """Return C(weight) and what is left of the weight."""
        flat = weight.reshape(-1)
        count = max(1, math.ceil(self.keep * len(flat) - 1e-9))  # 0.1 · 30 is a little more than 3
        # Ranked to half the precision, ties by place: entries that are equal but for rounding (as Adam's first steps
        # are) would else be chosen by how kernels round, and stacked clients would differ from single ones.
        magnitude = flat.abs().to(_COARSER.get(flat.dtype, flat.dtype))
        places = magnitude.sort(descending=True, stable=True).indices[:count]
        return wire.kept(weight, places), flat.scatter(0, places, 0.0).reshape(weight.shape)


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """Send the best approximation of rank `rank` of every weight."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_UNKNOWN
    form: Literal["low-rank"] = "low-rank"
    rank: Count = 4
    error_feedback: bool = True

    def divide(self, weight: Tensor) -> tuple[wire.Factored, Tensor]:
        """Return C(weight) and what is left of the weight."""
        matrix = as_matrix(weight)
        sound = torch.isfinite(matrix).all()  # else there are no singular vectors, and the caller should see the NaN
        u, _, _ = torch.linalg.svd(torch.where(sound, matrix, 0.0), full_matrices=False)
        u = torch.where((matrix != 0).any(dim=1, keepdim=True), u[:, : self.rank], 0.0)
        v = u.T @ matrix  # so that, with the line before, rows and columns of zeros stay that to the bit
        shape = torch.tensor(weight.shape, dtype=torch.int32)
        return wire.Factored(u, v, shape), weight - from_matrix(u @ v, weight.shape)


Compression = TopEntries | LowRank
Codec = Whole | Compression
