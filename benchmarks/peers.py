"""Clients per second against other simulators: the same model, data and work, in turns, one process per side.

    python benchmarks/peers.py --quick
    python benchmarks/peers.py --work mlp cifar --method fedavg fedalt --cores 2 --peers-python OTHER/bin/python

Sides: personafl; pfl (`pip install pfl`); Flower's simulation (`pip install "flwr[simulation]"`); loops in the manner
of FedJAX (`pip install jax`) and of PFLlib; and a tight one-by-one loop. Packages may live in an environment of their
own, given by `--peers-python`. A side that is not installed, or does not have the method, says so and is left out.
First all sides train one small round in float64 from the same start, in full batches, and must come to the same shared
model; then they take turns, A B C A B C: rounds for half a second, at least one.

With `--cores 2` ours and Flower have two processes; pfl and the loops are tried with two threads and with one, and the
better of the two counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent / "peers"
sys.path.insert(0, str(HERE))

from work import METHODS, WORKS, start_of  # noqa: E402

OURS = "personafl"
SIDES = (OURS, "pfl", "flower", "fedjax", "pfllib", "tight")
PACKAGES = ("pfl", "flower", "fedjax")  # run by --peers-python
PROCESSES = (OURS, "flower")  # use cores by processes, not by threads
TOLERANCE = 1e-9  # of the norm of the change of the model
ROUGH = {"pfl": 1e-3}  # its weights and sums are float32, whatever the model is


class Side:
    """A process that trains when told."""

    def __init__(self, name: str, cores: int, work: str, method: str, options: argparse.Namespace) -> None:
        python = options.peers_python if name in PACKAGES else sys.executable
        chosen = [word for word in ("quick", "bfloat16", "full_training") if getattr(options, word)]
        threads = "1" if name in PROCESSES else str(cores)
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        self.name, self.cores = name, cores
        self.label = name if name in PROCESSES or options.cores == 1 else f"{name}, {cores} thread(s)"
        self._process = subprocess.Popen(
            [python, str(HERE / "side.py"), name, work, method, str(cores), *chosen],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self.refused: str | None = self._answer().get("refused")
        self.seconds: list[float] = []  # per round

    def ask(self, command: str) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        assert self._process.stdin is not None
        print(command, file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """Let the process end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: its process ended with code {self._process.wait()}")
        fields: dict[str, Any] = json.loads(line)
        return fields


def distances(sides: list[Side], work: str) -> dict[str, float]:
    """Return how far each side's model is from the first one's, relative to how far that has moved."""
    models: dict[str, dict[str, torch.Tensor]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for side in sides:
            if side.name not in models:
                side.ask(f"check {folder}/model.pt")
                models[side.name] = torch.load(f"{folder}/model.pt", weights_only=True)
    reference = models[sides[0].name]
    start = dict(start_of(WORKS[work].checked()).named_parameters())
    moved = torch.stack([(value - start[name].detach()).norm() for name, value in reference.items()]).norm()
    gaps = {
        side: torch.stack([(model[name] - value).norm() for name, value in reference.items()]).norm()
        for side, model in models.items()
    }
    return {side: float(gap / moved) for side, gap in gaps.items()}


def compare(work: str, method: str, options: argparse.Namespace) -> list[str]:
    """Run all sides of one workload; return the rows of its table."""
    sides = [
        Side(name, cores, work, method, options)
        for name in options.sides
        for cores in ({options.cores} if name in PROCESSES else {1, options.cores})
    ]
    for name, refused in {side.name: side.refused for side in sides if side.refused}.items():
        print(f"{work}, {method}: {name} {refused}", file=sys.stderr)
    sides = [side for side in sides if not side.refused]
    gaps = distances(sides, work)
    for number in range(options.turns + 1):
        for side in sides:
            took = side.ask("turn")["seconds"]
            if number:  # the first one warms up
                side.seconds.append(took)
    for side in sides:
        side.close()
    wrong = [name for name, gap in gaps.items() if gap > ROUGH.get(name, TOLERANCE)]
    if wrong:
        raise SystemExit(f"{work}, {method}: {', '.join(wrong)} came to another model than {sides[0].name}'s")
    clients = (WORKS[work].quick() if options.quick else WORKS[work]).clients
    return rows(sides, gaps, f"{work}, {method}", clients, options.against)


def rows(sides: list[Side], gaps: dict[str, float], title: str, clients: int, against: str) -> list[str]:
    """Return clients/s, and how many times as many as one side at its better setting: best and median."""
    base = [side.seconds for side in sides if side.name == against] or [sides[0].seconds]
    found = []
    for side in sides:
        cells = [f"{clients / pick(side.seconds):.3g}" for pick in (min, statistics.median)]
        cells += [f"{min(map(pick, base)) / pick(side.seconds):.2f}" for pick in (min, statistics.median)]
        found.append(f"| {title} | {side.label} | {' | '.join(cells)} | {gaps[side.name]:.0e} |")
    return found


def main() -> None:
    """Read the options and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", nargs="+", choices=list(WORKS), default=list(WORKS))
    parser.add_argument("--method", nargs="+", choices=METHODS, default=["fedavg"])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--against", choices=SIDES, default="pfl", help="the side that ratios are to")
    parser.add_argument("--turns", type=int, default=7, help="timed turns per side")
    parser.add_argument("--cores", type=int, default=1, help="of every side")
    parser.add_argument("--quick", action="store_true", help="fewer clients and turns: does it work here?")
    parser.add_argument("--bfloat16", action="store_true", help="products and convolutions of all sides round to it")
    parser.add_argument("--full-training", action="store_true", help="momentum, weight decay and a schedule")
    parser.add_argument("--peers-python", default=sys.executable, help="python of an environment with the packages")
    options = parser.parse_args()
    if options.full_training and "scaffold" in options.method:
        parser.error("--full-training: scaffold has plain steps alone; choose other methods with --method")
    options.turns = 2 if options.quick else options.turns
    print(f"| work | side | clients/s best | median | × {options.against} best | median | distance |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for work in options.work:
        for method in options.method:
            print(*compare(work, method, options), sep="\n", flush=True)


if __name__ == "__main__":
    main()
