"""What the clients of a run solve: the networks that its recipe names."""

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import nn

from personafl.core.algorithm import Algorithm, Problem
from personafl.core.losses import Loss, Metric
from personafl.core.net import Net
from personafl.core.split import Split
from personafl.core.tasks import Weighted, task_named
from personafl.data.federated import FederatedData
from personafl.errors import BadInput
from personafl.models import make_net
from personafl.models.adapters import is_adapter
from personafl.models.network import Network, SharedNetwork
from personafl.options import users_code
from personafl.recipe.recipe import Recipe

_TRIED = 32  # samples that a metric of the user's is tried on before anything is trained
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
    shared = Problem(
        net.to(device, dtype),
        _weighted(recipe, data, task.loss, device, dtype) if loss is None else _tried(loss, net, data),
        split=split,
        correct=task.correct,
        divergence=task.divergence,
        metrics=(*_metrics(data), *_tried_metrics(metrics or {}, net, data)),
        data=data.shape,
    )
    if not recipe.devices:
        return (shared,)
    made = []
    if model is None and not any(map(is_adapter, net.shapes)):
        made.append((recipe.model.whole.resolved(data), net))
    problems = []
    for index, profile in enumerate(recipe.devices):
        own = None
        if profile.model is not None:
            own = _own_net(made, profile.model.resolved(data), data, f"devices[{index}]").to(device, dtype)
        local = None if own is net else own
        problems.append(dataclasses.replace(shared, local_net=local, bits=profile.bits, penalty=profile.penalty))
    return tuple(problems)


def _tried(loss: Loss, net: Net, data: FederatedData) -> Loss:
    """Return a loss of the user's; fail if it does not give one number for each sample, of many clients at once."""
    outputs, targets = net.probe(data.x[:2]).cpu(), data.y[:2].cpu()
    targets = targets.to(outputs.dtype) if targets.is_floating_point() else targets
    with users_code("loss: cannot be used"):
        value = loss(outputs, targets)
    if not isinstance(value, torch.Tensor) or value.shape != targets.shape[:1]:
        found = f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise BadInput(f"loss: returned {found} for 2 samples; return one for each of them, as with reduction='none'")
    with users_code("loss: torch.func.vmap cannot batch it over clients; use operations of torch alone"):
        torch.func.vmap(loss)(outputs.expand(2, *outputs.shape), targets.expand(2, *targets.shape))
    return loss


def _tried_metrics(metrics: Mapping[str, Metric], net: Net, data: FederatedData) -> tuple[tuple[str, Metric], ...]:
    """Return metrics of the user's; fail if one does not measure a few samples."""
    if metrics:
        from personafl.evaluate.metrics import measured  # here, for a device is given none

        for name, metric in metrics.items():
            measured(name, metric, net.probe(data.x[:_TRIED]).cpu(), data.y[:_TRIED].cpu())
    return tuple(metrics.items())


def _metrics(data: FederatedData) -> tuple[tuple[str, Metric], ...]:
    """Return what a task measures beside its score."""
    if data.task in ("classification", "next-token"):
        return ()
    from personafl.evaluate.metrics import metrics_of  # here, for most devices have classes

    return metrics_of(data)


def _weighted(recipe: Recipe, data: FederatedData, loss: Loss, device: torch.device, dtype: torch.dtype) -> Loss:
    """Return a task's loss with the weights of classes that a recipe has."""
    given = recipe.training.class_weights
    if given is None:
        return loss
    if data.task != "classification":
        raise BadInput(f"training.class_weights: is for classes, and the task of {data.name} is {data.task}; remove it")
    if given == "balanced":
        counts = torch.from_numpy(data.counts("train")[data.seen].sum(axis=0)).to(torch.float64)
        weights = torch.where(counts > 0, counts.sum() / (counts * (counts > 0).sum()).clamp(min=1), 1.0)
    elif len(given) != data.classes:
        raise BadInput(
            f"training.class_weights: has {len(given)} numbers, and {data.name} {data.classes} classes; give one each"
        )
    else:
        weights = torch.tensor(given, dtype=torch.float64)
    return Weighted(loss, weights.to(device, dtype))


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


def _own_net(made: list[tuple[Network, Net]], record: Network, data: FederatedData, where: str) -> Net:
    """Return the network of a record; equal records are one network, and what there is already is in `made`."""
    for known, net in made:
        if known == record:
            return net
    try:
        made.append((record, make_net(record, data)))
    except BadInput as error:
        raise BadInput(f"{where}.{error}") from error
    return made[-1][1]
