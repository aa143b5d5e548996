"""Accuracy against ε: draw what privacy takes from shared and personal models, from comparisons.

    python benchmarks/privacy_curve.py RUN-DIR... --out docs/privacy-curve.svg

RUN-DIR is what `personafl compare --out` wrote, with [privacy] or without: what a method has without is a dashed line.
A method counts by its clients' personal models where it has them; points are means over seeds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from pathlib import Path

from personafl.api import rows_of
from personafl.report.chart import Chart, Series, write_chart

Points = dict[str, dict[float | None, list[float]]]


def points_of(paths: list[Path]) -> Points:
    """Return accuracy in % of each seed, by method and ε."""
    found: Points = defaultdict(lambda: defaultdict(list))
    for path in paths:
        rows = [row for row in rows_of(path)[0] if (row["clients"], row["split"]) == ("seen", "test")]
        personal = {row["method"] for row in rows if row["model"] == "personal"}
        for row in rows:
            if row["model"] == ("personal" if row["method"] in personal else "global"):
                found[row["method"]][row.get("epsilon")].append(100 * row["accuracy"])
    return found


def main() -> None:
    """Print the points and write the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("paths", nargs="+", type=Path, metavar="RUN-DIR")
    parser.add_argument("--title", default="What privacy takes, and personal models give back")
    parser.add_argument("--out", type=Path, default=Path("privacy-curve.svg"))
    options = parser.parse_args()
    found = points_of(options.paths)
    spent = sorted({epsilon for points in found.values() for epsilon in points if epsilon is not None})
    if not spent:
        sys.exit(f"no finished run with [privacy] in {', '.join(map(str, options.paths))}")
    series = []
    for style, (method, points) in enumerate(found.items()):
        means = {epsilon: statistics.mean(values) for epsilon, values in points.items()}
        for epsilon, mean in means.items():
            print(f"{method:<10} epsilon {epsilon or 'none':<8.4} {mean:6.2f} %, {len(points[epsilon])} seed(s)")
        x = [epsilon for epsilon in spent if epsilon in means]
        series.append(Series(label=method, x=x, y=[means[epsilon] for epsilon in x], style=style))
        if None in means:
            ends, y = [spent[0], spent[-1]], [means[None]] * 2
            series.append(Series(label="", x=ends, y=y, dashed=True, markers=False, style=style))
    chart = Chart(
        title=options.title,
        subtitle="dashed: without privacy",
        x_title="epsilon that the whole run spends",
        y_title="Mean test accuracy over clients in %",
        series=series,
        log_x=True,
    )
    write_chart(chart, options.out)
    print(f"picture: {options.out}")


if __name__ == "__main__":
    main()
