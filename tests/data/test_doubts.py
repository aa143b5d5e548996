"""First contact: data that may mean something else than they are read as, and data in the shapes that people have."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_iris
from torch import nn

import personafl
from personafl.errors import BadInput

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 4))
Y = (X[:, 0] > 0).astype(int)
USER = np.arange(60) % 3
TABLE = pd.DataFrame(X, columns=list("abcd")).assign(y=Y, user=USER)


def notes(data: Any, **more: Any) -> str:
    """Return all that is said of data."""
    return "\n".join(personafl.describe_data(data, **more).notes)


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (np.abs(X * 50).astype(int), "whole numbers in x are read as tokens"),
        (RNG.normal(size=(60, 8, 8)), "8×8 are read as 8 channels at 8 points in time"),
        (RNG.normal(size=(60, 50, 3)), "50×3 are read as 50 channels at 3 points"),
        (RNG.normal(size=(60, 8, 8, 3)), "8×8×3 are read as 8 channels of 8×3"),
    ],
)
def test_a_layout_in_doubt_is_told(x: Any, said: str) -> None:
    """What numpy's users have, images without channels, with them last, time first, is read otherwise: say how."""
    assert said in notes((x, Y), user=USER)


@pytest.mark.parametrize("x", [X, RNG.normal(size=(60, 3, 50)), RNG.normal(size=(60, 3, 8, 8)), X > 0])
def test_what_is_plain_is_not_in_doubt(x: Any) -> None:
    """Tables, series and images as they should be."""
    assert " read as " not in notes((x, Y), user=USER)


def test_whole_numbers_that_may_be_measurements() -> None:
    """Ages are classes where nobody says else; 30 classes from 0, or few with gaps, are no matter of doubt."""
    ages = np.repeat(np.arange(20, 80, 2), 2)
    assert "labels are 30 whole numbers from 20 to 78" in notes((X, ages), user=USER)
    assert "whole numbers" not in notes((X, np.repeat(np.arange(30), 2)), user=USER)
    assert "whole numbers" not in notes((X, 5 * USER + 5), user=USER)
    assert "whole numbers" not in notes((X, ages), user=USER, settings={"data.task": "classification"})


def test_who_the_clients_are_is_told() -> None:
    """Without users samples are dealt; with one alone nothing is shared."""
    assert "nothing says whose samples these are: dealt to 5 clients" not in notes((X, Y), partition="iid:clients=5")
    assert "nothing says whose samples these are: dealt to 50 clients by labels" in notes(
        (np.tile(X, (9, 1)), np.tile(Y, 9))
    )
    assert "there is one client" in notes((X, Y), user=np.zeros(60, dtype=int))
    few = notes({"ann": (X[:1], Y[:1]), "bob": (X[1:], Y[1:])})
    assert "1 client with fewer than 2 samples left out: ann" in few


def test_a_label_that_is_nearly_always_right_is_told() -> None:
    """With 59 of 60 alike accuracy says little."""
    x, y, user = np.tile(X, (10, 1)), (np.arange(600) % 60 == 7).astype(int), np.arange(600) // 120
    assert "98.3% of the training samples are 0" in notes((x, y), user=user)
    assert "of the training samples are" not in notes((X, Y), user=USER)


def test_columns_that_never_change_are_named() -> None:
    """By their names, also where text columns became several features."""
    table = TABLE.assign(country="UK", town=np.where(Y, "Bath", "York"))
    assert "(country = UK) never change" in notes(table, label="y", user="user")


def test_keys_and_copies_of_the_label_are_told() -> None:
    """A number of the client's says who, a copy of the label what is to be found out; a rare value proves nothing."""
    table = pd.concat([TABLE] * 5, ignore_index=True)
    plain = notes(table, label="y", user="user")
    assert "within a client" not in plain
    assert "follows from one feature" not in plain
    table = table.assign(ward=7 * table["user"], code=np.where(table["y"] == 1, 3.5, 2.5))
    said = notes(table, label="y", user="user")
    assert "1 of 6 features (ward) never changes within a client" in said
    assert "the label follows from one feature alone (code)" in said


@pytest.mark.parametrize("kind", [int, float])
def test_one_hot_labels_are_no_tokens(kind: type) -> None:
    """Neither next tokens nor two numbers to predict."""
    with pytest.raises(BadInput, match=r"have one 1 in each row; give the number of the class, y.argmax\(1\)"):
        personafl.describe_data((X, np.eye(2, dtype=kind)[Y]), user=USER)
    sets = personafl.describe_data((X, np.eye(2, dtype=kind)[Y]), user=USER, settings={"data.task": "multilabel"})
    assert sets.data.task == "multilabel"
    with pytest.raises(BadInput, match="whole numbers, which would be next tokens"):
        personafl.describe_data((X, np.stack([Y, 1 - Y, Y], 1) * 3), user=USER)


def test_names_of_two_kinds_are_not_one() -> None:
    """1 and "1" would be joined silently."""
    with pytest.raises(BadInput, match="column 'user': has 1 as text and as int"):
        personafl.describe_data(TABLE.assign(user=["1", 1] * 30), label="y", user="user")
    with pytest.raises(BadInput, match="user: has dtype object with int and str"):
        personafl.describe_data((X, Y), user=np.array(["1", 1] * 30, dtype=object))


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ([f"{row % 9:03d}" for row in range(60)], "has numbers as text, such as '000'"),
        ([0.5] * 30 + ["x"] * 30, "holds float and str"),
        ([1 + 2j] * 60, "holds complex"),
        ([np.inf] * 60, "row 1 has inf"),
    ],
)
def test_a_column_of_an_odd_kind(column: list[Any], said: str) -> None:
    """One line that names it, and no warning of NumPy's beside it."""
    table = TABLE.assign(odd=column)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(BadInput, match=f"column 'odd': {said}"):
            personafl.describe_data(table, label="y", user="user")


def test_a_class_that_is_called_none(tmp_path: Path) -> None:
    """Files have no other word for a gap: the message says which words are."""
    TABLE.assign(y=np.where(Y, "None", "crack")).to_csv(tmp_path / "parts.csv", index=False)
    with pytest.raises(BadInput, match=r"column 'y': .* values are missing .in files also NA, None, null"):
        personafl.describe_data(tmp_path / "parts.csv", label="y", user="user")


def test_categories_that_are_numbers() -> None:
    """A categorical column is names, whatever they look like."""
    shown = personafl.describe_data(TABLE.assign(ward=pd.Categorical(USER)), label="y", user="user")
    assert shown.data.x.shape[1] == 4 + 3


def test_all_columns_that_cannot_be_used_are_named_at_once() -> None:
    """Not one after the other, with a try for each."""
    table = TABLE.assign(id=range(60), when=pd.Timestamp("2024-01-01"), gap=[np.nan] + [1.0] * 59)
    with pytest.raises(BadInput, match=r"'id': counts the rows.*; nor can these columns be used .*: when, gap$"):
        personafl.describe_data(table, label="y", user="user")


def test_a_table_for_each_client() -> None:
    """As one table with a column of users; its models predict from tables without it."""
    parts = {name: TABLE.drop(columns="user").iloc[start : start + 30] for name, start in (("ann", 0), ("bob", 30))}
    shown = personafl.describe_data(parts, label="y")
    whole = TABLE.assign(user=np.repeat(["ann", "bob"], 30))
    assert tuple(shown.data.client_names) == ("ann", "bob")
    assert shown.data.fingerprint == personafl.describe_data(whole, label="y", user="user").data.fingerprint
    with pytest.raises(BadInput, match=r"data\['bob'\]: it and data\['ann'\] do not both have column 'c'"):
        personafl.describe_data(parts | {"bob": parts["bob"].drop(columns="c")}, label="y")
    with pytest.raises(BadInput, match=r"data\['eve'\]: has no rows"):
        personafl.describe_data(parts | {"eve": parts["bob"].iloc[:0]}, label="y")


def test_what_is_nearly_data_is_told_what_to_be() -> None:
    """Bunches of scikit-learn's, rows as dicts, networks that have no shape yet."""
    with pytest.raises(BadInput, match=r"Bunch of scikit-learn's; give its arrays, \(data.data, data.target\)"):
        personafl.describe_data(load_iris())
    with pytest.raises(BadInput, match=r"list of dicts; make a table of it, pandas.DataFrame\(data\)"):
        personafl.describe_data([{"a": 1, "y": 0}, {"a": 2, "y": 1}], label="y")
    with pytest.raises(BadInput, match="model: weight has no shape yet; call the model once"):
        personafl.run((X, Y), user=USER, method="fedavg", model=nn.LazyLinear(2))
