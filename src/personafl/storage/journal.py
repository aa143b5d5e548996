"""The server's journal: what happened, one JSON line each, in the order it happened.

Lines that decide how the run goes on are durable before anyone hears of them. A crash may leave half a line at the end,
which is cut off.
"""

import contextlib
import json
import time
from pathlib import Path
from typing import Any, Self

from personafl.errors import BadInput
from personafl.storage.files import append, cut, storage
from personafl.storage.rundir import RunDirectory


class Journal:
    """Appends to one file, and reads it back."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with storage(path):
            data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            cut(path, len(whole))
        try:
            self.entries: list[dict[str, Any]] = [json.loads(line) for line in whole.splitlines()]
        except ValueError as error:
            raise BadInput(f"{path}: damaged ({error}); put a copy back, or choose another --out") from error

    def write(self, event: str, *, durable: bool = True, **facts: Any) -> None:
        """Add a line."""
        entry = {"event": event, "time": round(time.time(), 3), **facts}
        append(self._path, (json.dumps(entry) + "\n").encode(), durable)


class Journaled:
    """What has a run directory to itself, with a journal in it, until its `with` block ends."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self._held = contextlib.ExitStack()
        self._held.enter_context(directory.locked())  # before anything is read: two servers must not write one run
        self.journal = Journal(directory.path / "journal.jsonl")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of the directory."""
        self._held.close()
