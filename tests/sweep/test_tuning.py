"""Tuning the methods of a comparison: what is drawn, who goes on, what is chosen, and that stops change nothing.

Trials are done in this process, one after the other, by what a worker does; the last test has real ones and kills them.
"""

import contextlib
import dataclasses
import json
import multiprocessing
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from personafl import BadInput, Recipe, Result, api
from personafl.cli import _spelled_out
from personafl.data import build
from personafl.data.federated import FederatedData
from personafl.recipe.compare import read_tuned
from personafl.recipe.values import merged
from personafl.runs.interrupt import polite_stop
from personafl.runs.listener import Event, Note, Progress
from personafl.storage.files import read_json
from personafl.storage.rundir import COMPARISON_FILE
from personafl.sweep import tuning, worker
from tiers import tiered
from waiting import until

BASE: dict[str, Any] = {
    "name": "small",
    "rounds": 4,
    "data": {"partition": {"kind": "classes", "clients": 6, "per_client": 3}, "validation": 0.25},
    "model": {"name": "mlp", "hidden": [8]},
    "engine": {"threads": 1, "strategy": "stacked"},
    "compare": {"methods": ["ditto"], "tune": 5},
}
Message = tuple[None, Any, worker.Done]


def recipe(**changes: Any) -> Recipe:
    return Recipe.parse(merged(BASE, changes))


def in_this_process(
    monkeypatch: pytest.MonkeyPatch, around: Callable[[int], Any] = lambda number: contextlib.nullcontext()
) -> None:
    """Have trials done here; `around(n)` is entered around the n-th piece of work, and when its end is told."""
    counted, splits = iter(range(1000)), dict[int, FederatedData]()

    def driven(ready: Any, waiting: Iterator[Any], task: Any, stop: Any) -> Iterator[Message]:
        for trial in waiting:
            with around(next(counted)):
                yield None, trial, worker._done(task(trial), None, splits)  # type: ignore[arg-type]

    monkeypatch.setattr(tuning, "workers", lambda count: contextlib.nullcontext([]))
    monkeypatch.setattr(tuning, "driven", driven)


def trials_of(path: Path, method: str = "ditto") -> list[dict[str, Any]]:
    return list(read_json(path / "tune" / method / "trials.json").values())


def files_of(path: Path) -> dict[str, str]:
    names = [path / "tuned.json", *path.glob("tune/*/trials.json"), *path.glob("*-seed*/clients.csv")]
    return {str(name.relative_to(path)): name.read_text() for name in names}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Event]]:
    """Return a comparison of a method and a variant whose learning rate is its own, and what was told of it."""
    told: list[Event] = []
    path = tmp_path_factory.mktemp("tuned") / "all"
    slow = {"slow": {"method": {"name": "ditto"}, "training": {"lr": 0.002}}}
    with pytest.MonkeyPatch.context() as monkeypatch:
        in_this_process(monkeypatch)
        asked = recipe(compare={"methods": ["ditto", "slow"], "variants": slow, "seeds": [3, 4]})
        api.compare(asked, out=path, listener=lambda method, seed: told.append)
    return path, told


@pytest.mark.system
def test_all_seeds_run_with_the_values_that_are_best_on_validation_data(compared: tuple[Path, Any]) -> None:
    path, chosen = compared[0], read_tuned(compared[0])
    for label, found in chosen.items():
        trials = trials_of(path, label)
        ended = [trial for trial in trials if "4" in trial["scores"]]
        assert len(ended) == 2
        assert found.accuracy == max(trial["scores"]["4"] for trial in ended)
        assert found.values in [trial["values"] for trial in ended if trial["scores"]["4"] == found.accuracy]
        assert found.default == trials[0]["scores"]["4"]
        assert found.accuracy >= found.default
        for seed in (3, 4):
            ran = Recipe.read(path / f"{label}-seed{seed}" / "recipe.toml")
            own = {"training.lr": ran.training.lr, **{f"method.{key}": v for key, v in ran.method.options.items()}}
            assert found.values.items() <= own.items()
        rows = Result.load(path / f"{label}-seed3").rows  # the trial's seed: the same run, now with test data
        same = [row["accuracy"] for row in rows if (row["model"], row["split"]) == ("personal", "validation")]
        assert same == [found.accuracy]
    assert "training.lr" not in chosen["slow"].values  # it is what makes the variant
    assert Recipe.read(path / "slow-seed3" / "recipe.toml").training.lr == 0.002
    assert not list(path.glob("tune/*/trials"))
    assert "tuned ditto" in (path / "report.html").read_text()


def test_the_first_trial_is_the_recipe_itself(compared: tuple[Path, Any], tmp_path: Path) -> None:
    plain = recipe(seed=3, method={"name": "ditto"}, evaluation={"split": "validation", "every": 1})
    result = api.run(plain, out=tmp_path / "run")
    first = trials_of(compared[0])[0]
    assert first["scores"]["4"] == worker.validation_accuracy(result)
    log = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    scores = [entry for entry in map(json.loads, log) if entry["event"] == "score" and entry["model"] == "personal"]
    assert [first["scores"]["1"], first["scores"]["2"]] == [entry["mean"] for entry in scores[:2]]


def test_the_budget_is_told_first_and_is_what_is_trained(compared: tuple[Path, list[Event]]) -> None:
    path, told = compared
    assert isinstance(told[0], Note)
    # 5 trials for 1 round, 3 for another, 2 for the last two.
    assert "2 methods, 5 trials each, halved twice: 24 rounds, each method for as long as 3.0 of its" in told[0].text
    assert "25% of each client's training data; test data stay unread" in told[0].text
    for label in ("ditto", "slow"):
        assert sorted(max(map(int, trial["scores"])) for trial in trials_of(path, label)) == [1, 1, 2, 4, 4]
    assert next(place for place, event in enumerate(told) if isinstance(event, Progress)) > 2


@pytest.mark.system
def test_test_labels_change_nothing(straight: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_this_process(monkeypatch)
    monkeypatch.setattr(worker, "load", changed_tests)
    tuning.tuned(recipe(), tmp_path)
    assert files_of(tmp_path).items() <= straight.items()
    assert len(files_of(tmp_path)) == 2


def changed_tests(*given: Any) -> FederatedData:
    data = build.load(*given)
    y = data.y.clone()
    y[torch.from_numpy(data.test.flat)] = (y[torch.from_numpy(data.test.flat)] + 1) % data.classes
    return dataclasses.replace(data, y=y)


@pytest.mark.parametrize(("at", "when"), tiered([(0, "before"), (4, "after"), (8, "before")], [(4, "after")]))
def test_a_stop_anywhere_changes_nothing(
    at: int, when: str, straight: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: the trial's work is not begun; after: it is done, and its score not yet kept."""

    @contextlib.contextmanager
    def around(number: int) -> Iterator[None]:
        if number == at and when == "before":
            raise KeyboardInterrupt
        yield

    path = tmp_path / "all"
    with monkeypatch.context() as stopped:
        in_this_process(stopped, around)
        if when == "after":
            counted = iter(range(1000))
            save = tuning._Method._save
            stopped.setattr(tuning._Method, "_save", lambda one: interrupt(next(counted) == at) or save(one))
        with pytest.raises(KeyboardInterrupt):
            api.compare(recipe(), out=path)
    assert not (path / "ditto-seed0").exists()
    in_this_process(monkeypatch)
    api.resume(path)
    assert files_of(path) == straight


def interrupt(now: bool) -> None:
    if now:
        raise KeyboardInterrupt


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("straight") / "all"
    with pytest.MonkeyPatch.context() as monkeypatch:
        in_this_process(monkeypatch)
        api.compare(recipe(), out=path)
    return files_of(path)


def test_a_trial_that_diverges_is_the_worst(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_this_process(monkeypatch)
    monkeypatch.setattr(tuning, "draw", lambda *_: [{"training.lr": lr} for lr in (0.1, 1e30, 0.3)])
    chosen = tuning.tuned(recipe(), tmp_path)["ditto"]
    trials = trials_of(tmp_path)
    assert "non-finite" in trials[1]["note"]
    assert trials[1]["scores"] == {}
    assert chosen.accuracy == max(trial["scores"]["4"] for trial in (trials[0], trials[2]))


def test_where_all_diverge_the_recipe_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_this_process(monkeypatch)
    chosen = tuning.tuned(recipe(training={"lr": 1e30}, compare={"tune": 3}), tmp_path)["ditto"]
    assert (chosen.accuracy, chosen.default) == (None, None)
    assert chosen.values["training.lr"] == 1e30
    assert "no trial came to its end" in chosen.words


def drawn(changes: dict[str, Any], trials: int = 40, variant: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    return tuning.draw(recipe(**changes), variant or {}, trials)


def test_values_are_drawn_evenly_from_what_a_method_declares() -> None:
    """Ditto: lr of 0.03 to 3 times the recipe's, pull of 0.01 to 10, its own rate as lr's."""
    values = drawn({"method": {"name": "ditto", "pull": 2.0}, "training": {"lr": 0.02}})
    assert values[0] == {"training.lr": 0.02, "method.pull": 2.0, "method.personal_lr": 0.02}
    for key, low, high in (("training.lr", 6e-4, 0.06), ("method.pull", 0.01, 10), ("method.personal_lr", 6e-4, 0.06)):
        found = sorted(one[key] for one in values[1:])
        assert low <= found[0] < 1.3 * low
        assert high / 1.3 < found[-1] <= high
        middle = (low * high) ** 0.5
        assert abs(sum(value < middle for value in found) - 39 / 2) < 2
    assert drawn({"method": {"name": "ditto", "pull": 2.0}, "training": {"lr": 0.02}}, 7) == values[:7]
    assert drawn({"seed": 1})[1:] != drawn({})[1:]
    heads = [one["method.head_epochs"] for one in drawn({"method": {"name": "fedrep"}})]
    assert all(type(value) is int for value in heads)
    assert min(heads) == 1
    assert 19 <= max(heads) <= 20


def test_what_was_meant_is_not_tuned() -> None:
    outside = drawn({"method": {"name": "ditto", "pull": 0.0}}, 3)
    assert [sorted(one) for one in outside] == [["method.personal_lr", "training.lr"]] * 3
    assert drawn({}, 3, {"training": {"lr": 0.1}}) == [{}]  # fedavg has nothing else
    assert drawn({}, 1) == [{"training.lr": 0.05}]


@pytest.mark.parametrize(("scores", "size", "better"), [
    ([5, 9, 8, 7], 2, [0, 1]),
    ([9, 5, 8, 7], 2, [0, 2]),
    ([9, 9, 9, 9], 2, [0, 1]),
    ([None, 5, 8, 7], 2, [2, 3]),
    ([1, None, None, None], 2, [0]),
])  # fmt: skip
def test_the_better_half_goes_on_with_the_recipe_itself(scores: list[Any], size: int, better: list[int]) -> None:
    method = object.__new__(tuning._Method)
    method.trials = [tuning._Trial({}, {} if score is None else {3: score, 6: 0.0}) for score in scores]
    assert sorted(method._better([3, 2, 1, 0], 3, size)) == better


@pytest.mark.parametrize(("rounds", "rungs"), [(0, [0]), (1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (50, [12, 24, 50])])
def test_rungs(rounds: int, rungs: list[int]) -> None:
    assert tuning._rungs(rounds) == rungs


def test_stage_a_is_one_for_all_and_runs_train_on_what_trials_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_this_process(monkeypatch)
    path = tmp_path / "all"
    changes: dict[str, Any] = {"pretrain": {"rounds": 1}, "training": {"lr": 0.03}, "data": {"validation": 0.0}}
    api.compare(recipe(rounds=2, **changes), tune=2, out=path)
    kept = Recipe.read(path / COMPARISON_FILE)
    assert kept.data.validation == 0.2
    assert kept.pretrain.training == kept.training
    assert Recipe.read(path / "pretrain-seed0" / "recipe.toml").training.lr == 0.03


@pytest.mark.parametrize(
    ("words", "spelled"),
    [
        (["compare", "--tune"], ["compare", "--tune", "12"]),
        (["compare", "--tune", "a.toml", "x=1"], ["compare", "--tune", "12", "a.toml", "x=1"]),
        (["compare", "--tune", "30", "a.toml"], ["compare", "--tune", "30", "a.toml"]),
        (["compare", "--tune", "--quiet"], ["compare", "--tune", "12", "--quiet"]),
        (["compare", "--tune", "-1"], ["compare", "--tune", "-1"]),
        (["run", "x"], ["run", "x"]),
    ],
)
def test_the_number_of_trials_may_be_left_out(words: list[str], spelled: list[str]) -> None:
    assert _spelled_out(words) == spelled


def test_what_cannot_be_tuned_is_said_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match=r"compare.tune: input should be greater than or equal to 1 \(given: 0\)"):
        api.compare(BASE, tune=0, out=tmp_path / "all")
    monkeypatch.setattr(tuning, "on_other_machines", lambda: True)
    with pytest.raises(BadInput, match=r"compare.tune: its trials are trained on this machine, not on a Ray cluster"):
        api.compare(BASE, out=tmp_path / "all")
    assert not list(tmp_path.iterdir())


def test_a_stop_that_meets_a_pause_is_a_stop(tmp_path: Path) -> None:
    """A trial pauses itself by the signal that also stops it; the second of two at once is a KeyboardInterrupt."""

    def both() -> Recipe:
        with polite_stop():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
        raise AssertionError

    task = worker.Task(recipes=(both,), path=tmp_path, pretrained=tmp_path)
    here, there = multiprocessing.Pipe()
    assert worker._done(task, there, {}) == worker.Done(stopped=True)
    assert not here.poll()


@pytest.mark.system
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_tuning_that_is_stopped_or_killed_ends_as_it_would_have(
    how: signal.Signals, straight: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "small.toml").write_text(recipe().to_toml())
    command = [sys.executable, "-c", "from personafl.cli import main; main()"]
    process = subprocess.Popen(
        [*command, "compare", "small.toml", "--tune", "5", "--out", "all", "--quiet"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    path = tmp_path / "all"
    until((path / "tune/ditto/trials/00001/seed0/checkpoint.json").exists, process)
    process.send_signal(how)
    _, err = process.communicate()
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert err == "stopped while tuning ditto; continue with: personafl resume all\n"
    assert not (path / "tuned.json").exists()
    done = subprocess.run([*command, "resume", "all", "--quiet"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "tuned ditto: " in done.stdout
    assert files_of(path) == straight
