"""The training loop: every algorithm trains through `descend`, for one client, as a pure function.

For each minibatch B, from x and the optimizer's state s,

    g = ∇objective(y; B) + ∇term(y),   y = look(x, s): x itself, or ahead of it if the optimizer looks there
    d, s′ = update(g, s, x)
    x, s ← prox(x + d), s′

A minibatch without real samples, which is how a client with less data than its neighbours is padded, leaves x and s as
they are. A step may also look at several minibatches (`Zipped`), or many steps at one (`Repeated`).

This is what training means. Executors may compute it otherwise (`core.seam`), with equal results up to rounding.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.func import grad_and_value

from personafl.core import tree
from personafl.core.batches import Step, Stream
from personafl.core.optim import Optimizer
from personafl.core.prox import Prox
from personafl.core.seam import replaceable
from personafl.core.terms import Quadratic
from personafl.core.tree import Params, Tree

S = TypeVar("S", bound=Step)
Objective = Callable[[Params, S], Tensor]


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
        gradient, value = grad_and_value(objective)(here, batch)
        if term is not None:
            gradient = term.onto(gradient, here)
        step, stepped = optimizer.update(gradient, state, params)
        moved = tree.add(params, step)
        if prox is not None:
            moved = prox(moved)
        alive = batch.real.any()
        params, state = tree.where(alive, (moved, stepped), (params, state))
        total, taken = total + torch.where(alive, value, 0.0), taken + alive
    return params, state, total / taken.clamp(min=1)
