"""The simulator: any algorithm over a dealt data set, round by round.

It knows nothing of any method: it groups a cohort by problem, runs the client rule on chunks of clients, joins the
uploads, and lets the server rule step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from personafl.core import rng, tree, wire
from personafl.core.algorithm import Empty, Problem, Reduced, for_returning, join
from personafl.core.batches import Data
from personafl.core.tree import Tree
from personafl.errors import Diverged
from personafl.simulate.cohort import draw_cohort, draw_offline
from personafl.simulate.engine import samples_of, steps_of
from personafl.simulate.federation import Federation
from personafl.simulate.pipeline import Ahead
from personafl.simulate.trainer import Chunk, Done, StatesOnNodes, Trainer
from personafl.simulate.workers.local import WorkerFailed, cores, workers_for
from personafl.simulate.workers.nodestore import NodeStore
from personafl.simulate.workers.order import begun_order, in_order
from personafl.storage.store import Store

Clients = NDArray[np.int64]
_WAITING = 16  # chunks that may wait for an earlier one,
_ROOM = 2**28  # and the bytes that they may take


@dataclass(frozen=True)
class Round:
    """What a round did: mean training loss over its clients, how many they were, bytes down and up.

    `ranks` are those of the weights that were sent as factors. On a cloud there are its virtual time and what happened;
    with a buffer its virtual time, how stale the uploads were that it took (mean and largest), and how many it dropped.
    """

    number: int
    loss: float
    clients: int
    bytes_down: int
    bytes_up: int
    ranks: dict[str, int]
    time: float | None = None
    journal: dict[str, Any] | None = None
    staleness: float | None = None
    most_stale: int | None = None
    dropped: int | None = None


class Trained(NamedTuple):
    """What the training of some clients sends to their server, and what it cost."""

    uploads: Reduced | None  # None: nobody took part
    bytes_down: int
    bytes_up: int
    unseen: list[tuple[Clients, torch.Tensor]]  # clients, and whether their numbers are finite, not looked at yet


class Simulation:
    """A federation in progress: the server's state and every client's."""

    def __init__(self, federation: Federation, store: Store, server_bytes: bytes | None = None) -> None:
        self.federation = federation
        self._trainer = Trainer(federation)
        self.workers = workers_for(self._trainer, federation.workers)
        self.store = self.workers.stored(store, federation.data.clients)
        self.homes = np.zeros(federation.data.clients, dtype=np.int64)  # [clients] whose model each one receives
        self._device = federation.data.device
        self.server = self._begin()
        self._with_model: dict[int, bool] = {}  # problem -> whether states have a personal model
        self._drawn: tuple[int, Clients] | None = None  # the next round and its cohort, drawn ahead
        self._plan: tuple[int, Clients, list[tuple[int, Clients]]] | None = None  # of its chunks
        self._ahead = Ahead(self._trainer.drawn)
        if server_bytes is not None:
            self._restore(server_bytes)

    def _restore(self, server_bytes: bytes) -> None:
        self.server = self._decoded(server_bytes, self.server)

    def _decoded(self, data: bytes, like: Tree) -> Tree:
        return tree.map(lambda leaf: leaf.to(self._device), wire.decode(data, like))

    def saved(self) -> Tree:
        """Return what a checkpoint keeps besides the clients' states."""
        return self.server

    def _begin(self) -> Tree:
        """Return the server's state before the first round."""
        return self._new_server(self.federation.population)

    def _new_server(self, population: float) -> Tree:
        """Return the fresh state of a server for clients of this weight."""
        fed = self.federation
        start = fed.start or fed.problems[0].net.init(rng.generator(fed.seed, "start"))
        return _plain(fed.algorithm.server.init(fed.problems[0], fed.cast(start), population))

    def step(self, number: int) -> Round:
        """Run one round."""
        fed = self.federation
        cohort = self._cohort(number)
        message = self.broadcast()
        done = self._train(cohort, message, number)
        loss = float("nan")
        if done.uploads is not None:
            server = fed.algorithm.server.update(self.server, done.uploads, number)
            self._look(done, number)  # as late as that, for a GPU is waited for here
            self.server = self._checked(server, number)
            loss = done.uploads.loss()
        self._train_offline(self._offline(fed.data.seen, cohort, number), number)
        return Round(number, loss, len(cohort), done.bytes_down, done.bytes_up, wire.ranks(message))

    def _cohort(self, number: int) -> Clients:
        """Return who takes part in a round, and begin to read the states of those who take part in the next one."""
        fed = self.federation
        if self._drawn is not None and self._drawn[0] == number:
            cohort = self._drawn[1]
        else:
            cohort = draw_cohort(fed.data.seen, fed.cohort, fed.sampling, fed.seed, number)
        self._drawn = number + 1, draw_cohort(fed.data.seen, fed.cohort, fed.sampling, fed.seed, number + 1)
        self.store.prefetch(self._drawn[1])
        return cohort

    def _train(self, cohort: Clients, message: Tree, number: int) -> Trained:
        """Train clients of one server for a round, keep their states and join their uploads."""
        bytes_down, bytes_up = self._bytes_down(cohort, message), 0
        joined: Reduced | None = None
        unseen: list[tuple[Clients, torch.Tensor]] = []
        for clients, done in self.results(cohort, message, number, join=True):
            if tree.leaves(done.states):
                self._check_trained(number, clients, done.finite)
                self._keep(clients, done.states)
            else:
                unseen.append((clients, done.finite))
            bytes_up += done.size * len(clients)
            joined = self._trainer.join(joined, done.uploads, clients)
        return Trained(joined, bytes_down, bytes_up, unseen)

    def _look(self, done: Trained, number: int) -> None:
        """Fail if what clients sent is not finite."""
        for clients, finite in done.unseen:
            self._check_trained(number, clients, finite)

    def joined(self, chunks: Iterable[tuple[Clients, Tree]]) -> Reduced | None:
        """Join the dense uploads of chunks of clients, stacked, in order; None if there is none."""
        joined: Reduced | None = None
        for clients, uploads in chunks:
            joined = join(joined, uploads, self.federation.weighing(clients))
        return joined

    def results(
        self, cohort: Clients, message: Tree, number: int, *, join: bool = False
    ) -> Iterator[tuple[Clients, Done]]:
        """Train clients for a round, and yield chunks of them with what became of them; `join`: with uploads joined.

        Whether that is finite is for the caller to look at.
        """
        first, again = wire.dense(message), for_returning(message)
        down = first if again is message else wire.dense(again)
        chunks = self._planned(cohort, number)
        order = self._begun_order(chunks, number)
        begin = functools.partial(self._begin_with, first)
        tasks = (
            Chunk(which, clients, number, down, begin(which, clients), join, self._ahead.take(clients, number))
            for which, clients in map(chunks.__getitem__, order)
        )
        results: Iterator[Any] = zip(chunks, in_order(order, self.workers.map(tasks)), strict=True)
        if self._device.type == "cuda":
            results = self._ahead.handed_on(results, number, lambda: self._first_of_next(number))
        try:
            for (_, clients), done in results:
                yield clients, done
        except WorkerFailed as error:
            task = order[error.task]
            raise WorkerFailed(f"{self._named(chunks[task][1])}: {error}", task) from error

    def _planned(self, cohort: Clients, number: int) -> list[tuple[int, Clients]]:
        """Return the chunks of a round's clients, with the problem of each."""
        plan, self._plan = self._plan, None
        if plan is not None and plan[0] == number and plan[1] is cohort:
            return plan[2]
        return [(which, clients) for which, _, clients in self.groups(cohort, self._steps(cohort, number))]

    def _begun_order(self, chunks: list[tuple[int, Clients]], number: int) -> list[int]:
        """Return in which order chunks are begun: where there are workers, so that these end together."""
        fed = self.federation
        if fed.workers == 1:
            return list(range(len(chunks)))
        largest = max(problem.net.parameters for problem in fed.problems)
        phases = fed.algorithm.client.phases
        work = [int(samples_of(fed.data, clients, phases, fed.seed, number).sum()) for _, clients in chunks]
        workers = cores() if fed.workers == "auto" else fed.workers
        return begun_order(work, workers, max(1, min(_WAITING, _ROOM // (16 * largest))))

    def _begin_with(self, first: Tree, which: int, clients: Clients) -> Tree | StatesOnNodes:
        """Return the states that clients are trained from, if there are any and they are here."""
        kept = isinstance(self.store, NodeStore) and tree.leaves(self.shape(which, first))
        return StatesOnNodes(first, later=False) if kept else self.states(which, first, clients)

    def _first_of_next(self, number: int) -> Clients | None:
        """Return the first chunk of the round after this one, if its cohort is known and its samples are there."""
        if self._drawn is None or self._drawn[0] != number + 1 or self.federation.data.window is not None:
            return None
        chunks = self._planned(self._drawn[1], number + 1)
        self._plan = number + 1, self._drawn[1], chunks
        return next((clients for _, clients in chunks), None)

    def _steps(self, clients: Clients, number: int) -> Clients:
        """Return how many steps clients take in a round."""
        fed = self.federation
        return steps_of(fed.data, clients, fed.algorithm.client.phases, fed.seed, number)

    def _bytes_down(self, cohort: Clients, message: Tree) -> int:
        """Return the bytes of a broadcast to clients, of whom newcomers are sent more."""
        newcomers = int((~self.store.has(cohort)).sum())
        again = wire.size(for_returning(message))
        return again * len(cohort) + (wire.size(message) - again) * newcomers

    def _offline(self, members: Clients, active: Clients, number: int) -> Clients:
        """Return which members of a server train without contact: of those not active, some that were in contact."""
        fed = self.federation
        if not fed.offline:
            return active[:0]
        chosen = draw_offline(members, active, fed.offline, fed.seed, number)
        return chosen[self.store.has(chosen)]

    def _train_offline(self, chosen: Clients, number: int) -> None:
        """Let clients train without contact."""
        fed, rule = self.federation, self.federation.algorithm.client
        for which, server, clients in self.groups(chosen):
            offline: Any = rule.offline  # type: ignore[attr-defined]  # an optional method of rules
            problem, states = fed.problems[which], self.states(which, self.down(server), clients)
            data = self._trainer.drawn(clients, number)
            states = fed.engines[which].train(_alone(offline, problem), Empty(), states, data)
            self.check(f"round {number + 1}: offline training", clients, states)
            self._keep(clients, states)

    def updated(self, server: Tree, uploads: Reduced, number: int) -> Tree:
        """Return a server's state after a round."""
        return self._checked(self.federation.algorithm.server.update(server, uploads, number), number)

    def broadcast(self, server: int | None = None) -> Tree:
        """Return what a newcomer to a server is sent now, in compact forms; None: by the mean of all servers."""
        return self.federation.algorithm.server.broadcast(self.server)

    def down(self, server: int | None = None) -> Tree:
        """Return what a newcomer to a server receives now; None: from the mean of all servers."""
        return wire.dense(self.broadcast(server))

    def groups(self, clients: Clients, steps: Clients | None = None) -> Iterator[tuple[int, int, Clients]]:
        """Cut clients into chunks (problem, server, clients) that solve one problem, have one server and fit memory.

        Given how many steps they take, those with equally many go together.
        """
        kinds = self.federation.problem_of[clients]
        homes = self.homes[clients]
        steps = np.zeros_like(clients) if steps is None else steps
        for server in np.unique(homes):
            for which in np.unique(kinds[homes == server]):
                members = (homes == server) & (kinds == which)
                for chunk in self.federation.engines[which].chunks(clients[members], steps[members]):
                    for part in self.federation.data.fitting(chunk):
                        yield int(which), int(server), part

    def states(self, which: int, down: Tree, clients: Clients) -> Tree:
        """Return the stacked states of clients, fresh for those who have none."""
        return self._trainer.states(self.store, which, down, clients)

    def shape(self, which: int, down: Tree) -> Tree:
        """Return a state of the problem's clients, for its structure."""
        return self._trainer.shape(which, down)

    def has_model(self, client: int) -> bool:
        """Say whether a client has a personal model in its state; a state may be only a dual, or what is late."""
        return bool(self.have_models(np.array([client]))[0])

    def have_models(self, clients: Clients) -> NDArray[np.bool_]:
        """Say which clients have a personal model in their states."""
        fed, known = self.federation, self.store.has(clients)
        for which in np.unique(fed.problem_of[clients[known]]).tolist():
            if which not in self._with_model:
                down = self.down()
                models = fed.algorithm.client.models(fed.problems[which], down, self.shape(which, down))
                self._with_model[which] = "personal" in models
            if not self._with_model[which]:
                known &= fed.problem_of[clients] != which
        return known

    def _keep(self, clients: Clients, states: Tree) -> None:
        flat = {path: leaf.cpu() for path, leaf in tree.flatten(states).items()}
        if flat:
            self.store.put(clients, flat)

    def check(self, what: str, clients: Clients, result: Tree) -> None:
        """Fail if what was computed for clients, stacked, is not finite."""
        self._check_finite(what, clients, tree.finite(result, len(clients)))

    def _check_trained(self, number: int, clients: Clients, finite: torch.Tensor) -> None:
        self._check_finite(f"round {number + 1}: training", clients, finite)

    def _check_finite(self, what: str, clients: Clients, finite: torch.Tensor) -> None:
        good = finite.cpu().numpy()
        if not good.all():
            named = self._named(clients[~good])
            raise Diverged(f"{what} gave non-finite numbers for {named}; lower training.lr or set training.clip")

    def _named(self, clients: Clients) -> str:
        """Return clients in words."""
        names = [self.federation.data.client_names[client] for client in clients]
        return f"clients {', '.join(names[:5])}" + (f" and {len(names) - 5} more" if len(names) > 5 else "")

    def _checked(self, server: Tree, number: int) -> Tree:
        """Return a server's state as it is kept; fail if it is not finite."""
        if not tree.finite([leaf.to(self._device).unsqueeze(0) for leaf in tree.leaves(server)], 1):
            raise Diverged(f"round {number + 1}: the shared model became non-finite; lower the server's learning rate")
        return _plain(server)


def _plain(state: Tree) -> Tree:
    """Lay tensors out in memory as a checkpoint restores them: kernels may round other layouts differently."""
    return tree.map(torch.Tensor.contiguous, state)


def _alone(rule: Any, problem: Problem) -> Any:
    """Return a client rule's `offline` for one problem, as an engine calls it."""

    @functools.wraps(rule)
    def function(down: Tree, state: Tree, data: Data) -> Any:
        return rule(problem, state, data)

    return function
