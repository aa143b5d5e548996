"""A page per file of `personafl.algorithms`: its docstring, which has the maths, and the options of its methods."""

from __future__ import annotations

import functools
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from personafl.algorithms import METHODS
from personafl.options import describe

GUIDES = {
    "fedalt": "[Personalize part of a model](../personalize.md)",
    "fedslr": "[Smaller models and messages](../fedslr.md)",
    "quped": "[Quantized models for devices](../quped.md)",
    "fedbcd": "[Several servers](../cloud.md)",
}


@functools.cache
def pages() -> dict[str, tuple[str, str]]:
    """Return name -> (title, text), in the order of the methods."""
    homes: dict[str, list[str]] = defaultdict(list)
    for name, method in METHODS.items():
        homes[method.build.__module__].append(name)
    return {f"methods/{home.rpartition('.')[2]}.md": _page(home, names) for home, names in homes.items()}


def _page(home: str, names: list[str]) -> tuple[str, str]:
    headline, _, rest = (inspect.getdoc(sys.modules[home]) or "").partition("\n")
    title, _, about = headline.partition(": ")
    stem = home.rpartition(".")[2]
    when = _when(names)
    parts = [f"# {title}", f"{about[:1].upper()}{about[1:]}", rest.strip("\n")]
    if when:
        parts.append(f"## When to take it\n\n{when} More: [which method for my problem](../choose.md).")
    if stem in GUIDES:
        parts.append(f"How to use it, with all its options: {GUIDES[stem]}.")
    parts.append("## Options")
    parts += [_options(name, METHODS[name].build) for name in names]
    return title, "\n\n".join(parts) + "\n"


def _options(name: str, build: Callable[..., Any]) -> str:
    own = describe(build)
    listed = "\n".join(f"- `{option}`" for option in _split(own)) if own else "It has none of its own."
    first = (build.__doc__ or "").splitlines()[0]
    return f"### `{name}`\n\n{first} ({METHODS[name].paper})\n\n    personafl run --method {name}\n\n{listed}"


def _split(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for index, sign in enumerate(text):
        depth += (sign in "[{") - (sign in "]}")
        if sign == "," and not depth:
            parts.append(text[start:index].strip())
            start = index + 1
    return [*parts, text[start:].strip()]


def _when(names: list[str]) -> str:
    """Return what docs/methods.md says of the first of them: "take it when"."""
    table = (Path(__file__).parents[1] / "methods.md").read_text()
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and any(f"`{name}`" in cells[0] for name in names):
            when = cells[3].partition(": see [")[0].replace("](", "](../")
            return f"Shared: {cells[1]}. Personal: {cells[2]}. Take it when: {when}."
    return ""
