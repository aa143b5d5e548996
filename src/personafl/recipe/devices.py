"""The entries [[devices]] of a recipe: who has which kind of device, which network of its own and how many bits.

An entry says whom it is for in one of three ways: a share of the clients, clients by name, or by the size of their
training set. Shares go with shares only; a client that is named is not looked at by its size.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from personafl.errors import BadInput
from personafl.models.network import Network
from personafl.options import Strict

Samples = Annotated[int, Field(ge=0)]
Way = Literal["share", "clients", "samples"]
TOLERANCE = 1e-9  # of the sum of all shares


class DeviceSection(Strict):
    """A kind of device: who has it, and what fits on it."""

    name: Annotated[str, Field(min_length=1)] | None = None  # None: "devices 1" and so on
    share: Annotated[float, Field(gt=0, le=1)] | None = None  # of the seen clients, and of the unseen ones
    clients: tuple[str, ...] | None = None  # or: these
    min_samples: Samples | None = None  # or: those with so many training samples
    max_samples: Samples | None = None
    model: Network | None = None  # None: the shared network
    bits: Annotated[int, Field(ge=1, le=8)] | None = (
        None  # of each weight of the client's own model; None: full precision
    )
    rank: Annotated[int, Field(ge=1)] | None = None  # of its lora adapters: the first rows; None: all
    penalty: Annotated[float, Field(gt=0)] | None = None  # γ of these devices (FedBCD); None: method.penalty

    @field_validator("clients")
    @classmethod
    def _named_once(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if names is not None and not names:
            raise ValueError("name at least one client")
        if twice := [name for name in names or () if (names or ()).count(name) > 1]:
            raise ValueError(f"{twice[0]!r} is there twice")
        return names

    @model_validator(mode="after")
    def _one_way(self) -> DeviceSection:
        sized = self.min_samples is not None or self.max_samples is not None
        if (self.share is not None) + (self.clients is not None) + sized != 1:
            raise ValueError("say whose it is in one way: share, clients, or min_samples and max_samples")
        if self.rank is not None and self.model is not None:
            raise ValueError("rank is of the shared network's adapters; remove it, or model")
        if self.most is not None and self.least > self.most:
            raise ValueError(f"min_samples = {self.least} is above max_samples = {self.most}; swap them")
        return self

    @property
    def way(self) -> Way:
        """How it says whose it is."""
        return "share" if self.share is not None else "clients" if self.clients is not None else "samples"

    @property
    def least(self) -> int:
        """The fewest training samples, where it goes by their number."""
        return self.min_samples or 0

    @property
    def most(self) -> int | None:
        """The most training samples; None: any number."""
        return self.max_samples

    def holds(self, sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Say which sizes of training sets are in its range."""
        return (sizes >= self.least) & (sizes <= (np.iinfo(np.int64).max if self.most is None else self.most))


def device_names(devices: Sequence[DeviceSection]) -> list[str]:
    """Return the name of each profile."""
    return [device.name or f"devices {number}" for number, device in enumerate(devices, 1)]


def check_devices(devices: Sequence[DeviceSection]) -> None:
    """Fail if entries do not go together, whatever the data."""
    names = device_names(devices)
    for index, name in enumerate(names):
        if name in names[:index]:
            raise BadInput(f"devices[{index}].name: {name!r} is there twice; choose another name")
    shared = [index for index, device in enumerate(devices) if device.way == "share"]
    if shared and len(shared) < len(devices):
        other = next(index for index, device in enumerate(devices) if device.way != "share")
        raise BadInput(
            f"devices[{other}]: devices[{shared[0]}] has a share, and shares go with shares only; "
            "give all entries a share, or none"
        )
    without = [index for index, device in enumerate(devices) if device.penalty is None]
    if 0 < len(without) < len(devices):
        raise BadInput(
            f"devices[{without[0]}].penalty: uploads are weighted by it where devices have one; give it to all, or none"
        )
    total = sum(device.share or 0.0 for device in devices)
    if shared and abs(total - 1) > TOLERANCE:
        raise BadInput(f"devices[0].share: the shares add up to {total:.10g}, not 1; change them, or add an entry")
    for (first, a), (second, b) in itertools.combinations(enumerate(devices), 2):
        if both := sorted(set(a.clients or ()) & set(b.clients or ())):
            raise BadInput(f"devices[{second}].clients: {both[0]!r} is in devices[{first}] too; remove it from one")
        if a.way == b.way == "samples" and _overlap(a, b):
            key = "min_samples" if b.min_samples is not None else "max_samples"
            raise BadInput(
                f"devices[{second}].{key}: {_range(b)} overlaps with {_range(a)} of devices[{first}]; "
                "both ends of a range are in it"
            )


def _overlap(a: DeviceSection, b: DeviceSection) -> bool:
    ends = [end for end in (a.most, b.most) if end is not None]
    return not ends or max(a.least, b.least) <= min(ends)


def _range(device: DeviceSection) -> str:
    return f"{device.least} to {device.most} samples" if device.most is not None else f"{device.least} samples and more"
