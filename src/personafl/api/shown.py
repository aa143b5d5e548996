"""Results as text and, in a notebook, as a table and a small picture of the curves."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from personafl.errors import BadInput
from personafl.report.curves import sketch
from personafl.report.load import load
from personafl.report.svg import safe
from personafl.report.table import grid, legend, lines, titled, titles

Row = dict[str, Any]
WIDTH = 160  # characters, which no table of ours exceeds
_CELL = "padding:2px 10px;border:none"


def table_text(rows: Sequence[Row], notes: Sequence[str]) -> str:
    """Return the table of results as plain text, as a terminal has it, and notes below."""
    plain: dict[str, Any] = {"color_system": None, "force_terminal": False, "force_jupyter": False}
    console = Console(file=io.StringIO(), width=WIDTH, highlight=False, **plain)
    for title, part in titled(rows) if rows else ():
        console.print(title, markup=False)
        table = grid(*titles(part), texts=("method",))
        for line in lines(part):
            table.add_row(*line.cells)
        console.print(table)
        console.print()
    for note in notes:
        console.print(note, markup=False, soft_wrap=True)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


def table_html(path: Path, rows: Sequence[Row], notes: Sequence[str]) -> str:
    """Return results as a part of a notebook: a table per group of clients, the best bold, and learning curves."""
    parts = []
    for title, part in titled(rows) if rows else ():
        head = "".join(_cell("th", name.replace("\n", " "), place) for place, name in enumerate(titles(part)))
        body = "".join(_line(line.cells, line.best) for line in lines(part))
        table = f'<table style="border-collapse:collapse"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        parts.append(f"<p><b>{safe(title)}</b></p>{table}")
    if picture := _picture(path):
        parts.append(f'<div style="max-width:460px;background:#fff;padding:8px;margin-top:8px">{picture}</div>')
    words = [f"{column}: {text}" for column, text in legend(rows)] if rows else []
    small = "<br>".join(safe(text) for text in [*notes, *words, f"run directory: {path}"])
    return f'<div>{"".join(parts)}<p style="font-size:85%;opacity:.8">{small}</p></div>'


def _line(cells: Sequence[str], best: frozenset[int]) -> str:
    return f"<tr>{''.join(_cell('td', text, at, at in best) for at, text in enumerate(cells))}</tr>"


def _cell(tag: str, text: str, place: int, bold: bool = False) -> str:
    align = "left" if place == 0 else "right"
    words = f"<b>{safe(text)}</b>" if bold else safe(text)
    return f'<{tag} style="{_CELL};text-align:{align}">{words}</{tag}>'


def _picture(path: Path) -> str:
    """Return the curves, if what is in the directory has any."""
    try:
        return sketch([run for source in load([path]) for run in source.runs])
    except (BadInput, OSError):  # the directory is gone; the numbers are here
        return ""
