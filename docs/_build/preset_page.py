"""The list of what `personafl reproduce` can repeat, with the papers' own numbers."""

from __future__ import annotations

from personafl.papers import papers, presets
from personafl.papers.catalog import MEASURES, Paper, Table
from personafl.papers.preset import SIZES

HEAD = """# Presets of `personafl reproduce`

Every table and figure of the four papers, the numbers that it prints, and what it claims. See [Reproduce the papers](../reproduce.md).
"""


def page() -> str:
    """Return the page."""
    parts = [HEAD]
    for paper in papers().values():
        parts.append(f"## {paper.cite}")
        parts += [_entry(paper, name, table) for name, table in paper.tables.items()]
    return "\n\n".join(parts) + "\n"


def _entry(paper: Paper, name: str, table: Table) -> str:
    parts = [f"### `{paper.key}/{name}`", f"{table.title}: {table.where}."]
    if table.setting is None:
        return "\n\n".join([*parts, f"Not made by runs. Instead: {table.instead}."])
    if any(row.paper is not None for row in table.rows):
        cells = [
            f"| {row.name} | {_number(row.paper, row.std)} | {MEASURES[row.measure or table.measure]} |"
            for row in table.rows
        ]
        parts.append("| | paper | measure |\n|---|---:|---|\n" + "\n".join(cells))
    parts.append("Claims: " + "; ".join(table.claims) + ".")
    for size in SIZES:
        (preset,) = presets(paper, [name], size)
        parts.append(f"`--size {size}` (data: `{preset.setting.at(size).dataset}`) differs: {preset.differs}.")
    return "\n\n".join(parts)


def _number(value: float | None, std: float | None) -> str:
    return "–" if value is None else f"{value:.2f}" + ("" if std is None else f" ± {std:.2f}")
