"""How well models do on clients' data: accuracy and loss per client, batched over clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap

from personafl.core.algorithm import Loss
from personafl.core.losses import correct
from personafl.core.net import Net
from personafl.core.tree import Params
from personafl.data.federated import FederatedData, Ragged

__all__ = ["Scores", "score_personal", "score_shared"]

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
    net: Net, loss: Loss, params: Params, data: FederatedData, rows: Ragged, clients: NDArray[np.int64]
) -> Scores:
    """Score one model on each client's rows, all rows in one pass."""
    if net.batch_dependent:  # batches may not mix clients then
        stacked = {name: value.expand(len(clients), *value.shape) for name, value in params.items()}
        return score_personal(net, loss, stacked, data, rows, clients)
    flat = np.concatenate([rows[int(client)] for client in clients]) if len(clients) else np.zeros(0, np.int64)
    sizes = rows.offset[clients + 1] - rows.offset[clients]
    hits, losses = np.zeros(len(flat)), np.zeros(len(flat))
    for start in range(0, len(flat), _SAMPLES):
        part = torch.from_numpy(flat[start : start + _SAMPLES]).to(data.x.device)
        output, target = net.apply(params, data.x[part]), data.y[part]
        hits[start : start + len(part)] = correct(output, target).cpu()
        losses[start : start + len(part)] = loss(output, target).cpu()
    owner = np.repeat(np.arange(len(clients)), sizes)
    return _means(_sums(owner, hits, len(clients)), _sums(owner, losses, len(clients)), sizes)


@torch.no_grad()
def score_personal(
    net: Net, loss: Loss, stacked: Params, data: FederatedData, rows: Ragged, clients: NDArray[np.int64]
) -> Scores:
    """Score each client's own model (stacked in the order of `clients`) on its own rows."""
    sizes = rows.offset[clients + 1] - rows.offset[clients]

    def one(params: Params, own: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        output, target = net.apply(params, data.x[own], real), data.y[own]
        return (correct(output, target) * real).sum(), (loss(output, target) * real).sum()

    if net.convolutional and data.x.device.type == "cpu":
        sums = _one_by_one(one, stacked, net.batch_dependent, data, [rows[int(client)] for client in clients])
    else:
        sums = _stacked(one, stacked, net.batch_dependent, data, rows, clients)
    return _means(sums[0], sums[1], sizes)


One = Callable[[Params, Tensor, Tensor], tuple[Tensor, Tensor]]


def _one_by_one(one: One, stacked: Params, whole: bool, data: FederatedData, own: list[NDArray[np.int64]]) -> Values:
    """Sum hits and losses [2, clients] client by client; `whole`: a client's rows go through together."""
    sums = np.zeros((2, len(own)))
    for client, rows in enumerate(own):
        params = {name: value[client] for name, value in stacked.items()}
        step = max(len(rows), 1) if whole else _SAMPLES
        for start in range(0, len(rows), step):
            part = torch.from_numpy(rows[start : start + step]).to(data.x.device)
            sums[:, client] += [float(value) for value in one(params, part, torch.ones_like(part, dtype=torch.bool))]
    return sums


def _stacked(
    one: One, stacked: Params, whole: bool, data: FederatedData, rows: Ragged, clients: NDArray[np.int64]
) -> Values:
    """Sum hits and losses [2, clients] for all clients at a time, each padded to the largest with its last row."""
    starts = rows.offset[clients]
    sizes = rows.offset[clients + 1] - starts
    largest = int(sizes.max(initial=0))
    position = np.arange(largest)
    index = starts[:, None] + np.minimum(position, np.maximum(sizes - 1, 0)[:, None])
    # A client without rows may start where the rows end.
    table = torch.from_numpy(rows.flat[np.minimum(index, len(rows.flat) - 1)] if largest else index).to(data.x.device)
    real = torch.from_numpy(position < sizes[:, None]).to(data.x.device)
    sums = np.zeros((2, len(clients)))
    step = max(1, largest if whole else _SAMPLES // max(len(clients), 1))
    for start in range(0, largest, step):
        columns = slice(start, start + step)
        results = vmap(one)(stacked, table[:, columns], real[:, columns])
        sums += torch.stack([value.to(torch.float64) for value in results]).cpu().numpy()
    return sums


def _sums(owner: NDArray[np.int64], values: NDArray[np.float64], clients: int) -> NDArray[np.float64]:
    return np.bincount(owner, values, minlength=clients).astype(np.float64)


def _means(hits: NDArray[np.float64], losses: NDArray[np.float64], sizes: NDArray[np.int64]) -> Scores:
    with np.errstate(invalid="ignore", divide="ignore"):
        return Scores(hits / sizes, losses / sizes, sizes)
