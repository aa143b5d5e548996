"""Line and scatter charts as self-contained SVG files, with the look of the other pictures, or as part of a page.

On a page the style sheet colours what has a class, so that dark mode and print need no other chart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from personafl.report.svg import COLOURS, document, opened, safe, wide, write_svg
from personafl.report.ticks import Axis, linear_axis, log_axis

MARGIN = 24.0
SHAPES = ("circle", "square", "triangle", "diamond", "ring")
SWATCH, GAP, ROW = 30.0, 18.0, 20.0  # of the legend


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points with a name, in the order in which a line joins them; those that are not finite are left out."""

    label: str  # in the legend; empty: not there
    x: Sequence[float]
    y: Sequence[float]
    error: Sequence[float] | None = None  # half the length of each error bar
    band: bool = False  # a band along the line in place of error bars
    line: bool = True
    dashed: bool = False
    markers: bool = True
    notes: Sequence[str] | None = None  # on each point; None: its numbers
    areas: Sequence[float] | None = None  # of each point's marker; None: 1
    style: int | None = None  # which colour and shape; None: by its place among the series

    @property
    def points(self) -> list[tuple[float, float, float]]:
        """The points to draw: x, y and half the length of the error bar."""
        return [(x, y, e) for x, y, e, _, _ in self.marks]

    @property
    def marks(self) -> list[tuple[float, float, float, str, float]]:
        """The points to draw, what is to be said of each (nothing: its numbers), and the areas of their markers."""
        count = len(self.x)
        also = self.error or [0.0] * count, self.notes or [""] * count, self.areas or [1.0] * count
        return [row for row in zip(self.x, self.y, *also, strict=True) if all(map(math.isfinite, row[:3]))]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What a chart shows; equal charts make equal files."""

    title: str
    subtitle: str = ""
    x_title: str
    y_title: str
    series: Sequence[Series]
    log_x: bool = False
    also: Sequence[tuple[float, float]] = ()  # points that the axes reach to, as those of the charts beside it

    def svg(self) -> str:
        """Return the chart as the text of an SVG file."""
        layout = _Layout(width=720.0, plot=320.0, head=64.0 if self.subtitle else 46.0)
        frame = _framed(self, layout)
        return document(self.title, self.subtitle, layout.width, frame.bottom + 62, self._drawn(layout, frame))

    def inline(self, width: float, plot: float, about: str) -> str:
        """Return the chart as part of a page, which has its titles; `about` says what it shows to who cannot see it."""
        layout = _Layout(width=width, plot=plot, head=0.0, margin=2.0, most=8 if width >= 600 else 5, font=12.0)
        frame = _framed(self, layout)
        return opened(width, frame.bottom + 46, about) + "".join(self._drawn(layout, frame)) + "</svg>"

    def _drawn(self, layout: _Layout, frame: _Frame) -> list[str]:
        return [*_axes(self, layout, frame), *_legend(self, layout), *_curves(self, frame)]


def write_chart(chart: Chart, path: Path) -> None:
    """Write a chart as a self-contained SVG file."""
    write_svg(chart.svg(), path)


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """How much room there is, in pixels."""

    width: float
    plot: float  # the plot's height
    head: float  # the titles' height
    margin: float = MARGIN
    most: int = 8  # values marked on the x-axis
    font: float = 11.0

    def wide(self, words: str) -> float:
        """Return the width of a text."""
        return wide(words) * self.font / 11.0


@dataclass(frozen=True)
class _Frame:
    """The rectangle of the plot in pixels, and its axes."""

    left: float
    right: float
    top: float
    bottom: float
    x: Axis
    y: Axis

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the pixel of a point."""
        across, up = self.x.place(x), self.y.place(y)
        return self.left + across * (self.right - self.left), self.bottom - up * (self.bottom - self.top)


def _framed(chart: Chart, layout: _Layout) -> _Frame:
    points = [point for series in chart.series for point in series.points]
    if not points:
        raise ValueError("a chart needs a point")
    across = [x for x, _, _ in points] + [x for x, _ in chart.also]
    if chart.log_x and min(across) <= 0:
        raise ValueError(f"x = {min(across):g} cannot be shown on a logarithmic axis")
    x = log_axis(across, layout.most) if chart.log_x else linear_axis(across, layout.most)
    if all(float(value).is_integer() for value in across):  # as of rounds, of which there is no half
        x = replace(x, ticks=tuple(tick for tick in x.ticks if float(tick).is_integer()) or x.ticks)
    y = linear_axis([end for _, y, e in points for end in (y - e, y + e)] + [y for _, y in chart.also])
    left = layout.margin + max(map(layout.wide, y.labels)) + 8
    rows = max((row + 1 for _, _, row in _entries(chart, layout)), default=0)
    top = layout.head + ROW * rows + (34 if rows else 22)
    return _Frame(
        left, layout.width - max(layout.margin, layout.wide(x.labels[-1]) / 2) - 8, top, top + layout.plot, x, y
    )


def _axes(chart: Chart, layout: _Layout, frame: _Frame) -> Iterator[str]:
    bottom, left, right = frame.bottom, frame.left, frame.right
    for value, label in zip(frame.y.ticks, frame.y.labels, strict=True):
        y = frame.at(frame.x.low, value)[1]
        yield f'<path class="grid" d="M{left:.1f} {y:.1f}H{right:.1f}" stroke="#e4e7eb"/>'
        yield f'<text class="y-tick" x="{left - 8:.1f}" y="{y + 3.5:.1f}" text-anchor="end">{label}</text>'
    for value, label in zip(frame.x.ticks, frame.x.labels, strict=True):
        x = frame.at(value, frame.y.low)[0]
        yield f'<path class="axis" d="M{x:.1f} {bottom:.1f}v5" stroke="#8a8f98"/>'
        yield f'<text class="x-tick" x="{x:.1f}" y="{bottom + 18:.1f}" text-anchor="middle">{label}</text>'
    yield f'<path class="axis" d="M{left:.1f} {bottom:.1f}H{right:.1f}" stroke="#8a8f98"/>'
    yield f'<text x="{layout.margin:g}" y="{frame.top - 14:.1f}" font-weight="600">{safe(chart.y_title)}</text>'
    middle = (left + right) / 2
    title = safe(chart.x_title)
    yield f'<text x="{middle:.1f}" y="{bottom + 42:.1f}" text-anchor="middle" font-weight="600">{title}</text>'


def _legend(chart: Chart, layout: _Layout) -> Iterator[str]:
    """Draw what is what in rows above the plot, where there are no data."""
    named = [(number, series) for number, series in _numbered(chart) if series.label]
    for (number, series), (left, _, row) in zip(named, _entries(chart, layout), strict=True):
        y = layout.head + 10 + ROW * row
        yield f'<g class="key" data-series="{number}">'
        yield from _line(series, number, [(left, y), (left + SWATCH - 8, y)])
        if series.markers:
            yield _marker(number, left + (SWATCH - 8) / 2, y)
        yield f'<text class="legend" x="{left + SWATCH:.1f}" y="{y + 3.5:.1f}">{safe(series.label)}</text></g>'


def _numbered(chart: Chart) -> Iterator[tuple[int, Series]]:
    for place, series in enumerate(chart.series):
        yield place if series.style is None else series.style, series


def _entries(chart: Chart, layout: _Layout) -> list[tuple[float, float, int]]:
    """Return where each entry of the legend begins and ends, and its row; one that does not fit begins a new row."""
    entries, left, row = [], layout.margin, 0
    for label in (series.label for series in chart.series if series.label):
        right = left + SWATCH + layout.wide(label)
        if right > layout.width - layout.margin and left > layout.margin:
            left, right, row = layout.margin, layout.margin + right - left, row + 1
        entries.append((left, right, row))
        left = right + GAP
    return entries


def _curves(chart: Chart, frame: _Frame) -> Iterator[str]:
    for number, series in _numbered(chart):
        pixels = [frame.at(x, y) for x, y, _ in series.points]
        yield f'<g class="series" data-series="{number}">'
        yield from _band(series, number, frame) if series.band else _bars(series, number, frame)
        yield from _line(series, number, pixels)
        if series.markers:
            for (x, y, error, note, area), (across, down) in zip(series.marks, pixels, strict=True):
                spread = f" ± {error:.3g}" if series.error else ""
                yield _marker(number, across, down, note or f"{series.label}: {x:,.4g}, {y:.4g}{spread}", area)
        yield "</g>"


def _band(series: Series, number: int, frame: _Frame) -> Iterator[str]:
    """Draw the error as an area around the line."""
    points = series.points
    if series.error is None or not any(pairwise(points)):
        return
    edge = [frame.at(x, y + e) for x, y, e in points] + [frame.at(x, y - e) for x, y, e in reversed(points)]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in edge) + "z"
    yield f'<path class="band" d="{path}" fill="{_colour(number)}" fill-opacity="0.14"/>'


def _bars(series: Series, number: int, frame: _Frame) -> Iterator[str]:
    for x, y, error in series.points if series.error else ():
        (across, low), (_, high) = frame.at(x, y - error), frame.at(x, y + error)
        caps = "".join(f"M{across - 3:.1f} {end:.1f}h6" for end in (low, high))
        path = f"M{across:.1f} {low:.1f}V{high:.1f}{caps}"
        yield f'<path class="error" d="{path}" stroke="{_colour(number)}" stroke-opacity="0.6" fill="none"/>'


def _line(series: Series, number: int, pixels: list[tuple[float, float]]) -> Iterator[str]:
    if series.line and any(pairwise(pixels)):
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in pixels)
        dashes = ' stroke-dasharray="5 4"' if series.dashed else ""
        style = f'stroke="{_colour(number)}" stroke-width="2" stroke-linejoin="round"{dashes}'
        yield f'<path class="line" d="{path}" {style} fill="none"/>'


def _marker(number: int, x: float, y: float, note: str = "", area: float = 1.0) -> str:
    shape, size = SHAPES[number % len(SHAPES)], math.sqrt(area)
    # All shapes cover about the same area.
    r, half, side, tip = (length * size for length in (3.6, 3.2, 4.3, 4.6))
    round_ = f"M{x - r:.1f} {y:.1f}a{r:.1f} {r:.1f} 0 1 0 {2 * r:.1f} 0a{r:.1f} {r:.1f} 0 1 0 {-2 * r:.1f} 0z"
    outline = {
        "circle": round_,
        "ring": round_,
        "square": f"M{x - half:.1f} {y - half:.1f}h{2 * half:.1f}v{2 * half:.1f}h{-2 * half:.1f}z",
        "triangle": f"M{x:.1f} {y - tip:.1f}l{side:.1f} {7.6 * size:.1f}h{-2 * side:.1f}z",
        "diamond": f"M{x:.1f} {y - tip:.1f}l{tip:.1f} {tip:.1f}l{-tip:.1f} {tip:.1f}l{-tip:.1f} {-tip:.1f}z",
    }[shape]
    fill, edge = (_colour(number), "#fff") if shape != "ring" else ("#fff", _colour(number))
    title = f"<title>{safe(note)}</title>" if note else ""
    where = f'data-x="{x:.2f}" data-y="{y:.2f}"'
    return f'<path class="marker" {where} d="{outline}" fill="{fill}" stroke="{edge}">{title}</path>'


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]
