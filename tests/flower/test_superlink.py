"""The same app on a real SuperLink with three real SuperNodes, over TLS."""

from __future__ import annotations

import shutil
import ssl
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra flower is not installed")

import httpx
from processes import free_port, plain, recipe_of, simulated, unscaled
from superlink import deployment

from personafl.deploy.device.state import DeviceState
from personafl.storage.rundir import RunDirectory

pytestmark = pytest.mark.system


def test_superlink_and_supernodes_give_the_simulators_bits_over_a_kill(tmp_path: Path) -> None:
    """One SuperNode is killed after the first round, and started again: its personal state was in its folder."""
    recipe = unscaled(recipe_of("fedalt", rounds=2))
    with deployment(recipe, tmp_path) as made:
        made.start_superlink()
        for number in made.numbers:
            made.start_node(number)
        made.start_app()
        made.until(lambda: made.closed() == 1)
        made.kill("node-1")
        made.start_node(1)
        made.until(lambda: (made.out / "deployed.json").exists())
        models = [made.state(number) for number in made.numbers]
        made.until(lambda: all(list(folder.glob("*/model.safetensors")) for folder in models))
        made.until(lambda: "finished: 2 rounds; 3 nodes" in made.log("user"))

        run = made.journal()[0]["run"]
        directory = RunDirectory(made.out)
        states = {number: DeviceState(made.state(number) / run, run, number) for number in made.numbers}
        entries = {number: plain(state.entry or {}) for number, state in states.items()}
        assert (directory.server_bytes(directory.checkpoint()), entries) == simulated(recipe)
        assert [state.rounds for state in states.values()] == [[0, 1]] * 3
        assert sum("joined: client 1" in line for line in made.log("user").splitlines()) == 2


def test_what_the_documentation_says_of_the_port_is_true(tmp_path: Path) -> None:
    """Runs are started by anyone, tasks are handed to anyone; only the fleet API wants a key. See docs/flower.md."""
    with deployment(unscaled(recipe_of("fedavg")), tmp_path) as made:
        made.start_superlink()
        kind = {"content-type": "application/protobuf", "accept": "application/protobuf"}
        trust = ssl.create_default_context(cafile=made.files.authority)
        with httpx.Client(base_url=f"https://127.0.0.1:{made.port}", verify=trust, trust_env=False) as anyone:

            def status(path: str) -> int:
                return anyone.post(path, headers=kind, content=b"").status_code

            assert status("/v1/control/list-runs") == 200
            assert status("/v1/runtime/acquire-task") == 200
            assert status("/v1/runtime/push-messages") == 401
            assert status("/v1/fleet/pull-messages") == 401
            assert [anyone.get(path).status_code for path in ("/health", "/docs", "/openapi.json")] == [200] * 3


def test_only_registered_keys_are_let_in_and_a_number_belongs_to_one_of_them(tmp_path: Path) -> None:
    """Two nodes with registered keys say that they are client 0, and so does one with a key that nobody knows."""
    with deployment(unscaled(recipe_of("fedavg", 1, rounds=1)), tmp_path) as made:
        made.start_superlink("--enable-supernode-auth")
        for key in ("first", "second", "unknown"):
            made.make_key(key)
        for key in ("first", "second"):
            made.register(key)
        for key in ("first", "second", "unknown"):
            made.start_node(0, key)
        made.start_app("authenticated=true")
        made.until(lambda: made.closed() == 1 and "NUMBER_TAKEN" in made.log("user"))
        events = {entry["event"]: entry for entry in made.journal()}
        assert events["closed"]["taken"] == [0]
        assert events["enrolled"]["name"].startswith("key-")
        assert events["refused"]["text"] == f"number 0 is {events['enrolled']['name']}'s"
        assert made.living["unknown"].poll() is not None
        assert "Failed to initialize the connection to the SuperLink" in made.log("unknown")
        assert made.log("superlink").count("Activated node_id") == 2


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_behind_the_documented_proxy_nodes_train_and_nobody_reaches_the_rest(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "flower.md").read_text()
    server = text[text.index("    # nginx\n") :].partition("\n\n")[0]
    with deployment(unscaled(recipe_of("fedavg", 1, rounds=1)), tmp_path) as made:
        port = free_port()
        changes = {
            "listen 443": f"listen 127.0.0.1:{port}",
            "server.pem": str(made.files.certificate),
            "server.key": str(made.files.key),
            ":8000": f":{made.port}",
        }
        for before, after in changes.items():
            assert before in server
            server = server.replace(before, after)
        made.start_superlink()
        made.start_nginx(server)
        made.start_node(0, port=port)
        made.start_app()
        made.until(lambda: "finished: 1 rounds; 1 nodes" in made.log("user"))
        kind = {"content-type": "application/protobuf", "accept": "application/protobuf"}
        trust = ssl.create_default_context(cafile=made.files.authority)
        with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=trust, trust_env=False) as anyone:
            closed = ("/v1/control/list-runs", "/v1/runtime/acquire-task", "/v1/fleet/../control/list-runs")
            assert [anyone.post(path, headers=kind, content=b"").status_code for path in closed] == [404] * 3
            assert [anyone.get(path).status_code for path in ("/health", "/docs", "/openapi.json")] == [404] * 3
            assert anyone.post("/v1/fleet/pull-messages", headers=kind, content=b"").status_code == 401
