"""What robust rules cost beside the mean: seconds of a round's aggregation, and memory beyond the uploads.

    python benchmarks/robust_cost.py [--clients 100] [--parameters 1000000] [--hostile 10] [--device cpu]
        [--rules median,krum]

Uploads come in parts of ten clients, as an engine hands them on, in float32. MDA and SMEA go through all sets of n − f:
they are measured with 2 hostile clients, and with 1.
"""

import argparse
import resource
import time
from typing import Any

import torch

from personafl.algorithms import METHODS, Training
from personafl.algorithms.averaging import Averaging, Change
from personafl.algorithms.robust import RobustServer
from personafl.core.algorithm import ServerRule
from personafl.robust.table import MIXES, RULES

PROBLEM: Any = None  # averaging does not look at it


def measured(rule: ServerRule, parts: list[Change], start: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Return the seconds of joining and updating, and the megabytes of a GPU beyond what was there."""
    device = start["w"].device
    state, found = rule.init(PROBLEM, start, 1.0), []
    for number in range(3):
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        begin, joined = time.perf_counter(), None
        for part in parts:
            joined = rule.join(state, joined, part, torch.ones(len(part.loss), device=device))
        assert joined is not None
        rule.update(state, joined, number)
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    beyond = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else 0
    return min(found), beyond / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--hostile", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rules", default=",".join(RULES))
    given = parser.parse_args()
    device = torch.device(given.device)
    generator = torch.Generator(device).manual_seed(0)
    parts = [
        Change({"w": torch.randn(10, given.parameters, generator=generator, device=device)}, torch.zeros(10).to(device))
        for _ in range(given.clients // 10)
    ]
    start = {"w": torch.zeros(given.parameters, device=device)}
    client = METHODS["fedavg"].build(Training()).client
    base = measured(Averaging(), parts, start)[0]
    print(f"{'weighted mean':28s} {base:8.3f} s")
    for name, before in [*((name, ()) for name in RULES), ("trimmed-mean", ("nnm",)), ("median", ("arc", "nnm"))]:
        f = {"mda": 2, "smea": 1}.get(name, given.hostile)
        if RULES[name].from_centre or name not in given.rules.split(","):
            continue  # its first guess is like an upload, which takes a network
        steps = tuple(MIXES[step](f=f) for step in before)
        rule = RobustServer(rule=Averaging(), robust=RULES[name](f=f), client=client, before=steps)
        seconds, beyond = measured(rule, parts, start)
        more = f", {beyond:7.1f} MB beyond" if device.type == "cuda" else ""
        named = " + ".join((*before, name))
        print(f"{named:28s} {seconds:8.3f} s, {seconds / base:6.1f} times the mean{more}", flush=True)
    print(f"largest memory of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:.0f} MB")


if __name__ == "__main__":
    main()
