"""Training one part of a network while the rest is fixed: what only the fixed part decides is computed once.

With u fixed a network is head(v, features(u, x)), see `fast.halves`. Its features of a sample do not change from step
to step, so a phase that sees samples more than once computes them once, and its steps go through the head alone:

    z_j = features(u, x_j) for every sample j of the phase;   v ← v − γ ∇_v f(v; z_B, y_B) for each minibatch B

Where a network has no such features, or they would take too much memory, training is as ever; the result is the same up
to rounding.
"""

import torch

from personafl.core.batches import Batches
from personafl.core.losses import MeanLoss
from personafl.core.tree import Params
from personafl.fast.halves import Halves, halves_of
from personafl.fast.layers import Layers
from personafl.fast.minibatches import distinct_rows, most_distinct, rows_of
from personafl.fast.stack import stack_around

_COPIES = 8  # a client's features may take the memory of so many copies of its model
_BATCHES = 4  # features of so many batches are computed at a time: nothing is kept for a gradient


def on_features(objective: MeanLoss, start: Params, batches: Batches) -> tuple[MeanLoss, Batches]:
    """Return an objective of the same parameters, and batches for it, that take the same steps; or these themselves."""
    net, fixed = objective.net, objective.fixed
    divided = halves_of(net, start.keys(), batches.pool_x) if fixed else None
    reduced = None if divided is None else _reduced(divided, net.parameters, fixed, batches)
    if divided is None or reduced is None:
        return objective, batches
    head = divided.head
    constant = {name: fixed[name] for name in head.shapes if name in fixed}
    return MeanLoss(head, objective.loss, constant), reduced


def _reduced(divided: Halves, parameters: int, fixed: Params, batches: Batches) -> Batches | None:
    """Return the batches with features in place of inputs, from a pool of the client's own samples.

    None if that does not pay: no sample comes twice, or the features would fill the memory.
    """
    rows, most = batches.rows, most_distinct(batches)
    if not rows.numel() or most == rows.numel() or (rows.is_cuda and not most):
        return None
    own, place = distinct_rows(batches)
    if len(own) >= rows.numel() or len(own) * divided.size > _COPIES * parameters:
        return None
    body = {name: fixed[name] for name in divided.features.shapes}
    with Layers(stack_around(), {}, factored=False):
        parts = torch.split(own, _BATCHES * rows.shape[1])
        pieces = [divided.features.apply(body, rows_of(batches.pool_x, part)) for part in parts]
    return batches._replace(pool_x=torch.cat(pieces), pool_y=batches.pool_y[own], rows=place)
