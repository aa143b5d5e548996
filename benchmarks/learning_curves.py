"""Draw accuracy over rounds, or over virtual time, of the runs in a comparison: means over seeds.

python benchmarks/learning_curves.py runs/fedbcd --model personal --out personal.svg
python benchmarks/learning_curves.py runs/fedbcd-async --model global --time --out global.svg
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import numpy as np

from personafl.report.chart import Chart, Series, write_chart

Curve = list[tuple[float, float]]


def curves(comparison: Path, model: str, x: str) -> dict[str, list[Curve]]:
    """Return, by method, the curve of each seed: (x, test accuracy in %) of the seen clients."""
    found: dict[str, list[Curve]] = defaultdict(list)
    wanted = {"event": "score", "model": model, "clients": "seen", "split": "test"}
    for metrics in sorted(comparison.glob("*/metrics.jsonl")):
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        curve = [(line[x], 100 * line["mean"]) for line in lines if wanted.items() <= line.items()]
        if curve:
            found[metrics.parent.name.rsplit("-seed", 1)[0]].append(curve)
    return found


def mean(seeds: list[Curve]) -> tuple[list[float], list[float]]:
    """Return the mean of curves, at the places of the first and only as far as all of them go."""
    last = min(curve[-1][0] for curve in seeds)
    places = [place for place, _ in seeds[0] if place <= last]
    return places, np.mean([np.interp(places, *zip(*curve, strict=True)) for curve in seeds], axis=0).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("comparison", type=Path)
    parser.add_argument("--model", default="personal", choices=("global", "personal"))
    parser.add_argument("--time", action="store_true", help="against virtual time instead of rounds")
    parser.add_argument("--title", default="")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    found = curves(args.comparison, args.model, "time" if args.time else "number")
    if not found:
        parser.error(f"{args.comparison}: no scores of a {args.model} model in its runs")
    series = []
    for method, seeds in found.items():
        x, y = mean(seeds)
        series.append(Series(label=method, x=x, y=y, markers=False))
        print(f"{method:12s} {args.model} {y[-1]:5.1f} % at {x[-1]:.0f}, {len(seeds)} seeds")
    title = args.title or f"Test accuracy of the {args.model} model"
    x_title = "virtual time" if args.time else "round"
    write_chart(Chart(title=title, x_title=x_title, y_title="%", series=series), args.out)


if __name__ == "__main__":
    main()
