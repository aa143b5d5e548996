"""What the lines of a journal come to, in numbers that only grow.

They are counted from the lines alone, when these are in the file: a process that was killed has them again when it is
back, none is lost that was shown, and none is counted twice.
"""

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

from personafl.deploy.net.exposition import Histogram, Metric, counter
from personafl.storage.journal import Journaled
from personafl.storage.rundir import RunDirectory

_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 14400, 86400)
_PEERS = ("enrolled", "left", "dropped", "readmitted", "revoked", "joined", "gone", "back", "diverged")
_ROUNDS = ("closed", "mixed")  # what ends one: at a server, at a coordinator


class Tally:
    """Counts what a journal says."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # lines are written by other threads than those that ask
        self.refused: Counter[str] = Counter()
        self._events: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._alone: Counter[str] = Counter()
        self._mixes: Counter[str] = Counter()
        self._waited = 0.0
        self._seconds = Histogram(_SECONDS)
        self._began: float | None = None  # when the round did that goes on

    def hear(self, entry: Mapping[str, Any]) -> None:
        """Count a line."""
        with self._lock:
            event, when = str(entry["event"]), float(entry["time"])
            self._events[event] += 1
            match event:
                case "accepted" | "ready":
                    self._bytes["up"] += entry.get("size", 0)
                case "handed":
                    self._bytes["down"] += entry["size"]
                case "refused":
                    self.refused[str(entry["code"])] += 1
                case "refusals":
                    self.refused.update(entry["codes"])
                case "alone":
                    self._alone[f"cloud-{entry['server']}"] += 1
                case "mixed":
                    self._mixes.update(f"cloud-{server}" for server in entry["members"])
                case "waited":
                    self._waited += entry["seconds"]
            if event in _ROUNDS and self._began is not None:
                self._seconds.observe(max(0.0, when - self._began))  # clocks are set back at times
            if event in ("opened", "began", "mixed"):
                self._began = when

    def metrics(self) -> list[Metric]:
        """Return all counts as they are now."""
        with self._lock:
            events = self._events
            mixes = {name: self._mixes[name] for name in self._mixes.keys() | self._alone.keys()}
            return [
                counter("rounds", "Rounds that were closed, or mixes; also those that were taken back.",
                        sum(events[event] for event in _ROUNDS)),
                self._seconds.metric("round_seconds", "Seconds from the beginning of a round to its end."),
                counter("updates_accepted", "Updates that were accepted.", events["accepted"] + events["ready"]),
                counter("refused", "Messages that were refused, by code.", self.refused, "code"),
                counter("update_bytes", "Bytes of updates that were accepted.", self._bytes["up"]),
                counter("broadcast_bytes", "Bytes of models handed out, to each device once a round.",
                        self._bytes["down"]),
                counter("peers", "What devices, or servers, did or had done to them.",
                        {event: events[event] for event in _PEERS}, "event"),
                counter("roll_backs", "How often the run was taken back.", events["rolled_back"]),
                counter("disk_waits", "How often a write had to wait for space on the disk.", events["waited"]),
                counter("disk_wait_seconds", "Seconds of such waiting.", self._waited),
                *([counter("server_mixes", "Mixes that a server had part in.", mixes, "server"),
                   counter("server_alone", "Rounds that a server did alone.", dict(self._alone), "server")]
                  if mixes else []),
            ]  # fmt: skip


class Tallied(Journaled):
    """What has a run directory to itself, and counts what its journal says."""

    def __init__(self, directory: RunDirectory) -> None:
        super().__init__(directory)
        self.tally = Tally()
        self.journal.follow(self.tally.hear)
