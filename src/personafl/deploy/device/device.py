"""A device: asks its server for work, trains, sends what the method declares, and keeps the rest.

It only ever calls out. What it computes is done by one worker thread, while it goes on giving signs of life.
"""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from personafl.deploy.device.state import DeviceState
from personafl.deploy.device.training import LocalClient
from personafl.deploy.net import messages
from personafl.deploy.net.identity import Files, identify
from personafl.deploy.net.messages import Code, Refused
from personafl.deploy.net.transport import Channel, Unreachable, beating, lasting
from personafl.errors import BadInput

T = TypeVar("T")
Listener = Callable[[str], None]
_RECIPE_BYTES = 2**20
# What can happen to a good update; whatever else an update is refused for, the next one would be too.
_TOO_LATE = {Code.ROUND_CLOSED, Code.WRONG_ROUND, Code.WRONG_MODEL, Code.NOT_SELECTED, Code.DUPLICATE}
# One for the process, however many devices it runs: a network is drawn with torch's own generator.
_WORKER = ThreadPoolExecutor(1, "device")


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """What a device is started with."""

    server: str  # HOST:PORT
    data: str
    state: Path  # the directory that it keeps everything in
    files: Files
    profile: str | None = None


async def run_device(config: DeviceConfig, listener: Listener) -> None:
    """Take part in a run until it is finished, from wherever the state file says this device is."""
    try:
        async with lasting(config.files, listener):
            await _Device(config, listener).run()
    except Refused as refused:
        raise BadInput(f"{config.server}: refused this device: {refused}") from refused


class _Device:
    """A device in contact."""

    def __init__(self, config: DeviceConfig, listener: Listener) -> None:
        self._config, self._tell = config, listener
        self._identity = identify(config.files.certificate.read_bytes())
        self._identity.check_role("device")
        self._broadcast_bytes = 0
        self._client: LocalClient

    async def run(self) -> None:
        """Enrol, go through the rounds, and keep the best model."""
        self._channel = Channel(self._config.server, self._config.files, self._cap, self._tell)
        try:
            if DeviceState.is_finished(self._config.state):
                self._tell(f"is done and has its model; another run needs another --state than {self._config.state}")
            else:
                await self._enrol()
                await self._settle()
                while not await self._turn():
                    pass
                await self._finish()
            with contextlib.suppress(Unreachable, Refused):  # it may be gone, and is not needed any more
                await self._channel.ask(messages.Leave(), timeout=5.0, tries=8)
        finally:
            await self._channel.close()

    async def _finish(self) -> None:
        from personafl.deploy.device.serving import keep_best  # here, for until then a device scores and writes nothing

        client = self._client
        kept = await self._work(lambda: keep_best(client, self._config.state))
        await self._work(client.state.finish)
        scores = ", ".join(f"{name} {value:.3f}" for name, value in kept.accuracies.items())
        self._tell(f"keeps its {kept.name} model in {kept.file} (test accuracy: {scores or 'no test data'})")

    def _cap(self, kind: str) -> int:
        if kind == messages.Welcome.kind:
            return _RECIPE_BYTES
        return self._broadcast_bytes if kind in (messages.Task.kind, messages.Finished.kind) else 0

    async def _enrol(self) -> None:
        """Learn what is run, get ready for it, and say so."""
        config, number = self._config, self._identity.number
        assert number is not None
        welcome, text = await self._welcomed()
        given = f"the recipe of {config.server}", config.data, number, config.profile, config.state, welcome.run
        client = await self._work(lambda: LocalClient.opened(text, *given))
        await self._channel.ask(messages.Hello(**client.hello), client.sums)
        self._tell(f"enrolled as {self._identity.name}, number {number}, {client.samples} training samples")
        if client.sums:
            while (known := (await self._welcomed())[1]) == text:  # until all have sent theirs
                pass
            client = await self._work(lambda: LocalClient.opened(known, *given))
        self._client, self._broadcast_bytes = client, client.broadcast_bytes

    async def _welcomed(self) -> tuple[messages.Welcome, bytes]:
        welcome, text = await self._channel.ask(messages.Knock())
        if not isinstance(welcome, messages.Welcome):
            raise BadInput(f"{self._config.server}: answered {welcome.kind!r}; is it a personafl server?")
        return welcome, text

    async def _turn(self) -> bool:
        """Do what there is to do; return whether the run is finished."""
        client = self._client
        said, payload = await self._channel.ask(messages.Pull(returning=client.number in client.state))
        if isinstance(said, messages.Wait):
            return False
        if isinstance(said, messages.Finished):
            await self._work(lambda: client.receive(payload))
            self._tell(f"finished after {said.rounds} rounds; took part in {len(client.state.rounds)}")
            return True
        assert isinstance(said, messages.Task)
        section, beat = client.recipe.deploy, messages.Beat(round=said.round)
        assert section is not None
        async with beating(section.heartbeat, lambda: self._channel.ask(beat)):
            await self._work(lambda: client.train(said.round, said.model, payload))
        await self._settle()
        return False

    async def _settle(self) -> None:
        """Learn the fate of the pending update, if there is one."""
        client, pending = self._client, self._client.state.pending
        if pending is None:
            return
        try:
            update = messages.Update(round=pending.round, model=pending.model, samples=client.samples)
            await self._channel.ask(update, pending.update)
        except Refused as refused:
            if refused.code in _TOO_LATE:
                await self._work(client.state.refused)
                self._tell(f"round {pending.round + 1}: update not taken, {refused}")
                return
            raise
        await self._work(client.state.accepted)
        self._tell(f"round {pending.round + 1}: update accepted, {len(pending.update)} bytes")

    async def _work(self, task: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(_WORKER, task)
