"""Pictures with a row per method: how something is spread over clients, as violins or as boxes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from personafl.report.svg import COLOURS, GREY, opened, rect, safe, text
from personafl.report.ticks import Axis, linear_axis

Reals = NDArray[np.float64]
ROW, LABEL, EDGE = 58.0, 18.0, 14.0  # pixels: a row, the label above its picture, free on both sides
DOTS = 1500  # in all rows


@dataclass(frozen=True, kw_only=True)
class Violin:
    """Values of clients under a label, and what is said of each."""

    label: str
    values: Sequence[float]
    notes: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Box:
    """Quantiles over clients from the lowest to the highest (min, 10, 25, 50, 75, 90 %, max), and two means."""

    label: str
    quantiles: Sequence[float]
    mean: float
    worst: float  # of the worst decile


def violins(rows: Sequence[Violin], x_title: str, about: str, width: float) -> str:
    """Draw a violin and its points per row, with a line at 0: left of it is worse."""
    axis = linear_axis([0.0, *(value for row in rows for value in row.values)], _most(width))
    zero = f'<path class="zero" d="M{_place(axis, 0.0, width):.1f} 0V{len(rows) * ROW:.1f}" stroke="#8a8f98"/>'
    parts = [*_axis(axis, len(rows), x_title, width), zero]
    for number, row in enumerate(rows):
        middle = _middle(number)
        parts.append(_label(row.label, number))
        parts += _outline(row.values, axis, middle, width)
        parts += _dots(row, axis, middle, width, min(200, DOTS // len(rows)))
        at = _place(axis, float(np.median(row.values)), width)
        parts.append(f'<path class="median" d="M{at:.1f} {middle - 11:.1f}v22" stroke="#111" stroke-width="2"/>')
    return opened(width, _height(len(rows)), about) + "".join(parts) + "</svg>"


def boxes(rows: Sequence[Box], x_title: str, about: str, width: float) -> str:
    """Draw per row the range of clients, 80 % and the middle half of them, median, mean and worst decile."""
    axis = linear_axis([value for row in rows for value in (*row.quantiles, row.worst)], _most(width))
    parts = [*_axis(axis, len(rows), x_title, width)]
    for number, row in enumerate(rows):
        y = _middle(number)
        low, tenth, first, median, third, ninth, high, mean, worst = (
            _place(axis, value, width) for value in (*row.quantiles, row.mean, row.worst)
        )
        parts.append(_label(row.label, number))
        parts.append(f'<path class="axis" d="M{low:.1f} {y:.1f}H{high:.1f}" stroke="#8a8f98"/>')
        for left, right, half, share in ((tenth, ninth, 6, 0.25), (first, third, 9, 0.45)):
            parts.append(rect("box", left, y - half, max(right - left, 1), 2 * half, COLOURS[0], share))
        parts.append(f'<path class="median" d="M{median:.1f} {y - 10:.1f}v20" stroke="#111" stroke-width="2"/>')
        note = f"{row.label}: mean {row.mean:.1f} %"
        parts.append(
            f'<path class="marker mean" d="M{mean:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z" fill="#111" stroke="#fff">'
            f"<title>{safe(note)}</title></path>"
        )
        note = f"{row.label}: worst decile {row.worst:.1f} %"
        parts.append(
            f'<circle class="marker worst" cx="{worst:.1f}" cy="{y:.1f}" r="5" fill="{COLOURS[1]}" stroke="#fff">'
            f"<title>{safe(note)}</title></circle>"
        )
    return opened(width, _height(len(rows)), about) + "".join(parts) + "</svg>"


def _most(width: float) -> int:
    return 9 if width >= 600 else 5


def _place(axis: Axis, value: float, width: float) -> float:
    return EDGE + axis.place(value) * (width - 2 * EDGE)


def _middle(row: int) -> float:
    return row * ROW + LABEL + (ROW - LABEL) / 2


def _height(rows: int) -> float:
    return rows * ROW + 46


def _label(words: str, row: int) -> str:
    return text(2, row * ROW + 13, words, bold=True)


def _axis(axis: Axis, rows: int, x_title: str, width: float) -> Iterator[str]:
    bottom = rows * ROW
    for value, label in zip(axis.ticks, axis.labels, strict=True):
        x = _place(axis, value, width)
        yield f'<path class="grid" d="M{x:.1f} 0V{bottom:.1f}" stroke="#e4e7eb"/>'
        yield f'<text class="x-tick" x="{x:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{label}</text>'
    yield f'<path class="axis" d="M{EDGE} {bottom:.1f}H{width - EDGE:.1f}" stroke="#8a8f98"/>'
    yield text(width / 2, bottom + 38, x_title, anchor="middle", bold=True)


def _outline(values: Sequence[float], axis: Axis, middle: float, width: float) -> Iterator[str]:
    """Draw the density of values; of fewer than five, or of one value alone, there is none."""
    if len(values) < 5 or np.ptp(values) < 1e-9:
        return
    places = np.linspace(min(values), max(values), 60)
    curve = density(np.asarray(values, dtype=np.float64), places)
    half = 17 * curve / curve.max()
    across = [_place(axis, float(value), width) for value in places]
    above = [f"{x:.1f} {middle - h:.1f}" for x, h in zip(across, half, strict=True)]
    below = [f"{x:.1f} {middle + h:.1f}" for x, h in zip(across, half, strict=True)]
    path = "M" + "L".join([*above, *reversed(below)]) + "z"
    yield f'<path class="violin" d="{path}" fill="{COLOURS[0]}" fill-opacity="0.18"/>'


def density(values: Reals, places: Reals) -> Reals:
    """Return the Gaussian kernel density, by Scott's rule, but for a factor; scipy.stats takes seconds to import."""
    width = values.std(ddof=1) * len(values) ** -0.2
    kernel: Reals = np.exp(-0.5 * ((places[:, None] - values) / width) ** 2).sum(axis=1)
    return kernel


def _dots(row: Violin, axis: Axis, middle: float, width: float, most: int) -> Iterator[str]:
    """Draw the values side by side in a narrow strip, those below 0 in another colour and shape."""
    order = np.argsort(row.values, kind="stable")
    shown = order[np.linspace(0, len(order) - 1, min(most, len(order))).round().astype(int)]
    for turn, which in enumerate(shown.tolist()):
        value, note = row.values[which], row.notes[which]
        x, y = _place(axis, value, width), middle + ((turn * 7) % 11 - 5)
        if value < 0:
            yield rect("dot worse", x - 2.6, y - 2.6, 5.2, 5.2, COLOURS[1], note=note)
        else:
            kind, colour = ("better", COLOURS[0]) if value else ("same", GREY)
            circle = f'<circle class="dot {kind}" cx="{x:.1f}" cy="{y:.1f}" r="2.8" fill="{colour}">'
            yield f"{circle}<title>{safe(note)}</title></circle>"
