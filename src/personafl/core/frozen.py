"""Training one part of a network while the rest is fixed: what only the fixed part decides is computed once.

With u fixed a network is head(v, features(u, x)), see `core.cut`. Its features of a sample do not change from step to
step, so a phase that sees samples more than once computes them once, and its steps go through the head alone:

    z_j = features(u, x_j) for every sample j of the phase;   v ← v − γ ∇_v f(v; z_B, y_B) for each minibatch B

Where a network has no such features, or they would take too much memory, training is as ever; the result is the same up
to rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from personafl.core.algorithm import Problem, mean_loss
from personafl.core.batches import Batch, Batches
from personafl.core.cut import Cut, cut
from personafl.core.descend import descend
from personafl.core.layers import Layers
from personafl.core.optim import Optimizer
from personafl.core.stack import stack_around
from personafl.core.tree import Params

__all__ = ["descend_part"]

_COPIES = 8  # a client's features may take the memory of so many copies of its model
_BATCHES = 4  # features of so many batches are computed at a time: nothing is kept for a gradient


def descend_part(
    problem: Problem, fixed: Params, start: Params, batches: Batches, optimizer: Optimizer
) -> tuple[Params, Tensor]:
    """Minimise f over one part of the parameters from `start`, the other one fixed; otherwise as `descend`."""
    divided = cut(problem.net, start.keys(), batches.pool_x) if fixed else None
    reduced = None if divided is None else _on_features(divided, problem.net.parameters, fixed, batches)
    if divided is None or reduced is None:
        return descend(problem.mean_loss_given(fixed), start, batches, optimizer)
    head = divided.head
    constant = {name: fixed[name] for name in head.shapes if name in fixed}

    def objective(part: Params, batch: Batch) -> Tensor:
        return mean_loss(head, problem.loss, constant | part, batch)

    return descend(objective, start, reduced, optimizer)


def _on_features(divided: Cut, parameters: int, fixed: Params, batches: Batches) -> Batches | None:
    """Return the batches with features in place of inputs, from a pool of the client's own samples.

    None if that does not pay: no sample comes twice, or the features would fill the memory.
    """
    rows, most = batches.rows, batches.mark.most
    if not rows.numel() or (rows.is_cuda and not 0 < most < rows.numel()):
        return None
    own, place = _Distinct.apply(rows, most if rows.is_cuda else 0)  # type: ignore[no-untyped-call]
    if len(own) >= rows.numel() or len(own) * divided.size > _COPIES * parameters:
        return None
    body = {name: fixed[name] for name in divided.features.shapes}
    with Layers(stack_around(), {}, factored=False):
        pieces = [divided.features.apply(body, batches.pool_x[part]) for part in own.split(_BATCHES * rows.shape[1])]
    return batches._replace(pool_x=torch.cat(pieces), pool_y=batches.pool_y[own], rows=place)


class _Distinct(torch.autograd.Function):
    """rows [steps, batch] ↦ each row number once [n], and where in that list each one is [steps, batch].

    Stacked clients get lists of one length, which only a look at all of them can tell: hence a rule of its own for
    vmap. Those with fewer rows repeat their last. A CUDA graph cannot wait for that look, so there n is given: `most`.
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
