"""What a server or device finds: files that were damaged or lost, a disk that was full, a recipe that is bait."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from processes import SMALL, recipe_of
from test_updates import FOREVER, Open, second_round

from personafl.deploy.device.dealing import deal
from personafl.deploy.device.training import LocalClient
from personafl.deploy.net.identity import Identity
from personafl.deploy.net.messages import Hello
from personafl.deploy.server.rounds import Rounds
from personafl.errors import BadInput, StorageFailed
from personafl.storage.journal import Journal


def test_devices_may_enrol_while_others_are_gone_through(tmp_path: Path) -> None:
    """The event loop looks at the members while the worker thread takes one in."""
    hello = Hello(samples=50, input_shape=[1, 8, 8], classes=10)
    with Rounds(recipe_of("fedavg", data=SMALL["data"] | {"normalize": "none"}), tmp_path / "run") as rounds:
        for number in range(3):
            rounds.enrol(Identity(f"device-{number}", "device", number, 0, FOREVER), hello)
        looking = iter(rounds.members.items())
        next(looking)
        rounds.enrol(Identity("device-3", "device", 3, 0, FOREVER), hello)
        rounds.leave(1)
        assert len(list(looking)) == 2
        assert len(rounds.members) == 4


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.write("created", run="a")
    whole, write = (tmp_path / "journal.jsonl").read_bytes(), os.write
    space = [10]

    def full(descriptor: int, data: Any) -> int:
        if space[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = write(descriptor, bytes(data)[: space[0]])
        space[0] -= done
        return done

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StorageFailed):
        journal.write("enrolled", number=1)
    monkeypatch.undo()
    assert (tmp_path / "journal.jsonl").read_bytes() == whole
    journal.write("enrolled", number=2)
    assert [entry["event"] for entry in Journal(tmp_path / "journal.jsonl").entries] == ["created", "enrolled"]


def test_what_could_not_be_cut_back_is_before_the_next_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from personafl.storage import journal as module

    journal = Journal(tmp_path / "journal.jsonl")
    journal.write("created", run="a")

    def failing(*_: Any) -> int:
        with open(tmp_path / "journal.jsonl", "ab") as file:
            file.write(b'{"event": "enr')
        raise StorageFailed("full")

    def refused(*_: Any) -> None:
        raise StorageFailed("full")

    monkeypatch.setattr(module, "append", failing)
    monkeypatch.setattr(module, "cut", refused)
    with pytest.raises(StorageFailed):
        journal.write("enrolled", number=1)
    monkeypatch.undo()
    journal.write("enrolled", number=2)
    assert [entry.get("number") for entry in Journal(tmp_path / "journal.jsonl").entries] == [None, 2]


def test_a_flipped_bit_in_any_line_is_found(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    for number in range(3):
        journal.write("enrolled", number=number, name=f"device-{number}", samples=50)
    whole = path.read_bytes()
    silent = []
    for place in range(len(whole)):
        if whole[place : place + 1] == b"\n":
            continue
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            found = Journal(path).entries
        except BadInput as error:
            assert "line " in str(error)  # noqa: PT017 - what is not found is what the test is about
        else:
            silent.append((place, found))
    assert silent == []


def test_a_journal_of_version_0_1_is_read(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_text(json.dumps({"event": "created", "time": 1.0, "run": "a"}) + "\n")
    assert Journal(tmp_path / "journal.jsonl").entries == [{"event": "created", "time": 1.0, "run": "a"}]


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    return second_round(tmp_path, recipe_of("fedavg", 2, data=SMALL["data"] | {"normalize": "none"}))


@pytest.mark.parametrize("lines", [0, 1, 3])
def test_a_lost_journal_is_refused_and_the_model_kept(opened: Open, lines: int) -> None:
    """One round is done; without its journal a server would begin again, and remove the model."""
    rounds, path = opened.rounds, opened.rounds.directory.path
    rounds.__exit__()
    journal = path / "journal.jsonl"
    journal.write_text("".join(line + "\n" for line in journal.read_text().splitlines()[:lines]))
    before = {file.name: file.read_bytes() for file in path.iterdir() if file.suffix == ".safetensors"}
    with pytest.raises(BadInput, match=r"journal\.jsonl: does not speak of the 1 rounds that are done"):
        Rounds(rounds.recipe, path)
    assert {file.name: file.read_bytes() for file in path.iterdir() if file.suffix == ".safetensors"} == before
    assert before


@pytest.mark.parametrize("damage", ["flipped", "lost"])
def test_an_update_that_was_damaged_since_is_not_used(opened: Open, damage: str) -> None:
    rounds = opened.rounds
    rounds.accept(opened.one, opened.update, opened.payload)
    (file,) = (rounds.directory.path / "updates").iterdir()
    if damage == "lost":
        file.unlink()
    else:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1  # of the last weight: it can be read, and is another
        file.write_bytes(data)
    with pytest.raises(BadInput, match="was lost or damaged since it was accepted; put a copy back"):
        rounds.close()
    file.write_bytes(opened.payload)
    assert rounds.close().taken == (0,)


BAIT = [
    {"compare": {"methods": ["bait_of_a_server:x"]}},
    {"compare": {"options": {"bait_of_a_server:x": {"a": 1}}}},
    {"compare": {"variants": {"v": {"method": {"name": "bait_of_a_server:x"}}}, "methods": ["v"]}},
    {"pretrain": {"rounds": 1, "method": {"name": "bait_of_a_server:x"}}},
    {"method": {"name": "bait_of_a_server:x"}},
    {"model": {"name": "bait_of_a_server:x"}},
]


@pytest.mark.parametrize("bait", BAIT)
def test_a_recipe_makes_no_device_import_anything(
    bait: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bait_of_a_server.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    served, files = deal(recipe_of("fedavg", 2), tmp_path / "dealt")
    values = served.model_dump(mode="json", exclude_none=True) | bait
    given = "the recipe of a server", str(files[0]), 0, None, tmp_path / "state", "0" * 32
    try:
        LocalClient.opened(tomli_w.dumps(values).encode(), *given)
    except BadInput as error:
        assert "a device runs only what personafl comes with" in str(error)  # noqa: PT017 - or it is not looked at
    assert "bait_of_a_server" not in sys.modules


def test_a_recipe_that_is_none_is_one_line(tmp_path: Path) -> None:
    for text in (b"\xff\xfe", b"[[", b"= 1"):
        with pytest.raises(BadInput, match="the recipe of a server: is no TOML") as caught:
            LocalClient.opened(text, "the recipe of a server", "x", 0, None, tmp_path, "0" * 32)
        assert "\n" not in str(caught.value)
