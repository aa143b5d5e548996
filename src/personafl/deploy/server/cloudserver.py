"""A server of a cloud: what a server is to its devices, and a coordinator says when it goes on.

When its devices are done with a round, the server seals it (nothing more is taken), hands in what is mixed, and waits
for what follows. Its rounds have the coordinator's numbers, so some are left out where servers do not wait for all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from personafl.core import wire
from personafl.core.algorithm import Reduced
from personafl.deploy.net import messages
from personafl.deploy.net.identity import Identity, identify
from personafl.deploy.net.messages import Code, Refused, Said
from personafl.deploy.net.payload import most_bytes, opened
from personafl.deploy.net.transport import Channel, Unreachable, beating
from personafl.deploy.server.agreement import (
    Sum,
    cloud_name,
    deployable_cloud,
    fingerprint,
    home_of,
    place_of,
    without_cloud,
)
from personafl.deploy.server.history import Closed, Member
from personafl.deploy.server.rounds import Rounds
from personafl.deploy.server.server import Server, ServerConfig
from personafl.deploy.server.service import Event, Listener
from personafl.errors import BadInput
from personafl.recipe.recipe import Recipe
from personafl.simulate.cloud import with_own, without_own


@dataclass(frozen=True, kw_only=True)
class CloudServerConfig(ServerConfig):
    """What a server of a cloud is started with."""

    coordinator: str  # HOST:PORT


async def run_cloud_server(config: CloudServerConfig, listener: Listener) -> CloudRounds:
    """Serve a recipe to the devices of one server of its cloud."""
    cloud, name = deployable_cloud(config.recipe), identify(config.files.certificate.read_bytes()).name
    place = place_of(name, cloud)
    if place is None:
        names = f"{cloud_name(0)} to {cloud_name(cloud.servers - 1)}"
        raise BadInput(f"--identity {config.files.certificate}: is of {name}; the servers of the recipe are {names}")
    with ThreadPoolExecutor(1, "rounds") as worker:
        make = asyncio.get_running_loop().run_in_executor(worker, CloudRounds, config.recipe, config.out, place)
        with await make as rounds:
            try:
                await _CloudServer(config, rounds, worker, listener).run()
            except Refused as refused:
                raise BadInput(f"{config.coordinator}: refused this server: {refused}") from refused
        return rounds


class CloudRounds(Rounds):
    """A run on the side of one server of a cloud."""

    def __init__(self, recipe: Recipe, path: Path, place: int) -> None:
        self._cloud, self._place = deployable_cloud(recipe), place
        self._handed: Reduced | None = None  # what the devices sent in the sealed round
        self.fingerprint = fingerprint(recipe)
        own = without_cloud(recipe)
        if own.deploy is not None and self._cloud.members is not None:
            section = own.deploy.model_copy(update={"devices": len(self._cloud.members[place])})
            own = own.model_copy(update={"deploy": section})
        super().__init__(own, path)
        # Of what a coordinator sends, at most.
        self.state_bytes = most_bytes(self._base.serving().state)

    @property
    def weight(self) -> int:
        """What the devices that are there weigh together."""
        return int(self._roster().population)

    def candidate(self, identity: Identity, hello: messages.Hello) -> Member:
        """Return the member that a device would be, if it belongs here."""
        if self._cloud.members is not None:
            home = home_of(identity.name, self._cloud)
            if home != self._place:
                where = "no server's" if home is None else f"{cloud_name(home)}'s"
                text = f"{identity.name} is {where} by cloud.members, and this is {cloud_name(self._place)}"
                raise Refused(Code.WRONG_SERVER, text)
        return super().candidate(identity, hello)

    def open_next(self) -> None:
        """Begin a round: with all devices, or with the first that ask."""
        if self._cloud.active is None:
            super().open_next()
            return
        self.journal.write("opened", round=self.done, cohort=[], wanted=self._cloud.active)
        self._start_round((), self._cloud.active)

    def wants(self, number: int) -> bool:
        """Say whether a device has something to do: also one that would be among the first."""
        return super().wants(number) or self._is_free(number)

    def task(self, number: int, returning: bool) -> tuple[int, str, bytes] | None:
        """Return what a device has to do now; one that is among the first is selected by asking."""
        if self._is_free(number):
            going = self._open
            going.cohort = (*going.cohort, number)
            self.journal.write("widened", durable=False, round=going.number, cohort=going.cohort)
        return super().task(number, returning)

    @property
    def complete(self) -> bool:
        """Whether the open round has all updates that it waits for; who has not asked yet is waited for too."""
        return (self._open.sealed or len(self._open.cohort) >= self._places) and super().complete

    def seal(self) -> Said:
        """Take nothing more in the open round, and return what is handed in."""
        going = self._open
        if not going.sealed:
            self.journal.write("sealed", round=going.number, taken=sorted(going.taken))
            going.sealed = True
        handed = self._handed = self._joined()
        assert handed is not None
        shared = self._cloud.shared
        content = Sum(handed.total, handed.weight) if shared else without_own(self._server.state)
        return Said(messages.Announce(round=going.number, clients=handed.clients), wire.encode(content))

    def proceed(self, said: Said) -> Closed:
        """Go on to what follows the open round: take the new model of all, or the mean and then the updates."""
        message, payload = said
        server, number = self._server, self._open.number
        state = wire.dense(server.state)
        if self._cloud.shared:
            server.state = opened(payload, state, type(state))
        elif isinstance(message, messages.Proceed):
            assert self._handed is not None
            if message.mixed is not None:
                mean = without_own(state)
                state = with_own(opened(payload, mean, type(mean)), state)
                number = message.mixed
            server.state = server.updated(state, self._handed, number)
        handed, self._handed = self._handed, None
        if isinstance(message, messages.Proceed):
            return self._closed(handed, message.start)
        return self._closed(None, self.recipe.rounds)

    @property
    def _places(self) -> int:
        return 0 if self._cloud.active is None else self.section.wanted(self._cloud.active)

    def _is_free(self, number: int) -> bool:
        going = self.open
        if going is None or going.sealed or going.selected(number):
            return False
        return len(going.cohort) < self._places


class _CloudServer(Server):
    """A server that has a coordinator."""

    def __init__(
        self, config: CloudServerConfig, rounds: CloudRounds, worker: ThreadPoolExecutor, listener: Listener
    ) -> None:
        super().__init__(config, rounds, worker, listener)
        self._own = rounds
        self._joined = rounds.begun
        self._over = asyncio.Event()  # the coordinator has done all rounds
        self._coordinator = Channel(
            config.coordinator, config.files, self._cap, lambda text: self._tell(Event("waiting", text))
        )

    async def _train(self) -> None:
        async with self._in_contact():
            await super()._train()
            with contextlib.suppress(Unreachable, Refused):  # it may be gone, and is not needed any more
                await self._coordinator.ask(messages.Leave(), timeout=5.0, tries=8)

    async def _begin(self) -> None:
        await self._coordinator.ask(messages.Join(weight=self._own.weight, recipe=self._own.fingerprint))
        self._joined = True
        said = await self._following(None)
        await self._work(lambda: self._own.begin(said.payload or None))

    async def _collect(self) -> None:
        """Wait until the open round can be sealed, or is not needed any more."""
        collecting, over = asyncio.create_task(super()._collect()), asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait({collecting, over}, return_when=asyncio.FIRST_COMPLETED)
            if collecting.done():
                collecting.result()
        finally:
            collecting.cancel()
            over.cancel()

    async def _close(self) -> Closed:
        rounds = self._own
        assert rounds.open is not None
        number = rounds.open.number
        if rounds.complete or rounds.enough:
            announce, payload = await self._work(rounds.seal)
            self._notify()
            try:
                await self._coordinator.ask(announce, payload)
            except Refused as refused:
                if refused.code is not Code.ROUND_CLOSED:
                    raise
        said = await self._following(number)
        return await self._work(lambda: rounds.proceed(said))

    async def _following(self, number: int | None) -> Said:
        """Return what the coordinator says follows a round."""
        said = Said(messages.Wait())
        while isinstance(said.message, messages.Wait):
            said = await self._coordinator.ask(messages.Await(round=number))
        return said

    @contextlib.asynccontextmanager
    async def _in_contact(self) -> AsyncIterator[None]:
        """Give signs of life meanwhile, and notice when all is over."""

        async def beat() -> None:
            if self._joined:
                with contextlib.suppress(Refused):  # the next question is refused too
                    said, _ = await self._coordinator.ask(messages.Beat(round=self._own.done))
                    if isinstance(said, messages.Alive) and not said.open:
                        self._over.set()

        try:
            async with beating(self._own.section.heartbeat, beat):
                yield
        finally:
            await self._coordinator.close()

    def _cap(self, kind: str) -> int:
        return self._own.state_bytes if kind in (messages.Proceed.kind, messages.Finished.kind) else 0
