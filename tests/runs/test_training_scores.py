"""Training accuracy: scored when asked for, on the images as they are, and shown wherever scores are."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import personafl
from personafl.cli.tables import detail_tables, result_tables
from personafl.data.build import load
from personafl.recipe.recipe import Recipe
from personafl.report.gains import clients_of
from personafl.report.load import load as load_runs
from personafl.runs.result import Result
from personafl.storage.rundir import RunDirectory

SMALL: dict[str, Any] = {
    "rounds": 3,
    "method": {"name": "ditto"},
    "data": {
        "partition": {"kind": "dirichlet", "clients": 5, "alpha": 0.3},
        "unseen": 1,
        "validation": 0.2,
        "augment": {"flip": True, "crop": 2},
    },
    "model": {"name": "mlp", "hidden": [8]},
    "evaluation": {"every": 1, "train": True},
    "engine": {"threads": 1, "workers": 1, "strategy": "stacked"},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Result:
    heard: list[float | None] = []
    result = personafl.run(
        SMALL,
        out=tmp_path_factory.mktemp("runs") / "run",
        listener=lambda progress: heard.append(getattr(progress, "accuracy", None)),
    )
    scores = [e for e in RunDirectory(result.path).metrics() if e["event"] == "score" and e["model"] == "personal"]
    tested = [entry["accuracy"] for entry in scores if entry["split"] == "test"]
    assert [value for value in heard if value is not None][:2] == tested  # a display is told of test data
    return result


def test_it_is_that_of_the_models_on_their_own_plain_data(found: Result) -> None:
    data = load(Recipe.parse(SMALL).data, 0)
    exported = personafl.export(found.path, clients="all")
    columns = found.columns
    for model in exported.models:
        network = personafl.load_model(model.file)
        for place, client in enumerate(columns["client"]):
            if model.client in (None, data.client_names[client]):
                rows = torch.from_numpy(data.train[client])
                share = float((network(data.x[rows]).argmax(1) == data.y[rows]).double().mean())
                assert columns[f"{model.model}_train_accuracy"][place] == pytest.approx(share, abs=1e-6)
    (row,) = (r for r in found.rows if (r["model"], r["split"], r["clients"]) == ("personal", "train", "seen"))
    seen = [
        v for v, group in zip(columns["personal_train_accuracy"], columns["clients"], strict=True) if group == "seen"
    ]
    assert row["accuracy"] == pytest.approx(np.mean(seen))
    assert "personal_train_accuracy" in (found.path / "clients.csv").read_text().splitlines()[0]


def test_it_is_recorded_during_training_and_does_not_change_it(found: Result, tmp_path: Path) -> None:
    scores = [e for e in RunDirectory(found.path).metrics() if e["event"] == "score"]
    assert {(e["model"], e["split"]) for e in scores} == {
        (model, split) for model in ("global", "personal") for split in ("test", "train")
    }
    without = personafl.run(SMALL | {"evaluation": {"every": 1}}, out=tmp_path / "run")
    assert {row["split"] for row in without.rows} == {"test", "validation"}
    tested = [{k: v for k, v in row.items() if k != "seconds"} for row in found.rows if row["split"] != "train"]
    assert tested == [{k: v for k, v in row.items() if k != "seconds"} for row in without.rows]


def test_tables_and_the_page_show_it(found: Result) -> None:
    for tables in (result_tables(found.rows, 100), detail_tables(found.rows)):
        console = Console(file=io.StringIO(), width=100)
        for part in tables:
            console.print(part)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert "4 seen clients · test data" in text
        assert "4 seen clients · training data" in text
    page = (found.path / "report.html").read_text()
    for words in (
        "training data · seed 0",
        "training accuracy, %",
        "the same on training data",
        "on its training data",
    ):
        assert words in page
    (source,) = load_runs([found.path])
    clients = clients_of(source.runs[0], "personal", "train")
    own = [100 * value for value in found.columns["personal_train_accuracy"][: len(clients)]]
    assert [client.own for client in clients] == own


def test_validation_data_are_scored_during_training_if_asked_for(tmp_path: Path) -> None:
    heard: list[float | None] = []
    values = SMALL | {"rounds": 2, "evaluation": {"every": 1, "split": "both"}}
    result = personafl.run(
        values, out=tmp_path / "run", listener=lambda told: heard.append(getattr(told, "accuracy", None))
    )
    scores = [e for e in RunDirectory(result.path).metrics() if e["event"] == "score" and e["model"] == "personal"]
    assert {entry["split"] for entry in scores} == {"test", "validation"}
    assert {row["split"] for row in result.rows} == {"test", "validation"}
    tested = [entry["accuracy"] for entry in scores if entry["split"] == "test"]
    assert [value for value in heard if value is not None][:1] == tested  # a display is told of test data


def test_both_need_validation_data(tmp_path: Path) -> None:
    values = SMALL | {"data": SMALL["data"] | {"validation": 0.0}, "evaluation": {"split": "both"}}
    with pytest.raises(personafl.BadInput, match=r"evaluation\.split: there are no validation data"):
        personafl.run(values, out=tmp_path / "run")
