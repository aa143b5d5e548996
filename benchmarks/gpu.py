"""Rounds of stacked clients on a GPU: one by one, stacked, from CUDA graphs, and the floor that no method can beat.

    python benchmarks/gpu.py [--works mlp-100,cifar] [--repeats 5] [--dtype tf32] [--full-training]
    python benchmarks/gpu.py --methods fedavg,quped,pfedme,fedslr [--works cnn1] [--full-training]

FedAvg on synthetic data, all clients in every round, by plain SGD or, `--full-training`, with momentum, weight decay
and a schedule. A round is a step of the simulator: it draws batches, trains, checks and averages. The floor is one
shared model on the same samples, as few kernels as there are (the steps of one client whose batches are those of all
clients, from a CUDA graph, with batches drawn beforehand). Streamed is from CUDA graphs with the data in the host's
memory. The ways take turns; milliseconds are the best of the repeats, one by one of a single round. With `--methods`
they are rounds of these from CUDA graphs, with defaults but for QuPeD's two bits, beside the first's. Without a
GPU it says so and does nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from work import cifar, femnist, mlp, resnet

from personafl.algorithms import METHODS, Training
from personafl.core.algorithm import Problem
from personafl.core.batches import Steps
from personafl.core.losses import cross_entropy
from personafl.core.net import Net
from personafl.core.optim import Sgd
from personafl.core.schedule import Exponential
from personafl.data.federated import Ragged, make_federated
from personafl.data.window import Window
from personafl.fast.cuda_graphs import Graphs
from personafl.models import convolutional
from personafl.simulate.engine import Engine, gather
from personafl.simulate.federation import Federation
from personafl.simulate.hardware import set_arithmetic
from personafl.simulate.simulator import Simulation
from personafl.simulate.trainer import bound
from personafl.storage.store import Store

PLAIN = Sgd(lr=0.05)
FULL = replace(PLAIN, momentum=0.9, weight_decay=1e-4, schedule=Exponential(rate=0.99))


@dataclass(frozen=True)
class Work:
    """Clients that each take `steps` steps of `batch` samples."""

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    clients: int
    steps: int
    batch: int
    optimizer: Sgd = PLAIN


IMAGE = (3, 32, 32)
WORKS = {
    "mlp-100": Work(mlp, (1, 28, 28), 10, 100, 10, 32),
    "mlp-1000": Work(mlp, (1, 28, 28), 10, 1000, 10, 32),
    "femnist": Work(femnist, (1, 28, 28), 62, 50, 5, 20),
    "cifar": Work(cifar, IMAGE, 10, 50, 5, 10),  # as the benchmark of pfl-research
    "resnet20": Work(resnet, IMAGE, 10, 20, 5, 25),
    "resnet18": Work(lambda: convolutional.resnet18(IMAGE, 10), IMAGE, 10, 10, 5, 25),
    "cnn1": Work(lambda: convolutional.cnn1((1, 28, 28), 10, filters=32), (1, 28, 28), 10, 50, 10, 25),  # QuPeD's
    "cnn1-64": Work(lambda: convolutional.cnn1((1, 28, 28), 10), (1, 28, 28), 10, 50, 10, 25),
}
USUAL = tuple(name for name in WORKS if not name.startswith("cnn1"))
OPTIONS = {"quped": {"bits": 2}, "qupel": {"bits": 2}}
GPU = torch.device("cuda")


def simulation(work: Work, strategy: str, dtype: str, *, streamed: bool = False, method: str = "fedavg") -> Simulation:
    """Return a simulation of the workload, with its data on the GPU or brought there for each round."""
    generator = torch.Generator().manual_seed(0)
    samples = work.steps * work.batch
    total = work.clients * samples
    data = make_federated(
        name="synthetic",
        x=torch.randn(total, *work.shape, generator=generator),
        y=torch.randint(work.classes, (total,), generator=generator),
        classes=work.classes,
        train=Ragged(np.arange(total), np.arange(work.clients + 1) * samples),
        validation=Ragged.empty(work.clients),
        test=Ragged.empty(work.clients),
        seen=np.arange(work.clients),
        unseen=np.arange(0),
        client_names=tuple(map(str, range(work.clients))),
        label_names=tuple(map(str, range(work.classes))),
    )
    if streamed:
        data = replace(data, window=Window(data.x, data.y, total, GPU))
    else:
        data = replace(data, x=data.x.to(GPU), y=data.y.to(GPU))
    torch.manual_seed(0)
    problem = Problem(Net(work.model()).to(GPU, torch.float32), cross_entropy)
    training = Training(work=Steps(epochs=1, batch=work.batch), optimizer=work.optimizer)
    federation = Federation(
        algorithm=METHODS[method].build(training, **OPTIONS.get(method, {})),
        data=data,
        problems=(problem,),
        problem_of=np.zeros(work.clients, dtype=np.int64),
        engines=(Engine.fitted(problem, strategy, 2**36, GPU, bfloat16=dtype == "bfloat16"),),
        seed=0,
        cohort=work.clients,
        sampling="exact",
        weights="examples",
        dtype=torch.float32,
    )
    return Simulation(federation, Store(Path("/nowhere"), 2**30))


def rounds(
    work: Work, strategy: str, dtype: str, *, streamed: bool = False, method: str = "fedavg"
) -> Callable[[], object]:
    """Return what runs one more round each time."""
    simulated = simulation(work, strategy, dtype, streamed=streamed, method=method)
    number = iter(range(10**9))
    return lambda: simulated.step(next(number))


def floor(work: Work, dtype: str) -> Callable[[], object]:
    """Return what trains one model on a round's samples."""
    fed = simulation(work, "stacked", dtype).federation
    data = gather(fed.data, fed.data.seen, fed.algorithm.client.phases, 0, 0)
    (phase,) = data.phases.values()

    def together(each: torch.Tensor) -> torch.Tensor:  # [clients, steps, batch] -> [steps, clients · batch]
        return each.transpose(0, 1).flatten(1)

    joined = phase._replace(
        rows=together(phase.rows)[None],
        real=together(phase.real)[None],
        key=phase.key[:1],
        padding=replace(phase.padding, most=0),  # it was how many samples a client has
    )
    data = data._replace(phases={"local": joined}, examples=data.examples[:1])
    one = replace(fed.engines[0], graphs=Graphs())
    down = simulation(work, "stacked", dtype).down()
    update = bound(fed.algorithm.client.update, fed.problems[0])
    return lambda: one.train(update, down, fed.algorithm.client.init(fed.problems[0], down, torch.Generator()), data)


def milliseconds(call: Callable[[], object]) -> float:
    """Return the time of one call."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - began)


def taken_in_turns(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the best time of each way."""
    for _ in range(3):  # warm up, and record
        for way in ways.values():
            way()
    spent = [{way: milliseconds(call) for way, call in ways.items()} for _ in range(repeats)]
    return {way: min(turn[way] for turn in spent) for way in ways}


def compare_methods(works: list[str], methods: list[str], options: argparse.Namespace) -> None:
    """Print a line per workload and method."""
    print(f"{'work':<12}{'method':<12}{'graphs':>10}{'of ' + methods[0]:>12}")
    for name in works:
        work = replace(WORKS[name], optimizer=FULL if options.full_training else PLAIN)
        ways = {method: rounds(work, "graphs", options.dtype, method=method) for method in methods}
        best = taken_in_turns(ways, options.repeats)
        for method, time_ in best.items():
            print(f"{name:<12}{method:<12}{time_:>10.2f}{time_ / best[methods[0]]:>12.2f}", flush=True)


def main() -> None:
    """Print a line per workload."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--works")
    parser.add_argument("--methods", help="rounds of these, the first of which is the measure")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=("float32", "tf32", "bfloat16"), default="float32")
    parser.add_argument("--full-training", action="store_true", help="momentum, weight decay and a schedule")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure")
        return
    set_arithmetic(options.dtype, GPU)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.dtype}, "
        f"{'full training' if options.full_training else 'plain SGD'}; ms a round, and times the floor"
    )
    if options.methods:
        compare_methods((options.works or "cnn1").split(","), options.methods.split(","), options)
        return
    columns = (("one by one", 12), *((way, 10) for way in ("stacked", "graphs", "streamed", "floor")))
    print(f"{'work':<12}", *(f"{name:>{width}}" for name, width in columns), f"{'gain':>8}{'of floor':>10}", sep="")
    for name in options.works.split(",") if options.works else USUAL:
        work = replace(WORKS[name], optimizer=FULL if options.full_training else PLAIN)
        ways = {
            "stacked": rounds(work, "stacked", options.dtype),
            "graphs": rounds(work, "graphs", options.dtype),
            "streamed": rounds(work, "graphs", options.dtype, streamed=True),
            "floor": floor(work, options.dtype),
        }
        best = taken_in_turns(ways, options.repeats)
        rounds(replace(work, clients=2), "sequential", options.dtype)()  # warm up
        best["sequential"] = milliseconds(rounds(work, "sequential", options.dtype))
        print(
            f"{name:<12}{best['sequential']:>12.1f}{best['stacked']:>10.2f}{best['graphs']:>10.2f}"
            f"{best['streamed']:>10.2f}{best['floor']:>10.2f}"
            f"{best['sequential'] / best['graphs']:>8.1f}{best['graphs'] / best['floor']:>10.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
