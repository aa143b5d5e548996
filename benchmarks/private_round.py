"""How many times a plain round's time a private one takes: clipped uploads, noise on their sum. The two take turns.

    OMP_NUM_THREADS=1 python benchmarks/private_round.py [FILE.npz] [--device cuda] [--turns 9] [KEY=VALUE …]
    python benchmarks/private_round.py --users 500 --device cuda

FILE.npz has images by user (default: the demo's digits); with --users they are made, 28 × 28, 100 of each user. The
columns are parameters, milliseconds of a round (the least of the turns; processor time, on a GPU time by the clock) and
the ratio: of the least ones, and the median over turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from personafl.api import as_recipe
from personafl.core import tree, wire
from personafl.recipe.values import apply_overrides
from personafl.runs.build import prepare
from personafl.simulate.calibrate import calibrated
from personafl.simulate.simulator import Simulation
from personafl.storage.store import Store

MEMORY = 2**32
MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"name": "mlp", "hidden": [200]},
    "cnn": {"name": "cnn", "channels": [32, 64], "hidden": 512},
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"privacy": {"noise": 1.0, "clip": 1.0}},
    "adaptive": {"privacy": {"noise": 0.5}},  # so little that small cohorts have room for the count
}


def simulation(recipe: dict[str, Any], folder: Path) -> Simulation:
    """Return a run that has not begun, in one process, with the strategy that a run would have."""
    folder.mkdir()
    federation, _ = calibrated(prepare(as_recipe(recipe)).federation, MEMORY, folder / "engine.json")
    return Simulation(federation, Store(folder / "states", MEMORY))


def seconds(run: Simulation, number: int, device: str) -> float:
    """Return how long a round takes."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    began = clock()
    run.step(number)
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - began


def main() -> None:
    """Read the words, and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="a file with images by user, and settings such as training.epochs=5")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--users", type=int, help="how many users have made images")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.users:
            options.words.append(str(images(options.users, Path(folder) / "made.npz")))
        measure(options)


def images(users: int, path: Path) -> Path:
    """Write images of users to a file."""
    generator = np.random.default_rng(0)
    x = generator.integers(0, 256, (100 * users, 28, 28), dtype=np.uint8)
    np.savez(path, x=x, y=generator.integers(0, 10, len(x)), user=np.arange(len(x)) // 100)
    return path


def measure(options: argparse.Namespace) -> None:
    """Print a line for each network and kind of privacy."""
    base: dict[str, Any] = {
        "data": {"normalize": "none"},
        "federation": {"cohort": 0.2, "sampling": "bernoulli", "weights": "uniform"},
        "engine": {"workers": 1, "device": options.device},
    }
    for word in options.words:
        if "=" not in word:
            base["data"]["source"] = word
    base = apply_overrides(base, [word for word in options.words if "=" in word])
    print(f"{options.device}, {torch.get_num_threads()} thread(s), {options.turns} turns")
    print(f"{'network':<10}{'parameters':>12}  {'round':<12}{'ms':>8}{'best':>8}{'median':>8}")
    for model, settings in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            runs = {
                kind: simulation({**base, **more, "model": settings}, Path(folder) / kind)
                for kind, more in KINDS.items()
            }
            rounds = range(options.turns + 2)  # the first two warm up
            turns = [{kind: seconds(run, turn, options.device) for kind, run in runs.items()} for turn in rounds][2:]
            parameters = sum(leaf.numel() for leaf in tree.leaves(wire.dense(runs["plain"].broadcast())))
        least = {kind: min(turn[kind] for turn in turns) for kind in runs}
        for kind in runs:
            median = statistics.median(turn[kind] / turn["plain"] for turn in turns)
            ratio = least[kind] / least["plain"]
            row = f"{model:<10}{parameters:>12,}  {kind:<12}{1e3 * least[kind]:>8.1f}{ratio:>8.2f}{median:>8.2f}"
            print(row, flush=True)


if __name__ == "__main__":
    main()
