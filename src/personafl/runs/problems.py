"""What the clients of a run solve: the networks that its recipe names."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from personafl.core.algorithm import Algorithm, Problem
from personafl.core.losses import Loss, Metric
from personafl.core.net import Net
from personafl.core.split import Split
from personafl.core.tasks import task_named
from personafl.data.federated import FederatedData
from personafl.errors import BadInput
from personafl.models.network import SharedNetwork
from personafl.recipe.recipe import Recipe

Maker = Callable[..., tuple[Net, Split | None]]  # as `make_net_and_split`


def make_problems(
    recipe: Recipe,
    algorithm: Algorithm,
    data: FederatedData,
    model: nn.Module | None,
    make: Maker,
    device: torch.device,
    dtype: torch.dtype,
    loss: Loss | None = None,
    metrics: Mapping[str, Metric] | None = None,
) -> tuple[Problem, ...]:
    """Return the problem of each device profile, or the one of all.

    `model` replaces the recipe's network, `loss` the task's, and `metrics` are scored beside its own.
    """
    net, split = _shared(recipe, algorithm, data, model, make)
    task = task_named(data.task)
    weights = recipe.training.class_weights
    if loss or metrics or weights:
        from personafl.runs.functions import check_functions, weighted  # here, for few devices have any of them

        check_functions(loss, metrics or {}, net, data)
        loss = loss or weighted(weights, data, task.loss, device, dtype)
    net = net.to(device, dtype)
    headed = None
    if algorithm.head is not None:
        from personafl.core.heads import with_head  # few methods have one

        headed = with_head(net, split, algorithm.head)
    shared = Problem(
        net,
        loss or task.loss,
        local_net=headed,
        split=split,
        correct=task.correct,
        divergence=task.divergence,
        metrics=(*_metrics(data), *(metrics or {}).items()),
        data=data.shape,
    )
    if not recipe.devices:
        return (shared,)
    from personafl.runs.ownproblems import problems_of  # here, for few recipes have kinds of devices

    return problems_of(recipe, shared, data, model, device, dtype)


def _metrics(data: FederatedData) -> tuple[tuple[str, Metric], ...]:
    """Return what a task measures beside its score."""
    if data.task in ("classification", "next-token"):
        return ()
    from personafl.evaluate.metrics import metrics_of  # here, for most devices have classes

    return metrics_of(data)


def shared_network(recipe: Recipe, algorithm: Algorithm, data: FederatedData) -> SharedNetwork:
    """Return the network that a recipe names for all, with what "auto" and the method's own default stand for."""
    personal = recipe.model.personal or algorithm.personal
    return recipe.model.resolved(data).model_copy(update={"personal": personal})


def _shared(
    recipe: Recipe, algorithm: Algorithm, data: FederatedData, model: nn.Module | None, make: Maker
) -> tuple[Net, Split | None]:
    """Return the shared network and its split."""
    try:
        return make(shared_network(recipe, algorithm, data), data, model)
    except BadInput as error:
        if recipe.model.personal is None and str(error).startswith("model.personal:"):
            raise BadInput(f"{error} ({algorithm.personal!r} is the default of {algorithm.name})") from error
        raise
