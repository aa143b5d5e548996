"""Learning curves: accuracy and loss against rounds, seconds, bytes and virtual time, means over seeds."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from markupsafe import Markup

from personafl.report.chart import Chart, Series
from personafl.report.figure import Choice, Figure, View, in_two_widths
from personafl.report.load import Run

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
    measures: dict[str, Callable[[Run], Values]] = {"last": _last} if {"global", "personal"} <= scored else {}
    measures |= {model: partial(_accuracy, model=model) for model in ("personal", "global")}
    measures |= {"train": partial(_last, split="train"), "loss": _loss}
    styles = {label: place for place, label in enumerate(by_label(runs))}
    views: list[View] = []
    for measure, values in measures.items():
        curves = {
            label: curve
            for label, own in by_label(runs).items()
            for curve in [joined([(run, values(run)) for run in ready(own)])]
            if len(curve.mean) > 1
        }
        y_title = {"loss": "training loss", "train": "training accuracy, %"}.get(measure, "test accuracy, %")
        views += [
            View(chosen={"measure": measure, "axis": axis}, picture=picture)
            for axis, picture in _pictures(curves, y_title, styles)
        ]
    if not views:
        return []
    choices = Choice.of("measure", "show", MEASURES, views), Choice.of("axis", "against", CHOICES, views)
    several = len({run.seed for run in runs}) > 1
    spread = " Lines are means over seeds, bands ± their standard deviation." if several else ""
    caption = f"Accuracy is the mean over seen clients on their test data; loss is that of training.{spread}"
    return [Figure(title="Accuracy and loss", caption=caption, views=views, choices=choices)]


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
    """Return the accuracy of the personal model during training, or of the global one if there is none."""
    return _accuracy(run, "personal", split) or _accuracy(run, "global", split)


def _loss(run: Run) -> Values:
    """Return by round the training loss; of many rounds means over as many as make a point, at the last of them."""
    known = [(e["number"], e["loss"]) for e in run.trained if e["loss"] is not None]
    size = -(-len(known) // POINTS)
    blocks = [known[start : start + size] for start in range(0, len(known), size)] if known else []
    return {block[-1][0]: statistics.mean(loss for _, loss in block) for block in blocks}


def _pictures(curves: Mapping[str, Curve], y_title: str, styles: Mapping[str, int]) -> Iterator[tuple[str, Markup]]:
    for axis, x_title in AXES.items():
        series = [
            Series(
                label=label,
                x=[point[axis] for point in curve.at],
                y=curve.mean,
                error=curve.std if any(curve.std) else None,
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
