"""How well models do on clients' data: what became of each sample, and accuracy and loss per client.

Models are run for many clients at a time, and what they say of a sample does not depend on who else is in the pass (but
for rounding); sums over samples are in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap

from personafl.core.algorithm import Problem
from personafl.core.net import Net
from personafl.core.tree import Params
from personafl.data.federated import FederatedData, Ragged, runs_of
from personafl.evaluate.choice import Gains
from personafl.fast.table import enabled

Rows = NDArray[np.int64]
Values = NDArray[np.float64]
Try = Callable[
    [Params, Tensor, Tensor, Tensor], Tensor
]  # (a model, x, y, which are real) -> [hits, losses, …; samples]
_SAMPLES = 8192  # per forward pass, over all stacked clients together
_PADDING = 32  # rows of padding per client that take less time than a copy of its model


@dataclass(frozen=True)
class Scores:
    """Per client, in the order asked for: share of correct predictions, mean loss, number of samples (may be 0).

    Where targets are words, also the word error rate: wrong words / words of all samples; above 1 if many are too many.
    """

    accuracy: Values
    loss: Values
    samples: Rows
    word_error: Values | None = None

    def measures(self) -> dict[str, Values]:
        """Return what there is of each client by name."""
        named = {"accuracy": self.accuracy, "loss": self.loss, "word_error": self.word_error}
        return {name: values for name, values in named.items() if values is not None}


def picked(options: Sequence[Scores], picks: Rows) -> Scores:
    """Return for each client the scores of the option that it picked."""
    everyone = np.arange(len(picks))
    names = options[0].measures()
    columns = {name: np.stack([scores.measures()[name] for scores in options])[picks, everyone] for name in names}
    return Scores(samples=options[0].samples, **columns)


@dataclass(frozen=True)
class Outcomes:
    """What became of each sample, client after client: 1 where the model is right, and its loss."""

    hits: Values  # [samples]
    losses: Values  # [samples]
    sizes: Rows  # [clients] samples of each one
    edits: Values | None = None  # [2, samples] wrong words and words, where targets are words

    def scores(self) -> Scores:
        """Return means per client; NaN where there is no sample."""
        with np.errstate(invalid="ignore", divide="ignore"):
            wrong = None if self.edits is None else self._sum(self.edits[0]) / self._sum(self.edits[1])
            return Scores(self._sum(self.hits) / self.sizes, self._sum(self.losses) / self.sizes, self.sizes, wrong)

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
        edits = None if self.edits is None else self.edits[:, samples]
        return Outcomes(hits=self.hits[samples], losses=self.losses[samples], sizes=sizes, edits=edits)

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
    return _outcomes(_alone(net, problem, params, data, rows.of(clients), _SAMPLES), sizes)


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
    trial, axes = _trial(net, problem), {name: 0 if value.stride(0) else None for name, value in stacked.items()}
    # One convolution with the kernels of many clients is slower on a CPU than many convolutions.
    kernels = net.convolutional and any(stacked[name].ndim > 3 for name, axis in axes.items() if axis is not None)
    found = _empty(problem, int(sizes.sum()))
    first = np.cumsum(sizes) - sizes  # where each client's outcomes begin
    alone = net.unstackable is not None or (kernels and device.type == "cpu")
    for members in _similar(sizes, 1 if alone else len(clients)):
        position = np.arange(sizes[members].max())
        real = position < sizes[members, None]
        table = rows.flat[starts[members, None] + np.minimum(position, sizes[members, None] - 1)]  # padded: last row
        if len(members) == 1:
            params = {name: value[members[0]] for name, value in stacked.items()}
            step = len(position) if net.batch_dependent else _SAMPLES
            values = _alone(net, problem, params, data, table[0], step)
        else:
            span = _span(members)
            params = {name: value[0] if axes[name] is None else value[span] for name, value in stacked.items()}
            inputs = *data.samples(table), torch.from_numpy(real).to(device)
            values = _numbers(vmap(trial, in_dims=(axes, 0, 0, 0), out_dims=1)(params, *inputs))[:, real]
        found[:, (first[members, None] + position)[real]] = values
    return _outcomes(found, sizes)


def _outcomes(found: Values, sizes: Rows) -> Outcomes:
    """Name what trials return."""
    return Outcomes(hits=found[0], losses=found[1], sizes=sizes, edits=found[2:] if len(found) > 2 else None)


def _trial(net: Net, problem: Problem) -> Try:
    def trial(params: Params, x: Tensor, y: Tensor, real: Tensor) -> Tensor:
        output = net.apply(params, x, real)
        hits, losses = problem.correct(output, y), problem.loss(output, y)
        scores = torch.stack([hits.to(losses.dtype), losses])
        return scores if problem.edits is None else torch.cat([scores, problem.edits(output, y).to(losses.dtype)])

    return trial


def _alone(net: Net, problem: Problem, params: Params, data: FederatedData, rows: Rows, step: int) -> Values:
    """Try one model on rows, so many at a time."""
    found = _empty(problem, len(rows))
    trial = _trial(net, problem)
    for start in range(0, len(rows), step):
        x, y = data.samples(rows[start : start + step])
        every = torch.ones(len(x), dtype=torch.bool, device=data.device)
        found[:, start : start + step] = _numbers(trial(params, x, y, every))
    return found


def _empty(problem: Problem, samples: int) -> Values:
    """Return room for hits and losses of samples, and for wrong words and words where targets are words."""
    return np.zeros((2 if problem.edits is None else 4, samples))


def _similar(sizes: Rows, most: int) -> Iterator[Rows]:
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
            if (end + 1 - start) * largest > _SAMPLES:
                break
            end += 1
        yield order[start:end]
        start = end


def _span(members: Rows) -> slice | Rows:
    """Return neighbours as a slice, which copies nothing."""
    return slice(members[0], members[-1] + 1) if (np.diff(members) == 1).all() else members


def _numbers(values: Tensor) -> Values:
    return values.to(torch.float64).cpu().numpy()
