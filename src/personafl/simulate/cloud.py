"""The cloud executor: any algorithm over several servers, each with devices of its own.

A round is one aggregation of the coordinator. Each server that has part in it sent its model z_n to its active devices
when its round began, and now has their uploads. With the round's doubly stochastic matrix A:

    w_n = Σ_m A_nm z_m          every tensor of the server's state, but the fields that are its own
    z_n ← update(w_n, uploads of n's devices)

- sync: there is one state, and one update takes the uploads of all servers. With a robust rule each server has what
  its own rule keeps beside it, and the update takes what their rules made of their uploads.
- async, rigorous: A is the mean over the servers that are mixed. Who is isolated has w_n = z_n.
- gossip: every server has part, and A is the recipe's.

A rule with `again(state)` may mix and step several times (K_z) on the same uploads.

Devices are trained when their uploads are used. That gives what training at the start of the round would: neither their
states nor their server's change in between. So nothing that is pending has to be saved, and a resumed run only plays
the clock again. What servers have not delivered when the last round ends is lost.
"""

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from personafl.cloud.clock import Aggregation, Delay, Turn
from personafl.cloud.topology import Topology, place
from personafl.core import tree, wire
from personafl.core.algorithm import Algorithm, Reduced, fields_of_its_own
from personafl.core.batches import Steps
from personafl.core.tree import Tree
from personafl.data.federated import FederatedData
from personafl.errors import BadInput
from personafl.recipe.cloud import CloudSection
from personafl.simulate.buffered import BufferedSimulation
from personafl.simulate.engine import local_steps
from personafl.simulate.federation import Cloud, Federation
from personafl.simulate.serverside import ServerSide
from personafl.simulate.simulator import Round, Simulation, Trained
from personafl.storage.store import Store
from personafl.uploads.robust import RobustServer, model_of, with_model

Weights = NDArray[np.float64]
Moves = Mapping[tuple[int, int], Sequence[int]]  # (server, round of it) -> clients of others that it has from then on


def make_cloud(section: CloudSection, data: FederatedData, algorithm: Algorithm, work: Steps, seed: int) -> Cloud:
    """Return the cloud that a recipe describes; `work` is what a device does in a round."""
    check_iterations(section, algorithm)
    section.read_traces()
    topology = place(data, section.servers, section.members, section.active, seed)
    steps, delays = local_steps(work, seed), _delays(section, data, topology)
    return Cloud(section=section, topology=topology, steps=steps, seed=seed, delays=delays)


def _delays(section: CloudSection, data: FederatedData, topology: Topology) -> tuple[Delay, ...]:
    """Return the laws that some devices have."""
    found = []
    for index, own in enumerate(section.delays):
        named = [data.client_number(name, f"cloud.delays[{index}]: there is") for name in own.devices]
        whose = np.concatenate([np.array(named, dtype=np.int64), *(topology.devices[server] for server in own.servers)])
        found.append(Delay(devices=whose, arrival=own.arrival, step=own.step))
    return tuple(found)


def check_iterations(section: CloudSection, algorithm: Algorithm) -> None:
    """Fail if servers are to step several times under a method that does not say how."""
    if section.iterations > 1 and algorithm.server.again is None:
        raise BadInput(
            f"cloud.iterations: {algorithm.name}'s server cannot step again without uploads; remove it "
            f"(given: {section.iterations})"
        )


def make_simulation(federation: Federation, store: Store, server_bytes: bytes | None = None) -> Simulation:
    """Return the simulation of a federation, on a cloud or with a buffer where it has one."""
    if federation.buffer is not None:
        return BufferedSimulation(federation, store, server_bytes)
    kind = Simulation if federation.cloud is None else CloudSimulation
    return kind(federation, store, server_bytes)


class CloudSimulation(Simulation):
    """A federation with several servers in progress, each with its own clients; with one state, if they share it.

    `events` is what happens, if it is not to be played by the cloud's clock: a journal.
    """

    def __init__(
        self,
        federation: Federation,
        store: Store,
        server_bytes: bytes | None = None,
        events: Iterable[Aggregation] | None = None,
    ) -> None:
        assert federation.cloud is not None
        self._cloud, self._section = federation.cloud, federation.cloud.section
        self._events = iter(self._cloud.aggregations() if events is None else events)
        self.moves: Moves = {}
        super().__init__(federation, store, server_bytes)
        if not self._section.shared:
            self.homes = self._cloud.topology.home.copy()

    def _begin(self) -> tuple[ServerSide, ...]:
        fed = self.federation
        if self._section.shared:  # each by itself, if it keeps something of its own beside the model
            count = self._section.servers if isinstance(fed.algorithm.server, RobustServer) else 1
            return tuple(fed.serving() for _ in range(count))
        return tuple(fed.serving(fed.roster.of(own)) for own in self._cloud.topology.devices)

    @property
    def server(self) -> tuple[Tree, ...]:
        """The states of the servers; one, if all of it is shared."""
        return tuple(server.state for server in self.servers)

    def _restore(self, server_bytes: bytes) -> None:
        for server, state in zip(self.servers, self.servers[0].decoded(server_bytes, self.server), strict=True):
            server.state = state

    def broadcast(self, server: int | None = None) -> Tree:
        """Return what a newcomer to a server is sent now, in compact forms; None: by the mean of all servers."""
        count = len(self.servers)
        if server is not None or self._section.shared:
            return self.servers[server or 0].broadcast()
        return self.servers[0].rule.broadcast(mixed(self.server, np.full(count, 1 / count), 0))

    def step(self, number: int) -> Round:
        """Run one aggregation, and what isolated servers did before it."""
        event = next(event for event in self._events if event.number == number)
        done = [self._alone(turn) for turn in event.isolated]
        ranks = wire.ranks(self.broadcast(self._state_of(event.members[0])))
        done += self._together(event)
        return Round(
            number=number,
            loss=_loss(done),
            clients=sum(len(turn.devices) for turn in (*event.isolated, *event.members)),
            bytes_down=sum(part.bytes_down for part in done),
            bytes_up=sum(part.bytes_up for part in done),
            ranks=ranks,
            time=event.time,
            journal=asdict(event),
        )

    def _alone(self, turn: Turn) -> Trained:
        """Do the round of a server that is mixed with nobody."""
        done = self._turns([turn])
        self._update([turn.server], [_joined([done])], np.ones((1, 1)), turn.round)
        return done

    def _together(self, event: Aggregation) -> list[Trained]:
        """Do the rounds of the servers that are mixed."""
        if len(self.servers) == 1:
            done = [self._turns(event.members)]
            self._update([0], [_joined(done)], np.ones((1, 1)), event.number)
        elif self._section.shared:
            done = [self._turns([turn]) for turn in event.members]
            self._share(event, [_joined([part]) for part in done])
        else:
            done = [self._turns([turn]) for turn in event.members]
            servers = [turn.server for turn in event.members]
            self._update(servers, [_joined([part]) for part in done], self._cloud.mixing(event), event.number)
        return done

    def _turns(self, turns: Sequence[Turn]) -> Trained:
        """Train the active devices of servers with one state in one round, and those that train without contact."""
        number, devices = turns[0].round, self._cloud.topology.devices
        for turn in turns:
            for client in self.moves.get((turn.server, turn.round), ()):
                self._move(client, turn.server)
            if not self._section.shared:  # who has part in a server's round belongs to it, also who came without a word
                self.homes[list(turn.devices)] = turn.server
        active = [np.array(turn.devices, dtype=np.int64) for turn in turns]
        server = self.servers[self._state_of(turns[0])]
        done = self._train(server, np.concatenate(active), server.broadcast(), number)
        self._look(done, number)
        offline = [self._offline(devices[turn.server], own, number) for turn, own in zip(turns, active, strict=True)]
        self._train_offline(np.concatenate(offline), number)
        return done

    def _move(self, client: int, server: int) -> None:
        """Let a client of another server belong to one."""
        if not self._section.shared:
            self.homes[client] = server
        side, rule, which = self.servers[server], self.learners.rule, int(self.learners.problem_of[client])
        if self._section.shared or side.rule.admit is None:
            return
        clients, upload = np.array([client]), None
        if rule.introduce is not None and self.store.has(clients)[0]:
            state = tree.take(self.states(which, self.down(server), clients), 0)
            upload = rule.introduce(self.learners.problems[which], state)
        weight = float(side.roster.weights_of(clients)[0])
        side.state = side.checked(side.rule.admit(side.state, weight, upload), 0)

    def _state_of(self, turn: Turn) -> int:
        return 0 if self._section.shared else turn.server

    def _share(self, event: Aggregation, uploads: Sequence[Reduced]) -> None:
        """Let each server's rule take its uploads, and the model that they share what the rules made of those."""
        made = []
        for turn, own in zip(event.members, uploads, strict=True):
            side = self.servers[turn.server]
            side.state, handed = side.handed(own, event.number)
            made.append(handed)
        first, *others = self.servers
        first.state = first.given(functools.reduce(Reduced.plus, made), event.number)
        for side in others:
            side.state = with_model(side.state, model_of(first.state))

    def _update(self, servers: Sequence[int], uploads: Sequence[Reduced], mixing: Weights, number: int) -> None:
        """Mix the states of servers and let each take its uploads; K_z times, from the second on without uploads."""
        sides = [self.servers[server] for server in servers]
        states = stepped(sides[0], [side.state for side in sides], uploads, mixing, number, self._section.iterations)
        for side, state in zip(sides, states, strict=True):
            side.state = state


def stepped(
    side: ServerSide, states: Sequence[Tree], uploads: Sequence[Reduced], mixing: Weights, number: int, iterations: int
) -> Sequence[Tree]:
    """Mix states and let each take its uploads; several times, from the second on without uploads.

    `side` is any server of the method: it has the rule.
    """
    for iteration in range(iterations):
        states = [mixed(states, row, place) for place, row in enumerate(mixing)]
        if iteration == 0:
            states = [side.updated(state, own, number) for state, own in zip(states, uploads, strict=True)]
        elif side.rule.again is not None:
            states = [side.checked(side.rule.again(state), number) for state in states]
    return states


def _joined(parts: Iterable[Trained]) -> Reduced:
    uploads = [part.uploads for part in parts if part.uploads is not None]
    return functools.reduce(Reduced.plus, uploads)


def _loss(parts: Iterable[Trained]) -> float:
    """Return the mean loss over the clients of several servers."""
    uploads: list[Any] = [part.uploads for part in parts if part.uploads is not None]
    total = functools.reduce(operator.add, (own.total.loss for own in uploads))
    weight = functools.reduce(operator.add, (own.weight for own in uploads))
    return float((total / weight).to(uploads[0].dtypes.loss))


def mixed(states: Sequence[Tree], weights: Weights, place: int) -> Tree:
    """Return Σ_m weights[m] · states[m], but of states[place] the fields that are its own and what is not real numbers.

    Compact forms become dense, for the sum has another form. Sums are in float64.
    """
    if len(states) == 1:
        return states[0]
    factors = torch.from_numpy(weights)

    def mean(*leaves: Tensor) -> Tensor:
        own = leaves[place]
        if not own.is_floating_point():
            return own
        total = torch.tensordot(factors.to(own.device), torch.stack(leaves).to(torch.float64), dims=1)
        return torch.as_tensor(total, dtype=own.dtype)

    dense = [wire.dense(state) for state in states]
    return with_own(tree.map(mean, dense[0], *dense[1:]), dense[place])


def without_own(state: Tree) -> Tree:
    """Return what of a server's state is mixed, dense; its own fields, also those of states inside it, are empty."""
    if wire.is_form(state) or not pytree.is_namedtuple_instance(state):
        return wire.dense(state)
    kept = fields_of_its_own(type(state))
    return type(state)(*(() if name in kept else without_own(part) for name, part in state._asdict().items()))


def with_own(mean: Tree, own: Tree) -> Tree:
    """Return a mixed state with the server's own fields put back, also those of states inside it."""
    if not pytree.is_namedtuple_instance(own):
        return mean
    kept = fields_of_its_own(type(own))
    pairs = zip(own._fields, mean, own, strict=True)
    return type(own)(*(part if name in kept else with_own(mixture, part) for name, mixture, part in pairs))
