"""Servers that are killed, looked at, copied and moved while they are at work: the real commands, as processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import SMALL, free_port, plain, recipe_of, simulated
from prometheus_client.parser import text_string_to_metric_families

from personafl.deploy import pki
from personafl.deploy.device.dealing import deal
from personafl.deploy.device.state import DeviceState
from personafl.storage.audit import verify
from personafl.storage.rundir import RunDirectory
from waiting import until

COMMAND = [sys.executable, "-c", "from personafl.cli import main; main()"]
ROUNDS = 60  # so many that a kill comes in between
CHANGES: dict[str, Any] = {"rounds": ROUNDS, "model": {"name": "linear"}, "training": {"steps": 2, "batch": 16}}
# Devices keep what any copy needs them to go back to.
RECIPE = recipe_of("scaffold", 2, {"checkpoints": ROUNDS}, data=SMALL["data"], **CHANGES)
pytestmark = pytest.mark.system


class Machines:
    """A folder with certificates and dealt data, and processes that are started, killed and looked at by name."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.pages = folder, free_port(), {name: free_port() for name in ("server", "device-0")}
        pki.init(folder / "pki")
        self.names = ["device-0", "device-1"]
        for name in ("server", "coordinator", *self.names):
            pki.issue(folder / "pki", name)
        self.recipe, _ = deal(RECIPE, folder / "dealt")
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *words: str) -> None:
        log = (self.folder / f"{name}.log").open("ab")
        self.running[name] = subprocess.Popen([*COMMAND, *words], stdout=log, stderr=subprocess.STDOUT)
        log.close()

    def serve(self, run: str = "run") -> None:
        pages = f"localhost:{self.pages['server']}"
        self.start(
            "server", "server", f"{self.folder}/dealt/recipe.toml", "--identity", f"{self.folder}/pki/server.pem",
            "--listen", f"localhost:{self.port}", "--out", f"{self.folder}/{run}", "--metrics", pages,
        )  # fmt: skip

    def take_part(self, name: str) -> None:
        more = ["--metrics", str(self.pages[name])] if name in self.pages else []
        self.start(
            name, "device", "--server", f"localhost:{self.port}", "--data",
            f"{self.folder}/dealt/{name}.safetensors", "--identity", f"{self.folder}/pki/{name}.pem",
            "--state", f"{self.folder}/{name}", *more,
        )  # fmt: skip

    def kill(self, name: str) -> None:
        process = self.running.pop(name)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()

    def page(self, name: str, path: str) -> tuple[int, str]:
        """Return a page; 0 if nobody is there."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.pages[name]}{path}") as answer:
                return int(answer.status), answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def numbers(self, name: str = "server") -> dict[Any, float]:
        """Return the numbers on a page; none if nobody is there."""
        families = text_string_to_metric_families(self.page(name, "/metrics")[1])
        return {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }

    def rounds(self) -> float:
        return self.numbers().get(("personafl_rounds_total",), -1)

    def journal(self, run: str = "run") -> list[dict[str, Any]]:
        lines = (self.folder / run / "journal.jsonl").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait(self) -> None:
        for name, process in self.running.items():
            assert process.wait() == 0, (self.folder / f"{name}.log").read_text()[-2000:]

    def outcome(self, run: str = "run") -> tuple[bytes, dict[int, dict[str, bytes]]]:
        directory, name = RunDirectory(self.folder / run), self.journal(run)[0]["run"]
        states = {
            number: plain(DeviceState(self.folder / f"device-{number}", name, number).entry or {})
            for number in range(len(self.names))
        }
        return directory.server_bytes(directory.checkpoint()), states


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    made = Machines(tmp_path)
    yield made
    for process in made.running.values():
        if process.poll() is None:
            process.kill()
            process.wait()


def counted(numbers: dict[Any, float]) -> dict[Any, float]:
    return {key: value for key, value in numbers.items() if "_total" in key[0] or "_bucket" in key[0]}


def test_no_count_is_lost_or_doubled_by_kills(machines: Machines) -> None:
    """What a page showed before a kill it shows after it; at the end it says what the journal says."""
    machines.serve()
    until(lambda: machines.page("server", "/readyz")[0] == 200, machines.running["server"])
    assert machines.page("server", "/healthz") == (200, "ok\n")
    assert machines.page("device-0", "/readyz")[0] == 0
    for name in machines.names:
        machines.take_part(name)
    until(lambda: machines.page("device-0", "/readyz")[0] == 200, machines.running["device-0"])
    last: dict[Any, float] = {}
    for _ in range(3):
        more = last.get(("personafl_rounds_total",), 0) + 1
        until(lambda more=more: machines.rounds() >= more, machines.running["server"])  # type: ignore[misc]
        shown = counted(machines.numbers())
        assert all(shown.get(key, -1) >= value for key, value in last.items())
        machines.kill("server")
        machines.serve()
        until(machines.numbers, machines.running["server"])
        last = counted(machines.numbers())
        assert all(last.get(key, -1) >= value for key, value in shown.items())
    until(lambda: machines.numbers().get(("personafl_finished",)) == 1 or machines.running["server"].poll() is not None)
    last = counted(machines.numbers()) or last
    machines.wait()
    lines = machines.journal()
    assert sum(line["event"] == "closed" for line in lines) == ROUNDS
    assert len({(line["round"], line["number"]) for line in lines if line["event"] == "handed"}) == 2 * ROUNDS
    assert sum(line["event"] == "handed" for line in lines) == 2 * ROUNDS
    accepted = [line for line in lines if line["event"] == "accepted"]
    assert len(accepted) == len({(line["round"], line["number"]) for line in accepted}) == 2 * ROUNDS
    assert last["personafl_rounds_total",] <= ROUNDS
    assert last["personafl_updates_accepted_total",] <= 2 * ROUNDS
    assert verify(machines.folder / "run").rounds == ROUNDS


def test_a_copy_of_a_server_at_work_goes_on_elsewhere_to_the_same_bits(machines: Machines) -> None:
    """It is copied in the middle of a run, goes on, is lost with its disk, and is started from the copy elsewhere."""
    wanted = simulated(RECIPE)
    machines.serve()
    for name in machines.names:
        machines.take_part(name)
    until(lambda: machines.rounds() >= 2, machines.running["server"])
    machines.running["device-1"].send_signal(signal.SIGSTOP)  # so that the open round waits for it
    until(lambda: machines.numbers().get(("personafl_round_updates",)) == 1, machines.running["server"])
    copy = subprocess.run(
        [*COMMAND, "backup", f"{machines.folder}/run", f"{machines.folder}/copy"], capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert copy.stdout.startswith("copy: ")
    before = RunDirectory(machines.folder / "copy").checkpoint().rounds
    assert len(list((machines.folder / "copy" / "updates").iterdir())) == 1
    machines.running["device-1"].send_signal(signal.SIGCONT)
    until(lambda: machines.rounds() >= before + 2, machines.running["server"])
    machines.kill("server")
    (machines.folder / "run").rename(machines.folder / "lost")
    (machines.folder / "elsewhere").mkdir()
    (machines.folder / "copy").rename(machines.folder / "elsewhere" / "run")
    machines.serve("elsewhere/run")
    machines.wait()
    assert machines.outcome("elsewhere/run") == wanted
    found = subprocess.run(
        [*COMMAND, "audit", "verify", f"{machines.folder}/elsewhere/run"], capture_output=True, text=True, check=True
    )
    assert "lines are as they were written; head" in found.stdout
