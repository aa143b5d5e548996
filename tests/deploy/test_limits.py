"""How much of a server one peer may take: connections, calls, time, places for payloads; and what is read anew."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from deploy_harness import answering, channel, loopback
from processes import recipe_of
from test_crash import driven

from personafl.deploy import pki
from personafl.deploy.device.device import DeviceConfig, run_device
from personafl.deploy.net import callers, listening, renewal, transport
from personafl.deploy.net.identity import Identity
from personafl.deploy.net.messages import (
    Accepted,
    Code,
    Hello,
    Leave,
    Message,
    Part,
    Pull,
    Refusal,
    Refused,
    Said,
    Status,
    Task,
    Update,
    Wait,
    digest_of,
    header,
    parse,
)
from personafl.deploy.net.stream import CHUNK
from personafl.errors import BadInput

ASK, DIGEST = Pull(returning=False), "0" * 64
GOOD = Update(round=0, model=DIGEST, samples=5)


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    pki.init(tmp_path / "pki")
    return tmp_path / "pki"


def options(monkeypatch: pytest.MonkeyPatch, **changes: int) -> None:
    """Change what gRPC is told: shorter times."""
    kept = [(name, value) for name, value in listening._OPTIONS if name.removeprefix("grpc.") not in changes]
    changed = [(f"grpc.{name}", value) for name, value in changes.items()]
    monkeypatch.setattr(listening, "_OPTIONS", [*kept, *changed])


@contextlib.asynccontextmanager
async def raw(port: int, files: pki.Files, **call: Any) -> AsyncIterator[Any]:
    """Give a call of a client that says what it likes."""
    credentials = grpc.ssl_channel_credentials(
        files.authority.read_bytes(), files.key.read_bytes(), files.certificate.read_bytes()
    )
    sizes = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.secure_channel(f"localhost:{port}", credentials, options=sizes) as line:
        yield line.stream_stream("/personafl.v1.Peer/Exchange")(**call)


async def answered(call: Any) -> Message:
    return parse(await call.read())[0]


async def refusal(call: Any) -> Code:
    message = await answered(call)
    assert isinstance(message, Refusal)
    return message.code


async def until(holds: Callable[[], object]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


def hung_up(line: socket.socket) -> bool:
    try:
        return line.recv(1, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


# Before anyone is known


def test_connections_that_say_nothing_leave_room_for_files_and_for_devices(
    authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 1,100 of them, a server used up its file descriptors, and ended when it was to write a checkpoint."""
    files = pki.issue(authority, "device-1")
    options(monkeypatch, server_handshake_timeout_ms=500)
    both = len({found[4][0] for found in socket.getaddrinfo("localhost", None)})
    monkeypatch.setattr(listening, "_FILES", len(os.listdir("/dev/fd")) + listening._RESERVE + both * 20)

    async def flooded() -> None:
        async with answering(authority) as port:
            flood = [socket.create_connection(("localhost", port)) for _ in range(100)]
            for one in flood[::2]:
                with contextlib.suppress(OSError):  # it may be hung up on already
                    one.send(b"\x16\x03\x01\x02\x00\x01")  # how a handshake begins
            await until(lambda: sum(map(hung_up, flood)) >= 80)
            async with channel(port, files) as line:
                assert (await line.ask(ASK)).payload == b"device-1:"
            await until(lambda: all(map(hung_up, flood)))
            for one in flood:
                one.close()

    asyncio.run(flooded())


@pytest.mark.system
def test_a_run_ends_well_among_more_connections_than_the_server_may_have_files() -> None:
    (found,) = driven("bare", "600", "200")
    assert found["rounds"] == 6
    assert found["most_files"] < 200


def test_a_process_that_may_open_too_few_files_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_FILES", 64)
    with pytest.raises(BadInput, match="ulimit"):
        listening._connections("localhost:0")


def test_a_connection_without_a_call_is_ended(authority: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = pki.issue(authority, "device-1")
    options(monkeypatch, max_connection_idle_ms=300)

    async def idle() -> None:
        async with answering(authority) as port, channel(port, files) as line:
            await line.ask(ASK, tries=1)
            await until(lambda: line._channel.get_state() is not grpc.ChannelConnectivity.READY)
            await line.ask(ASK)  # nobody notices

    asyncio.run(idle())


# Who is known


def test_a_compressed_message_is_refused(authority: Path) -> None:
    """A megabyte of it may be a thousand of memory."""
    files = pki.issue(authority, "device-1")
    heard: list[Said] = []

    async def handle(identity: Identity, said: Said) -> Said:
        heard.append(said)
        return Said(Wait())

    async def bomb() -> None:
        async with (
            answering(authority, handle) as port,
            raw(port, files, compression=grpc.Compression.Gzip) as call,
        ):
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(header(ASK) + b" " * 2**24)
                await call.done_writing()
            assert await call.code() is not grpc.StatusCode.OK

    asyncio.run(bomb())
    assert heard == []


def test_who_sends_no_header_does_not_hold_a_call(authority: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = pki.issue(authority, "device-1")
    monkeypatch.setattr(listening, "_HEADER_SECONDS", 0.2)

    async def silent() -> None:
        async with answering(authority) as port:
            async with raw(port, files) as call:
                assert await refusal(call) is Code.INCOMPLETE
            async with raw(port, files) as call:
                await call.write(header(ASK))  # and does not say that this is all
                assert await refusal(call) is Code.INCOMPLETE

    asyncio.run(silent())


def test_who_does_not_read_the_answer_does_not_hold_a_call(authority: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = pki.issue(authority, "device-1")
    large, over, converse = bytes(64 * CHUNK), asyncio.Event(), listening._Answers._converse

    async def noted(*given: Any) -> None:
        try:
            await converse(*given)
        finally:
            over.set()

    monkeypatch.setattr(listening, "CALL_SECONDS", 1.0)
    monkeypatch.setattr(listening._Answers, "_converse", noted)

    async def handle(identity: Identity, said: Said) -> Said:
        return Said(Task(round=0, model=DIGEST), large)

    async def reading() -> None:
        async with answering(authority, handle) as port, raw(port, files) as call:
            await call.write(header(ASK))
            await call.done_writing()
            await call.read()
            await over.wait()  # on the other side
            while await call.read() is not grpc.aio.EOF:
                pass

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        asyncio.run(reading())
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_an_identity_has_so_many_calls_and_another_its_own(authority: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    greedy, honest = (pki.issue(authority, f"device-{number}") for number in (1, 2))
    waiting = asyncio.Event()
    monkeypatch.setattr(callers, "_PAUSE", 0.01)

    async def handle(identity: Identity, said: Said) -> Said:
        if identity.name == "device-1":
            await waiting.wait()
        return Said(Wait())

    async def many() -> list[Message | BaseException]:
        refusals: list[Any] = []
        async with answering(authority, handle, refusals=refusals) as port, contextlib.AsyncExitStack() as stack:
            lines = [await stack.enter_async_context(channel(port, greedy)) for _ in range(callers.AT_ONCE + 4)]
            asked = [asyncio.create_task(line.ask(ASK, tries=1)) for line in lines]
            await until(lambda: len(refusals) == 4)
            async with channel(port, honest) as line:
                await line.ask(ASK, tries=1)
            waiting.set()
            found = await asyncio.gather(*asked, return_exceptions=True)
        assert refusals == [("device-1", Code.BUSY)] * 4
        return [answer if isinstance(answer, BaseException) else answer.message for answer in found]

    assert Counter(map(type, asyncio.run(many()))) == {Wait: callers.AT_ONCE, transport.Unreachable: 4}


def test_who_calls_too_often_waits() -> None:
    caller = callers._Caller()
    delays = [caller.delay(1000.0) for _ in range(callers.BURST + 50)]
    assert delays[: callers.BURST] == [0.0] * callers.BURST
    assert delays[-1] == pytest.approx(50 / callers.RATE)
    assert caller.delay(2000.0) == 0.0


def test_who_is_answered_much_waits_sooner() -> None:
    """A knock is answered with a recipe, which may have 256 kB: as much work as 16 calls more."""

    async def knocks() -> float:
        known, now = callers.Callers(), asyncio.get_running_loop().time()
        for _ in range(10):
            async with known.calling("device-1"):
                known.weigh("device-1", 2**18)
        return known._of["device-1"].due - now

    with pytest.MonkeyPatch.context() as patch:
        waited: list[float] = []

        async def sleep(seconds: float) -> None:
            waited.append(seconds)

        patch.setattr(callers.asyncio, "sleep", sleep)
        ahead = asyncio.run(knocks())
    assert ahead == pytest.approx((10 * 17 - callers.BURST) / callers.RATE, abs=0.5)
    assert len(waited) == 4  # the first six were within what may come at once


# Payloads


def test_only_who_may_send_a_payload_has_it_read(tmp_path: Path) -> None:
    """Sixteen certificates that were not even enrolled held all places for payloads."""

    async def tried() -> None:
        recipe = recipe_of("fedavg", 2, {"devices": 3})  # so that it does not begin
        async with loopback(recipe, tmp_path) as (made, _):
            port = made.port

            async def code(name: str, message: Message, size: int = 1000) -> Code:
                part = Part(size=size, digest=DIGEST, offset=0)
                async with raw(port, made.files(name)) as call:
                    await call.write(header(message, part))  # and not a byte of it: the answer does not wait for one
                    return await refusal(call)

            hello = Hello(samples=5, input_shape=[1, 8, 8], classes=10)
            assert await code("device-9", GOOD) is Code.NOT_ENROLLED
            assert await code("device-9", Hello(samples=5, input_shape=[1], classes=10)) is Code.OTHER_DATA
            assert await code("device-9", ASK) is Code.TOO_LARGE
            assert await code("coordinator", GOOD) is Code.WRONG_ROLE
            async with channel(port, made.files("device-9")) as line:
                await line.ask(hello)
            assert await code("device-9", GOOD) is Code.WRONG_ROUND
            assert await code("device-9", hello, 2**30) is Code.TOO_LARGE

    asyncio.run(tried())


def test_who_is_refused_while_it_sends_hears_why(authority: Path) -> None:
    files, payload = pki.issue(authority, "device-1"), bytes(20 * CHUNK)

    def closed(*_: object) -> int:
        raise Refused(Code.ROUND_CLOSED, "round 1 is over")

    async def late() -> None:
        async with answering(authority, allowed=closed) as port, channel(port, files) as line:
            for _ in range(10):
                with pytest.raises(Refused) as caught:
                    await line.ask(GOOD, payload, tries=1)
                assert caught.value.code is Code.ROUND_CLOSED

    asyncio.run(late())


def test_a_device_whose_address_changed_goes_on_at_once(authority: Path) -> None:
    """Its old connection looks alive to the server; it held the device's place for two minutes."""
    files, payload = pki.issue(authority, "device-1"), bytes(range(256)) * (3 * CHUNK // 256)
    first = header(GOOD, Part(size=len(payload), digest=digest_of(payload), offset=0))

    async def moved() -> bytes:
        refusals: list[Any] = []
        async with answering(authority, refusals=refusals) as port, raw(port, files) as old:
            await old.write(first)
            await old.write(payload[:CHUNK])
            async with channel(port, files) as line:
                said = await line.ask(GOOD, payload, tries=1)
            assert await refusal(old) is Code.BUSY
            assert refusals == [("device-1", Code.BUSY)]
            return said.payload

    assert asyncio.run(moved()) == b"device-1:" + payload


@pytest.mark.parametrize("what", ["revoked", "ended"])
def test_who_loses_its_certificate_while_it_sends_is_refused(
    what: str, authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, payload = pki.issue(authority, "device-1"), bytes(1000)
    accepted: list[str] = []

    async def handle(identity: Identity, said: Said) -> Said:
        accepted.append(identity.name)
        return Said(Accepted(before=False))

    async def sending() -> Code:
        begun = asyncio.Event()

        def allowed(*_: object) -> int:
            begun.set()
            return 2**20

        async with answering(authority, handle, allowed=allowed) as port, raw(port, files) as call:
            await call.write(header(GOOD, Part(size=1000, digest=digest_of(payload), offset=0)))
            await begun.wait()
            if what == "revoked":
                pki.revoke(authority, "device-1")
            else:
                later = clock(timedelta(days=365))
                monkeypatch.setattr("personafl.deploy.net.identity.datetime", later)
            await call.write(payload)
            await call.done_writing()
            return await refusal(call)

    assert asyncio.run(sending()) is (Code.REVOKED if what == "revoked" else Code.EXPIRED)
    assert accepted == []


def clock(ahead: timedelta) -> Any:
    """Return a `datetime` that is ahead of ours."""

    class Later(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.now(tz) + ahead

    return Later


# Certificates that are renewed, or end


def test_a_server_shows_its_renewed_certificate_without_a_restart(authority: Path) -> None:
    """It has ended for newcomers, who are told; and once its files are replaced they get in."""
    files = pki.issue(authority, "device-1")
    retries: list[str] = []

    async def renewed() -> None:
        async with answering(authority) as port:
            address = f"localhost:{port}"
            pki.issue(authority, "server", lifetime=timedelta(days=-1))
            ended = transport.Channel(address, files, lambda kind: 2**20, retries.append)
            asked = asyncio.create_task(ended.ask(ASK))
            await until(lambda: retries)
            assert not asked.done()
            (authority / "server.key").write_bytes(files.key.read_bytes())  # half a renewal, and of another
            async with channel(port, files) as line:
                with pytest.raises(transport.Unreachable):
                    await line.ask(ASK, tries=1)
            pki.issue(authority, "server")
            assert (await asked).payload == b"device-1:"
            await ended.close()

    asyncio.run(renewed())
    assert "the server's certificate has ended" in retries[0]


def test_a_device_takes_its_renewed_certificate_on_an_open_channel(authority: Path) -> None:
    first = pki.issue(authority, "device-1")
    serials: list[int] = []

    async def handle(identity: Identity, said: Said) -> Said:
        serials.append(identity.serial)
        return Said(Wait())

    async def asked() -> None:
        async with answering(authority, handle) as port, channel(port, first) as line:
            await line.ask(ASK, tries=1)
            pki.issue(authority, "device-1")
            await line.ask(ASK, tries=1)
            await line.ask(ASK, tries=1)

    asyncio.run(asked())
    assert serials[0] != serials[1] == serials[2]


def test_an_ended_certificate_is_named_on_the_device(authority: Path, tmp_path: Path) -> None:
    ended = pki.issue(authority, "device-7", lifetime=timedelta(days=-1))
    config = DeviceConfig(server="localhost:1", data="no", state=tmp_path, files=ended)
    with pytest.raises(BadInput, match=r"device-7\.pem: the certificate of device-7 ended on 20..-..-.. .*pki issue"):
        asyncio.run(run_device(config, lambda text: None))


@pytest.mark.parametrize(("days", "said"), [(80, None), (82, "ends on"), (91, "ended on")])
def test_a_certificate_is_warned_of_in_the_last_tenth_of_its_life(
    days: int, said: str | None, authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = renewal.Own(pki.issue(authority, "device-1"))
    monkeypatch.setattr(renewal, "datetime", clock(timedelta(days=days)))
    found = own.ending()
    assert (found is None) if said is None else (found is not None and f"of device-1 {said}" in found)


def test_a_server_and_a_device_warn_of_the_end_when_they_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewal, "datetime", clock(timedelta(days=82)))

    async def warned() -> None:
        async with loopback(recipe_of("fedavg", 1, rounds=1), tmp_path) as (made, server):
            assert "the certificate of server ends on" in next(e.text for e in made.events if e.what == "ending")
            await made.device(made.names[0])
            await server
            assert "the certificate of device-0 ends on" in made.said[0]

    asyncio.run(warned())


def test_status_is_for_coordinators(tmp_path: Path) -> None:
    async def asked() -> None:
        async with loopback(recipe_of("fedavg", 2), tmp_path) as (made, _):
            assert (await transport.ask_status(f"localhost:{made.port}", made.files("coordinator")))["done"] == 0
            async with channel(made.port, made.files("device-1")) as line:
                with pytest.raises(Refused) as caught:
                    await line.ask(Status(), tries=1)
                assert caught.value.code is Code.WRONG_ROLE
                with pytest.raises(Refused):
                    await line.ask(Leave(), tries=1)

    asyncio.run(asked())
