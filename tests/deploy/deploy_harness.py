"""A server and devices in one process, over real sockets with real certificates."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from personafl.deploy import pki
from personafl.deploy.device.dealing import deal
from personafl.deploy.device.device import DeviceConfig, run_device
from personafl.deploy.device.policy import Policy
from personafl.deploy.net.identity import Identity, Revocations, identify
from personafl.deploy.net.listening import serve
from personafl.deploy.net.messages import Message, Part, Report, Said
from personafl.deploy.net.transport import Channel
from personafl.deploy.server.rounds import Rounds
from personafl.deploy.server.server import ServerConfig, run_server
from personafl.deploy.server.service import Event
from personafl.deploy.server.summingserver import run_summing_server
from personafl.recipe.recipe import Recipe

__all__ = ["Loopback", "answering", "channel", "identity_of", "loopback"]


def identity_of(folder: Path, name: str) -> Identity:
    """Issue a certificate, and return who holds it."""
    return identify(pki.issue(folder, name).certificate.read_bytes())


@dataclass
class Loopback:
    """A run in a folder: certificates, dealt data, a server, and devices that are started one by one."""

    recipe: Recipe
    folder: Path
    port: int = 0
    events: list[Event] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        pki.init(self.folder / "pki")
        pki.issue(self.folder / "pki", "server")
        self.recipe, files = deal(self.recipe, self.folder / "dealt")
        self.names = [file.stem for file in files]

    def files(self, name: str) -> pki.Files:
        return pki.issue(self.folder / "pki", name)

    async def serve(self, **changes: Any) -> Rounds:
        config = ServerConfig(
            recipe=self.recipe,
            out=self.folder / "run",
            files=pki.Files.beside(self.folder / "pki" / "server.pem"),
            revocations=self.folder / "pki" / "revoked.pem",
            listen=f"localhost:{self.port}",
            **changes,
        )
        served = run_server if self.recipe.secure is None else run_summing_server
        return await served(config, self._heard)

    def _heard(self, event: Event) -> None:
        self.events.append(event)
        if event.what == "listening":
            self.port = int(event.text.split()[1].strip(","))

    async def device(
        self, name: str, profile: str | None = None, data: str | None = None, policy: Policy | None = None
    ) -> None:
        config = DeviceConfig(
            server=f"localhost:{self.port}",
            data=data or str(self.folder / "dealt" / f"{name}.safetensors"),
            state=self.folder / "devices" / name,
            files=self.files(name),
            profile=profile,
            policy=policy or Policy(),
        )
        await run_device(config, lambda text: self.said.append(f"{name}: {text}"))

    async def until(self, what: str, count: int = 1) -> None:
        """Wait until the server has reported something so often."""
        while sum(event.what == what for event in self.events) < count:
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def loopback(
    recipe: Recipe, folder: Path, **changes: Any
) -> AsyncIterator[tuple[Loopback, asyncio.Task[Rounds]]]:
    """Start a server, and end it with the block if it has not ended."""
    made = await asyncio.to_thread(Loopback, recipe, folder)
    server = asyncio.create_task(made.serve(**changes))
    listening = asyncio.create_task(made.until("listening"))
    await asyncio.wait([server, listening], return_when=asyncio.FIRST_COMPLETED)
    if server.done():
        await server
    try:
        yield made, server
    finally:
        if not server.done():
            server.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await server


@contextlib.asynccontextmanager
async def answering(
    folder: Path,
    handle: Callable[[Identity, Said], Awaitable[Said]] | None = None,
    cap: int = 2**22,
    budget: int = 2**24,
    refusals: list[Any] | None = None,
    allowed: Callable[[Identity, Message, Part], int] | None = None,
    port: int = 0,
) -> AsyncIterator[int]:
    """Serve a handler, by default one that returns the payload and who sent it, at a port."""

    async def echo(identity: Identity, said: Said) -> Said:
        return Said(Report(), identity.name.encode() + b":" + said.payload)

    files = pki.issue(folder, "server")
    server, port = await serve(
        f"localhost:{port}",
        files,
        Revocations(folder / "revoked.pem", files.authority),
        handle or echo,
        allowed=allowed or (lambda identity, message, part: cap),
        budget=budget,
        on_refusal=lambda who, refused: None if refusals is None else refusals.append((who, refused.code)),
    )
    try:
        yield port
    finally:
        await server.stop(grace=None)


@contextlib.asynccontextmanager
async def channel(port: int, files: pki.Files, cap: int = 2**23) -> AsyncIterator[Channel]:
    made = Channel(f"localhost:{port}", files, lambda kind: cap)
    try:
        yield made
    finally:
        await made.close()
