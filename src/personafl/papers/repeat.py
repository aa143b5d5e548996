"""Repeat tables of the papers from Python, as `personafl reproduce` does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from personafl import api
from personafl.errors import BadInput, Failed
from personafl.papers.catalog import SizeName, find
from personafl.papers.finished import tables_of_preset
from personafl.papers.preset import SIZES, presets
from personafl.papers.show import Shown
from personafl.storage.rundir import claim_name, refuse_existing


def reproduce(
    name: str,
    *,
    size: SizeName = "small",
    data_dir: str | Path | None = None,
    datasets: Mapping[str, str | Path] | None = None,
    seeds: Sequence[int] | None = None,
    settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    progress: bool | None = None,
) -> list[Shown]:
    """Repeat a table, "fedalt/table4-emnist", or all of a paper, "quped"; return them with our numbers and verdicts.

    `size` is "small", minutes on two cores, or "paper". The data sets that they need are in the folder `data_dir`, or
    named: {"cifar10": path}. `settings` change keys of the recipes. The runs are in `out`, or in new directories under
    runs/. `personafl.papers.show.markdown(tables)` writes them as Markdown.
    """
    if size not in SIZES:
        raise BadInput(f"size = {size!r}: give {' or '.join(map(repr, SIZES))}")
    paper, tables = find(name)
    chosen = presets(paper, tables, size)
    folder, named = None if data_dir is None else Path(data_dir), {k: Path(v) for k, v in (datasets or {}).items()}
    changes = [f"{key}={json.dumps(value)}" for key, value in (settings or {}).items()]
    recipes = [preset.recipe(folder, named, changes, None if seeds is None else list(seeds)) for preset in chosen]
    if out is not None:
        refuse_existing(Path(out))
    shown: list[Shown] = []
    failures: list[str] = []
    for preset, recipe in zip(chosen, recipes, strict=True):  # all were checked before any of them runs
        own = None if out is None else Path(out) if len(chosen) == 1 else Path(out) / preset.setting_name
        path = own or claim_name(Path("runs"), preset.name)
        failures += map(str, api.compare(recipe, out=path, progress=progress).failures)
        shown += tables_of_preset(path, preset)[0]
    if failures:
        raise Failed(f"{len(failures)} of its runs failed: {'; '.join(failures)}")
    return shown
