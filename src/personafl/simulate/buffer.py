"""A buffer, one server that does not wait for everyone: who starts and arrives when.

`concurrency` clients start from version 0 of the model. Each takes arrival_i + K_i · step_i, as on a cloud. When the
server has `size` uploads it makes the next version of them, and from that as many clients start as have arrived: no
client trains twice at once, and who starts is drawn from those who do not train. Versions are the rounds of a run.

An upload's staleness is the number of versions made since its client started. It cannot change while the upload waits
in the buffer, so one that is too stale is dropped when it arrives, and takes no place in the buffer. The clients that
started last are not stale, and are at least `size`: the buffer always fills.

All draws are hashes of (seed, purpose, version or number of the start, client), so that events are the same for every
method under one seed, and are played again from the beginning when a run is resumed.
"""

import bisect
import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from personafl.cloud.clock import DeviceTimes
from personafl.core import rng
from personafl.data.federated import Clients


@dataclass(frozen=True)
class Arrival:
    """An upload that the server received, and how many versions were made since its client started."""

    client: int
    staleness: int


@dataclass(frozen=True)
class Update:
    """How a version of the model became the next: who started from it, and what the server took and dropped."""

    number: int  # of the version before
    time: float
    started: tuple[int, ...]  # in ascending order
    taken: tuple[Arrival, ...]  # in order of time
    dropped: tuple[Arrival, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """What a recipe says about a buffer, for the clients at hand."""

    size: int
    concurrency: int
    max_staleness: int | None
    discount: Literal["polynomial", "none"]
    clients: Clients  # who may take part, in ascending order
    devices: DeviceTimes

    def factor(self, staleness: int) -> float:
        """Return how much a late change counts."""
        return 1.0 if self.discount == "none" else float(1 / np.sqrt(1.0 + staleness))

    def updates(self) -> Iterator[Update]:
        """Play what happens, from the beginning and without end, in virtual time; at one time who started first."""
        idle: list[int] = self.clients.tolist()
        training: list[tuple[float, int, int, int]] = []  # (when it ends, number of the start, client, version)
        now, starts, free = 0.0, 0, self.concurrency
        for version in itertools.count():
            started = self._draw(idle, starts, free)
            ends = now + self.devices.times(np.array(started, dtype=np.int64), version)
            for number, (client, end) in enumerate(zip(started, ends.tolist(), strict=True), starts):
                heapq.heappush(training, (end, number, client, version))
            starts += free
            taken: list[Arrival] = []
            dropped: list[Arrival] = []
            while len(taken) < self.size:
                now, _, client, origin = heapq.heappop(training)
                bisect.insort(idle, client)
                late = self.max_staleness is not None and version - origin > self.max_staleness
                (dropped if late else taken).append(Arrival(client, version - origin))
            free = len(taken) + len(dropped)
            yield Update(version, now, tuple(sorted(started)), tuple(taken), tuple(dropped))

    def _draw(self, idle: list[int], first: int, count: int) -> list[int]:
        """Take clients that start out of those that do not train."""
        shares = rng.uniforms(self.devices.seed, "buffer", first + np.arange(count))
        return [idle.pop(int(share * len(idle))) for share in shares.tolist()]
