"""The server's journal: what happened, one JSON line each, in the order it happened.

Lines that decide how the run goes on are durable before anyone hears of them. A crash may leave half a line at the end,
which is cut off, and so is what a write leaves that fails, on a full disk say. Lines are a chain (`chain`): each has a
checksum of itself and the hash of all before it, so the journal is also the log that an audit needs.
"""

import contextlib
import dataclasses
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from personafl.errors import BadInput, StorageFailed
from personafl.storage.chain import Chain
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
        self._chain = Chain()
        self.entries = [self._read(number, line) for number, line in enumerate(whole.splitlines(keepends=True), 1)]
        self._listeners: list[Callable[[dict[str, Any]], None]] = []

    @property
    def head(self) -> str:
        """The hash of all lines."""
        return self._chain.head

    def follow(self, listener: Callable[[dict[str, Any]], None], *, past: bool = True) -> None:
        """Have a listener hear the lines that were there at the start, and from now on each that is added."""
        for entry in self.entries if past else ():
            listener(entry)
        self._listeners.append(listener)

    def write(self, event: str, *, durable: bool = True, **facts: Any) -> None:
        """Add a line, or none if that fails."""
        self._add([_entry(event, facts)], durable)

    def write_all(self, event: str, many: Iterable[Mapping[str, Any]]) -> None:
        """Add a line for each of several events of a kind, durable together, or none if that fails."""
        self._add([_entry(event, facts) for facts in many], durable=True)

    def _add(self, entries: Sequence[dict[str, Any]], durable: bool) -> None:
        with self._lock:
            chain, lines = dataclasses.replace(self._chain), b""
            for entry in entries:
                line = chain.line(entry)
                chain.add(line)
                lines += line
            self._append(lines, durable)
            self._chain = chain
            for entry in entries:
                for listener in self._listeners:
                    listener(entry)

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

    def _read(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            return self._chain.read(line)
        except ValueError as error:
            raise BadInput(
                f"{self._path}: line {number} is damaged ({error}); put a copy back, or choose another --out"
            ) from error


def _entry(event: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    return {"event": event, "time": round(time.time(), 3), **facts}


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
        journal = self.journal
        return dataclasses.replace(
            checkpoint, journal_bytes=journal.length, journal=journal.crc, journal_head=journal.head
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of the directory."""
        self._held.close()
