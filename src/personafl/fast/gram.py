"""A first layer's weights in the span of its inputs: epochs after the first cost it next to nothing.

The gradient of W in o = W z + b is a sum of g zᵀ over samples. Steps that are linear in gradients (SGD, momentum) so
keep W = W₀ + AᵀZ, where Z [n, in] are the layer's inputs for the samples that the client sees, and A [n, out] has a row
for each. If no trained parameter has a say in Z, it stays the same from step to step, and

    o_B = Z_B W₀ᵀ + (Z_B Zᵀ) A + b;   A_B ← A_B − γ g_B for each minibatch B

is the same training. Z W₀ᵀ and the Gram matrix Z Zᵀ are computed once, W at the end: with e epochs

    n·in·(2·out + n) + e·n²·out   multiply-adds in place of   2·e·n·in·out.

With one epoch they are more, but in products of many samples at a time, which a GPU does several times as fast. There Z
has the samples in the order of the steps (one that comes twice is there twice): step k sees rows before its own alone.

A term ⟨c, W⟩ + (μ/2)‖W − V‖² + (d/2)‖W‖² is taken along: its gradient is D + (μ + d)(W − W₀) with a constant
D = c + μ(W₀ − V) + d·W₀, so that W = W₀ + AᵀZ + s·D with one number s more, and Z Dᵀ is computed once too. Equal
results up to rounding.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from personafl.core.batches import Batch, Batches, Padding, Stream
from personafl.core.descend import Quadratic
from personafl.core.losses import MeanLoss
from personafl.core.optim import Optimizer
from personafl.core.tree import Params
from personafl.fast.bfloat16 import exactly, rounding
from personafl.fast.halves import FirstLayer, first_layer
from personafl.fast.layers import Layers, gram_outputs
from personafl.fast.minibatches import distinct_rows, most_distinct, rows_of
from personafl.fast.stack import stack_around, transformed

_GAIN = {"cpu": 0.9, "cuda": 2.0}  # how many times the multiply-adds pay at most
_ROUNDED_GAIN = {"cpu": 0.5, "cuda": 2.0}  # where the others are rounded, and so faster
_ALONG = "along the term"  # the name of s among the parameters
_COPIES = 8  # what is kept of a client's samples may take the memory of so many copies of its model


@dataclass(frozen=True)
class GramTraining:
    """The same training, with A and s in the place of the layer's W."""

    layer: FirstLayer
    samples: Tensor  # Z
    origin: Tensor  # W₀
    along: Tensor | None  # D, unless it is 0
    known: Tensor  # Z W₀ᵀ
    known_along: Tensor | None  # Z Dᵀ
    objective: MeanLoss
    start: Params
    batches: Stream[Batch]  # of rows of Z Zᵀ
    term: Quadratic | None

    def __call__(self, params: Params, batch: Batch) -> Tensor:
        """Return the objective."""
        layer, values, rows = self.layer, self.objective.fixed | params, batch.rows
        assert rows is not None
        known = _at(self.known, rows)
        if self.known_along is not None:
            known = known + params[_ALONG].detach() * _at(self.known_along, rows)
        outputs = gram_outputs(known, batch.x, params[layer.weight], rows)
        if layer.bias is not None:
            outputs = outputs + values[layer.bias]
        rest = MeanLoss(layer.rest, self.objective.loss, {name: values[name] for name in layer.rest.shapes})
        return rest({}, batch._replace(x=outputs))

    def weights(self, params: Params) -> Params:
        """Return the parameters with W in the place of A and s."""
        weight = self._moved(params).add_(self.origin)
        return {name: value for name, value in params.items() if name != _ALONG} | {self.layer.weight: weight}

    def change(self, params: Params) -> Params:
        """Return how the parameters differ from those at the start; W₀ is not added to be subtracted again."""
        change = Params()
        for name, value in params.items():
            if name != _ALONG:
                change[name] = self._moved(params) if name == self.layer.weight else value - self.start[name]
        return change

    def _moved(self, params: Params) -> Tensor:
        """Return W − W₀."""
        with exactly(self.samples):
            moved = params[self.layer.weight].mT @ self.samples
        return moved if self.along is None else moved + params[_ALONG] * self.along


def through_gram_matrix(
    objective: MeanLoss, start: Params, batches: Batches, optimizer: Optimizer, term: Quadratic | None
) -> GramTraining | None:
    """Return the same training with a first layer in the span of its inputs; None if that does not pay or exist."""
    if not optimizer.linear or (transformed() and stack_around() is None):
        return None
    layer = first_layer(objective.net, start.keys(), batches.pool_x)
    if layer is None:
        return None
    origin = start[layer.weight]
    along = None if term is None else _direction(term, layer.weight, origin)
    if along is not None and not optimizer.alike:  # s may not be treated as W is
        return None
    form = _cheapest(objective, origin.shape, batches, products=2 if along is None else 3)
    if form is None:
        return None
    own, place = distinct_rows(batches) if form == "samples" else (batches.rows.flatten(), batches.rows)
    below = {name: objective.fixed[name] for name in layer.features.shapes}
    with Layers(stack_around(), {}, factored=False):
        samples = layer.features.apply(below, rows_of(batches.pool_x, own)).to(origin.dtype)
    with exactly(origin):
        known, known_along = samples @ origin.T, None if along is None else samples @ along.T
        reduced = batches._replace(pool_x=samples @ samples.T, pool_y=batches.pool_y[own], rows=place)
    started = start | {layer.weight: torch.zeros_like(known)}
    if along is not None:
        started[_ALONG] = known.new_zeros(())
    told = None if term is None else _told(term, layer.weight, started)
    stream = reduced if form == "samples" else _InOrder(reduced)
    return GramTraining(layer, samples, origin, along, known, known_along, objective, started, stream, told)


def _at(values: Tensor, rows: Tensor | slice) -> Tensor:
    return values[rows] if isinstance(rows, slice) else rows_of(values, rows)


@dataclass(frozen=True)
class _InOrder:
    """Minibatches that lie in the pool one after the other; of the Gram matrix, what is before them."""

    batches: Batches

    @property
    def device(self) -> torch.device:
        """Where the data is."""
        return self.batches.device

    @property
    def padding(self) -> Padding:
        """What is known of it."""
        return self.batches.padding

    def each(self) -> Iterator[Batch]:
        """Yield the minibatches in order."""
        x, y, rows, real, key, *_ = self.batches
        for step, width in enumerate([rows.shape[1]] * rows.shape[0]):
            own = slice(step * width, (step + 1) * width)
            yield Batch(x[own, : own.start], y[own], real[step], key[step], rows=own)


def _direction(term: Quadratic, weight: str, origin: Tensor) -> Tensor | None:
    """Return D, the gradient of a term at W₀; None if it is known to be 0."""
    slope, anchor = term.parts(weight)
    pulled = None if anchor is None or anchor is origin else term.strength * (origin - anchor)
    decayed = term.decay * origin if term.decay else None
    parts = [part for part in (slope, pulled, decayed) if part is not None]
    return functools.reduce(torch.add, parts) if parts else None


def _told(term: Quadratic, weight: str, start: Params) -> Quadratic:
    """Return the term of A and s."""
    slope, anchor = dict(term.slope or {}), dict(term.anchor or {})
    slope.pop(weight, None)
    if _ALONG in start:
        slope[_ALONG] = torch.ones_like(start[_ALONG])
    if weight in anchor:
        anchor |= {name: torch.zeros_like(start[name]) for name in (weight, _ALONG) if name in start}
    return Quadratic(slope or None, anchor or None, term.strength, term.decay)


def _cheapest(
    objective: MeanLoss, shape: torch.Size, batches: Batches, products: int
) -> Literal["samples", "steps"] | None:
    """Say whether Z has each sample once, or those of each step; None if neither pays, or does not fit."""
    (outputs, inputs), entries = shape, batches.rows.numel()

    def work(rows: int, share: float) -> float:
        fits = 0 < rows * (inputs + products * outputs + rows) <= _COPIES * objective.net.parameters
        return rows * inputs * (products * outputs + rows) + share * entries * rows * outputs if fits else math.inf

    samples, steps = work(most_distinct(batches), 1), work(entries, 0.5)
    gains = _ROUNDED_GAIN if rounding(batches.rows) else _GAIN
    gain = gains.get(batches.device.type, gains["cpu"])
    if min(samples, steps) >= gain * 2 * entries * inputs * outputs:
        return None
    return "samples" if samples <= steps else "steps"
