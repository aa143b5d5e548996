"""What robust rules cost beside the mean: seconds of a round's aggregation, and memory beyond the uploads.

    python benchmarks/robust_cost.py [--clients 100] [--parameters 1000000] [--hostile 10] [--device cpu]
        [--rules median,krum] [--turns 3]

Uploads come in parts of ten clients, as an engine hands them on, in float32. MDA and SMEA go through all sets of n − f:
they are measured with 2 hostile clients, and with 1. The rules take turns, and each counts by its best. On a CPU
seconds are a processor's, of all threads, so that a machine may be busy with other things. Memory is the most that
there was above what the uploads and the model take: of the process (Linux), or allocated on the GPU.
"""

import argparse
import ctypes
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from personafl.algorithms import METHODS, Training
from personafl.algorithms.averaging import Averaging, Change
from personafl.core.algorithm import Problem, ServerRule
from personafl.core.losses import cross_entropy
from personafl.core.net import Net
from personafl.core.shape import DataShape
from personafl.robust.table import MIXES, RULES
from personafl.uploads.robust import RobustServer

COLUMNS = 1000


class Memory:
    """The most memory that is used between its beginning and `most`, above what was used then."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        if self._gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        else:
            ctypes.CDLL(None).malloc_trim(0)  # what was freed before would else be taken again unseen
            Path("/proc/self/clear_refs").write_text("5")  # the peak is now what there is
            self._before = _kilobytes("VmRSS") * 1024

    def most(self) -> float:
        """Return it in megabytes."""
        if self._gpu:
            torch.cuda.synchronize()
        most = torch.cuda.max_memory_allocated() if self._gpu else _kilobytes("VmHWM") * 1024
        return (most - self._before) / 2**20


def _kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def measured(rule: ServerRule, parts: list[Change], problem: Problem, start: dict[str, torch.Tensor]) -> Any:
    """Return the seconds of joining and updating, and the megabytes beyond what was there."""
    device = start["weight"].device
    state, joined = rule.init(problem, start, 1.0), None
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    memory, begin = Memory(device), clock()
    for part in parts:
        joined = rule.join(state, joined, part, torch.ones(len(part.loss), device=device))
    assert joined is not None
    rule.update(state, joined, 0)
    beyond = memory.most()
    return clock() - begin, beyond


def rules(chosen: list[str], hostile: int) -> dict[str, ServerRule]:
    """Return the rules by name, the mean first."""
    client = METHODS["fedavg"].build(Training()).client
    found: dict[str, ServerRule] = {"weighted mean": Averaging()}
    both: list[tuple[str, tuple[str, ...]]] = [*((name, ()) for name in RULES), ("trimmed-mean", ("nnm",))]
    for name, before in [*both, ("geometric-median", ("arc", "nnm"))]:
        if name in chosen:
            f = {"mda": 2, "smea": 1}.get(name, hostile)
            steps = tuple(MIXES[step](f=f) for step in before)
            rule = RobustServer(rule=Averaging(), robust=RULES[name](f=f), client=client, before=steps)
            found[" + ".join((*before, name))] = rule
    return found


def main() -> None:
    """Print a line for each rule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--parameters", type=int, default=1_000_000, help=f"a multiple of {COLUMNS}")
    parser.add_argument("--hostile", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    device = torch.device(given.device)
    generator = torch.Generator(device).manual_seed(0)
    shape = given.parameters // COLUMNS, COLUMNS
    parts = [
        Change({"weight": torch.randn(10, *shape, generator=generator, device=device)}, torch.zeros(10).to(device))
        for _ in range(given.clients // 10)
    ]
    net = Net(nn.Linear(COLUMNS, shape[0], bias=False)).to(device, torch.float32)
    problem = Problem(net, cross_entropy, data=DataShape(input_shape=(COLUMNS,), classes=shape[0]))
    start = {"weight": torch.zeros(shape, device=device)}
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(given.turns):
        for name, rule in rules(given.rules.split(","), given.hostile).items():
            found.setdefault(name, []).append(measured(rule, parts, problem, start))
    base = min(seconds for seconds, _ in found["weighted mean"])
    uploads = 4 * given.clients * given.parameters / 2**20
    print(f"{given.clients} uploads of {given.parameters:,} parameters, {uploads:.0f} MB, {device.type}")
    for name, several in found.items():
        seconds, beyond = min(one[0] for one in several), max(one[1] for one in several)
        print(f"{name:28s} {seconds:8.4f} s, {seconds / base:6.1f} times the mean, {beyond:7.1f} MB beyond the uploads")


if __name__ == "__main__":
    main()
