"""What a server's journal says has happened."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from personafl.data.moments import Sums
from personafl.deploy.net.identity import Identity
from personafl.deploy.net.messages import Code, Hello, Refused
from personafl.deploy.net.payload import opened_update
from personafl.recipe.devices import device_names
from personafl.recipe.recipe import Recipe
from personafl.simulate.serverside import Roster


@dataclass(frozen=True)
class Member:
    """An enrolled device."""

    number: int
    name: str
    samples: int
    profile: int  # of the recipe's devices
    sums: tuple[Any, ...] | None = None  # the fields of its `Sums`, where moments are made of them
    left: bool = False


def enrolling(recipe: Recipe, identity: Identity, hello: Hello, known: Member | None) -> Member:
    """Return a device as the member that it becomes, or refuse it; `known` is who has its number already."""
    number, section, names = identity.number, recipe.deploy, device_names(recipe.devices)
    assert number is not None
    assert section is not None
    if (tuple(hello.input_shape), hello.classes) != (section.input_shape, section.classes):
        text = f"the recipe is for inputs {list(section.input_shape)} and {section.classes} classes"
        raise Refused(Code.OTHER_DATA, text)
    if not 1 <= hello.samples <= section.max_samples:
        raise Refused(Code.BAD_SAMPLES, f"a device has 1 to {section.max_samples} training samples")
    if names and hello.profile not in names:
        raise Refused(Code.BAD_PROFILE, f"say which kind of device it is: --profile {' or '.join(names)}")
    profile = names.index(hello.profile) if names and hello.profile else 0
    if known is not None and known.name != identity.name:
        raise Refused(Code.NUMBER_TAKEN, f"number {number} is {known.name}'s")
    if known is not None and (known.samples, known.profile) != (hello.samples, profile):
        raise Refused(Code.OTHER_DATA, f"{known.name} enrolled with {known.samples} samples and another profile")
    return Member(number, identity.name, hello.samples, profile)


def opened_sums(data: bytes, like: Sums, hello: Hello) -> tuple[Any, ...]:
    """Return the fields of the sums that a device sent of its inputs, as plain numbers, or refuse them."""
    sums = opened_update(data, like, type(like), math.inf)
    if float(sums.size) != hello.samples * math.prod(hello.input_shape[1:]) or bool((sums.spread < 0).any()):
        raise Refused(Code.BAD_SAMPLES, f"its sums are not those of {hello.samples} samples")
    return tuple(field.tolist() for field in sums)


def roster_of(members: Mapping[int, Member], base: Roster) -> Roster:
    """Return what a server knows of its devices: one number for each, however many samples it says it has."""
    clients = max(members, default=-1) + 1
    samples, kinds = np.zeros((2, clients), dtype=np.int64)
    for number, member in members.items():
        samples[number], kinds[number] = member.samples, member.profile
    staying = np.array(sorted(number for number, member in members.items() if not member.left), dtype=np.int64)
    return dataclasses.replace(base, seen=staying, samples=samples.take, problem_of=kinds)


@dataclass(frozen=True)
class Closed:
    """What a round did."""

    number: int
    taken: tuple[int, ...]
    selected: int
    loss: float | None


@dataclass
class Open:
    """The round that is going on."""

    number: int
    cohort: tuple[int, ...]
    wanted: int  # updates that close it before its deadline
    model: str  # digest of the broadcast
    whole: bytes  # the broadcast for newcomers
    again: bytes  # and for those that have a state
    taken: dict[int, str] = field(default_factory=dict)  # number -> digest of its update
    sealed: bool = False  # nothing more is taken
    _selected: frozenset[int] = field(default=frozenset(), init=False, repr=False)

    def selected(self, number: int) -> bool:
        """Say whether a device is of the cohort, which may grow."""
        if len(self._selected) != len(self.cohort):
            self._selected = frozenset(self.cohort)
        return number in self._selected


@dataclass
class History:
    """All that the lines of a journal say, together."""

    members: dict[int, Member] = field(default_factory=dict)
    latest: dict[int, tuple[int, str]] = field(default_factory=dict)  # number -> its last update: round and digest
    taken: dict[int, dict[int, str]] = field(default_factory=dict)  # round -> number -> digest of its update
    begun: bool = False  # whether there is a server state
    moments: Mapping[str, Any] | None = None  # that devices' sums made
    opened: Mapping[str, Any] = field(default_factory=dict)  # the last round, with those who were selected later
    sealed: int | None = None  # the last round that was
    last: Closed | None = None

    @classmethod
    def of(cls, entries: Iterable[Mapping[str, Any]]) -> History:
        """Read the entries of a journal."""
        history = cls()
        for entry in entries:
            history._hear(entry)
        return history

    def _hear(self, entry: Mapping[str, Any]) -> None:
        match entry["event"]:
            case "enrolled":
                facts = {key: entry[key] for key in ("number", "name", "samples", "profile")}
                self.members[facts["number"]] = Member(**facts, sums=entry.get("sums"))
            case "left":
                self.members[entry["number"]] = dataclasses.replace(self.members[entry["number"]], left=True)
            case "began":
                self.begun, self.moments = True, entry.get("moments")
            case "opened":
                self.opened = entry
            case "widened":
                self.opened = {**self.opened, "cohort": entry["cohort"]}
            case "sealed":
                self.sealed = entry["round"]
            case "accepted":
                self.latest[entry["number"]] = (entry["round"], entry["digest"])
                self.taken.setdefault(entry["round"], {})[entry["number"]] = entry["digest"]
            case "closed":
                self.last = Closed(entry["round"], tuple(entry["taken"]), entry["selected"], entry["loss"])
