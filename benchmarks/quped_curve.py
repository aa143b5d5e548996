"""Accuracy against size: draw what quantized personal models reach with so many bytes, over bits, from comparisons.

    python benchmarks/quped_curve.py RUN-DIR... --out docs/quped-curve.svg

RUN-DIR is what `personafl compare --out` wrote. Variants named METHOD-1bit, METHOD-2bit and so on, and METHOD itself in
full precision, make one line; error bars are standard deviations over seeds. Runs that are not finished are left out.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from personafl.api import rows_of
from personafl.errors import PersonaError
from personafl.report.chart import Chart, Series, write_chart

Rows = list[dict[str, Any]]


def finished(paths: list[Path]) -> Rows:
    """Return the test rows of the personal models of clients that took part; say what is missing."""
    found: Rows = []
    for path in paths:
        rows, unfinished = rows_of(path)
        found += [row for row in rows if (row["model"], row["clients"], row["split"]) == ("personal", "seen", "test")]
        for child, done, rounds in unfinished:
            print(f"{child}: {done} of {rounds} rounds done; left out", file=sys.stderr)
    return found


def bits_of(variant: str, method: str) -> int | None:
    """Return the bits in the name of a method's variant, 32 for the method itself, None for anything else."""
    match = re.fullmatch(rf"{re.escape(method)}(?:-([1-8])bit)?", variant)
    return int(match[1] or 32) if match else None


def curve(rows: Rows, method: str) -> tuple[Series, list[int]] | None:
    """Return the line of a method, by bits, and those bits; None if it has no run."""
    groups: dict[int, Rows] = defaultdict(list)
    for row in rows:
        if (bits := bits_of(row["method"], method)) is not None:
            groups[bits].append(row)
    if not groups:
        return None
    x, y, error = [], [], []
    for bits, group in sorted(groups.items()):
        percent = [100 * row["accuracy"] for row in group]
        x.append(statistics.mean(row["bytes_stored"] for row in group) / 1000)
        y.append(statistics.mean(percent))
        error.append(statistics.stdev(percent) if len(percent) > 1 else 0.0)
        print(f"{method:<10}{bits:>4} bits{x[-1]:>10.1f} kB{y[-1]:>8.2f} ± {error[-1]:.2f}  {len(percent)} seed(s)")
    return Series(label=method, x=x, y=y, error=error), sorted(groups)


def main() -> None:
    """Print the points and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", type=Path, metavar="RUN-DIR")
    parser.add_argument("--methods", nargs="+", default=["quped", "local"], help="a line for each that has runs")
    parser.add_argument("--title", default="Accuracy against size")
    parser.add_argument("--out", type=Path, default=Path("quped-curve.svg"))
    options = parser.parse_args()
    try:
        rows = finished(options.paths)
        curves = [found for method in options.methods if (found := curve(rows, method))]
        if not curves:
            sys.exit(f"no finished run of {', '.join(options.methods)} in {', '.join(map(str, options.paths))}")
        first, bits = curves[0]
        words = ", ".join("full precision" if each == 32 else str(each) for each in bits)
        seeds = len({row["seed"] for row in rows})
        spread = f"; mean ± std over {seeds} seeds" if seeds > 1 else ""
        chart = Chart(
            title=options.title,
            subtitle=f"{first.label}, from left to right: {words} (bits of a weight){spread}",
            x_title="a client's stored model in kB",
            y_title="Mean test accuracy over clients in %",
            series=[series for series, _ in curves],
            log_x=True,
        )
        write_chart(chart, options.out)
    except PersonaError as error:
        sys.exit(f"error: {error}")
    print(f"picture: {options.out}")


if __name__ == "__main__":
    main()
