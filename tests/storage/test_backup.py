"""A copy of a run directory that is written to meanwhile is what a kill would have left."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from personafl.errors import BadInput, Failed
from personafl.storage import backup
from personafl.storage.backup import back_up
from personafl.storage.files import atomic_write
from personafl.storage.journal import Journal, Journaled
from personafl.storage.rundir import RunDirectory


class Run:
    """A server that accepts updates and closes rounds, in as few files as a real one."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.run = Journaled(RunDirectory.create(folder, {"recipe.toml": ""}, 0o700))
        (folder / "updates").mkdir(mode=0o700)
        self.done = 0
        self.run.journal.write("created", run="a")
        self.run.commit(0, b"state 0")

    def accept(self, number: int, update: bytes = b"update") -> None:
        atomic_write(self.path / "updates" / f"{self.done:06d}-{number:06d}.safetensors", update)
        digest = sha256(update).hexdigest()
        self.run.journal.write("accepted", round=self.done, number=number, digest=digest)

    def close(self) -> None:
        self.done += 1
        self.run.commit(self.done, f"state {self.done}".encode())
        for path in (self.path / "updates").iterdir():
            path.unlink()
        self.run.journal.write("closed", round=self.done - 1)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(tmp_path / "run")
    made.accept(0)
    made.close()
    made.accept(0)
    return made


def when(monkeypatch: pytest.MonkeyPatch, name: str, then: Callable[[], Any]) -> list[Path]:
    """Have something happen each time a file of a name is about to be copied; return the copies that were made."""
    copied: list[Path] = []

    def write(path: Path, *parts: bytes) -> None:
        copied.append(path)
        if path.name == name:
            then()
        atomic_write(path, *parts)

    monkeypatch.setattr(backup, "atomic_write", write)
    monkeypatch.setattr(backup, "_PAUSE", 0.0)
    return copied


def sound(copy: Path) -> tuple[int, list[str]]:
    """Return the rounds and the updates of a copy, which can be gone on with."""
    with Journaled(RunDirectory(copy)) as again:
        checkpoint = again.checkpoint()
        assert again.directory.server_bytes(checkpoint) == f"state {checkpoint.rounds}".encode()
    return checkpoint.rounds, sorted(path.name for path in (copy / "updates").iterdir())


def test_a_copy_is_whole_and_its_owner_s_alone(run: Run, tmp_path: Path) -> None:
    found = back_up(run.path, tmp_path / "copy")
    assert (found.rounds, found.lines) == (1, 4)
    assert sound(tmp_path / "copy") == (1, ["000001-000000.safetensors"])
    assert {path.stat().st_mode & 0o77 for path in (tmp_path / "copy", *(tmp_path / "copy").rglob("*"))} == {0}
    same = {path.name: path.read_bytes() for path in run.path.iterdir() if path.is_file() and path.name != "lock"}
    copies = {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir() if path.is_file()}
    assert {name: copies[name] for name in same} == same


@pytest.mark.parametrize("name", ["checkpoint.json", "recipe.toml", "server-000001.safetensors"])
def test_what_comes_meanwhile_is_left_out(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    numbers = iter(range(1, 100))
    when(monkeypatch, name, lambda: run.accept(next(numbers)))
    back_up(run.path, tmp_path / "copy")
    assert sound(tmp_path / "copy") == (1, ["000001-000000.safetensors"])
    assert len(Journal(tmp_path / "copy" / "journal.jsonl").entries) == 4


@pytest.mark.parametrize("name", ["checkpoint.json", "recipe.toml", "000001-000000.safetensors", "journal.jsonl"])
def test_a_round_that_ends_meanwhile_has_it_copied_anew(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    left = [run.close]
    when(monkeypatch, name, lambda: left.pop()() if left else None)
    assert back_up(run.path, tmp_path / "copy").rounds == 2
    assert sound(tmp_path / "copy") == (2, [])


def test_an_update_that_another_takes_the_place_of_has_it_copied_anew(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [lambda: run.accept(0, b"another")]
    when(monkeypatch, "recipe.toml", lambda: left.pop()() if left else None)
    back_up(run.path, tmp_path / "copy")
    update = tmp_path / "copy" / "updates" / "000001-000000.safetensors"
    assert update.read_bytes() == b"another"
    assert Journal(tmp_path / "copy" / "journal.jsonl").entries[-1]["digest"] == sha256(b"another").hexdigest()


def test_rounds_that_end_sooner_than_they_are_copied_are_said_to(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backup, "_TRIES", 3)
    when(monkeypatch, "recipe.toml", run.close)
    with pytest.raises(Failed, match="rounds end sooner"):
        back_up(run.path, tmp_path / "copy")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_journal_that_was_changed_is_not_copied(run: Run, tmp_path: Path) -> None:
    journal = run.path / "journal.jsonl"
    journal.write_bytes(journal.read_bytes().replace(b'"run": "a"', b'"run": "b"'))
    with pytest.raises(BadInput, match="line 1 is damaged"):
        back_up(run.path, tmp_path / "copy")


def test_what_cannot_be_copied_is_named(run: Run, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"has no journal\.jsonl"):
        back_up(tmp_path, tmp_path / "copy")
    with pytest.raises(BadInput, match="exists already"):
        back_up(run.path, tmp_path)
