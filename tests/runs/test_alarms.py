"""What looks wrong is said once, while a run is on; what is well is not."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from personafl import api
from personafl.evaluate.score import Scores
from personafl.report.page import write_page
from personafl.runs.alarms import Alarms
from personafl.runs.listener import Note
from personafl.storage.rundir import RunDirectory
from test_api import small_data

GUESS = math.log(3)  # of the small data, which have three classes


def kinds(losses: list[float], rounds: int = 100) -> list[tuple[int, str]]:
    """Return after which round which alarm was given."""
    alarms = Alarms(small_data(), False, rounds, [])
    return [(at, kind) for at, loss in enumerate(losses, 1) for kind, _ in alarms.trained(at - 1, loss)]


def test_a_loss_that_rises_is_said_once() -> None:
    """From 1.1 · 0.8¹⁹ = 0.016 it doubles: it is above 0.016 + 1.1 / 4 after 5 rounds, and 5 must be."""
    falls = [GUESS * 0.8**at for at in range(20)]
    assert kinds(falls) == []
    assert kinds([*falls, *(falls[-1] * 2.0**at for at in range(1, 15))]) == [(29, "rising")]


@pytest.mark.parametrize(
    "losses",
    [
        [GUESS] * 50,  # learns nothing, but that is not rising
        [1e-4 * 1.3**at for at in range(30)],  # too small to matter
        [0.3 if at % 2 else 0.9 for at in range(50)],  # cohorts that differ
        [0.2] * 20 + [1.5] * 4 + [0.2] * 20,  # a bad moment
        [2.0, 1.0, math.nan, 0.9],  # a round without anyone
    ],
)
def test_losses_that_are_well(losses: list[float]) -> None:
    assert kinds(losses) == []


def test_a_loss_above_guessing_after_half_of_the_rounds() -> None:
    """Raw units may begin there, and must not stay."""
    assert kinds([1e6] * 4 + [0.5] * 6, rounds=10) == []
    assert kinds([1e6] * 10, rounds=10) == [(5, "absurd")]


def test_models_at_chance_and_losses_that_are_no_numbers() -> None:
    """By hand: test labels of a, b, c are 1 2 0, 2 0 1 and 0: one answer, 0, is right in (1/3 + 1/3 + 1) / 3 = 5/9."""
    data = small_data()
    labels = [data.y[data.test[client]].tolist() for client in range(3)]
    best = max(np.mean([own.count(label) / len(own) for own in labels]) for label in range(3))
    alarms = Alarms(data, False, 10, [])

    def scored(number: int, accuracy: float, loss: float = 1.0) -> list[tuple[str, str]]:
        values = Scores(np.full(3, accuracy), np.array([1.0, loss, 1.0]), data.test.sizes[:3])
        return alarms.scored(number, np.arange(3), {("global", "test"): values, ("global", "train"): values})

    assert scored(1, best - 0.01) == []  # too early to tell
    assert scored(4, best + 0.01) == []
    ((kind, line),) = scored(6, best)
    assert kind == "global chance"
    assert f"{100 * best:.1f}% right, where one answer for all is {100 * best:.1f}%" in line
    assert scored(8, best) == []  # said already
    ((kind, line),) = scored(9, 0.99, math.inf)
    assert (kind, line) == ("global loss", "after round 10 the global model has a loss of inf or NaN for b")
    own_part = Alarms(data, True, 10, [])
    values = Scores(np.zeros(3), np.ones(3), data.test.sizes[:3])
    assert own_part.scored(9, np.arange(3), {("global", "test"): values}) == []


@pytest.mark.parametrize(("loss", "remedy"), [(GUESS / 2, "train longer"), (GUESS / 8, "train fewer rounds")])
def test_the_remedy_for_models_at_chance_goes_by_the_training_loss(loss: float, remedy: str) -> None:
    """Where training data are learned by heart, more rounds make it worse."""
    data = small_data()
    alarms = Alarms(data, False, 10, [])
    alarms.trained(8, loss)
    values = Scores(np.zeros(3), np.ones(3), data.test.sizes[:3])
    ((_, line),) = alarms.scored(9, np.arange(3), {("global", "test"): values})
    assert remedy in line


def test_the_remedy_where_nearly_all_have_one_label() -> None:
    """There no rounds help, and a small training loss says nothing: weights of classes do."""
    data = small_data()
    data = dataclasses.replace(data, y=torch.zeros_like(data.y))
    alarms = Alarms(data, False, 10, [])
    alarms.trained(8, GUESS / 100)
    values = Scores(np.ones(3), np.ones(3), data.test.sizes[:3])
    ((_, line),) = alarms.scored(9, np.arange(3), {("global", "test"): values})
    assert "see training.class_weights" in line


def test_raw_units_are_not_finished_without_a_word(tmp_path: Path, called: Any) -> None:
    """The warnings are in the output, in the metrics, in --json, in `show` and on the page, once each."""
    digits = load_digits()
    np.savez(tmp_path / "raw.npz", x=(1000 * digits.data + 500).astype(np.float32)[:400], y=digits.target[:400])
    recipe: dict[str, Any] = {
        "rounds": 6,
        "data": {"source": str(tmp_path / "raw.npz"), "normalize": "none", "partition": {"kind": "iid", "clients": 4}},
        "model": {"name": "linear"},
    }
    notes: list[str] = []
    api.run(
        recipe, out=tmp_path / "run", listener=lambda told: notes.append(told.text) if isinstance(told, Note) else None
    )
    lines = [entry["text"] for entry in RunDirectory(tmp_path / "run").metrics() if entry["event"] == "warning"]
    assert any("the training loss is" in line and "guessing costs 2.30" in line for line in lines)
    assert notes == [f"warning: {line}" for line in lines]
    assert len(set(lines)) == len(lines) <= 3
    assert api.warnings_of(tmp_path / "run") == [f"fedavg: {line}" for line in lines]
    assert all(line in write_page([tmp_path / "run"]).read_text() for line in lines)
    code, _, err = called("show", str(tmp_path / "run"))
    assert (code, err.count("warning: fedavg: ")) == (0, len(lines))


def test_a_resumed_run_warns_once(tmp_path: Path) -> None:
    """What was said before the stop is not said again."""
    past = [{"event": "round", "number": at, "loss": 1e6} for at in range(6)]
    past.append({"event": "warning", "number": 4, "kind": "absurd", "text": "…"})
    assert Alarms(small_data(), False, 10, past).trained(6, 1e6) == []
    assert [kind for kind, _ in Alarms(small_data(), False, 10, past[:-1]).trained(6, 1e6)] == ["absurd"]
