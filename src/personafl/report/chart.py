"""Line and scatter charts as self-contained SVG files, with the look of the other pictures."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

from personafl.errors import StorageFailed
from personafl.report.ticks import Axis, linear_axis, log_axis

__all__ = ["Chart", "Series", "write_chart"]

WIDTH, PLOT_HEIGHT, MARGIN = 720.0, 320.0, 24.0
# Told apart without colour vision by lightness, and by the shape of the marker.
COLOURS = ("#315a94", "#d9822b", "#2a8c6a", "#a3367a", "#0a2452", "#7494c4", "#8a5a14", "#6b7280")
SHAPES = ("circle", "square", "triangle", "diamond", "ring")
SWATCH, GAP, ROW = 30.0, 18.0, 20.0  # of the legend


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points with a name, in the order in which a line joins them; those that are not finite are left out."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    error: Sequence[float] | None = None  # half the length of each error bar
    line: bool = True
    dashed: bool = False
    markers: bool = True

    @property
    def points(self) -> list[tuple[float, float, float]]:
        """The points to draw: x, y and half the length of the error bar."""
        rows = zip(self.x, self.y, self.error or [0.0] * len(self.x), strict=True)
        return [(x, y, e) for x, y, e in rows if math.isfinite(x) and math.isfinite(y) and math.isfinite(e)]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What a chart shows; equal charts make equal files."""

    title: str
    subtitle: str = ""
    x_title: str
    y_title: str
    series: Sequence[Series]
    log_x: bool = False

    @property
    def head(self) -> float:
        """The height of the titles in pixels."""
        return 64.0 if self.subtitle else 46.0

    def svg(self) -> str:
        """Return the chart as the text of an SVG file."""
        frame = _framed(self)
        width, height = WIDTH, frame.bottom + 62
        parts = [f'<text x="{MARGIN:g}" y="52" fill="#555">{_safe(self.subtitle)}</text>'] if self.subtitle else []
        parts += [*_axes(self, frame), *_legend(self), *_curves(self, frame)]
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
            f'height="{height:.0f}" role="img" font-family="system-ui, sans-serif" font-size="11" fill="#333">\n'
            f"<title>{_safe(self.title)}</title>\n"
            f'<rect width="100%" height="100%" fill="#fff"/>\n'
            f'<text x="{MARGIN:g}" y="32" font-size="18" font-weight="600" fill="#111">{_safe(self.title)}</text>\n'
            + "\n".join(parts)
            + "\n</svg>\n"
        )


def write_chart(chart: Chart, path: Path) -> None:
    """Write a chart as a self-contained SVG file."""
    try:
        path.write_text(chart.svg(), encoding="utf-8")
    except OSError as error:
        raise StorageFailed(f"{path}: cannot write the chart ({error.strerror}); choose another path") from None


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


def _framed(chart: Chart) -> _Frame:
    points = [point for series in chart.series for point in series.points]
    if not points:
        raise ValueError("a chart needs a point")
    across = [x for x, _, _ in points]
    if chart.log_x and min(across) <= 0:
        raise ValueError(f"x = {min(across):g} cannot be shown on a logarithmic axis")
    x = log_axis(across) if chart.log_x else linear_axis(across)
    y = linear_axis([end for _, y, e in points for end in (y - e, y + e)])
    left = MARGIN + max(map(_wide, y.labels)) + 8
    top = chart.head + ROW * (1 + max(row for _, _, row in _entries(chart))) + 34
    return _Frame(left, WIDTH - MARGIN - 8, top, top + PLOT_HEIGHT, x, y)


def _axes(chart: Chart, frame: _Frame) -> Iterator[str]:
    bottom, left, right = frame.bottom, frame.left, frame.right
    for value, label in zip(frame.y.ticks, frame.y.labels, strict=True):
        y = frame.at(frame.x.low, value)[1]
        yield f'<path d="M{left:.1f} {y:.1f}H{right:.1f}" stroke="#e4e7eb"/>'
        yield f'<text class="y-tick" x="{left - 8:.1f}" y="{y + 3.5:.1f}" text-anchor="end">{label}</text>'
    for value, label in zip(frame.x.ticks, frame.x.labels, strict=True):
        x = frame.at(value, frame.y.low)[0]
        yield f'<path d="M{x:.1f} {bottom:.1f}v5" stroke="#8a8f98"/>'
        yield f'<text class="x-tick" x="{x:.1f}" y="{bottom + 18:.1f}" text-anchor="middle">{label}</text>'
    yield f'<path d="M{left:.1f} {bottom:.1f}H{right:.1f}" stroke="#8a8f98"/>'
    yield f'<text x="{MARGIN:g}" y="{frame.top - 14:.1f}" font-weight="600">{_safe(chart.y_title)}</text>'
    middle = (left + right) / 2
    title = _safe(chart.x_title)
    yield f'<text x="{middle:.1f}" y="{bottom + 42:.1f}" text-anchor="middle" font-weight="600">{title}</text>'


def _legend(chart: Chart) -> Iterator[str]:
    """Draw what is what in rows above the plot, where there are no data."""
    for number, (series, (left, _, row)) in enumerate(zip(chart.series, _entries(chart), strict=True)):
        y = chart.head + 10 + ROW * row
        swatch = [(left, y), (left + SWATCH - 8, y)]
        yield from _line(series, number, swatch)
        if series.markers:
            yield _marker(number, left + (SWATCH - 8) / 2, y)
        yield f'<text class="legend" x="{left + SWATCH:.1f}" y="{y + 3.5:.1f}">{_safe(series.label)}</text>'


def _entries(chart: Chart) -> list[tuple[float, float, int]]:
    """Return where each entry of the legend begins and ends, and its row; one that does not fit begins a new row."""
    entries, left, row = [], MARGIN, 0
    for series in chart.series:
        right = left + SWATCH + _wide(series.label)
        if right > WIDTH - MARGIN and left > MARGIN:
            left, right, row = MARGIN, MARGIN + right - left, row + 1
        entries.append((left, right, row))
        left = right + GAP
    return entries


def _curves(chart: Chart, frame: _Frame) -> Iterator[str]:
    for number, series in enumerate(chart.series):
        pixels = [frame.at(x, y) for x, y, _ in series.points]
        yield '<g class="series">'
        yield from _bars(series, number, frame)
        yield from _line(series, number, pixels)
        if series.markers:
            for (x, y, error), (across, down) in zip(series.points, pixels, strict=True):
                spread = f" ± {error:.3g}" if series.error else ""
                yield _marker(number, across, down, f"{series.label}: {x:g}, {y:.4g}{spread}")
        yield "</g>"


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


def _marker(number: int, x: float, y: float, note: str = "") -> str:
    shape = SHAPES[number % len(SHAPES)]
    # All shapes cover about the same area.
    outline = {
        "circle": f"M{x - 3.6:.1f} {y:.1f}a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0 -7.2 0z",
        "ring": f"M{x - 3.6:.1f} {y:.1f}a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0 -7.2 0z",
        "square": f"M{x - 3.2:.1f} {y - 3.2:.1f}h6.4v6.4h-6.4z",
        "triangle": f"M{x:.1f} {y - 4.6:.1f}l4.3 7.6h-8.6z",
        "diamond": f"M{x:.1f} {y - 4.6:.1f}l4.6 4.6l-4.6 4.6l-4.6 -4.6z",
    }[shape]
    fill, edge = (_colour(number), "#fff") if shape != "ring" else ("#fff", _colour(number))
    title = f"<title>{_safe(note)}</title>" if note else ""
    where = f'data-x="{x:.2f}" data-y="{y:.2f}"'
    return f'<path class="marker" {where} d="{outline}" fill="{fill}" stroke="{edge}">{title}</path>'


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _safe(text: str) -> str:
    """Escape what XML would read, and replace what it may not hold."""
    return escape("".join(character if character.isprintable() else "?" for character in text))


def _wide(text: str) -> float:
    """Return the width of a text in pixels, rather too much than too little: there is no font to measure it by."""
    return sum(12.0 if unicodedata.east_asian_width(c) in "WF" else 6.6 for c in text)
