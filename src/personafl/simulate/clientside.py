"""The clients' half of a federation: their states, and what they do with what their server sent.

It knows no server rule and has no server state. The simulator has it for all clients, and a device process for one.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from personafl.core import tree, wire
from personafl.core.algorithm import NOTHING_OWN, Empty, Own, for_returning, given
from personafl.core.tree import Params, Tree
from personafl.data.federated import Clients
from personafl.errors import Diverged
from personafl.simulate.engine import steps_of
from personafl.simulate.trainer import Chunk, Done, Known, Learners, New, StatesOnNodes, Task, Trainer

Group = tuple[int, int, Clients]  # problem, server, and clients


class ClientSide(ABC):
    """Clients: what they know, their states, and whose model each one receives."""

    def __init__(self, learners: Learners, store: Known) -> None:
        self.learners = learners
        self.trainer = Trainer(learners)
        self.store = store
        self.homes = np.zeros(learners.data.clients, dtype=np.int64)  # [clients] the server of each one
        self._with_model: dict[int, tuple[bool, bool]] = {}  # problem -> whether there are states, and personal models

    @abstractmethod
    def broadcast(self, server: int | None = None) -> Tree:
        """Return what a newcomer to a server is sent now, in compact forms; None: by the mean of all servers."""

    def down(self, server: int | None = None) -> Tree:
        """Return what a newcomer to a server receives now; None: from the mean of all servers."""
        return wire.dense(self.broadcast(server))

    def addressed(self, clients: Clients) -> Own:
        """Return what differs in what each of some clients is sent now, stacked; nothing: all are sent the same."""
        return NOTHING_OWN

    def reached(self, clients: Clients) -> NDArray[np.bool_]:
        """Say to whom of some clients something of its own is sent, if to anyone."""
        return np.zeros(len(clients), dtype=np.bool_)

    def message_to(self, client: int, server: int | None = None) -> Tree:
        """Return what a client is sent by a server now, whole and in compact forms."""
        return given(self.broadcast(server), tree.take(self.addressed(np.array([client])), 0))

    def train(self, client: int, message: Tree, number: int) -> Done:
        """Train one client for a round, from a message to it."""
        first, again = received(message)
        which, clients = int(self.learners.problem_of[client]), np.array([client])
        return self.trainer.train(Chunk(which, clients, number, again, self.states(which, first, clients)))

    def train_offline(self, chosen: Clients, number: int) -> Iterator[tuple[Clients, Tree]]:
        """Train clients without contact; yield chunks of them with their new states."""
        return self._changed("offline", self.groups(chosen), number, f"round {number + 1}: offline training")

    def personalize(self, clients: Clients, number: int) -> Iterator[tuple[Clients, Tree]]:
        """Fine-tune clients after `number` rounds, from their states or as newcomers; yield chunks with the outcome."""
        who = self.learners
        steps = steps_of(who.data, clients, who.rule.tuning, who.seed, number)
        return self._changed("tuning", self.groups(clients, steps), number, f"after round {number}: fine-tuning")

    def _changed(
        self, what: Literal["offline", "tuning"], groups: Iterable[Group], number: int, when: str
    ) -> Iterator[tuple[Clients, Tree]]:
        """Have clients do what has no uploads; yield chunks of them with the states that come of it."""
        chunks, down, offline, nothing = list(groups), functools.cache(self.down), what == "offline", Empty()

        def task(which: int, server: int, clients: Clients) -> Chunk:
            if offline:
                states = self.states_for(down(server), which, clients, "kept")
                return Chunk(which, clients, number, nothing, states, what=what)
            own = self.addressed(clients)
            states = self.states_for(down(server), which, clients, "none", own)
            return Chunk(which, clients, number, down(server), states, own=own, what=what)

        for (_, _, clients), done in zip(chunks, self.done(task(*chunk) for chunk in chunks), strict=True):
            self.check_finite(when, clients, done.finite)
            yield clients, done.states

    def done(self, tasks: Iterable[Task]) -> Iterator[Any]:
        """Do tasks, wherever that is; yield what comes of each, in their order."""
        return map(self.trainer, tasks)

    def groups(self, clients: Clients, steps: Clients | None = None) -> Iterator[Group]:
        """Cut clients into chunks (problem, server, clients) that solve one problem, have one server and fit memory.

        Given how many steps they take, those with equally many go together.
        """
        who, homes = self.learners, self.homes[clients]
        kinds = who.problem_of[clients]
        steps = np.zeros_like(clients) if steps is None else steps
        for server in np.unique(homes):
            for which in np.unique(kinds[homes == server]):
                members = (homes == server) & (kinds == which)
                for chunk in who.engines[which].chunks(clients[members], steps[members]):
                    for part in who.data.fitting(chunk):
                        yield int(which), int(server), part

    def states(self, which: int, down: Tree, clients: Clients, own: Own = NOTHING_OWN) -> Tree:
        """Return the stacked states of clients, fresh for those who have none."""
        return self.trainer.states(self.store, which, down, clients, own)

    def states_for(
        self, first: Tree, which: int, clients: Clients, new: New, own: Own = NOTHING_OWN
    ) -> Tree | StatesOnNodes:
        """Return the states that a task begins with, given what newcomers receive; `new` is what becomes of others."""
        return self.states(which, first, clients, own)

    def shape(self, which: int, down: Tree) -> Tree:
        """Return a state of the problem's clients, for its structure."""
        return self.trainer.shape(which, down)

    def global_model(self, down: Tree) -> Params | None:
        """Return the model that all who receive a broadcast share, if any."""
        return self.trainer.global_model(down)

    def has_model(self, client: int) -> bool:
        """Say whether a client has a personal model, in its state or in what it is sent."""
        return bool(self.have_models(np.array([client]))[0])

    def have_models(self, clients: Clients) -> NDArray[np.bool_]:
        """Say which clients have a personal model: in their states, which may be only a dual or what is late; or, where
        a rule keeps no states, in what is sent to them.
        """
        known, kinds = self.store.has(clients), self.learners.problem_of[clients]
        for which in np.unique(kinds).tolist():
            kept, personal = self._models_of(which)
            if not (kept and personal):
                members = kinds == which
                known[members] = self.reached(clients[members]) if personal else False
        return known

    def _models_of(self, which: int) -> tuple[bool, bool]:
        """Say whether clients of a problem keep a state, and whether they have a personal model."""
        if which not in self._with_model:
            who, down = self.learners, self.down()
            shape = self.shape(which, down)
            models = who.rule.models(who.problems[which], down, shape)
            self._with_model[which] = bool(tree.leaves(shape)), "personal" in models
        return self._with_model[which]

    def check_finite(self, what: str, clients: Clients, finite: torch.Tensor) -> None:
        """Fail if not all clients have finite numbers."""
        good = finite.cpu().numpy()
        if not good.all():
            named = self.named(clients[~good])
            raise Diverged(f"{what} gave non-finite numbers for {named}; lower training.lr or set training.clip")

    def named(self, clients: Clients) -> str:
        """Return clients in words."""
        names = [self.learners.data.client_names[client] for client in clients]
        return f"clients {', '.join(names[:5])}" + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def received(message: Tree) -> tuple[Tree, Tree]:
    """Return a broadcast as newcomers receive it, and as those do who have a state."""
    first, again = wire.dense(message), for_returning(message)
    return first, first if again is message else wire.dense(again)
