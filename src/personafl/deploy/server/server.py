"""The server: answers devices, and keeps the clock of the rounds.

Devices pull. A device that asks for work and finds none is kept waiting for up to a heartbeat, so that a round begins
without delay.
"""

import asyncio
import gc
import itertools
import json
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from personafl.deploy.net import messages
from personafl.deploy.net.exposition import Metric, gauge
from personafl.deploy.net.identity import Identity
from personafl.deploy.net.messages import Code, Heard, Message, Part, Payload, Refused, Said
from personafl.deploy.server.history import Closed, check_admitted
from personafl.deploy.server.rounds import Rounds
from personafl.deploy.server.service import LOST, PATIENCE, Bell, Event, Listener, Service, ServiceConfig, run_gauges
from personafl.deploy.server.updates import Offer
from personafl.errors import BadInput
from personafl.recipe.recipe import Recipe

_ROOM, _AT_ONCE = 2**26, 4  # bytes of updates that are not on disk yet, and how many have room at their largest


@dataclass(frozen=True, kw_only=True)
class ServerConfig(ServiceConfig):
    """What a server is started with."""

    stay: bool = False  # also when all devices have their final model: for newcomers


async def run_server(config: ServerConfig, listener: Listener) -> Rounds:
    """Serve a recipe to its end, from wherever its directory says it is."""
    if config.recipe.secure is not None:
        raise BadInput("secure: this server would see single updates; use run_summing_server")
    with ThreadPoolExecutor(1, "rounds") as worker:
        rounds = await asyncio.get_running_loop().run_in_executor(worker, Rounds, config.recipe, config.out)
        gc.freeze()  # what was imported and made stays, and is not gone through again and again
        with rounds:
            await Server(config, rounds, worker, listener).run()
        return rounds


class Server(Service):
    """A run that is being served."""

    def __init__(self, config: ServerConfig, rounds: Rounds, worker: ThreadPoolExecutor, listener: Listener) -> None:
        super().__init__(config, rounds, worker, listener)
        self._config, self._rounds = config, rounds
        self._recipe: tuple[Recipe | None, Payload] = None, Payload()  # what devices are sent of it
        self._started: float | None = None  # when the first device was given the open round
        self._serials = {member.number: member.serial for member in rounds.members.values()}  # last shown, by number
        self._listed: frozenset[int] | None = None  # the revocations that the rounds know of
        self._offers: deque[tuple[Offer, asyncio.Future[bool]]] = deque()  # updates that wait for the worker
        self._keeping: asyncio.Task[None] | None = None
        self._offered = Bell()  # for idle devices alone: every other change would wake all of them for nothing

    async def run(self) -> None:
        """Answer devices and go through the rounds."""
        rounds = self._rounds
        largest = max(rounds.payload_bytes, rounds.sums_bytes)
        async with self._serving(max(_ROOM, _AT_ONCE * largest)) as port:
            self._tell(Event("listening", f"port {port}, {rounds.done} of {rounds.recipe.rounds} rounds done"))
            self._tell(Event("recipe", f"its SHA-256 is {rounds.recipe.digest()}"))
            self._suspect(None)
            await self._train()
            budget = "; the budget of privacy is spent" if rounds.done < rounds.recipe.rounds else ""
            self._tell(Event("finished", f"{rounds.done} rounds{budget}"))
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
                self._look_at_revocations()
                await self._surely(rounds.note_revoked)
                await self._surely(rounds.open_next)
            self._started = None
            self._offered.ring()
            await self._collect()
            closed = await self._close()
            self._tell(Event("closed", "", round=closed.number, closed=closed))
            self._suspect(closed)
        await self._surely(rounds.final)
        self._offered.ring()

    def _suspect(self, closed: Closed | None) -> None:
        for name, text in self._rounds.suspects.alerts(closed):
            self._tell(Event("suspect", text, name, None if closed is None else closed.number))

    async def _begin(self) -> None:
        await self._surely(self._rounds.begin)

    async def _close(self) -> Closed:
        return await self._surely(self._rounds.close)

    async def _collect(self) -> None:
        """Wait until the open round can close."""
        rounds, deadline = self._rounds, self._rounds.section.deadline
        for waited in itertools.count(1):
            await self._until(lambda: self._over_or_stranded(deadline))
            if rounds.complete or rounds.enough or (waited >= rounds.section.patience and rounds.may_close):
                return
            alive = self._alive(self._lost)
            added = await self._surely(lambda: rounds.widen(alive))  # noqa: B023 - awaited at once
            number = None if rounds.open is None else rounds.open.number
            few = f"too few updates{rounds.lacking}"
            self._tell(Event("extended", f"{few}; {len(added)} more devices selected", round=number))
            self._started = self._now()
            self._offered.ring()

    def _over_or_stranded(self, deadline: float) -> bool:
        """Say whether the open round has all that it waits for, or others are to be selected for it."""
        rounds = self._rounds
        self._look_at_revocations()
        if rounds.complete or self._overdue(deadline):
            return True
        return not rounds.may_close and rounds.stranded(self._alive(self._lost))

    def _look_at_revocations(self) -> None:
        """Let the rounds know whose certificates are revoked: these are neither selected nor waited for."""
        listed = self._revocations.listed()
        if listed is not self._listed:
            self._rounds.revoked = frozenset(number for number, serial in self._serials.items() if serial in listed)
            self._listed = listed
            self._worker.submit(self._rounds.note_revoked)

    def _was_away(self, now: float) -> None:
        super()._was_away(now)
        if self._started is not None:
            self._started = now

    async def _part(self) -> None:
        """Stay until every device has its final model, or is silent."""
        if self._config.stay:
            await asyncio.Event().wait()
        patience = max(PATIENCE, self._lost)
        soon = self._now() + patience
        await self._until(lambda: self._all_left() or (self._now() > soon and not self._awaited(patience)))

    def _allowed(self, identity: Identity, message: Message, part: Part) -> int:
        identity.check_role("device")
        if isinstance(message, messages.Hello):
            self._rounds.candidate(identity, message)
            return self._rounds.hello_bytes(identity)
        if isinstance(message, messages.Update):
            self._rounds.check(identity, message, part.digest)
            return self._rounds.payload_bytes
        return 0

    async def _answer(self, identity: Identity, said: Heard) -> Said:
        message, payload = said
        if isinstance(message, messages.Status):
            identity.check_role("coordinator")
            return Said(messages.Report(), json.dumps(self._report()).encode())
        if isinstance(message, messages.Drop):
            identity.check_role("coordinator")
            return await self._dropped(message, identity.name)
        identity.check_role("device")
        number = identity.number
        assert number is not None
        check_admitted(self._rounds.members.get(number))
        if isinstance(message, messages.Knock):
            self._rounds.welcome(identity)  # refuses who belongs elsewhere, and is not heard of here
        self._seen[number] = self._now()
        if self._serials.get(number) != identity.serial:
            self._serials[number], self._listed = identity.serial, None
        if isinstance(message, messages.Knock):
            return await self._welcomed(identity)
        if isinstance(message, messages.Hello):
            await self._work(lambda: self._rounds.enrol(identity, message, payload))
            self._tell(Event("enrolled", f"{identity.name}, {message.samples} samples", identity.name))
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
            return Said(messages.Accepted(before=await self._kept(Offer(identity, message, payload, said.digest))))
        if isinstance(message, messages.Leave):
            await self._work(lambda: self._rounds.leave(number, message.alone))
            self._notify()
            return Said(messages.Left())
        raise Refused(Code.UNKNOWN_KIND, f"a server is not told {message.kind!r}")

    async def _kept(self, offer: Offer) -> bool:
        """Have an update kept, with all that wait when the worker is free; return whether it was before."""
        outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._offers.append((offer, outcome))
        if self._keeping is None or self._keeping.done():
            self._keeping = asyncio.create_task(self._keep())
        return await outcome

    async def _keep(self) -> None:
        while self._offers:
            taken: list[tuple[Offer, asyncio.Future[bool]]] = []
            try:
                outcomes: list[Any] = await self._work(lambda: self._keep_waiting(taken))  # noqa: B023 - awaited
            except Exception as error:  # of all of them, a full disk say
                outcomes = [error] * len(taken)
            for (_, outcome), found in zip(taken, outcomes, strict=True):
                if outcome.done():  # who asked has hung up
                    continue
                if isinstance(found, Exception):
                    outcome.set_exception(found)
                else:
                    outcome.set_result(found)
            self._notify()

    def _keep_waiting(self, taken: list[tuple[Offer, asyncio.Future[bool]]]) -> list[bool | Refused]:
        """Keep all updates that wait, one of each device."""
        numbers: set[int] = set()
        while self._offers and self._offers[0][0].number not in numbers:
            taken.append(self._offers.popleft())
            numbers.add(taken[-1][0].number)
        return self._rounds.accept_all([offer for offer, _ in taken])

    async def _dropped(self, message: messages.Drop, by: str) -> Said:
        """Leave a device out, or let it in again."""
        before = await self._work(lambda: self._rounds.drop(message.name, undo=message.undo, by=by))
        self._tell(Event("readmitted" if message.undo else "dropped", message.name, message.name))
        self._notify()
        self._offered.ring()
        return Said(messages.Dropped(before=before))

    async def _welcomed(self, identity: Identity) -> Said:
        """Return the recipe; a device that has sent its sums is kept waiting for what all of them make."""
        rounds, number = self._rounds, identity.number
        if rounds.sums_bytes and number in rounds.members:
            await self._offered.within(rounds.section.heartbeat, lambda: rounds.begun)
        if self._recipe[0] is not rounds.served:
            self._recipe = rounds.served, Payload(rounds.served.to_toml().encode())
        return Said(rounds.welcome(identity), self._recipe[1])

    async def _pulled(self, number: int, message: messages.Pull) -> Said:
        """Return work, or the final model, or after a while nothing."""
        rounds = self._rounds
        await self._offered.within(rounds.section.heartbeat, lambda: self._ready(number))
        check_admitted(rounds.members[number])  # it may have been dropped meanwhile
        alone = rounds.away.of(number)
        if rounds.finished and rounds.open is None:
            final = await self._work(lambda: rounds.final().to(number))
            promise = None if rounds.noise is None else rounds.noise.promise()
            done: dict[str, Any] = {"rounds": rounds.done, "counted": rounds.counted(number), "alone": alone}
            return Said(messages.Finished(**done, privacy=promise), final)
        task = await self._work(lambda: rounds.task(number, message.returning))
        if task is None:
            return Said(messages.Wait(alone=alone))
        round_, model, broadcast = task
        if self._started is None:
            self._started = self._now()
            self._notify()
        counted = rounds.counted(number)
        return Said(messages.Task(round=round_, model=model, counted=counted, alone=alone), broadcast)

    def _ready(self, number: int) -> bool:
        rounds = self._rounds
        return (rounds.finished and rounds.open is None) or rounds.wants(number)

    def _present(self) -> int:
        return sum(map(self._rounds.here, self._rounds.members))

    def _all_left(self) -> bool:  # asked for each that leaves, and so only as far as the first who has not
        return not any(map(self._rounds.here, self._rounds.members))

    def _awaited(self, patience: float) -> bool:
        return any(map(self._rounds.here, self._alive(patience)))

    @property
    def _lost(self) -> float:
        return LOST * self._rounds.section.heartbeat

    def _overdue(self, deadline: float) -> bool:
        return self._started is not None and self._now() > self._started + deadline

    def _gauges(self) -> list[Metric]:
        rounds, going = self._rounds, self._rounds.open
        cohort = () if going is None else going.cohort
        spent = None if rounds.noise is None else rounds.noise.spent
        heard = len(self._heard_since(self._looked - self._lost))  # the clock is not for another thread to look at
        return [
            *run_gauges(rounds),
            *(
                [
                    gauge("privacy_epsilon", "Epsilon of all rounds so far, also of those taken back.", spent.epsilon),
                    gauge("privacy_delta", "Delta of that.", spent.delta),
                ]
                if spent
                else []
            ),
            gauge("devices_enrolled", "Devices that may take part.", self._present()),
            gauge("devices_connected", "Devices of which something was heard lately.", heard),
            gauge("devices_selected", "Devices that are selected in the open round.", len(cohort)),
            gauge("round_updates", "Updates that the open round has.", 0 if going is None else len(going.taken)),
            *rounds.suspects.metrics(),
        ]

    def _report(self) -> dict[str, Any]:
        rounds, going, alive = self._rounds, self._rounds.open, self._alive(self._lost)
        facts = self._facts(rounds)
        if rounds.last is not None:
            facts["last"]["met"] = rounds.last.met._asdict()
        return {
            **facts,
            **({} if rounds.noise is None else {"privacy": rounds.noise.facts()}),
            "open": None
            if going is None
            else {"round": going.number, "selected": list(going.cohort), "taken": sorted(going.taken)},
            "devices": [
                {
                    **{key: getattr(member, key) for key in ("name", "number", "samples", "left", "dropped")},
                    "revoked": number in rounds.revoked,
                    "alive": number in alive,
                    **rounds.suspects.of(number),
                }
                for number, member in sorted(rounds.members.items())
            ],
        }
