"""Tables: what becomes of each kind of column, and every way in which they can be wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from personafl.core.reading import Reading
from personafl.data.sources import load_dataset
from personafl.errors import BadInput

ROWS = """age,fit,town,person,y
31,True,York,ann,sick
40,False,Bath,ann,well
55,True,York,bob,well
62,True,Bath,bob,sick
"""


def write(path: Path, text: str = ROWS) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("suffix", ["csv", "tsv", "csv.gz", "parquet", "semicolons.csv"])
def test_columns_become_features(tmp_path: Path, suffix: str) -> None:
    """Numbers as they are, true and false as 1 and 0, text as one column per value in their order: Bath, York."""
    path = tmp_path / f"people.{suffix}"
    frame = pd.read_csv(write(tmp_path / "first.csv"))
    if suffix == "parquet":
        pytest.importorskip("pyarrow", reason="the parquet extra is not installed")
        frame.to_parquet(path)
    else:
        frame.to_csv(path, sep={"tsv": "\t", "semicolons.csv": ";"}.get(suffix, ","), index=False)
    data = load_dataset(str(path), Reading(user="person"))
    assert data.name == "people"
    assert data.x.tolist() == [[31, 1, 0, 1], [40, 0, 1, 0], [55, 1, 0, 1], [62, 1, 1, 0]]
    assert data.x.dtype == torch.float32
    assert data.label_names == ("sick", "well")
    assert data.y.tolist() == [0, 1, 1, 0]
    assert data.user_names == ("ann", "bob")
    assert data.reading.features == ("age", "fit", "town")
    assert data.reading.categories == {"town": ("Bath", "York")}
    assert data.reading.classes == ("sick", "well")


def test_another_file_is_read_alike(tmp_path: Path) -> None:
    """Other order, no labels, a value that nobody had: what the first file taught is what the columns mean."""
    first = load_dataset(write(tmp_path / "a.csv"), Reading(user="person"))
    other = write(tmp_path / "b.csv", "town,extra,age,fit\nRome,1,20,False\nBath,2,,True\n")
    reading = first.reading.model_copy(update={"who": "predict", "missing": {"age": 50.0}})
    data = load_dataset(other, reading)
    assert data.x.tolist() == [[20, 0, 0, 0], [50, 1, 1, 0]]
    assert data.y.tolist() == [-1, -1]
    one = write(tmp_path / "c.csv", "fit,town,y,age\nTrue,York,well,9\n")
    device = load_dataset(one, first.reading.model_copy(update={"who": "device"}))
    assert device.x.tolist() == [[9, 1, 0, 1]]
    assert device.y.tolist() == [1]


def test_gaps_are_filled_by_the_mean_of_training_rows(tmp_path: Path) -> None:
    """Training rows have 1 and 3, so the gap is 2; a row without a town is in none."""
    path = write(tmp_path / "a.csv", "a,town,half,y\n1,x,train,0\n,,train,1\n3,x,train,0\n9,z,test,1\n?,z,test,0\n")
    data = load_dataset(path, Reading(split="half", missing="mean"))
    assert data.x.tolist() == [[1, 1, 0], [2, 0, 0], [3, 1, 0], [9, 0, 1], [2, 0, 1]]
    assert data.reading.missing == {"a": 2.0}
    assert data.split is not None
    assert data.split.tolist() == [0, 0, 0, 1, 1]
    again = load_dataset(path, data.reading)
    assert torch.equal(again.x, data.x)


def test_decimal_commas_between_semicolons(tmp_path: Path) -> None:
    data = load_dataset(write(tmp_path / "a.csv", "a;b;y\n1,5;2;no\n2,25;3;yes\n"))
    assert data.x.tolist() == [[1.5, 2], [2.25, 3]]


def test_one_column_of_text_is_words(tmp_path: Path) -> None:
    lines = "".join(f'"a film, the {n}th of its kind",{"good" if n % 3 else "bad"}\n' for n in range(60))
    data = load_dataset(write(tmp_path / "a.csv", "review,verdict\n" + lines), Reading(label="verdict", length=4))
    assert data.vocabulary == 10_000
    assert data.x.shape == (60, 4)
    assert data.label_names == ("bad", "good")


def test_halves_in_two_files(tmp_path: Path) -> None:
    write(tmp_path / "train.csv", "a,y\n1,no\n2,yes\n")
    write(tmp_path / "test.csv", "a,y\n3,no\n")
    data = load_dataset(str(tmp_path))
    assert data.split is not None
    assert data.split.tolist() == [0, 0, 1]
    write(tmp_path / "test.csv", "b,y\n3,no\n")
    with pytest.raises(BadInput, match=r"test\.csv: train\.csv and test\.csv do not both have column 'a'"):
        load_dataset(str(tmp_path))


@pytest.mark.parametrize(
    ("labels", "names", "classes"),
    [
        ([5, 7, 9, 5], ("5", "7", "9"), [0, 1, 2, 0]),
        ([0.0, 1.0, 2.0, 0.0], ("0", "1", "2"), [0, 1, 2, 0]),
        ([-1, 1, 1, -1], ("-1", "1"), [0, 1, 1, 0]),
        ([True, False, True, True], ("False", "True"), [1, 0, 1, 1]),
        (["b", "a ", "b", "a"], ("a", "b"), [1, 0, 1, 0]),
        (["10", "9", "9", "-2"], ("-2", "9", "10"), [2, 1, 1, 0]),
        ([b"b", b"a", b"b", b"a"], ("a", "b"), [1, 0, 1, 0]),
        ([0, 1, 0, 10**9], ("0", "1", "1000000000"), [0, 1, 0, 2]),
        ([0, 1, 2, 0], ("0", "1", "2"), [0, 1, 2, 0]),
    ],
)
def test_labels_of_any_kind_are_named_classes(
    tmp_path: Path, labels: list[Any], names: tuple[str, ...], classes: list[int]
) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 2)), y=np.array(labels))
    data = load_dataset(str(tmp_path / "a.npz"))
    assert data.label_names == names
    assert data.y.tolist() == classes
    assert data.reading.classes == (None if names == ("0", "1", "2") else names)


def test_classes_by_the_recipe_are_the_same_on_every_device(tmp_path: Path) -> None:
    reading = Reading(classes=("cat", "dog", "owl"), who="device")
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 2)), y=np.array(["owl", "cat"]))
    np.savez(tmp_path / "b.npz", x=np.zeros((2, 2)), y=np.array([1, 1]), class_name=np.array(["cat", "owl"]))
    assert load_dataset(str(tmp_path / "a.npz"), reading).y.tolist() == [2, 0]
    assert load_dataset(str(tmp_path / "b.npz"), reading).y.tolist() == [2, 2]
    with pytest.raises(BadInput, match=r"label 'owl' is none of data\.classes, cat, dog; add it there"):
        load_dataset(str(tmp_path / "a.npz"), Reading(classes=("cat", "dog")))
    with pytest.raises(BadInput, match=r"labels are names such as 'owl'.*add data\.classes"):
        load_dataset(str(tmp_path / "a.npz"), Reading(who="device"))
    np.savez(tmp_path / "c.npz", x=np.zeros((2, 2)), y=np.array([1, 3]))
    assert load_dataset(str(tmp_path / "c.npz"), Reading(who="device")).y.tolist() == [1, 3]


def test_arrays_by_the_names_that_the_recipe_gives(tmp_path: Path) -> None:
    arrays = {
        "y": [0, 1, 2, 0],
        "class_name": ["cat", "dog", "car"],
        "coarse": [0, 0, 1, 0],
        "who": ["a", "b", "a", "b"],
    }
    path = tmp_path / "a.npz"
    np.savez(
        path,
        x=np.zeros((4, 2)),
        coarse_name=np.array(["animal", "thing"]),
        **{k: np.array(v) for k, v in arrays.items()},
    )
    data = load_dataset(str(path), Reading(label="coarse", user="who"))
    assert data.y.tolist() == [0, 0, 1, 0]
    assert data.label_names == ("animal", "thing")
    assert data.user_names == ("a", "b")
    assert load_dataset(str(path), Reading(label="y")).label_names == ("cat", "dog", "car")
    with pytest.raises(BadInput, match=r"a\.npz: data\.label = 'course' is no array; did you mean 'coarse"):
        load_dataset(str(path), Reading(label="course"))


@pytest.mark.parametrize(
    ("source", "keys", "message"),
    [
        (
            "digits",
            {"label": "y"},
            r"digits: data\.label is for tables and arrays with names, and says nothing of these",
        ),
        ("digits", {"size": 16}, r"digits: data\.size is for images in a folder"),
        ("people.csv", {"size": 16}, r"people\.csv: data\.size is for images in a folder"),
    ],
)
def test_keys_that_say_nothing_are_refused(tmp_path: Path, source: str, keys: dict[str, Any], message: str) -> None:
    path = write(tmp_path / source) if source.endswith("csv") else source
    with pytest.raises(BadInput, match=message):
        load_dataset(path, Reading(**keys))


def test_counts_of_sensors_are_no_tokens(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.full((4, 6, 50), -300, np.int16), y=np.arange(4) % 2)
    data = load_dataset(str(tmp_path / "a.npz"))
    assert data.x.dtype == torch.float32
    assert data.vocabulary is None


NAMES = "".join(f"n{n},{n % 7},{n % 2}\n" for n in range(60))


@pytest.mark.parametrize(
    ("text", "keys", "message"),
    [
        ("", {}, "is empty; check"),
        ("a,y\n", {}, "holds no rows; check"),
        (ROWS, {"label": "Y"}, r"data\.label = 'Y' is no column; valid: age, fit, person, town, y"),
        (ROWS, {"user": "persons"}, r"data\.user = 'persons' is no column; did you mean 'person'\?"),
        (ROWS, {"split": "half"}, r"data\.split = 'half' is no column"),
        (ROWS, {"features": ("ages",)}, r"data\.features has 'ages', which is no column; did you mean 'age'\?"),
        (ROWS, {"drop": ("ages",)}, r"data\.drop has 'ages', which is no column"),
        (ROWS, {"features": ("age", "y")}, r"data\.features has 'y', which is the label, user or split; take it out"),
        (ROWS, {"split": "town"}, "column 'town': has 'York'; mark each row with train or test, or with 0 or 1"),
        (ROWS, {"categories": {"town": ("York",)}}, r"column 'town': 'Bath' is none of data\.categories\.town, York"),
        (ROWS, {"classes": ("well", "ill")}, r"column 'y': label 'sick' is none of data\.classes, well, ill; add it"),
        (ROWS, {"label": "age", "drop": ("y",)}, None),
        (ROWS, {"who": "device"}, r'which columns are inputs.*add data\.features = \["age", "fit", "town", "person"\]'),
        (ROWS, {"who": "device", "features": ("town", "age")}, r"column 'town': has text.*data\.categories\.town = "),
        ("a,b\n1,2\n", {}, r"has columns a, b; say which to predict with data\.label"),
        ("y\n0\n1\n", {}, "has no column besides label, user and split"),
        ("1.5,2.5,3.5\n1,2,3\n", {"label": "y"}, "its first line has numbers; put the columns' names there"),
        ("a,y\n1,0,5\n2,1,5\n", {}, "its lines have more fields than the first line has names"),
        ("a,y\n1,0\n2,1,5,6\n", {}, r"cannot be read as UTF-8 CSV \(.*line 3"),
        (
            "name,a,y\n" + NAMES,
            {},
            r'column \'name\': has 60 different texts in 60 rows.*data\.drop = \["name"\], or',
        ),
        ("a,y\n1,0\n,1\n,0\n", {}, r'column \'a\': 2 of 3 values are missing; fill them with data\.missing = "mean"'),
        ("a,b,y\n1,x,0\n2,,1\n3,x,0\n", {}, r"column 'b': 1 of 3 values are missing; leave such rows"),
        ("a,b,y\n1,,0\n2,,1\n", {"missing": "mean"}, "column 'b': all values are missing; leave"),
        ("a,y\n1,0\n,1\n", {"missing": {}}, r"column 'a': 1 of 2 values are missing; add it to data\.missing"),
        ("a,y\n1,0\n,1\n", {"who": "device", "features": ("a",), "missing": "mean"}, r"data\.missing = \{a = 0\}"),
        ("a,y\n1,0\n2,\n", {}, "column 'y': 1 of 2 values are missing .*; remove these rows or fill them in"),
        ("a,user,y\n1,u,0\n2,,1\n", {}, "column 'user': 1 of 2 values are missing"),
        ("a,y\n1,0\ninf,1\n", {}, "column 'a': row 2 has inf, which no model can learn from; correct it, or leave"),
        ("a,y\n1e300,0\n2,1\n", {}, r"column 'a': row 1 has 1e\+300"),
        ("a,y\n1,0\n2,1\nx,0\n4,1\n5,0\n", {}, "column 'a': has numbers but for 1 values, such as 'x' in row 3"),
        ("a,y\n1,0.5\n2,1.25\n", {"task": "classification"}, "column 'y': labels are measurements such as 0.5"),
        ("a,y\n1,x\n2,z\n", {"task": "regression"}, "column 'y': labels of dtype <U1.*'regression' takes numbers"),
        ("a,y\n1,0\n2,2\n", {"task": "multilabel"}, "column 'y': sample 1 has .* for label 0; each label is 0"),
        ("a,y,z\n1,0,1\n2,1,u\n", {"label": ("y", "z")}, "column 'z' has text, and several labels are numbers"),
        ("a,y,z\n1,0,1\n2,1,1\n", {"label": ("y", "q")}, "data.label has 'q', which is no column"),
        ("a,y,z\n1,0,0\n2,0,0\n", {"label": ("y", "z")}, "'y', 'z': no sample has any label"),
        ("a,y\n1,0\n2,0\n", {}, "column 'y': every label is '0', so that there is nothing to learn"),
        (
            "i,y\n" + "".join(f"{n},{n % 2}\n" for n in range(30)),
            {},
            "column 'i': counts the rows.*or list",
        ),
    ],
)
def test_bad_tables(tmp_path: Path, text: str, keys: dict[str, Any], message: str | None) -> None:
    path = write(tmp_path / "bad.csv", text)
    if message is None:
        assert load_dataset(path, Reading(**keys)).label_names == ("31", "40", "55", "62")
        return
    with pytest.raises(BadInput, match=message) as caught:
        load_dataset(path, Reading(**keys))
    assert "bad.csv" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_parquet_of_dates_lists_and_gaps(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="the parquet extra is not installed")
    y = [0, 1, 0]
    for column, message in [
        (pd.date_range("2024-01-01", periods=3), r"column \'a\': holds dates; leave the column out with data\.drop"),
        ([[1, 2], [3, 4], [5, 6]], "column 'a': holds ndarray, and numbers or text are read"),
        (pd.array([1, None, 3], dtype="Int64"), "column 'a': 1 of 3 values are missing"),
        (pd.array([True, None, False], dtype="boolean"), "column 'a': 1 of 3 values are missing"),
    ]:
        pd.DataFrame({"a": column, "y": y}).to_parquet(tmp_path / "a.parquet")
        with pytest.raises(BadInput, match=message):
            load_dataset(str(tmp_path / "a.parquet"))
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(BadInput, match=r"a\.parquet: cannot be read as Parquet"):
        load_dataset(str(tmp_path / "a.parquet"))
