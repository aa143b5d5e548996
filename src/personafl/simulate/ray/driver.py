"""Tasks done by the nodes of a Ray cluster: the same bits, in the same order.

Nothing but the place differs from `workers`: this process deals chunks of clients and adds up, workers on the nodes
train and score, one per core. What decides a run is sent to each node once, and its workers share the data there. In a
round a node is sent the broadcast once, and uploads come back. Where the states of clients are is known here
(`nodestore`), and a task goes where most of its states are, if that leaves nobody idle.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from personafl.core.tree import Tree
from personafl.errors import BadInput, PersonaError
from personafl.simulate.ray.node import Answer, Node, NodeStates, RemoteStates, Worker, in_short
from personafl.simulate.trainer import StatesOnNodes, Task
from personafl.simulate.workers.local import Count, Work, WorkerFailed
from personafl.simulate.workers.nodestore import HOME, NodeStore, StatesLost, lost
from personafl.storage.slab import Clients, Entry
from personafl.storage.store import Store

_AHEAD = 3  # chunks a worker that are at work, on their way or waiting for an earlier one
_PATIENCE = 60.0  # seconds until a worker must have started
_FAREWELL = 5.0  # seconds that the nodes have to remove the files of their states


@dataclass(frozen=True, eq=False)
class _RemoteWorker:
    """A worker, the number of its node, and the problems whose states it knows the structure of."""

    actor: Any
    node: Node
    place: int
    shown: set[int]


class _Given(NamedTuple):
    """A task that a worker was given, and what will become of it."""

    number: int
    task: Task
    worker: _RemoteWorker
    answer: Answer


class RayWorkers:
    """Does tasks in order, by workers on the nodes of the cluster that this process is connected to.

    `count` "auto": one per core of each node.
    """

    def __init__(self, work: Work, count: Count) -> None:
        import ray

        self._ray = ray
        self._work = work
        self._count = count
        self._store: NodeStore | None = None  # of the simulation, if its states stay on the nodes
        self._states: list[RemoteStates] = []
        self._workers: list[_RemoteWorker] = []

    def stored(self, store: Store, clients: int) -> NodeStore:
        """Return a simulation's store as one whose newest states stay on the nodes."""
        self._store = NodeStore(store, clients, self)
        return self._store

    def map(self, tasks: Iterable[Task]) -> Iterator[Any]:
        """Yield the result of each task, in the tasks' order."""
        if not self._workers:
            self._start()
        try:
            yield from self._in_order(tasks)
        except BaseException:
            self.close()  # workers may still be at something that nobody waits for
            raise

    def close(self) -> None:
        """End the workers, and with them the states that were not brought home; a later task starts others."""
        for worker in self._workers:
            self._ray.kill(worker.actor)
        removed = [held.actor.close.remote() for held in self._states]
        if removed:
            self._ray.wait(removed, num_returns=len(removed), timeout=_FAREWELL)
        for held in self._states:
            self._ray.kill(held.actor)
        self._workers, self._states = [], []
        if self._store is not None:
            self._store.end()

    def _start(self) -> None:
        """Start workers, by turns of the nodes, as many as were asked for or as there are cores."""
        ray = self._ray
        nodes = nodes_of(ray)
        rows = itertools.zip_longest(*([node] * node.cores for node in nodes))  # by turns
        places = [node for row in rows for node in row if node is not None]
        if self._count != "auto":
            places = places[: self._count]
        if not places:
            raise BadInput("--engine ray: no node of the cluster has a core to work with; start nodes with --num-cpus")
        work, kind = ray.put(self._work), ray.remote(Worker)
        numbers = {node: number for number, node in enumerate(dict.fromkeys(places))}
        self._workers = [
            _RemoteWorker(on_node(ray, kind, node, 1).remote(work), node, numbers[node], set()) for node in places
        ]
        for worker in self._workers:
            first_answer(ray, worker.actor.ready.remote(), worker.node)

    def _start_states(self, budget: int) -> None:
        """Have each node hold states, in so much memory, and make that known to all workers."""
        kind = self._ray.remote(NodeStates)
        nodes = dict.fromkeys(worker.node for worker in self._workers)
        self._states = [RemoteStates(on_node(self._ray, kind, node, 0).remote(budget), node) for node in nodes]
        for held in self._states:
            first_answer(self._ray, held.actor.ready.remote(), held.node)
        for worker in self._workers:
            worker.actor.meet.remote(self._states, worker.place)  # done before what it is asked for later

    def _in_order(self, tasks: Iterable[Task]) -> Iterator[Any]:
        """Give tasks to workers, and yield results; a few wait for an earlier one."""
        given: deque[_Given] = deque()
        sent = _Sent(self._ray)
        for number, task in enumerate(tasks):
            if len(given) == _AHEAD * len(self._workers):
                yield self._result(given.popleft())
            given.append(self._give(number, task, self._load(given), sent))
        while given:
            yield self._result(given.popleft())

    def _give(self, number: int, task: Task, load: Counter[_RemoteWorker], sent: _Sent) -> _Given:
        """Give a task to a worker."""
        if isinstance(task.states, StatesOnNodes):
            return self._give_kept(number, task, task.states, load, sent)
        worker = self._chosen(load, Counter())
        answer = worker.actor.do.remote(task._replace(down=None), sent.once(task.down))
        return _Given(number, task, worker, answer)

    def _give_kept(
        self, number: int, task: Task, states: StatesOnNodes, load: Counter[_RemoteWorker], sent: _Sent
    ) -> _Given:
        """Give a task to a worker, and say where the states of its clients are; those that are here go with it."""
        assert self._store is not None
        if not self._states:
            self._start_states(self._store.home.budget)
        clients, nodes, known = task.clients, self._store.places(task.clients), self._store.has(task.clients)
        worker = self._chosen(load, Counter(nodes.tolist()))
        here = clients[known & (nodes == HOME)]
        found = (here, self._store.home.take(here)) if len(here) else None
        kept = {node: clients[nodes == node] for node in np.unique(nodes[nodes != HOME]).tolist()}
        again = known.all() and task.problem in worker.shown
        worker.shown.add(task.problem)
        message = sent.once(task.down if again else states.first)
        bare = task._replace(down=None, states=None)
        answer = worker.actor.do_kept.remote(bare, message, found, kept, states.new)
        return _Given(number, task, worker, answer)

    def _load(self, given: Iterable[_Given]) -> Counter[_RemoteWorker]:
        """Return how many tasks each worker has to do."""
        owner = {each.answer: each.worker for each in given}
        _, waiting = self._ray.wait(list(owner), num_returns=len(owner), timeout=0) if owner else ([], [])
        return Counter(owner[answer] for answer in waiting)

    def _chosen(self, load: Counter[_RemoteWorker], states: Counter[int]) -> _RemoteWorker:
        """Return who does a task with so many states on each node: an idle one, or one of those with least to do."""
        least = min(load[worker] for worker in self._workers)
        free = [worker for worker in self._workers if load[worker] <= least + (least > 0)]
        return min(free, key=lambda worker: (-states[worker.place], load[worker]))

    def _result(self, given: _Given) -> Any:
        """Return what became of a task; raise what went wrong."""
        errors, worker = self._ray.exceptions, given.worker
        try:
            result = self._ray.get(given.answer)
        except errors.RayTaskError as error:
            if isinstance(error.cause, StatesLost):
                raise WorkerFailed(str(error.cause), given.number) from None
            if isinstance(error.cause, PersonaError):
                raise error.cause from None
            raise WorkerFailed(str(error), given.number) from error
        except errors.RayError as error:
            gone = lost(f"a worker on node {worker.node.address} died ({in_short(error)})")
            raise WorkerFailed(str(gone), given.number) from error
        states = given.task.states
        if not isinstance(states, StatesOnNodes):
            return result
        done, kept = result
        if kept and self._store is not None:
            self._store.left(given.task.clients, worker.place, later=states.new == "later")
        return done

    def fetch(self, node: int, clients: Clients, later: bool) -> Iterator[tuple[Clients, Entry]]:
        """Yield the states of clients that are on a node, or the later ones, by pieces of one layout."""
        held = self._states[node]
        for piece in held.ask("pieces", clients, later):
            yield piece, held.ask("take", piece, later)

    def arrive(self, node: int, clients: Clients) -> None:
        """Have the later states of clients on a node replace the others there."""
        self._states[node].ask("arrive", clients)


class _Sent:
    """What was put where all nodes can have it, once each."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._put: dict[int, tuple[Tree, Answer]] = {}

    def once(self, value: Tree) -> Answer:
        """Return a reference to a value."""
        if id(value) not in self._put:
            self._put[id(value)] = value, self._ray.put(value)  # holding it, for its id
        return self._put[id(value)][1]


def nodes_of(ray: Any) -> list[Node]:
    """Return the nodes that are there."""
    return [
        Node(node["NodeID"], node["NodeManagerAddress"], int(node["Resources"].get("CPU", 0)))
        for node in ray.nodes()
        if node["Alive"]
    ]


def on_node(ray: Any, kind: Any, node: Node, cores: int) -> Any:
    """Return a task or an actor as one of a node."""
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node.id, soft=False)
    return kind.options(num_cpus=cores, scheduling_strategy=affinity)


def first_answer(ray: Any, answer: Answer, node: Node) -> Any:
    """Return what a node answers before any work is done."""
    try:
        return ray.get(answer, timeout=_PATIENCE)
    except ray.exceptions.GetTimeoutError as error:
        raise BadInput(
            f"--engine ray: node {node.address} started no worker in {_PATIENCE:.0f} s; are its cores taken by others?"
        ) from error
    except ray.exceptions.RayError as error:
        raise BadInput(
            f"--engine ray: node {node.address} cannot work ({in_short(error)}); has it just died? "
            "Then wait until ray status no longer lists it"
        ) from error
