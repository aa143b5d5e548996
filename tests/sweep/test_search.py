"""Sweeps through the real processes: choosing by validation data, pruning, stopping, killing and going on."""

import contextlib
import faulthandler
import fcntl
import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest

from personafl import BadInput, Diverged, Recipe, api
from personafl.recipe.values import merged
from waiting import until

optuna = pytest.importorskip("optuna", reason="sweeps need the extra: pip install personafl[sweep]")

from personafl.sweep import worker  # noqa: E402
from personafl.sweep.pool import Worker  # noqa: E402
from personafl.sweep.search import load_sweep, resume_sweep, sweep  # noqa: E402
from personafl.sweep.study import Study, Trial  # noqa: E402
from tiers import tiered  # noqa: E402

BASE: dict[str, Any] = {
    "name": "small",
    "rounds": 4,
    "data": {"partition": {"kind": "classes", "clients": 6, "per_client": 3}, "validation": 0.25},
    "model": {"name": "mlp", "hidden": [8]},
    "method": {"name": "ditto"},
    "evaluation": {"every": 1},
    "engine": {"threads": 1},
    "compare": {"options": {"ditto": {"pull": 7.0}}},
    "sweep": {"sampler": "grid", "pruner": "none", "keys": {"training": {"lr": [0.001, 0.2]}, "method.pull": [0.1]}},
}


def recipe(**changes: Any) -> Recipe:
    return Recipe.parse(merged(BASE, changes))


def test_a_grid_tries_all_and_writes_the_recipe_that_is_best_on_validation_data(tmp_path: Path) -> None:
    ended: list[tuple[int, int, int]] = []
    found = sweep(
        recipe(sweep={"seeds": [3, 4]}),
        tmp_path / "sweep",
        jobs=1,
        listener=lambda trial, done, size: ended.append((trial.number, done, size)),
    )
    assert ended == [(0, 1, 2), (1, 2, 2)]
    assert [trial.values for trial in found.trials] == [
        {"training.lr": 0.001, "method.pull": 0.1},
        {"training.lr": 0.2, "method.pull": 0.1},
    ]
    assert not list((tmp_path / "sweep" / "trials").iterdir())
    best = Recipe.parse(tomllib.loads((tmp_path / "sweep" / "best.toml").read_text()))
    assert (best.training.lr, best.sweep, best.evaluation.split) == (0.2, None, "test")
    assert found.command == f"personafl compare {tmp_path}/sweep/best.toml"
    comparison = api.compare(best, out=tmp_path / "test")  # its values are not replaced by compare.options
    table = comparison.table().query("model == 'personal' and split == 'validation' and clients == 'seen'")
    assert found.best is not None
    assert table["accuracy"].mean() == found.best.accuracy
    assert load_sweep(tmp_path / "sweep") == found
    lines = (tmp_path / "sweep" / "trials.csv").read_text().splitlines()
    assert lines[0] == "trial,state,validation_accuracy,rounds,training.lr,method.pull,note"
    assert len(lines) == 3


def test_a_trial_never_reads_the_test_data(tmp_path: Path) -> None:
    result = api.run(recipe(evaluation={"split": "validation"}, sweep={}), out=tmp_path / "run")
    assert {row["split"] for row in result.rows} == {"validation"}
    scores = [line for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines() if '"score"' in line]
    assert len(scores) == 6  # rounds 1 to 3, two models
    assert not any('"test"' in line for line in scores)
    assert not [column for column in result.columns if "test_" in column]


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"data": {"validation": 0.0}}, ["data.validation", "there are none", "data.validation=0.2"]),
        ({"evaluation": {"every": 0}, "sweep": {"pruner": "median"}}, ["sweep.pruner", "evaluation.every"]),
        ({"sweep": {"keys": {"training": {"lrr": [1]}}}}, ["sweep.keys: ", "training.lrr", "did you mean 'lr'"]),
        ({"sweep": {"keys": {"training": {"lr": [0.1, -1]}}}}, ["training.lr=-1", "training.lr: input should be"]),
        ({"sweep": {"keys": {"method": {"pul": [1]}}}}, ["method.pul", "did you mean 'pull'"]),
        ({"sweep": {"keys": {"model": {"hidden": [[8], "x"]}}}}, ["model.hidden=x", "model.hidden: "]),
        ({"sweep": {"keys": {"federation": {"cohort": [3, 99]}}}}, ["federation.cohort: 99 clients"]),
        (
            {"sweep": {"keys": {"training": {"optimizer": ["sgd", "adam"], "momentum": [0.0, 0.9]}}}},
            ["training.optimizer=adam", "training.momentum=0.9", "adam has its own"],
        ),
    ],
)
def test_bad_keys_and_values_are_named_before_any_work(
    changes: dict[str, Any], texts: list[str], tmp_path: Path
) -> None:
    with pytest.raises(BadInput) as caught:
        sweep(recipe(**changes), tmp_path / "sweep", jobs=1)
    assert all(text in str(caught.value) for text in texts), caught.value
    assert not list(tmp_path.iterdir())


def test_a_recipe_without_a_sweep_and_a_missing_package_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Recipe.parse({key: value for key, value in BASE.items() if key != "sweep"})
    with pytest.raises(BadInput, match=r"no section \[sweep\]"):
        sweep(plain, tmp_path / "sweep")
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"pip install 'personafl\[sweep\]'"):
        sweep(recipe(), tmp_path / "sweep")
    assert not list(tmp_path.iterdir())


@pytest.mark.system
def test_a_trial_that_diverges_fails_and_the_others_go_on(tmp_path: Path) -> None:
    found = sweep(recipe(sweep={"keys": {"training": {"lr": [1e30, 0.1]}}}), tmp_path / "sweep", jobs=1)
    assert [trial.state for trial in found.trials] == ["failed", "done"]
    assert "non-finite" in found.trials[0].note
    assert found.best == found.trials[1]


@pytest.mark.system
def test_a_sweep_whose_trials_all_diverge_says_so(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match=r"all 1 trials failed, the first with: round 1"):
        sweep(recipe(sweep={"keys": {"training": {"lr": [1e30]}}}), tmp_path / "bad", jobs=1)


def broken() -> Recipe:
    raise RuntimeError("no such kernel\nmore of it")


def test_a_trial_that_fails_says_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    task = worker.Task(recipes=(broken,), path=tmp_path, pretrained=tmp_path)
    here, _ = multiprocessing.Pipe()
    assert worker._done(task, here, {}) == worker.Done(note="RuntimeError: no such kernel")
    assert "in broken" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("how", "note"),
    [
        (signal.SIGKILL, "its process was killed by SIGKILL; memory may be short: try fewer --jobs"),
        (signal.SIGSEGV, "its process was killed by SIGSEGV"),
        (None, "its process ended with code 3"),
    ],
)
def test_a_process_that_ends_is_said_to(how: signal.Signals | None, note: str) -> None:
    def end() -> None:
        faulthandler.disable()
        os._exit(3) if how is None else os.kill(os.getpid(), how)

    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=end)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        process.start()
    there.close()
    assert Worker(process, here, 1).receive() == worker.Done(note=note)


def study_of(path: Path, **section: Any) -> Study:
    path.mkdir(exist_ok=True)
    keys = {"training.lr": {"low": 0.001, "high": 1.0, "log": True}, "method.pull": [0.1, 1.0], "x.n": [1, True]}
    return Study(path, recipe(sweep=None).model_copy(update={"sweep": _section(keys, section)}))


def _section(keys: dict[str, Any], section: dict[str, Any]) -> Any:
    from personafl.recipe.sweep import SweepSection

    return SweepSection(keys=keys, **section)


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_what_is_drawn_does_not_depend_on_a_stop(sampler: str, tmp_path: Path) -> None:
    def values(path: Path, stops: int) -> list[dict[str, Any]]:
        drawn: list[dict[str, Any]] = []
        while len(drawn) < 14:
            study = study_of(path, sampler=sampler, trials=14)
            for trial in study.begun():
                if len(drawn) == stops:  # the process ends here, with this trial under way
                    stops = -1
                    break
                drawn.append(trial.values)
                study.tell(trial.number, trial.values["training.lr"])
        return drawn

    straight = values(tmp_path / "a", stops=-1)
    assert values(tmp_path / "b", stops=12) == straight
    assert len({trial["training.lr"] for trial in straight}) == 14
    assert {str(trial["x.n"]) for trial in straight} == {"1", "True"}


@pytest.mark.parametrize("pruner", tiered(["median", "hyperband"], ["median"]))
def test_bad_trials_are_stopped_early(pruner: str, tmp_path: Path) -> None:
    study = study_of(tmp_path / "study", pruner=pruner, trials=30, sampler="random")
    outcomes: list[Trial] = []
    for trial in study.begun():
        good = trial.number % 2 == 0
        stop = any(study.score(trial.number, rounds, 0.9 if good else 0.1) for rounds in (1, 2, 3))
        outcomes.append(study.tell(trial.number, None if stop else 0.9 if good else 0.1))
    stopped = [trial.number for trial in outcomes if trial.state == "pruned"]
    assert stopped
    assert not [number for number in stopped if number % 2 == 0]
    assert all(trial.rounds is not None and trial.accuracy == 0.1 for trial in outcomes if trial.state == "pruned")


def test_half_a_line_and_a_lock_of_a_killed_process_are_mended(tmp_path: Path) -> None:
    study = study_of(tmp_path / "study", trials=3)
    next(study.begun())
    journal = tmp_path / "study" / "journal.log"
    whole = journal.read_bytes()
    with open(journal, "ab") as file:
        file.write(b'{"op_code": 4, "wor')
    (tmp_path / "study" / "journal.log.lock").touch()
    again = study_of(tmp_path / "study", trials=3)
    assert journal.read_bytes() == whole
    assert [trial.state for trial in again.trials()] == ["running"]


def started(path: Path) -> subprocess.Popen[str]:
    """Start a sweep whose first trial takes for ever, and wait until that has a checkpoint."""
    long = recipe(rounds=100_000, evaluation={"every": 50_000}, engine={"checkpoint_seconds": 0.0, "workers": 2})
    path.parent.joinpath("long.toml").write_text(long.to_toml())
    command = [sys.executable, "-c", "from personafl.cli import main; main()", "sweep", "long.toml"]
    process = subprocess.Popen(
        [*command, "--jobs", "1", "--out", path.name, "--quiet"],
        cwd=path.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until((path / "trials/00000/seed0/checkpoint.json").exists, process)
    return process


def shortened(path: Path) -> int:
    """Let the sweep end soon: change its recipes, and return the rounds that its first trial has done."""
    done = json.loads((path / "trials/00000/seed0/checkpoint.json").read_text())["rounds"]
    for file in (path / "sweep.toml", path / "trials/00000/seed0/recipe.toml"):
        text = file.read_text().replace("rounds = 100000", f"rounds = {done + 2}").encode()
        file.write_bytes(text)
        file.with_suffix(".sha256").write_text(hashlib.sha256(text).hexdigest())
    return int(done)


@pytest.mark.system
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_sweep_that_is_stopped_or_killed_goes_on_where_it_was(
    how: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sweep"
    process = started(path)
    others = below(process.pid)
    assert len(others) >= 3  # the trial and its two workers, beside what Python starts
    process.send_signal(how)
    _, err = process.communicate()
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert err == "stopped after 0 of 2 trials; continue with: personafl resume sweep\n"
    until(lambda: free(path / "trials/00000/seed0") and others.isdisjoint(running()))  # all end with their parent
    assert [trial.state for trial in load_sweep(path).trials] == ["running"]
    done = shortened(path)
    log = path / "trials/00000/seed0/metrics.jsonl"
    before = log.read_text().splitlines()[:done]
    kept: list[list[str]] = []
    monkeypatch.setattr("shutil.rmtree", lambda folder, **_: kept.append(lines_of(Path(folder))))
    found = resume_sweep(path, jobs=1)
    assert [trial.state for trial in found.trials] == ["done", "done"]
    assert kept[0][:done] == before  # with its seconds: these rounds were not done again
    assert len([line for line in kept[0] if '"round"' in line]) == done + 2


def lines_of(trial: Path) -> list[str]:
    log = trial / "seed0" / "metrics.jsonl"
    return log.read_text().splitlines() if log.exists() else []


def running() -> dict[int, int]:
    """Return the parent of every process that is not only a name any more."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = status.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                found[int(status.parent.name)] = int(parent)
    return found


def below(process: int) -> set[int]:
    """Return the processes that one started, and those that they did."""
    parents = running()
    found, more = set[int](), {process}
    while more:
        more = {child for child, parent in parents.items() if parent in more}
        found |= more
    return found


def free(run: Path) -> bool:
    """Say whether no process holds a run directory."""
    with open(run / "lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
