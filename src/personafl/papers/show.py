"""A table of a paper beside ours, and the verdicts, for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from personafl.papers.catalog import MEASURES, Paper, SizeName, Table, papers
from personafl.papers.preset import SIZES, presets
from personafl.papers.verdict import CONFIDENCE, Outcome, Runs, Verdict, judge, outcomes
from personafl.report.table import grid

RULE = (
    f"Differences are paired by seed. A claim holds if the one-sided {CONFIDENCE:.0%} bound of the mean difference "
    "(Student's t; a std of at least one test sample, or of a moment between two scorings) is on its side, does not "
    "hold if it is on the other, and is else not shown."
)
_STYLE = {"holds": "green", "does not hold": "bold red", "not shown": "yellow"}


@dataclass(frozen=True)
class Shown:
    """One table with our numbers and the verdicts on its claims."""

    name: str  # PAPER/TABLE
    paper: Paper
    table: Table
    lines: list[Outcome]
    verdicts: list[Verdict]
    ran: str  # on what, how long
    differs: str | None  # from the paper's setting; None: not known
    command: str  # what repeats it

    @classmethod
    def of(cls, paper: Paper, name: str, runs: Runs, ran: str, differs: str | None, command: str) -> Shown:
        """Return a table with what its runs found."""
        table = paper.tables[name]
        lines = outcomes(table, runs)
        return cls(f"{paper.key}/{name}", paper, table, lines, judge(table, lines), ran, differs, command)

    def to_json(self) -> dict[str, Any]:
        """Return it for scripts."""
        return {
            "name": self.name,
            "cite": self.paper.cite,
            "where": self.table.where,
            "ran": self.ran,
            "differs": self.differs,
            "command": self.command,
            "rows": [line.to_json() for line in self.lines],
            "claims": [verdict.to_json() for verdict in self.verdicts],
        }


def listing() -> Iterator[RenderableType]:
    """Yield all presets: what they are, and how long they take."""
    for paper in papers().values():
        yield Text(f"\n{paper.cite}", style="bold")
        listed = grid("preset", "what", "small", "paper", texts=("preset", "what"), padding=2, vertical="top")
        for column in listed.columns:
            column.no_wrap = column.header != "what"
        for name, table in paper.tables.items():
            times = [_time(paper, name, size) for size in SIZES] if table.setting else ["–", "–"]
            listed.add_row(f"{paper.key}/{name}", table.title, *times)
        yield listed
    yield Text(
        "\nsmall: on 2 cores; with scikit-learn's digits, or * a file of yours\n"
        "paper: on a GPU that does 10 TFLOP/s, estimated; with the paper's data\n"
        "–: not made by runs; reproduce PRESET says what shows it",
        style="dim",
    )


def rendered(shown: Sequence[Shown]) -> Iterator[RenderableType]:
    """Yield each table and its verdicts for the terminal."""
    for one in shown:
        yield Text(f"{one.name} · {one.table.title}", style="bold")
        yield Text(f"{one.paper.cite}: {one.table.where}. {_measures(one)}.", style="dim")
        numbers = grid("", "here", "paper", texts=("",), padding=2, vertical="bottom")
        for line in one.lines:
            numbers.add_row(line.name, *_numbers(line))
        yield numbers
        for verdict in one.verdicts:
            yield Text.assemble(
                f"{verdict.text}: ", (verdict.word, _STYLE[verdict.word]), f"{_gap(verdict)}{_printed(verdict)}"
            )
        yield Text(_told(one), style="dim")
        yield ""
    if shown:
        yield Text(RULE, style="dim")


def markdown(shown: Sequence[Shown]) -> str:
    """Return the tables and verdicts as Markdown, each with the command that repeats it."""
    parts = []
    for one in shown:
        lines = [
            f"## {one.name}: {one.table.title}",
            f"{one.paper.cite}: {one.table.where}. {_measures(one)}.",
            f"    {one.command}",
            "| | here | paper |\n|---|---:|---:|\n"
            + "\n".join(f"| {line.name} | {' | '.join(_numbers(line))} |" for line in one.lines),
            "| claim | verdict | here, by seed | paper |\n|---|---|---:|---:|\n"
            + "\n".join(_markdown_line(verdict) for verdict in one.verdicts),
            _told(one),
        ]
        parts.append("\n\n".join(lines))
    return "\n\n".join([*parts, RULE]) + "\n"


def _told(one: Shown) -> str:
    return f"Ran: {one.ran}." + ("" if one.differs is None else f" What differs from the paper: {one.differs}.")


def _markdown_line(verdict: Verdict) -> str:
    word = verdict.word if verdict.word == "holds" else f"**{verdict.word}**"
    gap = _gap(verdict).removeprefix(", ") or "–"
    paper = "–" if verdict.paper is None else f"{verdict.paper:+.2f}"
    return f"| {verdict.text} | {word} | {gap} | {paper} |"


def _measures(one: Shown) -> str:
    kinds = dict.fromkeys(line.measure for line in one.lines)
    texts = [MEASURES[kind] for kind in kinds]
    seeds = max((len(line.values) for line in one.lines), default=0)
    several = f"mean ± std over {seeds} seeds" if seeds > 1 else "one seed" if seeds else "no runs"
    whole = "; ".join(texts)
    return f"{whole[:1].upper()}{whole[1:]}; {several}"


def _numbers(line: Outcome) -> tuple[str, str]:
    digits = 3 if line.measure in ("gigabytes", "parameters") else 1 if line.measure.startswith("time") else 2
    here = f"{line.mean:.{digits}f}" if line.values else "–"
    here += f" ± {line.std:.{digits}f}" if line.std is not None else ""
    paper = "–" if line.row.paper is None else f"{line.row.paper:.2f}"
    paper += f" ± {line.row.std:.2f}" if line.row.std is not None else ""
    return here, paper


def _gap(verdict: Verdict) -> str:
    if verdict.mean is None:
        return ", no pair of runs"
    if verdict.std is None:
        return f", {verdict.mean:+.2f} (one seed)"
    return f", {verdict.mean:+.2f} ± {verdict.std:.2f}"


def _printed(verdict: Verdict) -> str:
    return "" if verdict.paper is None else f" (paper {verdict.paper:+.2f})"


def _time(paper: Paper, name: str, size: SizeName) -> str:
    (preset,) = presets(paper, [name], size)
    star = "*" if size == "small" and preset.setting.small.dataset != "digits" else ""
    minutes = max(1, round(60 * preset.hours))
    return f"{minutes} min{star}" if minutes < 90 else f"{round(preset.hours)} h{star}"
