"""The buffered executor: one server that steps whenever it has enough uploads, however late some of them are.

J. Nguyen et al., *Federated Learning with Buffered Asynchronous Aggregation* (FedBuff), AISTATS 2022. A round is one
step of the server. With the K uploads in its buffer, of weights p_i (federation.weights), each s_i versions late:

    Δ = Σ_i p_i · Δ_i/√(1 + s_i) / Σ_i p_i,      w ← the method's step along Δ

The discount is not normalised away: a late change moves the model less, also if it is alone in the buffer. In the paper
p_i = 1, and a client that arrives is replaced at once; here at the next version (see `buffer`), so that
K = concurrency = all clients is the synchronous method, to the bit. K = 1 is fully asynchronous.

That is sound where an upload is a change of the model that was received, and the server keeps nothing that has to agree
with what clients keep: where it averages. Others are refused.

Clients are trained when they start, with all who start from that version, and the results wait until they arrive. A
client's new state is kept when it arrives, also if its upload is dropped: until then it is scored with the one before.
What is under way when the last round ends is lost.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from personafl.cloud.clock import DeviceTimes
from personafl.core import tree, wire
from personafl.core.algorithm import Algorithm, Empty, Reduced, reduce
from personafl.core.batches import Steps
from personafl.core.tree import Tree
from personafl.data.federated import Clients, FederatedData
from personafl.errors import BadInput
from personafl.fast.table import enabled
from personafl.recipe.cloud import BufferSection, check_size
from personafl.simulate.buffer import Arrival, Buffer, Update
from personafl.simulate.engine import local_steps
from personafl.simulate.federation import Federation
from personafl.simulate.simulator import Round, Simulation
from personafl.simulate.workers.nodestore import NodeStore
from personafl.storage.store import Store


def make_buffer(section: BufferSection, data: FederatedData, algorithm: Algorithm, work: Steps, seed: int) -> Buffer:
    """Return the buffer that a recipe describes; `work` is what a client does in a round."""
    if not algorithm.server.averages:
        raise BadInput(
            f"buffer: {algorithm.name}'s server does not only average changes of what it sent, so late and dropped "
            "uploads would spoil its state; remove [buffer], or choose a method such as fedavg, fedadam, ditto, fedalt"
        )
    clients = len(data.seen)
    concurrency = clients if section.concurrency is None else section.concurrency
    if concurrency > clients:
        raise BadInput(
            f"buffer.concurrency: {concurrency} clients at a time, but only {clients} take part in training; "
            "lower it, or remove it to have all"
        )
    check_size(section.size, concurrency)
    section.read_traces()
    return Buffer(
        size=section.size,
        concurrency=concurrency,
        max_staleness=section.max_staleness,
        discount=section.discount,
        clients=data.seen,
        devices=DeviceTimes(arrival=section.arrival, step=section.step, steps=local_steps(work, seed), seed=seed),
    )


class Finished(NamedTuple):
    """What clients that train will have when they arrive, stacked: new states, uploads, and the bytes of those."""

    states: Tree  # empty: they wait where the clients were trained
    uploads: Tree  # restored from compact forms
    bytes: Tensor


class Saved(NamedTuple):
    """What a checkpoint keeps: the server's state, and what is under way, stacked per problem."""

    server: Tree
    waiting: dict[str, Tensor]  # PROBLEM/clients, and PROBLEM/PATH for the paths of `Finished`


class BufferedSimulation(Simulation):
    """A federation in progress whose server does not wait for everyone."""

    _new = "later"

    def __init__(self, federation: Federation, store: Store, server_bytes: bytes | None = None) -> None:
        assert federation.buffer is not None
        self._buffer = federation.buffer
        self._events = self._buffer.updates()
        self._waiting: dict[int, dict[str, Tensor]] = {}  # client -> what it will have, `Finished` flattened
        self._upload: Tree = Empty()  # any, for its structure
        super().__init__(federation, store, server_bytes)

    def step(self, number: int) -> Round:
        """Let clients start, and step the server when the buffer is full."""
        event = next(event for event in self._events if event.number == number)
        message = self.broadcast()
        bytes_down = self._start(np.array(event.started, dtype=np.int64), message, number)
        bytes_up, uploads, loss = self._receive(event)
        (server,) = self.servers
        server.state = server.updated(server.state, uploads, number)
        staleness = [arrival.staleness for arrival in event.taken]
        return Round(
            number=number,
            loss=float(loss.mean()),
            clients=len(event.taken),
            bytes_down=bytes_down,
            bytes_up=bytes_up,
            ranks=wire.ranks(message),
            time=event.time,
            staleness=sum(staleness) / len(staleness),
            most_stale=max(staleness),
            dropped=len(event.dropped),
            told=server.rule.told(server.state) or None,
        )

    def _start(self, starting: Clients, message: Tree, number: int) -> int:
        """Train clients that start now, for when they arrive; return the bytes they were sent."""
        for clients, done in self.results(starting, message, number):
            self._check_trained(number, clients, done.finite)
            size = torch.full((len(clients),), done.size, device=self._device)
            states, dense = done.states, wire.dense_each(done.uploads)
            self._wait(clients, tree.flatten(Finished(states, dense, size)))
            self._upload = tree.take(dense, 0)
        return self._bytes_down(starting, message)

    def _wait(self, clients: Iterable[int], stacked: dict[str, Tensor]) -> None:
        for row, client in enumerate(clients):
            # Laid out as a checkpoint restores them: kernels may round other layouts differently.
            entry = {path: leaf[row].clone(memory_format=torch.contiguous_format) for path, leaf in stacked.items()}
            self._waiting[int(client)] = entry

    def _receive(self, event: Update) -> tuple[int, Reduced, Reduced]:
        """Keep the states of who arrived; return the bytes they sent, the discounted uploads, and the losses."""
        dropped = np.array(sorted(arrival.client for arrival in event.dropped), dtype=np.int64)
        bytes_up = sum(self._arrive(clients)[0] for _, _, clients in self.groups(dropped))
        joined: tuple[Reduced, Reduced] | None = None
        arrivals = {arrival.client: arrival for arrival in event.taken}
        arrived = np.array(sorted(arrivals), dtype=np.int64)
        # Chunks as the plain simulator has them, and so its order of sums.
        for _, _, clients in self.groups(arrived, self._steps(arrived, event.number)):
            size, uploads = self._arrive(clients)
            bytes_up += size
            late = [arrivals[client] for client in clients.tolist()]
            if self.servers[0].rule.needs_each:
                joined = self._beside(joined, uploads, clients, late)
                continue
            part = self._reduced(uploads, clients, late)
            joined = part if joined is None else (joined[0].plus(part[0]), joined[1].plus(part[1]))
        assert joined is not None  # a buffer has at least one upload
        return bytes_up, *joined

    def _arrive(self, clients: Clients) -> tuple[int, Tree]:
        """Keep the states of clients that arrive; return the bytes they sent, and their uploads, stacked."""
        entries = [self._waiting.pop(int(client)) for client in clients]
        self._keep_arrived(clients, entries)
        like = Finished((), self._upload, torch.empty(0))
        finished = tree.unflatten(like, _stacked(entries, tree.flatten(like)))
        return int(finished.bytes.sum()), finished.uploads

    def _keep_arrived(self, clients: Clients, entries: list[dict[str, Tensor]]) -> None:
        """Keep states of clients that arrive: those that wait here, and those that wait where they were trained."""
        away = self._away(clients)
        if isinstance(self.store, NodeStore):
            self.store.arrive(clients[away])
        here = [entry for entry, elsewhere in zip(entries, away, strict=True) if not elsewhere]
        if here:
            self._keep(clients[~away], _below("states", _stacked(here, here[0])))

    def _away(self, clients: Clients) -> NDArray[np.bool_]:
        """Say which clients under way have their new states elsewhere."""
        store = self.store
        return store.has_later(clients) if isinstance(store, NodeStore) else np.zeros(len(clients), dtype=np.bool_)

    def _recall(self, clients: Clients) -> None:
        """Have the new states of clients under way here, as a checkpoint needs them."""
        if isinstance(self.store, NodeStore):
            for piece, stacked in self.store.recall(clients[self._away(clients)]):
                for row, client in enumerate(piece.tolist()):
                    self._waiting[client] |= {f"states/{path}": leaf[row].clone() for path, leaf in stacked.items()}

    @enabled()
    def _reduced(self, uploads: Tree, clients: Clients, arrivals: list[Arrival]) -> tuple[Reduced, Reduced]:
        """Return Σ p_i·up_i/√(1 + s_i) with the weight Σ p_i; and the losses, which are not discounted."""
        weights = self.servers[0].weighing(clients)
        factors = torch.tensor([self._buffer.factor(arrival.staleness) for arrival in arrivals], dtype=torch.float64)
        losses = reduce(uploads.loss, weights)
        return reduce(uploads, weights * factors.to(self._device))._replace(weight=losses.weight), losses

    def _beside(
        self, joined: tuple[Reduced, Reduced] | None, uploads: Any, clients: Clients, arrivals: list[Arrival]
    ) -> tuple[Reduced, Reduced]:
        """Put uploads up_i/√(1 + s_i) beside the others, for a rule that needs each, and add up the losses."""
        factors = torch.tensor([self._buffer.factor(arrival.staleness) for arrival in arrivals], device=self._device)

        def discounted(leaf: Tensor) -> Tensor:
            return (
                leaf * factors.to(leaf.dtype).reshape(-1, *[1] * (leaf.ndim - 1)) if leaf.is_floating_point() else leaf
            )

        late = tree.map(discounted, uploads)._replace(loss=uploads.loss)
        every, losses = (None, None) if joined is None else joined
        own = reduce(uploads.loss, self.servers[0].weighing(clients))
        return self.servers[0].join(every, late, clients), own if losses is None else losses.plus(own)

    def saved(self) -> Saved:
        """Return the server's state and what is under way."""
        waiting: dict[str, Tensor] = {}
        everyone = np.array(sorted(self._waiting), dtype=np.int64)
        self._recall(everyone)
        for which in np.unique(self.federation.problem_of[everyone]).tolist():
            clients = everyone[self.federation.problem_of[everyone] == which]
            entries = [self._waiting[int(client)] for client in clients]
            stacked = _stacked(entries, entries[0])
            waiting |= {f"{which}/{path}": leaf for path, leaf in stacked.items()}
            waiting[f"{which}/clients"] = torch.from_numpy(clients)
        return Saved(self.server, waiting)

    def _restore(self, server_bytes: bytes) -> None:
        like = Saved(self.server, _below("waiting", wire.decode_named(server_bytes)))
        (server,) = self.servers
        server.state, waiting = server.decoded(server_bytes, like)
        for which in {name.partition("/")[0] for name in waiting}:
            stacked = _below(which, waiting)
            self._wait(stacked.pop("clients").tolist(), stacked)


def _below(prefix: str, named: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(f"{prefix}/"): leaf for name, leaf in named.items() if name.startswith(f"{prefix}/")}


def _stacked(entries: list[dict[str, Tensor]], paths: Iterable[str]) -> dict[str, Tensor]:
    return {path: torch.stack([entry[path] for entry in entries]) for path in paths}
