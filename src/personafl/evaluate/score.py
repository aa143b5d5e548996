"""How well models do on clients' data: accuracy and loss per client, batched over clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap

from personafl.core.algorithm import Problem
from personafl.core.net import Net
from personafl.core.tree import Params
from personafl.data.federated import FederatedData, Ragged
from personafl.evaluate.choice import Gains

__all__ = ["Scores", "paired_gains", "score_personal", "score_shared"]

Values = NDArray[np.float64]
# Samples per forward pass, over all stacked clients together.
_SAMPLES = 8192


@dataclass(frozen=True)
class Scores:
    """Per client, in the order asked for: share of correct predictions, mean loss, number of samples (may be 0)."""

    accuracy: NDArray[np.float64]
    loss: NDArray[np.float64]
    samples: NDArray[np.int64]


@torch.no_grad()
def score_shared(
    problem: Problem, params: Params, data: FederatedData, rows: Ragged, clients: NDArray[np.int64]
) -> Scores:
    """Score one model (in `net`) on each client's rows, all rows in one pass."""
    net = problem.net
    if net.batch_dependent:  # batches may not mix clients then
        stacked = {name: value.expand(len(clients), *value.shape) for name, value in params.items()}
        return _means(*_sums(_hits_and_losses(net, problem, data), 2, net, stacked, data, rows, clients))
    flat = np.concatenate([rows[int(client)] for client in clients]) if len(clients) else np.zeros(0, np.int64)
    sizes = rows.offset[clients + 1] - rows.offset[clients]
    hits, losses = np.zeros(len(flat)), np.zeros(len(flat))
    for start in range(0, len(flat), _SAMPLES):
        part = torch.from_numpy(flat[start : start + _SAMPLES]).to(data.x.device)
        output, target = net.apply(params, data.x[part]), data.y[part]
        hits[start : start + len(part)] = problem.correct(output, target).cpu()
        losses[start : start + len(part)] = problem.loss(output, target).cpu()
    owner = np.repeat(np.arange(len(clients)), sizes)
    totals = [np.bincount(owner, values, minlength=len(clients)) for values in (hits, losses)]
    return _means(np.stack(totals).astype(np.float64), sizes)


@torch.no_grad()
def score_personal(
    problem: Problem, stacked: Params, data: FederatedData, rows: Ragged, clients: NDArray[np.int64]
) -> Scores:
    """Score each client's own model (in `personal_net`, stacked in the order of `clients`) on its own rows."""
    net = problem.personal_net
    return _means(*_sums(_hits_and_losses(net, problem, data), 2, net, stacked, data, rows, clients))


@torch.no_grad()
def paired_gains(
    problem: Problem, shared: Params, stacked: Params, data: FederatedData, rows: Ragged, clients: NDArray[np.int64]
) -> Gains:
    """Compare each client's own model with the shared one, sample by sample, on its own rows."""
    net = problem.net

    def one(params: Params, own: Tensor, real: Tensor) -> Tensor:
        target = data.y[own]
        outputs = [net.apply(model, data.x[own], real) for model in (shared, params)]
        right = problem.correct(outputs[1], target) - problem.correct(outputs[0], target)
        sure = (-problem.loss(outputs[1], target)).exp() - (-problem.loss(outputs[0], target)).exp()
        products = (right, right**2, sure, sure**2, right * sure)
        return torch.stack([(value * real).sum() for value in products])

    sums, sizes = _sums(one, 5, net, stacked, data, rows, clients)
    right, right_squared, sure, sure_squared, right_sure = sums
    return Gains(right, right_squared, sure, sure_squared, right_sure, sizes)


One = Callable[[Params, Tensor, Tensor], Tensor]  # (a model, rows, which count) -> sums over the rows [k]


def _hits_and_losses(net: Net, problem: Problem, data: FederatedData) -> One:
    def one(params: Params, own: Tensor, real: Tensor) -> Tensor:
        output, target = net.apply(params, data.x[own], real), data.y[own]
        return torch.stack(
            [(value * real).sum() for value in (problem.correct(output, target), problem.loss(output, target))]
        )

    return one


def _sums(
    one: One, width: int, net: Net, stacked: Params, data: FederatedData, rows: Ragged, clients: NDArray[np.int64]
) -> tuple[Values, NDArray[np.int64]]:
    """Return `one`'s sums for every client, [width, clients], and the number of its rows."""
    sizes = rows.offset[clients + 1] - rows.offset[clients]
    if not sizes.sum():
        return np.zeros((width, len(clients))), sizes
    if net.convolutional and data.x.device.type == "cpu":
        own = [rows[int(client)] for client in clients]
        return _one_by_one(one, width, stacked, net.batch_dependent, data, own), sizes
    return _stacked(one, stacked, net.batch_dependent, data, rows, clients), sizes


def _one_by_one(
    one: One, width: int, stacked: Params, whole: bool, data: FederatedData, own: list[NDArray[np.int64]]
) -> Values:
    """Sum client by client; `whole`: a client's rows go through together."""
    sums = np.zeros((width, len(own)))
    for client, rows in enumerate(own):
        params = {name: value[client] for name, value in stacked.items()}
        step = max(len(rows), 1) if whole else _SAMPLES
        for start in range(0, len(rows), step):
            part = torch.from_numpy(rows[start : start + step]).to(data.x.device)
            real = torch.ones_like(part, dtype=torch.bool)
            sums[:, client] += one(params, part, real).to(torch.float64).cpu().numpy()
    return sums


def _stacked(
    one: One, stacked: Params, whole: bool, data: FederatedData, rows: Ragged, clients: NDArray[np.int64]
) -> Values:
    """Sum for all clients at a time, each padded to the largest with its last row."""
    starts = rows.offset[clients]
    sizes = rows.offset[clients + 1] - starts
    largest = int(sizes.max())
    position = np.arange(largest)
    index = starts[:, None] + np.minimum(position, np.maximum(sizes - 1, 0)[:, None])
    # A client without rows may start where the rows end.
    table = torch.from_numpy(rows.flat[np.minimum(index, len(rows.flat) - 1)]).to(data.x.device)
    real = torch.from_numpy(position < sizes[:, None]).to(data.x.device)
    step = max(1, largest if whole else _SAMPLES // max(len(clients), 1))
    total: Values = np.zeros((1, 1))
    for start in range(0, largest, step):
        columns = slice(start, start + step)
        sums = vmap(one)(stacked, table[:, columns], real[:, columns])  # [clients, k]
        total = total + sums.to(torch.float64).cpu().numpy().T
    return total


def _means(sums: Values, sizes: NDArray[np.int64]) -> Scores:
    with np.errstate(invalid="ignore", divide="ignore"):
        return Scores(sums[0] / sizes, sums[1] / sizes, sizes)
