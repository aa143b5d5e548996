"""Seconds of a round beside PFLlib's own program, method by method, in turns: the same data, network, batches and rate.

    git clone https://github.com/TsingZ0/PFLlib OTHER
    python benchmarks/pfllib_time.py --pfllib OTHER/system --data fmnist_pfllib.npz [--part 0.1]

The setting is PFLlib's: its Fashion-MNIST split, its CNN, batch 10, one epoch, rate 0.005, every client in every round,
no scoring in between. Two cores: ours has two worker processes; PFLlib's program, which trains one client after the
other, is run with one thread and with two, and the better counts. Its code is run from where it is, unchanged; packages
that it imports for other things are empty modules. `--part` takes that share of each client's samples, in multiples of
the batch. First both train FedAvg for a round of full batches from the same start, and must come to the same model.
Each side of a method is a process; they take turns, theirs, ours, theirs, ours, after rounds that warm up, and at the
end of the same number of rounds their accuracies on test data stand beside each other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

SIDE = Path(__file__).parent / "peers" / "pfllib_side.py"
BATCH, LR, WARM = 10, 0.005, 2  # rounds that warm up: FedALA's first weights are learned in the second one
TOLERANCE = 1e-4  # of the norm of the change of the model; PFLlib's data are float32


@dataclass(frozen=True)
class Method:
    """PFLlib's name and words, our options for the same work, and which of our models it scores."""

    name: str
    words: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    model: str = "personal"


METHODS = {
    "fedavg": Method("FedAvg", model="global"),
    "fedprox": Method("FedProx", ("-mu", "0.1"), {"proximal": 0.1}, "global"),
    "scaffold": Method("SCAFFOLD", model="global"),
    "feddyn": Method("FedDyn", ("-al", "0.1"), {"pull": 0.1}, "global"),
    "local": Method("Local"),
    "perfedavg": Method("PerAvg", (), {"inner_lr": LR, "tune_steps": 1}),
    "pfedme": Method("pFedMe", ("-lrp", "0.005"), {"outer_lr": LR}, "global"),
    "apfl": Method("APFL", (), {"adaptive": True, "mixing": 1.0}),
    "ditto": Method("Ditto", ("-mu", "0.1"), {"pull": 0.1}),
    "fedper": Method("FedPer"),
    "lgfedavg": Method("LG-FedAvg"),
    "fedbn": Method("FedBN"),
    "fedrep": Method("FedRep", (), {"head_epochs": 1}),
    "fedrod": Method("FedROD"),
    "fedbabu": Method("FedBABU", (), {}, "global"),
    "fedala": Method("FedALA"),
    "fedproto": Method("FedProto"),
    "fedpac": Method("FedPAC"),
    "feddbe": Method("FedDBE"),
    "fedcp": Method("FedCP"),
    "gpfl": Method("GPFL", ("-lam", "0.01", "-mu", "0.1")),
    "fml": Method("FML"),
}


class Side:
    """A run in a process that trains a round when told."""

    def __init__(self, side: str, folder: Path, settings: dict[str, Any], threads: int) -> None:
        self.label = f"{side}, {threads} thread(s)" if side == "pfllib" else side
        self.seconds: list[float] = []
        self.processor: list[float] = []
        file = folder / f"{side}-{threads}.json"
        file.write_text(json.dumps({**settings, "threads": threads}))
        work = folder / "system"  # PFLlib looks for ../dataset
        self.log = (folder / f"{side}-{threads}.log").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, str(SIDE), side, str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            cwd=work,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)},
        )
        self._answer()  # it is ready

    def tell(self, command: str) -> None:
        """Write a command."""
        assert self._process.stdin is not None
        print(command, file=self._process.stdin, flush=True)

    def ask(self, command: str) -> dict[str, Any]:
        """Write a command and wait for its answer."""
        self.tell(command)
        return self._answer()

    def round(self, counted: bool) -> None:
        """Train a round; count its seconds."""
        found = self.ask("round")
        if counted:
            self.seconds.append(found["seconds"])
            self.processor.append(found["processor"])

    def score(self) -> dict[str, Any]:
        """End the run; return accuracies."""
        self.tell("score")
        found = self._answer()
        self._process.wait()
        return found

    def end(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise SystemExit(f"{self.label} ended with code {self._process.wait()}:\n{self.log.read()[-2000:]}")
        found: dict[str, Any] = json.loads(line)
        return found


def deal(source: Path, folder: Path, part: float, equal: int | None = None) -> int:
    """Write a share of each client's samples for both sides, or so many of each; return how many clients there are."""
    data = np.load(source)
    clients = np.unique(data["user"])
    kept = []
    for number, user in enumerate(clients):
        for split, name in ((0, "train"), (1, "test")):
            rows = np.flatnonzero((data["user"] == user) & (data["split"] == split))
            rows = np.random.default_rng(int(user)).permutation(rows)
            whole = max(2 * BATCH, int(part * len(rows)) // BATCH * BATCH) if equal is None else equal
            rows = rows[:whole]
            kept.append((rows, np.full(len(rows), number)))
            at = folder / "dataset" / "FashionMNIST" / name
            at.mkdir(parents=True, exist_ok=True)
            x = (data["images"][rows].astype(np.float32)[:, None] / 255 - 0.5) / 0.5
            np.savez_compressed(at / f"{number}.npz", data={"x": x, "y": data["labels"][rows]})
    rows, users = (np.concatenate(part) for part in zip(*kept, strict=True))
    fields = {"images": data["images"][rows], "labels": data["labels"][rows], "split": data["split"][rows]}
    np.savez(folder / "ours.npz", **fields, user=users)
    (folder / "system").mkdir(exist_ok=True)
    return len(clients)


def settings_of(method: str, folder: Path, clients: int, rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return what both sides read."""
    one = METHODS[method]
    words = ["-algo", one.name, "-nc", str(clients), "-gr", str(rounds + 1), "-lbs", str(BATCH), "-lr", str(LR)]
    return {
        "pfllib": str(options.pfllib.resolve()),
        "words": [*words, *one.words],
        "method": method,
        "options": one.options,
        "data": str(folder / "ours.npz"),
        "out": str(folder / f"run-{method}"),
        "rounds": rounds,
        "lr": LR,
        "batch": BATCH,
        "epochs": 1,
        "workers": options.cores,
        "dtype": "bfloat16" if options.bfloat16 else "float32",
        "start": None,
    }


def same_model(options: argparse.Namespace) -> float:
    """Train three full batches of FedAvg on both sides; return their distance, relative to how far theirs has moved."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        clients = deal(options.data, folder, 1.0, equal=30)
        settings = settings_of("fedavg", folder, clients, 1, options) | {"dtype": "float32"}
        theirs = settings | {"words": [*settings["words"], "-lbs", "30", "-ls", "3", "-lr", "0.1"]}
        side = Side("pfllib", folder, theirs, 1)
        side.ask(f"model {folder}/start.pt")
        side.round(counted=False)
        side.ask(f"model {folder}/theirs.pt")
        side.end()
        own = settings | {"batch": 30, "epochs": 3, "lr": 0.1, "start": f"{folder}/start.pt", "workers": 1}
        side = Side("personafl", folder, own, 1)
        side.round(counted=False)
        side.ask(f"model {folder}/ours.pt")
        side.end()
        files = [folder / f"{name}.pt" for name in ("start", "theirs", "ours")]
        start, there, here = (torch.load(file, weights_only=True) for file in files)
    moved, gap = (
        torch.stack([(a - b).norm() for a, b in zip(one, there, strict=True)]).norm() for one in (start, here)
    )
    return float(gap / moved)


def timed(method: str, folder: Path, clients: int, options: argparse.Namespace) -> str:
    """Take turns with one method; return a line of the table."""
    rounds = WARM + options.turns
    settings = settings_of(method, folder, clients, rounds, options)
    sides: list[Side] = []
    try:
        sides.extend(Side("pfllib", folder, settings, count) for count in sorted({1, options.cores}))
        sides.append(ours := Side("personafl", folder, settings, 1))
        for number in range(rounds):
            for side in sides:
                side.round(counted=number >= WARM)
        there, *_, here = [side.score() for side in sides]
    finally:
        for side in sides:
            side.end()
    sides.remove(ours)
    model = METHODS[method].model
    best = min(sides, key=lambda side: min(side.seconds))
    cells = [f"{min(side.seconds):.2f}" for side in (*sides, ours)]
    ratios = [f"{pick(best.seconds) / pick(ours.seconds):.1f}" for pick in (min, statistics.median)]
    spent = f"{min(min(side.processor) for side in sides) / min(ours.processor):.1f}"
    return row(method, *cells, *ratios, spent, f"{100 * there['accuracy']:.1f}", f"{100 * here[model]:.1f}")


def row(*cells: str) -> str:
    """Return a line of a table."""
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Check, and print the table line by line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pfllib", type=Path, required=True, help="the folder `system` of a copy of PFLlib")
    parser.add_argument("--data", type=Path, required=True, help="fmnist_pfllib.npz")
    parser.add_argument("--methods", default=",".join(METHODS), help="by our names")
    parser.add_argument("--part", type=float, default=1.0, help="share of each client's samples")
    parser.add_argument("--turns", type=int, default=3, help="timed rounds of each side")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--bfloat16", action="store_true", help="ours rounds the factors of products to it")
    parser.add_argument("--no-check", action="store_true", help="leave out the comparison of models")
    options = parser.parse_args()
    if not (options.pfllib / "main.py").exists():
        parser.error(f"--pfllib {options.pfllib}: has no main.py; give PFLlib's folder `system`")
    names: Sequence[str] = options.methods.split(",")
    if unknown := [name for name in names if name not in METHODS]:
        parser.error(f"--methods: no {unknown[0]} here; there are {', '.join(METHODS)}")
    if not options.no_check and (gap := same_model(options)) > TOLERANCE:
        raise SystemExit(f"after one round of FedAvg in full batches the models differ by {gap:.1e} of their change")
    if not options.no_check:
        print(f"FedAvg, a round in full batches: models differ by {gap:.0e} of their change\n")
    threads = [f"PFLlib s, {count} thread{'s'[: count > 1]}" for count in sorted({1, options.cores})]
    titles = ["method", *threads, "ours s", "× best", "× median", "× processor", "PFLlib %", "ours %"]
    print(row(*titles), row(*["---"] * len(titles)), sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as name:
        clients = deal(options.data, Path(name), options.part)
        for method in names:
            try:
                print(timed(method, Path(name), clients, options), flush=True)
            except SystemExit as error:  # the others go on
                print(f"{method}: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
