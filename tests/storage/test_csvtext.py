"""Cells of a table that came from elsewhere are no formulas; numbers are numbers."""

import csv
import io
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from personafl.models.predicting import Predictions
from personafl.runs.result import Result
from personafl.storage.csvtext import cell, csv_text

FORMULAS = ['=HYPERLINK("http://x","y")', "+1+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1"]


@pytest.mark.parametrize("text", FORMULAS)
def test_a_text_that_begins_like_a_formula_is_marked(text: str) -> None:
    (row,) = csv.reader(io.StringIO(csv_text([[text, 1]]), newline=""))
    assert row == [f"'{text}".replace("\r", "\\r"), "1"]


def test_no_text_begins_a_line_of_its_own() -> None:
    rows = list(csv.reader(io.StringIO(csv_text([["a\r=1", 1], ["b\n=1", 2]]), newline="")))
    assert rows == [["a\\r=1", "1"], ["b\n=1", "2"]]


@pytest.mark.parametrize("value", [-1, -0.5, float("-inf"), "-1", "-1e-5", "+2", "x=1", "a-b", "", "1", None, True])
def test_numbers_and_other_texts_stay(value: Any) -> None:
    assert cell(value) is value


def test_so_are_names_in_the_tables_that_are_written(tmp_path: Path) -> None:
    outputs = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    found = Predictions(outputs, ("=1+1", "-1"), "classification").to_csv(probabilities=True)
    rows = list(csv.reader(io.StringIO(found)))
    assert rows[0] == ["sample", "prediction", "probability =1+1", "probability -1"]
    assert [row[1] for row in rows[1:]] == ["'=1+1", "-1"]
    numbers = Predictions(torch.tensor([[-1.5]]), ("=x",), "regression").to_csv()
    assert numbers == "sample,'=x\n0,-1.5\n"
    columns = {"client": [0, 1], "name": ["@who", "plain"], "gain": [-0.25, 0.5]}
    result = Result(tmp_path, [], columns, 0.0)
    table = pd.read_csv(io.StringIO(result.clients_csv()))
    assert table["name"].tolist() == ["'@who", "plain"]
    assert table["gain"].tolist() == [-0.25, 0.5]
