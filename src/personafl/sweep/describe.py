"""Show a sweep: a line for a trial that ended, and a table of them at the end."""

from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from personafl.sweep.search import Sweep
from personafl.sweep.study import Trial

ROWS = 10  # of the table; trials.csv has them all


def trial_line(trial: Trial) -> str:
    """Return how a trial ended."""
    values = " ".join(f"{key}={_short(value)}" for key, value in trial.values.items())
    return f"trial {trial.number}: {_outcome(trial)}  {values}" + (f" ({trial.note})" if trial.note else "")


def sweep_tables(sweep: Sweep) -> Iterator[RenderableType]:
    """Yield the best trials, how many there were, and what to do with the best."""
    states = [trial.state for trial in sweep.trials]
    told = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states)))
    yield Text(f"Validation accuracy in % · {sweep.ended} of {sweep.size} trials ({told})", style="bold")
    keys = list(dict.fromkeys(key for trial in sweep.trials for key in trial.values))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for title in ("trial", "accuracy", *keys):
        table.add_column(title, justify="right", overflow="fold")
    best = sorted(sweep.trials, key=lambda trial: (trial.state != "done", -(trial.accuracy or 0.0)))
    for trial in best[:ROWS]:
        table.add_row(str(trial.number), _outcome(trial), *(_short(trial.values.get(key)) for key in keys))
    yield table
    if sweep.best is not None:
        yield ""
        yield Text(f"best recipe: {sweep.path / 'best.toml'}\non test data: {sweep.command}")


def _outcome(trial: Trial) -> str:
    value = "" if trial.accuracy is None else f"{100 * trial.accuracy:.2f}"
    if trial.state == "done":
        return value
    return f"{value} pruned at round {trial.rounds}" if trial.state == "pruned" else trial.state


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
