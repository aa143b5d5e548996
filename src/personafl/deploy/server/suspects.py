"""Whose updates are clipped or left out, and how often: counted from the journal alone, as all counters are."""

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

from personafl.deploy.net.exposition import Metric, counter
from personafl.deploy.server.history import Closed, Fates

ROW = 5  # rounds in a row, of those that a device had part in, after which somebody is told


class Suspects:
    """What a robust rule had against devices, by their numbers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # lines are written by other threads than those that ask
        self._names: dict[int, str] = {}
        self._counts: dict[str, Counter[int]] = {name: Counter() for name in Fates._fields}
        self._row: Counter[int] = Counter()  # rounds up to the last that a device had part in; not those taken back

    def hear(self, entry: Mapping[str, Any]) -> None:
        """Note a line of the journal."""
        with self._lock:
            match entry["event"]:
                case "enrolled":
                    self._names[entry["number"]] = entry["name"]
                case "closed":
                    met = {name: entry.get(name, ()) for name in self._counts}
                    for name, numbers in met.items():
                        self._counts[name].update(numbers)
                    against = {*met["far"], *met["left_out"]}  # who is a little longer than others may well be honest
                    for number in entry["taken"]:
                        self._row[number] = self._row[number] + 1 if number in against else 0
                case "rolled_back":
                    self._row.clear()

    def of(self, number: int) -> dict[str, int]:
        """Return how often each was met by a device's updates."""
        with self._lock:
            return {name: counts[number] for name, counts in self._counts.items()}

    def metrics(self) -> list[Metric]:
        """Return the counts of all devices that have any."""
        texts = {
            "clipped": "Updates that were shortened, by device.",
            "far": "Updates that were shortened to half or less, by device.",
            "left_out": "Updates that a robust rule left out, by device.",
        }
        with self._lock:
            named = {name: {self._names[one]: n for one, n in own.items()} for name, own in self._counts.items()}
        return [counter(f"updates_{name}", text, named[name], "device") for name, text in texts.items() if named[name]]

    def alerts(self, closed: Closed | None = None) -> list[tuple[str, str]]:
        """Return whom somebody should look at, by name, and why: since a round that was closed, or by now at all."""
        with self._lock:
            rows = {number: row for number, row in self._row.items() if row >= ROW}
            if closed is not None:
                rows = {number: row for number, row in rows.items() if row == ROW and number in closed.taken}
            return [(self._names[number], _said(self._names[number], row)) for number, row in sorted(rows.items())]


def _said(name: str, row: int) -> str:
    what = "twice the clip or longer, or left out"
    return f"updates of {name} were {what}, in {row} rounds in a row; personafl drop {name} takes it out"
