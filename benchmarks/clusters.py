"""Do IFCA and FedEM find the groups of clients? Rotated MNIST: a fourth of the clients each by 0, 90, 180, 270 degrees.

    python benchmarks/clusters.py mnist.npz --methods fedavg,local,ifca,fedfomo,pfedhn [--clients 40] [--seeds 0,1,2]
    python benchmarks/clusters.py mnist.npz --methods fedem --rounds 30 --lr 0.3

A client is found if its cluster, FedEM's component of the largest weight, is that of its group: clusters are matched
with groups so that most clients are. The accuracy is of clients' models on test digits turned as theirs are. Every seed
draws other clients and another start. FedEM's rate is higher, for a component has only its part of every sample.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from personafl.algorithms import METHODS, Training
from personafl.core import tree, wire
from personafl.core.algorithm import Problem
from personafl.core.batches import Steps
from personafl.core.losses import cross_entropy
from personafl.core.net import Net
from personafl.core.optim import Sgd
from personafl.data.federated import FederatedData, Ragged, make_federated
from personafl.evaluate.score import try_personal
from personafl.models import zoo
from personafl.simulate.engine import Engine
from personafl.simulate.federation import Federation
from personafl.simulate.simulator import Simulation
from personafl.storage.store import Store

GROUPS, TRAIN, TEST = 4, 100, 50  # samples of a client


def rotated(file: str, clients: int, seed: int) -> FederatedData:
    """Deal digits to clients at random; client c's are turned by c mod 4 quarter turns."""
    found = np.load(file)
    images, labels, each = found["images"], found["labels"], TRAIN + TEST
    rows = np.random.default_rng(seed).permutation(len(labels))[: clients * each]
    turned = [np.rot90(images[row], index // each % GROUPS) for index, row in enumerate(rows)]
    x = torch.from_numpy(np.stack(turned).astype(np.float32) / 255).flatten(1)
    dealt = np.arange(clients * each).reshape(clients, each)
    return make_federated(
        name="rotated MNIST",
        x=(x - 0.13) / 0.31,
        y=torch.from_numpy(labels[rows].astype(np.int64)),
        classes=10,
        train=Ragged.from_lists(list(dealt[:, :TRAIN])),
        validation=Ragged.empty(clients),
        test=Ragged.from_lists(list(dealt[:, TRAIN:])),
        seen=np.arange(clients),
        unseen=np.zeros(0, dtype=np.int64),
        client_names=tuple(map(str, range(clients))),
        label_names=tuple("0123456789"),
    )


def matched(clusters: NDArray[np.int64]) -> float:
    """Return the share of clients in the cluster of their group, by the best matching of clusters with groups."""
    groups = np.arange(len(clusters)) % GROUPS
    return max(float((np.array(order)[clusters] == groups).mean()) for order in itertools.permutations(range(GROUPS)))


def tried(method: str, data: FederatedData, rounds: int, seed: int, lr: float) -> tuple[float, float]:
    """Return the share of clients that are found (NaN without clusters), and the mean accuracy."""
    options = {"ifca": {"clusters": GROUPS}, "fedem": {"components": GROUPS}}.get(method, {})
    training = Training(work=Steps(epochs=1, batch=10), optimizer=Sgd(lr=lr))
    algorithm = METHODS[method].build(training, **options)
    net = Net(lambda: zoo.mlp((784,), 10, hidden=(50,)))
    problem = Problem(net, cross_entropy, data=data.shape)
    clients = np.arange(data.clients)
    federation = Federation(
        algorithm=algorithm,
        data=data,
        problems=(problem,),
        problem_of=np.zeros_like(clients),
        engines=(Engine("stacked", len(clients)),),
        seed=seed,
        cohort=len(clients),
        sampling="exact",
        weights="examples",
        dtype=torch.float32,
    )
    with tempfile.TemporaryDirectory() as folder:
        simulation = Simulation(federation, Store(Path(folder) / "states", 2**30))
        for number in range(rounds):
            simulation.step(number)
        sent = [wire.dense(simulation.message_to(client)) for client in clients.tolist()]
        like = algorithm.client.init(problem, sent[0], torch.Generator())
        states = [
            tree.unflatten(like, simulation.store.get(client)) if tree.leaves(like) else like for client in clients
        ]
    share = (
        float("nan")
        if method not in ("ifca", "fedem")
        else matched(np.array([int(tree.leaves(state)[0].argmax()) for state in states]))
    )
    found = [algorithm.client.models(problem, *each) for each in zip(sent, states, strict=True)]
    models = tree.stack([each.get("personal", each.get("global")) for each in found])
    return share, float(try_personal(problem, models, data, data.test, clients).hits.mean())


def main() -> None:
    """Print a line per method and seed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--clients", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--methods", default="fedavg,local,ifca,fedem")
    parser.add_argument("--seeds", default="0,1,2")
    given = parser.parse_args()
    print(f"{'method':<8}{'seed':>5}{'found':>8}{'accuracy':>10}{'seconds':>9}")
    for seed, method in itertools.product(map(int, given.seeds.split(",")), given.methods.split(",")):
        data, began = rotated(given.file, given.clients, seed), time.perf_counter()
        found, accuracy = tried(method, data, given.rounds, seed, given.lr)
        took = time.perf_counter() - began
        print(f"{method:<8}{seed:>5}{100 * found:>7.1f}%{100 * accuracy:>9.1f}%{took:>9.0f}", flush=True)


if __name__ == "__main__":
    main()
