"""Word error rates of spoken words: per client by a plain loop, in rows, tables, files and the papers' measures."""

from __future__ import annotations

import io
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

import personafl
from personafl.cli.tables import detail_tables, result_tables
from personafl.core.algorithm import Problem
from personafl.core.ctc import edit_distance
from personafl.core.net import Net
from personafl.core.rng import generator
from personafl.core.tasks import task_named
from personafl.data.build import federate
from personafl.data.config import DataConfig, Quantity
from personafl.data.federated import SPACE_NAME, FederatedData
from personafl.data.sources.dataset import checked
from personafl.evaluate.metrics import metrics_of
from personafl.evaluate.score import try_personal, try_shared
from personafl.papers.catalog import Row, Table
from personafl.papers.verdict import judge, outcomes
from personafl.runs.result import Result
from personafl.storage.rundir import RunDirectory


def spoken(names: list[str], clients: int = 6) -> FederatedData:
    """Random frames, 4 bands × 12, of which each label is spelled; clients of very unequal size."""
    rng = np.random.default_rng(0)
    x = rng.random((120, 1, 4, 12), dtype=np.float32)
    y = np.arange(120) % len(names)
    dataset = checked("here", name="spoken", x=x, y=y, label_names=names)
    config = DataConfig(partition=Quantity(clients=clients, alpha=1.0), target="spelling", validation=0.2)
    return federate(dataset, config, 0)


@pytest.mark.parametrize("convolutional", [False, True])  # on a CPU these are run one by one
def test_rates_are_those_of_a_plain_loop(convolutional: bool) -> None:
    """Σ edits / Σ words of a client's samples, by models that say anything."""
    data = spoken(["a b", "ba", "c a b"])
    space = data.label_number(SPACE_NAME)
    assert space is not None
    first = nn.Conv2d(1, 1, 3, padding=1) if convolutional else nn.Identity()
    module = nn.Sequential(first, nn.Flatten(), nn.Linear(48, 12 * data.classes), nn.Unflatten(1, (12, data.classes)))
    net = Net(lambda: module)
    task = task_named("ctc")
    problem = Problem(net, task.loss, correct=task.correct, metrics=metrics_of(data))
    clients = np.arange(data.clients)
    models = [net.init(generator(seed)) for seed in range(len(clients))]
    stacked = {name: torch.stack([model[name] for model in models]) for name in models[0]}
    own = try_personal(problem, stacked, data, data.test, clients).scores()
    shared = try_shared(problem, models[0], data, data.test, clients).scores()
    for client in clients.tolist():
        rows = torch.from_numpy(data.test[client])
        for model, found in ((models[client], own.metrics), (models[0], shared.metrics)):
            best = net.apply(model, data.x[rows]).argmax(-1).tolist()
            said = [[label for label, _ in groupby(frames) if label] for frames in best]  # 0 is the blank
            meant = [[label for label in row if label >= 0] for row in data.y[rows].tolist()]
            pairs = [[_words(text, space) for text in pair] for pair in zip(said, meant, strict=True)]
            wrong = sum(edit_distance(*pair) for pair in pairs)
            assert found["word_error"][client] == pytest.approx(wrong / sum(len(words) for _, words in pairs))


def _words(labels: list[int], space: int) -> list[str]:
    return "".join(" " if label == space else chr(96 + label) for label in labels).split()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Result:
    recipe = {
        "rounds": 2,
        "method": {"name": "ditto"},
        "model": {"name": "speech", "width": 8, "hidden": 8, "blocks": 1, "heads": 2},
        "evaluation": {"every": 1},
        "engine": {"threads": 1, "workers": 1},
    }
    return personafl.run(recipe, data=spoken(["ab", "ba", "c"], clients=4), out=tmp_path_factory.mktemp("r") / "run")


def test_a_run_of_single_words_has_them_everywhere(found: Result) -> None:
    """With one word to a sample the rate is the share that is not spelled exactly."""
    assert {row["model"] for row in found.rows} == {"global", "personal", "chosen"}
    for row in found.rows:
        assert row["word_error"] == pytest.approx(1 - row["accuracy"])
        assert row["word_error_weighted"] == pytest.approx(1 - row["accuracy_weighted"])
    columns = found.columns
    pairs = zip(columns["personal_test_word_error"], columns["personal_test_accuracy"], strict=True)
    assert all(error == pytest.approx(1 - accuracy) for error, accuracy in pairs)
    assert "chosen_test_word_error" in (found.path / "clients.csv").read_text().splitlines()[0]
    scores = [entry for entry in RunDirectory(found.path).metrics() if entry["event"] == "score"]
    assert scores
    assert all(entry["word_error"] == pytest.approx(1 - entry["accuracy"]) for entry in scores)


def test_tables_show_them(found: Result) -> None:
    for tables in (result_tables(found.rows, 100), detail_tables(found.rows)):
        console = Console(file=io.StringIO(), width=100)
        for part in tables:
            console.print(part)
        assert "WER" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "WER" in (found.path / "report.html").read_text()


def test_a_table_of_a_paper_reads_them(tmp_path: Path) -> None:
    """Fewer errors are better: A has 20 % of the words wrong, B 30 %."""

    def result(error: float) -> Result:
        row = {"model": "personal", "clients": "seen", "split": "test", "accuracy": 0.5}
        return Result(tmp_path, [row | {"word_error": 0.9, "word_error_weighted": error}], {}, 0.0)

    rows = tuple(Row(name=name, of=f"{name.lower()}.personal") for name in ("A", "B"))
    table = Table(title="t", where="w", setting="s", measure="word-errors", rows=rows, claims=("A ≤ B",))
    runs = {(run, seed): result(error) for run, error in (("a", 0.2), ("b", 0.3)) for seed in (0, 1)}
    lines = outcomes(table, runs)
    assert [line.mean for line in lines] == pytest.approx([20.0, 30.0])
    (verdict,) = judge(table, lines)
    assert verdict.word == "holds"
    assert verdict.mean == pytest.approx(-10)
