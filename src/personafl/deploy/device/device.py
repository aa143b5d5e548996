"""A device: asks its server for work, trains, sends what the method declares, and keeps the rest.

It only ever calls out. What it computes is done by one worker thread, while it goes on giving signs of life.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from personafl.deploy.device.condition import Condition
from personafl.deploy.device.homes import Elsewhere, Homes
from personafl.deploy.device.policy import Policy
from personafl.deploy.device.state import DeviceState, Pending
from personafl.deploy.device.training import LocalClient
from personafl.deploy.net import messages
from personafl.deploy.net.identity import Files, identify
from personafl.deploy.net.messages import Code, Refused, Said
from personafl.deploy.net.telling import Told
from personafl.deploy.net.transport import Unreachable, beating, lasting
from personafl.errors import BadInput, Diverged, Failed, StorageFailed
from personafl.storage.files import locked, storage

if TYPE_CHECKING:
    from personafl.deploy.device.alone import OnItsOwn
    from personafl.deploy.device.summing import Summing

T = TypeVar("T")
Listener = Callable[[Told], None]
M = TypeVar("M", bound=messages.Message)
_RECIPE_BYTES = 2**20
_LEAST_PAUSE = 0.1  # seconds between two questions of one kind, whatever a recipe and a server say
# What can happen to a good update, or to one of a round whose model was bad or whose bytes were hit; whatever else an
# update is refused for, the next one would be too.
_TOO_LATE = {Code.ROUND_CLOSED, Code.WRONG_ROUND, Code.WRONG_MODEL, Code.NOT_SELECTED, Code.DUPLICATE}
_DROPPED = {*_TOO_LATE, Code.NORM_TOO_LARGE, Code.NOT_FINITE, Code.BAD_DIGEST}
_LONGEST = 60.0  # seconds between two tries to write to a full disk
# One for the process, however many devices it runs: a network is drawn with torch's own generator.
_WORKER = ThreadPoolExecutor(1, "device")


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """What a device is started with."""

    server: str  # HOST:PORT, or several with commas between them: of a cloud's, one has this device
    data: str
    state: Path  # the directory that it keeps everything in
    files: Files
    profile: str | None = None
    policy: Policy = field(default_factory=Policy)
    metrics: str | None = None  # HOST:PORT of the pages for operators


async def run_device(config: DeviceConfig, listener: Listener) -> None:
    """Take part in a run until it is finished, from wherever the state file says this device is."""
    try:
        name = config.files.certificate.stem
        async with lasting(config.files, lambda text: listener(Told("ending", text, name))):
            device = _Device(config, listener)
            if config.metrics is None:
                await device.run()
                return
            from personafl.deploy.device.pages import shown  # here, for most devices have none

            async with shown(config.metrics, config.files, device.condition) as port:
                listener(Told("metrics", f"port {port}: /metrics, /healthz and /readyz", name))
                await device.run()
    except Refused as refused:
        raise _ending(config.server, refused) from refused


def _ending(address: str, refused: Refused) -> BadInput:
    said = "refused this device" if refused.by_peer else "sent what this device refuses"
    return BadInput(f"{address}: {said}: {refused}")


class _Device:
    """A device in contact."""

    def __init__(self, config: DeviceConfig, listener: Listener) -> None:
        self._config, self._listener = config, listener
        self._identity = identify(config.files.certificate.read_bytes())
        self._identity.check_role("device")
        self._broadcast_bytes = 0
        self._client: LocalClient
        self.condition = Condition()
        self._homes: Homes
        self._alone: OnItsOwn | None = None
        self._summing: Summing | None = None
        self._diverged = 0  # rounds, one after another

    def _tell(self, text: str, what: str = "note", round: int | None = None) -> None:  # noqa: A002 - as in messages
        self._listener(Told(what, text, self._identity.name, round))

    async def run(self) -> None:
        """Enrol, go through the rounds, and keep the best model."""
        state = self._config.state
        with storage(state):
            state.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(state, "is a device with this --state; end that one, or choose another --state"):
            await self._in_contact()

    async def _in_contact(self) -> None:
        config = self._config
        self._homes = Homes(config.server, config.files, self._cap, config.state, self._tell)
        self.condition.channel = self._channel = self._homes.channel
        try:
            alone = DeviceState.left_alone(self._config.state)
            if alone is not None:
                self._tell(f"is done and has its model; another run needs another --state than {self._config.state}")
            else:
                await self._take_part()
                alone = self._client.state.alone
            with contextlib.suppress(Unreachable, Refused):  # it may be gone, and is not needed any more
                await self._channel.ask(messages.Leave(alone=alone), timeout=5.0, tries=8)
        except Refused as refused:
            raise _ending(self._channel.address, refused) from refused
        finally:
            await self._channel.close()

    async def _take_part(self) -> None:
        await self._enrol()
        try:
            while not await self._turn():
                pass
            await self._finish()
        except Failed:
            with contextlib.suppress(Unreachable, Refused):  # so that nobody waits for it
                await self._channel.ask(messages.Leave(), timeout=5.0, tries=2)
            raise

    async def _finish(self) -> None:
        from personafl.deploy.device.serving import keep_best  # here, for until then a device scores and writes nothing

        client = self._client
        keep = functools.partial(keep_best, client, self._config.state)
        best = functools.partial(client.guard.run, keep, "choosing a model")
        kept = await self._patiently(best, best)
        await self._patiently(client.state.finish, client.state.write)
        scores = ", ".join(f"{name} {value:.3f}" for name, value in kept.accuracies.items())
        self._tell(f"keeps its {kept.name} model in {kept.file} (test accuracy: {scores or 'no test data'})", "kept")

    def _cap(self, kind: str) -> int:
        if kind == messages.Welcome.kind:
            return _RECIPE_BYTES
        if self._summing is not None and kind == "followed":
            return self._summing.room
        return self._broadcast_bytes if kind in (messages.Task.kind, messages.Finished.kind) else 0

    async def _enrol(self) -> None:
        """Learn what is run, get ready for it, and say so."""
        config, number = self._config, self._identity.number
        assert number is not None
        await self._homes.find()
        welcome, text = await self._welcomed()
        given = f"the recipe of {self._channel.address}", config.data, number, config.profile, config.state, welcome.run
        client = await self._work(lambda: LocalClient.opened(text, *given, config.policy))
        for note in client.notes:
            self._tell(note)
        self._tell(f"the recipe's SHA-256 is {client.digest}", "recipe")
        first = client.sums
        if (moved := welcome.moved) is not None:
            home = welcome.home or welcome.run
            self._tell(await self._work(lambda: client.state.move(moved.counted, had=moved.had, home=home)), "moved")
            await self._patiently(client.state.write, client.state.write)
            first = await self._work(client.introduction) if moved.introduce else b""
        self._expected(messages.Enrolled, await self._channel.ask(messages.Hello(**client.hello), first))
        said = f"enrolled as {self._identity.name}, number {number}, {client.samples} training samples"
        self._tell(said, "enrolled")
        if client.sums:
            began = time.monotonic()
            while (known := (await self._welcomed())[1]) == text:  # until all have sent theirs
                await self._pause(began)
                began = time.monotonic()
            told = client.digest
            client = await self._work(lambda: LocalClient.opened(known, *given, config.policy))
            if client.digest != told:
                where = self._channel.address
                raise BadInput(f"{where}: has another recipe since this device has sent its sums; not trained")
        self._client, self._broadcast_bytes = client, client.broadcast_bytes
        self.condition.state, self.condition.section = client.state, client.recipe.deploy
        self.condition.protected = client.protected
        if client.side.learners.rule.offline is not None and client.protected is None:  # no ledger has what is alone
            from personafl.deploy.device.alone import OnItsOwn  # here, for most methods train in contact alone

            self._alone = OnItsOwn(client, self._channel, self._patiently, self._tell)
        if client.recipe.secure is not None:
            from personafl.deploy.device.summing import Summing  # here, for most runs have none

            pause = functools.partial(asyncio.sleep, _LEAST_PAUSE)
            self._summing = Summing(client, self._channel, self._config.files, self._patiently, pause, self._tell)

    async def _welcomed(self) -> tuple[messages.Welcome, bytes]:
        said = self._expected(messages.Welcome, await self._channel.ask(messages.Knock()))
        kept = DeviceState.home_of(self._config.state)
        if kept is not None and said[0].run == kept[0] and not self._homes.is_home(said[0]):
            raise BadInput(
                f"{self._channel.address}: was dropped, and another server has this device; name that one with --server"
            )
        return said

    def _expected(self, kind: type[M], said: Said) -> tuple[M, bytes]:
        """Return an answer, if it is of the kind that such a question has."""
        message, payload = said
        if not isinstance(message, kind):
            raise BadInput(f"{self._channel.address}: answered {message.kind!r}; is it a personafl server?")
        return message, payload

    async def _pause(self, since: float) -> None:
        """Wait a little if an answer came at once: a server that has nothing to say keeps a device waiting."""
        await asyncio.sleep(since + _LEAST_PAUSE - time.monotonic())

    async def _turn(self) -> bool:
        """Do what there is to do; return whether the run is finished."""
        client = self._client
        began = time.monotonic()
        try:
            await self._settle()
            client.check_traffic()
            said, payload = await self._asked(messages.Pull(returning=client.state.known))
        except Refused as refused:
            if refused.code is not Code.NOT_ENROLLED:
                raise
            await self._enrol()  # the server went back to before it had
            return False
        except Elsewhere:
            await self._enrol()
            return False
        if await self._went_back(said):
            return False
        if self._alone is not None:
            await self._alone.catch_up(said)
        if isinstance(said, messages.Wait):
            await self._pause(began)
            return False
        if isinstance(said, messages.Finished):
            await self._work(lambda: client.receive(payload))
            client.promise = said.privacy if client.recipe.privacy is not None else None
            self._tell(f"finished after {said.rounds} rounds; took part in {len(client.state.rounds)}", "finished")
            return True
        task, _ = self._expected(messages.Task, Said(said))
        await self._train(task, payload)
        return False

    async def _asked(self, message: messages.Message, payload: bytes = b"") -> Said:
        question = self._channel.ask(message, payload)
        return await self._homes.meanwhile(question if self._alone is None else self._alone.meanwhile(question))

    async def _train(self, task: messages.Task, broadcast: bytes) -> None:
        """Train for a round; where that comes to nothing, leave it, and ask again later."""
        client = self._client
        if task.round >= client.recipe.rounds:
            raise BadInput(f"{self._channel.address}: asks for round {task.round + 1} of {client.recipe.rounds}")
        section = client.recipe.deploy
        assert section is not None
        pause = max(_LEAST_PAUSE, section.heartbeat)
        try:
            async with beating(pause, lambda: self._channel.ask(messages.Beat(round=task.round))):
                await self._patiently(lambda: client.train(task.round, task.model, broadcast), client.state.write)
            self._diverged = 0
        except Diverged as problem:
            self._diverged += 1
            if self._diverged & (self._diverged - 1) == 0:  # the 1st, 2nd, 4th, … time
                self._tell(f"{problem}; nothing was sent, and it asks again", "diverged", task.round)
            await asyncio.sleep(pause)

    async def _went_back(self, said: messages.Message) -> bool:
        """Go back if the server has, and say so; return whether it had."""
        state = self._client.state
        counted = said.counted if isinstance(said, messages.Task | messages.Finished) else None
        done = "" if counted is None else await self._work(lambda: state.go_back(counted))
        if done:
            await self._patiently(state.write, state.write)
            self._tell(done, "went_back")
        return bool(done)

    async def _settle(self) -> None:
        """Learn the fate of the pending update, if there is one."""
        client, pending = self._client, self._client.state.pending
        if pending is None:
            return
        try:
            if self._summing is not None:
                await self._summing.settle()
            else:
                await self._send(pending)
        except Refused as refused:
            if refused.code in _DROPPED:
                await self._patiently(client.state.refused, client.state.write)
                self._tell(f"round {pending.round + 1}: update not taken, {refused}", "not_taken", pending.round)
                return
            raise
        await self._patiently(client.state.accepted, client.state.write)
        said = f"round {pending.round + 1}: update accepted, {len(pending.update)} bytes"
        self._tell(said, "accepted", pending.round)

    async def _send(self, pending: Pending) -> None:
        """Send an update, which is accepted then."""
        client, alone = self._client, self._client.state.alone
        update = messages.Update(round=pending.round, model=pending.model, samples=client.samples, alone=alone)
        self._expected(messages.Accepted, await self._asked(update, pending.update))

    async def _patiently(self, task: Callable[[], T], again: Callable[[], T]) -> T:
        """Do what ends with writing; while the disk is full, try `again` now and then."""
        seconds = 0.5
        while True:
            try:
                result = await self._work(task)
                self.condition.full = False
                return result
            except StorageFailed as error:
                self.condition.full = True
                self._tell(f"{error}; trying again", "full")
            await asyncio.sleep(seconds)
            seconds, task = min(2 * seconds, _LONGEST), again

    async def _work(self, task: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(_WORKER, task)
