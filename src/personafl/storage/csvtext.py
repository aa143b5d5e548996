"""Tables as CSV, with texts from elsewhere that no spreadsheet takes for formulas."""

import csv
import io
from collections.abc import Iterable
from typing import Any

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """Return rows, the first of them names of columns, as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([cell(value) for value in row] for row in rows)
    return text.getvalue()


def cell(value: Any) -> Any:
    """Return what stands for a value: a text that begins like a formula is marked as text, by an apostrophe before it.

    Names of clients and classes come from data files and from other machines, and `=HYPERLINK(…)` may be one. Numbers,
    also those below zero and those that are written as text, stay as they are.
    """
    if not isinstance(value, str):
        return value
    marked = f"'{value}" if value.startswith(_FORMULA) and not _is_number(value) else value
    return marked.replace("\r", "\\r") if "\r" in marked else marked  # else a new line begins there, unquoted


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
