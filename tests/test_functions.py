"""The commands as functions: each does what its command does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import personafl
from personafl import Recipe
from personafl.cli import app

SMALL: dict[str, Any] = {
    "rounds": 1,
    "data": {"partition": {"kind": "iid", "clients": 3}},
    "model": {"name": "mlp", "hidden": [4], "personal": "output"},
    "engine": {"strategy": "stacked", "workers": 1},
}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> personafl.Result:
    return personafl.run(SMALL, "fedper", out=tmp_path_factory.mktemp("functions") / "run")


def test_listings_have_what_the_command_line_prints() -> None:
    assert {"fedavg", "ditto"} <= {entry["name"] for entry in personafl.list_methods()}
    assert {"mlp", "cnn"} <= {entry["name"] for entry in personafl.list_models()}
    assert all(entry["write"] for entry in personafl.list_datasets())


def test_a_recipe_is_made_of_arguments() -> None:
    made = personafl.make_recipe(
        SMALL,
        method="ditto",
        methods=["fedavg", "ditto"],
        seeds=3,
        partition="iid:clients=4",
        settings={"method.pull": 2},
    )
    assert made.rounds == 1
    assert (made.method.name, made.method.options) == ("ditto", {"pull": 2})
    assert made.compare.seeds == (0, 1, 2)
    assert made.data.partition is not None
    assert made.data.partition.clients == 4
    assert Recipe.parse(made.model_dump(mode="json", exclude_none=True)) == made


def test_a_model_is_described() -> None:
    shown = personafl.describe_model(SMALL, method="fedper")
    assert shown.tensors["parameters"].sum() == 64 * 4 + 4 + 4 * 10 + 10
    assert shown.tensors.query("personal")["parameters"].sum() == 50
    assert shown.memory.partial > 0
    x, y = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2
    own = personafl.describe_model((x, y), user=torch.arange(40) // 10, model=nn.Linear(6, 2))
    assert own.tensors["parameters"].tolist() == [12, 2]


def test_reports_and_views(result: personafl.Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = personafl.write_report(result.path, out=tmp_path / "page.html")
    assert page == tmp_path / "page.html"
    assert "fedper" in page.read_text()
    personafl.watch_runs(result.path)
    assert "fedper" in capsys.readouterr().out


def test_dealt_data_and_a_model_file_predict(result: personafl.Result, tmp_path: Path) -> None:
    files = personafl.deal(SMALL, out=tmp_path / "dealt", method="fedper")
    assert len(files) == 3
    exported = result.export(tmp_path / "models", clients=["1"])
    found = personafl.predict(exported.models[-1].file, files[1])
    accuracy = result.clients.set_index("name").loc["1", "personal_test_accuracy"]
    assert found.accuracy == pytest.approx(accuracy)


def test_networks_that_fit_and_times_to_wait() -> None:
    found = personafl.fit_device(SMALL, max_bytes="2k", models="mlp:hidden=[4],mlp:hidden=[64]", bits="full,2")
    assert found.chosen.bytes <= 2000
    waiting = personafl.wait_times(5, latency="exponential:mean=1")
    assert len(waiting.choices) == 5


def test_more_rounds_on_the_command_line(result: personafl.Result, tmp_path: Path) -> None:
    copy = result.extend(1, out=tmp_path / "run")
    done = CliRunner().invoke(app, ["resume", str(tmp_path / "run"), "rounds=3", "--quiet"])
    assert done.exit_code == 0, done.output
    assert personafl.load(tmp_path / "run").rows != copy.rows
    whole = personafl.run(SMALL, "fedper", rounds=3, out=tmp_path / "whole")
    assert (tmp_path / "run/global.safetensors").read_bytes() == (whole.path / "global.safetensors").read_bytes()


@pytest.mark.system
def test_plans_and_sweeps(tmp_path: Path) -> None:
    plan = personafl.make_plan(SMALL, methods=["fedavg", "ditto"], seeds=2, out=tmp_path)
    assert [(each.method, each.runs) for each in plan.estimates] == [("fedavg", 2), ("ditto", 2)]
    told: list[int] = []
    recipe = {**SMALL, "sweep": {"sampler": "grid", "keys": {"training": {"lr": [0.01, 0.1]}}}}
    recipe["data"] = {**SMALL["data"], "validation": 0.2}
    sweep = personafl.run_sweep(
        recipe, out=tmp_path / "sweep", jobs=1, listener=lambda trial, done, of: told.append(of)
    )
    assert told == [2, 2]
    assert sweep.best is not None
    assert personafl.run_sweep(recipe, out=tmp_path / "sweep").best == sweep.best
