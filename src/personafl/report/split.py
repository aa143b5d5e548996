"""The split picture: which classes each client holds, and how many samples."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from personafl.data.describe import sketch
from personafl.data.federated import FederatedData
from personafl.report.figure import WIDE, Figure, View, both
from personafl.report.load import Run
from personafl.report.svg import COLOURS, GREY, document, opened, rect, shortened, text, wide, write_svg

TOP = 22.0  # pixels above the cells


def split_figures(runs: Sequence[Run]) -> list[Figure]:
    """Return the picture of the first seed's split; runs of older versions do not have it."""
    run = next((run for run in runs if "picture" in run.split), None)
    if run is None:
        return []
    picture, unseen = run.split["picture"], set(run.split["unseen"])
    sizes = [run.split["samples"]["train"][client] for client in picture["client"]]
    about = f"{run.split['name']}: {picture['caption']}"
    marked = " Unseen clients are marked ○." if unseen & set(picture["client"]) else ""
    return [
        Figure(
            title="Who holds which classes",
            caption=f"{picture['caption']}, seed {run.seed}: the stronger the colour, the larger the share of the "
            f"client's training labels; right: its training samples.{marked}",
            views=[View(chosen={}, picture=both(partial(_inline, picture, sizes, unseen, about)))],
        )
    ]


def write_split(data: FederatedData, path: Path) -> None:
    """Write the picture of a federated data set as a self-contained SVG file."""
    picture, unseen = sketch(data, 120, 100), set(data.unseen.tolist())
    parts, height = _drawn(picture, data.train.sizes[picture["client"]].tolist(), unseen, WIDE)
    marked = f" · {len(unseen):,} unseen, marked ○" if unseen else ""
    darkest = f"darkest: {np.max(picture['share']):.0%} of a client's training labels"
    subtitle = f"{picture['caption']}{marked} · {darkest} · split {data.fingerprint[:12]}"
    placed = ['<g transform="translate(24 72)">', *parts, "</g>"]
    write_svg(document(data.name, subtitle, WIDE + 48, height + 96, placed), path)


def _inline(picture: dict[str, Any], sizes: Sequence[int], unseen: set[int], about: str, width: float) -> str:
    parts, height = _drawn(picture, sizes, unseen, width)
    return opened(width, height, about) + "".join(parts) + "</svg>"


def _drawn(picture: dict[str, Any], sizes: Sequence[int], unseen: set[int], width: float) -> tuple[list[str], float]:
    """Return what is drawn, and how high it is."""
    share = np.asarray(picture["share"], dtype=np.float64)  # [clients, columns]
    rows, columns = share.shape
    names = [
        shortened(name, 12) + (" ○" if client in unseen else "")
        for name, client in zip(picture["names"], picture["client"], strict=True)
    ]
    left, bars = max(map(wide, names)) + 6, 40.0 if width < 600 else 140.0
    cell, high = min((width - left - bars - 58) / columns, 48.0), 11.0 if rows > 30 else 15.0
    right = left + columns * cell + 12
    parts = [text(left, 12, "class", bold=True), text(right, 12, "samples", bold=True)]
    parts += _sides(names, sizes, left, right, high, bars)
    parts.append(rect("field", left, TOP, columns * cell, rows * high, "#f7f8fa"))
    labels = [*picture["labels"], *[""] * columns][:columns]
    for row, column in zip(*np.nonzero(share), strict=True):
        value = float(share[row, column])
        note = f"client {picture['names'][row]}, class {labels[column]}: {value:.0%}"
        place = left + column * cell, TOP + row * high, max(cell - 1, 0.6), high - 1
        # The root keeps small shares visible.
        parts.append(rect("cell", *place, COLOURS[0], math.sqrt(value / float(share.max())), note))
    parts += _classes([shortened(label, 8) for label in labels], left, TOP + rows * high + 14, cell)
    return parts, TOP + rows * high + 22


def _sides(
    names: Sequence[str], sizes: Sequence[int], left: float, right: float, high: float, bars: float
) -> Iterator[str]:
    """Yield the clients' names on the left and their samples on the right; of low rows every second has words."""
    every, most = 1 if high >= 12 else 2, max(1, *sizes)
    for row, (name, size) in enumerate(zip(names, sizes, strict=True)):
        y, length = TOP + row * high, bars * size / most
        yield rect("size", right, y + 1, length, high - 3, GREY)
        if row % every == 0:
            yield text(left - 6, y + high - 2, name, anchor="end", size=10)
            yield text(right + length + 4, y + high - 2, f"{size:,}", size=10)


def _classes(labels: Sequence[str], left: float, y: float, cell: float) -> Iterator[str]:
    every = max(1, math.ceil((max(map(wide, labels)) + 6) / cell))
    for column in range(0, len(labels), every):
        yield text(left + (column + 0.5) * cell, y, labels[column], anchor="middle", size=10)
