"""The server: answers devices, and keeps the clock of the rounds.

Devices pull. A device that asks for work and finds none is kept waiting for up to a heartbeat, so that a round begins
without delay.
"""

import asyncio
import itertools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from personafl.deploy.net import messages
from personafl.deploy.net.identity import Identity
from personafl.deploy.net.messages import Code, Message, Part, Refused, Said
from personafl.deploy.server.history import Closed
from personafl.deploy.server.rounds import Rounds
from personafl.deploy.server.service import LOST, PATIENCE, Bell, Event, Listener, Service, ServiceConfig

_ROOM, _AT_ONCE = 2**26, 4  # bytes of updates that are not on disk yet, and how many have room at their largest


@dataclass(frozen=True, kw_only=True)
class ServerConfig(ServiceConfig):
    """What a server is started with."""

    stay: bool = False  # also when all devices have their final model: for newcomers


async def run_server(config: ServerConfig, listener: Listener) -> Rounds:
    """Serve a recipe to its end, from wherever its directory says it is."""
    with ThreadPoolExecutor(1, "rounds") as worker:
        rounds = await asyncio.get_running_loop().run_in_executor(worker, Rounds, config.recipe, config.out)
        with rounds:
            await Server(config, rounds, worker, listener).run()
        return rounds


class Server(Service):
    """A run that is being served."""

    def __init__(self, config: ServerConfig, rounds: Rounds, worker: ThreadPoolExecutor, listener: Listener) -> None:
        super().__init__(config, rounds.journal, worker, listener)
        self._config, self._rounds = config, rounds
        self._started: float | None = None  # when the first device was given the open round
        self._offered = Bell()  # for idle devices alone: every other change would wake all of them for nothing

    async def run(self) -> None:
        """Answer devices and go through the rounds."""
        rounds = self._rounds
        largest = max(rounds.payload_bytes, rounds.sums_bytes)
        async with self._serving(max(_ROOM, _AT_ONCE * largest)) as port:
            self._tell(Event("listening", f"port {port}, {rounds.done} of {rounds.recipe.rounds} rounds done"))
            await self._train()
            self._tell(Event("finished", f"{rounds.done} rounds"))
            await self._part()

    async def _train(self) -> None:
        rounds = self._rounds
        if not rounds.begun:
            least = rounds.section.devices
            await self._until(lambda: len(rounds.members) >= least and self._present() >= least)
            await self._begin()
            self._offered.ring()
        while not rounds.finished:
            if rounds.open is None:
                await self._work(rounds.open_next)
            self._started = None
            self._offered.ring()
            await self._collect()
            self._tell(Event("closed", "", await self._close()))
        await self._work(rounds.final)
        self._offered.ring()

    async def _begin(self) -> None:
        await self._work(self._rounds.begin)

    async def _close(self) -> Closed:
        return await self._work(self._rounds.close)

    async def _collect(self) -> None:
        """Wait until the open round can close."""
        rounds, deadline = self._rounds, self._rounds.section.deadline
        for waited in itertools.count(1):
            await self._until(lambda: rounds.complete or self._overdue(deadline))
            if rounds.complete or rounds.enough or (waited >= rounds.section.patience and rounds.any_taken):
                return
            added = await self._work(lambda: rounds.widen(self._alive(self._lost)))
            self._tell(Event("extended", f"too few updates at the deadline; {len(added)} more devices selected"))
            self._started = time.monotonic()
            self._offered.ring()

    async def _part(self) -> None:
        """Stay until every device has its final model, or is silent."""
        if self._config.stay:
            await asyncio.Event().wait()
        patience = max(PATIENCE, self._lost)
        soon = time.monotonic() + patience
        await self._until(lambda: not self._present() or (time.monotonic() > soon and not self._awaited(patience)))

    def _allowed(self, identity: Identity, message: Message, part: Part) -> int:
        identity.check_role("device")
        if isinstance(message, messages.Hello):
            self._rounds.candidate(identity, message)
            return self._rounds.sums_bytes
        if isinstance(message, messages.Update):
            self._rounds.check(identity, message, part.digest)
            return self._rounds.payload_bytes
        return 0

    async def _answer(self, identity: Identity, said: Said) -> Said:
        message, payload = said
        if isinstance(message, messages.Status):
            identity.check_role("coordinator")
            return Said(messages.Report(), json.dumps(self._report()).encode())
        identity.check_role("device")
        number = identity.number
        assert number is not None
        self._seen[number] = time.monotonic()
        if isinstance(message, messages.Knock):
            return await self._welcomed(number)
        if isinstance(message, messages.Hello):
            await self._work(lambda: self._rounds.enrol(identity, message, payload))
            self._tell(Event("enrolled", f"{identity.name}, {message.samples} samples"))
            self._notify()
            return Said(messages.Enrolled())
        if number not in self._rounds.members:
            raise Refused(Code.NOT_ENROLLED, f"{identity.name} did not say hello")
        if isinstance(message, messages.Pull):
            return await self._pulled(number, message)
        if isinstance(message, messages.Beat):
            going = self._rounds.open
            return Said(messages.Alive(open=going is not None and going.number == message.round))
        if isinstance(message, messages.Update):
            before = await self._work(lambda: self._rounds.accept(identity, message, payload))
            self._notify()
            return Said(messages.Accepted(before=before))
        if isinstance(message, messages.Leave):
            await self._work(lambda: self._rounds.leave(number))
            self._notify()
            return Said(messages.Left())
        raise Refused(Code.UNKNOWN_KIND, f"a server is not told {message.kind!r}")

    async def _welcomed(self, number: int) -> Said:
        """Return the recipe; a device that has sent its sums is kept waiting for what all of them make."""
        rounds = self._rounds
        if rounds.sums_bytes and number in rounds.members:
            await self._offered.within(rounds.section.heartbeat, lambda: rounds.begun)
        return Said(messages.Welcome(run=rounds.run), rounds.served.to_toml().encode())

    async def _pulled(self, number: int, message: messages.Pull) -> Said:
        """Return work, or the final model, or after a while nothing."""
        rounds = self._rounds
        await self._offered.within(rounds.section.heartbeat, lambda: self._ready(number))
        if rounds.finished and rounds.open is None:
            return Said(messages.Finished(rounds=rounds.done), await self._work(rounds.final))
        task = await self._work(lambda: rounds.task(number, message.returning))
        if task is None:
            return Said(messages.Wait())
        round_, model, broadcast = task
        if self._started is None:
            self._started = time.monotonic()
            self._notify()
        return Said(messages.Task(round=round_, model=model), broadcast)

    def _ready(self, number: int) -> bool:
        rounds = self._rounds
        return (rounds.finished and rounds.open is None) or rounds.wants(number)

    def _present(self) -> int:
        return sum(not member.left for member in self._rounds.members.values())

    def _awaited(self, patience: float) -> bool:
        alive = self._alive(patience)
        return any(not member.left and number in alive for number, member in self._rounds.members.items())

    @property
    def _lost(self) -> float:
        return LOST * self._rounds.section.heartbeat

    def _overdue(self, deadline: float) -> bool:
        return self._started is not None and time.monotonic() > self._started + deadline

    def _report(self) -> dict[str, Any]:
        rounds, going, alive = self._rounds, self._rounds.open, self._alive(self._lost)
        return {
            **self._facts(rounds),
            "open": None
            if going is None
            else {"round": going.number, "selected": list(going.cohort), "taken": sorted(going.taken)},
            "devices": [
                {"name": m.name, "number": m.number, "samples": m.samples, "left": m.left, "alive": m.number in alive}
                for _, m in sorted(rounds.members.items())
            ],
        }
