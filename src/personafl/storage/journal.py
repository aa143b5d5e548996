"""The server's journal: what happened, one JSON line each, in the order it happened.

Lines that decide how the run goes on are durable before anyone hears of them. A crash may leave half a line at the end,
which is cut off, and so is what a write leaves that fails, on a full disk say. Each line has a checksum of itself.
"""

import contextlib
import dataclasses
import json
import threading
import time
import zlib
from pathlib import Path
from typing import Any, Self

from personafl.errors import BadInput, StorageFailed
from personafl.storage.files import append, cut, storage, sync
from personafl.storage.rundir import Checkpoint, RunDirectory


class Journal:
    """Appends to one file, and reads it back."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with storage(path):
            data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            cut(path, len(whole))
        self.length, self.crc = len(whole), zlib.crc32(whole)
        self._torn = self._loose = False  # half a line may be at the end; lines may not be durable
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
            cut(self._path, self.length)
        self._torn = True
        try:
            self.length = append(self._path, line, durable)
            self.crc, self._torn, self._loose = zlib.crc32(line, self.crc), False, not durable
        except StorageFailed:
            with contextlib.suppress(StorageFailed):  # else before the next line
                cut(self._path, self.length)
                self._torn = False
            raise

    def settle(self) -> None:
        """Make all lines durable."""
        if self._loose:
            with storage(self._path):
                sync(self._path)
            self._loose = False

    def has(self, checkpoint: Checkpoint) -> bool:
        """Say whether all lines are there that were when a checkpoint was made."""
        with storage(self._path):
            data = self._path.read_bytes() if self._path.exists() else b""
        return zlib.crc32(data[: checkpoint.journal_bytes]) == checkpoint.journal


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

    def checkpoint(self) -> Checkpoint:
        """Return the last checkpoint, if the journal is not older than it."""
        checkpoint = self.directory.checkpoint()
        if not self.journal.has(checkpoint):
            raise self.cut_off(checkpoint)
        return checkpoint

    def cut_off(self, checkpoint: Checkpoint) -> BadInput:
        """Return the error that the journal does not reach as far as a checkpoint."""
        return BadInput(
            f"{self.directory.path / 'journal.jsonl'}: does not speak of the {checkpoint.rounds} rounds that are done, "
            "so it was lost or cut; put a copy back, or choose another --out (the model is kept here)"
        )

    def commit(self, rounds: int, server: bytes, keep: int = 1) -> None:
        """Make a checkpoint, of which so many are kept; it remembers how far the journal was."""
        self.journal.settle()
        self.directory.commit(self._now(Checkpoint(rounds=rounds)), server, keep)

    def go_back(self, checkpoint: Checkpoint) -> None:
        """Make an earlier checkpoint the last one; it remembers how far the journal is now."""
        self.journal.settle()
        self.directory.go_back(self._now(checkpoint))

    def _now(self, checkpoint: Checkpoint) -> Checkpoint:
        return dataclasses.replace(checkpoint, journal_bytes=self.journal.length, journal=self.journal.crc)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of the directory."""
        self._held.close()
