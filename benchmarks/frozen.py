"""What computing the features of a frozen body once saves: rounds of FedAlt and FedRep with a personal output layer.

    python benchmarks/frozen.py [--clients 100] [--samples 100] [--repeats 5] [--device cuda]

Rounds with and without reuse take turns, stacked and one by one, on a GPU from CUDA graphs. The first two columns are
milliseconds of a round (best of the repeats), then how many times faster reuse is: best and median of the pairs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import nn

from personafl.algorithms import METHODS, Training
from personafl.core.algorithm import Algorithm, Problem
from personafl.core.batches import Steps
from personafl.core.losses import cross_entropy
from personafl.core.net import Net
from personafl.core.optim import Sgd
from personafl.data.federated import FederatedData, Ragged, make_federated
from personafl.fast import frozen
from personafl.models import personal_split, zoo
from personafl.simulate.engine import Engine
from personafl.simulate.federation import Federation
from personafl.simulate.hardware import keep_freed_memory, placed, set_arithmetic
from personafl.simulate.simulator import Simulation
from personafl.storage.store import Store


def cifar_cnn() -> nn.Module:
    """Two 5×5 convolutions and three linear layers, for 32×32 colour images."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(1600, 384), nn.ReLU(), nn.Linear(384, 192), nn.ReLU(), nn.Linear(192, 10)),
    )


# name: module, input shape, batch, divisor of the number of clients
NETWORKS = {
    "mlp 784-200-10": (lambda: zoo.mlp((784,), 10, hidden=(200,)), (784,), 32, 1),
    "cifar cnn": (cifar_cnn, (3, 32, 32), 25, 10),
}


def data_of(clients: int, samples: int, shape: tuple[int, ...]) -> FederatedData:
    """Return random inputs; clients have between half and one and a half times as many samples."""
    generator = torch.Generator().manual_seed(0)
    sizes = np.random.default_rng(0).integers(samples // 2, samples * 3 // 2 + 1, clients)
    total = int(sizes.sum())
    return make_federated(
        name="random",
        x=torch.rand(total, *shape, generator=generator),
        y=torch.randint(10, (total,), generator=generator),
        classes=10,
        train=Ragged.from_lists(np.split(np.arange(total), np.cumsum(sizes)[:-1])),
        validation=Ragged.empty(clients),
        test=Ragged.empty(clients),
        seen=np.arange(clients),
        unseen=np.zeros(0, np.int64),
        client_names=tuple(map(str, range(clients))),
        label_names=tuple("0123456789"),
    )


@contextmanager
def simulation(algorithm: Algorithm, data: FederatedData, network: str, strategy: str) -> Iterator[Simulation]:
    """Yield a simulation of all clients in every round."""
    module = NETWORKS[network][0]()
    net = Net(module).to(data.device, torch.float32)
    problem = Problem(net, cross_entropy, split=personal_split(module, "output"))
    federation = Federation(
        algorithm=algorithm,
        data=data,
        problems=(problem,),
        problem_of=np.zeros(data.clients, dtype=np.int64),
        engines=(replace(Engine.fitted(problem, strategy, 2**36, data.device), chunk=100),),
        seed=0,
        cohort=data.clients,
        sampling="exact",
        weights="examples",
        dtype=torch.float32,
    )
    with tempfile.TemporaryDirectory() as folder:
        yield Simulation(federation, Store(Path(folder) / "states", 2**30))


def seconds(simulation: Simulation, number: int, reuse: bool) -> float:
    """Return how long a round takes."""
    with mock.patch.object(frozen, "halves_of", frozen.halves_of if reuse else lambda *_: None):
        began = time.perf_counter()
        simulation.step(number)
        return time.perf_counter() - began


def main() -> None:
    """Print a line per network, method and strategy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    set_arithmetic("float32", device)
    if device.type == "cpu":
        keep_freed_memory()
    print(f"{options.device}, {torch.get_num_threads()} thread(s), {options.repeats} pairs of rounds each")
    print(f"{'network':<16}{'method':<20}{'strategy':<12}{'off ms':>9}{'on ms':>9}{'best':>8}{'median':>8}")
    for network, (_, shape, batch, divisor) in NETWORKS.items():
        data = placed(data_of(options.clients // divisor, options.samples, shape), device, torch.float32, None)
        for method, epochs in (("fedalt", 1), ("fedalt", 5), ("fedrep", 1)):
            training = Training(work=Steps(epochs=epochs, batch=batch), optimizer=Sgd(lr=0.05))
            algorithm = METHODS[method].build(training)
            for strategy in ("stacked", "sequential") if options.device == "cpu" else ("graphs",):
                work = algorithm, data, network, strategy
                with simulation(*work) as plain, simulation(*work) as reusing:  # recordings are of one or the other
                    turns = range(2 + options.repeats)
                    pairs = [(seconds(plain, turn, False), seconds(reusing, turn, True)) for turn in turns][2:]
                off, on = map(min, zip(*pairs, strict=True))
                median = statistics.median(without / reused for without, reused in pairs)
                print(
                    f"{network:<16}{f'{method}, {epochs} epoch(s)':<20}{strategy:<12}"
                    f"{1000 * off:>9.0f}{1000 * on:>9.0f}{off / on:>8.2f}{median:>8.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
