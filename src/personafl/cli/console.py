"""The two consoles: results go to standard output, everything else to standard error."""

import json
from collections.abc import Iterable
from typing import Any

from rich.console import Console, RenderableType

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def print_found(value: Any, parts: Iterable[RenderableType], as_json: bool) -> None:
    """Print what a command found: its value as JSON of the standard, which has no NaN; or tables with their words."""
    if as_json:
        print(json.dumps(value, allow_nan=False))
        return
    for part in parts:
        out.print(part)


def say(text: str) -> None:
    """Print a line of the result as it is, however long."""
    out.print(text, soft_wrap=True, markup=False)


def note(text: str) -> None:
    """Print a line that is no result."""
    err.print(text, soft_wrap=True, markup=False)
