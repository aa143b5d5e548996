"""Damaged files, signals and full disks of real processes: nothing is lost without a word. All of it: `slow`."""

from __future__ import annotations

import base64
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import SMALL, recipe_of

from personafl.deploy import pki
from personafl.deploy.device.datafile import load_own
from personafl.deploy.device.dealing import deal
from personafl.deploy.device.state import DeviceState, Pending
from personafl.deploy.net.renewal import check_lasting
from personafl.errors import BadInput
from personafl.recipe.recipe import Recipe
from personafl.runs.whole import run_in

DRIVER = Path(__file__).with_name("faults.py")


def driven(*words: str) -> None:
    """Run the driver in a process of its own: it forks, which a process that has used gRPC must not."""
    done = subprocess.run([sys.executable, str(DRIVER), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.system
@pytest.mark.parametrize("words", [("damage", "40"), ("kills", "12"), ("full", "25")], ids=lambda words: words[0])
def test_some_faults(words: tuple[str, ...]) -> None:
    driven(*words)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["damage", "kills", "full"])
def test_all_faults(what: str) -> None:
    driven(what)


def test_a_certificate_that_its_authority_did_not_sign_is_named_at_once(tmp_path: Path) -> None:
    """A flipped bit in its signature: TLS refuses it without a word, and the device would call for ever."""
    pki.init(tmp_path)
    files = pki.issue(tmp_path, "device-1")
    check_lasting(files)
    lines = files.certificate.read_text().splitlines()
    lines[-2] = lines[-2][:4] + ("B" if lines[-2][4] != "B" else "C") + lines[-2][5:]
    files.certificate.write_text("\n".join(lines) + "\n")
    with pytest.raises(BadInput, match=r"device-1\.pem: .*ca\.pem did not issue it"):
        check_lasting(files)


def test_a_key_of_an_unknown_curve_is_one_line(tmp_path: Path) -> None:
    pki.init(tmp_path)
    files = pki.issue(tmp_path, "device-1")
    body = base64.b64decode("".join(files.key.read_text().splitlines()[1:-1]))
    other = body.replace(bytes.fromhex("2a8648ce3d030107"), bytes.fromhex("2a8648ce3d030007"))  # of the curve
    assert other != body
    text = base64.encodebytes(other).decode()
    files.key.write_text(f"-----BEGIN PRIVATE KEY-----\n{text}-----END PRIVATE KEY-----\n")
    with pytest.raises(BadInput, match="it or its key cannot be read"):
        check_lasting(files)


def test_data_that_were_dealt_to_another_device_are_spoken_of(tmp_path: Path) -> None:
    recipe, files = deal(recipe_of("fedavg", 2), tmp_path)
    assert load_own(str(files[1]), 1, recipe).note == ""
    assert "was dealt to number 1, and this device is number 0" in load_own(str(files[1]), 0, recipe).note


def test_a_state_under_the_name_of_another_counts_as_damaged(tmp_path: Path) -> None:
    """A file of an earlier round in the place of the last: sound by its checksum, and not what the device knew."""
    state = DeviceState(tmp_path, "run", 0)
    for round_ in range(2):
        state.commit(Pending(round_, "0" * 64, b"u", {"w": torch.full((2,), float(round_))}))
        state.accepted()
    older, newest = sorted(tmp_path.glob("state-*"))[-2:]
    newest.write_bytes(older.read_bytes())
    again = DeviceState(tmp_path, "run", 0)
    assert newest.name in again.note
    assert again.pending is not None
    assert again.pending.round == 1  # the server tells its fate again


def test_a_lost_split_is_written_again(tmp_path: Path) -> None:
    """It says on which data a run was made; one that goes on without would have none at its end."""
    recipe = Recipe.parse({**SMALL, "method": {"name": "fedavg"}, "rounds": 1})
    run_in(tmp_path / "run", recipe)
    before = (tmp_path / "run" / "split.json").read_text()
    (tmp_path / "run" / "split.json").unlink()
    run_in(tmp_path / "run", recipe, resume=True)
    assert (tmp_path / "run" / "split.json").read_text() == before
