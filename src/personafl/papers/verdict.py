"""Our numbers of a table, and whether a claim holds in them: paired differences over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from scipy import stats

from personafl.papers.catalog import Claim, Measure, Row, Table
from personafl.runs.result import Result
from personafl.runs.rundir import RunDirectory

__all__ = ["CONFIDENCE", "Outcome", "Verdict", "judge", "outcomes"]

CONFIDENCE = 0.95  # of the one-sided bound on the mean difference
Runs = Mapping[tuple[str, int], Result]  # (method or variant, seed) -> what it found


@dataclass(frozen=True)
class Outcome:
    """A line of a table: the values by seed, beside the paper's."""

    row: Row
    measure: Measure
    values: Mapping[int, float]  # seed -> value
    grain: float = 0.0  # what one test sample, or one client, is worth

    @property
    def mean(self) -> float:
        """Over seeds; NaN without any."""
        return statistics.fmean(self.values.values()) if self.values else math.nan

    @property
    def std(self) -> float | None:
        """Over seeds; None with fewer than two."""
        return statistics.stdev(self.values.values()) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Verdict:
    """Whether a claim holds: `word`; the mean and std over seeds of the first line less the second; the paper's."""

    claim: Claim
    word: Literal["holds", "does not hold", "not shown"]
    seeds: int
    mean: float | None
    std: float | None
    paper: float | None


def outcomes(table: Table, runs: Runs) -> list[Outcome]:
    """Return the lines of a table from what is finished; a line without runs has no values."""
    lines = []
    for row in table.rows:
        measure = row.measure or table.measure
        values = {seed: _value(row, measure, found) for (run, seed), found in runs.items() if run == row.run}
        known = {seed: value for seed, value in sorted(values.items()) if value is not None}
        grain = max((_grain(measure, found) for (run, _), found in runs.items() if run == row.run), default=0.0)
        lines.append(Outcome(row, measure, known, grain))
    return lines


def judge(table: Table, lines: Sequence[Outcome]) -> list[Verdict]:
    """Return a verdict per claim.

    The mean difference over seeds is bounded below and above by Student's t, one-sided at 95 %: a claim holds if the
    lower bound is above −margin, does not hold if the upper one is below, and is not shown if neither is, or by one
    seed alone. The std counts as at least what one test sample is worth: few samples give equal differences by chance.
    """
    by_name = {line.row.name: line for line in lines}
    return [_verdict(claim, by_name[claim.more], by_name[claim.less]) for claim in table.parsed_claims()]


def _verdict(claim: Claim, more: Outcome, less: Outcome) -> Verdict:
    gaps = [more.values[seed] - less.values[seed] for seed in sorted(more.values.keys() & less.values.keys())]
    printed = (more.row.paper, less.row.paper)
    paper = None if None in printed else claim.sign * (printed[0] - printed[1])  # type: ignore[operator]
    if len(gaps) < 2:
        return Verdict(claim, "not shown", len(gaps), claim.sign * gaps[0] if gaps else None, None, paper)
    mean, std = statistics.fmean(gaps), statistics.stdev(gaps)
    spread = max(std, more.grain, less.grain)
    reach = float(stats.t.ppf(CONFIDENCE, len(gaps) - 1)) * spread / math.sqrt(len(gaps))
    above = mean + claim.margin
    word: Literal["holds", "does not hold", "not shown"] = "not shown"
    if above - reach > 0 or (spread == 0 and above == 0):
        word = "holds"
    elif above + reach < 0:
        word = "does not hold"
    return Verdict(claim, word, len(gaps), claim.sign * mean, std, paper)


def _grain(measure: Measure, run: Result) -> float:
    """Return in points what one test sample (of the share that is hurt: one client) of the seen clients is worth."""
    whose = zip(run.columns.get("clients", []), run.columns.get("test", []), strict=True)
    tests = [samples for group, samples in whose if group == "seen"]
    if not tests or measure not in ("accuracy", "weighted", "learning", "hurt"):
        return 0.0
    return 100 / (len(tests) if measure == "hurt" else sum(tests))


def _value(row: Row, measure: Measure, run: Result) -> float | None:
    if measure in ("learning", "time-to"):
        return _of_curve(row, measure, run)
    if measure == "last-megabytes":
        rounds = [entry for entry in RunDirectory(run.path).metrics() if entry["event"] == "round"]
        return rounds[-1]["bytes_down"] / 1e6 if rounds else None
    own, other = (_scored(run, model) for model in (row.model, row.minus))
    read = _READ[measure]
    if own is None or read(own) is None or (row.minus is not None and other is None):
        return None
    value = read(own) or 0.0
    return value if other is None else value - (read(other) or 0.0)


_READ: dict[str, Callable[[Mapping[str, Any]], float | None]] = {
    "accuracy": lambda row: 100 * float(row["accuracy"]),
    "weighted": lambda row: 100 * float(row["accuracy_weighted"]),
    "hurt": lambda row: None if row["share_hurt"] is None else 100 * float(row["share_hurt"]),
    "parameters": lambda row: float(row["parameters"]) / 1e6,
    "gigabytes": lambda row: float(row["bytes_up"] + row["bytes_down"]) / 1e9,
    "time": lambda row: row.get("time"),
}


def _scored(run: Result, model: str | None) -> Mapping[str, Any] | None:
    """Return what seen clients have on test data with a model."""
    rows = (row for row in run.rows if row["clients"] == "seen" and row["split"] == "test" and row["model"] == model)
    return next(rows, None)


def _of_curve(row: Row, measure: Measure, run: Result) -> float | None:
    """Return a number of the scores during training and at the end."""
    curve = [
        (entry.get("time", entry["number"]), 100 * entry["mean"])
        for entry in RunDirectory(run.path).metrics()
        if entry["event"] == "score" and (entry["model"], entry["split"]) == (row.model, "test")
    ]
    if (last := _scored(run, row.model)) is not None:
        curve.append((last.get("time", math.inf), 100 * last["accuracy"]))
    if measure == "learning":
        return statistics.fmean(value for _, value in curve) if curve else None
    return next((when for when, value in curve if value >= (row.level or 0)), None)
