"""Virtual time: what the servers of a cloud do and when, as discrete events. Nothing waits.

At the beginning of a server's round every one of its devices draws the time until it asks to take part. The earliest
|Q_n| are active; each takes K_i local steps, all of one drawn length; the server is ready when the last of them is:

    τ_n = max over the active devices i of  arrival_i + K_i · step_i

(R. Wu et al., *Federated Block Coordinate Descent Scheme for Learning Global and Personalized Models*, footnote 2).
Aggregation takes no time. All draws are hashes of (seed, purpose, round, device), so that events are the same for
every method under one seed, and are played again from the beginning when a run is resumed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from personafl.cloud.protocol import Coordinator, Isolate, Mix, Ready, Start
from personafl.cloud.topology import Topology
from personafl.core import rng
from personafl.data.federated import Clients
from personafl.latency.laws import Law


@dataclass(frozen=True)
class Turn:
    """A server's round: when it was ready, and which devices were active in it, in ascending order."""

    server: int
    round: int
    time: float
    devices: tuple[int, ...]


@dataclass(frozen=True)
class Aggregation:
    """What the coordinator did: whose models it mixed, and who updated alone since the last one, in order of time."""

    number: int
    time: float
    members: tuple[Turn, ...]
    isolated: tuple[Turn, ...] = ()


Phase = Callable[[int, int], tuple[Clients, float]]  # (server, round) -> its active devices, and how long they take


def play(coordinator: Coordinator, phase: Phase) -> Iterator[Aggregation]:
    """Yield the aggregations in the order of time, without end; servers that are ready at once go by their number."""
    queue: list[tuple[float, int, Turn]] = []

    def begin(start: Start, now: float) -> None:
        devices, seconds = phase(start.server, start.round)
        turn = Turn(start.server, start.round, now + seconds, tuple(devices.tolist()))
        heapq.heappush(queue, (turn.time, turn.server, turn))

    for start in coordinator.start():
        begin(start, 0.0)
    waiting: dict[int, Turn] = {}  # server -> what it has done
    isolated: list[Turn] = []
    while True:
        now, server, turn = heapq.heappop(queue)
        waiting[server] = turn
        for event in coordinator.receive(Ready(server, turn.round)):
            match event:
                case Start():
                    begin(event, now)
                case Isolate():
                    isolated.append(waiting.pop(event.server))
                case Mix():
                    members = tuple(waiting.pop(member) for member in event.members)
                    yield Aggregation(event.round, now, members, tuple(isolated))
                    isolated.clear()


@dataclass(frozen=True, kw_only=True)
class Delay:
    """Laws of some devices; None: as the others'."""

    devices: Clients
    arrival: Law | None
    step: Law | None


@dataclass(frozen=True, kw_only=True)
class DeviceTimes:
    """How long devices take, drawn for each device and round: arrival_i + K_i · step_i."""

    arrival: Law
    step: Law
    steps: Callable[[Clients, int], NDArray[np.int64]]  # (devices, round) -> K_i
    seed: int
    own: tuple[Delay, ...] = ()  # of devices that take longer or shorter; the last that has a device counts

    def times(self, devices: Clients, number: int) -> NDArray[np.float64]:
        """Return how long each device takes in a round."""
        return self.arrivals(devices, number) + self.steps(devices, number) * self._drawn("step", devices, number)

    def arrivals(self, devices: Clients, number: int) -> NDArray[np.float64]:
        """Return how long each device takes in a round until it asks to take part."""
        return self._drawn("arrival", devices, number)

    def _drawn(self, what: str, devices: Clients, number: int) -> NDArray[np.float64]:
        share = rng.uniforms(self.seed, what, number, devices)
        times: NDArray[np.float64] = getattr(self, what).quantile(share)
        for own in self.own:
            law, whose = getattr(own, what), np.isin(devices, own.devices)
            times = times if law is None else np.where(whose, law.quantile(share), times)
        return times


@dataclass(frozen=True, kw_only=True)
class Phases(DeviceTimes):
    """The rounds of servers, drawn: which devices are active, and how long the last of them takes."""

    topology: Topology
    active: int | None  # devices per round; None: all

    def __call__(self, server: int, number: int) -> tuple[Clients, float]:
        """Return the active devices of a server's round, and its length."""
        devices = self.topology.devices[server]
        share = rng.uniforms(self.seed, "arrival", number, devices)
        # Of one law earlier arrivals have smaller shares, and where arrivals are equal it is a fair draw.
        order = np.lexsort((share, self.arrivals(devices, number))) if self.own else np.argsort(share, kind="stable")
        devices = devices[np.sort(order[: self.active])]
        return devices, float(self.times(devices, number).max())
