"""Flipped bits, cut, emptied, lost and swapped files, of every directory that is read back: named, or the same result.

Before checksums 63 of 78 damaged device states and 2 of 11 slabs were used without a word. More: `damages.py`.
"""

from __future__ import annotations

import functools
import random
import shutil
from pathlib import Path

import pytest
from damages import PLACES, Place, cases, tried
from offline import Offline, quick_recipe

from personafl.deploy.device.datafile import FORMAT, load_own
from personafl.deploy.device.state import DeviceState
from personafl.errors import BadInput
from personafl.storage.rundir import RunDirectory
from tiers import tiered


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> functools.partial[Place]:
    made: dict[str, Place] = {}

    def get(name: str) -> Place:
        if name not in made:
            made[name] = PLACES[name](tmp_path_factory.mktemp(name) / "place")
        return made[name]

    return functools.partial(get)


def silent(place: Place, share: float, flips: int, folder: Path) -> list[str]:
    """Try a share of all ways to damage a place; return what was neither named nor harmless."""
    wrong, dice = [], random.Random(23)
    for number, (file, how, _) in enumerate(cases(place, flips)):
        if dice.random() < share or (how == "flipped" and share):
            what, text = tried(place, file, how, random.Random(f"{file} {how} {number}"), folder)
            wrong += [f"{file} {how} {number}: {text}"] if what == "SILENT" else []
    return wrong


@pytest.mark.parametrize("name", tiered(PLACES, ["server", "data", "model", "start"]))
def test_no_damage_is_silent(name: str, places: functools.partial[Place], tmp_path: Path) -> None:
    assert silent(places(name), 0.2, 1, tmp_path / "tried") == []


@pytest.mark.system
@pytest.mark.parametrize("name", PLACES)
def test_nor_is_any_other(name: str, places: functools.partial[Place], tmp_path: Path) -> None:
    assert silent(places(name), 1.0, 12, tmp_path / "tried") == []


def flip(file: Path, at: int = -1) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def newest(run: Offline, number: int) -> Path:
    return max((run.folder / "devices" / f"device-{number}").glob("state-*.safetensors"))


def test_a_device_goes_on_with_the_state_before_and_says_so(tmp_path: Path) -> None:
    """The update that the damaged file says was accepted is pending before it: the server tells its fate again."""
    with Offline(quick_recipe(), tmp_path / "whole") as run:
        wanted = run.go_on().outcome()
    with Offline(quick_recipe(), tmp_path / "run") as run:
        run.go_on(2)
        file = newest(run, 0)
    flip(file)
    with Offline(quick_recipe(), tmp_path / "run") as run:
        assert run.said == [f"{file}: was damaged; goes on with what was kept before it, {max_before(file).name}"]
        assert run.clients[0].state.pending is not None
        assert run.go_on().outcome() == wanted
        assert not file.exists()


def max_before(file: Path) -> Path:
    return max(path for path in file.parent.glob("state-*.safetensors") if path != file)


def test_two_damaged_states_are_an_error(tmp_path: Path) -> None:
    with Offline(quick_recipe(), tmp_path) as run:
        run.go_on(2)
        file = newest(run, 0)
    flip(file)
    flip(max_before(file))
    with pytest.raises(BadInput, match=r"state-.*: was damaged .* choose another --state"):
        Offline(quick_recipe(), tmp_path)


def test_states_and_data_of_version_0_1_are_read(tmp_path: Path) -> None:
    """They have no checksum, and the state is one file."""
    with Offline(quick_recipe(), tmp_path) as run:
        wanted = run.go_on(1).outcome()[1][0]
        folder, name = tmp_path / "devices" / "device-0", run.rounds.run
        before = newest(run, 0).read_bytes().replace(b'"crc32":"', b'"czz32":"').replace(b"device 2", b"device 1")
        before = before.replace(b'\\"file\\"', b'\\"then\\"')
        data = tmp_path / "dealt" / "device-0.safetensors"
        old = data.read_bytes().replace(b'"crc32":"', b'"czz32":"').replace(FORMAT.encode(), b"personafl data 1")
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "state.safetensors").write_bytes(before)
    state = DeviceState(folder, name, 0)
    assert {path: leaf.numpy().tobytes() for path, leaf in sorted((state.entry or {}).items())} == wanted
    state.write()
    assert sorted(path.name for path in folder.iterdir()) == ["state-000001-000001.safetensors", "state.safetensors"]
    assert DeviceState(folder, name, 0).rounds == [0]
    data.write_bytes(old)
    assert len(load_own(str(data), 0, run.recipe).data.x)


@pytest.mark.parametrize("lines", tiered(range(1, 8), [1, 7]))
def test_a_journal_that_lost_its_last_lines_is_refused_or_does_no_harm(lines: int, tmp_path: Path) -> None:
    """Those since the checkpoint come again from devices, to the same bits; without the others the run is refused."""
    with Offline(quick_recipe(), tmp_path / "whole") as run:
        wanted = run.go_on().outcome()
    with Offline(quick_recipe(), tmp_path / "run") as run:
        run.go_on(2).open()
        for number in range(2):
            run.train(number)
            run.settle(number)
    journal = tmp_path / "run" / "run" / "journal.jsonl"
    journal.write_text("".join(line + "\n" for line in journal.read_text().splitlines()[:-lines]))
    if lines < 7:  # two tasks and updates, the round's opening, the end of the one before: after the checkpoint
        with Offline(quick_recipe(), tmp_path / "run") as run:
            assert run.go_on().outcome() == wanted
    else:
        with pytest.raises(BadInput, match=r"journal\.jsonl: does not speak of the 2 rounds that are done"):
            Offline(quick_recipe(), tmp_path / "run")


def test_a_damaged_state_of_a_server_names_what_can_be_gone_back_to(tmp_path: Path) -> None:
    with Offline(quick_recipe(), tmp_path) as run:
        run.go_on(3)
        assert [one.rounds for one in RunDirectory(tmp_path / "run").checkpoint().before] == [2, 1]
    flip(tmp_path / "run" / "server-000003.safetensors")
    with pytest.raises(BadInput, match=r"server-000003\.safetensors: .* damaged .* or --roll-back to 2, 1$"):
        Offline(quick_recipe(), tmp_path)
