"""What a terminal shows while runs are on: how far they are."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bars

from personafl.report.table import amount, speed
from personafl.runs.listener import Event, Listener, Note, Progress, Trials, Tuning

SECONDS_BETWEEN_LINES = 5.0


class Display:
    """A live bar for the run that is on, above it a line for each that is done; plain lines where there is no terminal.

    All on standard error; nothing when quiet.
    """

    def __init__(self, console: Console, quiet: bool) -> None:
        self._console = console
        self._quiet = quiet
        self._bars: Bars | None = None
        self._width = 0
        self._told: set[str] = set()  # of data that runs share

    @contextmanager
    def count(self, label: str) -> Iterator[Callable[[int, int], None]]:
        """Show how many of many things are done; what is yielded is told (done, of how many)."""
        live = self._console.is_terminal and not self._quiet
        with Bars(console=self._console, transient=True, disable=not live) as bars:
            task, printed = bars.add_task(label), time.monotonic()

            def listen(done: int, total: int) -> None:
                nonlocal printed
                bars.update(task, completed=done, total=total)
                if not live and not self._quiet and time.monotonic() - printed > SECONDS_BETWEEN_LINES:
                    printed = time.monotonic()
                    self._console.print(f"{label} {done}/{total}")

            yield listen

    @contextmanager
    def open(self, names: Sequence[str]) -> Iterator[None]:
        """Show progress inside; `names` are the labels that will come."""
        self._width = max(map(len, names), default=0)
        if self._quiet or not self._console.is_terminal:
            yield
            return
        columns = (
            TextColumn("{task.description}"),
            TextColumn("{task.fields[facts]}"),
            BarColumn(bar_width=20 if self._console.width >= 100 else 5),
        )
        # Only the run that is on is live: a region higher than the terminal would hide it.
        with Bars(*columns, console=self._console, transient=True) as self._bars:
            self._bars.add_task("preparing", total=None, facts="")
            yield
        self._bars = None

    def listener(self, name: str) -> Listener | None:
        """Return the listener of one run."""
        if self._quiet:
            return None
        label = name.ljust(self._width)
        listen = self._lines(label) if self._bars is None else self._live(self._bars, label)

        def once(event: Event) -> None:
            if isinstance(event, Note) and event.shared:
                if event.text in self._told:
                    return
                self._told.add(event.text)
            listen(event)

        return once

    def _live(self, bars: Bars, label: str) -> Listener:
        for before in bars.task_ids:
            bars.remove_task(before)
        task = bars.add_task(label, total=None, facts="starting")

        def listen(progress: Event) -> None:
            if isinstance(progress, Note):
                bars.console.print(f"{label} {progress.text}", soft_wrap=True)
                return
            if isinstance(progress, Tuning | Trials):
                total = progress.clients if isinstance(progress, Tuning) else progress.trials
                bars.update(task, total=total, completed=progress.done, facts=tuning(progress))
                return
            done = progress.round.number + 1
            bars.update(task, total=progress.rounds, completed=done, facts=facts(progress))
            if done == progress.rounds:
                bars.console.print(f"{label} {finished(progress)}", soft_wrap=True)
                bars.update(task, facts="scoring")

        return listen

    def _lines(self, label: str) -> Listener:
        printed = [time.monotonic()]

        def listen(progress: Event) -> None:
            now = time.monotonic()
            due = now - printed[0] > SECONDS_BETWEEN_LINES
            if isinstance(progress, Note):
                text, due = progress.text, True
            elif isinstance(progress, Tuning | Trials):
                text = tuning(progress)
            elif progress.round.number + 1 < progress.rounds:
                text = facts(progress)
            else:
                text, due = finished(progress), True
            if due:
                printed[0] = now
                self._console.print(f"{label} {text}", soft_wrap=True)

        return listen


def tuning(progress: Tuning | Trials) -> str:
    """Clients fine-tuned, or trials done so far."""
    if isinstance(progress, Trials):
        return f"tuning, {progress.done}/{progress.trials} trials at round {progress.rounds}"
    return f"fine-tuning {progress.done}/{progress.clients} clients"


def facts(progress: Progress) -> str:
    """Round, loss, accuracy of the last scoring, clients trained per second, and the time that is left."""
    done = progress.round.number + 1
    accuracy = "  –  " if progress.accuracy is None else f"{100 * progress.accuracy:4.1f}%"
    minutes, seconds = divmod(round((progress.rounds - done) * progress.seconds / progress.done), 60)
    return (
        f"round {done:>{len(str(progress.rounds))}}/{progress.rounds} loss {_loss(progress)} acc {accuracy} "
        f"{_speed(progress)} ETA {minutes}:{seconds:02d}"
    )


def finished(progress: Progress) -> str:
    """Rounds, loss, speed and time of a run that is over; its accuracy is in the table."""
    return f"{progress.rounds} rounds, loss {_loss(progress)}, {_speed(progress)}, {amount(progress.seconds)} s"


def _loss(progress: Progress) -> str:
    return f"{progress.round.loss:.3f}" if math.isfinite(progress.round.loss) else "–"  # nobody took part


def _speed(progress: Progress) -> str:
    return speed(progress.round.clients * progress.done / max(progress.seconds, 1e-9))
