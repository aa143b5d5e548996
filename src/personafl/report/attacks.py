"""Hostile clients: how the honest fare by attack and share, and what a server clipped and left out, by round."""

import statistics
from collections.abc import Sequence

from personafl.report.cells import NONE, cells
from personafl.report.chart import Chart, Series
from personafl.report.curves import BANDS, MARKED, by_label, joined, ready, thinned
from personafl.report.figure import Choice, Figure, View, in_two_widths
from personafl.report.load import Run, Values
from personafl.report.measure import score_word
from personafl.report.table import last_models, percent

TOLD = {
    "clipped": ("how many were clipped", "uploads that were clipped, % of a round's"),
    "clip": ("the clip", "norm that uploads are clipped to"),
    "left_out": ("left out", "uploads that were not finite and left out"),
}


def attack_figures(runs: Sequence[Run]) -> list[Figure]:
    """Return the table of honest clients, if some run has hostile ones, and what its server did with uploads."""
    return [*_honest(runs), *_treated(runs)]


def _honest(runs: Sequence[Run]) -> list[Figure]:
    """Return the table: a line per method and attack, those without one among them."""
    finished = [run for run in runs if run.result is not None]
    if not any("attack" in run.recipe for run in finished):
        return []
    backdoors = any("backdoor" in row for run in finished for row in run.rows)
    treated = any(_told(run, "left_out") for run in finished)
    titles = ["method", "attack", "hostile", "global", "personal", "worst\n10%"]
    titles += ["backdoor,\nglobal", "backdoor,\npersonal"] if backdoors else []
    titles += ["clipped", "rounds\nclipped", "left out"] if treated else []
    lines = []
    for label, own in by_label(finished).items():
        for attack, several in _by_attack(own).items():
            rows = [row for run in several for row in run.rows if (row["clients"], row["split"]) == ("seen", "test")]
            shared, last = [row for row in rows if row["model"] == "global"], last_models(rows)
            personal = last if last and last[0]["model"] != "global" else []
            cell = [label, *attack, *(percent(part, "accuracy", " ± ") for part in (shared, personal))]
            cell.append(percent(last, "worst_decile", " ± "))
            cell += [percent(part, "backdoor", " ± ") for part in (shared, personal)] if backdoors else []
            lines.append(cell + (_treatment(several) if treated else []))
    word = score_word(row for run in finished for row in run.rows)
    caption = (
        f"{word[0].upper()}{word[1:]} in % of seen clients that are honest, on test data; hostile ones are not scored. "
        "Personal is the last personal model, worst 10% that of the last model."
    )
    if backdoors:
        caption += " Backdoor: % of test samples of other classes that its trigger makes the target's."
    if treated:
        caption += " Clipped: % of uploads, and in how many rounds some were; left out: uploads that were not finite."
    return [
        Figure(title="Honest clients", caption=caption, views=[View(chosen={}, picture=cells(caption, titles, lines))])
    ]


def _by_attack(runs: Sequence[Run]) -> dict[tuple[str, str], list[Run]]:
    """Return the runs of a method by the attack on them, in words, and the share of hostile clients."""
    found: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        attack: Values = run.recipe.get("attack", {})
        strength = f", {attack['strength']:g}" if "strength" in attack else ""
        named = (f"{attack['kind']}{strength}", f"{attack['share']:.0%}") if attack else ("none", NONE)
        found.setdefault(named, []).append(run)
    return found


def _treatment(runs: Sequence[Run]) -> list[str]:
    """Return how many uploads were clipped, in how many rounds, and how many were left out, means over seeds."""
    clipped = [_told(run, "clipped") for run in runs if _told(run, "clipped")]
    lost = [_told(run, "left_out") for run in runs if _told(run, "left_out")]
    if not lost:
        return [NONE, NONE, NONE]
    out = f"{statistics.mean(sum(own.values()) for own in lost):,.3g}"
    if not clipped:
        return [NONE, NONE, out]
    share = statistics.mean(statistics.mean(own.values()) for own in clipped)
    rounds = statistics.mean(sum(value > 0 for value in own.values()) for own in clipped)
    return [f"{share:.1f}", f"{rounds:.0f} of {max(map(len, clipped))}", out]


def _told(run: Run, key: str) -> dict[int, float]:
    """Return by round what a server told of its uploads; shares in %."""
    factor = 100 if key == "clipped" else 1
    known = [(entry["number"], entry["told"][key]) for entry in run.trained if key in (entry.get("told") or {})]
    return {number: factor * value for number, value in known}


def _treated(runs: Sequence[Run]) -> list[Figure]:
    """Return by round how many uploads were clipped, and to what; how many were left out, if any were."""
    views, styles = [], {label: place for place, label in enumerate(by_label(runs))}
    for key, (_, title) in TOLD.items():
        series = []
        for label, own in by_label(runs).items():
            curve = joined([(run, thinned(list(_told(run, key).items()))) for run in ready(own)])
            if any(curve.mean):
                series.append(
                    Series(
                        label=label,
                        x=[point["round"] for point in curve.at],
                        y=curve.mean,
                        error=curve.std if any(curve.std) and len(styles) <= BANDS else None,
                        band=True,
                        markers=len(curve.mean) <= MARKED,
                        style=styles[label],
                    )
                )
        if series:
            about = "; ".join(f"{one.label}: {statistics.mean(one.y):.3g} on average" for one in series)
            chart = Chart(title="", x_title="round", y_title=title, series=series)
            views.append(View(chosen={"told": key}, picture=in_two_widths(chart, f"{title}, by round. {about}")))
    if not views:
        return []
    words = {key: called for key, (called, _) in TOLD.items()}
    caption = "Of the uploads of each round, hostile and honest ones alike; means over seeds."
    choice = Choice.of("told", "show", words, views)
    return [Figure(title="What the server did with uploads", caption=caption, views=views, choices=(choice,))]
