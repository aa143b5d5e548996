"""What q-FedAvg gives the clients that a shared model serves worst, and what it takes from the others.

    python benchmarks/fairness.py --out fairness.json [--jobs 1] [--minutes 60]

Handwritten digits dealt to 30 clients, of whom 3 have their images turned by a quarter: a softmax regression that all
share cannot suit both kinds. FedAvg, and the same with [fairness] and q; 5 seeds. Prints accuracy in % on test data,
mean over clients, of the worst decile (3 clients), and the standard deviation over clients.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import personafl
from jobs import ran

CLIENTS, TURNED, SEEDS = 30, 3, range(5)
POWERS = (0.0, 0.5, 1.0, 2.0, 5.0)


def clients(seed: int) -> dict[str, tuple[Any, Any]]:
    """Return the images [samples, 1, 8, 8] and labels of each client."""
    digits = load_digits()
    x = (digits.data / 16).reshape(-1, 1, 8, 8).astype(np.float32)
    order = np.random.default_rng(seed).permutation(len(x))
    found = {}
    for number, rows in enumerate(np.array_split(order, CLIENTS)):
        own = np.rot90(x[rows], axes=(2, 3)).copy() if number < TURNED else x[rows]
        found[f"client-{number}"] = (own, digits.target[rows])
    return found


def one(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Do the run of q and a seed."""
    q, seed = name.split("/")
    recipe: dict[str, Any] = {
        "seed": int(seed),
        "rounds": 300,
        "data": {"test": 0.4},
        "model": {"name": "linear"},
        "training": {"steps": 1, "batch": "all", "lr": 0.5},
        "federation": {"cohort": 1.0},
        "engine": {"device": "cpu", "workers": 1, "threads": 1, "strategy": "stacked"},
        "evaluation": {"every": 0},
    }
    if float(q):
        recipe["fairness"] = {"q": float(q)}
    with tempfile.TemporaryDirectory() as folder:
        result = personafl.run(clients(int(seed)), recipe=recipe, out=Path(folder) / "run", progress=False)
    (row,) = (row for row in result.rows if row["split"] == "test")
    return {key: row[key] for key in ("accuracy", "worst_decile", "accuracy_std")}


def main() -> None:
    """Run what is not there yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the results, as JSON")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no more is done")
    options = parser.parse_args()
    names = [f"{q:g}/{seed}" for seed in SEEDS for q in POWERS]
    found = ran(one, names, {}, options.out, options.jobs, options.minutes)
    print("| q | mean | worst 10 % | std over clients |\n|---|---|---|---|")
    for q in POWERS:
        several = [found[name] for seed in SEEDS if (name := f"{q:g}/{seed}") in found]
        columns = ([100 * each[key] for each in several] for key in ("accuracy", "worst_decile", "accuracy_std"))
        cells = (f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}" for values in columns)
        print(f"| {q:g} | " + " | ".join(cells) + " |" if len(several) > 1 else "")


if __name__ == "__main__":
    main()
