"""The choice between stacked and one by one: where it is measured, where it is kept. Time is a fake."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from personafl import api
from personafl.core.algorithm import Problem
from personafl.core.losses import cross_entropy
from personafl.core.net import Net
from personafl.errors import BadInput
from personafl.recipe.recipe import Recipe
from personafl.runs.build import prepare
from personafl.runs.given import Given
from personafl.runs.listener import Note
from personafl.simulate import calibrate
from personafl.simulate.calibrate import calibrated, in_doubt, measure
from personafl.simulate.engine import Engine
from personafl.simulate.federation import Federation

CPU = torch.device("cpu")
MEMORY = 2**30


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(calibrate, "_KNOWN", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def recipe(**changes: Any) -> Recipe:
    values = {"rounds": 2, "model": {"name": "cnn", "channels": [2, 2], "hidden": 4}, "training": {"batch": 8}}
    return Recipe.parse(values | changes)


def federation(**changes: Any) -> Federation:
    return prepare(recipe(**changes)).federation


class Clock:
    """Ticks as an engine trains: `stacked` and `sequential` seconds a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **costs: float) -> None:
        self.now, self.trained = 0.0, 0
        plain = Engine.train

        def train(engine: Engine, *arguments: Any) -> Any:
            self.now += costs[engine.strategy]
            self.trained += 1
            return plain(engine, *arguments)

        monkeypatch.setattr(Engine, "train", train)

    def __call__(self) -> float:
        return self.now


def problem(make: Callable[[], nn.Module]) -> Problem:
    return Problem(Net(make), cross_entropy)


def test_what_is_not_in_doubt() -> None:
    assert not in_doubt(problem(lambda: nn.Linear(60, 10)), CPU)
    assert in_doubt(problem(lambda: nn.Linear(600, 200)), CPU)
    conv = problem(lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 10)))
    assert in_doubt(conv, CPU)
    assert not in_doubt(conv, torch.device("cuda"))
    conv.net.unstackable = "because"
    assert not in_doubt(conv, CPU)


@pytest.mark.parametrize(("stacked", "alone", "strategy"), [(0.2, 0.4, "stacked"), (0.4, 0.2, "sequential")])
def test_the_faster_one_is_chosen_and_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stacked: float, alone: float, strategy: str
) -> None:
    fed, clock = federation(), Clock(monkeypatch, stacked=stacked, sequential=alone)
    chosen, [note] = calibrated(fed, MEMORY, tmp_path / "engine.json", clock)
    assert chosen.engines[0].strategy == strategy
    assert {"stacked": "trained stacked", "sequential": "trained one by one"}[strategy] in note
    assert clock.trained == 4  # twice each: the first time warms up, and 0.2 s is beyond the budget
    again, notes = calibrated(fed, MEMORY, tmp_path / "engine.json", clock)
    assert (again.engines, notes, clock.trained) == (chosen.engines, [], 4)
    other, [known] = calibrated(fed, MEMORY, tmp_path / "other.json", clock)  # another run, in this process
    assert (other.engines, clock.trained) == (chosen.engines, 4)
    assert "measured before" in known
    monkeypatch.setattr(calibrate, "_KNOWN", {})  # and in another one
    assert calibrated(fed, MEMORY, tmp_path / "third.json", clock)[0].engines == chosen.engines
    assert clock.trained == 4
    monkeypatch.setattr(calibrate, "__version__", "another")  # whose engine may be faster or slower
    calibrated(fed, MEMORY, tmp_path / "fourth.json", clock)
    assert clock.trained == 8


def test_seeds_share_a_choice_and_methods_do_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = Clock(monkeypatch, stacked=0.2, sequential=0.4)
    for number, changes in enumerate([{"seed": 0}, {"seed": 1}, {"method": {"name": "scaffold"}}]):
        calibrated(federation(**changes), MEMORY, tmp_path / f"{number}.json", clock)
    assert clock.trained == 8


def test_the_time_is_that_of_a_clients_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 clients take 2 steps each."""
    seconds = measure(federation(), 0, MEMORY, Clock(monkeypatch, stacked=0.4, sequential=0.8))
    assert seconds == pytest.approx({"stacked": 0.05, "sequential": 0.1})


def test_a_broken_cache_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "cache" / "personafl" / "engine.json"
    file.parent.mkdir(parents=True)
    file.write_text('{"x": 3')
    clock = Clock(monkeypatch, stacked=0.2, sequential=0.4)
    calibrated(federation(), MEMORY, tmp_path / "engine.json", clock)
    assert len(json.loads(file.read_text())) == 1


def test_a_cache_that_cannot_be_written_ends_no_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder is where its file should be; then there is not even a home."""
    (tmp_path / "cache" / "personafl" / "engine.json").mkdir(parents=True)
    clock = Clock(monkeypatch, stacked=0.2, sequential=0.4)
    calibrated(federation(), MEMORY, tmp_path / "engine.json", clock)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "expanduser", lambda self: (_ for _ in ()).throw(RuntimeError("no home")))
    calibrated(federation(seed=1), MEMORY, tmp_path / "other.json", clock)
    assert json.loads((tmp_path / "other.json").read_text())["strategies"] == ["stacked"]


@pytest.mark.system
def test_processes_that_keep_their_times_at_once(tmp_path: Path) -> None:
    """All come to their end, and what is left is a whole file."""
    text = (
        "from personafl.simulate import calibrate\n"
        "import sys\n"
        "for n in range(200):\n"
        "    calibrate._remember(f'{sys.argv[1]}-{n % 5}', {'stacked': 1.0, 'sequential': float(n)})\n"
        "    calibrate._file().unlink(missing_ok=True)\n"
        "calibrate._remember('last', {'stacked': 1.0, 'sequential': 2.0})\n"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", text]
    processes = [subprocess.Popen([*command, str(n)], env=environment, stderr=subprocess.PIPE) for n in range(3)]
    assert [process.communicate()[1] for process in processes] == [b""] * 3
    assert "last" in json.loads((tmp_path / "personafl" / "engine.json").read_text())
    assert [path.name for path in (tmp_path / "personafl").iterdir()] == ["engine.json"]


class Counts(nn.Module):
    """What vmap cannot take."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1)) * (1.0 if x.mean().item() > -1e9 else 2.0)


def test_a_model_that_cannot_be_stacked_is_trained_one_by_one(tmp_path: Path) -> None:
    lines: list[Any] = []
    small = Recipe.parse({"rounds": 2, "method": {"name": "finetune"}})
    result = api.run(small, model=Counts(), out=tmp_path / "run", listener=lines.append)
    dealt, note = [line.text for line in lines if isinstance(line, Note)]
    assert "dealt to 50 clients" in dealt
    why = (
        r"torch\.func cannot batch line \d+ of test_calibrate\.py \(an if, a loop or \.item\(\) that depends on data\)"
    )
    assert re.fullmatch(f"note: clients are trained one by one: {why}", note)
    assert json.loads((tmp_path / "run" / "engine.json").read_text())["strategies"] == ["sequential"]
    assert result.rows
    stacked = Recipe.parse({"rounds": 2, "engine": {"strategy": "stacked"}})
    with pytest.raises(BadInput, match=f"engine.strategy: 'stacked' is not possible: {why}; use \"auto\"$"):
        prepare(stacked, given=Given(model=Counts()))
