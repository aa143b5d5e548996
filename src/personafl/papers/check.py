"""`personafl reproduce --check`: can a preset start, and is every setting of it the paper's?"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from personafl.errors import BadInput
from personafl.papers.preset import Preset, tables_of_setting
from personafl.papers.settings import Line, compared, settings_of
from personafl.papers.trial import try_start
from personafl.recipe.recipe import Recipe
from personafl.report.table import grid

_SECTIONS = (
    "rounds",
    "data",
    "model",
    "devices",
    "training",
    "federation",
    "cloud",
    "method",
    "pretrain",
    "finetune",
    "seeds",
)
_ORDER = {section: number for number, section in enumerate(_SECTIONS)}  # in a table; others come last
TITLES = ("setting", "runs", "ours", "paper", "where", "why it differs")


@dataclass(frozen=True)
class Checked:
    """A preset that was looked at."""

    preset: Preset
    data: str  # what was dealt, or why it was not
    lines: tuple[Line, ...]
    problems: tuple[str, ...]  # why it cannot start, or is not the paper's

    def to_json(self) -> dict[str, Any]:
        """Return it for scripts."""
        return {
            "name": self.preset.name,
            "tables": list(self.preset.tables),
            "data": self.data,
            "settings": [line.__dict__ | {"runs": list(line.runs)} for line in self.lines],
            "problems": list(self.problems),
        }


def check(preset: Preset, folder: Path | None = None, given: Mapping[str, Path] | None = None) -> Checked:
    """Resolve a preset, deal its data if they are there, build its networks, and compare its settings."""
    try:
        source: str | Path | None = preset.source(folder, given)
    except BadInput:
        source = None
    recipe = Recipe.parse(preset.values(), preset.name).narrowed(None, None)
    trial = try_start(preset, recipe, source)
    lines, stale = compared(preset, settings_of(preset, recipe, trial.facts))
    wrong = [
        f"{line.key}: {line.ours} here, {line.paper} in the paper ({line.where}); change it, or say why in [[differs]]"
        for line in lines
        if line.wrong
    ]
    whole = preset.tables.keys() == tables_of_setting(preset.paper, preset.setting_name).keys()
    return Checked(preset, trial.data, tuple(lines), (*trial.problems, *wrong, *(stale if whole else ())))


def rendered(checked: Sequence[Checked]) -> Iterator[RenderableType]:
    """Yield a table for each preset."""
    for one in checked:
        yield Text(f"{one.preset.name} · {', '.join(one.preset.tables)}", style="bold")
        yield Text(one.data, style="dim")
        table = grid(*TITLES, texts=TITLES, padding=2, vertical="top", overflow="fold")
        for line in one.lines:
            table.add_row(*map(Text, _cells(line, _runs(line, one))), style="bold red" if line.wrong else None)
        yield table
        yield from (Text(f"problem: {problem}", style="bold red") for problem in one.problems)
        yield ""


def markdown(checked: Sequence[Checked]) -> str:
    """Return a table for each paper and size; presets that agree in a line share it."""
    parts = []
    for (key, size), group in itertools.groupby(checked, lambda one: (one.preset.paper.key, one.preset.size)):
        presets = list(group)
        parts.append(f"### {key}, size {size}\n\n" + _table(("setting", "of", *TITLES[2:]), _shared(presets)))
        parts.append(_table(("preset", "data"), [[one.preset.name, one.data] for one in presets]))
        parts += [f"**{one.preset.name}**: {problem}" for one in presets for problem in one.problems]
    return "\n\n".join(parts) + "\n"


def _shared(presets: Sequence[Checked]) -> list[list[str]]:
    """Return the lines of several presets, each with those that have it so and their runs."""
    shared: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for one in presets:
        for line in one.lines:
            key, runs, *rest = _cells(line, _runs(line, one))
            shared.setdefault((key, *rest), {}).setdefault(runs, []).append(one.preset.setting_name)
    order = list(dict.fromkeys(key for key, *_ in shared))
    order.sort(key=lambda key: _ORDER.get(key.partition(".")[0], len(_ORDER)))
    lines = []
    for (key, *rest), those in sorted(shared.items(), key=lambda item: order.index(item[0][0])):
        names = [
            ("all" if len(settings) == len(presets) else ", ".join(settings)) + (f" ({runs})" if runs else "")
            for runs, settings in those.items()
        ]
        lines.append([key, "; ".join(names), *rest])
    return lines


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _cells(line: Line, runs: str) -> tuple[str, ...]:
    why = "nobody says" if line.wrong else line.why
    return line.key, runs, line.ours, line.paper, line.where, why


def _runs(line: Line, one: Checked) -> str:
    """Name the runs of a line: of the lines of a key, the one with the most has "others"."""
    if not line.runs:
        return ""
    most = max((other for other in one.lines if other.key == line.key), key=lambda other: len(other.runs))
    return "others" if line is most and len(line.runs) > 3 else ", ".join(line.runs)
