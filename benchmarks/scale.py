"""Time per round and memory against the number of registered clients, and against that of personal states.

    python benchmarks/scale.py            # both tables, some minutes
    python benchmarks/scale.py --quick    # up to 100,000 registered clients, 20,000 states

Each line is a process of its own: a whole run with its run directory and checkpoints, up to its last round. Everyone
has an output layer of their own (FedAlt); the clients share a small pool of rows, so that registering one costs its
row numbers alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from personafl import api
from personafl.data.federated import FederatedData, Numbered, Ragged, make_federated
from personafl.runs.listener import Progress

POOL, CLASSES = 4096, 10
TRAIN, TEST = 10, 1  # rows of a client
WARM = 3  # rounds that are not timed
REPEATS = 3
BUDGETS = (64, 256)  # MiB
ENGINE = {"workers": 1, "strategy": "stacked"}  # all memory and time is of one process, and no line is run otherwise
ROUNDS = {  # the workload of the first table
    "engine": ENGINE,
    "model": {"name": "mlp", "hidden": [200], "personal": "output"},
    "training": {"epochs": 1, "batch": 10, "lr": 0.05},
    "federation": {"cohort": 100},
}
STATES = {  # of the second one: a small body, so that most of the time goes into personal states
    "engine": ENGINE,
    "model": {"name": "mlp", "hidden": [200], "personal": "output"},
    "training": {"steps": 1, "batch": 10, "lr": 0.05},
    "federation": {"cohort": 250},
}


class Enough(Exception):
    """Ends a run before its last models are scored."""


def registered(clients: int, inputs: int) -> FederatedData:
    """Return so many clients, whose rows are drawn from one pool."""
    generator = np.random.default_rng(0)
    pool = generator.standard_normal((POOL, inputs), dtype=np.float32)
    label = (pool[:, :CLASSES]).argmax(axis=1)

    def rows(each: int) -> Ragged:
        return Ragged(generator.integers(POOL, size=clients * each), np.arange(clients + 1) * each)

    return make_federated(
        name="pool",
        x=torch.from_numpy(pool),
        y=torch.from_numpy(label),
        classes=CLASSES,
        train=rows(TRAIN),
        validation=Ragged.empty(clients),
        test=rows(TEST),
        seen=np.arange(clients),
        unseen=np.arange(0),
        client_names=Numbered(clients),
        label_names=tuple(map(str, range(CLASSES))),
    )


def resident() -> float:
    """Return the resident memory in MiB."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 2**10


def measure(clients: int, inputs: int, rounds: int, recipe: dict[str, Any]) -> dict[str, Any]:
    """Run rounds, and return their seconds, the memory after the last and the most after any of them, and the disk."""
    times: list[tuple[float, float]] = []  # after each round: on the clock, of the processor
    memory: list[float] = []

    def listener(progress: object) -> None:
        if not isinstance(progress, Progress):
            return
        times.append((time.perf_counter(), time.process_time()))
        memory.append(resident())
        if len(times) == rounds:
            raise Enough

    more = {"rounds": rounds + 1, "evaluation": {"every": 0}, "method": {"name": "fedalt"}}
    with tempfile.TemporaryDirectory() as folder:
        try:
            api.run({**more, **recipe}, data=registered(clients, inputs), out=Path(folder) / "run", listener=listener)
        except Enough:
            disk = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()) / 2**20
    clock, processor = np.diff(times[WARM:], axis=0).T
    return {
        "best": float(clock.min()),
        "median": float(np.median(clock)),
        "mean": float(clock.mean()),  # with checkpoints
        "processor": float(np.median(processor)),
        "memory": memory[-1],
        "most": max(memory),
        "disk": disk,
    }


def in_process(**arguments: Any) -> dict[str, Any]:
    """Measure in a fresh process."""
    command = [sys.executable, __file__, "--measure", json.dumps(arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def interleaved(plan: dict[str, dict[str, Any]], repeats: int) -> dict[str, dict[str, float]]:
    """Measure each entry of a plan several times, in turns: whatever else the machine does meets all of them."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in plan}
    for _ in range(repeats):
        for name, arguments in plan.items():
            found[name].append(in_process(**arguments))
    summary = {"best": min, "processor": min, "memory": min, "most": max}  # the rest: the median
    return {
        name: {key: summary.get(key, statistics.median)(run[key] for run in runs) for key in runs[0]}
        for name, runs in found.items()
    }


def registered_table(counts: list[int]) -> None:
    """Print how rounds of 100 clients depend on how many are registered."""
    plan = {f"{n:,}": {"clients": n, "inputs": 784, "rounds": 20, "recipe": ROUNDS} for n in counts}
    found = interleaved(plan, REPEATS)
    print("Rounds of 100 clients, MLP 784-200-10 with a personal output layer (FedAlt): ms, and against the first line")
    print("  registered         best       median    processor   memory (MiB)   bytes per client more")
    base = found[f"{counts[0]:,}"]
    for count, (name, one) in zip(counts, found.items(), strict=True):
        times = [f"{1000 * one[key]:>8.1f}{one[key] / base[key]:>5.2f}" for key in ("best", "median", "processor")]
        more = (one["memory"] - base["memory"]) * 2**20 / count
        bytes_more = f"{more:.0f}" if count >= 10**5 else "–"  # of fewer, all is noise
        print(f"{name:>12}{''.join(times)}{one['memory']:>15.0f}{bytes_more:>24}", flush=True)


def states_table(clients: int, rounds: int) -> None:
    """Print what personal states cost that do not fit the store's memory, against clients that keep none."""
    common = {"clients": clients, "inputs": 16, "rounds": rounds}
    plan = {"none": {**common, "recipe": {**STATES, "method": {"name": "fedalt", "stateful": False}}}}
    for budget in BUDGETS:
        engine = {**ENGINE, "store_mb": budget, "checkpoint_seconds": 2.0}
        plan[f"{budget} MiB"] = {**common, "recipe": {**STATES, "engine": engine}}
    found = interleaved(plan, 1)
    print(f"\n{rounds} rounds of 250 of {clients:,} clients, 8,040 bytes of personal state each; checkpoints every 2 s")
    print("   budget   round, median (ms)   mean   processor   most memory (MiB)   more than without   disk (MiB)")
    for name, one in found.items():
        print(
            f"{name:>9}{1000 * one['median']:>21.1f}{1000 * one['mean']:>7.1f}{1000 * one['processor']:>12.1f}"
            f"{one['most']:>20.0f}{one['most'] - found['none']['most']:>20.0f}{one['disk']:>13.0f}",
            flush=True,
        )


def main() -> None:
    """Print the tables, or measure for one of their lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller tables")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.measure:
        print(json.dumps(measure(**json.loads(options.measure))))
        return
    registered_table([10**3, 10**4, 10**5] if options.quick else [10**3, 10**4, 10**5, 10**6])
    states_table(*((22_000, 240) if options.quick else (110_000, 1200)))  # nine of ten are sampled


if __name__ == "__main__":
    main()
