"""Data as a notebook shows them: facts, and which classes each client holds."""

import math
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROWS, _COLUMNS = 20, 40  # that are drawn
_HIGH, _LEFT, _MOST = 14, 90, 24  # pixels: of a row, of the names, of a cell's width


def data_html(data: Any) -> str:
    """Return a FederatedData as a table of facts and, of classes, a small picture of who holds which."""
    sizes, one = data.train.sizes, " × ".join(map(str, data.x.shape[1:]))
    facts = {
        "clients": f"{data.clients:,} ({len(data.seen):,} seen, {len(data.unseen):,} unseen)",
        "samples": f"{len(data.x):,} of {'tokens' if data.vocabulary else one}, {data.classes:,} {data.shape.counted}",
        "train": f"{sizes.sum():,}, per client {sizes.min()} to {sizes.max()}",
        "validation, test": f"{len(data.validation.flat):,}, {len(data.test.flat):,}",
        "fingerprint": data.fingerprint[:12],
    }
    cell = '<td style="text-align:left;padding:1px 10px;border:none">'
    lines = "".join(f"<tr>{cell}<b>{name}</b></td>{cell}{escape(text)}</td></tr>" for name, text in facts.items())
    table = f'<table style="border-collapse:collapse">{lines}</table>'
    picture = _picture(data.client_names, data.counts()) if data.task == "classification" else ""
    return f"<div><p><b>{escape(data.name)}</b></p>{table}{picture}</div>"


def _picture(names: Sequence[str], counts: NDArray[np.int64]) -> str:
    """Draw the label shares of evenly spaced clients, ordered by their main class so that the structure shows."""
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    order = np.lexsort((-share.max(axis=1), share.argmax(axis=1)))
    shown = order[np.linspace(0, len(order) - 1, min(_ROWS, len(order))).round().astype(int)]
    joined = -(-share.shape[1] // _COLUMNS)  # classes to a column
    share = np.add.reduceat(share[shown], np.arange(0, share.shape[1], joined), axis=1)
    wide, most = min(_MOST, 640 // share.shape[1]), float(share.max()) or 1.0
    parts = []
    for row, client in enumerate(shown):
        name, y = escape(str(names[client])), 2 + row * _HIGH
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 11}" text-anchor="end">{name[:12]}</text>')
        for column in np.flatnonzero(share[row]):
            value = float(share[row, column])
            place = f'x="{_LEFT + column * wide}" y="{y}" width="{wide - 1}" height="{_HIGH - 1}"'
            look = f'fill="#315a94" fill-opacity="{math.sqrt(value / most):.2f}"'  # the root keeps small shares visible
            parts.append(f"<rect {place} {look}><title>client {name}: {value:.0%}</title></rect>")
    width, height = _LEFT + wide * share.shape[1] + 8, _HIGH * len(shown) + 4
    caption = (
        f"{len(shown)} of {len(names):,} clients × {counts.shape[1]:,} classes: the stronger, the larger the share"
    )
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}" font-size="10" fill="#333"'
    picture = f'<svg role="img" {size} aria-label="{caption}">{"".join(parts)}</svg>'
    return (
        f'<div style="background:#fff;padding:6px;max-width:{width}px">{picture}</div>'
        f'<p style="font-size:85%;opacity:.8">{caption}</p>'
    )
