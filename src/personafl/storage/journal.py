"""The server's journal: what happened, one JSON line each, in the order it happened.

Lines that decide how the run goes on are durable before anyone hears of them. A crash may leave half a line at the end,
which is cut off, and so is what a write leaves that fails, on a full disk say. Each line has a checksum of itself.
"""

import contextlib
import json
import threading
import time
import zlib
from pathlib import Path
from typing import Any, Self

from personafl.errors import BadInput, StorageFailed
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
        self._length, self._torn = len(whole), False
        self._lock = threading.Lock()  # else a thread would take another's line, half written, for a torn one
        self.entries = [_read(path, number, line) for number, line in enumerate(whole.splitlines(), 1)]

    def write(self, event: str, *, durable: bool = True, **facts: Any) -> None:
        """Add a line, or none if that fails."""
        text = json.dumps({"event": event, "time": round(time.time(), 3), **facts})
        line = f'{text[:-1]}, "crc": {zlib.crc32(text.encode())}}}\n'.encode()
        with self._lock:
            self._append(line, durable)

    def _append(self, line: bytes, durable: bool) -> None:
        if self._torn:
            cut(self._path, self._length)
        self._torn = True
        try:
            self._length = append(self._path, line, durable)
            self._torn = False
        except StorageFailed:
            with contextlib.suppress(StorageFailed):  # else before the next line
                cut(self._path, self._length)
                self._torn = False
            raise


def _read(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """Return a line; those of version 0.1 have no checksum."""
    try:
        entry: dict[str, Any] = json.loads(line)
        last = list(entry)[-1]
        told = entry.pop(last) if len(last) == 3 and isinstance(entry[last], int) else None  # also if its name is hit
        if told is not None and (last, told) != ("crc", zlib.crc32(line.rpartition(b', "crc"')[0] + b"}")):
            raise ValueError("its checksum is another")
    except (ValueError, IndexError, TypeError) as error:
        raise BadInput(
            f"{path}: line {number} is damaged ({error}); put a copy back, or choose another --out"
        ) from error
    return entry


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
