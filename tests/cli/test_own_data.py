"""Files that people have, from the command line to named predictions, and on devices that read their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from personafl.data.build import load
from personafl.data.config import DataConfig
from personafl.deploy.device.datafile import load_own
from personafl.errors import BadInput
from personafl.recipe.recipe import Recipe

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the real data sets (../shared/data) are not here")
Called = Callable[..., tuple[int, str, str]]


@pytest.fixture
def people(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a table of 3 persons with 40 rows each, in which age decides; one more person has a single row."""
    monkeypatch.chdir(tmp_path)
    dice = np.random.default_rng(0)
    age, person = dice.integers(20, 80, 121), np.repeat(["ann", "bob", "cy", "di"], [40, 40, 40, 1])
    risk = np.where(age > 50, "high", "low")
    town = dice.choice(["Bath", "York"], 121)
    frame = pd.DataFrame({"age": age, "town": town, "person": person, "risk": risk})
    frame.to_csv(tmp_path / "people.csv", index=False)
    return tmp_path / "people.csv"


def test_from_a_table_to_named_predictions(people: Path, called: Called) -> None:
    table = ("--dataset", str(people), "--label", "risk", "--user", "person")
    code, shown, _ = called("data", "describe", *table)
    assert code == 0
    assert "2 (high, low)" in shown
    assert "note: 1 client with fewer than 2 samples left out: di" in shown
    code, _, error = called("run", *table, "--rounds", "30", "training.lr=0.1", "--out", "r")
    assert code == 0, error
    assert error.count("note: 1 client with fewer than 2 samples left out: di") == 1
    assert called("export", "r", "--quiet")[0] == 0
    card = Path("r/export/global.md").read_text()
    assert "| Classes | high, low |" in card
    assert "| Columns | age, town |" in card
    pd.DataFrame({"town": ["York", "Rome"], "age": [79, 21]}).to_csv("new.csv", index=False)
    code, names, error = called("predict", "r/export/global.safetensors", "--data", "new.csv")
    assert (code, names.split(), error) == (0, ["high", "low"], "")
    code, text, _ = called("predict", "r/export/global.safetensors", "--data", str(people), "--json")
    found = json.loads(text)
    assert set(found["classes"]) == {"high", "low"}
    assert found["accuracy"] > 0.8
    code, _, error = called("predict", "r/export/global.safetensors", "--data", "r/recipe.toml")
    assert code == 2
    assert error.count("\n") == 1


@pytest.mark.system
def test_numbers_of_a_table_are_predicted_in_their_units(
    tmp_path: Path, called: Called, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dice = np.random.default_rng(0)
    person, weight, height = np.repeat(["ann", "bob", "cy"], 60), dice.normal(70, 9, 180), dice.normal(170, 8, 180)
    frame = pd.DataFrame({"person": person, "weight": weight, "height": height, "dose": 3.1 * weight - height + 40})
    frame.to_csv(tmp_path / "doses.csv", index=False)
    table = ("--dataset", str(tmp_path / "doses.csv"), "--label", "dose", "--user", "person")
    code, shown, _ = called("data", "describe", *table)
    assert code == 0
    assert "dose from" in shown
    code, shown, error = called("run", *table, "--method", "ditto", "--rounds", "20", "--out", "r")
    assert code == 0, error
    assert "R² in %" in shown
    assert "rmse" in shown
    assert called("export", "r", "--quiet", "--onnx")[0] == 0
    assert "| Task | regression, 1 targets |" in Path("r/export/global.md").read_text()
    frame.drop(columns="dose").to_csv("new.csv", index=False)
    code, _, error = called("predict", "r/export/global.safetensors", "--data", "new.csv", "--out", "p.csv")
    assert code == 0, error
    found = pd.read_csv("p.csv")
    assert list(found) == ["sample", "dose"]
    assert np.corrcoef(found["dose"], frame["dose"])[0, 1] > 0.95
    assert abs(found["dose"].mean() - frame["dose"].mean()) < 0.2 * frame["dose"].std()
    code, text, _ = called("predict", "r/export/global.safetensors", "--data", str(tmp_path / "doses.csv"), "--json")
    assert json.loads(text)["r2"] > 0.9
    code, _, error = called("predict", "r/export/global.safetensors", "--data", "new.csv", "--probabilities")
    assert (code, error.count("\n")) == (2, 1)


def test_columns_of_marks_are_sets_of_labels(tmp_path: Path, called: Called, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dice = np.random.default_rng(0)
    a, b = dice.normal(size=150), dice.normal(size=150)
    frame = pd.DataFrame({"a": a, "b": b, "hot": (a > 0).astype(int), "wet": (a + b > 0).astype(int)})
    frame.to_csv(tmp_path / "marks.csv", index=False)
    keys = ("--dataset", str(tmp_path / "marks.csv"), 'data.label=["hot","wet"]', "--partition", "iid:clients=3")
    code, shown, error = called("run", *keys, "--rounds", "20", "--out", "r")
    assert code == 0, error
    assert "F1 in %" in shown
    assert called("export", "r", "--quiet")[0] == 0
    frame[["b", "a"]].to_csv("new.csv", index=False)
    code, text, error = called("predict", "r/export/global.safetensors", "--data", "new.csv", "--probabilities")
    assert code == 0, error
    lines = text.splitlines()
    assert lines[0] == "sample,hot,wet,probability hot,probability wet"
    said = np.array([[int(value) for value in line.split(",")[1:3]] for line in lines[1:]])
    assert (said == frame[["hot", "wet"]].to_numpy()).mean() > 0.9


def test_devices_agree_on_classes_and_columns(people: Path, called: Called) -> None:
    """A file without some class, without some value and in another order means the same by what it has."""
    table = ("--dataset", str(people), "--label", "risk", "--user", "person")
    assert called("data", "deal", *table, "--out", "dealt")[0] == 0
    recipe = Recipe.read(Path("dealt/recipe.toml"))
    assert recipe.data.classes == ("high", "low")
    assert recipe.data.features == ("age", "town")
    assert recipe.data.categories == {"town": ("Bath", "York")}
    pd.DataFrame({"risk": ["low"] * 5, "town": ["York"] * 5, "age": range(20, 25)}).to_csv("own.csv", index=False)
    own = load_own("own.csv", 1, recipe).data
    assert own.label_names == ("high", "low")
    assert own.y.tolist() == [1] * 5
    assert own.x[0].tolist() == [20, 0, 1]
    silent = recipe.model_copy(update={"data": recipe.data.model_copy(update={"classes": None})})
    with pytest.raises(BadInput, match=r"own\.csv: column 'risk': labels are names such as 'low'.*add data\.classes"):
        load_own("own.csv", 1, silent)
    pd.DataFrame({"risk": ["low"] * 5, "age": range(20, 25)}).to_csv("own.csv", index=False)
    with pytest.raises(BadInput, match=r"own\.csv: data\.features has 'town', which is no column"):
        load_own("own.csv", 1, recipe)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--label", "risks"), "data.label = 'risks' is no column; did you mean 'risk'?"),
        (("--label", "risk", "--user", "name"), "data.user = 'name' is no column"),
        (("--label", "risk", 'data.classes=["a","a"]'), "has 'a' twice; give each once"),
        (("--label", "risk", "data.missing=median"), "data.missing"),
        (("--label", "risk", "data.size=0"), "data.size"),
        (("--label", "risk", 'data.drop=["x"]'), "data.drop has 'x', which is no column"),
    ],
)
def test_bad_words_are_one_line_before_any_work(
    people: Path, called: Called, words: tuple[str, ...], message: str
) -> None:
    code, out, error = called("run", "--dataset", str(people), *words, "--out", "r")
    assert (code, out) == (2, "")
    assert message in error
    assert error.count("\n") == 1
    assert not Path("r").exists()


@needs_shared
def test_real_data_as_a_table_and_as_a_folder_are_the_same(tmp_path: Path) -> None:
    """Exam scores of schools written to CSV, and spoken digits to PNG, are the arrays that they were."""
    with np.load(SHARED / "school" / "school.npz") as file:
        features, score, user = file["features"], file["targets"], file["user"]
    frame = pd.DataFrame(features, columns=[f"f{n}" for n in range(features.shape[1])]).astype(float)
    frame.assign(school=user, passed=score > 20).to_csv(tmp_path / "school.csv", index=False)
    data = load(DataConfig(source=str(tmp_path / "school.csv"), label="passed", user="school"), 0)
    assert data.clients == 139
    assert data.label_names == ("False", "True")
    np.testing.assert_array_equal(data.x.numpy(), features)
    np.testing.assert_array_equal(data.y.numpy(), score > 20)

    image: Any = pytest.importorskip("PIL.Image", reason="the images extra is not installed")
    with np.load(SHARED / "fsdd" / "fsdd_logmel.npz") as file:
        images, labels, user = (file[key][::20] for key in ("images", "labels", "user"))
    for place, (pixels, label, who) in enumerate(zip(images, labels, user, strict=True)):
        folder = tmp_path / "spoken" / f"speaker {who}" / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        image.fromarray(pixels).save(folder / f"{place}.png")
    spoken = load(DataConfig(source=str(tmp_path / "spoken")), 0)
    assert spoken.clients == 6
    assert spoken.shape.input_shape == (1, 32, 32)
    order = np.lexsort([np.array([f"{place}.png" for place in range(len(labels))]), labels, user])
    np.testing.assert_array_equal(spoken.y.numpy(), labels[order])
    np.testing.assert_array_equal((spoken.x[:, 0] * 255).round().numpy(), images[order])
