"""The server's half of a federation: its state, what it sends, and how it takes what clients send.

It knows of its clients what they weigh, and nothing of their data. The simulator has it, with one per server of a
cloud, and so has a server process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from personafl.core import tree, wire
from personafl.core.algorithm import NOTHING_OWN, Own, Problem, Reduced, ServerRule
from personafl.core.tree import Params, Tree
from personafl.data.federated import Clients
from personafl.errors import BadInput, Diverged
from personafl.fast.table import enabled
from personafl.uploads.robust import RobustServer

Weights = Literal["examples", "uniform"]


@dataclass(frozen=True)
class Roster:
    """What a server knows of its clients: who may take part, how many samples each has, and what it solves."""

    seen: Clients  # who may take part: numbers, ascending
    samples: Callable[[Clients], Clients]  # how many each of some clients trains on
    problem_of: Callable[[Clients], Clients]  # which problem each of some clients solves
    problems: tuple[Problem, ...]
    weights: Weights
    rule: ServerRule

    def of(self, clients: Clients) -> Roster:
        """Return it with others who may take part."""
        return dataclasses.replace(self, seen=clients)

    @property
    def population(self) -> float:
        """The weight of all clients that may take part."""
        return float(self.weights_of(self.seen).sum())

    def weights_of(self, clients: Clients) -> NDArray[Any]:
        """Return how much each client weighs: n_i or 1, and what the method makes of that."""
        weights = self.samples(clients) if self.weights == "examples" else np.ones_like(clients)
        own = np.stack([self.rule.weigh(problem, weights) for problem in self.problems])  # [problems, clients]
        return own[self.problem_of(clients), np.arange(len(clients))]


class ServerSide:
    """A server: its state, and the clients it has."""

    def __init__(self, start: Params, roster: Roster) -> None:
        self.rule, self.roster = roster.rule, roster
        self._device = next(iter(start.values())).device
        self.state = _plain(self.rule.init(roster.problems[0], start, roster.population))

    def decoded(self, data: bytes, like: Tree) -> Tree:
        """Return what a checkpoint kept, where states are computed with; fail if it is another kind of state."""
        try:
            return tree.map(lambda leaf: leaf.to(self._device), wire.decode(data, like))
        except BadInput as error:
            raise BadInput(f"{error}; go on with the version of personafl that began it, or begin a new run") from error

    def broadcast(self) -> Tree:
        """Return what a newcomer is sent now, in compact forms."""
        return self.rule.broadcast(self.state)

    @enabled()
    def addressed(self, clients: Clients) -> Own:
        """Return what differs in what each of some clients is sent now, stacked; nothing: all are sent the same.

        Who may not take part has the broadcast's.
        """
        if self.rule.address is None:
            return NOTHING_OWN
        own, may = self.rule.address(self.state, clients), np.isin(clients, self.roster.seen)
        if may.all():
            return own
        others, common = torch.from_numpy(~may).to(self._device), self.broadcast()

        def replaced(stacked: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
            return torch.where(others.reshape(-1, *[1] * leaf.ndim), leaf, stacked)

        return {name: tree.map(replaced, stacked, getattr(common, name)) for name, stacked in own.items()}

    def weighing(self, clients: Clients) -> torch.Tensor:
        """Return how much each client weighs, where uploads are computed with."""
        return tree.on(self._device, self.roster.weights_of(clients))

    @enabled()
    def join(self, joined: Reduced | None, uploads: Tree | Reduced, clients: Clients, number: int = 0) -> Reduced:
        """Join the uploads of a chunk of clients, stacked, with what is joined so far, in the memory of that."""
        if isinstance(uploads, Reduced):
            return uploads if joined is None else joined.plus(uploads)
        stacked, weights = wire.dense_each(uploads), self.weighing(clients)
        if self.rule.join_from is not None:
            return self.rule.join_from(self.state, joined, stacked, weights, clients, number)
        return self.rule.join(self.state, joined, stacked, weights)

    @enabled()
    def collected(self, uploads: Sequence[Tree], clients: Clients) -> Reduced | None:
        """Join uploads that can be looked at again, dense and [1, …] each; None: they are to be joined one by one."""
        return None if self.rule.collect is None else self.rule.collect(uploads, self.weighing(clients))

    def tried(self, uploads: Iterable[tuple[Clients, Tree]], number: int) -> Tree:
        """Return what would be sent after a round with these uploads, chunk by chunk; nothing is changed."""
        joined: Reduced | None = None
        for clients, stacked in uploads:
            joined = self.join(joined, stacked, clients, number)
        state = self.state if joined is None else self.unchecked(self.state, joined, number)
        return wire.dense(self.rule.broadcast(state))

    def updated(self, state: Tree, uploads: Reduced, number: int) -> Tree:
        """Return a state after a round."""
        return self.checked(self.unchecked(state, uploads, number), number)

    @enabled()
    def handed(self, uploads: Reduced, number: int) -> tuple[Tree, Reduced]:
        """Return the state after a round of this server's own, and what whoever has the model is handed in of it."""
        rule = self.rule
        return rule.handed(self.state, uploads, number) if isinstance(rule, RobustServer) else (self.state, uploads)

    @enabled()
    def given(self, made: Reduced, number: int) -> Tree:
        """Return the state after a round, given what several servers handed in."""
        assert isinstance(self.rule, RobustServer)  # others with one model for all have one state
        return self.checked(self.rule.given(self.state, made, number), number)

    @enabled()
    def unchecked(self, state: Tree, uploads: Reduced, number: int) -> Tree:
        """Return a state after a round, which is not looked at yet: a GPU may still be at it."""
        return self.rule.update(state, uploads, number)

    def checked(self, state: Tree, number: int) -> Tree:
        """Return a state as it is kept; fail if it is not finite."""
        if not tree.finite([leaf.to(self._device).unsqueeze(0) for leaf in tree.leaves(state)], 1):
            raise Diverged(f"round {number + 1}: the shared model became non-finite; lower the server's learning rate")
        return _plain(state)


def _plain(state: Tree) -> Tree:
    """Lay tensors out in memory as a checkpoint restores them: kernels may round other layouts differently."""
    return tree.map(torch.Tensor.contiguous, state)
