"""What accuracy costs: all methods of kept runs against the bytes that they send and the size of the model.

    python benchmarks/costs.py RUNS... [--bold fedalt,fedslr,fedbcd,quped-2bit] [--out docs/costs] [--title WORDS]

RUNS are directories of finished runs or comparisons, or folders of such; NAME=DIR gives those of DIR another name, as
quped-2bit=runs/bits2. Of each method it is the last personal model, or the global one where it has none: test data of
clients that took part, means over seeds. It prints a table, the best first, and writes two pictures, OUT-bytes.svg and
OUT-size.svg; methods named by --bold have larger marks.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from personafl.report.chart import Chart, Series, write_chart
from personafl.report.table import amount, last_models
from personafl.runs.result import Result

Rows = list[dict[str, Any]]
AXES = {
    "bytes": ("MB sent in the whole run by all clients, up and down", "bytes sent"),
    "size": ("kB that the model takes on a device", "size of the model"),
}


def results(given: str) -> Iterator[tuple[str, Path]]:
    """Yield the name that runs are to have, if it is given, and every directory with a result below a path."""
    name, _, path = given.rpartition("=")
    yield from ((name, file.parent) for file in sorted(Path(path).rglob("result.json")))


def methods(paths: list[str]) -> dict[str, Rows]:
    """Return the rows of each method's last model on test data, by its name; the most accurate first."""
    found: dict[str, Rows] = {}
    for name, path in (one for given in paths for one in results(given)):
        rows = Result.load(path).rows
        for row in last_models([row for row in rows if (row["clients"], row["split"]) == ("seen", "test")]):
            found.setdefault(name or row["method"], []).append(row)
    return dict(sorted(found.items(), key=lambda item: -mean(item[1], "accuracy")))


def mean(rows: Rows, key: str) -> float:
    """Return the mean over seeds."""
    return statistics.mean(row[key] for row in rows)


def cost(rows: Rows, axis: str) -> float:
    """Return megabytes sent, or kilobytes stored."""
    if axis == "size":
        return mean(rows, "bytes_stored") / 1e3
    return (mean(rows, "bytes_up") + mean(rows, "bytes_down")) / 1e6


def table(found: dict[str, Rows]) -> Iterator[str]:
    """Yield the lines of the table, as Markdown."""
    yield "| method | model | accuracy | worst 10% | MB sent | kB stored | seeds |"
    yield "|---" * 7 + "|"
    for name, rows in found.items():
        numbers = [f"{100 * mean(rows, key):.1f}" for key in ("accuracy", "worst_decile")]
        costs = [amount(cost(rows, axis)) for axis in AXES]
        yield f"| {' | '.join([name, rows[0]['model'], *numbers, *costs, str(len(rows))])} |"


def chart(found: dict[str, Rows], axis: str, bold: set[str], title: str) -> Chart:
    """Return accuracy against a cost, a mark for each method; what sends next to nothing is at half of the least."""
    words, called = AXES[axis]
    costs = {name: cost(rows, axis) for name, rows in found.items()}
    least = min(value for value in costs.values() if value > 0.01) / 2
    series = [
        Series(
            label=name,
            x=[max(costs[name], least)],
            y=[100 * mean(rows, "accuracy")],
            areas=[4.0 if name in bold else 1.2],
            line=False,
            style=number,
        )
        for number, (name, rows) in enumerate(found.items())
    ]
    below = any(value < least for value in costs.values())
    aside = "; at the left edge: those that send next to nothing" if below else ""
    return Chart(
        title=title or f"Accuracy against {called}",
        subtitle=f"up and to the left is better; large: {', '.join(name for name in found if name in bold)}{aside}",
        x_title=words,
        y_title="Mean test accuracy over clients in %",
        series=series,
        log_x=True,
    )


def main() -> None:
    """Print the table and write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", metavar="RUNS")
    parser.add_argument("--bold", default="fedalt,fedslr,fedbcd,quped-2bit")
    parser.add_argument("--leave-out", default="", metavar="NAMES", help="of the pictures: what is far below")
    parser.add_argument("--title", default="")
    parser.add_argument("--out", type=Path, default=Path("costs"))
    options = parser.parse_args()
    found = methods(options.paths)
    if not found:
        sys.exit(f"no finished run in {', '.join(options.paths)}")
    print(*table(found), sep="\n")
    drawn = {name: rows for name, rows in found.items() if name not in options.leave_out.split(",")}
    for axis in AXES:
        path = options.out.with_name(f"{options.out.name}-{axis}.svg")
        write_chart(chart(drawn, axis, set(options.bold.split(",")), options.title), path)
        print(f"picture: {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
