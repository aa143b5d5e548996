"""Stopping and continuing: kills, signals, and every way back to the same bits. The crashes are in crash_driver.py."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from crash_driver import COMPARISON, FAILPOINTS, differences, outcome
from personafl import api
from personafl.algorithms import METHODS, Training
from personafl.algorithms.fedavg import fedavg
from personafl.errors import BadInput, Interrupted
from personafl.recipe.values import apply_overrides
from personafl.runs import checkpoints
from personafl.runs.listener import Progress
from personafl.storage.rundir import RunDirectory, claim_name
from personafl.storage.store import Store
from tiers import tiered
from waiting import until

PERSONAFL = [sys.executable, "-c", "from personafl.cli import main; main()"]
RECIPE = apply_overrides({}, FAILPOINTS)
SLOW = [*FAILPOINTS, "rounds=150", "engine.checkpoint_seconds=0.05", "evaluation.every=50"]  # seconds, for signals


class Crash(BaseException):
    """Ends a run from within, as abruptly as Python can."""


def crash_after(rounds: int) -> Callable[[Progress], None]:
    def listener(progress: Progress) -> None:
        if isinstance(progress, Progress) and progress.done >= rounds:
            raise Crash

    return listener


def changed(**sections: Any) -> dict[str, Any]:
    return {**RECIPE, **{k: {**RECIPE.get(k, {}), **v} if isinstance(v, dict) else v for k, v in sections.items()}}


# --- kills ---


def driver(*words: str) -> subprocess.Popen[str]:
    script = Path(__file__).parents[1] / "crash_driver.py"
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, script, *words], stdout=pipe, stderr=pipe, text=True, env=environment())


def report_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate()
    assert process.returncode == 0, err
    report: dict[str, Any] = json.loads(out)
    print(report)
    assert report["different"] == []
    assert report["identical"] == report["tried"]
    return report


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


@pytest.mark.system
def test_a_crash_at_some_writes() -> None:
    assert report_of(driver("failpoints", "60"))["tried"] > 2


@pytest.mark.system
def test_a_crash_at_every_write() -> None:
    """SIGKILL before every write, rename, removal and fsync of a run, and in the middle of every write."""
    assert report_of(driver("failpoints"))["tried"] > 150


@pytest.mark.system
def test_a_crash_at_some_writes_of_a_private_run() -> None:
    """The same noise and the same ledger, which is the metrics' lines; noise is taken back, so some of it is kept."""
    pytest.importorskip("dp_accounting", reason="differential privacy is accounted for by dp-accounting")
    assert report_of(driver("private", "20"))["tried"] > 10


@pytest.mark.slow
def test_a_crash_at_every_write_of_a_private_run() -> None:
    assert report_of(driver("private"))["tried"] > 150


@pytest.mark.slow
def test_a_crash_at_every_write_of_a_resume() -> None:
    """The same for the resume of a run that was killed, and a third crash in the resume of that."""
    assert report_of(driver("double"))["kills"] > 100


@pytest.mark.system
def test_kills_at_random_times() -> None:
    """Processes killed wherever they were, some again while they resumed: 20 times in runs, 20 in comparisons."""
    assert report_of(driver("random", "20"))["kills"] >= 40


@pytest.mark.system
def test_kills_through_the_real_command(tmp_path: Path) -> None:
    """`personafl run` in a process of its own, killed in some round; its resume killed; and resumed to the end."""
    chance = random.Random(5)
    recipe = [*FAILPOINTS, "rounds=60", "engine.checkpoint_seconds=0.02"]
    api.run(apply_overrides({}, recipe), out=tmp_path / "straight")
    path, kills = tmp_path / "killed", 0
    for words in (["run", *recipe, "--out", str(path)], ["resume", str(path)]):
        process = subprocess.Popen([*PERSONAFL, *words, "--quiet"], env=environment())
        target = 25 + 25 * kills + chance.randrange(10)
        until(lambda: lines(path) >= target, process)  # noqa: B023
        process.kill()
        kills += process.wait() == -signal.SIGKILL
    assert kills == 2
    assert not (path / "result.json").exists()
    subprocess.run([*PERSONAFL, "resume", str(path), "--quiet"], check=True, env=environment(), capture_output=True)
    assert differences(outcome(path), outcome(tmp_path / "straight")) == []


def lines(path: Path) -> int:
    metrics = path / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


# --- every method, every round ---


STATES = ["fedavg", "fedadam", "scaffold", "ditto", "fedalt", "fedslr", "quped", "apfl"]  # of each kind


@pytest.mark.parametrize("method", tiered(sorted(METHODS), STATES))
def test_every_method_resumes_after_every_round(tmp_path: Path, method: str) -> None:
    """One round per process, so to speak, with a checkpoint each."""
    recipe = changed(rounds=3, evaluation={"every": 2}, model={"name": "mlp", "hidden": [6], "personal": "output"})
    recipe["method"] = {"name": method}
    if method in ("scaffold", "fedbcd", "fedbcdi"):  # they refuse momentum
        recipe["training"] = {**RECIPE["training"], "momentum": 0.0}
    straight, often = tmp_path / "straight", tmp_path / "often"
    api.run(recipe, out=straight)
    with pytest.raises(Crash):
        api.run(recipe, out=often, listener=crash_after(1))
    with pytest.raises(Crash):
        api.resume(often, listener=lambda method, seed: crash_after(1))
    api.resume(often)
    assert differences(outcome(often), outcome(straight)) == []


def test_without_a_checkpoint_a_run_begins_again(tmp_path: Path) -> None:
    api.run(RECIPE, out=tmp_path / "straight")
    with pytest.raises(Crash):
        api.run(changed(engine={"checkpoint_seconds": 1000.0}), out=tmp_path / "run", listener=crash_after(3))
    assert RunDirectory(tmp_path / "run").checkpoint().rounds == 0
    api.resume(tmp_path / "run")
    assert set(differences(outcome(tmp_path / "run"), outcome(tmp_path / "straight"))) == {"recipe"}


@pytest.mark.parametrize("strategy", tiered(["stacked", "sequential"], ["stacked"]))
def test_layouts_in_memory_do_not_show(tmp_path: Path, strategy: str) -> None:
    """A module in channels-last layout: checkpoints do not keep layouts, and convolutions may round by them."""

    class Wide(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 10))
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def start(name: str, **more: Any) -> None:
        torch.manual_seed(0)
        recipe = changed(model={"name": "auto"}, engine={"strategy": strategy, "checkpoint_seconds": 0.0}, rounds=4)
        api.run(recipe, model=Wide(), out=tmp_path / name, **more)

    start("straight")
    with pytest.raises(Crash):
        start("stopped", listener=crash_after(2))
    start("stopped", resume=True)
    assert differences(outcome(tmp_path / "stopped"), outcome(tmp_path / "straight")) == []


def test_a_store_that_spills(tmp_path: Path) -> None:
    """States beyond store_mb live on disk: same bits as in memory, straight or resumed."""
    big = {"model": {"name": "mlp", "hidden": [2000]}, "rounds": 4}
    api.run(changed(**big), out=tmp_path / "memory")
    tiny = changed(**big, engine={"store_mb": 1})
    api.run(tiny, out=tmp_path / "disk")
    with pytest.raises(Crash):
        api.run(tiny, out=tmp_path / "stopped", listener=crash_after(2))
    api.resume(tmp_path / "stopped")
    assert differences(outcome(tmp_path / "stopped"), outcome(tmp_path / "disk")) == []
    assert set(differences(outcome(tmp_path / "memory"), outcome(tmp_path / "disk"))) == {"recipe"}


@pytest.mark.system
def test_devices_with_networks_of_their_own_spill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States of three layouts, none of which stays in memory, some of a cohort known and others not; and resumed."""
    devices = [{"share": 1 / 3, "model": {"name": "mlp", "hidden": [width]}} for width in (6, 9, 12)]
    recipe = {**changed(federation={"cohort": 3}, rounds=9), "method": {"name": "quped"}, "devices": devices}
    api.run(recipe, out=tmp_path / "memory")
    monkeypatch.setattr(checkpoints, "Store", lambda directory, _, index: Store(directory, 0, index))
    api.run(recipe, out=tmp_path / "disk")
    assert len(list((tmp_path / "disk" / "states").glob("slab-*"))) == 3
    assert differences(outcome(tmp_path / "disk"), outcome(tmp_path / "memory")) == []
    with pytest.raises(Crash):
        api.run(recipe, out=tmp_path / "stopped", listener=crash_after(4))
    api.resume(tmp_path / "stopped")
    assert differences(outcome(tmp_path / "stopped"), outcome(tmp_path / "memory")) == []


# --- comparisons ---


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("comparison") / "straight"
    api.compare(apply_overrides({}, COMPARISON[:-1]), methods=["fedavg", "ditto"], seeds=[0, 1], out=path)
    return path


def test_a_comparison_stopped_between_and_inside_its_runs(comparison: Path, tmp_path: Path) -> None:
    path = tmp_path / "stopped"
    seen: list[tuple[str, int]] = []

    def stop_in(run: int, rounds: int) -> Callable[[str, int], Callable[[Progress], None]]:
        def listener(method: str, seed: int) -> Callable[[Progress], None]:
            seen.append((method, seed))
            if rounds == 0 and len(seen) == run:
                raise Crash  # before its directory exists
            return crash_after(rounds if len(seen) == run else 1000)

        return listener

    with pytest.raises(Crash):
        api.compare(
            apply_overrides({}, COMPARISON[:-1]),
            methods=["fedavg", "ditto"],
            seeds=[0, 1],
            out=path,
            listener=stop_in(2, 3),
        )
    with pytest.raises(Crash):
        api.resume(path, listener=stop_in(4, 0))
    api.resume(path)
    for run in sorted(entry for entry in comparison.iterdir() if entry.is_dir()):
        assert differences(outcome(path / run.name), outcome(run)) == []
    assert seen == [("fedavg", 0), ("ditto", 0), ("ditto", 0), ("fedavg", 1)]


# --- signals ---


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("long") / "run"
    api.run(apply_overrides({}, SLOW), out=path)
    return outcome(path)


@pytest.mark.system
@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT, signal.SIGINT]])
def test_signals(tmp_path: Path, long_run: dict[str, Any], signals: list[signal.Signals]) -> None:
    """One lets the round end and saves it; two stop at once; either way exit code 130 and the same bits later."""
    path = tmp_path / "run"
    process = subprocess.Popen(
        [*PERSONAFL, "run", *SLOW, "--out", str(path), "--quiet"], env=environment(), stderr=subprocess.PIPE, text=True
    )
    until(lambda: lines(path) >= 20, process)
    for number in signals:
        process.send_signal(number)
        if len(signals) > 1:
            time.sleep(0.001)
    _, message = process.communicate()
    assert process.returncode == 130, message
    assert message.count("\n") == 1
    assert not (path / "result.json").exists()
    directory = RunDirectory(path)
    if len(signals) == 1:
        done = directory.checkpoint().rounds
        assert f"stopped after round {done} of 150; continue with: personafl resume {path}" in message
        assert done == len([entry for entry in directory.metrics() if entry["event"] == "round"])
    api.resume(path)
    assert differences(outcome(path), long_run) == []


@pytest.mark.system
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group(tmp_path: Path, number: signal.Signals) -> None:
    """As a terminal and a batch system send it: the workers get it too, and it is not for them."""
    path, words = tmp_path / "run", [*SLOW, "rounds=3000", "engine.workers=2"]
    process = subprocess.Popen(
        [*PERSONAFL, "run", *words, "--out", str(path), "--quiet"],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until(lambda: lines(path) >= 20, process)
    os.killpg(process.pid, number)
    _, message = process.communicate()
    assert process.returncode == 130, message
    assert re.fullmatch(rf"stopped after round \d+ of 3000; continue with: personafl resume {path}\n", message)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_this_process(tmp_path: Path, number: signal.Signals) -> None:
    """The API raises Interrupted after the round, and puts the handlers back."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    def listener(progress: Progress) -> None:
        if isinstance(progress, Progress) and progress.done == 2:
            os.kill(os.getpid(), number)

    path = tmp_path / "a run"  # its space must survive a paste
    with pytest.raises(Interrupted, match=rf"^stopped after round [23] of 4; .*: personafl resume '{path}'$"):
        api.run(RECIPE, out=path, listener=listener)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert RunDirectory(path).checkpoint().rounds in (2, 3)


# --- one process, one recipe, one data set ---


def test_a_run_under_way_is_not_run_again(tmp_path: Path) -> None:
    path = tmp_path / "run"

    def listener(progress: Progress) -> None:
        with pytest.raises(BadInput, match=rf"^{path}: another process \({os.getpid()}\) is running it$"):
            api.resume(path)
        raise Crash

    with pytest.raises(Crash):
        api.run(RECIPE, out=path, listener=listener)


@pytest.mark.system
def test_two_processes_on_one_directory(tmp_path: Path) -> None:
    path = tmp_path / "run"

    def listener(progress: Progress) -> None:
        if isinstance(progress, Progress) and progress.done == 1:
            done = subprocess.run(
                [*PERSONAFL, "resume", str(path)], env=environment(), capture_output=True, text=True, check=False
            )
            assert done.returncode == 2
            assert done.stderr == f"error: {path}: another process ({os.getpid()}) is running it\n"
            with pytest.raises(BadInput, match="exists already"):
                api.run(RECIPE, out=path)

    api.run(RECIPE, out=path, listener=listener)
    api.run(RECIPE, out=tmp_path / "straight")
    assert differences(outcome(path), outcome(tmp_path / "straight")) == []


def test_resume_uses_as_many_threads_as_the_run_did(tmp_path: Path) -> None:
    recipe = {**RECIPE, "engine": {"checkpoint_seconds": 0.0}}
    try:
        torch.set_num_threads(2)
        with pytest.raises(Crash):
            api.run(recipe, out=tmp_path / "run", listener=crash_after(1))
        torch.set_num_threads(1)
        api.resume(tmp_path / "run")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_resume_of_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    result = api.run(RECIPE, out=tmp_path / "run")
    before = {entry: (entry.stat().st_mtime_ns, entry.stat().st_size) for entry in (tmp_path / "run").rglob("*")}
    again = api.resume(tmp_path / "run")
    assert again == result
    after = {entry: (entry.stat().st_mtime_ns, entry.stat().st_size) for entry in (tmp_path / "run").rglob("*")}
    assert before == after


def test_resume_with_other_data_is_refused(tmp_path: Path) -> None:
    digits = load_digits()
    source = tmp_path / "mine.npz"
    np.savez(source, x=digits.images.astype(np.float32)[:400], y=digits.target[:400])
    recipe = changed(data={"source": str(source)})
    with pytest.raises(Crash):
        api.run(recipe, out=tmp_path / "run", listener=crash_after(1))
    whole = source.read_bytes()
    np.savez(source, x=digits.images.astype(np.float32)[1:401], y=digits.target[1:401])
    with pytest.raises(BadInput, match="the data changed since the run began"):
        api.resume(tmp_path / "run")
    source.unlink()
    with pytest.raises(BadInput, match=r"mine\.npz"):
        api.resume(tmp_path / "run")
    source.write_bytes(whole)
    api.resume(tmp_path / "run")
    api.run(recipe, out=tmp_path / "straight")
    assert differences(outcome(tmp_path / "run"), outcome(tmp_path / "straight")) == []


def test_resume_with_another_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Crash):
        api.run(RECIPE, out=tmp_path / "run", listener=crash_after(1))
    for other in (changed(rounds=5), changed(training={"lr": 0.7}), changed(method={"name": "ditto", "pull": 0.5})):
        with pytest.raises(BadInput, match="begun with another recipe"):
            api.run(other, out=tmp_path / "run", resume=True)
    api.run(RECIPE, out=tmp_path / "run", resume=True)


def test_objects_must_be_given_again(tmp_path: Path) -> None:
    """A run with a model or algorithm of one's own is not continued with the recipe's instead."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))  # the shapes of the recipe's own model

    given = {"model": model(), "algorithm": fedavg(Training())}
    with pytest.raises(Crash):
        api.run(RECIPE, **given, out=tmp_path / "run", listener=crash_after(1))  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"begun in Python with objects \(model=…, algorithm=…\); continue it there"):
        api.resume(tmp_path / "run")
    api.run(RECIPE, **given, out=tmp_path / "run", resume=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("checkpoint.json", b"{", "cannot be read"),
        ("checkpoint.json", b'{"rounds": 1}', "not a checkpoint of this version"),
        ("checkpoint.json", b"[]", "not a checkpoint of this version"),
        ("server-000002.safetensors", None, "the checkpoint needs this file"),
        ("server-000002.safetensors", b"", "the checkpoint needs this file and it was damaged"),
        ("metrics.jsonl", b"", "shorter than the checkpoint says"),
        ("states/slab-1", b"", "the checkpoint needs this file"),
        ("states/index-000002.safetensors", b"", "the checkpoint needs this file"),
        ("recipe.toml", None, "not a run directory"),
        ("recipe.toml", b"rounds = 0\n", "recipe.toml: was changed or damaged since the run began; put back"),
        ("recipe.toml", b"", "recipe.toml: is empty, and was not when the run began; put back"),
        ("recipe.toml", b"\xff\x00", "recipe.toml: was changed or damaged"),
        ("split.json", b"", "cannot be read"),
    ],
)
def test_a_damaged_run_directory_is_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    with pytest.raises(Crash):
        api.run(RECIPE, out=tmp_path / "run", listener=crash_after(2))
    file = tmp_path / "run" / name
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    with pytest.raises(BadInput, match=message) as caught:
        api.resume(tmp_path / "run")
    assert str(tmp_path / "run") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_older_run_directory_resumes_but_not_without_its_recipe(tmp_path: Path) -> None:
    """Directories had no fingerprints once; an emptied recipe would go on as another method."""
    with pytest.raises(Crash):
        api.run(changed(method={"name": "ditto"}), out=tmp_path / "run", listener=crash_after(2))
    (tmp_path / "run" / "recipe.sha256").unlink()
    recipe = (tmp_path / "run" / "recipe.toml").read_text()
    (tmp_path / "run" / "recipe.toml").write_text("\n")
    with pytest.raises(BadInput, match=r"recipe\.toml: is empty"):
        api.resume(tmp_path / "run")
    (tmp_path / "run" / "recipe.toml").write_text(recipe)
    api.resume(tmp_path / "run")


def test_a_comparison_with_a_changed_recipe_is_refused(comparison: Path, tmp_path: Path) -> None:
    path = shutil.copytree(comparison, tmp_path / "copy")
    for name in ("comparison.toml", "ditto-seed1/recipe.toml"):
        kept = (path / name).read_text()
        (path / "ditto-seed1" / "result.json").unlink(missing_ok=True)
        (path / name).write_text(kept.replace("lr = ", "lr = 1"))
        with pytest.raises(BadInput, match=rf"{name}: was changed or damaged since the run began"):
            api.resume(path)
        (path / name).write_text(kept)


def test_a_run_directory_can_be_moved(tmp_path: Path) -> None:
    with pytest.raises(Crash):
        api.run(RECIPE, out=tmp_path / "run", listener=crash_after(2))
    shutil.move(tmp_path / "run", tmp_path / "elsewhere")
    api.resume(tmp_path / "elsewhere")
    api.run(RECIPE, out=tmp_path / "straight")
    assert differences(outcome(tmp_path / "elsewhere"), outcome(tmp_path / "straight")) == []


def test_names_are_numbered(tmp_path: Path) -> None:
    assert claim_name(tmp_path, "a").name == "a-001"
    (tmp_path / "a-001").mkdir()
    (tmp_path / "a-003").mkdir()
    assert claim_name(tmp_path, "a").name == "a-002"
