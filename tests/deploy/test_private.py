"""What servers, devices, authorities and dealers write is their owner's alone; a device's state is one process's."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest
from deploy_harness import Loopback
from offline import Offline, quick_recipe

from personafl.deploy import pki
from personafl.deploy.device.serving import keep_best
from personafl.errors import Busy
from personafl.storage.files import locked


def open_to_others(folder: Path) -> list[str]:
    return [str(path) for path in (folder, *folder.rglob("*")) if stat.S_IMODE(path.stat().st_mode) & 0o077]


def test_nobody_else_may_read_what_they_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    pki.init(tmp_path / "pki")
    pki.issue(tmp_path / "pki", "device-0")
    with Offline(quick_recipe(rounds=2), tmp_path) as run:
        run.go_on(1).open()
        run.train(0)
        run.settle(0)
        assert len(list((tmp_path / "run" / "updates").iterdir())) == 1
        assert open_to_others(tmp_path / "run") == []
        run.go_on()
        run.clients[0].receive(run.rounds.final().whole)
        keep_best(run.clients[0], tmp_path / "devices" / "device-0")
    assert (tmp_path / "devices" / "device-0" / "model.safetensors").exists()
    for folder in ("run", "devices/device-0", "pki", "dealt"):
        assert open_to_others(tmp_path / folder) == [], folder


def test_dealt_data_are_private_also_where_others_may_look(tmp_path: Path) -> None:
    (tmp_path / "dealt").mkdir(mode=0o755)
    from personafl.deploy.device.dealing import deal

    _, files = deal(quick_recipe(), tmp_path / "dealt")
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600, 0o600]


def test_a_servers_directory_of_version_0_1_is_closed(tmp_path: Path) -> None:
    with Offline(quick_recipe(), tmp_path) as run:
        run.go_on(1)
    (tmp_path / "run").chmod(0o755)
    with Offline(quick_recipe(), tmp_path):
        assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700


def test_two_processes_do_not_share_a_state(tmp_path: Path) -> None:
    made = Loopback(quick_recipe(), tmp_path)
    state = tmp_path / "devices" / "device-0"
    state.mkdir(parents=True)
    with locked(state, "is at work"), pytest.raises(Busy) as caught:
        asyncio.run(made.device("device-0"))
    assert str(caught.value).startswith(f"{state}: another process (")
    assert str(caught.value).endswith("is a device with this --state; end that one, or choose another --state")
