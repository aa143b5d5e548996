"""How well models do on clients' data: what became of each sample, and accuracy and loss per client.

Models are run for many clients at a time, and what they say of a sample does not depend on who else is in the pass (but
for rounding); sums over samples are in float64. Where the next token is predicted a client's numbers are means over its
tokens that count: a short text has less of a say than a long one, and padding has none.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap

from personafl.core.algorithm import Problem
from personafl.core.losses import Metric, cross_entropy
from personafl.core.net import Net
from personafl.core.tree import Params
from personafl.data.federated import FederatedData, Ragged, runs_of
from personafl.errors import BadInput
from personafl.evaluate.choice import Gains
from personafl.evaluate.metrics import measured
from personafl.fast.table import enabled

Rows = NDArray[np.int64]
Values = NDArray[np.float64]
PASS = 8192  # samples in a forward pass, of all stacked clients together
_MEMORY = 2**32  # bytes of what they would keep for gradients, of which a pass has a part at a time
_PADDING = 32  # rows of padding per client that take less time than a copy of its model


@dataclass(frozen=True)
class Scores:
    """Per client, in the order asked for: share of correct predictions, mean loss, number of samples (may be 0).

    For other tasks than classes, `accuracy` is the mean of their score; further metrics are there by name.
    """

    accuracy: Values
    loss: Values
    samples: Rows
    metrics: Mapping[str, Values] = field(default_factory=dict)

    def measures(self) -> dict[str, Values]:
        """Return what there is of each client by name."""
        return {"accuracy": self.accuracy, "loss": self.loss, **self.metrics}


def picked(options: Sequence[Scores], picks: Rows) -> Scores:
    """Return for each client the scores of the option that it picked."""
    everyone = np.arange(len(picks))
    names = options[0].measures()
    columns = {name: np.stack([scores.measures()[name] for scores in options])[picks, everyone] for name in names}
    return Scores(columns.pop("accuracy"), columns.pop("loss"), options[0].samples, columns)


@dataclass(frozen=True)
class Outcomes:
    """What became of each sample, client after client: 1 where the model is right, and its loss."""

    hits: Values  # [samples]
    losses: Values  # [samples]
    sizes: Rows  # [clients] samples of each one
    metrics: Mapping[str, Values] = field(default_factory=dict)  # [clients] each
    tokens: Rows | None = None  # [samples] of each one so many are scored; None: samples count alike

    def scores(self) -> Scores:
        """Return means per client; NaN where there is no sample."""
        return Scores(self.mean(self.hits), self.mean(self.losses), self.sizes, self.metrics)

    def mean(self, values: Values) -> Values:
        """Return the means over what counts of each client, of the means of samples; NaN where nothing does."""
        counts = np.ones(len(values)) if self.tokens is None else self.tokens.astype(np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            means: Values = self._sum(counts * values) / self._sum(counts)
            return means

    def gains_over(self, other: Outcomes) -> Gains:
        """Compare with another model's outcomes of the same samples, one by one."""
        right, sure = self.hits - other.hits, np.exp(-self.losses) - np.exp(-other.losses)
        return Gains(
            right=self._sum(right),
            right_squared=self._sum(right**2),
            sure=self._sum(sure),
            sure_squared=self._sum(sure**2),
            right_sure=self._sum(right * sure),
            samples=self.sizes,
        )

    def of(self, clients: Rows) -> Outcomes:
        """Return those of some clients, given by their places here."""
        sizes = self.sizes[clients]
        samples = runs_of((np.cumsum(self.sizes) - self.sizes)[clients], sizes)
        metrics = {name: values[clients] for name, values in self.metrics.items()}
        tokens = None if self.tokens is None else self.tokens[samples]
        return Outcomes(self.hits[samples], self.losses[samples], sizes, metrics, tokens)

    @classmethod
    def joined(cls, parts: Sequence[Outcomes]) -> Outcomes:
        """Return the outcomes of some clients and then those of others."""
        hits, losses = (np.concatenate([getattr(part, name) for part in parts]) for name in ("hits", "losses"))
        metrics = {name: np.concatenate([part.metrics[name] for part in parts]) for name in parts[0].metrics}
        counted = [part.tokens for part in parts if part.tokens is not None]
        tokens = np.concatenate(counted) if counted else None
        return cls(hits, losses, np.concatenate([part.sizes for part in parts]), metrics, tokens)

    def _sum(self, values: Values) -> Values:
        owner = np.repeat(np.arange(len(self.sizes)), self.sizes)
        return np.bincount(owner, values, minlength=len(self.sizes)).astype(np.float64)


@enabled()
@torch.no_grad()
def try_shared(problem: Problem, params: Params, data: FederatedData, rows: Ragged, clients: Rows) -> Outcomes:
    """Try one model (in `net`) on each client's rows, all rows in one pass."""
    net, sizes = problem.net, rows.sizes_of(clients)
    if net.batch_dependent:  # batches may not mix clients then
        stacked = {name: value.expand(len(clients), *value.shape) for name, value in params.items()}
        return _try_each(net, problem, stacked, data, rows, clients)
    trial, every = _Trial(net, problem), rows.of(clients)
    return trial.outcomes(_alone(trial, params, data, every, _at_once(net)), data, every, sizes)


@enabled()
@torch.no_grad()
def try_personal(problem: Problem, stacked: Params, data: FederatedData, rows: Ragged, clients: Rows) -> Outcomes:
    """Try each client's own model (in `personal_net`, stacked in the order of `clients`) on its own rows.

    What clients have in common may be expanded rather than copied, and is then computed for all at once. Fastest with
    clients in the order of their number of rows, as those of similar size are run together.
    """
    return _try_each(problem.personal_net, problem, stacked, data, rows, clients)


def _try_each(
    net: Net, problem: Problem, stacked: Params, data: FederatedData, rows: Ragged, clients: Rows
) -> Outcomes:
    sizes, starts, device = rows.sizes_of(clients), rows.offset[clients], data.device
    trial, axes = _Trial(net, problem), {name: 0 if value.stride(0) else None for name, value in stacked.items()}
    # One convolution with the kernels of many clients is slower on a CPU than many convolutions.
    kernels = net.convolutional and any(stacked[name].ndim > 3 for name, axis in axes.items() if axis is not None)
    found: Values | None = None
    first = np.cumsum(sizes) - sizes  # where each client's outcomes begin
    alone = net.unstackable is not None or (kernels and device.type == "cpu")
    most = _at_once(net)
    for members in _similar(sizes, 1 if alone else len(clients), most):
        position = np.arange(sizes[members].max())
        real = position < sizes[members, None]
        table = rows.flat[starts[members, None] + np.minimum(position, sizes[members, None] - 1)]  # padded: last row
        if len(members) == 1:
            params = {name: value[members[0]] for name, value in stacked.items()}
            step = len(position) if net.batch_dependent else most
            values = _alone(trial, params, data, table[0], step)
        else:
            span = _span(members)
            params = {name: value[0] if axes[name] is None else value[span] for name, value in stacked.items()}
            inputs = *data.samples(table), torch.from_numpy(real).to(device)
            values = _numbers(vmap(trial, in_dims=(axes, 0, 0, 0), out_dims=1)(params, *inputs))[:, real]
        found = np.zeros((len(values), int(sizes.sum()))) if found is None else found
        found[:, (first[members, None] + position)[real]] = values
    return trial.outcomes(np.zeros((2, 0)) if found is None else found, data, rows.of(clients), sizes)


class _Trial:
    """Tries a model on samples: rows of hits and losses, and where there are metrics of all that it says of each."""

    def __init__(self, net: Net, problem: Problem) -> None:
        self.net, self.problem = net, problem
        self._shape: tuple[int, ...] = ()  # of the outputs of a sample

    def __call__(self, params: Params, x: Tensor, y: Tensor, real: Tensor) -> Tensor:
        output = self.net.apply(params, x, real)
        hits, losses = self.problem.correct(output, y), self.problem.loss(output, y)
        scores = torch.stack([hits.to(losses.dtype), losses])
        if not self.problem.metrics:
            return scores
        self._shape = tuple(output.shape[1:])
        return torch.cat([scores, output.flatten(1).T.to(losses.dtype)])

    def outcomes(self, found: Values, data: FederatedData, rows: Rows, sizes: Rows) -> Outcomes:
        """Name what trials found of clients' rows, one client after the other, and measure each client."""
        metrics = {name: np.full(len(sizes), np.nan) for name, _ in self.problem.metrics}
        ends = np.cumsum(sizes)
        for client in np.flatnonzero(sizes) if metrics else ():
            own = slice(ends[client] - sizes[client], ends[client])
            _, y = data.samples(rows[own])
            kind = y.dtype if y.is_floating_point() else torch.float32
            outputs = torch.from_numpy(found[2:, own].T.copy()).to(y.device, kind).reshape(-1, *self._shape)
            for name, metric in self.problem.metrics:
                metrics[name][client] = _value(name, metric, outputs, y)
        if self.problem.data.task != "next-token":
            return Outcomes(found[0], found[1], sizes, metrics)
        outcomes = Outcomes(found[0], found[1], sizes, metrics, (data.y[rows] >= 0).sum(-1).cpu().numpy())
        if self.problem.loss is cross_entropy:
            with np.errstate(over="ignore"):  # of a model that diverged
                metrics["perplexity"] = np.exp(outcomes.mean(outcomes.losses))
        return outcomes


def _value(name: str, metric: Metric, outputs: Tensor, targets: Tensor) -> float:
    """Return a client's metric; NaN, with a warning, where it has none: some need samples of two classes, say."""
    try:
        return measured(name, metric, outputs, targets)
    except BadInput as error:
        warnings.warn(f"{error}; a client is left out of its mean", stacklevel=2)
        return math.nan


def _alone(trial: _Trial, params: Params, data: FederatedData, rows: Rows, step: int) -> Values:
    """Try one model on rows, so many at a time."""
    parts = [np.zeros((2, 0))] if not len(rows) else []
    for start in range(0, len(rows), step):
        x, y = data.samples(rows[start : start + step])
        every = torch.ones(len(x), dtype=torch.bool, device=data.device)
        parts.append(_numbers(trial(params, x, y, every)))
    return np.concatenate(parts, axis=1)


def _at_once(net: Net) -> int:
    """Return how many samples one pass takes: fewer of those that are large in memory."""
    return min(PASS, max(1, _MEMORY // max(1, net.sample_bytes)))


def _similar(sizes: Rows, most: int, samples: int) -> Iterator[Rows]:
    """Cut clients with rows into groups that one pass can take, padded to the largest of each.

    Sorted by size, unless padding costs less than copying models out of order.
    """
    order = np.argsort(sizes, kind="stable")
    if sizes.min(initial=1) > 0 and (sizes.max(initial=0) - sizes).sum() <= _PADDING * len(sizes):
        order = np.arange(len(sizes))
    order = order[sizes[order] > 0]
    start = 0
    while start < len(order):
        end, largest = start + 1, sizes[order[start]]
        while end < len(order) and end - start < most:
            largest = max(largest, sizes[order[end]])
            if (end + 1 - start) * largest > samples:
                break
            end += 1
        yield order[start:end]
        start = end


def _span(members: Rows) -> slice | Rows:
    """Return neighbours as a slice, which copies nothing."""
    return slice(members[0], members[-1] + 1) if (np.diff(members) == 1).all() else members


def _numbers(values: Tensor) -> Values:
    return values.to(torch.float64).cpu().numpy()
