"""What a server's journal says has happened."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from personafl.deploy.server.members import Member


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


@dataclass
class History:
    """All that the lines of a journal say, together."""

    members: dict[int, Member] = field(default_factory=dict)
    latest: dict[int, tuple[int, str]] = field(default_factory=dict)  # number -> its last update: round and digest
    taken: dict[int, dict[int, str]] = field(default_factory=dict)  # round -> number -> digest of its update
    begun: bool = False  # whether there is a server state
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
                self.members[facts["number"]] = Member(**facts)
            case "left":
                self.members[entry["number"]] = dataclasses.replace(self.members[entry["number"]], left=True)
            case "began":
                self.begun = True
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
