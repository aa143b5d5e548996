"""Show a federated data set: a summary and the clients × classes picture, in the terminal or as SVG."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from personafl.data.federated import FederatedData
from personafl.errors import StorageFailed

Reals = NDArray[np.float64]
SHADES = " ░▒▓█"
TERMINAL_ROWS = 30
PICTURE_ROWS = 120
SKETCH_ROWS, SKETCH_COLUMNS = 60, 50
# One hue from white to dark blue, falling evenly in lightness: readable without colour vision.
STOPS = np.array([[247, 248, 250], [190, 205, 228], [116, 148, 196], [49, 90, 148], [10, 36, 82]], dtype=np.float64)


@dataclass(frozen=True)
class _Shares:
    """Label shares of the clients shown, [shown, columns] in [0, 1], rows summing to one."""

    client: NDArray[np.int64]  # the client number of each row
    share: Reals
    per_column: int  # classes joined in one column
    top: float  # the share drawn darkest: the largest one rounded up, at least twice that of a uniform mix


def describe(data: FederatedData, console: Console) -> None:
    """Print what the data are and who holds which classes."""
    console.print(_summary(data))
    for note in data.notes:
        console.print(f"note: {note}", style="yellow", highlight=False, markup=False)
    columns = max(10, console.width - 24)
    shares = _shares(data, TERMINAL_ROWS, columns)
    console.print()
    console.print(_caption(data, shares), highlight=False)
    width = max(1, min(4, columns // shares.share.shape[1]))
    names = [data.client_names[client] for client in shares.client]
    margin = min(16, max(len(name) for name in names))
    if shares.per_column == 1 and width >= 2:
        console.print(Text(" " * (margin + 2) + "".join(f"{c:<{width}}" for c in range(data.classes)), style="dim"))
    level = np.ceil(shares.share / shares.top * (len(SHADES) - 1) - 1e-9).astype(int)
    sizes = data.train.sizes
    unseen = set(data.unseen.tolist())
    for name, client, row in zip(names, shares.client, level, strict=True):
        line = Text(f"{_short(name, margin):>{margin}} ", style="dim")
        line.append("│" + "".join(SHADES[cell] * width for cell in row) + "│", style="bold blue")
        line.append(f" {sizes[client]}" + (" unseen" if client in unseen else ""), style="dim")
        console.print(line, no_wrap=True, overflow="crop", highlight=False)
    steps = "  ".join(f"{shade} to {shares.top * (i + 1) / 4:.0%}" for i, shade in enumerate(SHADES[1:]))
    console.print(Text(f"label share: {steps}; right: samples", style="dim"))


def picture(data: FederatedData, path: Path) -> None:
    """Write the clients × classes picture as a self-contained SVG file."""
    try:
        path.write_text(_svg(data), encoding="utf-8")
    except OSError as error:
        raise StorageFailed(f"{path}: cannot write the picture ({error.strerror}); choose another path") from None


def sketch(data: FederatedData) -> dict[str, Any]:
    """Return what a small picture of clients × classes needs, as plain values: the picture outlives the data."""
    shares = _shares(data, SKETCH_ROWS, SKETCH_COLUMNS)
    return {
        "caption": _caption(data, shares),
        "client": shares.client.tolist(),
        "names": [_short(data.client_names[client], 40) for client in shares.client],
        "labels": [_short(name, 40) for name in data.label_names[:: shares.per_column]],
        "share": shares.share.round(4).tolist(),
    }


def _summary(data: FederatedData) -> Table:
    sizes = data.train.sizes
    kind = "tokens" if data.vocabulary else "×".join(str(n) for n in data.x.shape[1:])
    used = sum(len(data.rows(split).flat) for split in ("train", "validation", "test"))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    rows = {
        "data": f"{data.name}, {len(data.x):,} samples of {kind}, {used:,} dealt",
        "clients": f"{data.clients:,} ({len(data.seen):,} seen, {len(data.unseen):,} unseen)",
        "classes": f"{data.classes:,}",
        "train": f"{sizes.sum():,}, per client min {sizes.min()}, median {np.median(sizes):g}, max {sizes.max()}",
        "validation": f"{len(data.validation.flat):,}",
        "test": f"{len(data.test.flat):,}",
        "fingerprint": data.fingerprint[:16],
    }
    for key, value in rows.items():
        table.add_row(key, Text(value))
    return table


def _shares(data: FederatedData, rows: int, columns: int) -> _Shares:
    """Label shares of evenly spaced clients, ordered by their main class so that the structure shows."""
    counts = data.counts("train")
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    order = np.lexsort((-share.max(axis=1), share.argmax(axis=1)))
    shown = order[np.linspace(0, len(order) - 1, min(rows, len(order))).round().astype(int)]
    per_column = -(-data.classes // columns)
    edges = np.arange(0, data.classes, per_column)
    joined = np.add.reduceat(share[shown], edges, axis=1)
    return _Shares(
        shown, joined, per_column, max(float(np.ceil(joined.max() * 20 - 1e-9) / 20), min(1.0, 2 / joined.shape[1]))
    )


def _caption(data: FederatedData, shares: _Shares) -> str:
    shown = len(shares.client)
    clients = f"{shown} of {data.clients:,} clients" if shown < data.clients else f"{shown} clients"
    joined = f", {shares.per_column} classes to a column" if shares.per_column > 1 else ""
    return f"{clients} × {data.classes:,} classes, ordered by main class{joined}"


def _short(name: str, width: int) -> str:
    name = "".join(character if character.isprintable() else "?" for character in name)
    return name if len(name) <= width else name[: width - 1] + "…"


def _colour(share: float) -> str:
    """Colour a share of the darkest one."""
    place = np.sqrt(np.clip(share, 0, 1)) * (len(STOPS) - 1)  # the root keeps small shares visible
    low = min(int(place), len(STOPS) - 2)
    red, green, blue = (STOPS[low] + (place - low) * (STOPS[low + 1] - STOPS[low])).round().astype(int)
    return f"#{red:02x}{green:02x}{blue:02x}"


def _svg(data: FederatedData) -> str:
    shares = _shares(data, PICTURE_ROWS, 100)
    rows, columns = shares.share.shape
    cell_w = float(np.clip(720 / columns, 7, 44))
    cell_h = float(np.clip(640 / rows, 5, 22))
    left, top, bars = 132.0, 84.0, 120.0
    wide, high = columns * cell_w, rows * cell_h
    width, height = max(left + wide + bars + 50, 620), top + high + 124
    part: list[str] = []
    _cells(part, data, shares, left, top, cell_w, cell_h)
    _client_names(part, data, shares, left, top, cell_h)
    _class_names(part, data, shares, left, top + high, cell_w)
    _sizes(part, data, shares, left + wide + 18, top, cell_h, bars)
    _legend(part, left, height - 40, shares.top)
    title = f"{data.name}: who holds which classes"
    unseen = f" · {len(data.unseen):,} unseen, marked ○" if len(data.unseen) else ""
    sub = f"{_caption(data, shares)}{unseen} · split {data.fingerprint[:12]}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img" font-family="system-ui, sans-serif" font-size="11" fill="#333">\n'
        f"<title>{escape(title)}</title>\n"
        f'<rect width="100%" height="100%" fill="#fff"/>\n'
        f'<text x="24" y="32" font-size="18" font-weight="600" fill="#111">{escape(title)}</text>\n'
        f'<text x="24" y="52" fill="#555">{escape(sub)}</text>\n' + "\n".join(part) + "\n</svg>\n"
    )


def _cells(part: list[str], data: FederatedData, shares: _Shares, left: float, top: float, w: float, h: float) -> None:
    rows, columns = shares.share.shape
    gap = 1.0 if min(w, h) >= 7 else 0.4
    part.append(f'<rect x="{left}" y="{top}" width="{columns * w:.1f}" height="{rows * h:.1f}" fill="{_colour(0)}"/>')
    for row, column in zip(*np.nonzero(shares.share), strict=True):
        share = float(shares.share[row, column])
        name = escape(_short(data.client_names[shares.client[row]], 40))
        label = escape(_short(data.label_names[column * shares.per_column], 40))
        part.append(
            f'<rect x="{left + column * w:.1f}" y="{top + row * h:.1f}" width="{w - gap:.1f}" height="{h - gap:.1f}" '
            f'fill="{_colour(share / shares.top)}"><title>client {name}, class {label}: {share:.0%}</title></rect>'
        )


def _client_names(part: list[str], data: FederatedData, shares: _Shares, left: float, top: float, h: float) -> None:
    unseen = set(data.unseen.tolist())
    every = int(np.ceil(11 / h))
    part.append(f'<text x="{left - 8}" y="{top - 10}" text-anchor="end" font-weight="600">client</text>')
    for row in range(0, len(shares.client), every):
        client = int(shares.client[row])
        name = escape(_short(data.client_names[client], 16)) + (" ○" if client in unseen else "")
        part.append(f'<text x="{left - 8}" y="{top + (row + 0.5) * h + 3.5:.1f}" text-anchor="end">{name}</text>')


def _class_names(part: list[str], data: FederatedData, shares: _Shares, left: float, bottom: float, w: float) -> None:
    columns = shares.share.shape[1]
    names = [_short(data.label_names[column * shares.per_column], 10) for column in range(columns)]
    level = max(map(len, names)) * 6.5 < w
    every = 1 if level else int(np.ceil(12 / w))
    for column in range(0, columns, every):
        x = left + (column + 0.5) * w
        turn = "" if level else f' transform="rotate(-45 {x:.1f} {bottom + 14})"'
        anchor = "middle" if level else "end"
        label = escape(names[column])
        part.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="{anchor}"{turn}>{label}</text>')
    x, y = (left - 8, bottom + 16) if level else (left + columns * w, bottom + 66)
    part.append(f'<text x="{x:.1f}" y="{y}" text-anchor="end" font-weight="600">class</text>')


def _sizes(
    part: list[str], data: FederatedData, shares: _Shares, left: float, top: float, h: float, width: float
) -> None:
    sizes = data.train.sizes[shares.client]
    most = int(sizes.max())
    part.append(f'<text x="{left}" y="{top - 10}" font-weight="600">training samples</text>')
    foot = top + len(sizes) * h + 16
    part.append(f'<text x="{left}" y="{foot}">0</text>')
    part.append(f'<text x="{left + width}" y="{foot}" text-anchor="end">{most:,}</text>')
    part += [
        f'<rect x="{left}" y="{top + row * h + h * 0.15:.1f}" width="{width * size / most:.1f}" '
        f'height="{h * 0.7:.1f}" fill="#8a8f98"><title>{size} training samples</title></rect>'
        for row, size in enumerate(sizes)
    ]


def _legend(part: list[str], left: float, y: float, top: float) -> None:
    part.append(f'<text x="{left}" y="{y - 8}" font-weight="600">share of the client\'s training labels</text>')
    part += [
        f'<rect x="{left + 2 * step}" y="{y}" width="2.5" height="12" fill="{_colour(step / 100)}"/>'
        for step in range(101)
    ]
    part += [
        f'<text x="{left + 2 * place + 1}" y="{y + 25}" text-anchor="middle">{top * place / 100:.0%}</text>'
        for place in range(0, 101, 50)
    ]
