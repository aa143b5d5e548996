"""The laws that every algorithm keeps, as a public suite: `check_algorithm(my_algorithm)`.

Each law is a function of a `Case`: five clients of unequal size with real digits, a small network, float64.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from personafl.core import rng, tree, wire
from personafl.core.algorithm import Algorithm, Problem, Reduced, for_returning, reduce
from personafl.core.batches import Batches, Data
from personafl.core.losses import cross_entropy
from personafl.core.net import Net
from personafl.core.split import Split
from personafl.core.tree import Tree
from personafl.data.federated import FederatedData, Ragged, make_federated
from personafl.simulate.engine import Engine, Strategy, gather
from personafl.simulate.federation import Federation
from personafl.simulate.simulator import Simulation
from personafl.storage.store import Store

__all__ = ["LAWS", "Case", "check_algorithm", "make_case"]

SIZES = (3, 11, 6, 14, 1)  # training samples per client
TOLERANCE = 1e-10


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

    @contextmanager
    def simulation(self, strategy: Strategy = "stacked", chunk: int = 8) -> Iterator[Simulation]:
        """Return a simulation that has not started."""
        with tempfile.TemporaryDirectory() as folder:
            yield Simulation(self.federation(strategy, chunk), Store(Path(folder) / "states", 2**30))

    def one_client(self, client: int = 1) -> tuple[Tree, Tree, Data]:
        """Return (down, state, data) of one client's first round."""
        start = _double(self.problem.net.init(rng.generator("start")))
        down = wire.dense(
            self.algorithm.server.broadcast(self.algorithm.server.init(self.problem, start, self.data.clients))
        )
        state = _double(self.algorithm.client.init(self.problem, down, rng.generator("client", client)))
        stacked = gather(self.data, np.array([client]), self.algorithm.client.phases, 1, 0)
        return down, state, _first(stacked)

    def update(self, down: Tree, state: Tree, data: Data) -> tuple[Tree, Tree]:
        """Run the client rule, with what a client that has a state is sent."""
        return self.algorithm.client.update(self.problem, for_returning(down), state, data)


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
    return Case(algorithm, problem, data)


def check_algorithm(algorithm: Algorithm, problem: Problem | None = None) -> None:
    """Raise AssertionError, naming the law, if the algorithm breaks one."""
    case = make_case(algorithm, problem)
    for name, law in LAWS.items():
        try:
            law(case)
        except AssertionError as error:
            raise AssertionError(f"{algorithm.name} breaks the law {name!r}: {error}") from error


def stacked_equals_one_by_one(case: Case) -> None:
    """Two rounds give the same whether clients run stacked or one by one, all at once or in small chunks."""
    outcomes = []
    for strategy, chunk in (("stacked", 8), ("stacked", 2), ("sequential", 2)):
        with case.simulation(strategy, chunk) as simulation:  # type: ignore[arg-type]
            for number in range(2):
                simulation.step(number)
            outcomes.append(_everything(simulation))
    for other in outcomes[1:]:
        _close(outcomes[0], other, TOLERANCE)


def shipped_equals_simulated(case: Case) -> None:
    """Messages and state survive the wire to the bit, and so does what is computed from them."""
    down, state, data = case.one_client()
    received = wire.dense(wire.decode(wire.encode(down), down))
    kept = wire.decode(wire.encode(state), state)
    here, there = case.update(down, state, data), case.update(received, kept, data)
    _close(here, there, 0.0)
    _close(here[1], wire.decode(wire.encode(there[1]), wire.dense(here[1])), 0.0)
    assert wire.size(here[1]) == len(wire.encode(here[1])), "the size of an upload is not what is sent"


def order_does_not_matter(case: Case) -> None:
    """The server steps to the same state in whatever order uploads arrive and are joined."""
    with case.simulation() as simulation:
        down = wire.dense(case.algorithm.server.broadcast(simulation.server))
        uploads, weights = [], []
        for client, size in enumerate(SIZES):
            _, state, data = case.one_client(client)
            uploads.append(wire.dense(case.update(down, state, data)[1]))
            weights.append(float(size))
        whole = reduce(tree.stack(uploads), torch.tensor(weights))
        parts = [reduce(tree.stack([u]), torch.tensor([w])) for u, w in zip(uploads, weights, strict=True)]
        joined = parts[3].plus(parts[0]).plus(parts[4].plus(parts[2])).plus(parts[1])
        step = case.algorithm.server.update
        _close(step(simulation.server, whole, 0), step(simulation.server, joined, 0), TOLERANCE)


def a_mean_is_of_what_was_sent(case: Case) -> None:
    """What a server averages is Σ n_i·up_i / Σ n_i, field by field: real numbers as precise as they are sent."""
    for strategy, chunk in (("stacked", 8), ("sequential", 1)):
        server = _Listening(case.algorithm.server)
        listening = dataclasses.replace(case, algorithm=dataclasses.replace(case.algorithm, server=server))
        with listening.simulation(strategy, chunk) as simulation:  # type: ignore[arg-type]
            down, everyone = simulation.down(), np.arange(len(SIZES))
            states, sent = simulation.states(0, down, everyone), []
            for client in range(len(SIZES)):
                data = _first(gather(case.data, everyone[[client]], case.algorithm.client.phases, 1, 0))
                sent.append(tree.flatten(wire.dense(case.update(down, tree.take(states, client), data)[1])))
            simulation.step(0)
        (uploads,) = server.heard
        for path, mean in tree.flatten(uploads.mean()).items():
            first, rows = sent[0][path], torch.stack([one[path].double() for one in sent])
            wanted = first.dtype if first.is_floating_point() else torch.float64
            assert mean.dtype == wanted, f"the mean of {path} is {mean.dtype}, and was sent as {first.dtype}"
            expected = torch.tensordot(torch.tensor(SIZES).double(), rows, dims=1) / sum(SIZES)
            gap = (mean.double() - expected).abs().max().item() if mean.numel() else 0.0
            allowed = TOLERANCE + 8 * torch.finfo(wanted).eps * rows.abs().max().item() if mean.numel() else 0.0
            assert gap <= allowed, f"the mean of {path} differs by {gap:.3g}"


class _Listening:
    """A server rule that keeps what it is sent."""

    def __init__(self, rule: Any) -> None:
        self._rule, self.heard = rule, list[Reduced]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)

    def update(self, state: Any, uploads: Reduced, round_: int) -> Tree:
        self.heard.append(uploads)
        return self._rule.update(state, uploads, round_)


def padding_is_inert(case: Case) -> None:
    """Steps and samples that are only padding change nothing."""
    down, state, data = case.one_client()
    padded = data._replace(phases={name: _padded(batches) for name, batches in data.phases.items()})
    _close(case.update(down, state, data), case.update(down, state, padded), TOLERANCE)


def arguments_are_not_changed(case: Case) -> None:
    """No rule writes into what it is given, and the same arguments give the same bits."""
    down, state, data = case.one_client()
    before = tree.map(torch.clone, (down, state, data))
    first = case.update(down, state, data)
    first = tree.map(torch.clone, first)
    second = case.update(down, state, data)
    _close(before, (down, state, data), 0.0)
    _close(first, second, 0.0)
    with case.simulation() as simulation:
        server = tree.map(torch.clone, simulation.server)
        kept = simulation.server
        simulation.step(0)
        _close(server, kept, 0.0)


def state_survives_a_checkpoint(case: Case) -> None:
    """Two rounds in one go equal one round, a save and a load, and another round, to the bit."""
    with case.simulation() as straight:
        straight.step(0)
        straight.step(1)
        expected = _everything(straight)
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "states", 2**30)
        before = Simulation(case.federation(), store)
        before.step(0)
        server, index = wire.encode(before.server), store.flush()
        after = Simulation(case.federation(), Store(Path(folder) / "states", 2**30, index), server)
        after.step(1)
        _close(expected, _everything(after), 0.0)


def only_declared_fields_leave(case: Case) -> None:
    """An upload is a NamedTuple of tensors, and none of them is part of the state that stays on the device."""
    down, state, data = case.one_client()
    state, upload = case.update(down, state, data)
    assert hasattr(type(upload), "_fields"), f"the upload is a {type(upload).__name__}, not a NamedTuple"
    assert all(isinstance(leaf, Tensor) for leaf in tree.leaves(upload)), "the upload has something that is no tensor"
    allowed = set(getattr(case.algorithm.client, "uploads_of_state", ()))
    for path, leaf in tree.flatten(upload).items():
        if path.split("/")[0] in allowed:
            continue
        for own, kept in tree.flatten(state).items():
            same = leaf.shape == kept.shape and leaf.numel() > 1 and torch.equal(leaf, kept)
            assert not same, f"{path} of the upload is {own} of the client's state"


def models_fit_their_networks(case: Case) -> None:
    """Models are called global or personal and have the parameters of their networks; a tuned client has its own."""
    down, state, data = case.one_client()
    rule = case.algorithm.client
    state, _ = case.update(down, state, data)
    nets = {"global": case.problem.net, "personal": case.problem.personal_net}
    if rule.tuning:
        tuned = rule.personalize(
            case.problem, down, case.one_client()[1], _first(gather(case.data, np.array([1]), rule.tuning, 1, 0))
        )
        assert "personal" in rule.models(case.problem, down, tuned), "a tuned client has no personal model"
        state = tuned
    models = rule.models(case.problem, down, state)
    assert models.keys() <= nets.keys(), f"unknown models {sorted(models)}"
    for name, params in models.items():
        shapes = {key: value.shape for key, value in params.items()}
        assert shapes == nets[name].shapes, f"the {name} model does not fit its network"


LAWS: dict[str, Callable[[Case], None]] = {
    law.__name__: law
    for law in (
        stacked_equals_one_by_one,
        shipped_equals_simulated,
        order_does_not_matter,
        a_mean_is_of_what_was_sent,
        padding_is_inert,
        arguments_are_not_changed,
        state_survives_a_checkpoint,
        only_declared_fields_leave,
        models_fit_their_networks,
    )
}


def _everything(simulation: Simulation) -> dict[str, Tensor]:
    """Return the server's state and all clients', by name."""
    found = {f"server/{path}": leaf for path, leaf in tree.flatten(simulation.server).items()}
    for client in range(simulation.federation.data.clients):
        if client in simulation.store:
            found |= {f"{client}/{path}": leaf for path, leaf in simulation.store.get(client).items()}
    return found


def _close(a: Tree, b: Tree, tolerance: float) -> None:
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


def _padded(batches: Batches) -> Batches:
    """Add two samples to every step and two steps, none of them real; their rows are other clients' data."""
    steps, width = batches.rows.shape
    rows = torch.full((steps + 2, width + 2), len(batches.pool_x) - 1)
    real = torch.zeros((steps + 2, width + 2), dtype=torch.bool)
    rows[:steps, :width], real[:steps, :width] = batches.rows, batches.real
    key = torch.cat([batches.key, batches.key[:2].repeat(2)[:2]])
    return batches._replace(rows=rows, real=real, key=key)
