"""Devices of servers that are out for good: who has them now, and what of them counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from personafl.core.algorithm import Algorithm, fields_of_its_own
from personafl.deploy.net.messages import Code, Refused
from personafl.deploy.server.agreement import cloud_name
from personafl.recipe.cloud import CloudSection


@dataclass(frozen=True)
class Group:
    """Devices that came from one server; after `counted` of its rounds nothing counts, and the last had those `had`."""

    names: tuple[str, ...]  # as in certificates
    run: str  # that their states belong to
    counted: int
    had: tuple[int, ...]  # numbers

    @classmethod
    def read(cls, facts: Mapping[str, Any]) -> Group:
        """Return what a coordinator sent, or a journal has."""
        return cls(tuple(facts["names"]), str(facts["run"]), int(facts["counted"]), tuple(facts["had"]))


@dataclass
class Moves:
    """What a coordinator knows of servers that are out."""

    cloud: CloudSection
    runs: dict[int, str] = field(default_factory=dict)  # server -> the run of its own devices' states
    out: set[int] = field(default_factory=set)
    homes: dict[str, int] = field(default_factory=dict)  # name in cloud.members -> the server that has it now
    _groups: list[tuple[int, Group]] = field(default_factory=list)  # with the server that has them
    _counted: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)  # name -> `counted`, `had` so far

    def planned(self, server: int, to: int | None, live: Sequence[int]) -> dict[str, int]:
        """Return which server each device of one that goes out has then: the one that is named, or all in turn."""
        others = [one for one in live if one != server and one not in self.out]
        if not others or (to is not None and to not in others):
            where = "no other server" if to is None else cloud_name(to)
            raise Refused(Code.UNKNOWN_SERVER, f"{where} can take the devices of {cloud_name(server)}; see the status")
        names = [name for own in self.cloud.members or () for name in own if self._home(name) == server]
        return {name: others[place % len(others)] if to is None else to for place, name in enumerate(names)}

    def drop(self, facts: Mapping[str, Any]) -> None:
        """Note that a server is out, by the line of the journal.

        Of a device that had come from another one counts what counted there, also if this one is not as far.
        """
        self.out.add(facts["server"])
        here = facts["counted"], tuple(facts["had"])
        sorted_by: dict[tuple[int, Group], list[str]] = {}
        for name, home in facts["homes"].items():
            first = next(place for place, own in enumerate(self.cloud.members or ()) if name in own)
            counted = self._counted[name] = max(here, self._counted.get(name, here), key=lambda known: known[0])
            sorted_by.setdefault((home, Group((), self.runs[first], *counted)), []).append(f"device-{name}")
            self.homes[name] = home
        self._groups += [(home, replace(group, names=tuple(names))) for (home, group), names in sorted_by.items()]

    def of(self, server: int) -> list[Group]:
        """Return the devices that a server has from others."""
        return [group for home, group in self._groups if home == server]

    def count(self, server: int) -> int:
        """Return how many they are."""
        return sum(len(group.names) for group in self.of(server))

    def _home(self, name: str) -> int:
        first = next(place for place, own in enumerate(self.cloud.members or ()) if name in own)
        return self.homes.get(name, first)


def check_movable(algorithm: Algorithm, cloud: CloudSection, state: type[Any]) -> None:
    """Refuse to move devices where servers have something of each that another could not take in."""
    if not cloud.shared and "population" in fields_of_its_own(state) and algorithm.server.admit is None:
        text = f"servers of {algorithm.name} keep something of every device, which cannot go to others but in sync; "
        text += "start the server again, or begin a new run"
        raise Refused(Code.UNKNOWN_KIND, text)
