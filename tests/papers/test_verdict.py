"""Verdicts: paired differences over seeds against Student's bound, worked by hand."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from personafl.papers.catalog import Row, Table
from personafl.papers.verdict import judge, outcomes
from personafl.runs.result import Result


def result(path: Path, accuracy: float, **more: Any) -> Result:
    row = {"model": "personal", "clients": "seen", "split": "test", "accuracy": accuracy / 100, **more}
    return Result(path, [row, {**row, "model": "global", "accuracy": 0.0}], {}, 0.0)


def table(*claims: str, **row: Any) -> Table:
    rows = [
        Row(name=name, of=f"{name.lower()}.personal", paper=paper, **row) for name, paper in (("A", 90.0), ("B", 88.5))
    ]
    return Table(title="t", where="w", setting="s", rows=tuple(rows), claims=claims)


def verdict(a: list[float], b: list[float], claim: str, tmp_path: Path) -> Any:
    runs = {("a", seed): result(tmp_path, value) for seed, value in enumerate(a)}
    runs |= {("b", seed): result(tmp_path, value) for seed, value in enumerate(b)}
    made = table(claim)
    (found,) = judge(made, outcomes(made, runs))
    return found


@pytest.mark.parametrize(
    ("a", "claim", "word"),
    [
        # Differences 1, 2, 3: mean 2, std 1, and t(0.95; 2)/√3 = 2.920/1.732 = 1.686: bounds 0.314 and 3.686.
        ([51, 52, 53], "A ≥ B", "holds"),
        ([51, 52, 53], "A ≤ B", "does not hold"),
        # 0.5, 1.5, 2.5: the lower bound is −0.186.
        ([50.5, 51.5, 52.5], "A ≥ B", "not shown"),
        ([50.5, 51.5, 52.5], "A ≥ B − 0.2", "holds"),
        ([50.5, 51.5, 52.5], "A ≥ B − 0.1", "not shown"),
        ([50, 50, 50], "A ≥ B", "holds"),
        ([50, 50, 50], "A ≤ B", "holds"),
    ],
)
def test_verdicts_by_hand(a: list[float], claim: str, word: str, tmp_path: Path) -> None:
    assert verdict(a, [50.0, 50.0, 50.0], claim, tmp_path).word == word


def test_differences_are_paired_and_those_of_the_text_order(tmp_path: Path) -> None:
    # Apart the two overlap (std 10); in pairs A is ahead by 1 every time.
    found = verdict([41, 51, 61], [40, 50, 60], "B ≤ A", tmp_path)
    assert found.word == "holds"
    assert found.mean == pytest.approx(-1)
    assert found.std == pytest.approx(0, abs=1e-9)
    assert found.paper == pytest.approx(-1.5)


def test_one_seed_shows_nothing_and_seeds_without_a_pair_do_not_count(tmp_path: Path) -> None:
    assert verdict([60], [50], "A ≥ B", tmp_path).word == "not shown"
    found = verdict([60, 61, 62], [50], "A ≥ B", tmp_path)
    assert (found.word, found.seeds) == ("not shown", 1)
    assert verdict([60], [], "A ≥ B", tmp_path).mean is None


def test_a_difference_of_one_test_sample_shows_nothing(tmp_path: Path) -> None:
    """500 test samples: one is 0.2 points, and 0.2 · 2.920/√3 = 0.337 is what equal differences must exceed."""
    made = table("A ≥ B")
    for gap, word in ((0.2, "not shown"), (0.4, "holds")):
        columns = {"clients": ["seen", "seen", "unseen"], "test": [300, 200, 10_000]}
        runs = {
            (name, seed): dataclasses.replace(result(tmp_path, value), columns=columns)
            for name, value in (("a", 90 + gap), ("b", 90.0))
            for seed in range(3)
        }
        (found,) = judge(made, outcomes(made, runs))
        assert found.word == word


def test_a_model_less_another(tmp_path: Path) -> None:
    runs = {("a", 0): result(tmp_path, 70.0)}
    (line, _) = outcomes(table("A ≥ B", minus="global"), runs)
    assert line.values[0] == pytest.approx(70.0)
    (line, _) = outcomes(table("A ≥ B", minus="tuned"), runs)
    assert not line.values


def test_measures_of_the_curve(tmp_path: Path) -> None:
    entries: list[dict[str, Any]] = [
        {"event": "score", "number": n, "time": t, "mean": m, "model": "personal", "split": "test"}
        for n, t, m in ((0, 10.0, 0.4), (1, 20.0, 0.8))
    ]
    entries += [{"event": "round", "number": n, "bytes_down": b} for n, b in ((0, 9_000_000), (1, 2_000_000))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, entries)) + "\n")
    runs = {("a", 0): result(tmp_path, 90.0, time=30.0)}
    made = {
        measure: outcomes(table(measure=measure, level=level), runs)[0].values.get(0)
        for measure, level in (("learning", None), ("time-to", 75.0), ("last-megabytes", None))
    }
    assert made == {"learning": pytest.approx(70.0), "time-to": 20.0, "last-megabytes": 2.0}
    assert outcomes(table(measure="time-to", level=85.0), runs)[0].values[0] == 30.0
    assert not outcomes(table(measure="time-to", level=95.0), runs)[0].values
