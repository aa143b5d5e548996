"""Attacks by how one connects, and as whom: sockets, TLS, HTTP/2, and certificates that are not right."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from assault import METHOD, PREFACE, SOON, Attack, Hostile, Wire, coded, data, frame, outcome, request, settings
from assault_messages import NEWCOMER

from personafl.deploy import pki
from personafl.deploy.net.messages import Knock, Part, Pull, digest_of, header
from personafl.deploy.net.transport import Channel, Unreachable

STRANGERS = [f"device-{number}" for number in range(100, 120)]  # valid, and not enrolled
STRANGER = STRANGERS[0]
ENDED, TAKEN, NAMELESS = "device-80", "device-eve", "stranger-1"


def prepare(folder: Path) -> None:
    """Issue what the attacks need besides the certificates of a cluster."""
    here = folder / "pki"
    for name in (NEWCOMER, "cloud-0", "cloud-7", *STRANGERS):
        pki.issue(here, name)
    pki.issue(here, ENDED, lifetime=timedelta(days=-1))
    number, role = pki._Authority.number_for, pki.role_of
    try:
        pki._Authority.number_for = lambda *_: 0  # type: ignore[method-assign]
        pki.issue(here, TAKEN)
        pki.role_of = lambda name: "device"  # type: ignore[assignment]
        pki.issue(here, NAMELESS)
    finally:
        pki._Authority.number_for, pki.role_of = number, role  # type: ignore[method-assign]
    pki.init(folder / "other")
    pki.issue(folder / "other", "device-3")


def connections() -> list[Attack]:
    """Sockets that say nothing, little, or too much."""

    def held(
        count: int, name: str | None = "", *sent: bytes, seconds: float = 1.0
    ) -> Callable[[Hostile], Awaitable[str]]:
        async def attempt(hostile: Hostile) -> str:
            async with hostile.sockets(count, name) as wires:
                for piece in sent:
                    await asyncio.gather(*(wire.send(piece) for wire in wires))
                await asyncio.sleep(seconds)
            return "endured"

        return attempt

    def once(*sent: bytes, name: str | None = STRANGER, wait: bool = True) -> Callable[[Hostile], Awaitable[str]]:
        async def attempt(hostile: Hostile) -> str:
            async with hostile.sockets(1, name) as wires:
                for wire in wires:
                    for piece in sent:
                        if not await wire.send(piece):
                            return "hung up"
                    return "hung up" if wait and await wire.closed() else "endured"
            return "not let in"

        return attempt

    hello, start, either = _client_hello(), PREFACE + settings(), "endured|hung up|not let in"
    knock = header(Knock())
    listed: list[tuple[str, Callable[[Hostile], Awaitable[str]], float]] = [
        ("1,100 connections without a byte", held(1100, seconds=3.0), 5.0),
        ("300 connections with half a TLS hello", held(300, "", hello[: len(hello) // 2], seconds=3.0), 4.0),
        ("300 connections that stop after the TLS hello", held(300, "", hello, seconds=3.0), 4.0),
        ("100 TLS hellos, a byte at a time", _slowly(100, hello), 4.0),
        ("200 connections without a certificate", held(200, None, seconds=2.0), 4.0),
        ("200 connections that say nothing after the handshake", held(200, STRANGER, seconds=2.0), 4.0),
        ("200 connections that stop after HTTP/2 has begun", held(200, STRANGER, start, seconds=2.0), 4.0),
        ("20 connections each of 10 strangers", _strangers, 4.0),
        ("connections that are reset at once, 100 at a time", _reset, 2.0),
        ("handshakes that are reset in the middle", _reset_in_handshake(hello), 2.0),
        ("random bytes", once(random.Random(0).randbytes(2**16), name=""), 0.0),
        ("HTTP/1.1 in the clear", once(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", name=""), 0.0),
        ("another protocol's greeting", once(b"SSH-2.0-OpenSSH_9.7\r\n", name=""), 0.0),
        ("HTTP/2 in the clear", once(start, name=""), 0.0),
        ("a TLS record of 64 kB", once(b"\x16\x03\x01\xff\xff" + b"\x01" * 65535, name=""), 0.0),
        ("HTTP/1.1 over TLS", once(b"POST / HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n"), 0.0),
        ("bytes that are no HTTP/2", once(PREFACE + random.Random(1).randbytes(2**14)), 0.0),
        ("a frame of 16 MB announced", once(start + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01"), 0.0),
        ("10,000 settings", once(start + settings((3, 100)) * 10_000, wait=False), 0.0),
        ("100,000 pings", once(start + frame(6, 0, 0, b"12345678") * 100_000, wait=False), 0.0),
        ("a window beyond 2^31", once(start + frame(8, 0, 0, b"\x7f\xff\xff\xff") * 2), 0.0),
        ("5,000 calls that are reset at once", once(start + _resets(5000), wait=False), 0.0),
        ("5,000 calls on one connection without a message", once(start + _calls(5000), wait=False), 2.0),
        ("2,000 calls that never send a whole message", _unfinished(2000), 3.0),
        (
            "headers that never end",
            once(start + frame(1, 0, 1, b"\x00\x01a\x01b") + frame(9, 0, 1, b"\x00\x01a\x7f" + b"b" * 127) * 5000),
            0.0,
        ),
        ("headers of 60 kB", once(start + _heavy(1, 500)), 0.0),
        ("headers that are no HPACK", once(start + frame(1, 4, 1, b"\xff" * 100)), 0.0),
        ("data of a call that was not begun", once(start + data(99, knock)), 0.0),
        ("a message of 4 GB announced", once(start + request(1) + data(1, knock, False, 2**32 - 1), wait=False), 0.0),
        (
            "a message that says it is compressed, and is not",
            once(start + request(1, ("grpc-encoding", "gzip")) + data(1, knock, squeezed=1), wait=False),
            0.0,
        ),
        (
            "a message compressed in an unknown way",
            once(start + request(1, ("grpc-encoding", "zip")) + data(1, knock, squeezed=1), wait=False),
            0.0,
        ),
        (
            "a method that does not exist",
            once(start + request(1, path="/personafl.v1.Peer/Exec") + data(1, knock), wait=False),
            0.0,
        ),
        ("a path that climbs", once(start + request(1, path="/../../etc/passwd") + data(1, knock), wait=False), 0.0),
    ]
    return [
        *(Attack("connection", name, either, attempt, seconds=seconds) for name, attempt, seconds in listed),
        Attack("connection", "500 readers that read nothing", either, _deaf(500), open=True, seconds=3.0),
    ]


def large() -> list[Attack]:
    """Attacks that need a model of 12 MB: uploads that hold what there is room for, and slow readers."""
    return [
        Attack(
            "connection",
            "20 strangers' uploads of 12 MB, a byte a second",
            "endured|BUSY",
            _hoarding(STRANGERS),
            seconds=6.0,
        ),
        Attack(
            "connection",
            "an upload left half-way, and again from another connection",
            "accepted",
            _half_open,
            open=True,
        ),
        Attack(
            "connection", "100 readers of the broadcast that read nothing", "endured|hung up", _deaf(100), True, 5.0
        ),
        Attack("connection", "broadcasts asked for and dropped, 20 at a time", "endured", _dropped, True, 3.0),
    ]


def _client_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    made = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        made.do_handshake()
    return outgoing.read()


def _slowly(count: int, sent: bytes) -> Callable[[Hostile], Awaitable[str]]:
    async def attempt(hostile: Hostile) -> str:
        async with hostile.sockets(count) as wires:
            for place in range(30):
                await asyncio.gather(*(wire.send(sent[place : place + 1]) for wire in wires))
                await asyncio.sleep(0.1)
        return "endured"

    return attempt


async def _strangers(hostile: Hostile) -> str:
    async with contextlib.AsyncExitStack() as stack:
        for name in STRANGERS[:10]:
            for wire in await stack.enter_async_context(hostile.sockets(20, name)):
                await wire.send(PREFACE + settings())
        await asyncio.sleep(2.0)
    return "endured"


async def _reset(hostile: Hostile) -> str:
    for _ in range(100):
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.connect(("127.0.0.1", hostile.port))
    await asyncio.sleep(0.05)
    return "endured"


def _reset_in_handshake(hello: bytes) -> Callable[[Hostile], Awaitable[str]]:
    async def attempt(hostile: Hostile) -> str:
        async with hostile.sockets(50) as wires:
            for wire in wires:
                given = wire.writer.get_extra_info("socket")
                given.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                await wire.send(hello)
            await asyncio.sleep(0.05)
        return "endured"

    return attempt


def _resets(count: int) -> bytes:
    return b"".join(request(2 * n + 1) + frame(3, 0, 2 * n + 1, b"\x00\x00\x00\x08") for n in range(count))


def _calls(count: int) -> bytes:
    return b"".join(request(2 * n + 1) for n in range(count))


def _heavy(stream: int, count: int) -> bytes:
    more = b"".join(b"\x00" + b"\x06x-%04d" % n + b"\x70" + b"v" * 112 for n in range(count))
    first = request(stream)
    head = frame(1, 0, stream, first[9:])
    parts = [more[start : start + 16_000] for start in range(0, len(more), 16_000)]
    return head + b"".join(frame(9, 4 * (part is parts[-1]), stream, part) for part in parts)


def _unfinished(count: int) -> Callable[[Hostile], Awaitable[str]]:
    """Begin calls, a hundred per connection, each with half of a message."""

    async def attempt(hostile: Hostile) -> str:
        async with hostile.sockets(count // 100, STRANGER) as wires:
            for wire in wires:
                calls = b"".join(request(2 * n + 1) + data(2 * n + 1, b"{", False, 50) for n in range(100))
                await wire.send(PREFACE + settings() + calls)
            await asyncio.sleep(2.0)
        return "endured"

    return attempt


def _deaf(count: int) -> Callable[[Hostile], Awaitable[str]]:
    """Ask for the broadcast, and give the server no window to send it."""

    async def attempt(hostile: Hostile) -> str:
        pull = header(Pull(returning=False))
        each = min(count, 50)
        async with hostile.sockets(count // each, "device-3") as wires:
            for wire in wires:
                calls = b"".join(request(2 * n + 1) + data(2 * n + 1, pull) for n in range(each))
                await wire.send(PREFACE + settings((4, 0)) + calls)
            await asyncio.sleep(2.0)
        return "endured"

    return attempt


def _hoarding(names: list[str]) -> Callable[[Hostile], Awaitable[str]]:
    """Announce the largest upload with many certificates, and send next to nothing of it."""

    async def hoard(hostile: Hostile, name: str) -> None:
        import grpc

        about = Part(size=len(hostile.payload), digest=digest_of(name.encode()), offset=0)
        line = hostile.channel(name)
        call = line.stream_stream(METHOD)()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(header(hostile.good, about))  # type: ignore[arg-type]
            for _ in range(5):
                await call.write(b"x")
                await asyncio.sleep(1.0)
        call.cancel()
        await line.close()

    async def attempt(hostile: Hostile) -> str:
        await asyncio.gather(*(hoard(hostile, name) for name in names))
        return "endured"

    return attempt


async def _half_open(hostile: Hostile) -> str:
    """Leave an upload half-way, as when an address changes, and send it again elsewhere at once."""
    about = Part(size=len(hostile.payload), digest=digest_of(hostile.payload), offset=0)
    line = hostile.channel(hostile.name)
    call = line.stream_stream(METHOD)()
    await call.write(header(hostile.good, about))  # type: ignore[arg-type]
    await call.write(hostile.payload[: 2**19])
    await asyncio.sleep(0.3)
    again = hostile.honest(hostile.name)
    try:
        async with asyncio.timeout(SOON):
            assert hostile.good is not None
            said, _ = await again.ask(hostile.good, hostile.payload)
        return said.kind
    except TimeoutError:
        return "locked out"
    finally:
        call.cancel()
        await line.close()
        await again.close()


async def _dropped(hostile: Hostile) -> str:
    """Ask for broadcasts, and hang up before they have come."""
    line = hostile.channel(hostile.name)
    calls = [line.stream_stream(METHOD)() for _ in range(20)]

    async def ask(call: Any) -> None:
        with contextlib.suppress(Exception, asyncio.CancelledError):
            await call.write(header(Pull(returning=False)))
            await call.done_writing()

    asking = [asyncio.create_task(ask(call)) for call in calls]
    await asyncio.sleep(0.05)
    for call, task in zip(calls, asking, strict=True):
        call.cancel()
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    await line.close()
    return "endured"


def identities() -> list[Attack]:
    """Who is not who it should be."""
    out = "UNAVAILABLE|DEADLINE_EXCEEDED"

    def said(name: str) -> Callable[[Hostile], Awaitable[str]]:
        return lambda hostile: hostile.say(Knock(), b"", name)

    return [
        Attack("identity", "a certificate that has ended", out, _fresh(ENDED)),
        Attack("identity", "a certificate of another authority", out, _foreign),
        Attack("identity", "the certificate of a server, as a client", f"{out}|WRONG_ROLE", _fresh("server")),
        Attack("identity", "a name that is none", "BAD_CERTIFICATE", said(NAMELESS)),
        Attack("identity", "a number that is another device's", "NUMBER_TAKEN", lambda h: h.say(_hello(h), b"", TAKEN)),
        Attack("identity", "no certificate", out, _bare),
        Attack("identity", "no TLS", out, _plain),
        Attack("identity", "revoked in the middle of an upload", "REVOKED|ROUND_CLOSED", _revoked, open=True),
        Attack("identity", "a device that poses as the server", "not believed", _impostor),
    ]


def _hello(hostile: Hostile) -> Any:
    from personafl.deploy.net.messages import Hello

    return Hello(**hostile.client.hello)


def _fresh(name: str) -> Callable[[Hostile], Awaitable[str]]:
    async def attempt(hostile: Hostile) -> str:
        line = hostile.channel(name)
        try:
            return await _knocked(line)
        finally:
            await line.close()

    return attempt


async def _knocked(line: Any) -> str:
    import grpc

    call = line.stream_stream(METHOD)(timeout=2.0)
    try:
        with contextlib.suppress(asyncio.InvalidStateError):
            await call.write(header(Knock()))
            await call.done_writing()
        reply = await call.read()
        return outcome(reply) if reply is not grpc.aio.EOF else (await call.code()).name
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)


async def _foreign(hostile: Hostile) -> str:
    import grpc

    theirs = pki.Files.beside(hostile.pki.parent / "other" / "device-3.pem")
    ours = (hostile.pki / "ca.pem").read_bytes()
    credentials = grpc.ssl_channel_credentials(ours, theirs.key.read_bytes(), theirs.certificate.read_bytes())
    async with grpc.aio.secure_channel(f"localhost:{hostile.port}", credentials) as line:
        return await _knocked(line)


async def _bare(hostile: Hostile) -> str:
    import grpc

    credentials = grpc.ssl_channel_credentials((hostile.pki / "ca.pem").read_bytes())
    async with grpc.aio.secure_channel(f"localhost:{hostile.port}", credentials) as line:
        return await _knocked(line)


async def _plain(hostile: Hostile) -> str:
    import grpc

    async with grpc.aio.insecure_channel(f"localhost:{hostile.port}") as line:
        return await _knocked(line)


async def _revoked(hostile: Hostile) -> str:
    """Be revoked while a good update is on its way; then come back with a new certificate of the same name."""
    import grpc

    assert hostile.good is not None
    line, half = hostile.channel(hostile.name), len(hostile.payload) // 2
    call = line.stream_stream(METHOD)(timeout=SOON)
    about = Part(size=len(hostile.payload), digest=digest_of(hostile.payload), offset=0)
    try:
        await call.write(header(hostile.good, about))
        await call.write(hostile.payload[:half])
        await asyncio.sleep(0.1)
        pki.revoke(hostile.pki, hostile.name)
        with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            await call.write(hostile.payload[half:])
            await call.done_writing()
        reply = await call.read()
        return outcome(reply) if reply is not grpc.aio.EOF else coded(await call.code())
    except grpc.aio.AioRpcError as error:
        return coded(error.code())
    finally:
        call.cancel()
        await line.close()
        pki.issue(hostile.pki, hostile.name)
        for name in [name for name in hostile.lines if name == hostile.name]:
            await hostile.lines.pop(name).close()


async def _impostor(hostile: Hostile) -> str:
    import grpc

    own = hostile.files("device-3")
    server = grpc.aio.server()
    pair = (own.key.read_bytes(), own.certificate.read_bytes())
    port = server.add_secure_port("localhost:0", grpc.ssl_server_credentials([pair], own.authority.read_bytes(), True))
    await server.start()
    line = Channel(f"localhost:{port}", hostile.files(NEWCOMER), lambda kind: 2**20)
    try:
        await line.ask(Knock(), tries=1, timeout=2.0)
        return "believed"
    except Unreachable:
        return "not believed"
    finally:
        await line.close()
        await server.stop(grace=None)


__all__ = ["Wire", "connections", "identities", "large", "prepare"]
