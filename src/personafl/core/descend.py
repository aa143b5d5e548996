"""The training loop: every algorithm trains through `descend`, for one client, as a pure function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.batches import Batches, Step, Stream
from personafl.core.objective import MeanLoss
from personafl.core.optim import Optimizer
from personafl.core.prox import Prox
from personafl.core.terms import Quadratic
from personafl.core.tree import Params, Tree
from personafl.fast.frozen import on_features
from personafl.fast.gradient import gradient_and_value, step
from personafl.fast.span import Spanned, in_span
from personafl.fast.stack import differentiated

S = TypeVar("S", bound=Step)
Objective = Callable[[Params, S], Tensor]


def descend(
    objective: Objective[S],
    start: Params,
    batches: Stream[S],
    optimizer: Optimizer,
    prox: Prox | None = None,
    term: Quadratic | None = None,
) -> tuple[Params, Tensor]:
    """Minimise: for each minibatch B, x ← prox(x + step(∇objective(x; B) + ∇term(x))).

    Returns the last x and the mean of the objective, without the term, over the steps taken, each where its gradient
    was taken: at x, or ahead of it if the optimizer looks there. A minibatch without real samples, which is how a
    client with less data than its neighbours is padded, leaves x and the optimizer's state as they are.

    A step may also look at several minibatches (`Zipped`) or many steps at one (`Repeated`).

    Where the objective is a network's mean loss, work that is the same in every step is done once: `fast.frozen`,
    `fast.span`. Equal results up to rounding. Augmented inputs differ from step to step, and there is no such work.
    """
    params, loss, spanned = _trained(objective, start, batches, optimizer, prox, term)
    return params if spanned is None else spanned.weights(params), loss


def descent(
    objective: Objective[S],
    start: Params,
    batches: Stream[S],
    optimizer: Optimizer,
    prox: Prox | None = None,
    term: Quadratic | None = None,
) -> tuple[Params, Tensor]:
    """Return how far `descend` goes, the last x − start, and the mean objective."""
    params, loss, spanned = _trained(objective, start, batches, optimizer, prox, term)
    return tree.sub(params, start) if spanned is None else spanned.change(params), loss


def _trained(
    objective: Any, start: Params, batches: Any, optimizer: Optimizer, prox: Prox | None, term: Quadratic | None
) -> tuple[Params, Tensor, Spanned | None]:
    """Return the last x and the mean objective, or those of the same training in a span."""
    spanned = None
    if optimizer.apart is not None:
        decay, optimizer = optimizer.apart
        term = (term or Quadratic())._replace(decay=decay)
    if isinstance(objective, MeanLoss) and isinstance(batches, Batches) and not batches.augment:
        objective, batches = on_features(objective, start, batches)
        spanned = in_span(objective, start, batches, optimizer, term) if prox is None else None
    if spanned is not None:
        objective, start, batches, term = spanned, spanned.start, spanned.batches, spanned.term
    params, _, loss = descend_from(objective, start, optimizer.init(start), batches, optimizer, prox, term)
    return params, loss, spanned


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
    values: list[Tensor] = []
    counts: list[Tensor] = []
    factor = None if optimizer.factor is None else tree.number(optimizer.factor)
    # After the first step nobody else has the parameters, unless they are looked back at: then a step is in place.
    lasting = (batches.gaps and factor is None) or prox is not None or differentiated()
    for number, batch in enumerate(batches.each()):
        alive = batch.real.any() if batches.gaps else None
        owned = number > 0 and not lasting
        if factor is None:
            here = optimizer.look(params, state)
            gradient, value = gradient_and_value(objective, here, batch)
            gradient = gradient if term is None else term.onto(gradient, here)
            moved, stepped = optimizer.move(gradient, state, params, owned=owned)
        else:
            taken = alive if prox is None else None
            moved, value = step(objective, params, batch, factor, taken, term=term, owned=owned)
            stepped = state
        if prox is not None:
            moved = prox(moved)
        if alive is not None:
            if factor is None or prox is not None:
                moved, stepped = tree.where(alive, (moved, stepped), (params, state))
            value = torch.where(alive, value, 0.0)
            counts.append(alive)
        values.append(value)
        params, state = moved, stepped
    if not values:
        return params, state, torch.zeros((), device=batches.device)
    count = torch.stack(counts).sum().clamp(min=1) if counts else len(values)
    return params, state, torch.stack(values).sum() / count
