"""The Python interface: recipes in every form, objects instead of names, results as tables."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import personafl
from personafl import BadInput, Recipe, api
from personafl.algorithms import METHODS, Training
from personafl.core.algorithm import Algorithm
from personafl.data.build import load
from personafl.data.federated import FederatedData, Ragged, make_federated
from personafl.recipe.values import read_toml
from personafl.runs import recording, scoring
from personafl.runs.scoring import Scored
from personafl.simulate.simulator import Simulation
from personafl.storage.rundir import RunDirectory

RECIPE = {
    "rounds": 2,
    "data": {"partition": {"kind": "classes", "clients": 6, "per_client": 3}, "validation": 0.2, "unseen": 2},
    "model": {"name": "mlp", "hidden": [8]},
    "method": {"name": "ditto"},
}


def small_data(test_of_unseen: int = 3) -> FederatedData:
    """Four clients with 10 samples of 4 numbers; the last is unseen."""
    generator = torch.Generator().manual_seed(0)
    rows = np.arange(40).reshape(4, 10)
    return make_federated(
        name="small",
        x=torch.randn(40, 4, generator=generator),
        y=torch.arange(40) % 3,
        classes=3,
        train=Ragged.from_lists(rows[:, :5]),
        validation=Ragged.from_lists([rows[0, 5:7], [], rows[2, 5:7], []]),
        test=Ragged.from_lists([rows[0, 7:], rows[1, 7:], rows[2, 7:8], rows[3, 7 : 7 + test_of_unseen]]),
        seen=np.arange(3),
        unseen=np.array([3]),
        client_names=("a", "b", "c", "d"),
        label_names=("0", "1", "2"),
    )


def numbers(result: personafl.Result) -> list[dict[str, object]]:
    return [{**row, "seconds": None} for row in result.rows]


@pytest.mark.system
def test_a_recipe_in_every_form_gives_the_same_numbers(tmp_path: Path) -> None:
    recipe = Recipe.parse(RECIPE)
    (tmp_path / "own.toml").write_text(recipe.to_toml())
    forms = [RECIPE, recipe, tmp_path / "own.toml", str(tmp_path / "own.toml")]
    results = [api.run(form, out=tmp_path / str(place)) for place, form in enumerate(forms)]
    assert all(numbers(result) == numbers(results[0]) for result in results)
    assert Recipe.parse(read_toml(tmp_path / "0" / "recipe.toml")) == recipe


def test_a_result_has_rows_a_table_and_a_line_per_client(tmp_path: Path) -> None:
    result = api.run(RECIPE, out=tmp_path / "run")
    assert repr(result) == f"Result({str(tmp_path / 'run')!r}, rows=10, clients=6)"
    table = result.table()
    assert isinstance(table, pd.DataFrame)
    assert len(table) == len(result.rows)
    clients = result.clients
    assert len(clients) == 6
    assert list(clients["clients"]) == ["seen"] * 4 + ["unseen"] * 2
    seen = clients[clients["clients"] == "seen"]
    for row in result.rows:
        part = clients[clients["clients"] == row["clients"]]
        column = part[f"{row['model']}_{row['split']}_accuracy"]
        assert column.mean() == pytest.approx(row["accuracy"])
        weights = part[row["split"]] / part[row["split"]].sum()
        assert (column * weights).sum() == pytest.approx(row["accuracy_weighted"])
    hurt = (seen["personal_test_accuracy"] < seen["global_test_accuracy"]).mean()
    assert table.query("model == 'personal' and clients == 'seen' and split == 'test'")["share_hurt"].item() == hurt
    again = api.resume(tmp_path / "run")
    assert isinstance(again, personafl.Result)
    assert again.rows == result.rows
    pd.testing.assert_frame_equal(again.table(), table)
    assert list(table.columns[:5]) == ["method", "seed", "model", "clients", "split"]
    pd.testing.assert_frame_equal(again.clients, clients)
    written = pd.read_csv(tmp_path / "run" / "clients.csv", dtype={"name": str})
    pd.testing.assert_frame_equal(written, clients, check_dtype=False)


def test_the_default_directory_is_new_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = [api.run({**RECIPE, "name": "mine"}).path for _ in range(2)]
    assert paths == [Path("runs/mine-001"), Path("runs/mine-002")]
    with pytest.raises(BadInput, match="exists already"):
        api.run(RECIPE, out="runs/mine-001")


def test_a_module_a_dotted_path_and_data_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of a module that is given are the start: after no step of size above 0 they are the model."""
    (tmp_path / "their_model.py").write_text(
        "from torch import nn\n\ndef make(classes):\n    return nn.Linear(4, classes)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    data, recipe = (
        small_data(),
        {
            "data": {"normalize": "none"},
            "rounds": 2,
            "training": {"lr": 1e-30},
            "model": {"name": "mlp", "hidden": [3]},
        },
    )
    module = nn.Linear(4, 3)
    given = api.run(recipe, data=data, model=module, out=tmp_path / "a")
    with torch.no_grad():
        right = (module(data.x).argmax(1) == data.y).numpy()
    for client in range(4):
        assert given.clients["global_test_accuracy"][client] == pytest.approx(right[data.test[client]].mean())
    assert given.clients["name"].tolist() == ["a", "b", "c", "d"]
    named = api.run({"rounds": 2, "model": {"name": "their_model:make"}}, data=data, algorithm=None, out=tmp_path / "b")
    assert named.rows[0]["parameters"] == given.rows[0]["parameters"] == 15


def test_an_algorithm_of_the_users_is_named_in_the_rows(tmp_path: Path) -> None:
    ditto = METHODS["ditto"].build(Training(), pull=2.0)
    mine = Algorithm("mine", ditto.client, ditto.server)
    result = api.run({"rounds": 1}, data=small_data(), algorithm=mine, out=tmp_path / "run")
    assert {row["method"] for row in result.rows} == {"mine"}


@pytest.mark.parametrize("apart", [True, False], ids=["others gain by their own models", "others lose by them"])
def test_without_validation_data_a_client_goes_by_what_others_found(tmp_path: Path, apart: bool) -> None:
    """Client a alone has no validation data: its choice is what is best for a client of which nothing is known.

    Where everyone has a class of its own, own models are right and a shared one cannot be; where all learn one rule, of
    which 4 samples show little, the shared model is better.
    """
    x = torch.randn(240, 4, generator=torch.Generator().manual_seed(0))
    rows = np.arange(240).reshape(12, 20)
    data = make_federated(
        name="twelve",
        x=x,
        y=torch.arange(240) // 20 % 3 if apart else x[:, :3].argmax(1),
        classes=3,
        train=Ragged.from_lists(rows[:, :4]),
        validation=Ragged.from_lists([[], *rows[1:, 4:12]]),
        test=Ragged.from_lists(rows[:, 12:]),
        seen=np.arange(12),
        unseen=np.array([], dtype=np.int64),
        client_names=tuple("abcdefghijkl"),
        label_names=("0", "1", "2"),
    )
    method = {"name": "ditto", "pull": 0.0, "personal_epochs": 10}
    recipe = {"rounds": 10, "method": method, "training": {"lr": 0.3}, "model": {"name": "linear"}}
    result = api.run(recipe, data=data, out=tmp_path / "run")
    first = result.clients.set_index("name").loc["a"]
    if apart:  # its own model or one close to it, which are right equally often: rounding decides
        assert first["chosen_test_accuracy"] > first["global_test_accuracy"]
        assert first["chosen_test_loss"] < first["global_test_loss"]
    else:
        assert first["chosen_test_accuracy"] == first["global_test_accuracy"]
        assert first["chosen_test_loss"] == first["global_test_loss"]
    assert first["personal_test_loss"] != first["global_test_loss"]
    assert np.isnan(first["personal_validation_accuracy"])


def test_there_are_rows_only_of_clients_with_data(tmp_path: Path) -> None:
    """Of the three seen clients only a and c have validation data; d, unseen, has none, so there is no such row."""
    result = api.run({"rounds": 1, "method": {"name": "ditto"}}, data=small_data(), out=tmp_path / "run")
    groups = {(row["clients"], row["split"]): row["count"] for row in result.rows}
    assert groups == {("seen", "test"): 3, ("seen", "validation"): 2, ("unseen", "test"): 1}


def test_unseen_clients_without_test_data_have_no_row(tmp_path: Path) -> None:
    result = api.run({"rounds": 1}, data=small_data(test_of_unseen=0), out=tmp_path / "run")
    assert {row["clients"] for row in result.rows} == {"seen"}
    assert np.isnan(result.clients["global_test_accuracy"][3])


def test_some_clients_are_scored_during_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same ones every time and for every method; at the end everyone."""
    found: list[list[int]] = []

    def score(simulation: Simulation, tuned: object, clients: Any, *more: Any, **options: Any) -> Scored:
        found.append(clients.tolist())
        return scoring.score(simulation, tuned, clients, *more, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(recording, "score", score)
    for method in ("ditto", "fedavg"):
        recipe = {**RECIPE, "rounds": 3, "method": {"name": method}, "evaluation": {"every": 1, "clients": 2}}
        api.run(recipe, out=tmp_path / method)
    assert found[:4] == found[4:]
    first, second, seen, unseen = found[:4]
    assert first == second == sorted(set(first) & set(seen))
    assert (len(first), len(seen), len(unseen)) == (2, 4, 2)
    lines = [line for line in RunDirectory(tmp_path / "ditto").metrics() if line["event"] == "score"]
    assert {line["count"] for line in lines} == {2}


def test_compare_sees_the_same_splits_and_resumes(tmp_path: Path) -> None:
    comparison = api.compare(RECIPE, methods=["fedavg", "finetune"], seeds=[0, 1], out=tmp_path / "all")
    assert [(r.rows[0]["method"], r.rows[0]["seed"]) for r in comparison.results] == [
        ("fedavg", 0),
        ("finetune", 0),
        ("fedavg", 1),
        ("finetune", 1),
    ]
    assert len(comparison.table()) == len(comparison.rows)
    splits = [(tmp_path / "all" / f"{name}-seed0" / "split.json").read_text() for name in ("fedavg", "finetune")]
    assert splits[0] == splits[1]
    table = comparison.table().query("model == 'global'").set_index(["method", "seed", "clients", "split"])["accuracy"]
    assert table["fedavg"].equals(table["finetune"])  # the shared path is the same
    again = api.resume(tmp_path / "all")
    assert isinstance(again, personafl.Comparison)
    assert again.rows == comparison.rows


def test_the_split_is_what_the_recipe_says(tmp_path: Path) -> None:
    recipe = Recipe.parse(RECIPE)
    given = api.run(recipe, data=load(recipe.data, recipe.seed), out=tmp_path / "a")
    assert numbers(given) == numbers(api.run(recipe, out=tmp_path / "b"))


def test_bad_input_leaves_nothing_behind(tmp_path: Path) -> None:
    for recipe in (
        {"data": {"source": "nowhere.npz"}},
        {"model": {"name": "mpl"}},
        {"federation": {"cohort": 99}},
        {"method": {"name": "dito"}},
    ):
        with pytest.raises(BadInput):
            api.run(recipe, out=tmp_path / "run")
    with pytest.raises(BadInput):
        api.run({}, data=small_data(), model=nn.Linear(5, 3), out=tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_the_names_of_the_package_stay_what_they_are() -> None:
    code = "import personafl; from personafl import Recipe; from personafl.recipe.values import read_toml; import sys\n"
    code += "for name in ('run', 'run', 'compare', 'resume'): assert callable(getattr(personafl, name)), name"
    subprocess.run([sys.executable, "-c", code], check=True, stderr=subprocess.PIPE)
