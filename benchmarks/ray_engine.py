"""Rounds per second of a Ray cluster of two nodes with one core each on this machine, against two local workers.

    python benchmarks/ray_engine.py [--rounds 10] [--repeats 3] [--only rounds|scoring] [--times 10]

The sides take turns, and only one of them exists at a time: an idle cluster has a few processes that cost time too. The
first round is not counted, in which workers start and the data are sent. Then a check that both have come to the same
bits. Columns: rounds per second (best of the repeats) and Ray's as a share of the local ones (median of the pairs);
CPU seconds a round of all processes (least of the repeats), which other load on the machine changes less; kilobytes of
tensors a round that this process sends to Ray and receives from it, and at the checkpoint after the last round. Rates
from a machine that is busy with something else say nothing: look at the load, which is printed first.

Then a scoring of all clients' models: by one process, by two local workers, by the nodes; all find the same bits. Each
has one thread (OMP_NUM_THREADS=1). Columns: CPU seconds of the process that computes most (least of the repeats), which
is how long it takes where each has a core; how many times less that is than with one process (median of the repeats);
kilobytes of tensors that this process sends to Ray and receives from it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from personafl import Recipe
from personafl.core import tree
from personafl.data.federated import Ragged
from personafl.recipe.values import apply_overrides
from personafl.runs.build import prepare
from personafl.runs.job import Job
from personafl.runs.scoring import score
from personafl.simulate.cloud import make_simulation
from personafl.simulate.ray import node
from personafl.simulate.ray.cluster import connected
from personafl.storage.store import Store

COMMON = ["data.partition.kind=dirichlet", "data.partition.clients=40", "engine.workers=2", "training.epochs=5"]
CASES = {
    "fedavg, linear, one by one": ["method.name=fedavg", "model.name=linear", "engine.strategy=sequential"],
    "fedavg, cnn, one by one": ["method.name=fedavg", "model.name=cnn", "engine.strategy=sequential"],
    "fedalt, cnn, one by one": [
        "method.name=fedalt",
        "model.name=cnn",
        "model.personal=output",
        "engine.strategy=sequential",
    ],
    "ditto, mlp, stacked": ["method.name=ditto", "model.name=mlp", "model.hidden=[1000]", "engine.strategy=stacked"],
}


@contextmanager
def two_nodes() -> Iterator[None]:
    """Have training done by a cluster of two nodes."""
    import ray.cluster_utils

    cluster = ray.cluster_utils.Cluster()
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, include_dashboard=False, node_ip_address="127.0.0.1")
        with connected(cluster.address):
            yield
    finally:
        cluster.shutdown()


def processor_seconds() -> dict[int, float]:
    """Return what this process and all that it started, and those started, have used, by process."""
    parent, used = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = path.read_text().rpartition(")")[2].split()
            parent[int(path.parent.name)] = int(fields[1])
            used[int(path.parent.name)] = sum(map(int, fields[11:15]))  # own and of ended children, in ticks
    ours = {os.getpid()}
    while more := {process for process, by in parent.items() if by in ours} - ours:
        ours |= more
    return {process: used[process] / os.sysconf("SC_CLK_TCK") for process in ours}


def cpu_seconds() -> float:
    """Return what they have used together."""
    return sum(processor_seconds().values())


class Travelled:
    """The bytes of tensors that this process has sent to Ray and received from it."""

    def __init__(self) -> None:
        self.sent = self.received = 0
        pack, unpack = node._packed, node._unpacked

        @functools.wraps(pack)
        def packed(value: torch.Tensor) -> Any:
            self.sent += value.nbytes
            return pack(value)

        @functools.wraps(unpack)
        def unpacked(packed: Any) -> torch.Tensor:
            value = unpack(packed)
            self.received += value.nbytes
            return value

        node._packed, node._unpacked = packed, unpacked


class Measured(NamedTuple):
    """Rounds per second, CPU seconds and kilobytes a round, kilobytes at a checkpoint, the server's state after it."""

    rate: float
    cpu: float
    sent: float
    received: float
    checkpoint: float
    server: list[torch.Tensor]


def measure(job: Job, rounds: int, travelled: Travelled) -> Measured:
    """Run rounds and then flush the states."""
    with tempfile.TemporaryDirectory() as folder:
        simulation = make_simulation(job.federation, Store(Path(folder) / "states", 2**30))
        simulation.step(0)
        sent, received = travelled.sent, travelled.received
        used, began = cpu_seconds(), time.perf_counter()
        for number in range(1, rounds + 1):
            simulation.step(number)
        spent, used = time.perf_counter() - began, cpu_seconds() - used
        sent, received, before = travelled.sent - sent, travelled.received - received, travelled.received
        simulation.store.flush()
        checkpoint = travelled.received - before
        simulation.workers.close()
    kilobytes = sent / rounds / 1e3, received / rounds / 1e3, checkpoint / 1e3
    return Measured(rounds / spent, used / rounds, *kilobytes, tree.leaves(simulation.server))


SIDES = {"alone": (1, nullcontext), "local": (2, nullcontext), "ray": (2, two_nodes)}  # workers, and where they are


class Scoring(NamedTuple):
    """CPU seconds of who computes most in a scoring, kilobytes sent and received for it, and what was found."""

    seconds: float
    sent: float
    received: float
    found: list[NDArray[np.float64]]


def measure_scoring(job: Job, workers: int, times: int, travelled: Travelled) -> Scoring:
    """Train a round, and score each training sample so many times, twice: the second scoring counts."""
    federation = dataclasses.replace(job.federation, workers=workers)
    data = federation.data
    rows = Ragged.from_lists([np.tile(data.train[client], times) for client in range(data.clients)])
    with tempfile.TemporaryDirectory() as folder:
        simulation = make_simulation(federation, Store(Path(folder) / "states", 2**30))
        simulation.step(0)
        for _ in range(2):
            sent, received, before = travelled.sent, travelled.received, processor_seconds()
            scored = score(simulation, None, data.seen, {"test": rows}, blends=False)
            seconds = max(now - before.get(process, 0.0) for process, now in processor_seconds().items())
        simulation.workers.close()
    found = [values for scores in scored.scores.values() for values in (scores.accuracy, scores.loss)]
    return Scoring(seconds, (travelled.sent - sent) / 1e3, (travelled.received - received) / 1e3, found)


def compare_scoring(jobs: dict[str, Job], repeats: int, times: int, travelled: Travelled) -> None:
    """Score in turns, and print what it takes."""
    found: dict[str, dict[str, list[Scoring]]] = {name: {side: [] for side in SIDES} for name in jobs}
    for _ in range(repeats):
        for side, (workers, context) in SIDES.items():
            with context():
                for name, job in jobs.items():
                    found[name][side].append(measure_scoring(job, workers, times, travelled))
    titles = ("alone CPU s", "local CPU s", "ray CPU s", "local less", "ray less", "kB out", "kB in")
    print(f"{'a scoring':30}" + "".join(f"{title:>15}" for title in titles))
    for name, sides in found.items():
        alone, last = sides["alone"], sides["ray"][-1]
        for own in (alone[-1], sides["local"][-1]):
            assert all(map(np.array_equal, own.found, last.found)), name
        seconds = "".join(f"{min(each.seconds for each in own):15.3f}" for own in sides.values())
        less = (
            statistics.median(one.seconds / other.seconds for one, other in zip(alone, sides[side], strict=True))
            for side in ("local", "ray")
        )
        print(
            f"{name:30}{seconds}"
            + "".join(f"{share:15.2f}" for share in less)
            + f"{last.sent:15.1f}{last.received:15.1f}"
        )


def compare_rounds(jobs: dict[str, Job], rounds: int, repeats: int, travelled: Travelled) -> None:
    """Train in turns, and print what it takes."""
    found: dict[str, dict[str, list[Measured]]] = {name: {"local": [], "ray": []} for name in jobs}
    for _ in range(repeats):
        for side, context in (("local", nullcontext), ("ray", two_nodes)):
            with context():
                for name, job in jobs.items():
                    found[name][side].append(measure(job, rounds, travelled))
        for name, sides in found.items():
            assert all(map(torch.equal, sides["local"][-1].server, sides["ray"][-1].server)), name
    titles = ("local", "ray", "share", "local CPU s", "ray CPU s", "kB out", "kB in", "checkpoint kB")
    print(" " * 30 + "".join(f"{title:>15}" for title in titles))
    for name, sides in found.items():
        local, other = sides["local"], sides["ray"]
        share = statistics.median(there.rate / here.rate for here, there in zip(local, other, strict=True))
        rates = f"{max(each.rate for each in local):15.2f}{max(each.rate for each in other):15.2f}{share:15.0%}"
        costs = f"{min(each.cpu for each in local):15.3f}{min(each.cpu for each in other):15.3f}"
        print(f"{name:30}{rates}{costs}{other[-1].sent:15.1f}{other[-1].received:15.1f}{other[-1].checkpoint:15.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=["rounds", "scoring"])
    parser.add_argument("--times", type=int, default=10, help="that each training sample is scored")
    arguments = parser.parse_args()
    os.environ["RAY_AUTH_TOKEN"] = os.urandom(32).hex()
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    jobs = {name: prepare(Recipe.parse(apply_overrides({}, [*COMMON, *words]))) for name, words in CASES.items()}
    travelled = Travelled()
    print("load of the machine before:", *os.getloadavg())
    if arguments.only != "scoring":
        compare_rounds(jobs, arguments.rounds, arguments.repeats, travelled)
    if arguments.only != "rounds":
        compare_scoring(jobs, arguments.repeats, arguments.times, travelled)


if __name__ == "__main__":
    main()
