"""For those who operate servers: is a run's journal as it was written, and a copy of a run that is at work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from personafl.storage.audit import Audit


def verify_audit(directory: str | Path, *, head: str | None = None) -> Audit:
    """Return what the journal in a server's or a coordinator's run directory comes to: lines, head, rounds.

    Fail if a line was changed, removed, repeated or moved, or if its end was cut off. `head` is one that was noted
    before: if no line has it, all were made anew since.
    """
    from personafl.storage.audit import verify

    return verify(Path(directory), head)


def back_up(directory: str | Path, target: str | Path) -> Audit:
    """Copy a server's or a coordinator's run directory, which may be at work, to a new one that goes on from there."""
    from personafl.storage import backup

    return backup.back_up(Path(directory), Path(target))
