"""Whole client updates in the fast ways are those of the plain loop, for every method."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from joined import addressed, joined
from personafl.algorithms import METHODS, Training
from personafl.core import tree, wire
from personafl.core.algorithm import for_returning
from personafl.core.batches import Data, Padding, Steps
from personafl.core.optim import Accelerated, Adaptive, LocalOptimizer, Sgd
from personafl.core.schedule import Exponential
from personafl.core.seam import using
from personafl.core.tree import Tree
from personafl.fast import frozen, gram
from personafl.fast.cuda_graphs import Graphs
from personafl.simulate.engine import Engine, gather
from personafl.simulate.trainer import addressed_to, bound
from personafl.testing import Case, make_case
from tiers import HEART

CLIENTS = np.array([0, 2, 4])  # of 3, 6 and 1 samples: two of them have steps without any
WORK = Steps(epochs=2, batch=4)
PLAIN = Sgd(lr=0.1)
DECAYED = Sgd(lr=0.02, weight_decay=0.02, schedule=Exponential(rate=0.5))
RICH = dataclasses.replace(DECAYED, momentum=0.8, nesterov=True)
OPTIMIZERS: dict[str, LocalOptimizer] = {
    "plain": PLAIN,
    "clipped": Sgd(lr=0.2, clip=0.3, weight_decay=0.1),
    "adam": Adaptive(lr=0.01, weight_decay=0.1),
    "accelerated": Accelerated(lr=0.1, momentum=0.7, box=0.5, weight_decay=0.1),
}
WITHOUT_MOMENTUM = {"scaffold": PLAIN, "feddyn": DECAYED, "fedbcd": DECAYED, "fedbcdi": DECAYED}
QUANTIZED: dict[str, dict[str, object]] = {
    "2 bits": {"bits": 2, "penalty": 0.05, "full_precision": "output"},
    "3 bits": {"bits": 3, "penalty": 0.05, "full_precision": "none", "center_scale": "sum", "center_clip": 0.1},
    "soft": {"bits": 1, "sharpness": 5.0, "full_precision": "none"},
    "frozen": {"bits": 2, "freeze_after": 1, "full_precision": "none"},
}
LATER = pytest.mark.system  # make test has the plain loop beside those that it is most often changed for
CASES = [
    *(
        pytest.param(method, WITHOUT_MOMENTUM.get(method, RICH), {}, id=method, marks=() if method in HEART else LATER)
        for method in METHODS
    ),
    *(
        pytest.param("quped", PLAIN, options, id=f"quped, {name}", marks=() if name == "2 bits" else LATER)
        for name, options in QUANTIZED.items()
    ),
    *(
        pytest.param(method, optimizer, {}, id=f"{method}, {name}", marks=() if method == "fedalt" else LATER)
        for method in ("fedavg", "fedalt", "ditto", "fedslr")
        for name, optimizer in OPTIMIZERS.items()
    ),
]
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
]


@pytest.fixture(autouse=True)
def _whenever_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the first layer in the span of its inputs, and features kept, where that would not pay too."""
    monkeypatch.setattr(gram, "_GAIN", {"cpu": torch.inf, "cuda": torch.inf})
    for module in (gram, frozen):
        monkeypatch.setattr(module, "_COPIES", torch.inf)


def one(data: Data, row: int) -> Data:
    """Return one client's data, padded to the others'; nothing is known of it."""
    phases = {
        name: b._replace(rows=b.rows[row], real=b.real[row], key=b.key[row], padding=Padding())
        for name, b in data.phases.items()
    }
    return Data(phases, data.examples[row], data.round)


def plainly(rule: object, down: Tree, states: Tree, data: Data) -> Tree:
    """Return a rule's results for stacked clients by the definitions alone, one client after the other."""
    with using({}):
        rows = range(len(data.examples))
        return tree.stack([rule(down, tree.take(states, row), one(data, row)) for row in rows])  # type: ignore[operator]


def engines(device: str) -> Iterator[Engine]:
    yield Engine("stacked", 8)
    yield Engine("sequential", 1)
    if device == "cuda":
        yield Engine("stacked", 8, graphs=Graphs())


@functools.cache
def case_on(device: str) -> Case:
    """Return the laws' clients, of whom three take part."""
    case = make_case(METHODS["fedavg"].build(Training()))
    case.problem.net.to(torch.device(device), torch.float64)
    data = dataclasses.replace(case.data, x=case.data.x.to(device), y=case.data.y.to(device))
    return dataclasses.replace(case, data=data)


def check(found: Tree, expected: Tree, what: str) -> None:
    values = tree.flatten(wire.dense_each(found))
    for path, leaf in tree.flatten(wire.dense_each(expected)).items():
        assert leaf.is_floating_point(), path
        gap = float((values[path] - leaf).abs().max()) if leaf.numel() else 0.0
        assert gap < 1e-10, f"{what}: {path} differs by {gap:.3g}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("method", "optimizer", "options"), CASES)
def test_every_method_trains_as_the_plain_loop_does(
    method: str, optimizer: LocalOptimizer, options: dict[str, object], device: str
) -> None:
    """Two rounds, so that what clients and servers keep has a say; then tuning. With dropout and unequal clients."""
    case, rules = case_on(device), METHODS[method].build(Training(work=WORK, optimizer=optimizer), **options)
    problem = case.problem
    double = lambda leaf: leaf.to(device, torch.float64)  # noqa: E731
    server = rules.server.init(problem, tree.map(double, problem.net.init(torch.Generator().manual_seed(1))), 10.0)
    down = wire.dense(rules.server.broadcast(server))
    first = [rules.client.init(problem, down, torch.Generator().manual_seed(int(c))) for c in CLIENTS]
    states = tree.map(double, tree.stack(first))
    ways = list(engines(device))
    for number in range(2):
        data = gather(case.data, CLIENTS, rules.client.phases, 1, number)
        update = addressed_to(bound(rules.client.update, problem), for_returning)
        beside = addressed(rules.server, server, CLIENTS), states
        expected = plainly(update, down, beside, data)
        for way in ways:
            for _ in range(1 if way.graphs is None else 2):  # the second is from a recording
                check(way.train(update, down, beside, data), expected, f"round {number}, {way.strategy}")
        states, uploads = expected
        uploads = joined(rules.server, server, uploads, data.examples, CLIENTS, number)
        server = rules.server.update(server, uploads, number)
        down = wire.dense(rules.server.broadcast(server))
    if rules.client.tuning:
        data, tune = gather(case.data, CLIENTS, rules.client.tuning, 1, 2), bound(rules.client.personalize, problem)
        expected = plainly(tune, down, states, data)
        for way in ways:
            check(way.train(tune, down, states, data), expected, f"tuning, {way.strategy}")
