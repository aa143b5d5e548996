"""What protected samples cost: the same rounds of FedAvg plain and with clipped gradients of each sample and noise.

    python benchmarks/sample_privacy.py [--device cuda] [--turns 15]

A perceptron (784-64-10, 16 clients) and a small CNN (28 × 28, 4 clients), 64 samples each, batch 32, one epoch, one
thread, with memory kept as a run keeps it. The ways take turns, and what is printed is the median time of each
(processor time; on a GPU time by the clock) and the median of the ratios of a turn. On a GPU there are ten times as
many clients, and both ways are replayed from recordings (graphs) or not (stacked).
"""

import argparse
import statistics
import time

import numpy as np
import torch

from personafl.algorithms import METHODS, Training
from personafl.core import tree
from personafl.core.algorithm import Problem
from personafl.core.batches import Steps
from personafl.core.losses import cross_entropy
from personafl.core.net import Net
from personafl.core.optim import Sgd
from personafl.data.federated import Ragged, make_federated
from personafl.fast.cuda_graphs import Graphs
from personafl.models import zoo
from personafl.simulate.engine import Engine, Strategy, gather
from personafl.simulate.hardware import keep_freed_memory, placed
from personafl.simulate.protection import ALWAYS, Protection
from personafl.simulate.trainer import bound

SAMPLES = 64


def made(strategy: str, clients: int) -> Engine:
    """Return an engine that has recorded nothing yet."""
    how: Strategy = "sequential" if strategy == "sequential" else "stacked"
    return Engine(how, clients, graphs=Graphs() if strategy == "graphs" else None)


def measured(network: str, clients: int, strategy: str, device: str, turns: int) -> tuple[float, float, float]:
    """Return the seconds of a plain and of a protected update of all clients, and how many times as long it takes."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    where = torch.device(device)
    build = {"mlp": zoo.mlp, "cnn": zoo.cnn}[network]
    count = clients * SAMPLES
    generator = torch.Generator().manual_seed(0)
    train = Ragged.from_lists(np.split(np.arange(count), clients))
    data = make_federated(
        name="noise",
        x=torch.rand(count, 1, 28, 28, generator=generator),
        y=torch.randint(10, (count,), generator=generator),
        classes=10,
        train=train,
        validation=Ragged.empty(clients),
        test=train,
        seen=np.arange(clients),
        unseen=np.zeros(0, dtype=np.int64),
        client_names=tuple(map(str, range(clients))),
        label_names=tuple("0123456789"),
    )
    data = placed(data, where, torch.float32, None)
    problem = Problem(Net(lambda: build((1, 28, 28), 10)).to(where, torch.float32), cross_entropy, data=data.shape)
    training = Training(work=Steps(epochs=1, batch=32), optimizer=Sgd(lr=0.1))
    algorithm = METHODS["fedavg"].build(training)
    start = tree.map(lambda leaf: leaf.to(where), problem.net.init(torch.Generator().manual_seed(0)))
    down = algorithm.server.broadcast(algorithm.server.init(problem, start, float(count)))
    state = algorithm.client.init(problem, down, generator)
    protection = Protection(1.0, np.ones(clients), np.full(clients, ALWAYS), "epochs")
    rule, engines = bound(algorithm.client.update, problem), [made(strategy, clients) for _ in range(2)]
    ways = [gather(data, np.arange(clients), algorithm.client.phases, 0, 0, how) for how in (None, protection)]
    spent: list[list[float]] = [[], []]
    for turn in range(turns + 3):
        for way, batches in enumerate(ways):
            began = clock()
            tree.leaves(engines[way].train(rule, down, state, batches))
            if device == "cuda":
                torch.cuda.synchronize()
            if turn > 2:  # the first ones are for warming up, and for recording
                spent[way].append(clock() - began)
    ratio = statistics.median(protected / plain for plain, protected in zip(*spent, strict=True))
    return statistics.median(spent[0]), statistics.median(spent[1]), ratio


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--turns", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    on_gpu = options.device == "cuda"
    print(f"{'network':8} {'clients':>7} {'trained':10} {'plain ms':>9} {'protected ms':>13} {'ratio':>6}")
    for network, few in (("mlp", 16), ("cnn", 4)):
        clients = 10 * few if on_gpu else few
        for strategy in ("graphs", "stacked") if on_gpu else ("stacked", "sequential"):
            plain, protected, ratio = measured(network, clients, strategy, options.device, options.turns)
            times = f"{1e3 * plain:9.2f} {1e3 * protected:13.2f} {ratio:6.2f}"
            print(f"{network:8} {clients:7} {strategy:10} {times}", flush=True)


if __name__ == "__main__":
    main()
