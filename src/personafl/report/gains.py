"""Who gained by personalization and who was hurt, and how accuracy is spread over clients."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import numpy as np

from personafl.report.chart import Chart, Series
from personafl.report.curves import by_label
from personafl.report.figure import Choice, Figure, View, both, panels
from personafl.report.load import Run
from personafl.report.measure import score_word
from personafl.report.spread import Box, Violin, boxes, violins
from personafl.report.table import last_models, percent

POINTS = 300  # in a panel at most
ALL_POINTS = 2000  # in all panels of a view, so that the page of many methods stays small
GAINED, HURT, SAME = 0, 1, 7  # colours and shapes of the charts
Known = dict[str, dict[str, list["Client"]]]  # model -> method -> clients
WORDS = {
    "personal": "the personal model",
    "tuned": "the fine-tuned personal model",
    "chosen": "the model that the client chose",
    "global": "the global model",
}


@dataclass(frozen=True, kw_only=True)
class Client:
    """A seen client with the accuracy in % of the global model and of one of its own, on some of its data."""

    name: str
    seed: int
    samples: int
    shared: float
    own: float

    @property
    def change(self) -> float:
        """How many points its own model is better."""
        return self.own - self.shared

    @property
    def note(self) -> str:
        """What a chart says of it."""
        return (
            f"client {self.name}, seed {self.seed}, {self.samples:,} samples: "
            f"global {self.shared:.1f} %, own {self.own:.1f} % ({self.change:+.1f})"
        )


def last_model(run: Run) -> str:
    """Return the name of a finished run's last personal model, or global if there is none."""
    rows = last_models([row for row in run.rows if row["split"] == "test"])
    return str(rows[0]["model"]) if rows else "global"


def clients_of(run: Run, model: str, split: str = "test") -> list[Client]:
    """Return the seen clients that were scored with the global and with another model."""
    if run.result is None:
        return []
    columns = run.result.columns
    names = ("name", "train", "clients", f"global_{split}_accuracy", f"{model}_{split}_accuracy")
    if not all(name in columns for name in names):
        return []
    rows = zip(*(columns[name] for name in names), strict=True)
    return [
        Client(name=str(name), seed=run.seed, samples=train, shared=100 * shared, own=100 * own)
        for name, train, group, shared, own in rows
        if group == "seen" and shared is not None and own is not None
    ]


def gain_figures(runs: Sequence[Run]) -> list[Figure]:
    """Return the charts of clients with their global and own model, and of the changes."""
    finished = [run for run in runs if run.result is not None]
    known: Known = {"last": {}, "chosen": {}, "train": {}}
    for label, own in by_label(finished).items():
        for kind in known:
            members = [client for run in own for client in _members(run, kind)]
            if members and (kind == "chosen" or any(last_model(run) != "global" for run in own)):
                known[kind][label] = members
    models = [kind for kind in known if known[kind]]
    if not models:
        return []
    words = {"last": "personal model", "chosen": "chosen model", "train": "personal model, on its training data"}
    choice = Choice(name="model", title="model", options=tuple((kind, words[kind]) for kind in models))
    return [
        _scatter(known, choice, finished),
        _changes(known, choice, score_word(row for run in runs for row in run.rows)),
    ]


def _members(run: Run, kind: str) -> list[Client]:
    """Return a run's clients with the model that they chose, or the last one: on test or on training data."""
    if kind == "chosen":
        return clients_of(run, kind)
    return clients_of(run, last_model(run), "train" if kind == "train" else "test")


def _scatter(known: Known, choice: Choice, runs: Sequence[Run]) -> Figure:
    everyone = [client for part in known.values() for members in part.values() for client in members]
    sizes = {client.samples for client in everyone}
    kinds = {"samples": "change against samples"} if len(sizes) > 1 else {}
    kinds["pair"] = "personal against global"
    most = min(POINTS, ALL_POINTS // max(map(len, known.values())))
    views = []
    for model, _ in choice.options:
        for kind in kinds:
            x, y = _axes(kind)
            reach = [(x(client), y(client)) for members in known[model].values() for client in members]
            charts = [
                (label, _counted(label, members, model, runs), _panel(_spaced(members, most), kind, model, reach))
                for label, members in known[model].items()
            ]
            views.append(View(chosen={"model": model, "kind": kind}, picture=panels(charts)))
    alike = f" All of them have {sizes.pop():,} training samples." if len(sizes) == 1 else ""
    largest = max(len(members) for part in known.values() for members in part.values())
    cut = f" Of each method {most} of {largest:,} are drawn, evenly spaced by change." if largest > most else ""
    score = score_word(row for run in runs for row in run.rows)
    return Figure(
        title="Clients with their own model and with the global one",
        caption=f"A point is a seen client of a seed, a larger one several, by the test {score} (or as chosen, that on "
        "training data) of its own model and of the method's global model. Above the dashed line its own model is "
        f"better.{alike}{cut}",
        views=views,
        choices=(Choice(name="kind", title="show", options=tuple(kinds.items())), choice),
    )


def _counted(label: str, members: Sequence[Client], model: str, runs: Sequence[Run]) -> str:
    """Say how many are hurt, as the table has it, and how many gain."""
    rows = [row for run in runs if run.label == label for row in run.rows]
    split = "train" if model == "train" else "test"
    rows = [row for row in rows if row["clients"] == "seen" and row["split"] == split]
    rows = [row for row in rows if row["model"] == model] if model == "chosen" else last_models(rows)
    gained = 100 * sum(client.change > 0 for client in members) / len(members)
    return f"{percent(rows, 'share_hurt')} % hurt, {gained:.1f} % better off"


def _axes(kind: str) -> tuple[attrgetter[float], attrgetter[float]]:
    return (
        (attrgetter("samples"), attrgetter("change"))
        if kind == "samples"
        else (attrgetter("shared"), attrgetter("own"))
    )


def _panel(members: Sequence[Client], kind: str, model: str, reach: Sequence[tuple[float, float]]) -> Chart:
    """Return the chart of a method; `reach` are the points of all, so that its axes are those of the others."""
    x, y = _axes(kind)
    places: dict[tuple[float, float], list[Client]] = {}
    for client in members:
        places.setdefault((x(client), y(client)), []).append(client)
    series = []
    for label, style, sign in (("better", GAINED, 1), ("worse", HURT, -1), ("same", SAME, 0)):
        own = {place: there for place, there in places.items() if np.sign(there[0].change) == sign}
        if own:
            across, up = zip(*own, strict=True)
            notes = [_noted(there) for there in own.values()]
            areas = [min(len(there), 12) ** 0.8 for there in own.values()]
            series.append(Series(label=label, x=across, y=up, notes=notes, areas=areas, line=False, style=style))
    ends = [extreme(place for place, _ in reach) for extreme in (min, max)]
    line = Series(label="", x=ends, y=[0.0, 0.0] if kind == "samples" else ends, dashed=True, markers=False, style=SAME)
    name = "chosen model" if model == "chosen" else "own model"
    titles = (
        ("training samples", f"{name} − global, points") if kind == "samples" else ("global model, %", f"{name}, %")
    )
    log = kind == "samples" and ends[0] > 0 and ends[1] > 10 * ends[0]
    return Chart(title="", x_title=titles[0], y_title=titles[1], series=[line, *series], log_x=log, also=reach)


def _noted(clients: Sequence[Client]) -> str:
    """Say who is at a place: all of one client, or the names of several."""
    if len(clients) == 1:
        return clients[0].note
    names = ", ".join(client.name for client in clients[:8]) + (", …" if len(clients) > 8 else "")
    first = clients[0]
    return f"{len(clients)} clients ({names}): global {first.shared:.1f} %, own {first.own:.1f} % ({first.change:+.1f})"


def _spaced(members: Sequence[Client], most: int) -> list[Client]:
    """Return so many clients at most, evenly spaced by their change."""
    order = sorted(members, key=lambda client: client.change)
    places = np.linspace(0, len(order) - 1, min(most, len(order))).round().astype(int)
    return [order[place] for place in places.tolist()]


def _changes(known: Known, choice: Choice, score: str) -> Figure:
    views = []
    for model, words in choice.options:
        rows = [
            Violin(label=label, values=[c.change for c in members], notes=[c.note for c in members])
            for label, members in known[model].items()
        ]
        medians = "; ".join(f"{row.label}: median {statistics.median(row.values):+.1f}" for row in rows)
        about = f"Change of {score} by the {words}, points. {medians}"
        title = f"{words} − global model, points of {score}"
        views.append(View(chosen={"model": model}, picture=both(partial(violins, rows, title, about))))
    return Figure(
        title=f"How much {score} changes",
        caption="Left of the line clients are worse off with a model of their own. A dot is a client of a seed (of "
        "many, some are drawn); squares are those that are hurt; the upright stroke is the median.",
        views=views,
        choices=(choice,),
    )


def spread_figures(runs: Sequence[Run]) -> list[Figure]:
    """Return how accuracy is spread over clients, with the worst decile."""
    views = []
    for model in WORDS:
        rows = list(_boxes(runs, model))
        if rows:
            about = "; ".join(f"{row.label}: mean {row.mean:.1f} %, worst decile {row.worst:.1f} %" for row in rows)
            title = f"test {score_word(row for run in runs for row in run.rows)} of {WORDS[model]}, %"
            views.append(View(chosen={"model": model}, picture=both(partial(boxes, rows, title, about))))
    if not views:
        return []
    return [
        Figure(
            title="The worst decile, and the others",
            caption="Dot: mean of the worst decile of seen clients; diamond: mean of all; stroke: median; dark box: "
            "the middle half; light box: 80 % of clients; line: all of them. Means over seeds.",
            views=views,
            choices=(Choice.of("model", "model", {model: f"{model} model" for model in WORDS}, views),),
        )
    ]


def _boxes(runs: Sequence[Run], model: str) -> Iterator[Box]:
    wanted = {"model": model, "clients": "seen", "split": "test"}
    for label, own in by_label(runs).items():
        rows = [row for run in own for row in run.rows if wanted.items() <= row.items()]
        if rows:
            levels = sorted(rows[0]["quantiles"], key=float)
            yield Box(
                label=label,
                quantiles=[100 * statistics.mean(row["quantiles"][level] for row in rows) for level in levels],
                mean=100 * statistics.mean(row["accuracy"] for row in rows),
                worst=100 * statistics.mean(row["worst_decile"] for row in rows),
            )
