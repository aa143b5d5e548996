"""The commands for certificates, servers and devices: what they print, and one line for what a user gets wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import recipe_of
from typer.testing import CliRunner

from personafl.cli import app
from personafl.deploy.device.dealing import deal
from personafl.errors import BadInput
from personafl.storage.journal import Journaled
from personafl.storage.rundir import RunDirectory


def run(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False, standalone_mode=False)
    return str(result.output)


def failed(*words: object) -> str:
    with pytest.raises(BadInput) as caught:
        CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False, standalone_mode=False)
    return str(caught.value)


def test_certificates_from_the_command_line(tmp_path: Path) -> None:
    folder = tmp_path / "pki"
    assert "keep" in run("pki", "init", folder)
    assert "device-anna: carry" in run("pki", "issue", folder, "server", "device-anna")
    assert "1 certificates revoked" in run("pki", "revoke", folder, "device-anna")
    issued = json.loads((folder / "issued.json").read_text())["issued"]
    assert [(entry["name"], entry["number"], entry["revoked"]) for entry in issued] == [
        ("server", None, False),
        ("device-anna", 0, True),
    ]
    assert "device-NAME" in failed("pki", "issue", folder, "device-1", "anna")
    assert not (folder / "device-1.pem").exists()


def test_a_server_without_what_it_needs_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "pki"
    run("pki", "init", folder)
    assert "is not there" in failed("server", "rounds=2", "--identity", folder / "server.pem")
    run("pki", "issue", folder, "server")
    message = failed("server", "rounds=2", "--identity", folder / "server.pem", "--out", tmp_path / "run")
    assert "deploy.input_shape" in message


def test_nobody_at_home(tmp_path: Path) -> None:
    folder = tmp_path / "pki"
    run("pki", "init", folder)
    run("pki", "issue", folder, "coordinator")
    assert "localhost:1" in failed("status", "--server", "localhost:1", "--identity", folder / "coordinator.pem")


def test_a_journal_is_verified_and_a_run_copied(tmp_path: Path) -> None:
    with Journaled(RunDirectory.create(tmp_path / "run", {"recipe.toml": ""}, 0o700)) as made:
        made.journal.write("created", run="a")
        made.journal.write("left", number=1)
        made.commit(2, b"state")
    head = made.journal.head
    assert f"2 lines are as they were written; head {head}" in run("audit", "verify", tmp_path / "run", "--head", head)
    assert "after 2 rounds, 2 lines" in run("backup", tmp_path / "run", tmp_path / "copy").replace("\n", " ")
    assert head in run("audit", "verify", tmp_path / "copy")
    assert "has no journal.jsonl" in failed("backup", tmp_path, tmp_path / "other")
    assert "is not there" in failed("audit", "verify", tmp_path)


def test_data_are_dealt_with_the_recipe_of_their_server(tmp_path: Path) -> None:
    said = run("data", "deal", "--partition", "iid:clients=4", "--out", tmp_path / "dealt")
    assert said.startswith("4 files and recipe.toml")
    text = (tmp_path / "dealt" / "recipe.toml").read_text()
    assert "[deploy]" in text
    assert "devices = 4" in text


def test_predicting_without_a_model_says_so(tmp_path: Path) -> None:
    deal(recipe_of("fedavg"), tmp_path)
    assert "model.safetensors" in failed("predict", tmp_path, "--data", tmp_path / "device-0.safetensors")
