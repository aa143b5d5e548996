"""What a hostile device is made of: its certificates, its lines to a server, and the update that it owes.

It is a real client of the run, so that rounds wait for it: it trains as it should, keeps the good update back while it
attacks, and sends it afterwards. So every round must come to the bits of a run without any attack.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from personafl.deploy import pki
from personafl.deploy.device.training import LocalClient
from personafl.deploy.net.messages import (
    Code,
    Message,
    Part,
    Pull,
    Refusal,
    Refused,
    Task,
    Update,
    digest_of,
    header,
    parse,
)
from personafl.deploy.net.stream import CHUNK
from personafl.deploy.net.transport import Channel

METHOD = "/personafl.v1.Peer/Exchange"
SOON = 10.0  # seconds in which an attempt is answered, or is not


class Attack(NamedTuple):
    """An attempt; `expected` are the outcomes that are right, joined by |."""

    group: str
    name: str
    expected: str
    attempt: Callable[[Hostile], Awaitable[str]]
    open: bool = False  # it needs an open round, so the good update is sent only after it
    seconds: float = 0.0  # for which it goes on; 0: as the driver has it


@dataclass
class Hostile:
    """A client of the run that attacks its server."""

    name: str  # in its certificate
    port: int
    pki: Path
    client: LocalClient
    good: Update | None = None  # of the open round
    payload: bytes = b""
    before: tuple[Update, bytes] | None = None  # of the round before
    lines: dict[str, Any] = field(default_factory=dict)  # raw channels, by certificate

    def __post_init__(self) -> None:
        self.line = self.honest(self.name)

    def files(self, name: str) -> pki.Files:
        return pki.Files.beside(self.pki / f"{name}.pem")

    def honest(self, name: str) -> Channel:
        """Return a channel as devices have them."""
        return Channel(f"localhost:{self.port}", self.files(name), lambda kind: 2**28)

    def channel(self, name: str, *options: tuple[str, Any]) -> Any:
        """Return a gRPC channel that bounds nothing."""
        import grpc

        files = self.files(name)
        parts = (path.read_bytes() for path in (files.authority, files.key, files.certificate))
        unbounded = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        return grpc.aio.secure_channel(
            f"localhost:{self.port}", grpc.ssl_channel_credentials(*parts), options=[*unbounded, *options]
        )

    async def exchange(self, frames: Iterable[bytes], who: str | None = None, **options: Any) -> str:
        """Send frames as one message, and return what is answered: a refusal's code, a kind, or gRPC's own code."""
        import grpc

        name = who or self.name
        if name not in self.lines:
            self.lines[name] = self.channel(name)
        call = self.lines[name].stream_stream(METHOD)(timeout=SOON, **options)
        try:
            try:
                for frame in frames:
                    await call.write(frame)
                await call.done_writing()
            except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
                pass  # it may have answered before the end
            reply = await call.read()
            return outcome(reply) if reply is not grpc.aio.EOF else coded(await call.code())
        except grpc.aio.AioRpcError as error:
            return coded(error.code())
        except grpc._cython.cygrpc.ExecuteBatchError:
            return "call ended"
        finally:
            call.cancel()

    async def say(self, message: Message, payload: bytes = b"", who: str | None = None, **part: Any) -> str:
        """Send a message, of whose payload's description anything may be changed."""
        if not payload and not part:
            return await self.exchange([header(message)], who)
        about = {"size": len(payload), "digest": digest_of(payload), "offset": 0, **part}
        chunks = [payload[start : start + CHUNK] for start in range(0, len(payload), CHUNK)]
        return await self.exchange([header(message, Part(**about)), *chunks], who)

    async def owe(self) -> None:
        """Wait for the next round, and train for it."""
        if self.good is not None:
            self.before = (self.good, self.payload)
        said = await self.line.ask(Pull(returning=self.client.state.known))
        while not isinstance(said.message, Task):
            said = await self.line.ask(Pull(returning=self.client.state.known))
        self.client.train(said.message.round, said.message.model, said.payload)
        pending = self.client.state.pending
        assert pending is not None
        self.good = Update(round=pending.round, model=pending.model, samples=self.client.samples)
        self.payload = pending.update

    async def settle(self) -> None:
        """Send the update that it owes; a round that does not wait for whoever sends bad numbers may be over."""
        assert self.good is not None
        try:
            await self.line.ask(self.good, self.payload)
            self.client.state.accepted()
        except Refused as refused:
            if refused.code is not Code.ROUND_CLOSED:
                raise
            self.client.state.refused()

    async def close(self) -> None:
        for line in self.lines.values():
            await line.close()
        await self.line.close()

    # Below gRPC

    def context(self, name: str | None) -> ssl.SSLContext:
        """Return how a TLS client with a certificate, or without one, shakes hands."""
        made = ssl.create_default_context(cafile=str(self.pki / "ca.pem"))
        if name is not None:
            made.load_cert_chain(self.files(name).certificate, self.files(name).key)
        made.set_alpn_protocols(["h2"])
        return made

    @contextlib.asynccontextmanager
    async def sockets(self, count: int, name: str | None = "") -> AsyncIterator[list[Wire]]:
        """Open connections, TLS ones unless the name is empty; as many as are let in."""
        given = {} if name == "" else {"ssl": self.context(name), "server_hostname": "localhost"}
        wires: list[Wire] = []

        async def connect() -> None:
            with contextlib.suppress(OSError, TimeoutError, ssl.SSLError):
                async with asyncio.timeout(SOON):
                    wires.append(Wire(*await asyncio.open_connection("127.0.0.1", self.port, **given)))  # type: ignore[arg-type]

        try:
            for start in range(0, count, 50):
                await asyncio.gather(*(connect() for _ in range(min(50, count - start))))
            yield wires
        finally:
            for wire in wires:
                wire.writer.transport.abort()
            await asyncio.sleep(0)


class Wire(NamedTuple):
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> bool:
        """Write bytes; return whether the other side still takes them."""
        try:
            self.writer.write(data)
            async with asyncio.timeout(SOON):
                await self.writer.drain()
        except (OSError, TimeoutError):
            return False
        return True

    async def closed(self) -> bool:
        """Wait a little for the other side to hang up."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                while await self.reader.read(2**16):
                    pass
            return True
        return False


def coded(code: Any) -> str:
    """Return the name of a code of gRPC; a server that has answered before all was sent ends the call."""
    return "call ended" if code.name in ("INTERNAL", "CANCELLED") else str(code.name)


def outcome(frame: bytes) -> str:
    """Return what a reply says: its kind, or the code of a refusal."""
    try:
        message, _ = parse(frame)
    except Refused as refused:
        return f"an answer that is {refused.code}"
    return str(message.code) if isinstance(message, Refusal) else message.kind


# HTTP/2 by hand

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return an HTTP/2 frame."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def settings(*pairs: tuple[int, int]) -> bytes:
    return frame(4, 0, 0, b"".join(key.to_bytes(2, "big") + value.to_bytes(4, "big") for key, value in pairs))


def request(stream: int, *more: tuple[str, str], path: str = METHOD) -> bytes:
    """Return the HEADERS of a gRPC call, whose names and values are spelled out."""
    fields = [(":method", "POST"), (":scheme", "https"), (":path", path), (":authority", "localhost")]
    fields += [("content-type", "application/grpc"), ("te", "trailers"), *more]
    packed = b"".join(b"\x00" + b"".join(bytes([len(word)]) + word.encode() for word in pair) for pair in fields)
    return frame(1, 4, stream, packed)


def data(stream: int, message: bytes, end: bool = True, length: int | None = None, squeezed: int = 0) -> bytes:
    """Return the DATA of a gRPC message; its prefix may lie about the length."""
    prefix = bytes([squeezed]) + (len(message) if length is None else length).to_bytes(4, "big")
    return frame(0, int(end), stream, prefix + message)
