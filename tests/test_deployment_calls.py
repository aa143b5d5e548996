"""Certificates, servers, devices and papers from Python: as the commands, which call the same functions."""

from __future__ import annotations

import sys
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest

import personafl

RECIPE = {
    "rounds": 2,
    "model": {"name": "mlp", "hidden": [8]},
    "method": "ditto",
    "data": {"partition": {"kind": "iid", "clients": 2}},
    "deploy": {"input_shape": [1, 8, 8], "classes": 10, "devices": 2, "heartbeat": 0.5},
}
PROCESS = """
import sys, personafl
from pathlib import Path
folder, name, where = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
identity = folder / "pki" / f"{name}.pem"
if name == "server":
    personafl.run_server(str(folder / "dealt" / "recipe.toml"), identity=identity, listen=where, out=folder / "run",
        tell=lambda text: print(text, flush=True))
else:
    data = folder / "dealt" / f"{name}.safetensors"
    personafl.run_device(where, data=data, identity=identity, state=folder / name)
    print(personafl.predict(folder / name, data).score)
"""


def test_certificates(tmp_path: Path) -> None:
    assert personafl.make_authority(tmp_path / "pki").name == "ca.pem"
    files = personafl.issue_certificates(tmp_path / "pki", ["server", "device-1"])
    assert set(files) == {"server", "device-1"}
    assert files["device-1"].key.exists()
    assert personafl.revoke_certificates(tmp_path / "pki", "device-1") == 1


BAD: list[tuple[Any, str]] = [
    (lambda path: personafl.issue_certificates(path, "server"), "names = 'server': give a list"),
    (lambda path: personafl.issue_certificates(path, ["printer"]), "printer"),
    (lambda path: personafl.issue_certificates(path / "none", ["server"]), "none"),
    (lambda path: personafl.ask_status("localhost:1", identity=path / "no.pem"), "no.pem"),
    (lambda path: personafl.drop_device("localhost:1", "server", identity=path / "no.pem"), "is no device's"),
    (lambda path: personafl.run_server({"rounds": 1}, identity=path / "no.pem"), "no.pem|deploy"),
    (lambda path: personafl.reproduce("quped", size="large"), "size = 'large': give 'small' or 'paper'"),  # type: ignore[arg-type]
    (lambda path: personafl.reproduce("nobody"), "nobody"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_wrong_calls_are_one_line(call: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(personafl.PersonaError, match=message) as caught:
        call(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_flower_app(tmp_path: Path) -> None:
    recipe = {**RECIPE, "data": {"normalize": "none"}}
    assert (personafl.write_flower_app(recipe, tmp_path / "app") / "pyproject.toml").exists()


@pytest.mark.system
def test_a_server_and_devices_as_processes(tmp_path: Path) -> None:
    personafl.make_authority(tmp_path / "pki")
    personafl.issue_certificates(tmp_path / "pki", ["server", "device-0", "device-1"])
    personafl.deal(RECIPE, out=tmp_path / "dealt")
    with Popen(
        [sys.executable, "-c", PROCESS, str(tmp_path), "server", "localhost:0"], stdout=PIPE, text=True
    ) as serving:
        assert serving.stdout is not None
        line = next(line for line in serving.stdout if "port " in line)
        port = line.partition("port ")[2].partition(",")[0]
        devices = [
            Popen([sys.executable, "-c", PROCESS, str(tmp_path), name, f"localhost:{port}"], stdout=PIPE, text=True)
            for name in ("device-0", "device-1")
        ]
        scores = [float(device.communicate(timeout=600)[0]) for device in devices]
        assert serving.wait(600) == 0
    assert all(0 <= score <= 1 for score in scores)
    assert (tmp_path / "run").is_dir()


@pytest.mark.system
def test_a_table_of_a_paper(tmp_path: Path) -> None:
    settings = {"rounds": 2, "engine.threads": 1}
    (shown, *_) = personafl.reproduce("fedbcd/figure3a", seeds=[0], settings=settings, out=tmp_path / "r")
    assert shown.name.startswith("fedbcd/")
    assert shown.to_json()["rows"]
