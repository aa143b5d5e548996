"""Messages on the wire: strict headers, bounded payloads, and transfers that go on where they broke."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import pytest
from deploy_harness import answering, channel
from hypothesis import given
from hypothesis import strategies as st

from personafl.deploy import pki
from personafl.deploy.net import stream
from personafl.deploy.net.messages import (
    HEADER_BYTES,
    Code,
    Message,
    Part,
    Payload,
    Pull,
    Refused,
    Said,
    Task,
    Update,
    digest_of,
    header,
    parse,
)
from personafl.deploy.net.stream import CHUNK, Partials, frames, receive

DIGEST = "0" * 64
GOOD = Update(round=3, model=DIGEST, samples=5)


async def _each(pieces: list[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


def received(pieces: list[bytes], partials: Partials | None = None, cap: int = 2**23) -> tuple[Message, bytes]:
    message, _, payload = asyncio.run(receive(_each(pieces), "device-1", partials or Partials(2**30), lambda *_: cap))
    return message, payload


def refused(pieces: list[bytes], partials: Partials | None = None, cap: int = 2**23) -> Code:
    with pytest.raises(Refused) as caught:
        received(pieces, partials, cap)
    return caught.value.code


def changed(**values: Any) -> bytes:
    return json.dumps({**json.loads(header(GOOD)), **values}).encode()


@given(st.binary(max_size=3 * CHUNK // 1024), st.integers(0, 2**40))
def test_what_is_sent_arrives(payload: bytes, round_: int) -> None:
    said = Said(Task(round=round_, model=DIGEST), payload)
    assert received(list(frames(said))) == said


@pytest.mark.parametrize("chunk", [CHUNK, 2**17])
def test_a_payload_travels_in_chunks(chunk: int) -> None:
    """Of 128 kB if it is small, unless it is told otherwise; those of 1 MB, as version 0.1 sends, are taken as well."""
    payload = bytes(range(256)) * (5 * chunk // 512)
    pieces = list(frames(Said(GOOD, payload), chunk=chunk))
    assert [len(piece) for piece in pieces[1:]] == [chunk, chunk, chunk // 2]
    assert received(pieces) == (GOOD, payload)
    assert list(frames(Said(GOOD, payload))) == list(frames(Said(GOOD, payload), chunk=2**17))


@pytest.mark.parametrize(("size", "chunk"), [(2**20, 2**17), (2**23, 2**18), (2**25, 2**19)])
def test_a_large_payload_travels_in_larger_chunks(size: int, chunk: int) -> None:
    """Each takes processor time; but the largest also stays in memory, so that they are no more than 512 kB."""
    pieces = list(frames(Said(GOOD, Payload(size)), offset=chunk))
    assert {len(piece) for piece in pieces[1:]} == {chunk}
    assert len(pieces) == size // chunk


def test_small_chunks_are_put_together_as_they_come() -> None:
    """Or a payload in single bytes would take forty times its size."""
    partial = stream._Partial(Part(size=2**16, digest=DIGEST, offset=0))
    sent = [bytes([place % 256, 1]) for place in range(1000)] + [bytes(2**13)] + [b"abc"] * 500
    for chunk in sent:
        partial.add(chunk)
    assert [len(chunk) for chunk in partial.chunks] == [2000, 2**13, 1500]
    assert b"".join(partial.chunks) == b"".join(sent)
    assert partial.size == len(b"".join(sent))


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", Code.MALFORMED),
        (b"\x80\x04\x95", Code.MALFORMED),  # a pickle
        (b"[" * 10_000, Code.MALFORMED),
        (b"[]", Code.MALFORMED),
        (b"null", Code.MALFORMED),
        (b"{}", Code.BAD_VERSION),
        (changed(version=2), Code.BAD_VERSION),
        (changed(version="1"), Code.BAD_VERSION),
        (changed(kind="exec"), Code.UNKNOWN_KIND),
        (changed(kind=["update"]), Code.MALFORMED),
        (changed(extra=1), Code.MALFORMED),
        (changed(body={"round": 3, "model": DIGEST}), Code.MALFORMED),
        (changed(body={"round": 3, "model": DIGEST, "samples": 5, "who": "device-2"}), Code.MALFORMED),
        (changed(body={"round": "3", "model": DIGEST, "samples": 5}), Code.MALFORMED),
        (changed(body={"round": 3.5, "model": DIGEST, "samples": 5}), Code.MALFORMED),
        (changed(body={"round": True, "model": DIGEST, "samples": 5}), Code.MALFORMED),
        (changed(body={"round": -1, "model": DIGEST, "samples": 5}), Code.MALFORMED),
        (changed(body={"round": 2**60, "model": DIGEST, "samples": 5}), Code.MALFORMED),
        (changed(body={"round": 3, "model": "../../etc", "samples": 5}), Code.MALFORMED),
        (changed(payload={"size": -1, "digest": DIGEST, "offset": 0}), Code.MALFORMED),
        (b" " * (HEADER_BYTES + 1), Code.TOO_LARGE),
    ],
)
def test_a_header_that_is_not_exactly_a_message_is_refused(data: bytes, code: Code) -> None:
    assert refused([data]) is code


@given(st.binary(max_size=300) | st.text(max_size=300).map(str.encode))
def test_no_header_does_more_than_be_refused(data: bytes) -> None:
    with pytest.raises(Refused):
        parse(data)


def test_a_payload_is_refused_by_its_announced_size_before_it_is_read() -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield header(GOOD, Part(size=2**40, digest=DIGEST, offset=0))
        raise AssertionError("was read")

    with pytest.raises(Refused) as caught:
        asyncio.run(receive(endless(), "device-1", Partials(2**50), lambda *_: 2**20))
    assert caught.value.code is Code.TOO_LARGE


def test_more_or_other_bytes_than_announced_are_refused() -> None:
    part = Part(size=4, digest=digest_of(b"abcd"), offset=0)
    assert refused([header(GOOD, part), b"abc"]) is Code.INCOMPLETE
    assert refused([header(GOOD, part), b"abc", b"de"]) is Code.TOO_LARGE
    assert refused([header(GOOD, part), b"", b"abcd"]) is Code.TOO_LARGE
    assert refused([header(GOOD, part), b"abce"]) is Code.BAD_DIGEST
    assert refused([header(GOOD, part.model_copy(update={"offset": 2})), b"cd"]) is Code.BAD_OFFSET
    assert refused([header(GOOD, part.model_copy(update={"offset": 9}))]) is Code.BAD_OFFSET
    assert refused([header(Pull(returning=True)), b"more"]) is Code.MALFORMED
    assert refused([]) is Code.INCOMPLETE


def test_a_broken_transfer_goes_on_where_it_broke() -> None:
    partials, payload = Partials(2**20), bytes(1000)
    whole = list(frames(Said(GOOD, payload)))
    assert refused([whole[0], payload[:400]], partials) is Code.INCOMPLETE
    assert partials.size("device-1", digest_of(payload)) == 400
    assert partials.size("device-2", digest_of(payload)) == 0  # a payload is its sender's
    assert received(list(frames(Said(GOOD, payload), offset=400)), partials) == (GOOD, payload)
    assert partials.held == 0


class Sender:
    """A peer that sends a payload over a connection that stays open."""

    def __init__(self, partials: Partials, peer: str, payload: bytes, offset: int = 0) -> None:
        self._frames = frames(Said(GOOD, payload), offset=offset)
        self._wire: asyncio.Queue[bytes] = asyncio.Queue()
        self._wire.put_nowait(next(self._frames))
        self.call = asyncio.create_task(receive(self._arriving(), peer, partials, lambda *_: 2**30))

    async def _arriving(self) -> AsyncIterator[bytes]:
        while piece := await self._wire.get():
            yield piece

    async def say(self, piece: bytes) -> None:
        """Send something; nothing: that was all."""
        self._wire.put_nowait(piece)
        for _ in range(5):
            await asyncio.sleep(0)

    async def code(self) -> Code:
        with pytest.raises(Refused) as caught:
            await self.call
        return caught.value.code


@pytest.fixture
def hours(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let the clock of an event loop go on at once."""
    passed = [0.0]
    time = asyncio.BaseEventLoop.time
    monkeypatch.setattr(asyncio.BaseEventLoop, "time", lambda loop: time(loop) + passed[0])

    def wait(seconds: float) -> None:
        passed[0] += seconds

    return wait


def test_all_payloads_together_fit_a_budget(hours: Callable[[float], None]) -> None:
    async def many() -> None:
        partials = Partials(1000)
        first = Sender(partials, "device-1", bytes(800))
        await first.say(bytes(400))
        assert await Sender(partials, "device-2", bytes(300)).code() is Code.BUSY  # the first may have its time
        assert partials.held == 800
        await first.say(bytes(400))
        await first.say(b"")
        assert (await first.call)[2] == bytes(800)
        assert partials.held == 0

    asyncio.run(many())


def test_sixteen_that_send_a_byte_now_and_then_give_way_to_others(hours: Callable[[float], None]) -> None:
    async def many() -> None:
        partials = Partials(1600)
        slow = [Sender(partials, f"device-{number}", bytes(100)) for number in range(16)]
        for sender in slow:
            await sender.say(bytes(1 if sender is slow[3] else 2))
        for number in range(16, 20):
            assert await Sender(partials, f"device-{number}", bytes(100)).code() is Code.BUSY
        hours(10.0)
        honest = Sender(partials, "device-99", bytes(100))
        await honest.say(bytes(100))
        await honest.say(b"")
        assert (await honest.call)[2] == bytes(100)
        assert await slow[3].code() is Code.BUSY  # the slowest
        assert partials.size("device-3", digest_of(bytes(100))) == 1  # and what came of it is kept
        Sender(partials, "device-98", bytes(100))
        assert await Sender(partials, "device-3", bytes(100), offset=1).code() is Code.BUSY  # it drives nobody away
        await slow[4].say(bytes(98))
        await slow[4].say(b"")
        await slow[4].call
        again = Sender(partials, "device-3", bytes(100), offset=1)  # and goes on when there is room
        await again.say(bytes(99))
        await again.say(b"")
        assert (await again.call)[2] == bytes(100)

    asyncio.run(many())


def test_what_is_kept_of_broken_transfers_fits_as_much_again() -> None:
    partials = Partials(1000)
    for number in range(5):
        whole = list(frames(Said(GOOD, bytes(400))))
        with pytest.raises(Refused):
            asyncio.run(receive(_each([whole[0], bytes(300)]), f"device-{number}", partials, lambda *_: 2**20))
    assert partials.held == 900
    assert [partials.newest(f"device-{number}") is not None for number in range(5)] == [False, False, True, True, True]


def test_the_newest_connection_of_a_peer_takes_the_place_of_its_older_one() -> None:
    """A connection whose other end has gone may seem to be there for minutes."""

    async def moved() -> None:
        partials, payload = Partials(1000), bytes(range(200)) * 4
        old = Sender(partials, "device-1", payload)
        await old.say(payload[:300])
        assert partials.size("device-1", digest_of(payload)) == 300
        new = Sender(partials, "device-1", payload, offset=300)
        assert await old.code() is Code.BUSY
        await new.say(payload[300:])
        await new.say(b"")
        assert (await new.call)[2] == payload
        assert partials.held == 0

    asyncio.run(moved())


def test_a_payload_is_hashed_once_however_often_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    from personafl.deploy.net import messages

    hashed: list[int] = []

    def counting(data: bytes) -> Any:
        hashed.append(len(data))
        return sha256(data)

    monkeypatch.setattr(messages, "sha256", counting)
    payload = Payload(bytes(5000))
    sent = [list(frames(Said(Task(round=0, model=DIGEST), payload))) for _ in range(3)]
    assert hashed == [5000]
    assert received(sent[2])[1] == payload
    assert hashed == [5000]  # nor is what has arrived: it was hashed on its way


def test_an_answer_that_breaks_off_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is cut in the middle of a reply of 5 MB; the second try sends only the rest."""
    pki.init(tmp_path / "pki")
    payload, sent = bytes(range(256)) * (5 * CHUNK // 256), []
    from personafl.deploy.net import listening

    original = listening.frames

    def breaking(said: Said, have: Part | None = None, offset: int = 0, chunk: int = CHUNK) -> Any:
        for place, frame in enumerate(original(said, have, offset)):
            if said.payload == payload:
                sent.append(len(frame))
                if len(sent) == 3:  # a header and a chunk are out
                    raise ConnectionError("cut")
            yield frame
            assert place < 10

    monkeypatch.setattr(listening, "frames", breaking)

    async def handle(identity: Any, said: Said) -> Said:
        return Said(Task(round=0, model=DIGEST), payload)

    async def asked() -> Said:
        files = pki.issue(tmp_path / "pki", "device-1")
        async with answering(tmp_path / "pki", handle) as port, channel(port, files) as line:
            return await line.ask(Pull(returning=False), tries=5)

    assert asyncio.run(asked()).payload == payload
    assert sum(size for size in sent if size == CHUNK) <= 6 * CHUNK


def test_a_frame_larger_than_allowed_never_reaches_us(tmp_path: Path) -> None:
    pki.init(tmp_path / "pki")
    files = pki.issue(tmp_path / "pki", "device-1")

    async def flood() -> None:
        async with answering(tmp_path / "pki") as port:
            credentials = grpc.ssl_channel_credentials(
                files.authority.read_bytes(), files.key.read_bytes(), files.certificate.read_bytes()
            )
            options = [("grpc.max_send_message_length", -1)]
            async with grpc.aio.secure_channel(f"localhost:{port}", credentials, options=options) as line:
                call = line.stream_stream("/personafl.v1.Peer/Exchange")()
                await call.write(bytes(4 * CHUNK))
                await call.read()

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        asyncio.run(flood())
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
