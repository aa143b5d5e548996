"""Who waits for whom: the coordinator of several servers as a state machine, without clock, tensors or transport.

R. Wu et al., *Federated Block Coordinate Descent Scheme for Learning Global and Personalized Models*, §3.1 and Appendix
A. A server announces that its devices are done with its round; the coordinator answers, at once or later.

    Ready, Gone, Back, Dropped ──▶ Coordinator ──▶ Mix, Isolate, Start

- All servers (`first` = `servers`): sync and gossip. Round t is mixed when everyone is there.
- The first B: async. Round t is mixed when B servers are there, whatever round they began in; the others stay as they
  are and keep what they have done so far.
- `rigorous`: only servers at the coordinator's round are counted. One that comes too late for its round is isolated: it
  updates from its own model alone and goes on to its next round, so that every server does every round.

A server that is gone is not waited for, unless it announced its round before: the first min(B, live) are enough. Once
back, it goes on with its round. One that is dropped never is: what it announced and was not mixed is forgotten.

A round's number is the coordinator's when the server began it; a server never begins two with one number.
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Ready:
    """In: a server has what it waited for in a round of its own."""

    server: int
    round: int


@dataclass(frozen=True)
class Gone:
    """In: a server has given no sign of life for too long."""

    server: int


@dataclass(frozen=True)
class Back:
    """In: a server that was gone is there again."""

    server: int


@dataclass(frozen=True)
class Dropped:
    """In: a server is out for good."""

    server: int


@dataclass(frozen=True)
class Mix:
    """Out: the models of these servers are mixed, and each of them takes its uploads; their numbers ascend."""

    members: tuple[int, ...]
    round: int


@dataclass(frozen=True)
class Isolate:
    """Out: a server takes its uploads from its own model alone, because its round was mixed without it."""

    server: int
    round: int


@dataclass(frozen=True)
class Start:
    """Out: a server begins a round: it sends its model to the devices that ask for it."""

    server: int
    round: int


News = Ready | Gone | Back | Dropped
Event = Mix | Isolate | Start


class Coordinator:
    """Decides, from what servers announce, who mixes with whom and when they go on."""

    def __init__(self, servers: int, first: int, *, rigorous: bool = False) -> None:
        if not 1 <= first <= servers:
            raise ValueError(f"the first {first} of {servers} servers")
        self._first, self._rigorous = first, rigorous
        self._round = 0  # how many were mixed
        self._at = dict.fromkeys(range(servers), 0)  # server -> the round that it is in
        self._waiting: set[int] = set()
        self._gone: set[int] = set()

    def start(self) -> tuple[Start, ...]:
        """Begin: everyone starts round 0."""
        return tuple(Start(server, 0) for server in self._at)

    def at(self, server: int) -> int:
        """Return the round that a server is in; -1: it is out."""
        return self._at.get(server, -1)

    def receive(self, event: News) -> tuple[Event, ...]:
        """Return what follows from what is heard of a server, in the order in which it is to be done."""
        if isinstance(event, Dropped):
            self._gone.discard(event.server)
            self._waiting.discard(event.server)
            del self._at[event.server]
            return tuple(self._mixed())
        if isinstance(event, Gone):
            self._gone.add(event.server)
            return tuple(self._mixed())
        self._gone.discard(event.server)
        if isinstance(event, Back):
            return ()
        if self._at.get(event.server) != event.round or event.server in self._waiting:
            raise ValueError(f"server {event.server} is not in round {event.round}, or announced it before")
        return tuple(self._answer(event.server))

    def _answer(self, server: int) -> Iterator[Event]:
        if self._rigorous and self._at[server] < self._round:
            yield Isolate(server, self._at[server])
            yield self._started(server, self._at[server] + 1)
            return
        self._waiting.add(server)
        yield from self._mixed()

    def _mixed(self) -> Iterator[Event]:
        """Mix those who wait, if they are enough."""
        live = len(self._at) - len(self._gone - self._waiting)
        if not self._waiting or len(self._waiting) < min(self._first, live):
            return
        members = tuple(sorted(self._waiting))
        yield Mix(members, self._round)
        self._round += 1
        self._waiting.clear()
        for member in members:
            yield self._started(member, self._round)

    def _started(self, server: int, number: int) -> Start:
        self._at[server] = number
        return Start(server, number)
