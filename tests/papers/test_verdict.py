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


Scores = list[tuple[int, float, float]]  # rounds that are over, virtual time, accuracy in %


def scored(path: Path, scores: Scores, end: tuple[float, float]) -> Result:
    """Return a run with scores during training, and at the end (time, accuracy)."""
    path.mkdir(exist_ok=True)
    entries: list[dict[str, Any]] = [
        {"event": "score", "number": n - 1, "time": t, "mean": m / 100, "model": "personal", "split": "test"}
        for n, t, m in scores
    ]
    entries += [{"event": "round", "number": n, "bytes_down": b} for n, b in ((0, 9_000_000), (1, 2_000_000))]
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, entries)) + "\n")
    return result(path, end[1], time=end[0])


def test_measures_of_the_curve(tmp_path: Path) -> None:
    runs = {("a", 0): scored(tmp_path, [(1, 10.0, 40.0), (2, 20.0, 80.0)], (30.0, 90.0))}
    made = {
        measure: outcomes(table(measure=measure), runs)[0].values.get(0) for measure in ("learning", "last-megabytes")
    }
    assert made == {"learning": pytest.approx(70.0), "last-megabytes": 2.0}


@pytest.mark.parametrize(
    ("level", "when", "between"),
    [
        (60.0, 15.0, 10.0),  # half of the way from 40 % at 10 to 80 % at 20
        (75.0, 18.75, 10.0),  # 35/40 of it
        (80.0, 20.0, 10.0),
        (83.0, 38.5, 15.0),  # 63/70 of the way from 20 % at 25 to the end, 90 % at 40
        (30.0, 7.5, 10.0),  # above it when first scored: 3/4 of the way from 0 % at 0
    ],
)
def test_a_time_is_taken_between_scorings(level: float, when: float, between: float, tmp_path: Path) -> None:
    """On straight lines; the std counts as that of a uniform moment between the scorings, their distance over √12."""
    runs = {("a", 0): scored(tmp_path, [(1, 10.0, 40.0), (2, 20.0, 80.0), (3, 25.0, 20.0)], (40.0, 90.0))}
    (line, _) = outcomes(table(measure="time-to", level=level), runs)
    assert line.values[0] == pytest.approx(when)
    assert line.grain == pytest.approx(between / 12**0.5)
    assert not outcomes(table(measure="time-to", level=95.0), runs)[0].values


def test_a_run_without_virtual_time_has_no_time(tmp_path: Path) -> None:
    (line, _) = outcomes(table(measure="time-to", level=50.0), {("a", 0): result(tmp_path, 60.0)})
    assert not line.values


@pytest.mark.parametrize(("every", "word"), [(100.0, "not shown"), (20.0, "holds")])
def test_scorings_far_apart_do_not_judge_a_small_gap(every: float, word: str, tmp_path: Path) -> None:
    """A line to 100 % at time 200 for A and 220 for B, so 50 % at 100 and 110: B is 10 later in all seeds.

    Scored every 100, a std of 100/√12 = 28.9 reaches 1.686 · 28.9 = 48.7; every 20 it reaches 9.7.
    """

    def line(name: str, end: float, seed: int) -> Result:
        times = [every * k for k in range(1, 11) if every * k < end]
        scores = [(k + 1, time, 100 * time / end) for k, time in enumerate(times)]
        return scored(tmp_path / f"{name}{seed}", scores, (end, 100.0))

    runs = {(name, seed): line(name, end, seed) for name, end in (("a", 200.0), ("b", 220.0)) for seed in range(3)}
    made = table("A ≤ B", measure="time-to", level=50.0)
    (found,) = judge(made, outcomes(made, runs))
    assert found.mean == pytest.approx(-10)
    assert found.word == word


def test_a_claim_is_judged_after_several_rounds_and_at_the_end(tmp_path: Path) -> None:
    """A is behind after 20 rounds and ahead at the end; after 50 only A was scored, after 70 nobody."""
    runs = {
        ("a", seed): scored(tmp_path / f"a{seed}", [(20, 1.0, 30.0 + seed), (50, 2.0, 60.0)], (3.0, 80.0 + seed))
        for seed in range(3)
    }
    runs |= {
        ("b", seed): scored(tmp_path / f"b{seed}", [(20, 1.0, 40.0 + seed)], (3.0, 70.0 + seed)) for seed in range(3)
    }
    made = table("A ≥ B").model_copy(update={"at": (20, 50, 70)})
    lines = outcomes(made, runs)
    assert [line.name for line in lines] == ["A, round 20", "B, round 20", "A, round 50", "B, round 50", "A", "B"]
    assert [line.mean for line in lines if line.values] == pytest.approx([31.0, 41.0, 60.0, 81.0, 71.0])
    found = judge(made, lines)
    assert [(one.text, one.word, one.mean) for one in found] == [
        ("A ≥ B, round 20", "does not hold", pytest.approx(-10)),
        ("A ≥ B, round 50", "not shown", None),
        ("A ≥ B", "holds", pytest.approx(10)),
    ]


def test_the_share_that_is_hurt_on_training_data(tmp_path: Path) -> None:
    """A quarter of the clients is hurt on test data, none on training data; without such scores there is no line."""
    made = table("A ≤ B")
    rows = (made.rows[0].model_copy(update={"measure": "hurt-training"}), made.rows[1])
    made = made.model_copy(update={"rows": rows, "measure": "hurt"})
    runs = {(run, seed): result(tmp_path, 50.0, share_hurt=0.25) for run in "ab" for seed in (0, 1)}
    assert [line.values for line in outcomes(made, runs)] == [{}, {0: 25.0, 1: 25.0}]
    for found in runs.values():
        found.rows.append({**found.rows[0], "split": "train", "share_hurt": 0.0})
    lines = outcomes(made, runs)
    assert [line.values for line in lines] == [{0: 0.0, 1: 0.0}, {0: 25.0, 1: 25.0}]
    assert judge(made, lines)[0].word == "holds"


def test_the_best_round_on_test_data_and_the_one_that_validation_data_choose(tmp_path: Path) -> None:
    """Test 50, 80, 70 and 60 at the end; validation 40, 55, 75 and 75: of equal ones the first, which has 70."""
    curves = {"test": (50, 80, 70), "validation": (40, 55, 75)}
    entries = [
        {"event": "score", "number": number, "model": "personal", "split": split, "accuracy_weighted": value / 100}
        for split, values in curves.items()
        for number, value in enumerate(values)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    last = [
        {"model": "personal", "clients": "seen", "split": split, "accuracy_weighted": value}
        for split, value in (("test", 0.6), ("validation", 0.75))
    ]
    runs = {("a", 0): Result(tmp_path, last, {}, 0.0)}
    made = {name: outcomes(table(measure=name), runs)[0].values.get(0) for name in ("best", "validated")}
    assert made == {"best": pytest.approx(80.0), "validated": pytest.approx(70.0)}
