"""The simulator: any algorithm over a dealt data set, round by round.

It has both halves: clients, whom it groups by problem and trains in chunks, and a server, which joins their uploads and
steps. It knows nothing of any method.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from personafl.core import rng, tree, wire
from personafl.core.algorithm import NOTHING_OWN, Own, Reduced, for_returning, untrained_upload
from personafl.core.batches import Data, counted_samples, counted_steps
from personafl.core.tree import Tree
from personafl.data.federated import Clients
from personafl.simulate.clientside import ClientSide, received
from personafl.simulate.cohort import draw_cohort, draw_offline
from personafl.simulate.engine import steps_of
from personafl.simulate.federation import Federation
from personafl.simulate.resident import ResidentStates
from personafl.simulate.serverside import ServerSide
from personafl.simulate.trainer import Chunk, Done, New, StatesOnNodes, Task
from personafl.simulate.workers.local import WorkerFailed, cores, workers_for
from personafl.simulate.workers.nodestore import NodeStore
from personafl.simulate.workers.order import begun_order, in_order
from personafl.storage.store import States, Store

T = TypeVar("T")
Alone = Mapping[tuple[int, int], Sequence[int]]  # (client, round that it took part in) -> rounds without contact before


class Pipeline:
    """Batches of one chunk, drawn before it is its turn. `draw` draws those of clients for a round.

    A GPU's results are there before they are computed, and whoever looks at them waits. So a chunk's results are handed
    on only when the next chunk is begun, and with the last one the next round's batches are drawn.
    """

    def __init__(self, draw: Callable[[Clients, int], Data]) -> None:
        self._draw = draw
        self._ready: tuple[int, Clients, Data] | None = None

    def take(self, clients: Clients, number: int) -> Data | None:
        """Return the batches of clients for a round, if they are the ones that are ready."""
        ready, self._ready = self._ready, None
        if ready is None or ready[0] != number or not np.array_equal(ready[1], clients):
            return None
        return ready[2]

    def handed_on(self, results: Iterator[T], number: int, following: Callable[[], Clients | None]) -> Iterator[T]:
        """Yield a round's results, each once the next is begun; before the last, draw for the clients who follow."""
        for last, next_ in itertools.pairwise(itertools.chain(results, [None])):
            if next_ is None and (clients := following()) is not None:
                self._ready = number + 1, clients, self._draw(clients, number + 1)
            yield last  # type: ignore[misc]


_WAITING = 16  # chunks that may wait for an earlier one,
_ROOM = 2**28  # and the bytes that they may take


@dataclass(frozen=True)
class Round:
    """What a round did: mean training loss over its clients, how many they were, bytes down and up.

    `ranks` are those of the weights that were sent as factors. On a cloud there are its virtual time and what happened;
    with a buffer its virtual time, how stale the uploads were that it took (mean and largest), and how many it dropped.
    `told` is what the server's rule has to tell.
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
    told: dict[str, float] | None = None


class Trained(NamedTuple):
    """What the training of some clients sends to their server, and what it cost."""

    uploads: Reduced | None  # None: nobody took part
    bytes_down: int
    bytes_up: int
    unseen: list[tuple[Clients, torch.Tensor]]  # clients, and whether their numbers are finite, not looked at yet


class Simulation(ClientSide):
    """A federation in progress: every client, and the server with its state; several on a cloud."""

    store: States
    _new: New = "kept"  # what becomes of the states that a round makes

    def __init__(self, federation: Federation, store: Store, server_bytes: bytes | None = None) -> None:
        super().__init__(federation.learners, store)
        self.federation = federation
        self.workers = workers_for(self.trainer, federation.workers)
        self._device = federation.data.device
        self.store = self.workers.stored(store, federation.data.clients)
        if self._device.type == "cuda" and self.store is store:
            self.store = ResidentStates(store, federation.data.clients, self._device, store.budget)
        self.servers = self._begin()
        self._drawn: tuple[int, Clients] | None = None  # the next round and its cohort, drawn ahead
        self._plan: tuple[int, Clients, list[tuple[int, Clients]]] | None = None  # of its chunks
        self._pipeline = Pipeline(self.trainer.drawn)
        self.alone: Alone | None = None  # who trained without contact, and when; None: it is drawn
        if server_bytes is not None:
            self._restore(server_bytes)

    def _begin(self) -> tuple[ServerSide, ...]:
        """Return the servers before the first round."""
        return (self.federation.serving(),)

    @property
    def server(self) -> Tree:
        """The server's state; on a cloud, a tuple of those of its servers."""
        return self.servers[0].state

    def _restore(self, server_bytes: bytes) -> None:
        self.servers[0].state = self.servers[0].decoded(server_bytes, self.server)

    def saved(self) -> Tree:
        """Return what a checkpoint keeps besides the clients' states."""
        return self.server

    def broadcast(self, server: int | None = None) -> Tree:
        """Return what a newcomer to a server is sent now, in compact forms; None: by the mean of all servers."""
        return self.servers[0].broadcast()

    def addressed(self, clients: Clients) -> Own:
        """Return what differs in what each of some clients is sent now, stacked; nothing: all are sent the same."""
        return self.servers[0].addressed(clients)

    def reached(self, clients: Clients) -> NDArray[np.bool_]:
        """Say to whom of some clients something of its own is sent, if to anyone."""
        some: NDArray[np.bool_] = np.isin(clients, self.federation.data.seen)
        return some & (self.servers[0].rule.address is not None)

    def step(self, number: int) -> Round:
        """Run one round."""
        server, cohort = self.servers[0], self._cohort(number)
        message = server.broadcast()
        done = self._train(server, cohort, message, number)
        loss = float("nan")
        if done.uploads is not None:
            state = server.unchecked(server.state, done.uploads, number)
            self._look(done, number)  # as late as that, for a GPU is waited for here
            server.state = server.checked(state, number)
            loss = done.uploads.loss()
        self._train_offline(self._offline(self.federation.data.seen, cohort, number), number)
        sent = len(cohort), done.bytes_down, done.bytes_up, wire.ranks(message)
        return Round(number, loss, *sent, told=server.rule.told(server.state) or None)

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

    def _train(self, server: ServerSide, cohort: Clients, message: Tree, number: int) -> Trained:
        """Train clients of one server for a round, keep their states and join their uploads."""
        self.catch_up(cohort, number)
        bytes_down, bytes_up = self._bytes_down(cohort, message), 0
        joined: Reduced | None = None
        unseen: list[tuple[Clients, torch.Tensor]] = []
        attack, waiting = self.federation.attack, list[tuple[Clients, Tree]]()
        trial = functools.partial(server.tried, number=number)
        for clients, done in self.results(cohort, message, number, server):
            if tree.leaves(done.states):
                self._check_trained(number, clients, done.finite)
                self._keep(clients, done.states)
            else:
                unseen.append((clients, done.finite))
            bytes_up += done.size * len(clients)
            if attack is not None:  # the hostile know what all others send
                waiting.append((clients, done.uploads))
            else:
                joined = server.join(joined, done.uploads, clients, number)
        for clients, uploads in () if attack is None else attack.sent(waiting, number, trial):
            joined = server.join(joined, uploads, clients, number)
        if joined is None and server.rule.steps_alone:
            joined = self._of_nobody(server, message)
        return Trained(joined, bytes_down, bytes_up, unseen)

    def _of_nobody(self, server: ServerSide, message: Tree) -> Reduced:
        """Return the uploads of no client."""
        who, down = self.federation.learners, wire.dense(message)
        state = who.cast(who.rule.init(who.problems[0], down, rng.generator("shape")))
        upload = wire.dense(untrained_upload(who.rule, who.problems[0], down, state))
        return server.join(None, tree.map(lambda leaf: leaf.unsqueeze(0)[:0], upload), self.federation.data.seen[:0])

    def _look(self, done: Trained, number: int) -> None:
        """Fail if what clients sent is not finite."""
        for clients, finite in done.unseen:
            self._check_trained(number, clients, finite)

    def results(
        self, cohort: Clients, message: Tree, number: int, server: ServerSide | None = None
    ) -> Iterator[tuple[Clients, Done]]:
        """Train clients for a round, and yield chunks of them with what became of them.

        Their uploads are joined where they are trained, given the server that knows their weights. Whether numbers are
        finite is for the caller to look at.
        """
        first, down = received(message)
        chunks = self._planned(cohort, number)
        each = server is None or server.rule.needs_each or self.federation.attack is not None
        joins = None if each else server
        order = self._begun_order(chunks, number)

        def task(which: int, clients: Clients) -> Chunk:
            weights = None if joins is None else joins.roster.weights_of(clients)
            own = self.addressed(clients)
            states = self.states_for(first, which, clients, self._new, own)
            return Chunk(which, clients, number, down, states, weights, self._pipeline.take(clients, number), own)

        tasks = (task(*chunks[place]) for place in order)
        results: Iterator[Any] = zip(chunks, in_order(order, self.done(tasks)), strict=True)
        if self._device.type == "cuda":
            results = self._pipeline.handed_on(results, number, lambda: self._first_of_next(number))
        for (_, clients), done in results:
            yield clients, done

    def done(self, tasks: Iterable[Task]) -> Iterator[Any]:
        """Do tasks, wherever that is; yield what comes of each, in their order."""
        given: list[Clients] = []

        def noted() -> Iterator[Task]:
            for task in tasks:
                given.append(task.clients)
                yield task

        try:
            yield from self.workers.map(noted())
        except WorkerFailed as error:
            raise WorkerFailed(f"{self.named(given[error.task])}: {error}", error.task) from error

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
        work = [int(self._steps(clients, number, counted_samples).sum()) for _, clients in chunks]
        workers = cores() if fed.workers == "auto" else fed.workers
        return begun_order(work, workers, max(1, min(_WAITING, _ROOM // (16 * largest))))

    def states_for(
        self, first: Tree, which: int, clients: Clients, new: New, own: Own = NOTHING_OWN
    ) -> Tree | StatesOnNodes:
        """Return the states that a task begins with, if there are any and they are here."""
        kept = isinstance(self.store, NodeStore) and tree.leaves(self.shape(which, first))
        return StatesOnNodes(first, new) if kept else self.states(which, first, clients, own)

    def _first_of_next(self, number: int) -> Clients | None:
        """Return the first chunk of the round after this one, if its cohort is known and its samples are there."""
        if self._drawn is None or self._drawn[0] != number + 1 or self.federation.data.window is not None:
            return None
        chunks = self._planned(self._drawn[1], number + 1)
        self._plan = number + 1, self._drawn[1], chunks
        return next((clients for _, clients in chunks), None)

    def _steps(self, clients: Clients, number: int, counted: Callable[..., Clients] = counted_steps) -> Clients:
        """Return how many steps clients take in a round, or what else is `counted`."""
        fed = self.federation
        return steps_of(fed.data, clients, fed.algorithm.client.phases, fed.seed, number, counted)

    def _bytes_down(self, cohort: Clients, message: Tree) -> int:
        """Return the bytes of a broadcast to clients, of whom newcomers are sent more."""
        newcomers = int((~self.store.has(cohort)).sum())
        again = wire.size(for_returning(message))
        return again * len(cohort) + (wire.size(message) - again) * newcomers

    def _offline(self, members: Clients, active: Clients, number: int) -> Clients:
        """Return which members of a server train without contact: of those not active, some that were in contact."""
        fed = self.federation
        if not fed.offline or self.alone is not None:
            return active[:0]
        chosen = draw_offline(members, active, fed.offline, fed.seed, number)
        return chosen[self.store.has(chosen)]

    def catch_up(self, clients: Clients, number: int) -> None:
        """Let clients train what they had trained without contact before a round, where that is known."""
        for client in clients.tolist() if self.alone else ():
            for round_ in (self.alone or {}).get((client, number), ()):
                self._train_offline(np.array([client]), round_)

    def _train_offline(self, chosen: Clients, number: int) -> None:
        """Let clients train without contact."""
        for clients, states in self.train_offline(chosen, number):
            self._keep(clients, states)

    def _keep(self, clients: Clients, states: Tree) -> None:
        if flat := tree.flatten(states):
            self.store.put(clients, flat)

    def _check_trained(self, number: int, clients: Clients, finite: torch.Tensor) -> None:
        self.check_finite(f"round {number + 1}: training", clients, finite)
