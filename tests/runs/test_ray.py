"""A Ray cluster of two nodes on this machine: the same bits as without it, and no trouble that stays silent."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crash_driver import COMMON, differences, outcome

from personafl import Recipe, api, cli
from personafl.errors import BadInput, Diverged
from personafl.runs import cluster, runner
from personafl.runs.cluster import connected
from personafl.runs.ray_crew import RayCrew
from personafl.runs.rundir import RunDirectory
from personafl.runs.runner import Progress, prepare
from personafl.runs.trainer import Chunk
from personafl.runs.values import apply_overrides
from personafl.runs.workers import Crew, WorkerFailed, done_by

installed = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install 'personafl[ray]'"
)
needs_namespace = pytest.mark.skipif(os.geteuid() != 0, reason="a network of its own needs root")

CLONE_NEWNET = 0x40000000
RECIPE = apply_overrides({}, [*COMMON, "rounds=5", "engine.strategy=sequential", "engine.checkpoint_seconds=0"])


@contextlib.contextmanager
def own_network() -> Iterator[None]:
    """Put this thread, and what it starts, into a network that has a loopback and nothing else, where that is allowed.

    Other threads stay where they are.
    """
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as before:
        assert libc.unshare(CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            yield
        finally:
            assert libc.setns(before.fileno(), CLONE_NEWNET) == 0


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two nodes with one core each, on the loopback, with a token and without a dashboard."""
    token = tmp_path_factory.mktemp("token") / "token"
    token.write_text("0123456789abcdef" * 4)
    with own_network(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        cluster._ray("127.0.0.1:0")
        from ray.cluster_utils import Cluster

        started = Cluster()
        for _ in range(2):
            started.add_node(num_cpus=1, include_dashboard=False, node_ip_address="127.0.0.1")
        yield started.address
        started.shutdown()


@pytest.fixture(scope="module")
def connection(address: str) -> Iterator[None]:
    with connected(address):
        yield


def chunks(count: int) -> list[Chunk]:
    down = {"w": torch.arange(3.0)}
    return [Chunk(0, np.array([n]), 0, down, {"s": torch.full((1, 2), float(n))}) for n in range(count)]


@installed
@pytest.mark.usefixtures("connection")
def test_chunks_are_done_in_order_by_both_nodes_and_come_back_as_they_are() -> None:
    states = {
        "flipped": torch.arange(6.0).reshape(2, 3).t(),
        "mask": torch.tensor([True, False]),
        "none": torch.empty(0, 4),
        "one": torch.tensor(7),
        "half": torch.ones(2, dtype=torch.bfloat16),
    }

    def work(chunk: Chunk) -> Any:
        import ray

        chunk.states["flipped"] += 1  # what came may be written to
        return ray.get_runtime_context().get_node_id(), int(chunk.clients[0]), chunk.down, chunk.states

    crew = RayCrew(work, "auto")
    results = list(crew.map(chunk._replace(states=states) for chunk in chunks(9)))
    crew.close()
    assert [client for _, client, _, _ in results] == list(range(9))
    assert len({node for node, *_ in results}) == 2
    states["flipped"] += 1
    for _, _, down, got in results:
        assert down["w"].tolist() == [0, 1, 2]
        assert got["flipped"].stride() == states["flipped"].stride()
        assert {name: (value.dtype, value.tolist()) for name, value in got.items()} == {
            name: (value.dtype, value.tolist()) for name, value in states.items()
        }


@installed
@pytest.mark.usefixtures("connection")
@pytest.mark.parametrize(
    "words",
    [
        ["method.name=fedavg"],
        ["method.name=fedalt", "model.name=mlp", "model.personal=output"],
        ["method.name=scaffold", "training.momentum=0"],
    ],
    ids=lambda words: words[0],
)
def test_a_run_has_the_same_bits_as_on_this_machine(words: list[str], tmp_path: Path) -> None:
    recipe = apply_overrides(RECIPE, words)
    api.run(recipe, out=tmp_path / "there")
    with done_by(Crew):
        api.run(recipe, out=tmp_path / "here")
    assert differences(outcome(tmp_path / "here"), outcome(tmp_path / "there")) == []


@installed
@pytest.mark.usefixtures("connection")
def test_a_killed_worker_is_named_and_the_run_goes_on_without_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = apply_overrides(RECIPE, ["method.name=ditto", "method.tune_epochs=1"])
    crews: list[RayCrew] = []
    begin = RayCrew.__init__
    monkeypatch.setattr(RayCrew, "__init__", lambda self, *given: [begin(self, *given), crews.append(self)][0])

    def kill(progress: Any) -> None:
        if isinstance(progress, Progress) and progress.done == 3:
            import ray

            actor = crews[0]._workers[1].actor
            os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)

    with pytest.raises(WorkerFailed, match=r"^clients .*: a worker on node 127.0.0.1 died"):
        api.run(recipe, out=tmp_path / "killed", listener=kill)
    assert RunDirectory(tmp_path / "killed").checkpoint().rounds == 3
    with done_by(Crew):
        api.resume(tmp_path / "killed")
        api.run(recipe, out=tmp_path / "whole")
    assert differences(outcome(tmp_path / "whole"), outcome(tmp_path / "killed")) == []


@installed
@pytest.mark.usefixtures("connection")
def test_errors_of_the_work_come_as_they_are() -> None:
    def diverge(chunk: Chunk) -> Any:
        raise Diverged("too far")

    def fail(chunk: Chunk) -> Any:
        return 1 // int(chunk.clients[0] - 1)

    with pytest.raises(Diverged, match=r"^too far$"):
        list(RayCrew(diverge, 1).map(chunks(1)))
    with pytest.raises(WorkerFailed, match="ZeroDivisionError") as caught:
        list(RayCrew(fail, 1).map(chunks(3)))
    assert caught.value.task == 1


@installed
@needs_namespace
@pytest.mark.usefixtures("connection")
def test_nothing_listens_but_on_the_loopback() -> None:
    """In the cluster's own network; sl, local address, remote address, state (0A: listening) in /proc/net."""
    four, six = (Path(f"/proc/thread-self/net/{name}").read_text() for name in ("tcp", "tcp6"))
    local = {line.split()[1].split(":")[0] for text in (four, six) for line in text.splitlines() if " 0A " in line}
    assert "0100007F" in local
    assert local <= {"0100007F", "0000000000000000FFFF00000100007F"}  # 127.0.0.1, alone or within IPv6


@installed
def test_a_wrong_token_is_refused(address: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from personafl.cli import main; main()", "run", *COMMON, "rounds=1"]
    done = subprocess.run(
        [*command, "--out", tmp_path / "run", "--engine", "ray", "--address", address],
        env={**os.environ, "RAY_AUTH_TOKEN": "f" * 64, "COLUMNS": "500"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "InvalidAuthToken" in done.stderr  # of Ray
    assert f"--address {address}: cannot join" in done.stderr
    assert not (tmp_path / "run").exists()


@installed
@pytest.mark.usefixtures("connection")
def test_a_node_with_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr("personafl.__version__", "9.9")
    message = r"node 127.0.0.1 has personafl .*, this machine has 9.9; install personafl==9.9 there"
    with pytest.raises(BadInput, match=message):
        cluster._check_nodes(ray)


@installed
@pytest.mark.parametrize(
    ("where", "what"), [("127.0.0.1:9", "nothing answers"), ("elsewhere", "not HOST:PORT"), ("127.0.0.1:x", "not HOST")]
)
def test_an_address_without_a_cluster(where: str, what: str) -> None:
    with pytest.raises(BadInput, match=what), connected(where):
        pass


def test_without_ray_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"pip install 'personafl\[ray\]'"), connected():
        pass


def test_a_cluster_does_not_train_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_device", lambda name: torch.device("cuda"))
    with done_by(RayCrew), pytest.raises(BadInput, match=r"set engine\.device=cpu"):
        prepare(Recipe.parse(RECIPE))


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--engine", "rey"], "no engine 'rey'; valid: local, ray"),
        (["--address", "10.0.0.1:6379"], "--address: is for --engine ray"),
    ],
)
def test_words_that_do_not_go_together(
    words: list[str], what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["personafl", "run", *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert what in capsys.readouterr().err
