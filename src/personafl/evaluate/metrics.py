"""What is measured of each client beside its task's score: errors in the units of the data, word error rates."""

import functools

import torch
from torch import Tensor

from personafl.core.losses import Metric
from personafl.data.federated import SPACE_NAME, FederatedData
from personafl.errors import BadInput
from personafl.options import users_code

Metrics = tuple[tuple[str, Metric], ...]


def metrics_of(data: FederatedData) -> Metrics:
    """Return the metrics that a task has by itself."""
    if data.task == "regression":
        units = (1.0,) * data.classes if data.scale is None else data.scale.std
        return ("rmse", functools.partial(rmse, units=units)), ("mae", functools.partial(mae, units=units))
    if data.task == "multilabel":
        return (("exact", exact),)
    if data.task == "ctc":
        from personafl.core.ctc import word_error  # here, for few devices align sequences

        return (("word_error", functools.partial(word_error, space=data.label_number(SPACE_NAME))),)
    return ()


def measured(name: str, metric: Metric, outputs: Tensor, targets: Tensor) -> float:
    """Return what a metric says of a client's samples: a number, or the mean of one for each sample."""
    with users_code(f"metrics[{name!r}]: failed on {len(targets)} samples"):
        value = metric(outputs, targets)
        found = value if isinstance(value, Tensor) else torch.as_tensor(value)
    if found.ndim and found.shape != targets.shape[:1]:
        raise BadInput(
            f"metrics[{name!r}]: returned shape {list(found.shape)} for {len(targets)} samples; return one number, or "
            f"one for each sample"
        )
    return float(found.to(torch.float64).mean())


def rmse(outputs: Tensor, targets: Tensor, units: tuple[float, ...]) -> Tensor:
    """Return the root of the mean squared error, in units of the data."""
    return _errors(outputs, targets, units).square().mean().sqrt()


def mae(outputs: Tensor, targets: Tensor, units: tuple[float, ...]) -> Tensor:
    """Return the mean absolute error, in units of the data."""
    return _errors(outputs, targets, units).abs().mean()


def exact(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return [samples] 1 where all labels are right, else 0."""
    return ((outputs > 0) == (targets > 0.5)).flatten(1).all(1).to(torch.float64)


def _errors(outputs: Tensor, targets: Tensor, units: tuple[float, ...]) -> Tensor:
    return (outputs - targets).to(torch.float64) * torch.tensor(units, dtype=torch.float64, device=outputs.device)
