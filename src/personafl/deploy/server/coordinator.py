"""The coordinator of several servers: answers them, and notices who is gone.

Cloud servers call it. One that asks what follows its round is kept waiting for up to a heartbeat.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, TypeVar

from personafl.deploy.net import messages
from personafl.deploy.net.exposition import Metric, gauge
from personafl.deploy.net.identity import Identity
from personafl.deploy.net.messages import Code, Message, Part, Refused, Said
from personafl.deploy.server.agreement import cloud_name, place_of
from personafl.deploy.server.coordination import Coordination
from personafl.deploy.server.service import PATIENCE, Event, Listener, Service, ServiceConfig, run_gauges
from personafl.latency.waiting import ALONE

T = TypeVar("T")


async def run_coordinator(config: ServiceConfig, listener: Listener) -> Coordination:
    """Coordinate the servers of a recipe to its end, from wherever its directory says it is."""
    with ThreadPoolExecutor(1, "coordination") as worker:
        make = asyncio.get_running_loop().run_in_executor(worker, Coordination, config.recipe, config.out)
        with await make as coordination:
            await _Coordinator(config, coordination, worker, listener).run()
        return coordination


class _Coordinator(Service):
    """A run that is being coordinated."""

    def __init__(
        self, config: ServiceConfig, coordination: Coordination, worker: ThreadPoolExecutor, listener: Listener
    ) -> None:
        super().__init__(config, coordination, worker, listener)
        self._coordination = coordination
        self._seen = dict.fromkeys(range(coordination.cloud.servers), self._now())

    async def run(self) -> None:
        """Answer servers to the end."""
        now = self._coordination
        async with self._serving(now.cloud.servers * now.payload_bytes) as port:
            self._tell(Event("listening", f"port {port}, {now.done} of {now.recipe.rounds} rounds done"))
            if now.cloud.first == 1 < now.cloud.servers:
                self._tell(Event("warning", f"cloud.first = {ALONE}"))
            await self._until(lambda: now.begun or now.is_behind)
            while not now.finished:
                await self._within(0.2, lambda: now.finished)
                await self._watch()
            self._notify()
            self._tell(Event("finished", f"{now.done} rounds"))
            await self._until(self._alone)

    async def _watch(self) -> None:
        """Notice who has given no sign of life for too long; and do what a full disk kept from being done."""
        now = self._coordination
        if now.is_behind:
            await self._heard(now.go_on, self._surely)
        alive = self._alive(now.section.server_timeout)
        for server in range(now.cloud.servers):
            if server not in alive and server not in now.gone | now.moves.out:
                self._tell(Event("gone", f"{cloud_name(server)}; it is not waited for", cloud_name(server)))
                await self._heard(lambda: now.lose(server), self._surely)  # noqa: B023 - awaited at once

    def _alone(self) -> bool:
        patience = max(PATIENCE, self._coordination.section.server_timeout)
        now = self._coordination
        return not self._alive(patience) - now.left - now.gone - now.moves.out

    def _allowed(self, identity: Identity, message: Message, part: Part) -> int:
        self._check_joined(identity, self._place(identity))
        return self._coordination.payload_bytes if isinstance(message, messages.Announce) else 0

    def _place(self, identity: Identity) -> int:
        """Return which of the recipe's servers somebody is, or refuse it."""
        identity.check_role("cloud")
        cloud = self._coordination.cloud
        server = place_of(identity.name, cloud)
        if server is None:
            names = f"{cloud_name(0)} to {cloud_name(cloud.servers - 1)}"
            raise Refused(Code.UNKNOWN_SERVER, f"{identity.name} is none of the recipe's servers, {names}")
        return server

    def _check_joined(self, identity: Identity, server: int) -> None:
        if server not in self._coordination.weights:
            raise Refused(Code.NOT_ENROLLED, f"{identity.name} did not join this run")
        if server in self._coordination.moves.out:
            raise Refused(Code.DROPPED, f"{identity.name} was dropped by an operator; others have its devices")

    async def _answer(self, identity: Identity, said: Said) -> Said:
        message, payload = said
        now = self._coordination
        if isinstance(message, messages.Status):
            identity.check_role("coordinator")
            return Said(messages.Report(), json.dumps(self._report()).encode())
        if isinstance(message, messages.Drop):
            identity.check_role("coordinator")
            return await self._dropped(message)
        server = self._place(identity)
        self._seen[server] = self._now()
        if isinstance(message, messages.Join):
            await self._heard(lambda: now.join(server, message))
            self._tell(Event("joined", identity.name, identity.name))
            return Said(messages.Joined())
        self._check_joined(identity, server)
        if server in now.gone:
            await self._heard(lambda: now.find(server))
            self._tell(Event("back", identity.name, identity.name))
        if isinstance(message, messages.Announce):
            return Said(messages.Accepted(before=await self._heard(lambda: now.announce(server, message, payload))))
        if isinstance(message, messages.Await):
            await self._within(now.section.heartbeat, lambda: now.follows(server, message.round))
            if not now.follows(server, message.round):
                return Said(messages.Wait())
            return await self._work(lambda: now.following(server, message.round))
        if isinstance(message, messages.Beat):
            at, ready, after = now.where(server)
            moved = now.moves.count(server)
            return Said(messages.Alive(open=not now.finished, moved=moved, at=at, ready=ready, after=after))
        if isinstance(message, messages.Adopt):
            return Said(messages.Report(), json.dumps([asdict(group) for group in now.moves.of(server)]).encode())
        if isinstance(message, messages.Leave):
            await self._heard(lambda: now.leave(server))
            return Said(messages.Left())
        raise Refused(Code.UNKNOWN_KIND, f"a coordinator is not told {message.kind!r}")

    async def _dropped(self, message: messages.Drop) -> Said:
        """Go on without a server."""
        now = self._coordination
        named = {name: None if name is None else place_of(name, now.cloud) for name in (message.name, message.to)}
        for name, place in named.items():
            if name is not None and place is None:
                text = f"a coordinator has servers, {cloud_name(0)} to {cloud_name(now.cloud.servers - 1)}, and no"
                raise Refused(Code.UNKNOWN_SERVER, f"{text} {name[:100]}; a device is dropped at its server")
        server = named[message.name]
        if message.undo or server is None:
            raise Refused(Code.UNKNOWN_KIND, "a server that is out stays out; begin a new run")
        before = await self._heard(lambda: now.drop(server, named[message.to]))
        self._tell(Event("dropped", f"{message.name}; others have its devices"))
        return Said(messages.Dropped(before=before))

    async def _heard(self, task: Callable[[], T], work: Callable[[Callable[[], T]], Awaitable[T]] | None = None) -> T:
        """Do what may lead to a mix, and tell of it."""
        now, before = self._coordination, self._coordination.done
        told = len(now.diverged)
        result = await (work or self._work)(task)
        for round_, server in now.diverged[told:]:
            text = f"{cloud_name(server)} in round {round_ + 1}; its part is left out: the model would not be finite"
            self._tell(Event("diverged", text, cloud_name(server), round_))
        if now.done > before and now.last is not None:
            self._tell(Event("mixed", str(now.last), round=now.last.round))
        self._notify()
        return result

    def _gauges(self) -> list[Metric]:
        now = self._coordination
        names = {server: cloud_name(server) for server in range(now.cloud.servers)}
        stale = {names[server]: float(since) for server, since in now.staleness.copy().items()}
        versions = {name: float(now.round_of(server)) for server, name in names.items()}
        return [
            *run_gauges(now),
            gauge("servers_joined", "Servers that have joined.", len(now.weights)),
            gauge("servers_gone", "Servers that are not waited for.", len(now.gone)),
            gauge("servers_ready", "Servers that have handed in their round.", sum(map(now.is_waiting, names))),
            gauge("server_version", "Mixes that there were when a server began its round.", versions, "server"),
            gauge("server_staleness", "Mixes since a server had begun its round, at its last mix.", stale, "server"),
        ]

    def _report(self) -> dict[str, Any]:
        now = self._coordination
        return {
            **self._facts(now),
            "protocol": now.cloud.protocol,
            "first": now.cloud.first or now.cloud.servers,
            "servers": [self._server(server) for server in range(now.cloud.servers)],
        }

    def _server(self, server: int) -> dict[str, Any]:
        now = self._coordination
        return {
            "name": cloud_name(server),
            "joined": server in now.weights,
            "gone": server in now.gone,
            "dropped": server in now.moves.out,
            "version": now.round_of(server),
            "ready": now.is_waiting(server),
            "mixes": now.mixes[server],
            "staleness": now.staleness.get(server),
            "alone": now.isolated[server],
        }
