"""Show a federated data set in the terminal: a summary, and who holds which classes."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from personafl.core.split import listed
from personafl.data.advice import advice, inputs_line
from personafl.data.config import DataConfig
from personafl.data.federated import FederatedData

Reals = NDArray[np.float64]
SHADES = " ░▒▓█"
TERMINAL_ROWS = 30


@dataclass(frozen=True)
class _Shares:
    """Label shares of the clients shown, [shown, columns] in [0, 1], rows summing to one."""

    client: NDArray[np.int64]  # the client number of each row
    share: Reals
    names: tuple[str, ...]  # of what has a share: classes, labels, or fifths of all targets
    per_column: int  # of them joined in one column
    top: float  # the share drawn darkest: the largest one rounded up, at least twice that of a uniform mix


def describe(data: FederatedData, console: Console, config: DataConfig) -> None:
    """Print what the data are, what to know of them, and who holds which classes."""
    console.print(_summary(data, config))
    for note in (*data.notes, *advice(data, config)):
        console.print(f"note: {note}", style="yellow", highlight=False, markup=False)
    columns = max(10, console.width - 24)
    shares = _shares(data, TERMINAL_ROWS, columns)
    console.print()
    console.print(_caption(data, shares), highlight=False)
    width = max(1, min(4, columns // shares.share.shape[1]))
    names = [data.client_names[client] for client in shares.client]
    margin = min(16, max(len(name) for name in names))
    if shares.per_column == 1 and width >= 2:
        console.print(
            Text(" " * (margin + 2) + "".join(f"{c:<{width}}" for c in range(len(shares.names))), style="dim")
        )
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


def sketch(data: FederatedData, rows: int = 60, columns: int = 50) -> dict[str, Any]:
    """Return what a picture of clients × classes needs, as plain values: the picture outlives the data."""
    shares = _shares(data, rows, columns)
    return {
        "caption": _caption(data, shares),
        "client": shares.client.tolist(),
        "names": [_short(data.client_names[client], 40) for client in shares.client],
        "labels": [_short(name, 40) for name in shares.names[:: shares.per_column]],
        "share": shares.share.round(4).tolist(),
    }


def _summary(data: FederatedData, config: DataConfig) -> Table:
    sizes = data.train.sizes
    kind = "tokens" if data.vocabulary else "×".join(str(n) for n in data.x.shape[1:])
    used = sum(len(data.rows(split).flat) for split in ("train", "validation", "test"))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    rows = {
        "data": f"{data.name}, {len(data.x):,} samples of {kind}, {used:,} dealt",
        "clients": f"{data.clients:,} ({len(data.seen):,} seen, {len(data.unseen):,} unseen)",
        **_targets(data),
        "inputs": inputs_line(data, config),
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
    counts, names = _fifths(data) if data.task == "regression" else (data.counts("train"), data.label_names)
    classes = counts.shape[1]
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    order = np.lexsort((-share.max(axis=1), share.argmax(axis=1)))
    shown = order[np.linspace(0, len(order) - 1, min(rows, len(order))).round().astype(int)]
    per_column = -(-classes // columns)
    edges = np.arange(0, classes, per_column)
    joined = np.add.reduceat(share[shown], edges, axis=1)
    top = max(float(np.ceil(joined.max() * 20 - 1e-9) / 20), min(1.0, 2 / joined.shape[1]))
    return _Shares(shown, joined, names or tuple(map(str, range(classes))), per_column, top)


def _fifths(data: FederatedData) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Count each client's targets, the first of several, by the fifths of all that they lie in."""
    values = data.y[:, 0].cpu().numpy()[data.train.flat]
    edges = np.quantile(values, (0.2, 0.4, 0.6, 0.8))
    place = np.searchsorted(edges, values, side="left")
    counts = np.bincount(data.train.owner * 5 + place, minlength=data.clients * 5).reshape(data.clients, 5)
    return counts, (*(f"to {edge:.3g}" for edge in edges), f"above {edges[-1]:.3g}")


def _targets(data: FederatedData) -> dict[str, str]:
    if data.task == "regression":
        values = data.y[torch.from_numpy(data.train.flat)]
        ranges = zip(data.label_names, values.amin(0).tolist(), values.amax(0).tolist(), strict=True)
        return {"targets": ", ".join(f"{name} from {low:.4g} to {high:.4g}" for name, low, high in ranges)}
    kind = "labels" if data.task == "multilabel" else "classes"
    return {kind: f"{data.classes:,}" + (f" ({listed(data.reading.classes)})" if data.reading.classes else "")}


def _caption(data: FederatedData, shares: _Shares) -> str:
    shown = len(shares.client)
    clients = f"{shown} of {data.clients:,} clients" if shown < data.clients else f"{shown} clients"
    joined = f", {shares.per_column} classes to a column" if shares.per_column > 1 else ""
    kind = {"multilabel": "labels", "regression": "fifths of all targets"}.get(data.task, "classes")
    return f"{clients} × {len(shares.names):,} {kind}, ordered by main {'fifth' if kind[0] == 'f' else 'class'}{joined}"


def _short(name: str, width: int) -> str:
    name = "".join(character if character.isprintable() else "?" for character in name)
    return name if len(name) <= width else name[: width - 1] + "…"
