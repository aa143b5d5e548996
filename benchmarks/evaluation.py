"""What it takes to score every client's own model: stacked, client by client, and one shared model on the same samples.

    python benchmarks/evaluation.py [--clients 1000] [--samples 100] [--repeats 5]

MLPs 784-200-10 with random weights: whole models of the clients' own, and models of which only the output layer is.
Clients have between half and one and a half times as many samples. The ways take turns; the columns are milliseconds
(best of the repeats) and how many times the pass of the shared model they take: best and median of the turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from personafl.core.algorithm import Problem
from personafl.core.losses import correct, cross_entropy
from personafl.core.net import Net
from personafl.core.tree import Params
from personafl.data.federated import FederatedData, Ragged, make_federated
from personafl.evaluate.score import try_personal, try_shared
from personafl.models import zoo


def data_of(clients: int, samples: int) -> FederatedData:
    """Return random images."""
    generator = torch.Generator().manual_seed(0)
    rng = np.random.default_rng(0)
    sizes = np.sort(rng.integers(samples // 2, samples * 3 // 2 + 1, clients))  # the order in which runs score them
    total = int(sizes.sum())
    return make_federated(
        name="random",
        x=torch.rand(total, 784, generator=generator),
        y=torch.randint(10, (total,), generator=generator),
        classes=10,
        train=Ragged.empty(clients),
        validation=Ragged.empty(clients),
        test=Ragged.from_lists(np.split(rng.permutation(total), np.cumsum(sizes)[:-1])),
        seen=np.arange(clients),
        unseen=np.zeros(0, np.int64),
        client_names=tuple(map(str, range(clients))),
        label_names=tuple("0123456789"),
    )


@torch.no_grad()
def loop(net: Net, stacked: Params, data: FederatedData) -> None:
    """Score client by client."""
    for client in range(data.clients):
        rows = torch.from_numpy(data.test[client])
        outputs = net.apply({name: value[client] for name, value in stacked.items()}, data.x[rows])
        correct(outputs, data.y[rows]).mean().item()
        cross_entropy(outputs, data.y[rows]).mean().item()


def seconds(call: Callable[[], object]) -> float:
    """Return the time of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main() -> None:
    """Print a line per way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    data = data_of(options.clients, options.samples)
    problem = Problem(Net(zoo.mlp((784,), 10, hidden=(200,))), cross_entropy)
    shared = problem.net.init(torch.Generator())
    generator = torch.Generator().manual_seed(1)
    whole = {
        name: value + 0.01 * torch.randn(data.clients, *value.shape, generator=generator)
        for name, value in shared.items()
    }
    output = {name: whole[name] if name[0] == "3" else value.expand_as(whole[name]) for name, value in shared.items()}
    ways: dict[str, Callable[[], object]] = {
        "shared": lambda: try_shared(problem, shared, data, data.test, data.seen).scores(),
        "own, stacked": lambda: try_personal(problem, whole, data, data.test, data.seen).scores(),
        "own, client by client": lambda: loop(problem.net, whole, data),
        "own output, stacked": lambda: try_personal(problem, output, data, data.test, data.seen).scores(),
        "own output, client by client": lambda: loop(problem.net, output, data),
    }
    spent = [{name: seconds(way) for name, way in ways.items()} for _ in range(options.repeats + 1)][1:]
    print(f"{data.clients} clients, {len(data.x)} samples, {torch.get_num_threads()} thread(s), {len(spent)} turns")
    print(f"{'models':<30}{'ms':>8}{'best':>8}{'median':>8}")
    floor = min(turn["shared"] for turn in spent)
    for name in ways:
        best, median = (min(t[name] for t in spent), statistics.median(t[name] / t["shared"] for t in spent))
        print(f"{name:<30}{1000 * best:>8.0f}{best / floor:>8.2f}{median:>8.2f}")


if __name__ == "__main__":
    main()
