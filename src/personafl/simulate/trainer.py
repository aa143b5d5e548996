"""What is done with chunks of clients: the same in this process, in its workers, on a cluster's nodes and on a device.

A `Task` says what. One of them is here, a `Chunk` that a client rule trains; scoring is another (`runs.trying`).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from personafl.core import rng, tree, wire
from personafl.core.algorithm import (
    NOTHING_OWN,
    ClientRule,
    Empty,
    Own,
    Problem,
    Reduced,
    for_returning,
    given,
    reduce,
)
from personafl.core.batches import Data
from personafl.core.tree import Params, Tree
from personafl.data.federated import Clients, FederatedData
from personafl.fast.table import enabled
from personafl.simulate.engine import Engine, gather
from personafl.simulate.protection import Protection

# What becomes of the states that a task makes, where it is done: they are the clients' own from now on; they will be
# once these have arrived (see `buffered`); or nothing.
New = Literal["kept", "later", "none"]
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
    new: New


class Task(Protocol):
    """Something to do with clients of one problem: a NamedTuple, for it is sent."""

    @property
    def problem(self) -> int:
        """Which problem the clients solve."""

    @property
    def clients(self) -> Clients:
        """Whom it is about."""

    @property
    def down(self) -> Tree:
        """What they receive."""

    @property
    def own(self) -> Own:
        """What differs in what each of them receives."""

    @property
    def states(self) -> Tree | StatesOnNodes:
        """Their states, stacked."""

    def done_by(self, trainer: "Trainer") -> Any:
        """Do it, and return what is sent back."""

    @property
    def _replace(self) -> Callable[..., Any]:
        """Return it with other values."""


class Chunk(NamedTuple):
    """Clients of one problem for whom a client rule is to do something, as in a round.

    To train is what it is for; "offline" is to train without contact, "tuning" to fine-tune. Those have no uploads.
    """

    problem: int
    clients: Clients
    round: int
    down: Tree
    states: Tree | StatesOnNodes  # stacked
    weights: NDArray[Any] | None = None  # of the clients, if uploads are joined where these are trained
    data: Data | None = None  # if it was drawn before
    own: Own = NOTHING_OWN  # of each client in what it receives
    what: Literal["training", "offline", "tuning"] = "training"

    def done_by(self, trainer: "Trainer") -> "Done":
        """Train."""
        return trainer.train(self)


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
    """Does what there is to do with chunks of clients, wherever that is."""

    def __init__(self, learners: Learners) -> None:
        self.learners = learners
        self._shapes: dict[int, Tree] = {}  # problem -> a state, for its structure

    def __call__(self, task: Task) -> Any:
        """Do a task."""
        return task.done_by(self)

    @enabled()
    def train(self, chunk: Chunk) -> Done:
        """Train clients; return their new states, and their uploads if it is for those."""
        who = self.learners
        engine = who.engines[chunk.problem]
        data = chunk.data or self._data(chunk)
        found = engine.train_for_now(self._function(chunk), chunk.down, (chunk.own, chunk.states), data)
        states, uploads = found if chunk.what == "training" else (found, Empty())
        finite, size = tree.finite((states, uploads), len(chunk.clients)), wire.size_of_one(uploads)
        if chunk.weights is not None and len(chunk.clients) > _SMALLER:  # less to send
            uploads = reduce(wire.dense_each(uploads), tree.on(who.data.device, chunk.weights))
        else:
            uploads = engine.kept(uploads)
        return Done(engine.kept(states), uploads, size, finite)

    def _function(self, chunk: Chunk) -> Any:
        """Return what the client rule does: (down, (own, state), data) -> …"""
        rule, problem = self.learners.rule, self.learners.problems[chunk.problem]
        if chunk.what == "offline":
            return _alone(rule.offline, problem)
        if chunk.what == "training":
            return addressed_to(bound(rule.update, problem), for_returning)
        return addressed_to(bound(rule.personalize, problem))

    def _data(self, chunk: Chunk) -> Data:
        """Return the batches of a chunk."""
        who = self.learners
        if chunk.what == "tuning":
            return gather(who.data, chunk.clients, who.rule.tuning, who.seed, chunk.round, who.protection)
        return self.drawn(chunk.clients, chunk.round)

    def drawn(self, clients: Clients, number: int) -> Data:
        """Return the batches of clients for a round."""
        who = self.learners
        return gather(who.data, clients, who.rule.phases, who.seed, number, who.protection)

    def states(self, known: Known, which: int, down: Tree, clients: Clients, own: Own = NOTHING_OWN) -> Tree:
        """Return the stacked states of clients, fresh for those who have none, from what each of these is sent."""
        shape, device = self.shape(which, down), self.learners.data.device
        if not tree.leaves(shape):
            return shape
        old = known.has(clients)
        stacks = [known.take(clients[old])] if old.any() else []
        if not old.all():
            new = torch.from_numpy(np.flatnonzero(~old)).to(device)
            stacks.append(tree.flatten(self._fresh(which, down, clients[~old], tree.map(lambda leaf: leaf[new], own))))
        if len(stacks) == 1:
            return tree.unflatten(shape, {path: leaf.to(device) for path, leaf in stacks[0].items()})
        order = torch.from_numpy(np.argsort(np.argsort(~old, kind="stable")))  # old ones are first in the stacks
        joined = {path: torch.cat([stack[path].to(device) for stack in stacks]) for path in stacks[0]}
        return tree.unflatten(shape, {path: leaf[order.to(device)] for path, leaf in joined.items()})

    def global_model(self, down: Tree) -> Params | None:
        """Return the model that all who receive a broadcast share, if any."""
        return self.learners.rule.models(self.learners.problems[0], down, self.shape(0, down)).get("global")

    def _fresh(self, which: int, down: Tree, clients: Clients, own: Own) -> Tree:
        """Return the stacked states of newcomers; where a rule draws nothing, and all are sent one message, one's."""
        who, states = self.learners, []
        for row, number in enumerate(who.data.drawing(clients).tolist()):
            generator = rng.generator(who.seed, "init", number)
            before = generator.get_state()
            states.append(who.cast(who.rule.init(who.problems[which], given(down, tree.take(own, row)), generator)))
            if not own and torch.equal(generator.get_state(), before):
                return tree.map(lambda leaf: leaf.repeat(len(clients), *[1] * leaf.ndim), states[0])
        return tree.stack(states)

    def shape(self, which: int, down: Tree) -> Tree:
        """Return a state of the problem's clients, for its structure."""
        if which not in self._shapes:
            who = self.learners
            self._shapes[which] = who.rule.init(who.problems[which], down, rng.generator("shape"))
        return self._shapes[which]


def bound(rule: Any, problem: Problem) -> Any:
    """Return a client rule's function for one problem: (down, state, data) -> …"""

    @functools.wraps(rule)
    def function(down: Tree, state: Tree, data: Data) -> Any:
        return rule(problem, down, state, data)

    return function


def addressed_to(function: Any, received: Callable[[Tree], Tree] = lambda message: message) -> Any:
    """Return a client rule's function for one problem with what is the client's own beside its state."""

    @functools.wraps(function)
    def own_first(down: Tree, beside: tuple[Own, Tree], data: Data) -> Any:
        own, state = beside
        return function(received(given(down, own)), state, data)

    return own_first


def _alone(rule: Any, problem: Problem) -> Any:
    """Return a client rule's `offline` for one problem, as an engine calls it."""

    @functools.wraps(rule)
    def function(down: Tree, beside: tuple[Own, Tree], data: Data) -> Any:
        return rule(problem, beside[1], data)

    return function
