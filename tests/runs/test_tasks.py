"""Numbers and sets of labels, from data to predictions: scores by hand, units, weights of classes, exports."""

from __future__ import annotations

import functools
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from sklearn.datasets import load_diabetes, load_digits

import personafl
from personafl.cli.tables import detail_tables, result_tables
from personafl.data.build import federate
from personafl.data.config import DataConfig, Iid
from personafl.data.describe import describe
from personafl.data.federated import FederatedData
from personafl.data.inputs import as_seen
from personafl.data.sources.dataset import checked
from personafl.errors import BadInput
from personafl.runs.build import prepare
from personafl.runs.result import Result

MLP = {"name": "mlp", "hidden": [8]}
QUICK = {"rounds": 3, "model": MLP, "engine": {"threads": 1, "workers": 1}}


@functools.cache
def diabetes(scale: float = 1.0, shift: float = 0.0) -> FederatedData:
    """442 patients, ten measurements of each, and how far the illness had gone after a year."""
    x, y = load_diabetes(return_X_y=True)
    dataset = checked("diabetes", name="diabetes", x=x, y=scale * y + shift + 0.5)
    return federate(dataset, DataConfig(partition=Iid(clients=6), validation=0.2), 0)


@functools.cache
def properties() -> FederatedData:
    """Digits, of which each is even or not, large or not, and prime or not."""
    digits = load_digits()
    y = np.stack([digits.target % 2 == 0, digits.target > 4, np.isin(digits.target, (2, 3, 5, 7))], axis=1)
    dataset = checked(
        "digits", name="properties", x=digits.images[:, None], y=y, target_names=["even", "large", "prime"]
    )
    return federate(dataset, DataConfig(partition=Iid(clients=6)), 0)


def run(data: FederatedData, out: Path, method: str = "ditto", **keys: Any) -> Result:
    return personafl.run({**QUICK, "method": {"name": method}, **keys}, data=data, out=out)


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(diabetes(), tmp_path_factory.mktemp("numbers") / "run", rounds=20, training={"lr": 0.5})


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(properties(), tmp_path_factory.mktemp("sets") / "run", rounds=15)


def seen(result: Result, model: str) -> dict[str, Any]:
    return next(row for row in result.rows if (row["model"], row["clients"], row["split"]) == (model, "seen", "test"))


def test_what_labels_mean_is_told_from_them() -> None:
    assert (diabetes().task, diabetes().classes, diabetes().y.dtype) == ("regression", 1, torch.float32)
    assert (properties().task, properties().label_names) == ("multilabel", ("even", "large", "prime"))


def test_targets_are_standardised_by_training_data_of_those_who_train() -> None:
    data = as_seen(diabetes(), DataConfig(), torch.float64)
    assert data.scale is not None
    rows = torch.from_numpy(data.train.of(data.seen))
    assert float(data.y[rows].mean()) == pytest.approx(0, abs=1e-7)
    assert float(data.y[rows].std(correction=0)) == pytest.approx(1, abs=1e-7)
    plain = diabetes().y[rows]
    assert data.scale.mean[0] == pytest.approx(float(plain.double().mean()))


def test_scores_and_errors_of_numbers_are_those_of_exported_models(numbers: Result, tmp_path: Path) -> None:
    """R² against the variance of all training targets, and errors in the units of the data."""
    data = diabetes()
    exported = personafl.export(numbers.path, tmp_path / "out", ["0"], data=data)
    scale = as_seen(data, DataConfig(), torch.float32).scale
    assert scale is not None
    for model, client in ((exported.models[0], None), (exported.models[1], 0)):
        network = personafl.load_model(model.file)
        members = range(6) if client is None else [client]
        errors = []
        for member in members:
            rows = torch.from_numpy(data.test[member])
            with torch.no_grad():
                errors.append((network(data.x[rows]) - data.y[rows]).double())
        explained = np.mean([1 - float(error.square().mean()) / scale.std[0] ** 2 for error in errors])
        rmse = np.mean([float(error.square().mean().sqrt()) for error in errors])
        name = "global" if client is None else "personal"
        columns = numbers.columns
        found = (
            (seen(numbers, name)["accuracy"], seen(numbers, name)["rmse"])
            if client is None
            else (columns[f"{name}_test_accuracy"][0], columns[f"{name}_test_rmse"][0])
        )
        assert found == pytest.approx((explained, rmse), abs=2e-4, rel=1e-4)
    assert seen(numbers, "global")["accuracy"] > 0.3  # it has learned
    assert seen(numbers, "global")["score"] == "r2"


@pytest.mark.system
def test_units_of_targets_do_not_matter(numbers: Result, tmp_path: Path) -> None:
    other = run(diabetes(1000.0, 500.0), tmp_path / "run", rounds=20, training={"lr": 0.5})
    for model in ("global", "personal"):
        one, two = seen(numbers, model), seen(other, model)
        assert two["accuracy"] == pytest.approx(one["accuracy"], abs=2e-3)
        assert two["rmse"] == pytest.approx(1000 * one["rmse"], rel=2e-3)


@pytest.mark.system
def test_sets_of_labels_are_learned(sets: Result) -> None:
    row = seen(sets, "personal")
    assert row["score"] == "f1"
    assert row["accuracy"] > 0.8
    assert 0.4 < row["exact"] < row["accuracy"]


@pytest.mark.parametrize("fixture", ["numbers", "sets"])
def test_tables_and_page_name_the_score(fixture: str, request: pytest.FixtureRequest) -> None:
    result: Result = request.getfixturevalue(fixture)
    console = Console(file=io.StringIO(), width=100)
    for tables in (result_tables(result.rows, 100), detail_tables(result.rows)):
        for part in tables:
            console.print(part)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    page = (result.path / "report.html").read_text()
    for word in {"numbers": ("R² in %", "rmse", "mae"), "sets": ("F1 in %", "exact")}[fixture]:
        assert word in shown
        assert word in page
    assert "Accuracy in %" not in shown


def test_data_are_described() -> None:
    for data, words in ((diabetes(), ("targets", "fifths of all targets")), (properties(), ("labels", "3 (even"))):
        console = Console(file=io.StringIO(), width=100)
        describe(data, console, DataConfig())
        for word in words:
            assert word in console.file.getvalue()  # type: ignore[attr-defined]


def test_classes_are_weighted(tmp_path: Path) -> None:
    """The first loss that a full batch has, by hand: balanced weights are n / (classes · n_c)."""
    digits = load_digits(n_class=3)
    keep = np.flatnonzero((digits.target > 0) | (np.arange(len(digits.target)) % 5 == 0))
    dataset = checked("d", name="d", x=digits.images[keep][:, None], y=digits.target[keep])
    data = federate(dataset, DataConfig(partition=Iid(clients=2)), 0)
    training = {"class_weights": "balanced", "batch": "all", "epochs": 1}
    job = prepare(personafl.Recipe.parse({**QUICK, "training": training}), data)
    problem, seen_as = job.federation.problems[0], job.federation.data
    rows = torch.from_numpy(seen_as.train.flat)
    counts = torch.bincount(seen_as.y[rows], minlength=3)
    outputs = problem.net.apply(job.federation.first_model, seen_as.x[rows])
    wanted = torch.nn.functional.cross_entropy(
        outputs, seen_as.y[rows], weight=len(rows) / (3 * counts), reduction="none"
    )
    torch.testing.assert_close(problem.loss(outputs, seen_as.y[rows]), wanted)
    given = prepare(personafl.Recipe.parse({**QUICK, "training": {"class_weights": [1.0, 2.0, 0.0]}}), data)
    found = given.federation.problems[0].loss(outputs, seen_as.y[rows])
    assert bool((found[seen_as.y[rows] == 2] == 0).all())


BAD = [
    ({"training": {"class_weights": "balanced"}}, diabetes, "training.class_weights: is for classes.*regression"),
    ({"training": {"class_weights": [1.0, 2.0]}}, properties, "training.class_weights: is for classes"),
    ({"data": {"scale": {"mean": [0.0, 1.0], "std": [1.0, 1.0]}}}, diabetes, "data.scale.mean: has 2 numbers"),
    ({"data": {"scale": {"mean": [0.0], "std": [1.0]}}}, properties, "data.scale: is for regression"),
    ({"method": {"name": "fedrod"}}, diabetes, "fedrod balances classes, and the task regression has none"),
]


@pytest.mark.parametrize(("keys", "data", "message"), BAD)
def test_what_does_not_fit_the_task_is_refused(keys: dict[str, Any], data: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        prepare(personafl.Recipe.parse({**QUICK, **keys}), data())
    assert "\n" not in str(caught.value)


def test_label_partitions_need_classes() -> None:
    x, y = load_diabetes(return_X_y=True)
    dataset = checked("d", name="diabetes", x=x, y=y + 0.5)
    with pytest.raises(BadInput, match="partition 'classes' needs one label per sample, but diabetes predicts numbers"):
        federate(dataset, DataConfig.model_validate({"partition": {"kind": "classes"}}), 0)
    assert federate(dataset, DataConfig(), 0).clients == 50  # dealt at random where nobody says how
