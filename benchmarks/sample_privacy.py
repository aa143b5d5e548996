"""What protected samples cost: the same rounds of FedAvg plain and with clipped gradients of each sample and noise.

    python benchmarks/sample_privacy.py

A perceptron (784-64-10, 16 clients) and a small CNN (28 × 28, 4 clients), 64 samples each, batch 32, one epoch, one
thread. The ways take turns, and what is printed is the median time of each and the median of the ratios of a turn.
"""

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
from personafl.models import zoo
from personafl.simulate.engine import Engine, Strategy, gather
from personafl.simulate.protection import ALWAYS, Protection
from personafl.simulate.trainer import bound

SAMPLES, TURNS = 64, 9


def measured(network: str, clients: int, strategy: Strategy) -> tuple[float, float, float]:
    """Return the seconds of a plain and of a protected update of all clients, and how many times as long it takes."""
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
    problem = Problem(Net(lambda: build((1, 28, 28), 10)), cross_entropy, data=data.shape)
    training = Training(work=Steps(epochs=1, batch=32), optimizer=Sgd(lr=0.1))
    algorithm = METHODS["fedavg"].build(training)
    start = problem.net.init(torch.Generator().manual_seed(0))
    down = algorithm.server.broadcast(algorithm.server.init(problem, start, float(count)))
    state = algorithm.client.init(problem, down, generator)
    protection = Protection(1.0, np.ones(clients), np.full(clients, ALWAYS), "epochs")
    rule, engine = bound(algorithm.client.update, problem), Engine(strategy, clients)
    ways = [gather(data, np.arange(clients), algorithm.client.phases, 0, 0, how) for how in (None, protection)]
    spent: list[list[float]] = [[], []]
    for turn in range(TURNS + 1):
        for way, batches in enumerate(ways):
            began = time.perf_counter()
            tree.leaves(engine.train(rule, down, state, batches))
            if turn:  # the first is for warming up
                spent[way].append(time.perf_counter() - began)
    ratio = statistics.median(protected / plain for plain, protected in zip(*spent, strict=True))
    return statistics.median(spent[0]), statistics.median(spent[1]), ratio


def main() -> None:
    """Measure, and print a table."""
    torch.set_num_threads(1)
    print(f"{'network':8} {'clients':10} {'plain ms':>9} {'protected ms':>13} {'ratio':>6}")
    for network, clients in (("mlp", 16), ("cnn", 4)):
        for strategy in ("stacked", "sequential"):
            plain, protected, ratio = measured(network, clients, strategy)  # type: ignore[arg-type]
            print(f"{network:8} {strategy:10} {1e3 * plain:9.1f} {1e3 * protected:13.1f} {ratio:6.2f}")


if __name__ == "__main__":
    main()
