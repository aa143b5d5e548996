"""Minibatches of stacked clients, gathered beneath the vmap that stacks them; and the samples they have, each once."""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from personafl.core.augment import augmented
from personafl.core.batches import Batch, Batches, Padding, Zipped
from personafl.fast.stack import Outside, stack_around


def has_gaps(stream: Any) -> bool:
    """Say whether there may be steps without real samples; if not, nobody needs to look."""
    if isinstance(stream, Zipped):
        return any(map(has_gaps, stream.phases))
    return bool(getattr(stream, "padding", Padding()).gaps)


def each(batches: Batches) -> Iterator[Batch]:
    """Yield what `Batches.each` does, without the samples that only pad a step for all clients."""
    stack, drawn = stack_around(), (batches.rows, batches.real, batches.key)
    stack = stack if stack is not None and any(map(stack.has, drawn)) else None
    rows, real, key = drawn if stack is None else map(stack.plain, drawn)
    padding = batches.padding
    for step in range(batches.rows.shape[0]):
        width, full = batches.rows.shape[1], False
        if padding.widths:
            width, full = padding.widths[step], padding.even[step]
        with Outside():  # beneath vmap, whose own way takes longer
            parts = rows[..., step, :width], real[..., step, :width], key[..., step]
        at, counts, random = parts if stack is None else map(stack.each, parts)
        x = rows_of(batches.pool_x, at)
        if batches.augment:
            seen = functools.partial(augmented, how=batches.augment)
            x = seen(x, random) if stack is None else stack.call(seen, x, random)
        guard = batches.guard.at(step) if batches.guard else ()
        yield Batch(x, rows_of(batches.pool_y, at), counts, random, full, at, guard)


def rows_of(pool: Tensor, rows: Tensor) -> Tensor:
    """Return pool[rows], copied row by row: indexing goes entry by entry, and is several times slower."""
    stack = stack_around()
    if stack is None or not stack.has(rows):
        return _rows_of(pool, rows)
    rows, pools = stack.plain(rows), stack.plain(pool) if stack.has(pool) else None
    with Outside():
        if pools is not None:  # clients' own, one below the other
            size = pools.shape[1]
            below = size * torch.arange(stack.clients, device=rows.device)
            rows, pool = rows + below.reshape(-1, *[1] * (rows.ndim - 1)), pools.flatten(0, 1)
        found = _rows_of(pool, rows)
    return stack.each(found)


def _rows_of(pool: Tensor, rows: Tensor) -> Tensor:
    if pool.ndim == 1:
        return pool[rows]
    return functional.embedding(rows, pool.flatten(1)).reshape(*rows.shape, *pool.shape[1:])


def most_distinct(batches: Batches) -> int:
    """Return how many samples a client may see at most; 0: that is not known."""
    return min(batches.padding.most, batches.rows.numel())


def distinct_rows(batches: Batches) -> tuple[Tensor, Tensor]:
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
