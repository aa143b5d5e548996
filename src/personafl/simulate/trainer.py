"""Training a chunk of clients: what is the same in this process, in its workers and on a cluster's nodes."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from personafl.core import rng, tree, wire
from personafl.core.algorithm import Problem, Reduced, join, reduce
from personafl.core.batches import Data
from personafl.core.tree import Tree
from personafl.simulate.engine import gather
from personafl.simulate.federation import Federation
from personafl.storage.slab import Clients, Entry

_SMALLER = 2  # clients from which on a sum, in float64, is smaller than what it is the sum of


class StatesOnNodes(NamedTuple):
    """In place of states that are where the clients are trained, and stay there."""

    first: Tree  # what newcomers receive: from it they have their first state
    later: bool  # whether the new states are not the clients' own yet


class Chunk(NamedTuple):
    """Clients of one problem that are to be trained for a round."""

    problem: int
    clients: Clients
    round: int
    down: Tree
    states: Tree | StatesOnNodes  # stacked
    join: bool = False  # whether uploads are joined where clients are trained, if that is less to send
    data: Data | None = None  # if it was drawn before


class Done(NamedTuple):
    """What became of a chunk, stacked."""

    states: Tree  # empty: they stay where they are
    uploads: Tree | Reduced  # the latter if they are joined
    size: int  # bytes of one client's upload
    finite: torch.Tensor  # [clients] whether all their numbers are


class Known(Protocol):
    """Knows states of clients."""

    def has(self, clients: Clients) -> NDArray[np.bool_]:
        """Say which clients have a state."""

    def take(self, clients: Clients) -> Entry:
        """Return the states of clients that have one, all of one layout, stacked."""


class Trainer:
    """Trains chunks of clients, wherever that is."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._shapes: dict[int, Tree] = {}  # problem -> a state, for its structure

    def __call__(self, chunk: Chunk) -> Done:
        """Train clients; return their new states and their uploads."""
        fed = self._federation
        rule, engine = fed.algorithm.client, fed.engines[chunk.problem]
        data = chunk.data or self.drawn(chunk.clients, chunk.round)
        update = bound(rule.update, fed.problems[chunk.problem])
        states, uploads = engine.train_for_now(update, chunk.down, chunk.states, data)
        finite, size = tree.finite((states, uploads), len(chunk.clients)), wire.size_of_one(uploads)
        if chunk.join:
            uploads = self.joined_there(uploads, chunk.clients)
        if not isinstance(uploads, Reduced):
            uploads = engine.kept(uploads)
        return Done(engine.kept(states), uploads, size, finite)

    def joined_there(self, uploads: Tree, clients: Clients) -> Tree | Reduced:
        """Return the uploads of clients, joined where these are trained if that is less to send."""
        if len(clients) <= _SMALLER:
            return uploads
        return reduce(wire.dense_each(uploads), self._federation.weighing(clients))

    def join(self, joined: Reduced | None, uploads: Tree | Reduced, clients: Clients) -> Reduced:
        """Join the uploads of a chunk with what is joined so far, in the memory of that."""
        if isinstance(uploads, Reduced):
            return uploads if joined is None else joined.plus(uploads)
        return join(joined, wire.dense_each(uploads), self._federation.weighing(clients))

    def drawn(self, clients: Clients, number: int) -> Data:
        """Return the batches of clients for a round."""
        fed = self._federation
        return gather(fed.data, clients, fed.algorithm.client.phases, fed.seed, number)

    def states(self, known: Known, which: int, down: Tree, clients: Clients) -> Tree:
        """Return the stacked states of clients, fresh for those who have none."""
        shape, device = self.shape(which, down), self._federation.data.device
        if not tree.leaves(shape):
            return shape
        old = known.has(clients)
        stacks = [known.take(clients[old])] if old.any() else []
        if not old.all():
            stacks.append(tree.flatten(self._fresh(which, down, clients[~old])))
        if len(stacks) == 1:
            return tree.unflatten(shape, {path: leaf.to(device) for path, leaf in stacks[0].items()})
        order = torch.from_numpy(np.argsort(np.argsort(~old, kind="stable")))  # old ones are first in the stacks
        joined = {path: torch.cat([stack[path].to(device) for stack in stacks]) for path in stacks[0]}
        return tree.unflatten(shape, {path: leaf[order.to(device)] for path, leaf in joined.items()})

    def _fresh(self, which: int, down: Tree, clients: Clients) -> Tree:
        """Return the stacked states of newcomers; where a rule draws nothing, all are as the first."""
        fed, states = self._federation, []
        for client in clients.tolist():
            generator = rng.generator(fed.seed, "init", client)
            before = generator.get_state()
            states.append(fed.cast(fed.algorithm.client.init(fed.problems[which], down, generator)))
            if torch.equal(generator.get_state(), before):
                return tree.map(lambda leaf: leaf.repeat(len(clients), *[1] * leaf.ndim), states[0])
        return tree.stack(states)

    def shape(self, which: int, down: Tree) -> Tree:
        """Return a state of the problem's clients, for its structure."""
        if which not in self._shapes:
            problem = self._federation.problems[which]
            self._shapes[which] = self._federation.algorithm.client.init(problem, down, rng.generator("shape"))
        return self._shapes[which]


def bound(rule: Any, problem: Problem) -> Any:
    """Return a client rule's function for one problem: (down, state, data) -> …"""

    @functools.wraps(rule)
    def function(down: Tree, state: Tree, data: Data) -> Any:
        return rule(problem, down, state, data)

    return function
