"""The run directory: the single truth about a run.

    recipe.toml       the resolved recipe
    environment.json  versions, machine, command
    recipe.sha256     the recipe's fingerprint: one that was changed since is refused
    split.json        the data's fingerprint and sizes
    metrics.jsonl     a line per round and per scoring
    checkpoint.json   the last committed round; names the files below
    server-N.safetensors, states/…, tuned/…   see `store`
    global.safetensors, result.json, clients.csv, report.html   at the end

A checkpoint is committed by replacing checkpoint.json; whatever else a crash leaves behind is cut off or removed when
the run is opened again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shlex
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from personafl.errors import BadInput
from personafl.storage.files import append, atomic_write, cut, locked, read_json, storage, sync, write_json
from personafl.storage.seals import sealed_json

COMPARISON_FILE = "comparison.toml"  # of a directory that has the runs of a comparison
PAGE_FILE = "report.html"
# What metrics.jsonl calls the metrics of a scoring that have other names everywhere else.
_IN_FILE = {"accuracy": "mean", "accuracy_weighted": "weighted", "accuracy_std": "std"}


@dataclass(frozen=True)
class Checkpoint:
    """What a committed checkpoint says."""

    rounds: int = 0  # completed
    metrics_bytes: int = 0
    metrics: int | None = None  # checksum of so many bytes of metrics.jsonl; None: of version 0.1, which had none
    journal_bytes: int = 0  # of a server: of what the journal said then
    journal: int = 0  # and their checksum
    journal_head: str = ""  # and the hash of their chain; of version 0.1 empty
    states: int = 0  # the store's index
    tuned: int = 0  # the index of the fine-tuned states
    server: int = 0  # checksum of the server's state
    bytes_down: int = 0
    bytes_up: int = 0
    seconds: float = 0.0
    time: float | None = None  # virtual, of a cloud or a buffer
    before: tuple[Checkpoint, ...] = ()  # of a server: those that it can go back to, the newest first


_SINCE = {
    "metrics",
    "journal_bytes",
    "journal",
    "journal_head",
    "before",
}  # what checkpoints of version 0.1 do not have


class RunDirectory:
    """Reads and writes one run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metrics = 0  # checksum of all that was recorded

    @classmethod
    def create(cls, path: Path, files: dict[str, str], mode: int = 0o755) -> RunDirectory:
        """Make a new directory with its first files, all at once; a crash leaves nothing under its name."""
        refuse_existing(path)
        with storage(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
            try:
                temporary.chmod(mode)
                for name, text in files.items():
                    sealed = sealed_json(text, name) if name.endswith(".json") else text.encode()
                    atomic_write(temporary / name, sealed)
                    if name.endswith(".toml"):
                        atomic_write(_fingerprint_file(temporary / name), _fingerprint(text.encode()))
                temporary.rename(path)
                sync(path.parent)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
        return cls(path)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory: two processes must not write one run."""
        with locked(self.path, "is running it"):
            yield

    def checkpoint(self) -> Checkpoint:
        """Return the last committed checkpoint, or the beginning."""
        path = self.path / "checkpoint.json"
        if not path.exists():
            return Checkpoint()
        values = read_json(path)
        known = {field.name for field in dataclasses.fields(Checkpoint)}
        try:
            if not known - _SINCE <= values.keys():
                raise TypeError("some of it is missing")
            before = tuple(Checkpoint(**past) for past in values.pop("before", ()))
            return Checkpoint(**values, before=before)
        except (TypeError, AttributeError) as error:
            raise BadInput(f"{path}: not a checkpoint of this version; use the version that began the run") from error

    def commit(self, checkpoint: Checkpoint, server: bytes, keep: int = 1) -> None:
        """Make a checkpoint the truth, and keep so many in all. The stores' states are durable already."""
        past: tuple[Checkpoint, ...] = ()
        if keep > 1 and (self.path / "checkpoint.json").exists():
            last = self.checkpoint()
            past = (dataclasses.replace(last, before=()), *last.before)
        atomic_write(self._server_file(checkpoint.rounds), server)
        earlier = tuple(one for one in past if one.rounds < checkpoint.rounds)[: keep - 1]
        self._make_true(dataclasses.replace(checkpoint, server=zlib.crc32(server), before=earlier))

    def go_back(self, checkpoint: Checkpoint) -> None:
        """Make an earlier checkpoint the truth, and forget those since."""
        earlier = tuple(one for one in self.checkpoint().before if one.rounds < checkpoint.rounds)
        self._make_true(dataclasses.replace(checkpoint, before=earlier))

    def _make_true(self, checkpoint: Checkpoint) -> None:
        write_json(self.path / "checkpoint.json", dataclasses.asdict(checkpoint))
        self._remove_servers_but(checkpoint)

    def forget_tuned(self) -> None:
        """Commit the last checkpoint without the fine-tuned states: what comes out of more rounds is tuned anew."""
        checkpoint = self.checkpoint()
        if checkpoint.tuned:
            self._make_true(dataclasses.replace(checkpoint, tuned=0))

    def replace_recipe(self, text: str, name: str = "recipe.toml") -> None:
        """Put another recipe in the place of the one that the directory was begun with; a crash leaves one of both."""
        file = self.path / name
        with storage(file):
            _fingerprint_file(file).unlink(missing_ok=True)
        atomic_write(file, text.encode())
        atomic_write(_fingerprint_file(file), _fingerprint(text.encode()))

    def server_bytes(self, checkpoint: Checkpoint) -> bytes:
        """Return the server's state at a checkpoint."""
        path = self._server_file(checkpoint.rounds)
        try:
            server = path.read_bytes()
        except OSError as error:
            raise BadInput(f"{path}: the checkpoint needs this file and it cannot be read") from error
        if zlib.crc32(server) != checkpoint.server:
            raise BadInput(f"{path}: the checkpoint needs this file and it was damaged or changed since")
        return server

    def rewind(self, checkpoint: Checkpoint) -> None:
        """Cut off what was written after a checkpoint."""
        cut(self.path / "metrics.jsonl", checkpoint.metrics_bytes)
        self._metrics = zlib.crc32(self._metrics_of(checkpoint))
        self._remove_servers_but(checkpoint)
        with storage(self.path):
            for path in self.path.glob("*.partial"):
                path.unlink()

    def record(self, *entries: dict[str, Any], durable: bool = False) -> tuple[int, int]:
        """Append metrics; return the file's length and checksum, which a checkpoint has once they are durable."""
        lines = "".join(json.dumps(_renamed(entry, _IN_FILE), sort_keys=True) + "\n" for entry in entries)
        length = append(self.path / "metrics.jsonl", lines.encode(), durable)
        self._metrics = zlib.crc32(lines.encode(), self._metrics)
        return length, self._metrics

    def metrics(self) -> list[dict[str, Any]]:
        """Return all recorded metrics; of a run in progress the last line may be half written, and is left out."""
        path = self.path / "metrics.jsonl"
        try:
            whole, _, _ = self._metrics_of(self.checkpoint(), more=True).decode().rpartition("\n")
        except UnicodeDecodeError as error:
            raise BadInput(f"{path}: cannot be read ({error})") from error
        return [_entry(path, number, line) for number, line in enumerate(whole.splitlines(), 1)]

    def _metrics_of(self, checkpoint: Checkpoint, more: bool = False) -> bytes:
        """Return the metrics up to a checkpoint, if they are as they were, or all."""
        path = self.path / "metrics.jsonl"
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            data = b""
        except OSError as error:
            raise BadInput(f"{path}: cannot be read ({error})") from error
        committed = data[: checkpoint.metrics_bytes]
        whole = len(data) >= checkpoint.metrics_bytes or (self.path / "result.json").exists()
        if whole and checkpoint.metrics not in (None, zlib.crc32(committed)):
            raise BadInput(f"{path}: was damaged or changed since the checkpoint; put a copy back, or begin a new run")
        return data if more else committed

    def _server_file(self, rounds: int) -> Path:
        return self.path / f"server-{rounds:06d}.safetensors"

    def _remove_servers_but(self, checkpoint: Checkpoint) -> None:
        kept = {self._server_file(one.rounds) for one in (checkpoint, *checkpoint.before)}
        with storage(self.path):
            for path in set(self.path.glob("server-*.safetensors")) - kept:
                path.unlink()


def _entry(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError:
        entry = None
    if not isinstance(entry, dict) or not {"event", "number"} <= entry.keys():
        raise BadInput(f"{path}: line {number} is not a metric; the file was changed or damaged")
    return _renamed(entry, {there: here for here, there in _IN_FILE.items()})


def _renamed(entry: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in entry.items()} if entry["event"] == "score" else entry


def check_unchanged(recipe: Path) -> None:
    """Refuse a recipe in a run directory that is not as it was written; of old directories, one that is empty."""
    before, remedy = _fingerprint_file(recipe), "put back the copy that the run began with, or begin a new run"
    try:
        text = recipe.read_bytes()
        if not text.strip():
            raise BadInput(f"{recipe}: is empty, and was not when the run began; {remedy}")
        if before.exists() and before.read_bytes().strip() != _fingerprint(text):
            raise BadInput(f"{recipe}: was changed or damaged since the run began; {remedy}")
    except OSError as error:
        raise BadInput(f"{recipe}: cannot be read ({error.strerror}); {remedy}") from error


def _fingerprint_file(recipe: Path) -> Path:
    return recipe.with_suffix(".sha256")


def _fingerprint(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode()


def run_path(comparison: Path, method: str, seed: int) -> Path:
    """Return the directory of one run of a comparison."""
    return comparison / f"{method}-seed{seed}"


def refuse_existing(path: Path) -> None:
    """Fail if a new run directory cannot have this path because something is there."""
    with storage(path):
        if path.exists():
            raise BadInput(f"{path}: exists already; choose another --out, or continue it with: {resume_command(path)}")


def resume_command(path: Path) -> str:
    """Return what continues a run, ready to be pasted into a shell."""
    return f"personafl resume {shlex.quote(str(path))}"


def set_aside(path: Path) -> None:
    """Give a failed run's directory another name, so that it can begin anew under its own."""
    with storage(path):
        path.rename(claim_name(path.parent, f"{path.name}.failed"))


def claim_name(folder: Path, name: str) -> Path:
    """Return a path in `folder` that is free: name-001, name-002, …"""
    number = 1
    while (folder / f"{name}-{number:03d}").exists():
        number += 1
    return folder / f"{name}-{number:03d}"
