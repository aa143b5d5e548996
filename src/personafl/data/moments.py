"""The moments by which inputs are standardised, from sums that clients can add up.

For what they are, see `inputs`. A client, or a device, needs to send no sample: of each channel its n numbers, their
mean and their squared distance from it are enough, and join to those of all, whatever the units.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from personafl.data.config import Moments
from personafl.data.federated import FederatedData
from personafl.errors import BadInput

_ROWS = 1024  # of samples that are added up at a time
_ROUNDING = 1e-12  # a deviation that is so small beside the mean comes from adding up
_CLIP = 10.0  # standard deviations
_DIGITS = 8  # of moments that are kept: more than single precision, fewer than the order of adding shows in


class Sums(NamedTuple):
    """What moments come from, of each channel: n, m = Σx/n and Σ(x − m)², for in Σx² a small spread drowns."""

    size: Tensor  # [] float64: numbers in a channel
    mean: Tensor  # [channels] float64
    spread: Tensor  # [channels] float64

    @classmethod
    def of(cls, x: Tensor) -> Sums:
        """Add up samples [samples, channels, …]."""
        values = x.to(torch.float64).transpose(0, 1).flatten(1)
        mean = values.mean(1)
        return cls(
            torch.tensor(float(values.shape[1]), dtype=mean.dtype), mean, (values - mean.unsqueeze(1)).square().sum(1)
        )

    @classmethod
    def like(cls, channels: int) -> Sums:
        """Return sums of nothing, for their structure."""
        zeros = torch.zeros(channels, dtype=torch.float64)
        return cls(zeros.sum(), zeros, zeros)

    @classmethod
    def read(cls, fields: Iterable[Any]) -> Sums:
        """Return sums from plain numbers and lists of them."""
        return cls(*(torch.tensor(field, dtype=torch.float64) for field in fields))

    def joined(self, other: Sums) -> Sums:
        """Return those of both (Chan, Golub and LeVeque, 1983)."""
        size, apart = self.size + other.size, other.mean - self.mean
        spread = self.spread + other.spread + apart.square() * (self.size * other.size / size)
        return Sums(size, self.mean + apart * (other.size / size), spread)

    def moments(self) -> Moments:
        """Return mean and standard deviation; a channel that is the same everywhere is only centred."""
        std = (self.spread / self.size).sqrt()
        constant = std <= _ROUNDING * self.mean.abs().clamp(min=1e-30)
        return Moments(mean=tuple(self.mean.tolist()), std=tuple(torch.where(constant, 1.0, std).tolist()))


def moments_of(data: FederatedData, kind: Literal["auto", "channel"] = "auto") -> Moments:
    """Return the moments of the training data of clients that train, as `normalize` names them."""
    return sums_of(data).moments() if kind == "channel" else agreed([sums_of(data)])


def scale_of(data: FederatedData) -> Moments:
    """Return the moments of the targets of a regression, nothing cut off."""
    return agreed([_added(data, data.y)]).model_copy(update={"clip": None})


def sums_of(data: FederatedData) -> Sums:
    """Return the sums of the training data of clients that train."""
    sums = _added(data, data.x)
    _check_finite(data, sums)
    return sums


def _added(data: FederatedData, values: Tensor) -> Sums:
    rows = torch.from_numpy(data.train.of(data.seen))
    return functools.reduce(Sums.joined, (Sums.of(values[part]) for part in torch.split(rows, _ROWS)))


def agreed(sums: Iterable[Sums]) -> Moments:
    """Return what `auto` makes of sums: cut off beyond 10, and rounded so that all agree in whatever order they add."""
    exact = functools.reduce(Sums.joined, sums).moments()
    places = [_DIGITS - math.ceil(math.log10(std)) for std in exact.std]
    mean, std = (
        tuple(round(value, place) for value, place in zip(values, places, strict=True))
        for values in (exact.mean, exact.std)
    )
    return Moments(mean=mean, std=std, clip=_CLIP)


def column(data: FederatedData, place: int) -> str:
    """Return what a channel or feature is called: its number, or the name of the table's column."""
    values = data.reading.categories or {}
    names = [
        called
        for name in data.reading.features or ()
        for called in ([f"{name} = {value}" for value in values[name]] if name in values else [name])
    ]
    return names[place] if len(names) == data.x.shape[1] else str(place)


def _check_finite(data: FederatedData, sums: Sums) -> None:
    wrong = torch.nonzero(~torch.isfinite(sums.mean)).flatten().tolist()
    if wrong:
        bad = ~torch.isfinite(data.x[:, wrong[0]].reshape(len(data.x), -1)).all(1).numpy()
        client = next(int(client) for client in data.seen if bad[data.train[int(client)]].any())
        raise BadInput(
            f"{data.name}: {data.axis} {column(data, wrong[0])} of client {data.client_names[client]!r} holds NaN or "
            "infinity; remove or fill them"
        )
