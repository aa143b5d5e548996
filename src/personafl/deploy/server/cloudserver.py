"""A server of a cloud: what a server is to its devices, and a coordinator says when it goes on.

When its devices are done with a round, the server seals it (nothing more is taken), hands in what is mixed, and waits
for what follows. Its rounds have the coordinator's numbers, so some are left out where servers do not wait for all.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from personafl.core import wire
from personafl.core.algorithm import Reduced
from personafl.core.tree import Tree
from personafl.deploy.net import messages
from personafl.deploy.net.identity import Identity, identify
from personafl.deploy.net.messages import Code, Refused, Said
from personafl.deploy.net.payload import check_finite, most_bytes, opened
from personafl.deploy.net.transport import Channel, Unreachable, beating
from personafl.deploy.server.adopting import Adopting
from personafl.deploy.server.agreement import (
    Sum,
    Whole,
    cloud_name,
    deployable_cloud,
    fingerprint,
    home_of,
    place_of,
    without_cloud,
)
from personafl.deploy.server.history import Closed, Member
from personafl.deploy.server.moving import Group
from personafl.deploy.server.server import Server, ServerConfig
from personafl.deploy.server.service import Event, Listener
from personafl.errors import BadInput
from personafl.recipe.recipe import Recipe
from personafl.simulate.cloud import stepped, with_own, without_own
from personafl.uploads.robust import model_of, with_model

T = TypeVar("T")
_OUT = {Code.DROPPED, Code.NOT_ENROLLED}  # what is not the coordinator's server, and will not be


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


class CloudRounds(Adopting):
    """A run on the side of one server of a cloud."""

    def __init__(self, recipe: Recipe, path: Path, place: int) -> None:
        cloud, self._place = deployable_cloud(recipe), place
        self._handed: Reduced | None = None  # what the devices sent in the sealed round
        self._moved: Tree = None  # the state after that, but for the model, which the coordinator has
        self.fingerprint = fingerprint(recipe)
        own = without_cloud(recipe)
        if own.deploy is not None and cloud.members is not None:
            section = own.deploy.model_copy(update={"devices": len(cloud.members[place])})
            own = own.model_copy(update={"deploy": section})
        super().__init__(own, path, cloud)
        known = [entry for entry in self.journal.entries if entry["event"] == "proceeded"]
        self._heard = messages.Mix(**{key: known[-1][key] for key in ("mixed", "members")}) if known else None
        self.parted = any(entry["event"] == "parted" for entry in self.journal.entries)  # from the coordinator
        # Of what a coordinator sends, at most.
        self.state_bytes = most_bytes(self._base.serving().state)

    @property
    def name(self) -> str:
        """The name that its certificate has."""
        return cloud_name(self._place)

    @property
    def weight(self) -> int:
        """What the devices that are there weigh together."""
        return int(self._roster().population)

    def welcome(self, identity: Identity) -> messages.Welcome:
        """Return which run a device's state belongs to, if it belongs here."""
        self._check_home(identity)
        return super().welcome(identity)

    def candidate(self, identity: Identity, hello: messages.Hello) -> Member:
        """Return the member that a device would be, if it belongs here."""
        self._check_home(identity)
        return super().candidate(identity, hello)

    def _check_home(self, identity: Identity) -> None:
        if self._cloud.members is not None:
            home = home_of(identity.name, self._cloud)
            if home != self._place and identity.name not in self.adopted:
                where = "no server's" if home is None else f"{cloud_name(home)}'s"
                text = f"{identity.name} is {where} by cloud.members, and this is {cloud_name(self._place)}"
                raise Refused(Code.WRONG_SERVER, text)

    def part(self) -> None:
        """Note that the coordinator knows that this server is done."""
        self.journal.write("parted")
        self.parted = True

    def begin(self, server: bytes | None = None) -> None:
        """Make the server's state, or take the one that a coordinator sent."""
        if server is not None:
            state = self._serving().state
            server = wire.encode(with_model(state, self._received(server, wire.dense(model_of(state)))))
        super().begin(server)

    def _received(self, payload: bytes, like: T) -> T:
        """Return what a coordinator sent, checked as a device's update is."""
        try:
            received = opened(payload, like, type(like))
            check_finite(received)
        except Refused as refused:
            raise BadInput(f"--coordinator: sent a model that is not taken: {refused}") from refused
        return received

    def open_next(self) -> None:
        """Begin a round: with all devices, or with the first that ask."""
        if self._cloud.active is None:
            super().open_next()
            return
        self._admit()
        self.journal.write("opened", round=self.done, cohort=[], wanted=self._cloud.active)
        self._start_round((), self._cloud.active)

    def wants(self, number: int) -> bool:
        """Say whether a device has something to do: also one that would be among the first."""
        return super().wants(number) or self._is_free(number)

    def task(self, number: int, returning: bool) -> tuple[int, str, bytes] | None:
        """Return what a device has to do now; one that is among the first is selected by asking."""
        if self._is_free(number):
            going = self._open
            self._refresh()
            cohort = (*going.cohort, number)
            self.journal.write("widened", durable=False, round=going.number, cohort=cohort)
            going.cohort = cohort
        return super().task(number, returning)

    @property
    def complete(self) -> bool:
        """Whether the open round has all updates that it waits for; who has not asked yet is waited for too."""
        return (self._open.sealed or self._filled >= self._places) and super().complete

    def stranded(self, alive: set[int]) -> bool:
        """Say whether others must be selected: where the first that ask take part, they select themselves."""
        return self._cloud.active is None and super().stranded(alive)

    def seal(self) -> Said:
        """Take nothing more in the open round, and return what is handed in."""
        self._seal()
        joined = self._handed = self._joined()
        assert joined is not None
        state, handed = self._server.state, joined
        if self._cloud.shared:
            self._moved, handed = self._server.handed(joined, self._open.number)
        total = Sum(handed.total, handed.weight)
        whole = Whole(wire.dense(state), total) if self._cloud.iterations > 1 else without_own(state)
        content = total if self._cloud.shared else whole
        taken = sorted(self._open.taken) if len(self._open.taken) <= messages.MOST_NAMED else []
        announce = messages.Announce(round=self._open.number, clients=handed.clients, taken=taken, heard=self._heard)
        return Said(announce, wire.encode(content))

    def proceed(self, said: Said) -> Closed:
        """Go on to what follows the open round: take the new model of all, or the mean and then the updates."""
        if self._is_committed:
            return self._closed()
        message, payload = said
        server, number = self._server, self._open.number
        if isinstance(message, messages.Proceed) and not number < message.start <= self.recipe.rounds:
            raise BadInput(f"--coordinator: says that round {message.start + 1} follows round {number + 1}")
        after, state = server.state, wire.dense(server.state)
        mixed, iterations = isinstance(message, messages.Proceed) and message.mixed is not None, self._cloud.iterations
        if self._cloud.shared:
            kept = self._moved if isinstance(message, messages.Proceed) else server.state
            after = with_model(kept, self._received(payload, wire.dense(model_of(state))))
        elif mixed and iterations > 1:
            after = self._received(payload, state)
        elif isinstance(message, messages.Proceed):
            assert self._handed is not None
            if message.mixed is not None:
                mean = without_own(state)
                state = with_own(self._received(payload, mean), state)
                number = message.mixed
            (after,) = stepped(server, [state], [self._handed], np.ones((1, 1)), number, iterations)
        if isinstance(message, messages.Proceed):
            if message.mixed is not None:  # durable with what the checkpoint says of the journal
                self._heard = messages.Mix(mixed=message.mixed, members=message.members)
                self.journal.write("proceeded", durable=False, **self._heard.model_dump())
            self._commit(after, self._handed, message.start)
        else:
            self._commit(after, None, self.recipe.rounds)
        self._handed = None
        return self._closed()

    @property
    def _places(self) -> int:
        """How many devices take part in a round, where these are the first that ask."""
        active = self._cloud.active
        return 0 if active is None else min(self.section.wanted(active), sum(map(self.here, self.members)))

    @property
    def _filled(self) -> int:
        """How many of these places are taken; who was dropped since has none."""
        return len(self._open.taken) + len(self._awaited)

    @property
    def _coming(self) -> int:
        """How many may still send something: also those that have not asked yet."""
        return super()._coming + max(0, self._places - self._filled)

    def _is_free(self, number: int) -> bool:
        going = self.open
        if going is None or going.sealed or going.selected(number) or not self.here(number):
            return False
        return self._filled < self._places


def whose_copy_is_old(number: int, sealed: bool, said: messages.Alive) -> Literal["own", "coordinator"] | None:
    """Return who is behind the other: a server that is in this round, sealed or not, or its coordinator that said so.

    A coordinator that is in a later round, or has what this server would still announce, is ahead of it, unless that
    follows the very announcement that was sealed here. In an earlier round it is behind, whether it has that or not.
    """
    if number > said.at:
        return "coordinator" if said.open else None
    ahead = number < said.at or said.ready
    return "own" if ahead and not (sealed and number in (said.at, said.after)) else None


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

    async def run(self) -> None:
        """Answer devices and go through the rounds, if the coordinator knows nothing that this directory does not."""
        try:
            if self._joined and not self._own.finished:  # else the coordinator may be gone by now
                await self._check_copies()
            await super().run()
        finally:
            await self._coordinator.close()

    async def _check_copies(self) -> None:
        """Fail if the run, or the coordinator's, goes on from an old copy: before devices are made to go back."""
        own, config = self._own, self._config
        said, _ = await self._coordinator.ask(messages.Beat(round=own.done))
        assert isinstance(said, messages.Alive)
        number, sealed = (own.done, False) if own.open is None else (own.open.number, own.open.sealed)
        old = whose_copy_is_old(number, sealed, said)
        if old == "own":
            raise BadInput(
                f"{config.out}: is an old copy: it is in round {number + 1}, of which the coordinator has more; start "
                f"from a newer one, or drop this server (personafl drop {own.name}), and others have its devices"
            )
        if old == "coordinator":
            raise BadInput(
                f"--coordinator {self._coordinator.address}: goes on from an old copy: there this server is in round "
                f"{said.at + 1}, and here in round {number + 1}; start the coordinator from a newer one"
            )

    async def _train(self) -> None:
        async with self._in_contact():
            await super()._train()
            if self._own.parted:
                return
            with contextlib.suppress(Unreachable, Refused):  # it may be gone, and is not needed any more
                await self._coordinator.ask(messages.Leave(), timeout=5.0, tries=8)
                await self._work(self._own.part)

    def _all_left(self) -> bool:  # devices of a server that is out look for another one, and find it late
        return super()._all_left() and not self._own.expecting

    async def _begin(self) -> None:
        own = self._own
        await self._coordinator.ask(messages.Join(weight=own.weight, recipe=own.fingerprint, run=own.run))
        self._joined = True
        said = await self._following(None)
        await self._surely(lambda: self._own.begin(said.payload or None))

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
        number, handed = rounds.open.number, None
        if rounds.complete or rounds.enough or not self._over.is_set():
            handed = await self._surely(rounds.seal)
            self._notify()
            await self._hand_in(handed)
        said = await self._following(number, handed)
        return await self._surely(lambda: rounds.proceed(said))

    async def _hand_in(self, handed: Said) -> None:
        try:
            await self._coordinator.ask(*handed)
        except Refused as refused:
            if refused.code is not Code.ROUND_CLOSED:
                raise

    async def _following(self, number: int | None, handed: Said | None = None) -> Said:
        """Return what the coordinator says follows a round, for which this was handed in.

        It is handed in again if the coordinator has not got it any more: the last lines of its journal may be lost.
        """
        said = Said(messages.Wait())
        while isinstance(said.message, messages.Wait):
            said = await self._coordinator.ask(messages.Await(round=number))
            if handed is not None and isinstance(said.message, messages.Wait):
                about, _ = await self._coordinator.ask(messages.Beat(round=self._own.done))
                if isinstance(about, messages.Alive) and not about.ready and about.after != number:
                    await self._hand_in(handed)
        return said

    @contextlib.asynccontextmanager
    async def _in_contact(self) -> AsyncIterator[None]:
        """Give signs of life meanwhile, and notice when all is over."""

        async def beat() -> None:
            if self._joined:
                try:
                    said, _ = await self._coordinator.ask(messages.Beat(round=self._own.done))
                    if isinstance(said, messages.Alive) and not said.open:
                        self._over.set()
                    elif isinstance(said, messages.Alive) and said.moved > len(self._own.adopted):
                        await self._adopt()
                except Refused as refused:
                    if refused.code in _OUT:
                        self._over.set()  # so that it asks what follows, and ends

        async with beating(self._own.section.heartbeat, beat):
            yield

    async def _adopt(self) -> None:
        """Learn which devices of servers that are out come here."""
        _, report = await self._coordinator.ask(messages.Adopt())
        groups = [Group.read(facts) for facts in json.loads(report)]
        await self._work(lambda: self._own.adopt(groups))
        self._tell(Event("adopted", f"{len(self._own.adopted)} devices of other servers"))

    def _cap(self, kind: str) -> int:
        if kind == messages.Report.kind:
            return 2**24
        return self._own.state_bytes if kind in (messages.Proceed.kind, messages.Finished.kind) else 0
