"""Learning curves: accuracy and loss against rounds, seconds, bytes and virtual time, means over seeds."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from markupsafe import Markup

from personafl.report.chart import Chart, Series
from personafl.report.figure import Choice, Figure, View, in_two_widths
from personafl.report.load import Run
from personafl.report.measure import score_word
from personafl.report.table import last_models

AXES = {"round": "round", "seconds": "seconds of training", "bytes": "MB sent, up and down", "time": "virtual time"}
CHOICES = {"round": "per round", "seconds": "per second", "bytes": "per byte sent", "time": "per virtual time"}
MEASURES = {
    "last": "personal model, global where there is none",
    "personal": "personal model",
    "global": "global model",
    "train": "the same on training data",
    "loss": "training loss",
}
POINTS = 100  # of a curve with a point per round
MARKED = 15  # points of a curve that has markers
BANDS = 10  # curves that have a band; those of more would hide the lines

Point = dict[str, float]  # by the names of AXES
Values = Mapping[int, float]  # by round


@dataclass(frozen=True)
class Curve:
    """A mean over seeds: where it is on each axis, its values and their standard deviation."""

    at: list[Point]
    mean: list[float]
    std: list[float]


def curve_figures(runs: Sequence[Run]) -> list[Figure]:
    """Return the figure of the learning curves, if there are any."""
    scored = {entry["model"] for run in runs for entry in run.events("score")}
    shown = scored | {row["model"] for run in runs for row in _last_rows(run)}
    measures: dict[str, Callable[[Run], Values]] = {"last": _last} if len(shown) > 1 else {}
    measures |= {model: partial(_accuracy, model=model) for model in ("personal", "global")}
    measures |= {"train": partial(_last, split="train"), "loss": _loss}
    styles = {label: place for place, label in enumerate(by_label(runs))}
    views: list[View] = []
    word = score_word(row for run in runs for row in run.rows)
    for measure, values in measures.items():
        curves = {
            label: curve
            for label, own in by_label(runs).items()
            for curve in [joined([(run, values(run)) for run in ready(own)])]
            if len(curve.mean) > 1
        }
        y_title = {"loss": "training loss", "train": f"training {word}, %"}.get(measure, f"test {word}, %")
        views += [
            View(chosen={"measure": measure, "axis": axis}, picture=picture)
            for axis, picture in _pictures(curves, y_title, styles)
        ]
    if not views:
        return []
    choices = Choice.of("measure", "show", MEASURES, views), Choice.of("axis", "against", CHOICES, views)
    bands = ", bands ± their standard deviation" if len(styles) <= BANDS else ""
    spread = f" Lines are means over seeds{bands}." if len({run.seed for run in runs}) > 1 else ""
    made = " A personal model that only fine-tuning makes is the last point of its line." if _made_last(runs) else ""
    called = word[0].upper() + word[1:]
    caption = f"{called} is the mean over seen clients on their test data; loss is that of training.{spread}{made}"
    return [Figure(title=f"{called} and loss", caption=caption, views=views, choices=choices)]


def _made_last(runs: Sequence[Run]) -> bool:
    """Say whether a run's last model was not there during training."""
    scored = {run.path: {entry["model"] for entry in run.events("score")} for run in runs}
    return any(scored[run.path] and row["model"] not in scored[run.path] for run in runs for row in _last_rows(run))


def by_label(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs of each method, in the order of the table."""
    return {label: [run for run in runs if run.label == label] for label in dict.fromkeys(run.label for run in runs)}


def ready(runs: Sequence[Run]) -> list[Run]:
    """Return the finished runs of a method; if there are none, those that have begun."""
    return [run for run in runs if run.result is not None] or [run for run in runs if run.begun]


def timelines(run: Run) -> dict[int, Point]:
    """Return by round where a run was when it was done."""
    places: dict[int, Point] = {}
    seconds, sent = 0.0, 0.0
    for entry in run.trained:
        seconds += entry["seconds"]
        sent += (entry["bytes_up"] + entry["bytes_down"]) / 1e6
        time = {"time": entry["time"]} if "time" in entry else {}
        places[entry["number"]] = {"round": entry["number"] + 1.0, "seconds": seconds, "bytes": sent, **time}
    return places


def joined(parts: Sequence[tuple[Run, Values]]) -> Curve:
    """Return the mean over runs of values by round, at the rounds that all of them have."""
    kept = [(timelines(run), values) for run, values in parts if values]
    rounds = sorted(set.intersection(*({n for n in values if n in places} for places, values in kept))) if kept else []
    at = [{axis: statistics.mean(places[n][axis] for places, _ in kept) for axis in kept[0][0][n]} for n in rounds]
    columns = [[values[n] for _, values in kept] for n in rounds]
    spread = [statistics.stdev(column) if len(column) > 1 else 0.0 for column in columns]
    return Curve(at, [statistics.mean(column) for column in columns], spread)


def _accuracy(run: Run, model: str, split: str = "test") -> Values:
    """Return by round the accuracy in % that was scored, and at the end the result's."""
    wanted = {"model": model, "clients": "seen", "split": split}
    found = {e["number"]: 100 * e["accuracy"] for e in run.events("score") if wanted.items() <= e.items()}
    if found:  # a model that there is only at the end, as a tuned one, has no curve
        last = [100 * row["accuracy"] for row in run.rows if wanted.items() <= row.items()]
        found |= {run.rounds - 1: last[0]} if last else {}
    return {number: value for number, value in found.items() if math.isfinite(value)}


def _last(run: Run, split: str = "test") -> Values:
    """Return the accuracy of the model that the table has, as it was during training and in the end.

    During training it is the personal one, or the global one if there is none then; one that fine-tuning makes is the
    last point.
    """
    during = _accuracy(run, "personal", split) or _accuracy(run, "global", split)
    made = [100 * row["accuracy"] for row in _last_rows(run, split)]
    return {**during, run.rounds - 1: made[0]} if during and made else during


def _last_rows(run: Run, split: str = "test") -> list[dict[str, Any]]:
    """Return the row of a finished run's last model on its seen clients."""
    return last_models([row for row in run.rows if row["clients"] == "seen" and row["split"] == split])


def _loss(run: Run) -> Values:
    """Return by round the training loss."""
    return thinned([(entry["number"], entry["loss"]) for entry in run.trained if entry["loss"] is not None])


def thinned(known: Sequence[tuple[int, float]]) -> Values:
    """Return values by round; of many rounds means over as many as make a point, at the last of them."""
    size = max(1, -(-len(known) // POINTS))
    blocks = [known[start : start + size] for start in range(0, len(known), size)]
    return {block[-1][0]: statistics.mean(value for _, value in block) for block in blocks}


def _pictures(curves: Mapping[str, Curve], y_title: str, styles: Mapping[str, int]) -> Iterator[tuple[str, Markup]]:
    for axis, x_title in AXES.items():
        series = [
            Series(
                label=label,
                x=[point[axis] for point in curve.at],
                y=curve.mean,
                error=curve.std if any(curve.std) and len(curves) <= BANDS else None,
                band=True,
                markers=len(curve.mean) <= MARKED,
                style=styles[label],
            )
            for label, curve in curves.items()
            if axis in curve.at[0]
        ]
        if series:
            ends = "; ".join(f"{one.label} ends at {one.y[-1]:.4g}" for one in series)
            chart = Chart(title="", x_title=x_title, y_title=y_title, series=series)
            yield axis, in_two_widths(chart, f"{y_title} against {x_title}: {ends}")


def sketch(runs: Sequence[Run], width: float = 460.0, plot: float = 170.0) -> str:
    """Return one small picture, accuracy against rounds, for a notebook; nothing where there is no curve."""
    curves = {label: joined([(run, _last(run)) for run in ready(own)]) for label, own in by_label(runs).items()}
    series = [
        Series(label=label, x=[point["round"] for point in curve.at], y=curve.mean, error=curve.std, band=True)
        for label, curve in curves.items()
        if len(curve.mean) > 1
    ]
    if not series:
        return ""
    chart = Chart(title="", x_title="round", y_title="test accuracy, %", series=series)
    ends = "; ".join(f"{one.label} ends at {one.y[-1]:.4g}" for one in series)
    return chart.inline(width, plot, f"test accuracy against rounds: {ends}")
