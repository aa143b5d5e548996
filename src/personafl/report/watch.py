"""The live view of runs in the terminal: it only reads their directories, so it can come and go."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from personafl.report.about import resume_commands
from personafl.report.load import load
from personafl.report.progress import State, changed_at, overall, states
from personafl.report.table import speed

SECONDS = 1.0  # between two looks
QUIET = 60.0  # seconds without a new round after which to wonder
MOST = 20  # lines


def watch(paths: Sequence[Path], console: Console, *, pause: Callable[[float], None] = time.sleep) -> None:
    """Show runs until all are finished."""
    with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
        while True:
            sources = load(paths)
            parts = states(sources)
            silence, resume = time.time() - changed_at(sources), "; ".join(resume_commands(sources))
            live.update(view(parts, silence, resume, console.width), refresh=True)
            if all(part.over for part in parts):
                return
            pause(SECONDS)


def view(parts: Sequence[State], silence: float, resume: str, width: int) -> Group:
    """Return a line for each run, and one for all; `silence` is how long nothing was written, `resume` what to do."""
    table = Table.grid(padding=(0, 2))
    for title in ("run", "round", "", "acc", "loss", "speed", "left"):
        table.add_column(title, justify="right" if title in ("round", "acc", "loss", "speed", "left") else "left")
    for part in _shown(parts):
        table.add_row(*_line(part, 20 if width >= 100 else 8))
    hidden = len(parts) - len(_shown(parts))
    more = [Text(f"and {hidden} more", style="dim")] if hidden else []
    return Group(table, *more, Text(_summary(parts, silence, resume), style="bold"))


def _shown(parts: Sequence[State]) -> list[State]:
    """Return as many as fit a terminal: those that are on, then those that wait, then those that are done."""
    order = sorted(range(len(parts)), key=lambda at: (parts[at].over, not parts[at].done, at))
    return [parts[at] for at in sorted(order[:MOST])]


def _line(part: State, bar: int) -> list[Text | ProgressBar | str]:
    style = "dim" if not part.done else ""
    cells = [
        part.name,
        f"{part.done}/{part.rounds}",
        "–" if part.accuracy is None else f"{100 * part.accuracy:.1f}%",
        "–" if part.loss is None else f"{part.loss:.3f}",
        "–" if part.speed is None else speed(part.speed),
        part.failed or "done" if part.over else "–" if part.left is None else _clock(part.left),
    ]
    texts: list[Text | ProgressBar | str] = [Text(cell, style=style) for cell in cells]
    return [*texts[:2], ProgressBar(total=max(part.rounds, 1), completed=part.done, width=bar), *texts[2:]]


def _summary(parts: Sequence[State], silence: float, resume: str) -> str:
    done = sum(part.finished for part in parts)
    words = f"{done} of {len(parts)} run{'s' if len(parts) > 1 else ''} finished"
    if failed := sum(bool(part.failed) for part in parts):
        words += f", {failed} failed"
    if done + failed == len(parts):
        return words
    left = overall(parts)
    if silence > QUIET:
        return f"{words} · nothing new for {_clock(silence)}; if nothing is running it: {resume}"
    if left is None:
        return words
    return f"{words} · {_clock(left)} left, until about {time.strftime('%H:%M', time.localtime(time.time() + left))}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
