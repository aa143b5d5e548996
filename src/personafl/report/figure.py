"""Figures of the page: pictures of which a reader sees one at a time, by choices such as per round or per second."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from personafl.report.chart import Chart

WIDE, NARROW, PANEL = 800.0, 350.0, 300.0  # of a desktop, of a phone, of one of several


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a reader can choose: a name, and (value, words) of each option."""

    name: str
    title: str
    options: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, name: str, title: str, words: Mapping[str, str], views: Sequence[View]) -> Choice:
        """Return the choice between those options, in the order of `words`, that some view is seen under."""
        seen = {view.chosen[name] for view in views}
        return cls(name=name, title=title, options=tuple(pair for pair in words.items() if pair[0] in seen))


@dataclass(frozen=True, kw_only=True)
class View:
    """A picture, and the options under which it is seen."""

    chosen: Mapping[str, str]
    picture: Markup


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Views with a title, and what to know to read them."""

    title: str
    caption: str
    views: Sequence[View]
    choices: tuple[Choice, ...] = ()

    @property
    def offered(self) -> tuple[Choice, ...]:
        """The choices of which there is more than one option."""
        return tuple(choice for choice in self.choices if len(choice.options) > 1)


def in_two_widths(chart: Chart, about: str) -> Markup:
    """Return a chart drawn for a desktop and again for a phone: scaled down, its texts could not be read."""
    return both(lambda width: chart.inline(width, 320.0 if width == WIDE else 240.0, about))


def both(drawn: Callable[[float], str]) -> Markup:
    """Return a picture in two widths, of which that of the page decides; it must have escaped what it shows."""
    return Markup(f'<div class="wide">{drawn(WIDE)}</div><div class="narrow">{drawn(NARROW)}</div>')


def panels(charts: Sequence[tuple[str, str, Chart]]) -> Markup:
    """Return small charts side by side, each with a title and a line on it."""
    parts = [
        Markup('<div class="panel"><h4>{}</h4><p>{}</p>{}</div>').format(
            title, line, Markup(chart.inline(PANEL, 210.0, f"{title}: {line}"))
        )
        for title, line, chart in charts
    ]
    return Markup('<div class="panels">{}</div>').format(Markup("").join(parts))
