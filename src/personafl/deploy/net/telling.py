"""What a process says of itself: a line for people, or the same as JSON for programs that collect logs."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime

_WARNINGS = {
    *("refused", "full", "gone", "diverged", "ending", "extended", "waiting", "dropped", "went_back", "not_taken"),
    "suspect",
}


@dataclass(frozen=True)
class Told:
    """One thing that happened: what, in words, whose matter it is, and in which round (0 is the first)."""

    what: str
    text: str
    who: str | None = None
    round: int | None = None

    def __str__(self) -> str:
        return self.text

    def as_json(self) -> str:
        """Return it as one line of JSON, with the time."""
        level = "error" if self.what == "failed" else "warning" if self.what in _WARNINGS else "info"
        kind = "device" if self.who is None or self.who.startswith("device-") else "peer"
        facts = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "level": level,
            "event": self.what,
            kind: self.who,
            "round": None if self.round is None else self.round + 1,
            "text": self.text or str(self),
        }
        return json.dumps({key: value for key, value in facts.items() if value is not None})
