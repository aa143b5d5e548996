"""The simulator: any algorithm over a dealt data set, round by round.

It knows nothing of any method: it groups a cohort by problem, runs the client rule on chunks of clients, joins the
uploads, and lets the server rule step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from personafl.core import rng, tree, wire
from personafl.core.algorithm import Algorithm, Problem, Reduced, for_returning, reduce
from personafl.core.tree import Params, Tree
from personafl.data.federated import FederatedData
from personafl.errors import Diverged
from personafl.runs.cohort import Sampling, draw_cohort
from personafl.runs.engine import Engine, gather
from personafl.runs.store import Store

__all__ = ["Federation", "Round", "Simulation", "bound"]

Weights = Literal["examples", "uniform"]
Clients = NDArray[np.int64]


@dataclass(frozen=True)
class Federation:
    """Who learns what, how: all that decides the numbers of a run."""

    algorithm: Algorithm
    data: FederatedData
    problems: tuple[Problem, ...]  # all with the same `net`
    problem_of: Clients  # [clients] which problem each one solves
    engines: tuple[Engine, ...]  # one per problem
    seed: int
    cohort: int
    sampling: Sampling
    weights: Weights
    dtype: torch.dtype
    start: Params | None = None  # of the shared model; None: drawn

    @property
    def population(self) -> float:
        """The weight of all clients that may take part."""
        seen = self.data.seen
        return float(self.data.train.sizes[seen].sum() if self.weights == "examples" else len(seen))


@dataclass(frozen=True)
class Round:
    """What a round did: mean training loss over its clients, how many they were, bytes down and up.

    `ranks` are those of the weights that were sent as factors.
    """

    number: int
    loss: float
    clients: int
    bytes_down: int
    bytes_up: int
    ranks: dict[str, int]


class Simulation:
    """A federation in progress: the server's state and every client's."""

    def __init__(self, federation: Federation, store: Store, server_bytes: bytes | None = None) -> None:
        self.federation = federation
        self.store = store
        net, self._device = federation.problems[0].net, federation.data.x.device
        start = federation.start or net.init(rng.generator(federation.seed, "start"))
        rule = federation.algorithm.server
        self.server = _plain(rule.init(federation.problems[0], self.cast(start), federation.population))
        if server_bytes is not None:
            self.server = tree.map(lambda leaf: leaf.to(self._device), wire.decode(server_bytes, self.server))
        self._shapes: dict[int, Tree] = {}  # problem -> a state, for its structure
        self._with_model: dict[int, bool] = {}  # problem -> whether states have a personal model

    def step(self, number: int) -> Round:
        """Run one round."""
        fed, rule = self.federation, self.federation.algorithm.client
        cohort = draw_cohort(fed.data.seen, fed.cohort, fed.sampling, fed.seed, number)
        message = self.broadcast()
        first, down = wire.dense(message), wire.dense(for_returning(message))
        newcomers = sum(int(client) not in self.store for client in cohort)
        joined: Reduced | None = None
        bytes_up = 0
        for which, clients in self.groups(cohort):
            problem, engine = fed.problems[which], fed.engines[which]
            data = gather(fed.data, clients, rule.phases, fed.seed, number)
            states = self.states(which, first, clients)
            states, uploads = engine.train(bound(rule.update, problem), down, states, data)
            self.check(f"round {number + 1}: training", clients, (states, uploads))
            self._keep(clients, states)
            bytes_up += wire.size_of_one(uploads) * len(clients)
            weights = data.examples if fed.weights == "examples" else torch.ones_like(data.examples)
            part = reduce(wire.dense_each(uploads), weights)
            joined = part if joined is None else joined.plus(part)
        loss = float("nan")
        if joined is not None:
            self.server = _plain(fed.algorithm.server.update(self.server, joined, number))
            self._check_server(number)
            loss = float(joined.mean().loss)
        again = wire.size(for_returning(message))
        bytes_down = again * len(cohort) + (wire.size(message) - again) * newcomers
        return Round(number, loss, len(cohort), bytes_down, bytes_up, wire.ranks(message))

    def broadcast(self) -> Tree:
        """Return what a newcomer is sent now, in compact forms."""
        return self.federation.algorithm.server.broadcast(self.server)

    def down(self) -> Tree:
        """Return what a newcomer receives now."""
        return wire.dense(self.broadcast())

    def groups(self, clients: Clients) -> Iterator[tuple[int, Clients]]:
        """Cut clients into chunks that solve one problem and fit memory."""
        kinds = self.federation.problem_of[clients]
        for which in np.unique(kinds):
            for chunk in self.federation.engines[which].chunks(clients[kinds == which]):
                yield int(which), chunk

    def states(self, which: int, down: Tree, clients: Clients) -> Tree:
        """Return the stacked states of clients, fresh for those who have none."""
        fed = self.federation
        shape = self.shape(which, down)
        if not tree.leaves(shape):
            return shape
        flat = []
        for client in map(int, clients):
            if client in self.store:
                flat.append(self.store.get(client))
            else:
                fresh = fed.algorithm.client.init(fed.problems[which], down, rng.generator(fed.seed, "init", client))
                flat.append(tree.flatten(self.cast(fresh)))
        return tree.unflatten(
            shape, {path: torch.stack([entry[path].to(self._device) for entry in flat]) for path in flat[0]}
        )

    def shape(self, which: int, down: Tree) -> Tree:
        """Return a state of the problem's clients, for its structure."""
        if which not in self._shapes:
            problem = self.federation.problems[which]
            self._shapes[which] = self.federation.algorithm.client.init(problem, down, rng.generator("shape"))
        return self._shapes[which]

    def has_model(self, client: int) -> bool:
        """Say whether a client has a personal model in its state; a state may be only a dual, or what is late."""
        if client not in self.store:
            return False
        fed, which = self.federation, int(self.federation.problem_of[client])
        if which not in self._with_model:
            down = self.down()
            models = fed.algorithm.client.models(fed.problems[which], down, self.shape(which, down))
            self._with_model[which] = "personal" in models
        return self._with_model[which]

    def _keep(self, clients: Clients, states: Tree) -> None:
        flat = {path: leaf.cpu() for path, leaf in tree.flatten(states).items()}
        if flat:
            self.store.put([int(client) for client in clients], flat)

    def cast(self, values: Tree) -> Tree:
        """Move fresh parameters to the run's device and precision."""
        return tree.map(lambda leaf: leaf.to(self._device, self.federation.dtype), values)

    def check(self, what: str, clients: Clients, result: Tree) -> None:
        """Fail if what was computed for clients, stacked, is not finite."""
        good = tree.finite(result, len(clients)).numpy()
        if not good.all():
            names = [self.federation.data.client_names[client] for client in clients[~good]]
            listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise Diverged(
                f"{what} gave non-finite numbers for clients {listed}; lower training.lr or set training.clip"
            )

    def _check_server(self, number: int) -> None:
        if not all(bool(torch.isfinite(leaf).all()) for leaf in tree.leaves(self.server)):
            raise Diverged(f"round {number + 1}: the shared model became non-finite; lower the server's learning rate")


def _plain(state: Tree) -> Tree:
    """Lay tensors out in memory as a checkpoint restores them: kernels may round other layouts differently."""
    return tree.map(torch.Tensor.contiguous, state)


def bound(rule: Any, problem: Problem) -> Any:
    """Return a client rule's function for one problem: (down, state, data) -> …"""
    return lambda down, state, data: rule(problem, down, state, data)
