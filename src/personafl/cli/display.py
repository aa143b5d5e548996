"""What the command line shows while it works: how far a run is, and its warnings."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from personafl.api.display import Display
from personafl.cli.console import err
from personafl.errors import Interrupted
from personafl.storage.rundir import resume_command

if TYPE_CHECKING:
    from personafl.recipe.recipe import Recipe


def displayed(recipe: Recipe, path: Path, quiet: bool, work: Callable[[Any], Any]) -> Any:
    """Run `work(listener of (method, seed))` with a display for the runs of a recipe."""
    several = len(recipe.compare.seeds) > 1
    label = (lambda method, seed: f"{method} seed {seed}") if several else (lambda method, seed: method)
    names = [label(method, seed) for method in recipe.compare.methods for seed in recipe.compare.seeds]
    display = Display(err, quiet)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, also where no round is on
    try:
        with display.open(names), warnings.catch_warnings():
            warnings.showwarning = _warn
            return work(lambda method, seed: display.listener(label(method, seed)))
    except (Interrupted, KeyboardInterrupt) as error:  # it names the run that was on; what to continue is the whole
        when = str(error).partition(";")[0] or "stopped at once"
        if not path.exists():
            raise Interrupted(f"{when}; nothing was written") from error
        raise Interrupted(f"{when}; continue with: {resume_command(path)}") from error
    finally:
        signal.signal(signal.SIGTERM, before)


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    err.print(Text.assemble(("warning: ", "bold yellow"), str(message)), soft_wrap=True)
