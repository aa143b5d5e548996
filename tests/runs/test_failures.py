"""Failures are results: a run that fails or diverges is kept with its reason, and the others go on."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import personafl
import personafl.data.build as data_build
from personafl import BadInput, api
from personafl.errors import Diverged, Failed
from personafl.report.about import resume_commands
from personafl.report.load import load
from personafl.report.page import write_page
from personafl.report.progress import states
from personafl.runs.failing import failure_of
from personafl.simulate.simulator import Simulation
from personafl.simulate.workers.local import WorkerFailed
from personafl.storage.failure import Failure
from personafl.storage.files import read_json
from waiting import until

Called = Callable[..., tuple[int, str, str]]
WILD = {"method": {"name": "fedavg"}, "training": {"lr": 1e38}}
RECIPE: dict[str, Any] = {
    "rounds": 4,
    "data": {"partition": {"kind": "classes", "clients": 6, "per_client": 3}},
    "model": {"name": "mlp", "hidden": [8]},
    "engine": {"checkpoint_seconds": 0.0},
    "compare": {"methods": ["fedavg", "wild", "ditto"], "variants": {"wild": WILD}},
}


class Broken(nn.Module):
    """A network of the user's whose forward fails once its weights have moved far enough."""

    limit = 0.3

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.layer.weight.detach().abs().max().item() > Broken.limit:
            raise ValueError("my weights\nare too large")
        return self.layer(x.flatten(1))


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of which one method diverged."""
    path = tmp_path_factory.mktemp("failed") / "all"
    comparison = api.compare(RECIPE, out=path)
    assert [result.rows[0]["method"] for result in comparison.results] == ["fedavg", "ditto"]
    (run,) = comparison.failures
    assert str(run).startswith("wild-seed0: diverged in round ")
    assert "non-finite numbers for clients" in str(run)
    return path


@pytest.fixture
def copy(failed: Path, tmp_path: Path) -> Path:
    return shutil.copytree(failed, tmp_path / "copy")


def test_a_diverged_run_is_a_row_for_all_who_look(failed: Path, called: Called) -> None:
    rows, unfinished, failures = api.rows_of(failed)
    assert ({row["method"] for row in rows}, unfinished) == ({"fedavg", "ditto"}, [])
    why = failures[0].failure
    assert why.diverged
    assert [result.path.name for result in api.results_of(failed)] == ["fedavg-seed0", "ditto-seed0"]
    (source,) = load([failed])
    assert [state.failed for state in states([source])] == ["", "diverged", ""]
    assert [state.over for state in states([source])] == [True] * 3
    assert resume_commands([source]) == []
    page = write_page([failed]).read_text()
    assert re.search(
        rf'<tr class="failed"><th scope="row">wild, seed 0</th><td colspan="\d">{why.words}</td></tr>', page
    )
    assert "Not finished" not in page
    assert f"personafl resume {failed} KEY=VALUE" in page
    assert called("show", str(failed))[0] == 0
    code, out, err = called("show", str(failed), "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["failures"][0]["reason"] == why.reason
    code, out, err = called("clients", str(failed))
    assert (code, err.count("left out: wild-seed0: diverged in round")) == (0, 1)


def test_resume_does_not_repeat_what_diverged(copy: Path, called: Called) -> None:
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*") if path.is_file() and path.suffix != ".html"}
    code, out, err = called("resume", str(copy))
    assert code == 3
    assert "wild  diverged in round" in out
    assert err.endswith(f"1 of 3 runs failed; begin them anew with other values: personafl resume {copy} KEY=VALUE\n")
    after = {path: path.stat().st_mtime_ns for path in copy.rglob("*") if path.is_file() and path.suffix != ".html"}
    assert before == after


def test_resume_begins_failed_runs_anew_with_changed_keys(copy: Path, called: Called) -> None:
    """Killed in the middle, it goes on with the changes; the others keep their recipes, and the table says so."""

    def crash(progress: object) -> None:
        if isinstance(progress, personafl.runs.listener.Progress):  # type: ignore[attr-defined]
            raise KeyboardInterrupt

    kept = (copy / "fedavg-seed0" / "recipe.toml").read_bytes()
    with pytest.raises(KeyboardInterrupt):
        api.resume(copy, changes={"training.lr": 0.01}, listener=lambda method, seed: crash)
    assert read_json(copy / "wild-seed0" / "changes.json") == {"training.lr": 0.01}
    code, out, _ = called("resume", str(copy), "--json")
    found = json.loads(out)
    assert (code, found["failures"]) == (0, [])
    assert {row["method"] for row in found["rows"]} == {"fedavg", "wild (training.lr=0.01)", "ditto"}
    assert (copy / "fedavg-seed0" / "recipe.toml").read_bytes() == kept
    assert (copy / "wild-seed0.failed-001" / "failure.json").exists()
    assert "wild (training.lr=0.01)" in (copy / "report.html").read_text()
    alone = {**RECIPE, "method": {"name": "fedavg"}, "training": {"lr": 0.01}}
    straight = api.run({**alone, "compare": {}}, out=copy / "straight")
    assert [row["accuracy"] for row in straight.rows] == [
        row["accuracy"] for row in found["rows"] if row["method"].startswith("wild")
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("training.lr=-1", "training.lr: input should be greater than 0"),
        ("training.lrr=1", "training.lrr: unknown key; did you mean 'lr'"),
        ("data.test=0.5", "data.test: is the same in all runs that are compared"),
        ("seed=3", "seed: is the same in all runs"),
        ("method.name=ditto", "method.name: is the same in all runs"),
        ("faster", "write key.sub=value"),
    ],
)
def test_changes_that_cannot_be(copy: Path, words: str, message: str, called: Called) -> None:
    before = sorted(copy.rglob("*"))
    code, out, err = called("resume", str(copy), words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert sorted(copy.rglob("*")) == before


def test_a_run_alone_begins_anew_too(tmp_path: Path, called: Called) -> None:
    path = tmp_path / "run"
    with pytest.raises(Diverged, match=rf"begin anew with other values: personafl resume {path} KEY=VALUE$"):
        api.run({**RECIPE, **WILD, "compare": {}}, out=path)
    with pytest.raises(BadInput, match=r"has no result; run: diverged in round"):
        api.results_of(path)
    result = api.resume(path, changes={"training.lr": 0.02})
    assert isinstance(result, personafl.Result)
    assert result.rows[0]["method"] == "fedavg (training.lr=0.02)"
    with pytest.raises(BadInput, match="none of its runs failed, and only those can be changed"):
        api.resume(path, changes={"training.lr": 0.03})


def test_a_network_that_fails_can_be_mended_and_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The traceback of the user's code is kept; a resume goes on from the checkpoint, to the same numbers."""
    recipe = {**RECIPE, "compare": {}, "training": {"lr": 0.5}}
    monkeypatch.setattr(Broken, "limit", 1e9)
    straight = api.run(recipe, model=Broken(), out=tmp_path / "straight")
    monkeypatch.setattr(Broken, "limit", 0.3)
    path = tmp_path / "run"
    with pytest.raises(
        Failed, match=r"^round \d: ValueError: my weights; the traceback is in .*failure\.json"
    ) as raised:
        api.run(recipe, model=Broken(), out=path)
    assert not isinstance(raised.value, Diverged)
    failure = Failure.of(path)
    assert failure is not None
    assert failure.words.startswith("failed in round ")
    assert "test_failures.py" in failure.traceback
    monkeypatch.setattr(Broken, "limit", 1e9)
    result = api.run(recipe, model=Broken(), out=path, resume=True)
    assert [row["accuracy"] for row in result.rows] == [row["accuracy"] for row in straight.rows]
    assert Failure.of(path) is None


def test_a_network_that_exits_while_it_trains_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def leaves(self: Simulation, number: int) -> Any:
        raise SystemExit(0)

    monkeypatch.setattr(Simulation, "step", leaves)
    with pytest.raises(Failed, match=r"^round 1: SystemExit: 0; the traceback is in"):
        api.run({**RECIPE, "compare": {}}, out=tmp_path / "run")


def test_any_error_of_a_method_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory in one, a late refusal in another: the third has its result, and a resume finishes the others."""
    step = Simulation.step

    def fails(self: Simulation, number: int) -> Any:
        if self.federation.algorithm.name == "ditto" and number == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        if self.federation.algorithm.name == "local":
            raise BadInput("devices: what nobody knew before")
        return step(self, number)

    monkeypatch.setattr(Simulation, "step", fails)
    comparison = api.compare({**RECIPE, "compare": {"methods": ["ditto", "local", "fedavg"]}}, out=tmp_path / "all")
    ditto, local = comparison.failures
    assert ditto.failure.words.startswith("failed in round 2: OutOfMemoryError: CUDA out of memory")
    assert ditto.failure.words.endswith("lower engine.memory_mb, engine.workers or training.batch")
    assert local.failure.words == "failed in round 1: devices: what nobody knew before"
    assert len(comparison.results) == 1
    monkeypatch.setattr(Simulation, "step", step)
    again = api.resume(tmp_path / "all")
    assert isinstance(again, personafl.Comparison)
    assert (again.failures, len(again.results)) == ((), 3)


def test_a_method_that_fails_before_it_has_a_directory(tmp_path: Path) -> None:
    """Pre-training diverges: no method can start, all say why, and with a changed key all begin anew."""
    recipe = {
        **RECIPE,
        "pretrain": {"rounds": 2, "training": {"lr": 1e38}},
        "compare": {"methods": ["fedavg", "local"]},
    }
    comparison = api.compare(recipe, out=tmp_path / "all")
    assert [run.failure.words.partition(" in round")[0] for run in comparison.failures] == [
        "diverged: pre-training diverged"
    ] * 2
    assert [run.failure.words for run in api.failed_in(tmp_path / "all")] == [
        run.failure.words for run in comparison.failures
    ]
    assert [state.failed for state in states(load([tmp_path / "all"]))] == ["diverged"] * 2
    again = api.resume(tmp_path / "all", changes={"pretrain.training.lr": 0.1})
    assert isinstance(again, personafl.Comparison)
    assert (again.failures, len(again.results)) == ((), 2)


def test_a_workers_traceback_is_no_reason() -> None:
    text = "clients 1, 2: Traceback (most recent call last):\n  File x\nValueError: too large\n"
    failure = failure_of(WorkerFailed(text, 0), "round 3")
    assert failure.words == "failed in round 3: clients 1, 2: ValueError: too large"
    assert "File x" in failure.traceback


def test_of_a_workers_message_of_several_lines_the_first_is_the_reason() -> None:
    """What torch says of a wrong shape; and what was raised while something else was handled comes last."""
    first = "Traceback (most recent call last):\n  File x\nKeyError: 3\n\nDuring handling of the above exception:\n\n"
    last = "Traceback (most recent call last):\n  File y\nRuntimeError: no such rows:\n\tsize\nsee z\n"
    text = f"clients 1, 2: {first}{last}"
    assert failure_of(WorkerFailed(text, 0), "").words == "failed: clients 1, 2: RuntimeError: no such rows:"


def test_all_that_cannot_start_are_named_at_once(tmp_path: Path) -> None:
    """QuPeD has no layer to quantize, FedAlt no part of its own; nothing is written."""
    options = {"quped": {"bits": 2}, "qupel": {"bits": 2}}
    recipe = {**RECIPE, "model": {"name": "linear"}, "compare": {"options": options}}
    with pytest.raises(BadInput) as caught:
        api.compare(recipe, methods=["fedavg", "quped", "local", "fedper"], out=tmp_path / "all")
    message = str(caught.value)
    assert "quped: model: it has no layer to quantize" in message
    assert "fedper: model.personal: " in message
    assert message.endswith("; or leave out what cannot start: --methods fedavg,local")
    with pytest.raises(BadInput, match=r"^model: it has no layer to quantize"):
        api.compare(recipe, methods=["quped", "qupel"], out=tmp_path / "all")
    with pytest.raises(BadInput, match="no layer to quantize"):
        api.run({**recipe, "method": {"name": "quped", "bits": 2}}, out=tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_other_seeds_are_dealt_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_data: Callable[..., Any] = data_build.load

    def few(config: Any, seed: int) -> Any:
        if seed == 7:
            raise BadInput("data.min_samples: under seed 7 nobody has enough")
        return load_data(config, seed)

    monkeypatch.setattr(data_build, "load", few)
    with pytest.raises(BadInput, match="under seed 7"):
        api.compare(RECIPE, seeds=[0, 7], out=tmp_path / "all")
    assert not list(tmp_path.iterdir())


@pytest.mark.system
def test_a_failing_a_diverging_and_a_killed_method(tmp_path: Path) -> None:
    """The whole process is killed in the last method: what is there is a table, and `resume` finishes it."""
    (tmp_path / "mine.py").write_text(
        "import os\nfrom torch import nn\n\nclass Net(nn.Sequential):\n"
        "    def __init__(self, classes):\n        super().__init__(nn.Flatten(), nn.Linear(64, classes))\n\n"
        "    def forward(self, x):\n        if os.path.exists('break'):\n            raise ValueError('mine')\n"
        "        return super().forward(x)\n"
    )
    wild, mine = "method={name='fedavg'},training={lr=1e38}", "method={name='fedavg'},model={name='mine:Net'}"
    variants = f"compare.variants={{wild={{{wild}}},mine={{{mine}}}}}"
    words = [
        variants,
        "--methods",
        "fedavg,wild,mine,ditto",
        "rounds=400",
        "evaluation.every=0",
        "engine.checkpoint_seconds=0.05",
    ]
    small = ["--partition", "classes:clients=6,per_client=3", "--model", "mlp", "--quiet"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "from personafl.cli import main; main()"]

    def rounds(name: str) -> int:
        metrics = tmp_path / "all" / f"{name}-seed0" / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def run(*given: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *given], cwd=tmp_path, env=environment, capture_output=True, text=True)

    process = subprocess.Popen([*command, "compare", *words, *small, "--out", "all"], cwd=tmp_path, env=environment)
    until(lambda: rounds("mine") >= 5, process)
    (tmp_path / "break").touch()
    until(lambda: rounds("ditto") >= 5, process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    shown = run("show", "all")
    assert shown.returncode == 0
    assert "wild  diverged in round" in shown.stdout
    assert "mine  failed in round" in shown.stdout
    assert "all: unfinished; continue with: personafl resume all" in shown.stderr
    (tmp_path / "break").unlink()
    done = run("resume", "all", "--quiet")
    assert done.returncode == 3, done.stderr
    assert "wild  diverged in round" in done.stdout
    assert all(f"\n{name} " in done.stdout for name in ("fedavg", "mine", "ditto"))
    last = run("resume", "all", "training.lr=0.01", "--quiet", "--json")
    assert last.returncode == 0, last.stderr
    found = json.loads(last.stdout)
    assert {row["method"] for row in found["rows"]} == {"fedavg", "wild (training.lr=0.01)", "mine", "ditto"}
