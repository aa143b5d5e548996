"""The table with a line per client that a reader can sort and filter; the page carries it as plain values."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from personafl.report.gains import last_model
from personafl.report.load import Run
from personafl.report.measure import score_word
from personafl.report.table import MODELS

LINES = 6000  # of all runs together
TEXTS = {"method": "method", "name": "client", "clients": "group", "device": "device"}
COUNTS = {"seed": "seed", "server": "server", "train": "train", "test": "test", "sample_epsilon": "sample ε"}


def client_table(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Return columns (key, title, whether they are numbers), lines of values, and how many lines there would be."""
    finished = [run for run in runs if run.result is not None]
    if not finished:
        return None
    models = [m for m in MODELS if any(f"{m}_test_accuracy" in run.result.columns for run in finished if run.result)]
    more = ("device", "server", "sample_epsilon")
    extra = [key for key in more if any(key in run.result.columns for run in finished if run.result)]
    keys = ["method", "name", "seed", *models, "change", "train", "test", "clients", *extra]
    lines = [line for run in finished for line in _lines(run, keys, LINES // len(finished))]
    word = score_word(row for run in finished for row in run.rows)
    return {
        "columns": [{"key": key, "title": (TEXTS | COUNTS).get(key, key), "number": key not in TEXTS} for key in keys],
        "lines": lines,
        "score": word[0].upper() + word[1:],
        "all": sum(len(run.result.columns["client"]) for run in finished if run.result),
    }


def _lines(run: Run, keys: Sequence[str], most: int) -> list[list[Any]]:
    """Return a line per client; of many so many, evenly spaced by the accuracy of their last model."""
    assert run.result is not None
    columns, last = run.result.columns, f"{last_model(run)}_test_accuracy"
    count = len(columns["client"])
    score = [math.inf if value is None else value for value in columns.get(last, [None] * count)]
    order = np.argsort(score, kind="stable")
    shown = sorted(order[np.linspace(0, count - 1, min(max(most, 1), count)).round().astype(int)].tolist())
    return [[_value(run, key, client, last) for key in keys] for client in shown]


def _value(run: Run, key: str, client: int, last: str) -> Any:
    assert run.result is not None
    columns = run.result.columns
    if key == "method":
        return run.label
    if key == "seed":
        return run.seed
    if key == "change":
        pair = [_accuracy(columns, name, client) for name in ("global_test_accuracy", last)]
        return None if None in pair or last == "global_test_accuracy" else round(pair[1] - pair[0], 2)
    if key in MODELS:
        value = _accuracy(columns, f"{key}_test_accuracy", client)
        return None if value is None else round(value, 2)
    return columns[key][client] if key in columns else None


def _accuracy(columns: dict[str, list[Any]], name: str, client: int) -> Any:
    """Return an accuracy in %, or None if the client has none."""
    value = columns[name][client] if name in columns else None
    return None if value is None else 100 * value
