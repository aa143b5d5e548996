"""A journal is a chain: whatever is done to its lines is found, and the line is named."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from personafl.errors import BadInput, Failed
from personafl.storage.audit import verify
from personafl.storage.journal import Journal, Journaled
from personafl.storage.rundir import RunDirectory

Lines = list[bytes]


def made(folder: Path, lines: int = 8, after: int = 0) -> Path:
    """Write a run directory whose journal has so many lines at its checkpoint, and some after it."""
    with Journaled(RunDirectory.create(folder / "run", {"recipe.toml": ""}, 0o700)) as run:
        for number in range(lines):
            run.journal.write("enrolled", number=number, name=f"device-{number}")
        run.commit(3, b"state")
        for number in range(after):
            run.journal.write("left", number=number)
    return folder / "run"


def resealed(line: bytes, old: bytes, new: bytes) -> bytes:
    """Return a line with other words and the checksum that belongs to them."""
    text = line.rpartition(b', "crc"')[0].replace(old, new) + b"}"
    return text[:-1] + f', "crc": {zlib.crc32(text)}}}\n'.encode()


def edited(lines: Lines) -> Lines:
    return [*lines[:3], lines[3].replace(b"device-3", b"device-9"), *lines[4:]]


def edited_with_its_checksum(lines: Lines) -> Lines:
    return [*lines[:3], resealed(lines[3], b"device-3", b"device-9"), *lines[4:]]


def removed(lines: Lines) -> Lines:
    return [*lines[:3], *lines[4:]]


def removed_at_the_beginning(lines: Lines) -> Lines:
    return lines[1:]


def reordered(lines: Lines) -> Lines:
    return [*lines[:3], lines[4], lines[3], *lines[5:]]


def repeated(lines: Lines) -> Lines:
    return [*lines[:4], *lines[3:]]


def put_in(lines: Lines) -> Lines:
    return [*lines[:3], b'{"event": "left", "number": 1}\n', *lines[3:]]


def cut(lines: Lines) -> Lines:
    return lines[:-2]


def last_edited(lines: Lines) -> Lines:
    return [*lines[:-1], resealed(lines[-1], b"device-7", b"device-9")]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (edited, "line 4 was changed (its checksum is another)"),
        (edited_with_its_checksum, "line 4 was changed since line 5 was written"),
        (removed, "line 4 was removed"),
        (removed_at_the_beginning, "line 1 was removed"),
        (reordered, "line 4 was moved: it stands after line 5"),
        (repeated, "line 4 is there twice"),
        (put_in, "line 4 was put in"),
        (cut, "its end was cut off or changed: the last that the checkpoint of round 3 knows is none of its 6 lines"),
        (last_edited, "its end was cut off or changed"),
    ],
)
def test_what_was_done_to_a_line_is_found(change: Callable[[Lines], Lines], told: str, tmp_path: Path) -> None:
    run = made(tmp_path)
    assert verify(run).lines == 8
    journal = run / "journal.jsonl"
    journal.write_bytes(b"".join(change(journal.read_bytes().splitlines(keepends=True))))
    with pytest.raises(Failed, match=re.escape(told)):
        verify(run)
    if change not in (cut, last_edited):  # the server's own check against its checkpoint finds these
        with pytest.raises(BadInput, match=r"line [1-5] is damaged"):
            Journal(journal)


def test_every_fault_is_told_by_itself(tmp_path: Path) -> None:
    run = made(tmp_path, after=4)
    journal = run / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    lines[1] = resealed(lines[1], b"device-1", b"device-2")
    lines[9], lines[10] = lines[10], lines[9]
    del lines[5]
    journal.write_bytes(b"".join(lines))
    with pytest.raises(Failed) as found:
        verify(run)
    faults = str(found.value).partition("written: ")[2].split("; ")
    assert {re.match(r"line \d+ was \w+", fault)[0] for fault in faults if fault.startswith("line")} == {  # type: ignore[index]
        "line 2 was changed",
        "line 6 was removed",
        "line 10 was moved",
    }


def test_half_a_line_is_no_fault_and_lines_go_on_after_it(tmp_path: Path) -> None:
    run = made(tmp_path)
    with open(run / "journal.jsonl", "ab") as file:
        file.write(b'{"event": "acce')
    assert verify(run).lines == 8
    Journal(run / "journal.jsonl").write("left", number=1)
    assert verify(run).lines == 9


def test_lines_of_version_0_1_are_in_the_chain_too(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", {"recipe.toml": ""}, 0o700).path
    journal = run / "journal.jsonl"
    old = [json.dumps({"event": "enrolled", "time": 1.0, "number": number}) + "\n" for number in range(3)]
    journal.write_text("".join(old))
    Journal(journal).write("left", number=1)
    assert verify(run).lines == 4
    assert [entry["event"] for entry in Journal(journal).entries] == ["enrolled"] * 3 + ["left"]
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join([lines[0], lines[1].replace("1.0", "2.0"), *lines[2:]]))
    with pytest.raises(Failed, match="line 3 or one before it was changed"):
        verify(run)


def test_a_journal_that_was_made_anew_does_not_have_the_head_that_was_noted(tmp_path: Path) -> None:
    run = made(tmp_path)
    noted = verify(run).head
    Journal(run / "journal.jsonl").write("left", number=1)
    assert verify(run, noted).lines == 9
    other = made(tmp_path / "other")
    with pytest.raises(Failed, match="no line has the head"):
        verify(other, noted)


def test_a_folder_without_a_journal_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"journal\.jsonl: is not there"):
        verify(tmp_path)
