"""What becomes of models during a run: ranks of what is sent, sparsity and size of what clients keep, their centers."""

from collections.abc import Callable, Iterator, Sequence

from personafl.report.chart import Chart, Series
from personafl.report.curves import by_label, joined, ready
from personafl.report.figure import Choice, Figure, View, in_two_widths, panels
from personafl.report.load import Run, Values

TENSORS = 8  # with a line each
LEVELS = 16  # centers with a line each
PANELS = 24


def form_figures(runs: Sequence[Run]) -> list[Figure]:
    """Return the figures of ranks, sparsity and centers that the metrics have."""
    return [*_ranks(runs), *_sparsity(runs), *_centers(runs)]


def _ranks(runs: Sequence[Run]) -> Iterator[Figure]:
    charts = []
    for label, own in by_label(runs).items():
        tensors = list(dict.fromkeys(name for run in own for entry in run.trained for name in entry["ranks"]))
        series = [
            Series(label=name.removeprefix("model/"), x=[p["round"] for p in curve.at], y=curve.mean, markers=False)
            for name in tensors[:TENSORS]
            for curve in [joined([(run, _rank(run, name)) for run in ready(own)])]
            if len(curve.mean) > 1
        ]
        if series:
            cut = f", {TENSORS} of {len(tensors)} weights" if len(tensors) > TENSORS else ""
            line = "from " + ", ".join(f"{one.y[0]:.3g} to {one.y[-1]:.3g}" for one in series[:3])
            charts.append((label, line + cut, Chart(title="", x_title="round", y_title="rank", series=series)))
    if charts:
        caption = "Ranks of the weights that the server sends as factors; a weight that is not here is sent whole."
        yield Figure(title="Rank of the shared model", caption=caption, views=[View(chosen={}, picture=panels(charts))])


def _rank(run: Run, name: str) -> dict[int, float]:
    return {entry["number"]: float(entry["ranks"][name]) for entry in run.trained if name in entry["ranks"]}


def _sparsity(runs: Sequence[Run]) -> Iterator[Figure]:
    measures: dict[str, tuple[str, str, Callable[[Values], float]]] = {
        "zeros": ("sparsity", "entries of the client's own part that are 0, %", lambda e: 100 * (1 - e["density"])),
        "size": ("size on the device", "kB of a personal model", lambda e: e["bytes"] / 1e3),
    }
    if all(entry["density"] == 1 for run in runs for entry in run.events("form")):
        return
    views = []
    for name, (_, title, value) in measures.items():
        series = [
            Series(label=label, x=[p["round"] for p in curve.at], y=curve.mean, error=curve.std, band=True, style=style)
            for style, (label, own) in enumerate(by_label(runs).items())
            for curve in [joined([(run, {e["number"]: value(e) for e in run.events("form")}) for run in ready(own)])]
            if len(curve.mean) > 1
        ]
        if series:
            about = "; ".join(f"{one.label} from {one.y[0]:.4g} to {one.y[-1]:.4g}" for one in series)
            chart = Chart(title="", x_title="round", y_title=title, series=series)
            views.append(View(chosen={"measure": name}, picture=in_two_widths(chart, f"{title}: {about}")))
    if views:
        words = {name: called for name, (called, _, _) in measures.items()}
        yield Figure(
            title="Sparsity of the personal models",
            caption="Means over some seen clients (20 at most) and over seeds.",
            views=views,
            choices=(Choice.of("measure", "show", words, views),),
        )


def _centers(runs: Sequence[Run]) -> Iterator[Figure]:
    charts = [panel for label, own in by_label(runs).items() for panel in _center_panels(label, ready(own))]
    if charts:
        cut = f" {PANELS} of {len(charts)} weights are shown." if len(charts) > PANELS else ""
        yield Figure(
            title="Centers on the move",
            caption="The values that quantized weights can take: means over some clients (20 at most) and over "
            f"seeds.{cut}",
            views=[View(chosen={}, picture=panels(charts[:PANELS]))],
        )


def _center_panels(label: str, runs: Sequence[Run]) -> Iterator[tuple[str, str, Chart]]:
    """Yield a panel per kind of device and quantized weight."""
    entries = [entry for run in runs for entry in run.events("form")]
    devices = sorted({entry["device"] for entry in entries})
    for device in devices:
        called = runs[0].recipe["devices"][device].get("name") if len(devices) > 1 else ""
        kind = f", {called or f'devices {device + 1}'}" if len(devices) > 1 else ""
        for name in dict.fromkeys(name for e in entries if e["device"] == device for name in e["centers"]):
            if moving := _moving(runs, device, name):
                yield f"{label}{kind}: {name}", *moving


def _moving(runs: Sequence[Run], device: int, name: str) -> tuple[str, Chart] | None:
    """Return how far the centers of a weight move, and the chart; none if they were seen only once."""
    found = {run.path: _of_weight(run, device, name) for run in runs}
    levels = max((len(centers) for each in found.values() for centers in each.values()), default=0)
    curves = [
        joined([(run, {n: centers[level] for n, centers in found[run.path].items()}) for run in runs])
        for level in range(0, levels, -(-levels // LEVELS) or 1)
    ]
    if not curves or len(curves[0].mean) < 2:
        return None
    series = [
        Series(label="", x=[p["round"] for p in curve.at], y=curve.mean, markers=len(curve.mean) <= 20, style=0)
        for curve in curves
    ]
    far = max(abs(curve.mean[-1] - curve.mean[0]) for curve in curves)
    chart = Chart(title="", x_title="round", y_title="center", series=series)
    return f"{levels} centers; the farthest moves by {far:.2g}", chart


def _of_weight(run: Run, device: int, name: str) -> dict[int, list[float]]:
    entries: list[Values] = [e for e in run.events("form") if e["device"] == device and name in e["centers"]]
    return {entry["number"]: entry["centers"][name] for entry in entries}
