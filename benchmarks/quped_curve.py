"""Accuracy against size or time: draw what quantized personal models reach over bits, from comparisons.

    python benchmarks/quped_curve.py RUN-DIR... [--methods quped local] --out docs/quped-curve.svg
    python benchmarks/quped_curve.py RUN-DIR... --table quped/table8-4 [--against time] --out PICTURE.svg

RUN-DIR is what `personafl compare --out` wrote, or a folder of such directories. Variants named METHOD-1bit,
METHOD-2bit and so on, and METHOD itself in full precision, make one line; error bars are standard deviations over
seeds. With a table of a paper there is all that it has, and what the paper has is dashed. Against time every run is a
point, for runs that share a machine take now more, now less. Runs that are not finished are left out.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from personafl.api import rows_of
from personafl.errors import PersonaError
from personafl.papers.catalog import Table, find
from personafl.papers.finished import comparisons
from personafl.report.chart import Chart, Series, write_chart

Rows = list[dict[str, Any]]
FULL = 32  # bits
BESIDE = 1.1  # how much further to the right the next of several points of one size is drawn


@dataclass
class Line:
    """A method: its rows by bits, and the paper's accuracies in %."""

    label: str
    rows: dict[int, Rows] = field(default_factory=lambda: defaultdict(list))
    paper: dict[int, float] = field(default_factory=dict)


def finished(paths: list[Path]) -> Rows:
    """Return the test rows of clients that took part; say what is missing."""
    found: Rows = []
    for path in comparisons(paths):
        rows, unfinished, failed = rows_of(path)
        found += [row for row in rows if (row["clients"], row["split"]) == ("seen", "test")]
        for child, done, rounds in unfinished:
            print(f"{child}: {done} of {rounds} rounds done; left out", file=sys.stderr)
        for run in failed:
            print(f"{path}: {run.method} with seed {run.seed} failed; left out", file=sys.stderr)
    return found


def parted(variant: str) -> tuple[str, int]:
    """Return the method and the bits in the name of a variant."""
    match = re.fullmatch(r"(.+?)(?:-([1-8])bit)?", variant)
    assert match is not None
    return match[1], int(match[2] or FULL)


def lines_of(rows: Rows, methods: list[str]) -> list[Line]:
    """Return the lines of methods' personal models."""
    lines = {method: Line(method) for method in methods}
    for row in rows:
        method, bits = parted(row["method"])
        if method in lines and row["model"] == "personal":
            lines[method].rows[bits].append(row)
    return list(lines.values())


def lines_of_table(rows: Rows, table: Table) -> list[Line]:
    """Return the lines of a paper's table."""
    lines: dict[str, Line] = {}
    for row in table.rows:
        method, bits = parted(row.run)
        line = lines.setdefault(method, Line(row.name.partition(" (")[0]))
        line.rows[bits] += [each for each in rows if (each["method"], each["model"]) == (row.run, row.model)]
        if row.paper is not None:
            line.paper[bits] = row.paper
    return list(lines.values())


def by_size(lines: list[Line]) -> list[Series]:
    """Return lines against kilobytes; of those with a single point, each a little further to the right."""
    found, beside = [], 1.0
    for style, line in enumerate(lines):
        groups = [(bits, group) for bits, group in sorted(line.rows.items()) if group]
        x, y, error, notes = [], [], [], []
        beside *= BESIDE if len(groups) == 1 and len(lines) > 1 else 1.0
        for bits, group in groups:
            percent = [100 * row["accuracy"] for row in group]
            size = statistics.mean(row["bytes_stored"] for row in group) / 1000
            x.append(size * (beside if len(groups) == 1 else 1.0))
            y.append(statistics.mean(percent))
            error.append(statistics.stdev(percent) if len(percent) > 1 else 0.0)
            text = f"{size:.1f} kB, {y[-1]:.2f} ± {error[-1]:.2f}"
            notes.append(f"{line.label}, {words(bits)}: {text}, {len(percent)} seed(s)")
            print(notes[-1])
        found.append(Series(label=line.label, x=x, y=y, error=error, notes=notes, style=style))
        places = [(place, line.paper[bits]) for place, (bits, _) in zip(x, groups, strict=True) if bits in line.paper]
        if len(places) > 1:
            across, up = zip(*places, strict=True)
            found.append(Series(label="", x=across, y=up, dashed=True, markers=False, style=style))
    return found


def by_time(lines: list[Line]) -> list[Series]:
    """Return the runs of lines against the seconds that they took."""
    found = []
    for style, line in enumerate(lines):
        runs = [(bits, row) for bits, group in sorted(line.rows.items()) for row in group]
        x, y = [row["seconds"] for _, row in runs], [100 * row["accuracy"] for _, row in runs]
        notes = [
            f"{line.label}, {words(bits)}, seed {row['seed']}: {row['seconds']:.0f} s, {100 * row['accuracy']:.2f}"
            for bits, row in runs
        ]
        print(*notes, sep="\n")
        found.append(Series(label=line.label, x=x, y=y, line=False, notes=notes, style=style))
    return found


def words(bits: int) -> str:
    """Return a number of bits in words."""
    return "full precision" if bits == FULL else f"{bits} bits" if bits > 1 else "1 bit"


def main() -> None:
    """Print the points and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", type=Path, metavar="RUN-DIR")
    parser.add_argument("--methods", nargs="+", default=["quped", "local"], help="a line for each that has runs")
    parser.add_argument("--table", metavar="PAPER/TABLE", help="all that a table has, in place of --methods")
    parser.add_argument("--against", choices=["size", "time"], default="size")
    parser.add_argument("--title", default="")
    parser.add_argument("--out", type=Path, default=Path("quped-curve.svg"))
    options = parser.parse_args()
    try:
        rows = finished(options.paths)
        if options.table:
            paper, (name,) = find(options.table)
            lines, what = lines_of_table(rows, paper.tables[name]), f"{paper.tables[name].title}: accuracy"
        else:
            lines, what = lines_of(rows, options.methods), "Accuracy"
        lines = [line for line in lines if any(line.rows.values())]
        if not lines:
            sys.exit(f"no finished run of what was asked for in {', '.join(map(str, options.paths))}")
        size = options.against == "size"
        seeds = len({row["seed"] for line in lines for group in line.rows.values() for row in group})
        spread = f"; mean ± std, {seeds} seeds at most" if seeds > 1 else ""
        bits = ", ".join(words(each) for each in sorted({bits for line in lines for bits in line.rows}))
        dashed = "; dashed: the paper" if options.table else ""
        chart = Chart(
            title=options.title or f"{what} against {options.against}",
            subtitle=f"from left to right: {bits}{spread}{dashed}" if size else "a point is a run with one seed",
            x_title="a client's stored model in kB" if size else "seconds that the rounds of a run took",
            y_title="Mean test accuracy over clients in %",
            series=by_size(lines) if size else by_time(lines),
            log_x=True,
        )
        write_chart(chart, options.out)
    except PersonaError as error:
        sys.exit(f"error: {error}")
    print(f"picture: {options.out}")


if __name__ == "__main__":
    main()
