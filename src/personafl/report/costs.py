"""What accuracy costs: size on the device, bytes sent, seconds, virtual time."""

import statistics
from collections.abc import Sequence

from personafl.report.chart import Chart, Series
from personafl.report.curves import by_label
from personafl.report.figure import Choice, Figure, View, in_two_widths
from personafl.report.load import Run, Values
from personafl.report.measure import score_word
from personafl.report.table import last_models

AXES = {
    "size": ("size on the device", "kB that the model takes on a device"),
    "bytes": ("bytes sent", "MB sent in the whole run, up and down"),
    "seconds": ("seconds", "seconds of training"),
    "time": ("virtual time", "virtual time"),
}


def cost_figures(runs: Sequence[Run]) -> list[Figure]:
    """Return accuracy against each cost, a point per method; for one method there is nothing to weigh."""
    tests = [row for run in runs for row in run.rows if row["clients"] == "seen" and row["split"] == "test"]
    rows = {label: last_models([row for row in tests if row["method"] == label]) for label in by_label(runs)}
    rows = {label: own for label, own in rows.items() if own}
    if len(rows) < 2:
        return []
    views = []
    word = score_word(tests)
    called = word[0].upper() + word[1:]
    for axis, (_, title) in AXES.items():
        series = [
            _point(label, own, axis, style)
            for style, label in enumerate(by_label(runs))
            for own in [[row for row in rows.get(label, []) if _cost(row, axis) is not None]]
            if own
        ]
        costs = [one.x[0] for one in series]
        if series and max(costs) > 1.02 * min(costs):  # else it says nothing
            log = min(costs) > 0 and max(costs) > 10 * min(costs)
            about = "; ".join(f"{one.label}: {one.y[0]:.1f} % at {one.x[0]:,.4g}" for one in series)
            chart = Chart(title="", x_title=title, y_title=f"test {word}, %", series=series, log_x=log)
            views.append(
                View(chosen={"axis": axis}, picture=in_two_widths(chart, f"{called} against {title}. {about}"))
            )
    if not views:
        return []
    words = {axis: called for axis, (called, _) in AXES.items()}
    return [
        Figure(
            title=f"{called} and its costs",
            caption="Up and to the left is better. The last personal model of each method, or the global one if it has "
            "none; seen clients, means over seeds and ± their standard deviation.",
            views=views,
            choices=(Choice.of("axis", "against", words, views),),
        )
    ]


def _cost(row: Values, axis: str) -> float | None:
    if axis == "time":
        return row.get("time")
    if axis == "seconds":
        return float(row["seconds"])
    return float(row["bytes_stored"] / 1e3 if axis == "size" else (row["bytes_up"] + row["bytes_down"]) / 1e6)


def _point(label: str, rows: Sequence[Values], axis: str, style: int) -> Series:
    costs = [cost for row in rows if (cost := _cost(row, axis)) is not None]
    values = [100 * row["accuracy"] for row in rows]
    spread = [statistics.stdev(values)] if len(values) > 1 else None
    return Series(
        label=label,
        x=[statistics.mean(costs)],
        y=[statistics.mean(values)],
        error=spread,
        areas=[2.5],
        line=False,
        style=style,
    )
