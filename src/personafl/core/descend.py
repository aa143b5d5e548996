"""The training loop: every algorithm trains through `descend`, for one client, as a pure function.

For each minibatch B, from x and the optimizer's state s,

    g = ∇objective(y; B) + ∇term(y),   y = look(x, s): x itself, or ahead of it if the optimizer looks there
    d, s′ = update(g, s, x)
    x, s ← prox(x + d), s′

A minibatch without real samples, which is how a client with less data than its neighbours is padded, leaves x and s as
they are. A step may also look at several minibatches (`Zipped`), or many steps at one (`Repeated`). Where samples are
protected, a noisy sum of their clipped gradients takes the place of ∇objective (`core.samples`).

This is what training means. Executors may compute it otherwise (`core.seam`), with equal results up to rounding.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.func import grad_and_value, vjp

from personafl.core import tree
from personafl.core.batches import Batch, Step, Stream
from personafl.core.optim import Optimizer
from personafl.core.prox import Prox
from personafl.core.samples import guarded
from personafl.core.seam import replaceable
from personafl.core.tree import Params, Tree


def pull(w: Params, anchor: Params, strength: float) -> Tensor:
    """Return (strength/2)‖w − anchor‖²."""
    offset = tree.sub(w, anchor)
    return 0.5 * strength * tree.dot(offset, offset)


class Quadratic(NamedTuple):
    """The term ⟨slope, w⟩ + (strength/2)‖w − anchor‖² + (decay/2)‖w‖².

    The first two parts may be missing, also for some parameters. Its gradient is slope + strength·(w − anchor) +
    decay·w: training that is told so (`descend`) adds it to a step in few passes over w, where to differentiate an
    objective with the term in it takes many.
    """

    slope: Params | None = None
    anchor: Params | None = None
    strength: float = 0.0
    decay: float = 0.0

    def onto(self, gradient: Params, w: Params) -> Params:
        """Return a gradient with that of the term at w added."""
        return {name: self._onto(name, g, w[name]) for name, g in gradient.items()}

    def parts(self, name: str) -> tuple[Tensor | None, Tensor | None]:
        """Return the slope and the anchor of one parameter."""
        return (self.slope or {}).get(name), (self.anchor or {}).get(name)

    def has(self, name: str) -> bool:
        """Say whether there is a term of one parameter."""
        return self.decay != 0 or any(part is not None for part in self.parts(name))

    def _onto(self, name: str, gradient: Tensor, value: Tensor) -> Tensor:
        slope, anchor = self.parts(name)
        if slope is not None:
            gradient = gradient + slope
        if anchor is not None:
            gradient = torch.add(gradient, value - anchor, alpha=self.strength)
        return torch.add(gradient, value, alpha=self.decay) if self.decay else gradient


S = TypeVar("S", bound=Step)
B = TypeVar("B")
Objective = Callable[[Params, S], Tensor]


@replaceable
def gradient_and_value(objective: Callable[[Params, B], Tensor], params: Params, batch: B) -> tuple[Params, Tensor]:
    """Return ∇objective(params; batch) with respect to params, and the objective; of protected samples a noisy one."""
    if isinstance(batch, Batch) and batch.guard:
        return guarded(objective, params, batch, batch.guard)  # type: ignore[arg-type]
    gradient, value = grad_and_value(objective)(params, batch)
    return gradient, value


@replaceable
def pullback(
    function: Callable[[Params, B], Tensor], params: Params, batch: B
) -> tuple[Tensor, Callable[[Tensor], Params]]:
    """Return y = function(params; batch), and what takes a gradient in y, once, to that in params."""
    value, back, *_ = vjp(lambda own: function(own, batch), params)
    return value, lambda gradient: back(gradient)[0]


@replaceable
def moved(optimizer: Optimizer, gradient: Params, state: Tree, params: Params) -> tuple[Params, Tree]:
    """Return the parameters after an optimizer's step, and its state."""
    step, state = optimizer.update(gradient, state, params)
    return tree.add(params, step), state


@replaceable
def descend(
    objective: Objective[S],
    start: Params,
    batches: Stream[S],
    optimizer: Optimizer,
    prox: Prox | None = None,
    term: Quadratic | None = None,
) -> tuple[Params, Tensor]:
    """Return the last x, and the mean over the steps taken of the objective, without the term, at y."""
    params, _, loss = descend_from(objective, start, optimizer.init(start), batches, optimizer, prox, term)
    return params, loss


@replaceable
def descent(
    objective: Objective[S],
    start: Params,
    batches: Stream[S],
    optimizer: Optimizer,
    prox: Prox | None = None,
    term: Quadratic | None = None,
) -> tuple[Params, Tensor]:
    """Return how far `descend` goes, the last x − start, and the mean objective."""
    params, loss = descend(objective, start, batches, optimizer, prox, term)
    return tree.sub(params, start), loss


@replaceable
def descend_from(
    objective: Objective[S],
    start: Params,
    state: Tree,
    batches: Stream[S],
    optimizer: Optimizer,
    prox: Prox | None = None,
    term: Quadratic | None = None,
) -> tuple[Params, Tree, Tensor]:
    """Do the same from an optimizer's state, and return x, the optimizer's last state and the mean objective."""
    params = start
    total = taken = torch.zeros((), device=batches.device)
    for batch in batches.each():
        here = optimizer.look(params, state)
        gradient, value = gradient_and_value(objective, here, batch)
        if term is not None:
            gradient = term.onto(gradient, here)
        x, stepped = moved(optimizer, gradient, state, params)
        if prox is not None:
            x = prox(x)
        alive = batch.alive
        params, state = tree.where(alive, (x, stepped), (params, state))
        total, taken = total + torch.where(alive, value, 0.0), taken + alive
    return params, state, total / taken.clamp(min=1)
