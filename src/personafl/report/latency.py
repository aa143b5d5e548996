"""Show how long waiting for the first B of N servers takes: a table in the terminal, and a chart."""

import math
from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from personafl.latency.waiting import Waiting
from personafl.report.chart import Chart, Series
from personafl.report.table import grid


def waiting_tables(waiting: Waiting, about: str) -> Iterator[RenderableType]:
    """Yield a table of the choices, the proposal, and what the columns mean; `about` says what takes time."""
    yield Text(f"Waiting for the first B of N = {waiting.servers} servers", style="bold")
    yield Text(f"time of a server's round: {about}\n")
    closed = any(choice.weibull is not None for choice in waiting.choices)
    yield _table(waiting, closed)
    yield Text(f"\n{_proposal(waiting)}", style="bold")
    for note in waiting.notes:
        yield Text(f"note: {note}", style="yellow")
    yield Text(
        "\nE[τ_(B)]: mean time until B servers are ready that began together\n"
        "r: E[τ_(B)]/E[τ_(N)], by order statistics; by simulation ± standard error\n"
        "bound: Q(β)/Q(1−1/N), above r for large N and fixed β"
        + ("; Weibull: the same in closed form" if closed else "")
        + "\nIn units of waiting for all (B = N), when late servers keep their work:\n"
        "  kept: time between two mixes; work: rounds of servers mixed in per time\n"
        "  rigorous: the same time where a late server goes on alone, and does every round\n"
        "  agree: (B−1)/(N−1), the variance of models that mixes remove, per time",
        style="dim",
    )


def _table(waiting: Waiting, closed: bool) -> Table:
    titles = ["B", "β", "E[τ_(B)]", "r", "r simulated", "bound", *(["Weibull"] if closed else [])]
    table = grid(*titles, "kept", "rigorous", "work", "agree", no_wrap=True)
    for choice in waiting.choices:
        table.add_row(
            str(choice.first),
            f"{choice.share:.3g}",
            f"{choice.seconds:.4g}",
            f"{choice.ratio:.4f}",
            f"{choice.simulated:.4f}±{choice.simulated_error:.4f}",
            _known(choice.bound),
            *([_known(choice.weibull)] if closed else []),
            f"{choice.pace:.3f}",
            f"{choice.rigorous:.3f}",
            _times(choice.work),
            _times(choice.agreement),
            style="bold" if choice == waiting.proposed else "",
        )
    return table


def _known(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _times(value: float) -> str:
    return f"{value:.2f}×" if value < 1000 else f"{value:.3g}×"


def _proposal(waiting: Waiting) -> str:
    best, (low, high) = waiting.proposed, waiting.near
    if best.first == waiting.servers:
        return "proposal: β = 1: wait for all; no smaller B has models agree faster"
    about = f"; from {low:.3g} to {high:.3g} within 5%" if low < high else ""
    return f"proposal: β = {best.share:.3g} (B = {best.first}), where models agree fastest{about}"


def waiting_chart(waiting: Waiting, about: str) -> Chart:
    """Return r against β by all methods, and the pace with kept work."""
    choices = waiting.choices
    shares = [choice.share for choice in choices]
    series = [
        Series(label="r, formula", x=shares, y=[choice.ratio for choice in choices], markers=False),
        Series(
            label="r, simulated ± 2 s.e.",
            x=shares,
            y=[choice.simulated for choice in choices],
            error=[2 * choice.simulated_error for choice in choices],
            line=False,
        ),
        Series(label="bound for large N", x=shares, y=[_or_nan(c.bound) for c in choices], dashed=True, markers=False),
        Series(label="Weibull closed form", x=shares, y=[_or_nan(c.weibull) for c in choices], line=False),
        Series(label="stragglers keep their work", x=shares, y=[choice.pace for choice in choices]),
        Series(label="stragglers go on alone (rigorous)", x=shares, y=[choice.rigorous for choice in choices]),
    ]
    return Chart(
        title=f"Waiting for the first B of {waiting.servers} servers",
        subtitle=about,
        x_title="β = B/N",
        y_title="time per mix, relative to waiting for all",
        series=[part for part in series if part.points],
    )


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
