"""Tables of the page whose lines become cards where they would not fit: each cell carries the title of its column."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

NONE = "–"  # in a cell that has no value; a card leaves it out


@dataclass(frozen=True)
class Cell:
    """What a cell shows, and its class in the style sheet."""

    text: str
    look: str


def cells(about: str, titles: Sequence[str], lines: Sequence[Sequence[str | Cell]]) -> Markup:
    """Return a table; the first cell of a line is its title. What is no Markup is escaped."""
    head = Markup("").join(Markup('<th scope="col">{}</th>').format(title) for title in titles)
    body = Markup("").join(
        Markup("<tr>{}</tr>\n").format(
            Markup("").join(_cell(at, title.replace("\n", " "), cell) for at, (title, cell) in enumerate(pairs))
        )
        for pairs in (list(zip(titles, line, strict=True)) for line in lines)
    )
    return Markup(
        '<div class="scroll" tabindex="0" role="region" aria-label="{}"><table class="cells">'
        "<thead><tr>{}</tr></thead>\n<tbody>{}</tbody></table></div>"
    ).format(about, head, body)


def _cell(at: int, title: str, cell: str | Cell) -> Markup:
    if at == 0:
        return Markup('<th scope="row">{}</th>').format(cell.text if isinstance(cell, Cell) else cell)
    if isinstance(cell, Cell):
        return Markup('<td class="{}" data-label="{}">{}</td>').format(cell.look, title, cell.text)
    empty = Markup(' class="none"') if cell == NONE else ""
    return Markup('<td{} data-label="{}">{}</td>').format(empty, title, cell)
