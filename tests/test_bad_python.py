"""What can be wrong with a call in Python: each is a BadInput of one line that names the argument, before any run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import personafl
from personafl import BadInput

X = np.linspace(-1, 1, 120, dtype=np.float32).reshape(40, 3)
Y = np.arange(40) % 2
USER = np.repeat(["a", "b"], 20)
FRAME = pd.DataFrame(X, columns=["p", "q", "r"]).assign(kind=Y, who=USER)
ONE = (X[:20], Y[:20])
NAMED: dict[str, Any] = {"label": "kind", "user": "who"}
HOLES = np.where(np.arange(60).reshape(20, 3) == 31, np.nan, X[:20])

CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    # what the data are
    "no data": (lambda: personafl.run(42), r"data: is a int; give a pandas DataFrame"),
    "three parts": (lambda: personafl.run((X, Y, USER)), r"data: is several parts, and two are meant: \(x, y\)"),
    "an empty dict of a client": (
        lambda: personafl.run({"a": ONE, "b": {}}),
        r"data\['a'\]: has no parts train and test",
    ),
    "a client without a pair": (lambda: personafl.run({"a": ONE, "b": X}), r"data\['b'\]: is a ndarray; give a pair"),
    "a client without samples": (
        lambda: personafl.run({"a": ONE, "b": (X[:0], Y[:0])}),
        r"data\['b'\]: has no samples",
    ),
    "too few labels": (lambda: personafl.run({"a": ONE, "b": (X, Y[:9])}), r"data\['b'\]: 40 samples but 9 labels"),
    "other shapes": (lambda: personafl.run({"a": ONE, "b": (X[:, :2], Y)}), r"data\['b'\]: samples have shape \[2\]"),
    "a hole": (lambda: personafl.run({"a": ONE, "b": (HOLES, ONE[1])}), r"data\['b'\]: sample 10 holds NaN"),
    "objects": (lambda: personafl.run({"a": (np.array([[None]]), [0]), "b": ONE}), r"data\['a'\], x: has dtype object"),
    "rows that differ": (lambda: personafl.run(([[1.0], [1.0, 2.0]], [0, 1])), r"data, x: its rows differ in length"),
    "two of a name": (lambda: personafl.run({1: ONE, "1": ONE}), r"data: two clients are called '1'"),
    "half of the halves": (
        lambda: personafl.run({"a": {"train": ONE, "test": ONE}, "b": ONE}),
        r"data\['b'\]: has no parts train and test, and other clients have",
    ),
    "only a train half": (lambda: personafl.run({"a": {"train": ONE}}), r"data\['a'\]: has train; give train and test"),
    "samples that do not stack": (
        lambda: personafl.run({"a": DataLoader([(torch.ones(2), 0), (torch.ones(3), 1)])}),  # type: ignore[arg-type]
        r"data\['a'\]: its samples cannot be stacked \(RuntimeError",
    ),
    "samples that are no pairs": (
        lambda: personafl.run({"a": TensorDataset(torch.ones(4, 3))}),
        r"data\['a'\]: its samples are not pairs",
    ),
    "one class": (lambda: personafl.run({"a": (X, 0 * Y)}), r"data: every label is '0'"),
    "no such file": (lambda: personafl.run("nowhere.csv"), r"data source 'nowhere.csv': no such file"),
    # whose they are, and what is to be predicted
    "no label": (lambda: personafl.run(FRAME, user="who"), r"data: has columns p, q, r, kind, who; say which to pred"),
    "no such label": (
        lambda: personafl.run(FRAME, label="kid"),
        r"data.label = 'kid' is no column; did you mean 'kind'",
    ),
    "a label of arrays": (lambda: personafl.run((X, Y), label="kind"), r"data.label is for tables"),
    "a column of arrays": (lambda: personafl.run((X, Y), user="who"), r"user = 'who': data have no columns; give an"),
    "too few users": (lambda: personafl.run((X, Y), user=USER[:9]), r"user: has shape \[9\], and there are 40 samples"),
    "users twice": (lambda: personafl.run({"a": ONE}, user=USER), r"user: the keys of data are the users already"),
    "users beside columns": (
        lambda: personafl.run(FRAME, label="kind", user=USER),
        r"user: data have columns; give the",
    ),
    "columns of one name": (
        lambda: personafl.run(pd.concat([FRAME, FRAME[["p"]]], axis=1), **NAMED),
        r"data: two columns are called 'p'",
    ),
    "a label that is no name": (lambda: personafl.run(FRAME, label=3, user="who"), r"label: is a int; give the name"),  # type: ignore[arg-type]
    # what is run
    "no such method": (lambda: personafl.run(FRAME, "dito", **NAMED), r"no method 'dito'; did you mean 'ditto'"),
    "several methods": (lambda: personafl.run(FRAME, ["ditto"], **NAMED), r"method = \['ditto'\]: give a name"),  # type: ignore[arg-type]
    "a method twice": (
        lambda: personafl.run(FRAME, "ditto", algorithm="ditto", **NAMED),  # type: ignore[arg-type]
        r"method and algorithm: both say what to run",
    ),
    "an algorithm by name": (lambda: personafl.run(FRAME, algorithm="x", **NAMED), r"algorithm: is a str; give a per"),  # type: ignore[arg-type]
    "a class": (lambda: personafl.run(FRAME, model=nn.Linear, **NAMED), r"model: is the class Linear; give a network"),  # type: ignore[arg-type]
    "another model": (lambda: personafl.run(FRAME, model=nn.Linear(9, 2), **NAMED), r"model: .*shape"),
    "no such model": (lambda: personafl.run(FRAME, model="mpl", **NAMED), r"no model 'mpl'; did you mean 'mlp'"),
    "no rounds": (lambda: personafl.run(FRAME, rounds=0, **NAMED), r"rounds: input should be greater"),
    "half a round": (lambda: personafl.run(FRAME, rounds=1.5, **NAMED), r"rounds: .*1\.5"),  # type: ignore[arg-type]
    "no such key": (lambda: personafl.run(FRAME, settings={"training.rl": 1}, **NAMED), r"training\.rl: .*'lr'"),
    "settings as text": (
        lambda: personafl.run(FRAME, settings="lr=1", **NAMED),
        r"settings: give a dict of recipe keys",
    ),  # type: ignore[arg-type]
    "no such partition": (
        lambda: personafl.run((X, Y), partition="dirichle"),
        r"partition 'dirichle' is unknown: did you mean 'dirichlet'",
    ),
    "a recipe's key": (lambda: personafl.run({"methd": "ditto"}), r"methd: .*did you mean 'method'"),
    "a recipe that is not there": (lambda: personafl.run("mine.toml"), r"mine\.toml: no such recipe file"),
    "data twice": (lambda: personafl.run(FRAME, data=FRAME), r"data: are given twice"),
    "a callback that is none": (
        lambda: personafl.run(FRAME, callback=1, **NAMED),
        r"callback: is a int; give a functi",
    ),  # type: ignore[arg-type]
    "a bar that is none": (lambda: personafl.run(FRAME, progress="yes", **NAMED), r"progress = 'yes': give True"),  # type: ignore[arg-type]
    "a path that is none": (lambda: personafl.run(FRAME, out=3, **NAMED), r"out: is a int; give a path"),  # type: ignore[arg-type]
    # comparisons
    "no seeds": (lambda: personafl.compare(FRAME, seeds=0, **NAMED), r"seeds = 0: give how many"),
    "seeds as text": (lambda: personafl.compare(FRAME, seeds="0,1", **NAMED), r"seeds = '0,1': give how many"),  # type: ignore[arg-type]
    "methods of another kind": (lambda: personafl.compare(FRAME, [1], **NAMED), r"methods: give a list of names"),  # type: ignore[list-item]
    "a method among others": (lambda: personafl.compare(FRAME, ["fedavg", "dito"], **NAMED), r"no method 'dito'"),
    "tuned objects": (lambda: personafl.compare(FRAME, tune=3, **NAMED), r"tune: trials run in processes of their own"),
    # directories
    "no run": (lambda: personafl.load("."), r"not a run directory"),
    "nothing to report": (lambda: personafl.write_report(), r"paths: give the directories"),
    "an object in a recipe": (
        lambda: personafl.make_recipe(data=FRAME, **NAMED),
        r"data: a recipe has names and paths",
    ),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", CALLS)
def test_a_wrong_call_is_one_clear_line(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call, message = CALLS[case]
    with pytest.raises(BadInput, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> personafl.Result:
    return personafl.run(FRAME, "fedavg", rounds=1, **NAMED, out=tmp_path_factory.mktemp("run") / "run")


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        pytest.param(lambda run: run.model("c"), r"no client 'c'; valid: a, b", id="no such client"),
        pytest.param(
            lambda run: run.model("a", "personel"), r"kind = 'personel': did you mean 'personal'", id="no kind"
        ),
        pytest.param(lambda run: run.model("a", "personal"), r"fedavg makes no such model", id="no personal model"),
        pytest.param(lambda run: run.model("a", "chosen"), r"no validation data to choose by", id="no choice"),
        pytest.param(lambda run: run.predict("a", X[:, :2]), r"x: samples have shape \[2\]", id="other inputs"),
        pytest.param(lambda run: run.predict("a", X[0]), r"x: x has shape \[3\]", id="no samples"),
        pytest.param(lambda run: run.predict("a", FRAME[["p", "q"]]), "has no column 'r'", id="no such column"),
        pytest.param(lambda run: run.extend(0), r"rounds = 0: give how many more", id="no rounds"),
        pytest.param(lambda run: run.extend(2.5), r"rounds = 2\.5: give how many more", id="half a round"),
    ],
)
def test_a_wrong_question_to_a_result_is_one_clear_line(result: personafl.Result, ask: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        ask(result)
    assert "\n" not in str(caught.value)
