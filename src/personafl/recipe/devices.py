"""Device profiles: which clients have which device, and so which network of their own and how many bits per weight.

A recipe's `[[devices]]` entries say whom they are for in one of three ways: a share of the clients, clients by name, or
by the size of their training set. Shares go with shares only; a client that is named is not looked at by its size. All
draws come from (seed, client), so every method of a comparison sees the same devices, and a run repeats.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from personafl.algorithms import METHODS, Training
from personafl.core import rng
from personafl.core.algorithm import Algorithm
from personafl.core.net import Buffers, Net
from personafl.core.split import listed
from personafl.data.federated import FederatedData
from personafl.errors import BadInput
from personafl.models import MODELS, default_model, make_net
from personafl.options import Strict, checked, explain

Clients = NDArray[np.int64]
Samples = Annotated[int, Field(ge=0)]
Way = Literal["share", "clients", "samples"]
_TOLERANCE = 1e-9  # of the sum of all shares


class OwnNetwork(BaseModel):
    """A client's own network, all of it personal; further keys are the model's own options."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow", frozen=True)

    name: str = "auto"
    buffers: Buffers = "refused"

    @model_validator(mode="after")
    def _personal_as_a_whole(self) -> OwnNetwork:
        if wrong := {"personal", "adapter", "adapter_size"} & (self.model_extra or {}).keys():
            raise ValueError(f"a client's own network is personal as a whole; remove {', '.join(sorted(wrong))}")
        return self

    def resolved(self, data: FederatedData) -> OwnNetwork:
        """Return it with the name that "auto" stands for."""
        return self.model_copy(update={"name": default_model(data)}) if self.name == "auto" else self


class DeviceSection(Strict):
    """A kind of device: who has it, and what fits on it."""

    name: Annotated[str, Field(min_length=1)] | None = None  # None: "devices 1" and so on
    share: Annotated[float, Field(gt=0, le=1)] | None = None  # of the seen clients, and of the unseen ones
    clients: tuple[str, ...] | None = None  # or: these
    min_samples: Samples | None = None  # or: those with so many training samples
    max_samples: Samples | None = None
    model: OwnNetwork | None = None  # None: the shared network
    bits: Annotated[int, Field(ge=1, le=8)] | None = (
        None  # of each weight of the client's own model; None: full precision
    )
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

    def holds(self, sizes: Clients) -> NDArray[np.bool_]:
        """Say which sizes of training sets are in its range."""
        return (sizes >= self.least) & (sizes <= (np.iinfo(np.int64).max if self.most is None else self.most))


def device_names(devices: Sequence[DeviceSection]) -> list[str]:
    """Return the name of each profile."""
    return [device.name or f"devices {number}" for number, device in enumerate(devices, 1)]


def check_each(given: Any) -> None:
    """Fail if an entry is wrong in itself, and say which; `given` is what the recipe has, before any validation."""
    if not isinstance(given, list):
        raise BadInput("devices: is a list of sections; write [[devices]] in a recipe, or devices=[{share=0.5, …}, …]")
    for index, entry in enumerate(given):
        try:
            DeviceSection.model_validate(entry)
        except ValidationError as error:
            raise explain(error, f"devices[{index}]", DeviceSection) from error


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
    if shared and abs(total - 1) > _TOLERANCE:
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


def check_method(devices: Sequence[DeviceSection], algorithm: Algorithm) -> None:
    """Fail if a profile asks for what the method cannot do."""
    for index, device in enumerate(devices):
        if device.model is not None and not algorithm.own_networks:
            what = "trains the shared network on every client"
            raise BadInput(_refusal(algorithm, what, f"devices[{index}].model", "own_networks"))
        if device.bits is not None and not algorithm.uses_bits:
            what = "keeps every weight in full precision"
            raise BadInput(_refusal(algorithm, what, f"devices[{index}].bits", "uses_bits"))
        if device.penalty is not None and algorithm.most_penalty is None:
            what = "has no penalty that differs by device"
            raise BadInput(_refusal(algorithm, what, f"devices[{index}].penalty", "most_penalty"))
        if device.penalty is not None and device.penalty > (algorithm.most_penalty or 0.0):
            raise BadInput(
                f"devices[{index}].penalty: {device.penalty:g} is above {algorithm.most_penalty:g}, the most that "
                f"{algorithm.name} allows; lower it"
            )


def _refusal(algorithm: Algorithm, what: str, key: str, ability: str) -> str:
    able = [name for name, method in METHODS.items() if getattr(method.build(Training()), ability)]
    instead = f", use a method that can ({', '.join(able)})" if able else ""
    return (
        f"devices: {algorithm.name} {what} and has no use for {key}; remove it{instead}, "
        f"or in a comparison leave devices to the others: compare.variants.{algorithm.name}.devices = []"
    )


def deal(devices: Sequence[DeviceSection], data: FederatedData, seed: int) -> Clients:
    """Return the number of each client's profile, [clients]; 0 for all where there are no profiles."""
    profile = np.full(data.clients, -1 if devices else 0, dtype=np.int64)
    sizes = data.train.sizes
    if devices and devices[0].way == "share":
        for group in (data.seen, data.unseen):
            profile[group] = _by_share([device.share or 0.0 for device in devices], group, seed)
    for index, device in enumerate(devices):
        if device.way == "samples":
            profile[device.holds(sizes)] = index
    for index, device in enumerate(devices):  # last: a name goes before a size
        for name in device.clients or ():
            profile[data.client_number(name, f"devices[{index}].clients: there is")] = index
    _check_dealt(devices, data, profile)
    return profile


def _by_share(shares: Sequence[float], group: Clients, seed: int) -> Clients:
    """Deal clients by shares: the numbers by largest remainder (ties: the earlier profile), who by (seed, client)."""
    exact = np.array(shares) * len(group)
    counts = np.floor(exact + _TOLERANCE).astype(np.int64)
    last = np.argsort(np.round(counts - exact, 9), kind="stable")[: len(group) - int(counts.sum())]
    counts[last] += 1
    dealt = np.empty(len(group), dtype=np.int64)
    dealt[np.argsort(rng.mix(seed, "devices", group), kind="stable")] = np.repeat(np.arange(len(shares)), counts)
    return dealt


def _check_dealt(devices: Sequence[DeviceSection], data: FederatedData, profile: Clients) -> None:
    members = np.concatenate([data.seen, data.unseen])
    left = members[profile[members] < 0]
    if len(left):
        sizes = data.train.sizes[left]
        names = listed([data.client_names[client] for client in left])
        raise BadInput(
            f"devices: {len(left)} of {len(members)} clients are in no entry ({names}; they have {sizes.min()} to "
            f"{sizes.max()} training samples); add an entry with their names or sizes"
        )
    for index, device in enumerate(devices):
        if not (profile[members] == index).any():
            keys = {"share": "share", "clients": "clients"}
            key = keys.get(device.way, "min_samples" if device.min_samples is not None else "max_samples")
            sizes = data.train.sizes[members]
            have = (
                f"of {len(members)} clients" if device.way == "share" else f"they have {sizes.min()} to {sizes.max()}"
            )
            raise BadInput(
                f"devices[{index}].{key}: no client gets this device ({have}); change it, or remove the entry"
            )


def own_nets(
    devices: Sequence[DeviceSection],
    data: FederatedData,
    shared: tuple[OwnNetwork, Net] | None,
    device: torch.device,
    dtype: torch.dtype,
) -> list[Net | None]:
    """Return the network of each profile's clients, None for the shared one; equal sections are one network.

    `shared` is the shared network and the section that describes it, where one does.
    """
    made = [] if shared is None else [shared]
    nets: list[Net | None] = []
    for index, profile in enumerate(devices):
        if profile.model is None:
            nets.append(None)
            continue
        section = profile.model.resolved(data)
        if not any(section == known for known, _ in made):
            made.append((section, _built(section, data, f"devices[{index}]").to(device, dtype)))
        net = next(net for known, net in made if known == section)
        nets.append(None if shared is not None and net is shared[1] else net)
    return nets


def _built(section: OwnNetwork, data: FederatedData, where: str) -> Net:
    options = section.model_extra or {}
    if section.name in MODELS:
        checked(MODELS[section.name], options, f"{where}.model", beside=["name", "buffers"])
    try:
        return make_net(section.name, options, data, section.buffers)
    except BadInput as error:
        raise BadInput(f"{where}.{error}") from error
