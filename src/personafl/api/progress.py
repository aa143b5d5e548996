"""Who is told how far runs are: a terminal, a notebook, and a function of the user's."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from personafl.api.calls import check_callable
from personafl.api.display import Display, facts, finished, tuning
from personafl.errors import BadInput
from personafl.recipe.recipe import Recipe
from personafl.report.svg import safe
from personafl.runs.listener import Event, Listener, Note, Progress, Trials, Tuning

Listeners = Callable[[str, int], Listener | None]  # (method, seed) -> the listener of that run
_SECONDS = 0.2  # between two pictures in a notebook


@dataclass(frozen=True)
class RoundDone:
    """What a callback is told after each round."""

    method: str
    seed: int
    round: int  # from 1
    rounds: int  # in all
    loss: float | None  # mean training loss of the clients that took part; None: nobody did
    accuracy: float | None  # of the last scoring, personal if the method has it, else global; None: none yet
    clients: int  # that took part
    bytes_up: int  # of this round
    bytes_down: int
    seconds: float  # of training so far


Callback = Callable[[RoundDone], None]


@contextlib.contextmanager
def told(
    recipe: Recipe, callback: Callback | None, progress: bool | None, listener: Listeners | None
) -> Iterator[Listeners]:
    """Yield who listens to which run: a listener that was given, a callback, and what shows progress.

    With progress None a notebook and a terminal show it, and where there is neither, nothing does.
    """
    check_callable(callback, "callback")
    if not isinstance(progress, bool | None):
        raise BadInput(f"progress = {progress!r}: give True, False or None")
    several = len(recipe.compare.seeds) > 1
    label = (lambda method, seed: f"{method} seed {seed}") if several else (lambda method, seed: method)
    names = [label(method, seed) for method in recipe.compare.methods for seed in recipe.compare.seeds]
    with _shown(progress if listener is None else False, names) as show:

        def listeners(method: str, seed: int) -> Listener:
            own = [listener(method, seed) if listener else None, show(label(method, seed))]
            heard = [each for each in own if each is not None]

            def listen(event: Event) -> None:
                for each in heard:
                    each(event)
                if callback is not None and isinstance(event, Progress):
                    callback(_round_done(method, seed, event))

            return listen

        yield listeners


def _round_done(method: str, seed: int, event: Progress) -> RoundDone:
    done = event.round
    return RoundDone(
        method=method,
        seed=seed,
        round=done.number + 1,
        rounds=event.rounds,
        loss=done.loss if math.isfinite(done.loss) else None,
        accuracy=event.accuracy,
        clients=done.clients,
        bytes_up=done.bytes_up,
        bytes_down=done.bytes_down,
        seconds=event.seconds,
    )


@contextlib.contextmanager
def _shown(progress: bool | None, names: Sequence[str]) -> Iterator[Callable[[str], Listener | None]]:
    """Yield what makes the listener of a run that shows how far it is."""
    console = Console(stderr=True, highlight=False)
    if progress is False or (progress is None and not in_notebook() and not console.is_terminal):
        yield lambda name: None
    elif in_notebook():
        yield _Notebook().listener
    else:
        display = Display(console, quiet=False)
        with display.open(names):
            yield display.listener


def in_notebook() -> bool:
    """Say whether this is a kernel of Jupyter, which shows HTML."""
    module = sys.modules.get("IPython")
    shell: Any = None if module is None else module.get_ipython()
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"


class _Notebook:
    """A line per run with a bar, in one output of the cell, which stays there when the notebook is saved."""

    def __init__(self) -> None:
        from IPython.display import HTML, display

        self._html: Any = HTML
        self._lines: dict[str, str] = {}
        self._drawn = 0.0
        self._handle: Any = display(HTML(""), display_id=True)  # type: ignore[no-untyped-call]

    def listener(self, name: str) -> Listener:
        """Return the listener of one run."""

        def listen(event: Event) -> None:
            if isinstance(event, Note):
                if not event.shared and "engine.strategy" in event.text:
                    return  # how clients are trained changes no result; a cell has better use for the room
                words = event.text if event.shared else f"{name} {event.text}"
                self._lines[words] = f"<div>{safe(words)}</div>"
            elif isinstance(event, Progress):
                self._lines[name] = _bar(name, event)
            else:  # for as long as it takes
                self._lines[f"{name} tuning"] = _bar(name, event)
                if _share(event) == 1.0:
                    del self._lines[f"{name} tuning"]
            over = isinstance(event, Note) or _share(event) == 1.0
            if over or time.monotonic() - self._drawn > _SECONDS:
                self._draw()

        return listen

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        style = "font-family:monospace;white-space:pre;line-height:1.5"
        self._handle.update(self._html(f'<div style="{style}">{"".join(self._lines.values())}</div>'))


def _share(event: Progress | Tuning | Trials) -> float:
    if isinstance(event, Progress):
        return (event.round.number + 1) / event.rounds
    return event.done / max(event.clients if isinstance(event, Tuning) else event.trials, 1)


def _bar(name: str, event: Progress | Tuning | Trials) -> str:
    share = _share(event)
    text = (facts(event) if share < 1 else finished(event)) if isinstance(event, Progress) else tuning(event)
    return f'<div><progress value="{share:.3f}" max="1"></progress> {safe(name)}  {safe(text)}</div>'
