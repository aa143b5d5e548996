"""What an algorithm is tried on: five clients of unequal size with real digits, a small network, float64."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from personafl.core import rng, tree, wire
from personafl.core.algorithm import Algorithm, Own, Problem, Reduced, ServerRule, for_returning, given
from personafl.core.batches import Batches, Data
from personafl.core.heads import with_head
from personafl.core.losses import cross_entropy
from personafl.core.net import Net
from personafl.core.split import Split
from personafl.core.tasks import task_named
from personafl.core.tree import Params, Tree
from personafl.data.federated import FederatedData, Ragged, make_federated
from personafl.simulate.engine import Engine, Strategy, gather
from personafl.simulate.federation import Federation
from personafl.simulate.simulator import Simulation
from personafl.storage.store import Store

SIZES = (3, 11, 6, 14, 1)  # training samples per client
TOLERANCE = 1e-10


class Trained(NamedTuple):
    """One client's first round: what it was given, and what it made of that."""

    given: tuple[Tree, Tree, Data]  # down, state, data
    before: tuple[Tree, Tree, Data]  # the same, copied before training
    state: Tree
    upload: Tree


class Outcome(NamedTuple):
    """Two rounds of everyone."""

    start: tuple[Tree, Tree]  # the server's state before the first, and a copy made then
    heard: Reduced  # what the server was sent in the first
    end: dict[str, Tensor]  # all states, by name
    server: Tree  # its state at the end


@dataclass(frozen=True)
class Case:
    """An algorithm and what it is tried on."""

    algorithm: Algorithm
    problem: Problem
    data: FederatedData

    def federation(self, strategy: Strategy = "stacked", chunk: int = 8) -> Federation:
        """Return a federation of all clients, every one in every round."""
        return Federation(
            algorithm=self.algorithm,
            data=self.data,
            problems=(self.problem,),
            problem_of=np.zeros(self.data.clients, dtype=np.int64),
            engines=(Engine(strategy, chunk),),
            seed=1,
            cohort=self.data.clients,
            sampling="exact",
            weights="examples",
            dtype=torch.float64,
        )

    def with_task(self, task: Literal["regression", "multilabel"]) -> Case:
        """Return the same inputs with other targets: how large and how odd a digit is, and which of ten it is."""
        y = self.data.y
        numbers = torch.stack([(y - 4.5) / 3, y % 2 - 0.5], 1) if task == "regression" else None
        y = torch.nn.functional.one_hot(y, 10).double() if numbers is None else numbers.double()
        data = dataclasses.replace(self.data, y=y, classes=y.shape[1], task=task)
        kind, classes = task_named(task), data.classes
        net = Net(
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 4), nn.Linear(4, classes))
        )
        problem = Problem(
            net.to(torch.device("cpu"), torch.float64),
            kind.loss,
            split=Split(("4.*",)),
            correct=kind.correct,
            divergence=kind.divergence,
            data=data.shape,
        )
        return Case(self.algorithm, _headed(self.algorithm, problem), data)

    @contextmanager
    def simulation(self, strategy: Strategy = "stacked", chunk: int = 8) -> Iterator[Simulation]:
        """Return a simulation that has not started."""
        with tempfile.TemporaryDirectory() as folder:
            yield Simulation(self.federation(strategy, chunk), Store(Path(folder) / "states", 2**30))

    def one_client(self, client: int = 1) -> tuple[Tree, Tree, Data]:
        """Return (down, state, data) of one client's first round."""
        address, down = self.algorithm.server.address, wire.dense(self.algorithm.server.broadcast(self.server))
        if address is not None:
            down = given(down, tree.take(address(self.server, np.array([client])), 0))
        state = _double(self.algorithm.client.init(self.problem, down, rng.generator(1, "init", client)))
        return down, state, self.drawn(client, self.algorithm.client.phases)

    def drawn(self, client: int, phases: Any) -> Data:
        """Return a client's batches of its first round."""
        return _first(gather(self.data, np.array([client]), phases, 1, 0))

    def update(self, down: Tree, state: Tree, data: Data) -> tuple[Tree, Tree]:
        """Run the client rule, with what a client that has a state is sent."""
        return self.algorithm.client.update(self.problem, for_returning(down), state, data)

    @functools.cached_property
    def start(self) -> Params:
        """The shared model before the first round."""
        params: Params = _double(self.problem.net.init(rng.generator(1, "start")))
        return params

    @functools.cached_property
    def server(self) -> Tree:
        """The server's state before the first round."""
        return self.algorithm.server.init(self.problem, self.start, float(sum(SIZES)))

    @functools.cached_property
    def trained(self) -> list[Trained]:
        """Every client's first round, one by one."""
        rounds = []
        for client in range(len(SIZES)):
            given = self.one_client(client)
            before = tree.map(torch.clone, given)
            rounds.append(Trained(given, before, *self.update(*given)))
        return rounds

    @functools.cached_property
    def outcomes(self) -> dict[tuple[str, int], Outcome]:
        """Two rounds by strategy and chunk."""
        found = {}
        for strategy, chunk in (("stacked", 8), ("stacked", 2), ("sequential", 2)):
            listening = _Listening(self.algorithm.server)
            case = dataclasses.replace(self, algorithm=dataclasses.replace(self.algorithm, server=listening))
            with case.simulation(strategy, chunk) as simulation:  # type: ignore[arg-type]
                start = simulation.server, tree.map(torch.clone, simulation.server)
                for number in range(2):
                    simulation.step(number)
                end = everything(simulation)
                found[strategy, chunk] = Outcome(start, listening.heard[0], end, simulation.server)
        return found


class _Listening(ServerRule):
    """A server rule that keeps what it is sent."""

    def __init__(self, rule: ServerRule) -> None:
        self._rule, self.heard = rule, list[Reduced]()
        self.needs_each = rule.needs_each  # type: ignore[misc]

    def init(self, problem: Problem, start: Params, population: float) -> Tree:
        return self._rule.init(problem, start, population)

    def broadcast(self, state: Any) -> Tree:
        return self._rule.broadcast(state)

    @property
    def address(self) -> Callable[[Any, NDArray[Any]], Own] | None:
        return self._rule.address

    @property
    def join_from(self) -> Callable[[Any, Reduced | None, Any, Tensor, NDArray[Any], int], Reduced] | None:
        return self._rule.join_from

    def join(self, state: Any, joined: Reduced | None, stacked: Tree, weights: Tensor) -> Reduced:
        return self._rule.join(state, joined, stacked, weights)

    def update(self, state: Any, uploads: Reduced, round_: int) -> Tree:
        self.heard.append(uploads)
        return self._rule.update(state, uploads, round_)

    def weigh(self, problem: Problem, weights: NDArray[Any]) -> NDArray[Any]:
        return self._rule.weigh(problem, weights)


def make_case(algorithm: Algorithm, problem: Problem | None = None) -> Case:
    """Return the standard case; a problem of one's own must take inputs [1, 8, 8] and give 10 scores."""
    digits = load_digits()
    x = torch.from_numpy(digits.images[: sum(SIZES) + len(SIZES)]).unsqueeze(1) / 16
    y = torch.from_numpy(digits.target[: len(x)]).long()
    train = Ragged.from_lists(np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1]))
    test = Ragged.from_lists([[sum(SIZES) + client] for client in range(len(SIZES))])
    data = make_federated(
        name="laws",
        x=x,
        y=y,
        classes=10,
        train=train,
        validation=Ragged.empty(len(SIZES)),
        test=test,
        seen=np.arange(len(SIZES)),
        unseen=np.zeros(0, dtype=np.int64),
        client_names=tuple(str(client) for client in range(len(SIZES))),
        label_names=tuple("0123456789"),
    )
    if problem is None:
        net = Net(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 10)))
        problem = Problem(net.to(torch.device("cpu"), torch.float64), cross_entropy, split=Split(("4.*",)))
    return Case(algorithm, _headed(algorithm, dataclasses.replace(problem, data=data.shape)), data)


def _headed(algorithm: Algorithm, problem: Problem) -> Problem:
    if algorithm.head is None:
        return problem
    return dataclasses.replace(problem, local_net=with_head(problem.net, problem.split, algorithm.head))


def everything(simulation: Simulation) -> dict[str, Tensor]:
    """Return the server's state and all clients', by name."""
    found = {f"server/{path}": leaf for path, leaf in tree.flatten(simulation.server).items()}
    for client in range(simulation.federation.data.clients):
        if client in simulation.store:
            found |= {f"{client}/{path}": leaf for path, leaf in simulation.store.get(client).items()}
    return found


def close(a: Tree, b: Tree, tolerance: float) -> None:
    """Fail unless two trees have the same entries, of the same types, as near to each other as that."""
    first, second = tree.flatten(a), tree.flatten(b)
    assert first.keys() == second.keys(), f"different entries: {sorted(first.keys() ^ second.keys())}"
    for path, leaf in first.items():
        assert leaf.dtype == second[path].dtype, f"{path}: {leaf.dtype} and {second[path].dtype}"
        gap = (leaf.double() - second[path].double()).abs().max().item() if leaf.numel() else 0.0
        assert gap <= tolerance, f"{path} differs by {gap:.3g}"


def _double(values: Any) -> Any:
    return tree.map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, values)


def _first(stacked: Data) -> Data:
    phases = {name: Batches(b.pool_x, b.pool_y, b.rows[0], b.real[0], b.key[0]) for name, b in stacked.phases.items()}
    return Data(phases, stacked.examples[0], stacked.round)


def padded(batches: Batches) -> Batches:
    """Add two samples to every step and two steps, none of them real; their rows are other clients' data."""
    steps, width = batches.rows.shape
    rows = torch.full((steps + 2, width + 2), len(batches.pool_x) - 1)
    real = torch.zeros((steps + 2, width + 2), dtype=torch.bool)
    rows[:steps, :width], real[:steps, :width] = batches.rows, batches.real
    key = torch.cat([batches.key, batches.key[:2].repeat(2)[:2]])
    return batches._replace(rows=rows, real=real, key=key)


def alike(what: str, one: Tree, other_what: str, other: Tree) -> None:
    """Fail unless two trees have the same entries, of the same shapes, types and compact forms."""
    assert type(one) is type(other), f"{what} is a {type(one).__name__}, {other_what} a {type(other).__name__}"
    first, second = ({p: _said(leaf) for p, leaf in _entries(each)} for each in (one, other))
    assert first.keys() == second.keys(), f"{what} and {other_what} differ in {sorted(first.keys() ^ second.keys())}"
    for path, said in first.items():
        assert said == second[path], f"{path} of {what} is {said}, of {other_what} {second[path]}"


def _entries(values: Tree) -> list[tuple[str, Any]]:
    found = pytree.tree_leaves_with_path(values, is_leaf=wire.is_form)
    return [(tree.path_name(path), leaf) for path, leaf in found]


def _said(leaf: Any) -> str:
    parts = [f"{part.dtype} {list(part.shape)}" for part in tree.leaves(leaf)]
    return f"{type(leaf).__name__} {', '.join(parts)}"
