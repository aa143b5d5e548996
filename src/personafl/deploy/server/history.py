"""What a server's journal says has happened."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from personafl.data.federated import Clients
from personafl.data.moments import Sums
from personafl.deploy.net.identity import Identity
from personafl.deploy.net.messages import Code, Hello, Refused
from personafl.deploy.net.payload import opened_update
from personafl.deploy.server.letters import Letters
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
    serial: int = 0  # of the certificate that it enrolled with
    left: bool = False
    dropped: bool = False  # by an operator

    @property
    def here(self) -> bool:
        """Whether it may take part."""
        return not (self.left or self.dropped)


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
    check_admitted(known)
    if known is not None and (known.samples, known.profile) != (hello.samples, profile):
        raise Refused(Code.OTHER_DATA, f"{known.name} enrolled with {known.samples} samples and another profile")
    return Member(number, identity.name, hello.samples, profile, serial=identity.serial)


def check_admitted(member: Member | None) -> None:
    """Refuse a device that an operator has dropped."""
    if member is not None and member.dropped:
        text = f"{member.name} was dropped by an operator, who can let it in again: personafl drop {member.name} --undo"
        raise Refused(Code.DROPPED, text)


def opened_sums(data: bytes, like: Sums, hello: Hello) -> tuple[Any, ...]:
    """Return the fields of the sums that a device sent of its inputs, as plain numbers, or refuse them."""
    sums = opened_update(data, like, type(like), math.inf)
    if float(sums.size) != hello.samples * math.prod(hello.input_shape[1:]) or bool((sums.spread < 0).any()):
        raise Refused(Code.BAD_SAMPLES, f"its sums are not those of {hello.samples} samples")
    return tuple(field.tolist() for field in sums)


def roster_of(members: Mapping[int, Member], here: Callable[[int], bool], base: Roster) -> Roster:
    """Return what a server knows of its devices: a few numbers for each, however many samples it says it has.

    Their own numbers may be any: arrays have a place for each device, not for each number.
    """
    ordered = [members[number] for number in sorted(members)]
    numbers, samples, kinds = (
        np.array(values, dtype=np.int64)
        for values in ([m.number for m in ordered], [m.samples for m in ordered], [m.profile for m in ordered])
    )
    staying = np.array([member.number for member in ordered if here(member.number)], dtype=np.int64)

    def looked_up(values: Clients) -> Callable[[Clients], Clients]:
        return lambda clients: values[np.searchsorted(numbers, clients)]

    return dataclasses.replace(base, seen=staying, samples=looked_up(samples), problem_of=looked_up(kinds))


class Fates(NamedTuple):
    """Whose updates a rule did not take as they came."""

    clipped: tuple[int, ...] = ()  # they were shortened
    far: tuple[int, ...] = ()  # to half or less
    left_out: tuple[int, ...] = ()


AS_THEY_CAME = Fates()


@dataclass(frozen=True)
class Closed:
    """What a round did."""

    number: int
    taken: tuple[int, ...]
    selected: int
    loss: float | None
    met: Fates = AS_THEY_CAME

    @property
    def facts(self) -> dict[str, Any]:
        """What the journal says of it."""
        facts = {"round": self.number, "taken": self.taken, "selected": self.selected, "loss": self.loss}
        return facts | {name: numbers for name, numbers in self.met._asdict().items() if numbers}

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Closed:
        """Return what a line of the journal says."""
        met = Fates(*(tuple(entry.get(name, ())) for name in Fates._fields))
        return cls(entry["round"], tuple(entry["taken"]), entry["selected"], entry["loss"], met)


@dataclass
class Open:
    """The round that is going on."""

    number: int
    cohort: tuple[int, ...]
    wanted: int  # updates that close it before its deadline
    letters: Letters  # what devices are sent
    taken: dict[int, str] = field(default_factory=dict)  # number -> digest of its update
    sealed: bool = False  # nothing more is taken
    handed: set[int] = field(default_factory=set)  # who has been given its broadcast
    hopeless: set[int] = field(default_factory=set)  # whose update was refused for its numbers: it would be again
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
    accepted: list[Mapping[str, Any]] = field(default_factory=list)  # lines of the last round's updates
    begun: bool = False  # whether there is a server state
    moments: Mapping[str, Any] | None = None  # that devices' sums made
    opened: Mapping[str, Any] = field(default_factory=dict)  # the last round, with those who were selected later
    handed: set[int] = field(default_factory=set)  # who has been given its broadcast
    sealed: int | None = None  # the last round that was
    away: dict[int, list[int]] = field(default_factory=dict)  # number -> its rounds without contact
    last: Closed | None = None

    @classmethod
    def of(cls, entries: Iterable[Mapping[str, Any]]) -> History:
        """Read the entries of a journal."""
        history = cls()
        for entry in entries:
            history._hear(entry)
        return history

    def unsaid(self, done: int) -> Closed | None:
        """Return the last round if a checkpoint has closed it, but no line says so: a kill came in between."""
        round_ = self.opened.get("round")
        if round_ is None or round_ >= done or (self.last is not None and self.last.number == round_):
            return None
        return Closed(round_, tuple(sorted(self.taken.get(round_, ()))), len(self.opened["cohort"]), None)

    def _change(self, number: int, **facts: Any) -> None:
        self.members[number] = dataclasses.replace(self.members[number], **facts)

    def _hear(self, entry: Mapping[str, Any]) -> None:
        match entry["event"]:
            case "enrolled":
                facts = {key: entry[key] for key in ("number", "name", "samples", "profile")}
                self.members[facts["number"]] = Member(**facts, sums=entry.get("sums"), serial=entry.get("serial", 0))
            case "left":
                self._change(entry["number"], left=True)
            case "dropped":
                self._change(entry["number"], dropped=True)
                if entry["without"] is not None:
                    del self.taken[entry["without"]][entry["number"]]
                    del self.latest[entry["number"]]
            case "readmitted":
                self._change(entry["number"], dropped=False)
            case "began":
                self.begun, self.moments = True, entry.get("moments")
            case "opened":
                self.opened, self.handed, self.accepted = entry, set(), []
            case "handed":
                self.handed.add(entry["number"])
            case "widened":
                self.opened = {**self.opened, "cohort": entry["cohort"]}
            case "sealed":
                self.sealed = entry["round"]
                for number in entry.get("offline", ()):
                    self.away.setdefault(number, []).append(entry["round"])
            case "accepted":
                self.latest[entry["number"]] = (entry["round"], entry["digest"])
                self.taken.setdefault(entry["round"], {})[entry["number"]] = entry["digest"]
                self.accepted.append(entry)
            case "rolled_back":
                self._forget(entry["round"])
            case "closed":
                self.last = Closed.of(entry)

    def _forget(self, rounds: int) -> None:
        """Go back to the end of a round; who is enrolled stays so."""
        self.taken = {round_: taken for round_, taken in self.taken.items() if round_ < rounds}
        self.latest = {
            number: (at, digest) for at, taken in sorted(self.taken.items()) for number, digest in taken.items()
        }
        self.away = {number: [at for at in own if at < rounds] for number, own in self.away.items()}
        self.opened, self.sealed = {"round": None}, None
        self.last = None if self.last is None or self.last.number >= rounds else self.last
