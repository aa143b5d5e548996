"""What to know of data before training on them, in a sentence each: scales, small clients, one class, label skew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from personafl.data.config import DataConfig, Moments
from personafl.data.federated import Clients, FederatedData
from personafl.data.moments import column, sums_of

_FEW = 10  # training samples, below which a personal model is a guess
_VALUES, _SEVERAL = 50, 5  # of a feature that may tell the label, and samples of each
_LOOKED_AT = 500  # features, above which none is looked at by itself
_FAR = 10.0  # times standard: inputs that are further off train badly as they are
_RARE = 0.95  # of one label, from which accuracy says little
_SKEWED = 0.1  # total variation beyond that of clients dealt at random


def inputs_line(data: FederatedData, config: DataConfig) -> str:
    """Say how networks see inputs."""
    if not data.x.is_floating_point():
        return "tokens, as they are"
    if config.normalize == "none":
        return "as they are (data.normalize = none)"
    size = f"standardised per {data.axis} ({data.x.shape[1]:,})"
    if isinstance(config.normalize, Moments):
        return f"{size}, by the numbers in data.normalize"
    return f"{size}, from sums over {len(data.seen):,} clients' training data"


def advice(data: FederatedData, config: DataConfig) -> Iterator[str]:
    """Yield what to know of the data before anything is trained on them."""
    if data.x.is_floating_point():
        yield from _scales(data, config)
    if data.x.is_floating_point() and data.x.ndim == 2:
        yield from _telling(data)
    few = np.flatnonzero(data.train.sizes < _FEW)
    if len(few):
        yield f"{_some(data, few)} fewer than {_FEW} training samples: own models are guesses; see data.min_samples"
    if data.task == "classification":
        yield from _labels(data)


def _scales(data: FederatedData, config: DataConfig) -> Iterator[str]:
    sums = sums_of(data)
    mean, std = sums.mean, (sums.spread / sums.size).sqrt()
    constant = std <= 1e-12 * mean.abs()
    which = [column(data, place) for place in torch.nonzero(constant).flatten().tolist()]
    if which:
        yield f"{len(which):,} of {len(std):,} {data.axis}s ({_first(which)}) never change: they teach nothing"
    mean, std = mean[~constant], std[~constant]
    if config.normalize != "none" or not len(std):
        return
    if float(std.max()) > _FAR or float(std.min()) < 1 / _FAR**2 or float((mean.abs() / std).max()) > _FAR:
        yield (
            f"{data.axis}s have means from {mean.min():.3g} to {mean.max():.3g} and standard deviations from "
            f"{std.min():.3g} to {std.max():.3g}, and networks see them as they are: training may diverge; "
            'set data.normalize = "auto"'
        )


def _telling(data: FederatedData) -> Iterator[str]:
    """Features that say who a sample is of, and ones that say the label: keys and copies of it, perhaps."""
    sizes = data.train.sizes_of(data.seen)
    rows = data.train.of(data.seen)
    x = data.x[torch.from_numpy(rows)].numpy()
    starts = (np.cumsum(sizes) - sizes)[sizes > 0]
    low, high = np.minimum.reduceat(x, starts), np.maximum.reduceat(x, starts)
    fixed = (low == high).all(0) & (x.min(0) < x.max(0))
    if len(starts) > 1 and max(sizes) > 1 and fixed.any():
        names = _first([column(data, place) for place in np.flatnonzero(fixed).tolist()])
        what = "tells clients apart, and an own model learns nothing from it"
        yield f"{fixed.sum()} of {x.shape[1]:,} features ({names}) never changes within a client: {what}; see data.drop"
    if data.task == "classification" and x.shape[1] <= _LOOKED_AT:
        labels = data.y.numpy()[rows]
        names = _first([column(data, place) for place in range(x.shape[1]) if _tells(x[:, place], labels)])
        if names:
            yield f"the label follows from one feature alone ({names}): is it known before the label is? See data.drop"


def _tells(values: NDArray[np.float32], labels: NDArray[np.int64]) -> bool:
    """Whether a few values, each of several samples, have one label each, and not all the same."""
    found, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    if not 1 < len(found) <= _VALUES or counts.min() < _SEVERAL:
        return False
    first = np.zeros(len(found), dtype=np.int64)
    first[place] = labels
    return bool((first[place] == labels).all() and np.ptp(first) > 0)


def _labels(data: FederatedData) -> Iterator[str]:
    counts = data.counts("train").astype(np.float64)
    one = np.flatnonzero((counts > 0).sum(axis=1) == 1)
    if len(one):
        yield f"{_some(data, one)} one class only: saying nothing else is right, so their accuracy says little"
    size = np.maximum(counts.sum(axis=1, keepdims=True), 1)
    pooled = counts.sum(axis=0) / counts.sum()
    if (most := float(pooled.max())) > _RARE:
        yield (
            f"{100 * most:.1f}% of the training samples are {data.label_names[int(pooled.argmax())]}, and so often a "
            f'model that says nothing else is right: see training.class_weights = "balanced", and metrics of your own'
        )
    apart = float(np.abs(counts / size - pooled).sum(axis=1).mean() / 2)
    # E|p̂ − p| of a share p among n samples is about √(2p(1 − p)/πn), and no more than 2p(1 − p).
    spread = np.minimum(np.sqrt(2 * pooled * (1 - pooled) / (np.pi * size)), 2 * pooled * (1 - pooled))
    chance = float(spread.sum(axis=1).mean() / 2)
    meaning = (
        "clients differ in their labels, which personal methods are for"
        if apart > chance + _SKEWED
        else "their labels give personal methods little to gain; their inputs may"
    )
    yield (
        f"label skew: the mixes of clients are {apart:.2f} from that of all (mean total variation; 0 alike, 1 nothing "
        f"in common; dealt at random {chance:.2f}): {meaning}"
    )


def _some(data: FederatedData, clients: Clients) -> str:
    names = _first([data.client_names[int(client)] for client in clients])
    return f"{len(clients):,} of {data.clients:,} clients ({names}) {'has' if len(clients) == 1 else 'have'}"


def _first(names: Sequence[object]) -> str:
    return ", ".join(map(str, names[:6])) + (", …" if len(names) > 6 else "")
