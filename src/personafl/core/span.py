"""A first layer's weights in the span of its inputs: epochs after the first cost it next to nothing.

The gradient of W in o = W z + b is a sum of g zᵀ over samples. Steps that are linear in gradients (SGD, momentum) so
keep W = W₀ + AᵀZ, where Z [n, in] are the layer's inputs for the samples that the client sees, and A [n, out] has a row
for each. If no trained parameter has a say in Z, it stays the same from step to step, and

    o_B = Z_B W₀ᵀ + (Z_B Zᵀ) A + b;   A_B ← A_B − γ g_B for each minibatch B

is the same training. Z W₀ᵀ and the Gram matrix Z Zᵀ are computed once, W at the end: with e epochs

    n·in·(2·out + n) + e·n²·out   multiply-adds in place of   2·e·n·in·out.

A term ⟨c, W⟩ + (μ/2)‖W − V‖² is taken along: its gradient is D + μ(W − W₀) with a constant D = c + μ(W₀ − V), so that
W = W₀ + AᵀZ + s·D with one number s more, and Z Dᵀ is computed once too. Equal results up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from personafl.core.batches import Batch, Batches, rows_of
from personafl.core.cut import Entry, entry
from personafl.core.distinct import distinct, most_distinct
from personafl.core.layers import Layers, spread
from personafl.core.objective import MeanLoss
from personafl.core.optim import Optimizer
from personafl.core.stack import stack_around, transformed
from personafl.core.terms import Quadratic
from personafl.core.tree import Params

__all__ = ["Spanned", "in_span"]

_GAIN = 0.9  # of the multiply-adds that are left at most
_ALONG = "along the term"  # the name of s among the parameters
_COPIES = 8  # what is kept of a client's samples may take the memory of so many copies of its model


@dataclass(frozen=True)
class Spanned:
    """The same training, with A and s in the place of the layer's W."""

    layer: Entry
    samples: Tensor  # Z
    origin: Tensor  # W₀
    along: Tensor | None  # D, unless it is 0
    objective: MeanLoss
    start: Params
    batches: Batches
    term: Quadratic | None

    def __call__(self, params: Params, batch: Batch) -> Tensor:
        """Return the objective."""
        layer, values = self.layer, self.objective.fixed | params
        count = len(self.origin)
        known, gram = batch.x[..., :count], batch.x[..., -len(self.samples) :]
        if self.along is not None:
            known = known + params[_ALONG].detach() * batch.x[..., count : 2 * count]
        assert batch.rows is not None
        outputs = spread(known, gram, params[layer.weight], batch.rows)
        if layer.bias is not None:
            outputs = outputs + values[layer.bias]
        rest = MeanLoss(layer.rest, self.objective.loss, {name: values[name] for name in layer.rest.shapes})
        return rest({}, batch._replace(x=outputs))

    def weights(self, params: Params) -> Params:
        """Return the parameters with W in the place of A and s."""
        found = {name: value for name, value in params.items() if name != _ALONG}
        factors, stack = (self.origin, params[self.layer.weight].mT, self.samples), stack_around()
        weight = torch.addmm(*factors) if stack is None else stack.call(torch.baddbmm, *factors)
        return found | {self.layer.weight: weight if self.along is None else weight + params[_ALONG] * self.along}


def in_span(
    objective: MeanLoss, start: Params, batches: Batches, optimizer: Optimizer, term: Quadratic | None
) -> Spanned | None:
    """Return the same training with a first layer in the span of its inputs; None if that does not pay or exist."""
    if not optimizer.linear or (transformed() and stack_around() is None) or torch.is_autocast_enabled("cuda"):
        return None
    layer = entry(objective.net, start.keys(), batches.pool_x)
    if layer is None:
        return None
    origin = start[layer.weight]
    along = None if term is None else _direction(term, layer.weight, origin)
    if along is not None and optimizer.factor is None:  # s may not be treated as W is
        return None
    if not _pays(objective, origin.shape, batches, products=2 if along is None else 3):
        return None
    own, place = distinct(batches)
    below = {name: objective.fixed[name] for name in layer.features.shapes}
    with Layers(stack_around(), {}, factored=False):
        samples = layer.features.apply(below, rows_of(batches.pool_x, own))
    matrices = [origin, samples] if along is None else [origin, along, samples]
    pool = torch.cat([samples @ matrix.T for matrix in matrices], -1)
    reduced = batches._replace(pool_x=pool, pool_y=batches.pool_y[own], rows=place)
    started = start | {layer.weight: pool.new_zeros(len(samples), len(origin))}
    if along is not None:
        started[_ALONG] = pool.new_zeros(())
    told = None if term is None else _told(term, layer.weight, started)
    return Spanned(layer, samples, origin, along, objective, started, reduced, told)


def _direction(term: Quadratic, weight: str, origin: Tensor) -> Tensor | None:
    """Return D, the gradient of a term at W₀; None if it is known to be 0."""
    slope, anchor = term.parts(weight)
    pulled = None if anchor is None or anchor is origin else term.strength * (origin - anchor)
    return pulled if slope is None else slope if pulled is None else slope + pulled


def _told(term: Quadratic, weight: str, start: Params) -> Quadratic:
    """Return the term of A and s."""
    slope, anchor = dict(term.slope or {}), dict(term.anchor or {})
    slope.pop(weight, None)
    if _ALONG in start:
        slope[_ALONG] = torch.ones_like(start[_ALONG])
    if weight in anchor:
        anchor |= {name: torch.zeros_like(start[name]) for name in (weight, _ALONG) if name in start}
    return Quadratic(slope or None, anchor or None, term.strength)


def _pays(objective: MeanLoss, shape: torch.Size, batches: Batches, products: int) -> bool:
    """Say whether it is less work, and fits."""
    (outputs, inputs), seen = shape, most_distinct(batches)
    plain = 2 * batches.rows.numel() * inputs * outputs
    spanned = seen * inputs * (products * outputs + seen) + batches.rows.numel() * seen * outputs
    fits = seen * (inputs + products * outputs + seen) <= _COPIES * objective.net.parameters
    return seen > 0 and fits and spanned < _GAIN * plain
