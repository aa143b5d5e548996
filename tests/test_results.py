"""What a result can be asked for: models, predictions, more rounds, the best method; and how it shows itself."""

from __future__ import annotations

import multiprocessing
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import personafl
from personafl import BadInput, Comparison, Result, RoundDone, api
from personafl.api import progress
from personafl.storage.rundir import RunDirectory

DIGITS = load_digits()
CLASSES = {"kind": "classes", "clients": 6, "per_client": 4}
RECIPE: dict[str, Any] = {
    "rounds": 3,
    "data": {"partition": CLASSES, "validation": 0.2, "unseen": 2, "min_samples": 30},
    "model": {"name": "mlp", "hidden": [8]},
    "finetune": True,
    "method": "ditto",
}


def numbers(result: Any) -> list[dict[str, Any]]:
    return [{**row, "seconds": None} for row in result.rows]


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    """Digits of six writers, with words for labels and a column of text."""
    table = pd.DataFrame(DIGITS.data[:240, 16:48], columns=[f"p{place}" for place in range(32)])
    words = np.array(["even", "odd"])[DIGITS.target[:240] % 2]
    hand = np.where(np.arange(240) % 3 == 0, "left", "right")
    return table.assign(hand=hand, parity=words, writer=[f"w{row // 40}" for row in range(240)])


@pytest.fixture(scope="module")
def tabled(frame: pd.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return api.run(
        frame,
        "ditto",
        label="parity",
        user="writer",
        rounds=3,
        settings={"data.validation": 0.25},
        out=tmp_path_factory.mktemp("tabled") / "run",
    )


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return api.run(RECIPE, out=tmp_path_factory.mktemp("short") / "run")


@pytest.fixture(scope="module")
def comparison(frame: pd.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, list[RoundDone]]:
    told: list[RoundDone] = []
    found = api.compare(
        frame.drop(columns="hand"),
        ["fedavg", "ditto", "local"],
        label="parity",
        user="writer",
        model=nn.Linear(32, 2),
        rounds=4,
        seeds=2,
        settings={"evaluation.every": 1},
        callback=told.append,
        out=tmp_path_factory.mktemp("comparison") / "all",
    )
    return found, told


@pytest.mark.parametrize("kind", ["global", "personal", "chosen"])
def test_a_clients_model_is_the_one_that_was_scored(short: Result, kind: Any) -> None:
    data = api.describe_data(RECIPE).data
    table = short.clients.set_index("name")
    scored = "tuned" if kind == "personal" else kind
    for name in data.client_names:
        rows = data.test[data.client_number(name, "")]
        network = short.model(name, kind)
        assert not network.training
        with torch.no_grad():
            right = (network(data.x[rows]).argmax(1) == data.y[rows]).float().mean()
        expected = table.loc[name].get(f"{scored}_test_accuracy", np.nan)
        expected = table.loc[name, "personal_test_accuracy"] if np.isnan(expected) else expected  # a newcomer
        assert float(right) == pytest.approx(expected)


def test_a_choice_leaves_no_workers(tmp_path: Path) -> None:
    result = api.run({**RECIPE, "rounds": 1, "finetune": False, "engine": {"workers": 2}}, out=tmp_path / "run")
    assert multiprocessing.active_children() == []
    result.model("0", "chosen")
    assert multiprocessing.active_children() == []


def test_predictions_have_the_names_of_the_labels(tabled: Result, frame: pd.DataFrame) -> None:
    new = frame.sample(20, random_state=0).drop(columns=["parity", "writer"])
    labels = tabled.predict("w2", new)
    assert set(labels) <= {"even", "odd"}
    table = tabled.predict("w2", new, probabilities=True)
    assert list(table.columns) == ["even", "odd"]
    assert np.allclose(table.sum(axis=1), 1.0)
    assert (table.idxmax(axis=1).to_numpy() == labels).all()
    assert set(tabled.predict("w2", new.assign(hand="both"))) <= {"even", "odd"}  # a value that nobody had


def test_labels_that_were_numbers_are_predicted_as_numbers(short: Result) -> None:
    images = DIGITS.images[:50, None] / 16
    found = short.predict("0", torch.from_numpy(images), kind="global")
    assert found.dtype == np.int64
    assert (found == DIGITS.target[:50]).mean() > 0.3
    assert (short.predict("0", (images * 255).astype(np.uint8), kind="global") == found).mean() > 0.9


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="fine-tuned", marks=pytest.mark.system),
        pytest.param(
            {"method": "fedalt", "model": {"name": "mlp", "hidden": [8], "personal": "output"}},
            id="a part",
            marks=pytest.mark.system,
        ),
        pytest.param(
            {"pretrain": {"rounds": 1}, "federation": {"cohort": 2}}, id="pre-trained", marks=pytest.mark.system
        ),
        pytest.param({"training": {"schedule": {"kind": "exponential"}}, "method": "scaffold"}, id="a schedule"),
    ],
)
def test_more_rounds_are_the_same_bits_as_all_from_the_start(changes: dict[str, Any], tmp_path: Path) -> None:
    recipe = {**RECIPE, "rounds": 2, **changes}
    whole = api.run(recipe, out=tmp_path / "whole", rounds=4)
    first = api.run(recipe, out=tmp_path / "first")
    copy = first.extend(2, out=tmp_path / "copy")
    here = first.extend(1).extend(1)
    for found in (copy, here):
        assert numbers(found) == numbers(whole)
        assert found.columns == whole.columns
        assert (found.path / "global.safetensors").read_bytes() == (tmp_path / "whole/global.safetensors").read_bytes()
    assert [line["round"] for line in here.history().to_dict("records")] == [1, 2, 3, 4]
    assert api.resume(tmp_path / "first").rows == here.rows


def test_more_rounds_by_resume_of_a_run_and_of_a_comparison(tmp_path: Path) -> None:
    recipe = {**RECIPE, "rounds": 1, "finetune": False}
    whole = api.compare(recipe, ["fedavg", "ditto"], rounds=2, out=tmp_path / "whole")
    short = api.compare(recipe, ["fedavg", "ditto"], out=tmp_path / "short")
    with pytest.raises(BadInput, match="belongs to the comparison"):
        short.results[0].extend(1)
    longer = api.resume(tmp_path / "short", changes={"rounds": 2})
    assert numbers(longer) == numbers(whole)
    with pytest.raises(BadInput, match="rounds = 1: it has 2 already"):
        api.resume(tmp_path / "short", changes={"rounds": 1})


def test_more_rounds_are_refused_where_the_first_would_have_been_others(tmp_path: Path) -> None:
    training = {"schedule": {"kind": "linear"}}
    result = api.run({**RECIPE, "rounds": 2, "training": training}, out=tmp_path / "run")
    before = numbers(result)
    for ask in (lambda: result.extend(1), lambda: result.extend(1, out=tmp_path / "copy")):
        with pytest.raises(BadInput, match="learning rate comes down to 0 with round 2"):
            ask()
    assert not (tmp_path / "copy").exists()
    assert numbers(api.load(tmp_path / "run")) == before


def test_what_cannot_go_on_keeps_its_result(frame: pd.DataFrame, tabled: Result, tmp_path: Path) -> None:
    shutil.copytree(tabled.path, tmp_path / "run")
    before = api.load(tmp_path / "run")
    assert isinstance(before, Result)
    with pytest.raises(BadInput, match=r"begun in Python with objects \(data=…\); open it with them"):
        before.extend(1)
    with pytest.raises(BadInput, match="the data changed since the run began"):
        api.resume(tmp_path / "run", data=frame.assign(p0=1.0), changes={"rounds": 9})
    assert api.load(tmp_path / "run").rows == before.rows
    told: list[RoundDone] = []
    again = api.load(tmp_path / "run", data=frame)
    assert isinstance(again, Result)
    again.extend(2, callback=told.append)
    assert [event.round for event in told] == [4, 5]


def test_a_stop_on_the_way_to_more_rounds_loses_nothing(short: Result, tmp_path: Path) -> None:
    """The recipe is replaced in steps; between any two of them the directory is a run that goes on."""
    whole = api.run(RECIPE, rounds=4, out=tmp_path / "whole")
    shutil.copytree(short.path, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    RunDirectory(tmp_path / "run").forget_tuned()
    assert numbers(api.resume(tmp_path / "run")) == numbers(short)
    found = api.resume(tmp_path / "run", changes={"rounds": 4})
    assert numbers(found) == numbers(whole)


def test_the_best_method_and_by_what(comparison: tuple[Comparison, list[RoundDone]], tabled: Result) -> None:
    best = comparison[0].best()
    table = comparison[0].table().query("clients == 'seen' and split == 'test'")
    means = table[table["model"] != "global"].groupby("method")["accuracy"].mean()
    means["fedavg"] = table.query("method == 'fedavg'")["accuracy"].mean()
    assert best.accuracy == pytest.approx(means[best.method]) == pytest.approx(means.max())
    assert [result.rows[0]["seed"] for result in best.results] == [0, 1]
    assert (
        str(best) == f"{best.method}: {100 * best.accuracy:.1f} % on test data ({best.model} model, mean over 2 seeds)"
    )
    judged = Comparison(tabled.path, (tabled,)).best()
    assert judged.split == "validation"
    with pytest.raises(BadInput, match="no result to choose from"):
        Comparison(tabled.path, ()).best()


def test_a_callback_is_told_of_every_round(comparison: tuple[Comparison, list[RoundDone]]) -> None:
    found, told = comparison
    assert len(told) == 3 * 2 * 4
    assert {(event.method, event.seed) for event in told} == {
        (m, s) for m in ("fedavg", "ditto", "local") for s in (0, 1)
    }
    assert [event.round for event in told[:4]] == [1, 2, 3, 4]
    assert all(event.rounds == 4 and event.clients == 6 and event.loss > 0 for event in told if event.loss is not None)
    assert told[2].accuracy == pytest.approx(found.results[0].history()["global_test_accuracy"][2])


def test_results_show_themselves(comparison: tuple[Comparison, list[RoundDone]], tabled: Result) -> None:
    found, _ = comparison
    assert repr(found) == f"Comparison({str(found.path)!r}, methods=[fedavg, ditto, local], runs=6)"
    text = str(found)
    assert "Accuracy in % · 6 seen clients · test data · mean ± std over 2 seeds" in text
    assert [line.split()[0] for line in text.splitlines()[4:7]] == ["fedavg", "ditto", "local"]
    page = found._repr_html_()
    assert page.count("<tr>") == 4
    assert "<svg" in page
    assert "ditto ends at" in page
    assert "<script" not in page
    assert "hurt after" in tabled._repr_html_()
    data = api.describe_data(RECIPE)
    assert "<svg" in data._repr_html_()
    assert str(data) == repr(data)
    assert "label skew" in str(data)


def test_a_name_of_a_client_or_column_is_text_in_a_notebook(frame: pd.DataFrame) -> None:
    evil = frame.assign(writer=frame["writer"].replace("w1", "<script>w1"))
    page = api.describe_data(evil, label="parity", user="writer")._repr_html_()
    assert "&lt;script" in page
    assert "<script" not in page


def test_progress_in_a_notebook_stays_in_the_cell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shown: list[str] = []

    class Handle:
        def update(self, html: Any) -> None:
            shown.append(html.data)

    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    monkeypatch.setattr("IPython.display.display", lambda html, display_id: Handle())
    api.run({**RECIPE, "finetune": False}, out=tmp_path / "run")
    assert '<progress value="1.000" max="1">' in shown[-1]
    assert "3 rounds, loss" in shown[-1]
    api.run({**RECIPE, "finetune": False}, out=tmp_path / "silent", progress=False)
    assert shown[-1].count("<progress") == 1


def test_progress_is_shown_in_terminals_alone(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    api.run({**RECIPE, "finetune": False}, out=tmp_path / "quiet")
    assert capfd.readouterr() == ("", "")
    api.run({**RECIPE, "finetune": False}, out=tmp_path / "asked", progress=True)
    assert "3 rounds, loss" in capfd.readouterr().err


def test_the_package_offers_its_names() -> None:
    assert set(personafl.__all__) <= set(dir(personafl))
    assert set(api.__all__) <= set(dir(api))
    for name in personafl.__all__:
        assert getattr(personafl, name).__doc__


def test_a_module_is_exported_and_loaded_by_its_result(comparison: tuple[Comparison, list[RoundDone]]) -> None:
    result = next(result for result in comparison[0].results if result.path.name == "ditto-seed0")
    exported = result.export(clients=["w0"])
    again = personafl.load_model(exported.models[-1].file, module=nn.Linear(32, 2))
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(again(x), result.model("w0")(x))
    with pytest.raises(BadInput, match=r"was begun in Python with objects \(data=…, model=…\); open it in Python"):
        api.load(result.path).model("w0")
