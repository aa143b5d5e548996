"""Losses and metrics other than a task's own: functions of the user's, tried before anything is trained; weights."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from personafl.core.losses import Loss, Metric
from personafl.core.net import Net
from personafl.core.tasks import Weighted
from personafl.data.federated import FederatedData
from personafl.errors import BadInput
from personafl.evaluate.metrics import measured
from personafl.options import users_code

_TRIED = 32  # samples that a metric is tried on


def check_functions(loss: Loss | None, metrics: Mapping[str, Metric], net: Net, data: FederatedData) -> None:
    """Fail if the loss does not give one number for each sample, of many clients at once, or a metric none."""
    outputs, targets = net.probe(data.x[:_TRIED]).cpu(), data.y[:_TRIED].cpu()
    if targets.is_floating_point():
        targets = targets.to(outputs.dtype)
    if loss is not None:
        _check_loss(loss, outputs[:2], targets[:2])
    for name, metric in metrics.items():
        measured(name, metric, outputs, targets)


def _check_loss(loss: Loss, outputs: torch.Tensor, targets: torch.Tensor) -> None:
    with users_code("loss: cannot be used"):
        value = loss(outputs, targets)
    if not isinstance(value, torch.Tensor) or value.shape != targets.shape[:1]:
        found = f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise BadInput(f"loss: returned {found} for 2 samples; return one for each of them, as with reduction='none'")
    with users_code("loss: torch.func.vmap cannot batch it over clients; use operations of torch alone"):
        torch.func.vmap(loss)(outputs.expand(2, *outputs.shape), targets.expand(2, *targets.shape))


def weighted(
    given: Literal["balanced"] | Sequence[float] | None,
    data: FederatedData,
    loss: Loss,
    device: torch.device,
    dtype: torch.dtype,
) -> Loss:
    """Return a task's loss with the weights of classes that a recipe has."""
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
