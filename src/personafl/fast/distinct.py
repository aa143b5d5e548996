"""The samples that a phase of training sees, each once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from personafl.core.batches import Batches


def most_distinct(batches: Batches) -> int:
    """Return how many samples a client may see at most; 0: that is not known."""
    return min(batches.mark.most, batches.rows.numel())


def distinct(batches: Batches) -> tuple[Tensor, Tensor]:
    """Return the pool's rows that a client sees, each once [n], and where in that list those of its steps are."""
    found: tuple[Tensor, Tensor] = _Distinct.apply(batches.rows, most_distinct(batches))  # type: ignore[no-untyped-call]
    return found


class _Distinct(torch.autograd.Function):
    """rows [steps, batch] ↦ each row number once [n], and where in that list each one is [steps, batch].

    Stacked clients get lists of one length, which only a look at all of them can tell: hence a rule of its own for
    vmap. Those with fewer rows repeat their last. A CUDA graph cannot wait for that look, so n may be given: `most`,
    unless that is 0.
    """

    @staticmethod
    def forward(rows: Tensor, most: int) -> tuple[Tensor, Tensor]:
        return _distinct(rows, most)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Row numbers have no gradient."""

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int, None], rows: Tensor, most: int
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        return _distinct(rows.movedim(in_dims[0], 0), most), (0, 0)


def _distinct(rows: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Do so along the last two axes of rows [..., steps, batch]."""
    value, order = rows.flatten(-2).sort(dim=-1)
    rank = torch.zeros_like(value)
    rank[..., 1:] = (value[..., 1:] != value[..., :-1]).cumsum(-1)
    count = most or int(rank.max()) + 1
    number = torch.arange(count, device=rows.device).expand(*value.shape[:-1], count).contiguous()
    first = torch.searchsorted(rank, number).clamp(max=value.shape[-1] - 1)  # where each of them is met
    place = torch.empty_like(value).scatter_(-1, order, rank)
    return value.gather(-1, first), place.reshape(rows.shape)
