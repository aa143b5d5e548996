"""How many times FedAvg's time a round of QuPeD takes on a CPU, with the defaults of both: the two take turns.

    OMP_NUM_THREADS=1 python benchmarks/quped_time.py [FILE.npz] [model.name=cnn …] [--bits full 2]
        [--strategies auto stacked sequential] [--turns 7]

FILE.npz has images by user (default: the demo's digits). The columns are milliseconds of processor time a round, the
least of the turns, and how many times FedAvg's they are: of the least ones, and the median over turns. A strategy is
that of both; with "auto" each has the one that is faster for it, as runs have.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from personafl.api import as_recipe
from personafl.recipe.values import apply_overrides
from personafl.runs.build import prepare
from personafl.simulate.calibrate import calibrated
from personafl.simulate.simulator import Simulation
from personafl.storage.store import Store

MEMORY = 2**30


def simulation(recipe: dict[str, Any], folder: Path) -> Simulation:
    """Return a run that has not begun, in one process, with the strategy that a run would have."""
    federation = prepare(as_recipe(recipe)).federation
    if recipe["engine"]["strategy"] == "auto":
        federation, _ = calibrated(federation, MEMORY, folder / "engine.json")
    return Simulation(federation, Store(folder / "states", MEMORY))


def seconds(run: Simulation, number: int) -> float:
    """Return the processor time of one round: what else the machine does has less of a say in it."""
    began = time.process_time()
    run.step(number)
    return time.process_time() - began


def main() -> None:
    """Print a line for each strategy and number of bits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", nargs="?", default=None, help="images by user, as .npz")
    parser.add_argument("settings", nargs="*", help="of the recipe, such as model.name=cnn")
    parser.add_argument("--bits", nargs="+", default=["full", "2"])
    parser.add_argument("--strategies", nargs="+", default=["auto", "stacked", "sequential"])
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    base: dict[str, Any] = {"engine": {"workers": 1, "device": "cpu"}}
    settings = options.settings
    if options.data is not None and "=" in options.data:
        settings = [options.data, *settings]
    elif options.data is not None:
        base["data"] = {"source": options.data}
    base = apply_overrides(base, settings)
    print(f"{torch.get_num_threads()} thread(s), {options.turns} turns")
    print(f"{'strategy':<12}{'method':<16}{'run as':<12}{'ms':>8}{'best':>8}{'median':>8}")
    methods = {"fedavg": {"name": "fedavg"}} | {
        f"quped, {bits}": {"name": "quped"} | ({} if bits == "full" else {"bits": int(bits)}) for bits in options.bits
    }
    for strategy in options.strategies:
        with tempfile.TemporaryDirectory() as folder:
            runs = {}
            for place, (name, method) in enumerate(methods.items()):
                own = Path(folder) / str(place)
                own.mkdir()
                recipe = {**base, "method": method, "engine": {**base["engine"], "strategy": strategy}}
                runs[name] = simulation(recipe, own)
            turns = [{name: seconds(run, turn) for name, run in runs.items()} for turn in range(options.turns + 1)][1:]
        least = {name: min(turn[name] for turn in turns) for name in runs}
        for name, run in runs.items():
            median = statistics.median(turn[name] / turn["fedavg"] for turn in turns)
            ways = "/".join(sorted({engine.strategy for engine in run.federation.engines}))
            ratio = least[name] / least["fedavg"]
            print(f"{strategy:<12}{name:<16}{ways:<12}{1e3 * least[name]:>8.1f}{ratio:>8.2f}{median:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
