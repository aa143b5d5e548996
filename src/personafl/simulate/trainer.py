"""Training a chunk of clients: the same in this process, in its workers, on a cluster's nodes and on a device."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from personafl.core import rng, tree, wire
from personafl.core.algorithm import ClientRule, Problem, Reduced, reduce
from personafl.core.batches import Data
from personafl.core.tree import Tree
from personafl.data.federated import Clients, FederatedData
from personafl.fast.table import enabled
from personafl.simulate.engine import Engine, gather
from personafl.simulate.protection import Protection

Entry = dict[str, torch.Tensor]  # states of clients, stacked and flattened to {path: tensor}
_SMALLER = 2  # clients from which on a sum, in float64, is smaller than what it is the sum of


@dataclass(frozen=True)
class Learners:
    """What clients know: the rule that they run, what each solves, and their data."""

    rule: ClientRule
    data: FederatedData
    problems: tuple[Problem, ...]  # all with the same `net`
    problem_of: Clients  # [clients] which problem each one solves
    engines: tuple[Engine, ...]  # one per problem
    seed: int
    dtype: torch.dtype
    protection: Protection | None = None  # of single samples

    def cast(self, values: Tree) -> Tree:
        """Move fresh parameters to the run's device and precision; what is not real numbers keeps its dtype."""
        moved = tree.map(lambda leaf: leaf.to(self.data.device), values)
        return tree.map(lambda leaf: leaf.to(self.dtype) if leaf.is_floating_point() else leaf, moved)


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
    weights: NDArray[Any] | None = None  # of the clients, if uploads are joined where these are trained
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

    def __init__(self, learners: Learners) -> None:
        self._learners = learners
        self._shapes: dict[int, Tree] = {}  # problem -> a state, for its structure

    @enabled()
    def __call__(self, chunk: Chunk) -> Done:
        """Train clients; return their new states and their uploads."""
        who = self._learners
        engine = who.engines[chunk.problem]
        data = chunk.data or self.drawn(chunk.clients, chunk.round)
        update = bound(who.rule.update, who.problems[chunk.problem])
        states, uploads = engine.train_for_now(update, chunk.down, chunk.states, data)
        finite, size = tree.finite((states, uploads), len(chunk.clients)), wire.size_of_one(uploads)
        if chunk.weights is not None and len(chunk.clients) > _SMALLER:  # less to send
            uploads = reduce(wire.dense_each(uploads), tree.on(who.data.device, chunk.weights))
        else:
            uploads = engine.kept(uploads)
        return Done(engine.kept(states), uploads, size, finite)

    def drawn(self, clients: Clients, number: int) -> Data:
        """Return the batches of clients for a round."""
        who = self._learners
        return gather(who.data, clients, who.rule.phases, who.seed, number, who.protection)

    def states(self, known: Known, which: int, down: Tree, clients: Clients) -> Tree:
        """Return the stacked states of clients, fresh for those who have none."""
        shape, device = self.shape(which, down), self._learners.data.device
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
        who, states = self._learners, []
        for number in who.data.drawing(clients).tolist():
            generator = rng.generator(who.seed, "init", number)
            before = generator.get_state()
            states.append(who.cast(who.rule.init(who.problems[which], down, generator)))
            if torch.equal(generator.get_state(), before):
                return tree.map(lambda leaf: leaf.repeat(len(clients), *[1] * leaf.ndim), states[0])
        return tree.stack(states)

    def shape(self, which: int, down: Tree) -> Tree:
        """Return a state of the problem's clients, for its structure."""
        if which not in self._shapes:
            who = self._learners
            self._shapes[which] = who.rule.init(who.problems[which], down, rng.generator("shape"))
        return self._shapes[which]


def bound(rule: Any, problem: Problem) -> Any:
    """Return a client rule's function for one problem: (down, state, data) -> …"""

    @functools.wraps(rule)
    def function(down: Tree, state: Tree, data: Data) -> Any:
        return rule(problem, down, state, data)

    return function
