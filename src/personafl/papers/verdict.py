"""Our numbers of a table, and whether a claim holds in them: paired differences over seeds."""

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from scipy import stats

from personafl.papers.catalog import Claim, Measure, Row, Table
from personafl.runs.result import Result
from personafl.storage.rundir import RunDirectory

CONFIDENCE = 0.95  # of the one-sided bound on the mean difference
Runs = Mapping[tuple[str, int], Result]  # (method or variant, seed) -> what it found


@dataclass(frozen=True)
class Outcome:
    """A line of a table: the values by seed, beside the paper's."""

    row: Row
    measure: Measure
    values: Mapping[int, float]  # seed -> value
    grain: float = 0.0  # what one test sample or client is worth; of a time, what lies between two scorings
    at: int | None = None  # after how many rounds; None: at the end

    @property
    def name(self) -> str:
        """The row's name, and the round."""
        return named(self.row.name, self.at)

    def to_json(self) -> dict[str, Any]:
        """Return it for scripts."""
        values = {str(seed): value for seed, value in self.values.items()}
        paper = {"paper": self.row.paper, "paper_std": self.row.std}
        return {"name": self.row.name, "at": self.at, "measure": self.measure, "values": values, **paper}

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
    at: int | None  # after how many rounds; None: at the end
    word: Literal["holds", "does not hold", "not shown"]
    seeds: int
    mean: float | None
    std: float | None
    paper: float | None

    def to_json(self) -> dict[str, Any]:
        """Return it for scripts."""
        numbers = {key: getattr(self, key) for key in ("seeds", "mean", "std", "paper")}
        return {"claim": self.claim.text, "at": self.at, "verdict": self.word, **numbers}

    @property
    def text(self) -> str:
        """The claim, and the round."""
        return named(self.claim.text, self.at)


def named(text: str, at: int | None) -> str:
    """Return a line's name or a claim with the round that it is taken after."""
    return text if at is None else f"{text}, round {at}"


def outcomes(table: Table, runs: Runs) -> list[Outcome]:
    """Return the lines of a table from what is finished, first those on the way; a line without runs has no values.

    Rounds of `table.at` after which no run was scored are left out.
    """
    lines = [_outcome(row, row.measure or table.measure, runs, at) for at in (*table.at, None) for row in table.rows]
    scored = {line.at for line in lines if line.values}
    return [line for line in lines if line.at is None or line.at in scored]


def _outcome(row: Row, measure: Measure, runs: Runs, at: int | None) -> Outcome:
    own = {seed: found for (run, seed), found in sorted(runs.items()) if run == row.run}
    found = {seed: _found(row, measure, run, at) for seed, run in own.items()}
    known = {seed: pair for seed, pair in found.items() if pair is not None}
    grain = max((grain for _, grain in known.values()), default=0.0)
    return Outcome(row, measure, {seed: value for seed, (value, _) in known.items()}, grain, at)


def judge(table: Table, lines: Sequence[Outcome]) -> list[Verdict]:
    """Return a verdict per claim, and per round that the lines have.

    The mean difference over seeds is bounded below and above by Student's t, one-sided at 95 %: a claim holds if the
    lower bound is above −margin, does not hold if the upper one is below, and is not shown if neither is, or by one
    seed alone. The std counts as at least what one test sample is worth (few samples give equal differences by chance),
    and that of a time until some accuracy as at least the std of a moment between the two scorings around it.
    """
    by_name = {(line.row.name, line.at): line for line in lines}
    rounds = dict.fromkeys(line.at for line in lines)
    return [
        _verdict(claim, by_name[claim.more, at], by_name[claim.less, at])
        for claim in table.parsed_claims()
        for at in rounds
    ]


def _verdict(claim: Claim, more: Outcome, less: Outcome) -> Verdict:
    gaps = [more.values[seed] - less.values[seed] for seed in sorted(more.values.keys() & less.values.keys())]
    printed = (more.row.paper, less.row.paper)
    paper = None if None in printed else claim.sign * (printed[0] - printed[1])  # type: ignore[operator]
    if len(gaps) < 2:
        return Verdict(claim, more.at, "not shown", len(gaps), claim.sign * gaps[0] if gaps else None, None, paper)
    mean, std = statistics.fmean(gaps), statistics.stdev(gaps)
    spread = max(std, more.grain, less.grain)
    reach = float(stats.t.ppf(CONFIDENCE, len(gaps) - 1)) * spread / math.sqrt(len(gaps))
    above = mean + claim.margin
    word: Literal["holds", "does not hold", "not shown"] = "not shown"
    if above - reach > 0 or (spread == 0 and above == 0):
        word = "holds"
    elif above + reach < 0:
        word = "does not hold"
    return Verdict(claim, more.at, word, len(gaps), claim.sign * mean, std, paper)


def _grain(measure: Measure, run: Result) -> float:
    """Return in points what one test sample (of the share that is hurt: one client) of the seen clients is worth."""
    whose = zip(run.columns.get("clients", []), run.columns.get("test", []), strict=True)
    tests = [samples for group, samples in whose if group == "seen"]
    if not tests or measure not in ("accuracy", "weighted", "word-errors", "learning", "best", "validated", *_HURT):
        return 0.0
    return 100 / (len(tests) if measure.startswith("hurt") else sum(tests))


def _found(row: Row, measure: Measure, run: Result, at: int | None) -> tuple[float, float] | None:
    """Return the value of a run and its grain."""
    if measure == "time-to":
        return _crossing(_curve(row, run), row.level or 0.0)
    if at is not None:
        value = next((score.accuracy for score in _curve(row, run) if score.rounds == at), None)
    elif measure == "learning":
        value = statistics.fmean(score.accuracy for score in _curve(row, run)) if _curve(row, run) else None
    elif measure in ("best", "validated"):
        value = _best(row, run, "test" if measure == "best" else "validation")
    elif measure == "last-megabytes":
        rounds = [entry for entry in RunDirectory(run.path).metrics() if entry["event"] == "round"]
        value = rounds[-1]["bytes_down"] / 1e6 if rounds else None
    else:
        value = _of_result(row, measure, run)
    return None if value is None else (value, _grain(measure, run))


def _of_result(row: Row, measure: Measure, run: Result) -> float | None:
    split = "train" if measure == "hurt-training" else "test"
    own, other = (_scored(run, model, split) for model in (row.model, row.minus))
    read = _READ[measure.removesuffix("-training")]
    if own is None or read(own) is None or (row.minus is not None and other is None):
        return None
    value = read(own) or 0.0
    return value if other is None else value - (read(other) or 0.0)


_HURT = ("hurt", "hurt-training")
_READ: dict[str, Callable[[Mapping[str, Any]], float | None]] = {
    "accuracy": lambda row: 100 * float(row["accuracy"]),
    "weighted": lambda row: 100 * float(row["accuracy_weighted"]),
    "word-errors": lambda row: 100 * float(row["word_error_weighted"]) if "word_error_weighted" in row else None,
    "hurt": lambda row: None if row["share_hurt"] is None else 100 * float(row["share_hurt"]),
    "parameters": lambda row: float(row["parameters"]) / 1e6,
    "gigabytes": lambda row: float(row["bytes_up"] + row["bytes_down"]) / 1e9,
    "time": lambda row: row.get("time"),
}


def _scored(run: Result, model: str | None, split: str = "test") -> Mapping[str, Any] | None:
    """Return what seen clients have on test or training data with a model."""
    wanted = {"clients": "seen", "split": split, "model": model}
    return next((row for row in run.rows if wanted.items() <= row.items()), None)


class _Score(NamedTuple):
    rounds: int | None  # that were over; None: all
    time: float | None  # virtual; None: the run has none
    accuracy: float  # in %


def _curve(row: Row, run: Result) -> list[_Score]:
    """Return the scores of a row's model during training and at the end."""
    curve = [
        _Score(entry["number"] + 1, entry.get("time"), 100 * entry["accuracy"])
        for entry in RunDirectory(run.path).metrics()
        if entry["event"] == "score" and (entry["model"], entry["split"]) == (row.model, "test")
    ]
    if (last := _scored(run, row.model)) is not None:
        curve.append(_Score(None, last.get("time"), 100 * last["accuracy"]))
    return curve


def _best(row: Row, run: Result, by: str) -> float | None:
    """Return the weighted test accuracy of the scoring that is best on some split; of equal ones the first."""
    curves: dict[str, dict[int, float]] = {"test": {}, "validation": {}}
    scored = (entry for entry in RunDirectory(run.path).metrics() if entry["event"] == "score")
    for entry in scored:
        if entry["model"] == row.model and entry["split"] in curves:
            curves[entry["split"]][entry["number"]] = entry["accuracy_weighted"]
    for split, curve in curves.items():
        if (last := _scored(run, row.model, split)) is not None:
            curve[sys.maxsize] = last["accuracy_weighted"]
    rounds = [number for number in curves["test"] if number in curves[by]]
    return 100 * curves["test"][max(rounds, key=lambda number: curves[by][number])] if rounds else None


def _crossing(curve: Sequence[_Score], level: float) -> tuple[float, float] | None:
    """Return when a curve first reaches a level, and the grain; on straight lines from 0 % at time 0 through scores.

    Between two scorings it may have been at any time: uniformly, so with a std of their distance over √12.
    """
    before, below = 0.0, 0.0
    for _, time, accuracy in curve:
        if time is None:
            return None
        if accuracy >= level:
            share = (level - below) / (accuracy - below) if accuracy > below else 1.0
            return before + share * (time - before), (time - before) / math.sqrt(12)
        before, below = time, accuracy
    return None
