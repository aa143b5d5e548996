"""The training loop of `core.descend`, in fewer operations.

Where the objective is a network's mean loss, work that is the same in every step is done once: `fast.frozen`,
`fast.gram`. Augmented inputs differ from step to step, and there is no such work. A plain step never writes the
gradient of a linear layer (`fast.gradient`), and parameters that nobody else has are stepped in their own memory.
"""

from typing import Any

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.batches import Batches
from personafl.core.descend import Quadratic
from personafl.core.losses import MeanLoss
from personafl.core.optim import Optimizer, chain
from personafl.core.prox import Prox
from personafl.core.tree import Params, Tree
from personafl.fast.frozen import on_features
from personafl.fast.gradient import gradient_and_value, moved, number, step
from personafl.fast.gram import GramTraining, through_gram_matrix
from personafl.fast.minibatches import has_gaps
from personafl.fast.stack import differentiated


def descend(*given: Any, **options: Any) -> tuple[Params, Tensor]:
    """Return what `core.descend.descend` does."""
    params, loss, gram = _trained(*given, **options)
    return params if gram is None else gram.weights(params), loss


def descent(objective: Any, start: Params, *given: Any, **options: Any) -> tuple[Params, Tensor]:
    """Return what `core.descend.descent` does."""
    params, loss, gram = _trained(objective, start, *given, **options)
    return tree.sub(params, start) if gram is None else gram.change(params), loss


def _trained(
    objective: Any,
    start: Params,
    batches: Any,
    optimizer: Optimizer,
    prox: Prox | None = None,
    term: Quadratic | None = None,
) -> tuple[Params, Tensor, GramTraining | None]:
    """Return the last x and the mean objective, or those of the same training through a Gram matrix."""
    gram = None
    if optimizer.parts and optimizer.parts[0].decay:  # a term like others
        first, *rest = optimizer.parts
        optimizer, term = chain(*rest), (term or Quadratic())._replace(decay=first.decay)
    if isinstance(objective, MeanLoss) and isinstance(batches, Batches) and not (batches.augment or batches.guard):
        objective, batches = on_features(objective, start, batches)
        gram = through_gram_matrix(objective, start, batches, optimizer, term) if prox is None else None
    if gram is not None:
        objective, start, batches, term = gram, gram.start, gram.batches, gram.term
    params, _, loss = descend_from(objective, start, optimizer.init(start), batches, optimizer, prox, term)
    return params, loss, gram


def descend_from(
    objective: Any,
    start: Params,
    state: Tree,
    batches: Any,
    optimizer: Optimizer,
    prox: Prox | None = None,
    term: Quadratic | None = None,
) -> tuple[Params, Tree, Tensor]:
    """Return what `core.descend.descend_from` does."""
    params = start
    values: list[Tensor] = []
    counts: list[Tensor] = []
    gaps = has_gaps(batches)
    protected = bool(getattr(batches, "guard", ()))  # then gradients are sums of what is clipped, never factors
    factor = None if optimizer.factor is None or protected else number(optimizer.factor)
    # After the first step nobody else has the parameters, unless they are looked back at: then a step is in place.
    lasting = (gaps and factor is None) or prox is not None or differentiated()
    for count, batch in enumerate(batches.each()):
        alive = batch.alive if gaps else None
        owned = count > 0 and not lasting
        if factor is None:
            here = optimizer.look(params, state)
            gradient, value = gradient_and_value(objective, here, batch)
            gradient = gradient if term is None else term.onto(gradient, here)
            x, stepped = moved(optimizer, gradient, state, params, owned=owned)
        else:
            taken = alive if prox is None else None
            x, value = step(objective, params, batch, factor, taken, term=term, owned=owned)
            stepped = state
        if prox is not None:
            x = prox(x)
        if alive is not None:
            if factor is None or prox is not None:
                x, stepped = tree.where(alive, (x, stepped), (params, state))
            value = torch.where(alive, value, 0.0)
            counts.append(alive)
        values.append(value)
        params, state = x, stepped
    if not values:
        return params, state, torch.zeros((), device=batches.device)
    total = torch.stack(counts).sum().clamp(min=1) if counts else len(values)
    return params, state, torch.stack(values).sum() / total
