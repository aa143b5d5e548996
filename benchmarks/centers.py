"""How a center's step is scaled: accuracy, models at chance and how far centers go, of QuPeD's quantized models.

    python benchmarks/centers.py cifar10.npz [--device cuda] [--clients 50] [--samples 1200] [--filters 64]
        [--rounds 200] [--seeds 0] [--bits 1 2] [--scales mean fixed …] [--out runs/centers]

The paper's setting otherwise: 4 classes a client, 10 steps of batch 25 a round, rate 0.1, λ_p = 0.25, the paper's λ in
epochs, weights frozen to their centers in the last fifth. A model is at chance if it is right for at most 2 points more
than one class. *moved* is how far centers are from where they started, as a share of the distance from the lowest to
the highest one there: the mean over centers and layers, of the centers' means over 20 clients. Runs that are in --out
already are not run again.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

import personafl
from personafl.errors import Diverged
from personafl.runs.result import Result
from personafl.storage.rundir import RunDirectory

CLASSES = 4
SCALES: dict[str, dict[str, Any]] = {
    "fixed": {"center_lr": 0.0},
    "sum": {"center_scale": "sum", "center_lr": 1e-4},
    "sum, limit 10": {"center_scale": "sum", "center_lr": 1e-4, "center_clip": 10.0},
    "sum, limit 0.1": {"center_scale": "sum", "center_lr": 1e-4, "center_clip": 0.1},
    "sqrt 0.01": {"center_scale": "sqrt", "center_lr": 0.01},
    "sqrt 0.001": {"center_scale": "sqrt", "center_lr": 0.001},
    "mean 0.1": {"center_scale": "mean", "center_lr": 0.1},
    "mean 1": {"center_scale": "mean", "center_lr": 1.0},
}
PENALTY = {1: {"penalty": 1e-6, "growth": 0.99}}  # twice the paper's λ, whose runs have no ½
OTHERS = {"penalty": 2e-6}


def recipe(options: argparse.Namespace, bits: int, scale: str, seed: int) -> dict[str, Any]:
    """Return one run."""
    samples = options.samples * 5 // 6
    method = {
        "name": "quped",
        "bits": bits,
        "distillation": options.distillation,
        "penalty_unit": max(1, -(-samples // 25)),
        "freeze_after": options.rounds * 4 // 5,
        **PENALTY.get(bits, OTHERS),
        **SCALES[scale],
    }
    partition = {"kind": "classes", "clients": options.clients, "per_client": CLASSES, "samples": options.samples}
    schedule = {"kind": "exponential", "rate": 0.9975}
    return {
        "seed": seed,
        "rounds": options.rounds,
        "data": {"source": str(options.data), "test": 1 / 6, "partition": partition},
        "model": {"name": "cnn1", "filters": options.filters},
        "training": {"lr": 0.1, "weight_decay": 1e-4, "batch": 25, "steps": 10, "schedule": schedule},
        "federation": {"weights": "uniform"},
        "evaluation": {"every": options.rounds},
        "engine": {"device": options.device},
        "method": method,
    }


def finished(options: argparse.Namespace, bits: int, scale: str, seed: int) -> Result | None:
    """Return the result of a run that is there already or is now made; None if it diverged."""
    path = options.out / f"{bits}bit-{scale.replace(', ', '-').replace(' ', '-')}-seed{seed}"
    if (path / "result.json").exists():
        return Result.load(path)
    try:
        return personafl.run(recipe(options, bits, scale, seed), out=path, resume=True)
    except Diverged:
        return None


def centers(result: Result) -> dict[str, Any]:
    """Return the centers at the end."""
    last = [entry for entry in RunDirectory(result.path).metrics() if entry["event"] == "form"][-1]
    return {name: np.array(values) for name, values in last["centers"].items()}


def line(results: list[Result | None], starts: list[Result | None]) -> str:
    """Return accuracy, models at chance and the centers' way, over seeds."""
    done = [result for result in results if result is not None]
    if not done:
        return "diverged"
    scores = [np.array(result.columns["personal_test_accuracy"]) for result in done]
    means = [100 * float(score.mean()) for score in scores]
    spread = statistics.stdev(means) if len(means) > 1 else 0.0
    at_chance = sum(int((score <= 1 / CLASSES + 0.02).sum()) for score in scores)
    ways = [
        np.abs(own - first[name]).mean() / (first[name][-1] - first[name][0])
        for result, start in zip(results, starts, strict=True)
        if result is not None and start is not None
        for first in [centers(start)]
        for name, own in centers(result).items()
    ]
    models = sum(map(len, scores))
    return f"{statistics.mean(means):9.2f} ± {spread:<5.2f}{at_chance:5d} of {models:<6d}{np.mean(ways):9.3f}"


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="CIFAR-10 as .npz")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--samples", type=int, default=1200, help="of a client; a sixth is for testing")
    parser.add_argument("--filters", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--distillation", type=float, default=0.25)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--bits", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--scales", nargs="+", choices=SCALES, default=list(SCALES))
    parser.add_argument("--out", type=Path, default=Path("runs/centers"))
    options = parser.parse_args()
    print(f"{'bits':<6}{'step':<17}{'accuracy %':>11}{'at chance':>16}{'moved':>12}{'seconds':>10}", flush=True)
    for bits in options.bits:
        starts = [finished(options, bits, "fixed", seed) for seed in options.seeds]  # centers that stay at their start
        for scale in options.scales:
            began = time.perf_counter()
            results = [finished(options, bits, scale, seed) for seed in options.seeds]
            print(f"{bits:<6}{scale:<17}{line(results, starts)}{time.perf_counter() - began:10.0f}", flush=True)


if __name__ == "__main__":
    main()
