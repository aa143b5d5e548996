"""Attacks by what is said: headers, payloads and messages, all with a valid certificate."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import torch
from assault import Attack, Hostile, outcome
from updates import CLASSES, saved

from personafl.core import wire
from personafl.deploy.net import messages
from personafl.deploy.net.messages import (
    Code,
    Have,
    Hello,
    Knock,
    Leave,
    Message,
    Part,
    Pull,
    Status,
    digest_of,
    header,
)
from personafl.deploy.net.stream import CHUNK

KNOCK = json.loads(header(Knock()))
HELLO = json.loads(header(Hello(samples=5, input_shape=[1, 8, 8], classes=10)))
ENROLLED, NEWCOMER = "device-3", "device-90"


def framing() -> list[Attack]:
    """Headers that are none."""

    def nested(depth: int) -> bytes:
        return (
            json.dumps(KNOCK | {"body": 0})
            .replace('"body": 0', '"body": ' + '{"a":' * depth + "1" + "}" * depth)
            .encode()
        )

    def changed(base: dict[str, Any] = KNOCK, **values: Any) -> bytes:
        return json.dumps({**base, **values}).encode()

    def hello(**values: Any) -> bytes:
        return changed(HELLO, body={**HELLO["body"], **values})

    def text(value: str) -> bytes:
        return json.dumps(HELLO).replace('"samples": 5', f'"samples": {value}').encode()

    good = json.dumps(KNOCK).encode()
    malformed: dict[str, bytes] = {
        "a frame without a byte": b"",
        "half a header": good[: len(good) // 2],
        "a list": b"[]",
        "a word": b'"knock"',
        "a number": b"1",
        "null": b"null",
        "an object ten thousand deep": nested(10_000),
        "a list sixty thousand deep": b"[" * 60_000,
        "a pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94.",
        "bytes that are no UTF-8": good.replace(b"knock", b"kn\xff\xfeck"),
        "more after the JSON": good + b"x",
        "two headers in a frame": good + good,
        "a field more in the header": changed(more=1),
        "a field more in the body": hello(more=1),
        "no body": json.dumps({"version": 1, "kind": "knock"}).encode(),
        "a body that is a list": changed(body=[]),
        "a kind that is a number": changed(kind=1),
        "a kind of 300 letters": changed(kind="k" * 300),
        "samples as a word": hello(samples="12"),
        "samples as a fraction": hello(samples=1.5),
        "samples as a truth": hello(samples=True),
        "samples below 0": hello(samples=-1),
        "2^53 samples": hello(samples=2**53),
        "samples of 400 digits": text("1" + "0" * 400),
        "samples of 50,000 digits": text("1" * 50_000),
        "NaN in the JSON": text("NaN"),
        "Infinity in the JSON": text("Infinity"),
        "-Infinity in the JSON": text("-Infinity"),
        "1e999 samples": text("1e999"),
        "a shape of nine": hello(input_shape=[1] * 9),
        "a shape of words": hello(input_shape=["1"]),
        "a profile of 300 letters": hello(profile="p" * 300),
        "a version that is true": changed(version=True),
        "a digest in capitals": changed(payload={"size": 1, "digest": "F" * 64, "offset": 0}),
        "a digest of 63 letters": changed(payload={"size": 1, "digest": "f" * 63, "offset": 0}),
        "a size below 0": changed(payload={"size": -1, "digest": "f" * 64, "offset": 0}),
        "an offset below 0 of the reply": changed(have={"size": 1, "digest": "f" * 64, "offset": -1}),
    }
    attacks = [_frames(name, "MALFORMED", sent) for name, sent in malformed.items()]
    attacks += [
        _frames(f"version {version!r}", "BAD_VERSION", changed(version=version)) for version in (0, 2, -1, "1", None)
    ]
    attacks += [
        _frames("version 1.0", "MALFORMED|welcome", changed(version=1.0)),
        _frames("a number before the version", "BAD_VERSION|MALFORMED", b'{"version":' + b"9" * 3_000 + b"}"),
    ]
    kinds = [
        "",
        "nothing",
        "__class__",
        "message",
        "Knock",
        "knock\x00",
        "kn\u202eock",
        "\x1b[2J\x1b]0;x\x07",
        "a\nserver: all is well",
    ]
    attacks += [_frames(f"the kind {kind!r}", "UNKNOWN_KIND", changed(kind=kind)) for kind in kinds]
    return [
        *attacks,
        _frames("no frame at all", "INCOMPLETE"),
        _frames("a header of 64 kB and a byte", "TOO_LARGE", good + b" " * (64 * 2**10 + 1 - len(good))),
        _frames("a header of 1 MB", "TOO_LARGE", b" " * 2**20 + good),
        _frames("a frame of 8 MB", "RESOURCE_EXHAUSTED", b" " * 2**23),
        _frames("each key twice", "MALFORMED|welcome", good[:-1] + b", " + good[1:]),
        _frames("JSON in UTF-16", "MALFORMED|welcome", good.decode().encode("utf-16")),
        _frames("JSON after a byte order mark", "MALFORMED|welcome", b"\xef\xbb\xbf" + good),
        _frames("a second header", "MALFORMED", good, good),
        _frames("a thousand empty frames after the header", "MALFORMED", good, *[b""] * 1000),
    ]


def _frames(name: str, expected: str, *frames: bytes) -> Attack:
    return Attack("framing", name, expected, lambda hostile: hostile.exchange(frames))


def _update(name: str, expected: str, made: Callable[[Hostile], Awaitable[str]], group: str = "payload") -> Attack:
    return Attack(group, name, expected, made, open=True)


def payloads() -> list[Attack]:
    """Payloads that are not what was announced, and updates that are none."""

    def part(**values: Any) -> Callable[[Hostile], Awaitable[str]]:
        return lambda hostile: hostile.say(_good(hostile), hostile.payload, **values)

    def chunks(cut: Callable[[bytes], list[bytes]], size: int | None = None) -> Callable[[Hostile], Awaitable[str]]:
        async def attempt(hostile: Hostile) -> str:
            sent = cut(hostile.payload)
            about = Part(
                size=len(hostile.payload) if size is None else size, digest=digest_of(hostile.payload), offset=0
            )
            return await hostile.exchange([header(_good(hostile), about), *sent])

        return attempt

    def classed(make: Any) -> Callable[[Hostile], Awaitable[str]]:
        return lambda hostile: hostile.say(*make(_good(hostile), hostile.payload))

    attacks = [
        _update("a size beyond the bound", "TOO_LARGE", part(size=2**30)),
        _update("a size of 2^53 - 1", "TOO_LARGE", part(size=2**53 - 1)),
        _update("a size of 0 and bytes", "TOO_LARGE", part(size=0)),
        _update("fewer bytes than announced", "INCOMPLETE", chunks(lambda payload: [payload[:-1]])),
        _update("no bytes", "INCOMPLETE", chunks(lambda payload: [])),
        _update("a byte more than announced", "TOO_LARGE", chunks(lambda payload: [payload, b"x"])),
        _update("an offset beyond the size", "BAD_OFFSET", part(offset=2**40)),
        _update("an offset where nothing is", "BAD_OFFSET", part(offset=7, digest="a" * 64)),
        _update("another digest", "BAD_DIGEST", part(digest="a" * 64)),
        _update("a chunk of more than 1 MB", "TOO_LARGE|RESOURCE_EXHAUSTED", chunks(lambda _: [b"x" * (CHUNK + 1)])),
        _update("an empty chunk", "TOO_LARGE", chunks(lambda payload: [payload[:5], b"", payload[5:]])),
        _update(
            "single bytes, and another at the end",
            "TOO_LARGE",
            chunks(lambda payload: [bytes([b]) for b in payload[:900]] + [payload]),
        ),
        _update("half, then the other half as a new one", "BAD_DIGEST|INCOMPLETE", _halves),
        Attack("payload", "a knock with a payload", "TOO_LARGE", lambda hostile: hostile.say(Knock(), b"x" * 100)),
        Attack(
            "payload",
            "a pull with a payload",
            "TOO_LARGE",
            lambda hostile: hostile.say(Pull(returning=False), b"x" * 100),
        ),
        Attack("payload", "a leave with a payload", "TOO_LARGE", lambda hostile: hostile.say(Leave(), b"x" * 100)),
        Attack("payload", "a reply of which all is here already", "welcome", _have_all),
    ]
    known = {
        name: (code, make)
        for name, (code, make) in CLASSES.items()
        if name not in ("an earlier round", "a later round")
    }
    attacks += [_update(name, _refused(code), classed(make)) for name, (code, make) in known.items()]
    return [*attacks, *squeezed()]


async def _halves(hostile: Hostile) -> str:
    half = len(hostile.payload) // 2
    about = {"size": len(hostile.payload), "digest": "b" * 64}
    first = header(_good(hostile), Part(**about, offset=0))
    await hostile.exchange([first, hostile.payload[:half]])
    return await hostile.exchange([header(_good(hostile), Part(**about, offset=half)), hostile.payload[:-half]])


async def _have_all(hostile: Hostile) -> str:
    return await hostile.exchange([header(Knock(), None, Part(size=10, digest="a" * 64, offset=2**40))])


def squeezed() -> list[Attack]:
    """Compressed frames, small on the wire and large in memory."""

    def bomb(kind: str, frames: list[bytes]) -> Callable[[Hostile], Awaitable[str]]:
        async def attempt(hostile: Hostile) -> str:
            import grpc

            return await hostile.exchange(frames, compression=getattr(grpc.Compression, kind))

        return attempt

    zeros = bytes(2**27)
    fitting = json.dumps(KNOCK).encode().ljust(60_000)
    refused = "RESOURCE_EXHAUSTED|UNIMPLEMENTED|UNKNOWN"
    return [
        Attack("payload", "128 MB of zeros, by gzip", refused, bomb("Gzip", [zeros])),
        Attack("payload", "128 MB of zeros, by deflate", refused, bomb("Deflate", [zeros])),
        Attack(
            "payload",
            "a header and 40 chunks of zeros, by gzip",
            f"MALFORMED|{refused}",
            bomb("Gzip", [fitting, *[bytes(2**20)] * 40]),
        ),
    ]


def protocol() -> list[Attack]:
    """Messages at the wrong time, by the wrong machine, or too many of them."""

    def said(message: Message, who: str | None = None, payload: bytes = b"") -> Callable[[Hostile], Awaitable[str]]:
        return lambda hostile: hostile.say(message, payload, who)

    def changed(**values: Any) -> Callable[[Hostile], Awaitable[str]]:
        return lambda hostile: hostile.say(_good(hostile).model_copy(update=values), hostile.payload)

    def hello(who: str | None = None, **values: Any) -> Callable[[Hostile], Awaitable[str]]:
        return lambda hostile: hostile.say(Hello(**{**hostile.client.hello, **values}), b"", who)

    digest = "a" * 64
    at_cloud: list[Message] = [
        messages.Join(weight=1, recipe=digest),
        messages.Announce(round=0, clients=1),
        messages.Await(round=None),
        messages.Proceed(start=0, mixed=None),
    ]
    of_server: list[Message] = [
        messages.Welcome(run="x"),
        messages.Enrolled(),
        messages.Task(round=0, model=digest),
        messages.Wait(),
        messages.Finished(rounds=1),
        messages.Alive(open=True),
        messages.Accepted(before=False),
        messages.Left(),
        messages.Report(),
        messages.Held(size=1),
        messages.Refusal(code=messages.Code.BUSY, text="x"),
    ]
    found = [
        _update(
            "an update of an earlier round",
            "ROUND_CLOSED",
            lambda hostile: hostile.say(*_earlier(hostile, 2)),
            "protocol",
        ),
        _update("the update of the last round again", "accepted|ROUND_CLOSED", _replayed, "protocol"),
        _update(
            "other bytes for the last round",
            "ROUND_CLOSED",
            lambda hostile: hostile.say(*_earlier(hostile, 1)),
            "protocol",
        ),
        _update("an update of round 2^53 - 1", "WRONG_ROUND", changed(round=2**53 - 1), "protocol"),
        _update(
            "an update of the next round",
            "WRONG_ROUND",
            lambda h: h.say(_good(h).model_copy(update={"round": _good(h).round + 1}), h.payload),
            "protocol",
        ),
        _update("an update for another model", "WRONG_MODEL", changed(model=digest), "protocol"),
        _update("an update of more samples", "BAD_SAMPLES", changed(samples=10**6), "protocol"),
        _update(
            "an update of a device that is not enrolled",
            "NOT_ENROLLED|BUSY",
            lambda h: h.say(_good(h), h.payload, NEWCOMER),
            "protocol",
        ),
        _update(
            "a good update as a hello",
            "OTHER_DATA|TOO_LARGE|MALFORMED",
            lambda h: h.say(Hello(**h.client.hello), h.payload),
            "protocol",
        ),
        Attack(
            "protocol", "a pull of a device that is not enrolled", "NOT_ENROLLED", said(Pull(returning=False), NEWCOMER)
        ),
        Attack(
            "protocol",
            "a beat of a device that is not enrolled",
            "NOT_ENROLLED",
            said(messages.Beat(round=0), NEWCOMER),
        ),
        Attack("protocol", "a leave of a device that is not enrolled", "NOT_ENROLLED|left", said(Leave(), NEWCOMER)),
        Attack("protocol", "a beat of round 2^53 - 1", "alive", said(messages.Beat(round=2**53 - 1))),
        Attack("protocol", "a hello with 10^6 samples, enrolled with fewer", "OTHER_DATA", hello(samples=10**6)),
        Attack(
            "protocol", "a newcomer's hello with 10^6 + 1 samples", "BAD_SAMPLES", hello(NEWCOMER, samples=10**6 + 1)
        ),
        Attack("protocol", "a newcomer's hello with no samples", "BAD_SAMPLES", hello(NEWCOMER, samples=0)),
        Attack("protocol", "a hello with another shape", "OTHER_DATA", hello(input_shape=[3, 8, 8])),
        Attack("protocol", "a hello with a shape of 2^52", "OTHER_DATA", hello(input_shape=[2**52, 2**52])),
        Attack("protocol", "a hello with other classes", "OTHER_DATA", hello(classes=11)),
        Attack(
            "protocol",
            "a hello with a profile of control characters",
            "enrolled|BAD_PROFILE|OTHER_DATA",
            hello(profile="\x1b[2J\r\n\u202e"),
        ),
        Attack("protocol", "the status, asked for by a device", "WRONG_ROLE", said(Status())),
        Attack("protocol", "how much of another's payload is here", "held:0", _probed),
        Attack("protocol", "a knock by a coordinator", "WRONG_ROLE", said(Knock(), "coordinator")),
        Attack("protocol", "a hello by a coordinator", "WRONG_ROLE", hello("coordinator")),
        _update(
            "an update by a coordinator", "WRONG_ROLE", lambda h: h.say(_good(h), h.payload, "coordinator"), "protocol"
        ),
        Attack("protocol", "a knock by a server of a cloud", "WRONG_ROLE", said(Knock(), "cloud-0")),
        _update(
            "an update by a server of a cloud",
            "WRONG_ROLE",
            lambda h: h.say(_good(h), h.payload, "cloud-0"),
            "protocol",
        ),
    ]
    found += [
        Attack("protocol", f"{message.kind!r}, as to a coordinator", "UNKNOWN_KIND|TOO_LARGE", said(message))
        for message in at_cloud
    ]
    found += [
        Attack("protocol", f"{message.kind!r}, as a server says it", "UNKNOWN_KIND", said(message))
        for message in of_server
    ]
    busy = "BUSY|RESOURCE_EXHAUSTED|UNAVAILABLE|DEADLINE_EXCEEDED"  # who asks for more than it may
    storms: list[tuple[str, str, Message, str | None]] = [
        ("knocks of a stranger", f"welcome|{busy}", Knock(), NEWCOMER),
        ("questions of a stranger for a payload", f"held|{busy}", Have(digest=digest), NEWCOMER),
        ("questions of a stranger for the status", f"WRONG_ROLE|{busy}", Status(), NEWCOMER),
        ("unknown messages of a stranger", f"UNKNOWN_KIND|NOT_ENROLLED|{busy}", messages.Wait(), NEWCOMER),
        ("beats", f"alive|{busy}", messages.Beat(round=0), None),
        ("pulls", f"wait|task|{busy}", Pull(returning=True), None),
    ]
    return [
        *found,
        *(
            Attack("protocol", f"{name}, 40 at a time", expected, _storm(message, 40, who), open=who is None)
            for name, expected, message, who in storms
        ),
        Attack("protocol", "pulls, 200 at a time", storms[-1][1], _storm(Pull(returning=True), 200), open=True),
        Attack("protocol", "hellos, 20 at a time", f"enrolled|{busy}", _hellos, open=True),
        Attack("protocol", "leaves and hellos, in turn", f"enrolled|{busy}", _in_and_out, open=True),
    ]


def _refused(code: Code) -> str:
    """Return what is right for an update that is refused by a code; a round does not wait for whoever sends such."""
    return f"{code}|ROUND_CLOSED" if code in (Code.NOT_FINITE, Code.NORM_TOO_LARGE) else str(code)


def _good(hostile: Hostile) -> Any:
    assert hostile.good is not None
    return hostile.good


def _earlier(hostile: Hostile, by: int) -> tuple[Any, bytes]:
    good = _good(hostile)
    payload = hostile.payload if hostile.before is None else hostile.before[1]
    named = {name: leaf * 2 for name, leaf in wire.decode_named(payload).items()}
    return good.model_copy(update={"round": max(0, good.round - by)}), saved(named)


async def _replayed(hostile: Hostile) -> str:
    return await hostile.say(*(hostile.before or (_good(hostile), b"x")))


async def _probed(hostile: Hostile) -> str:
    """Ask, with another certificate, for a payload of which half is on its way."""
    half = hostile.payload[: len(hostile.payload) // 2]
    about = Part(size=len(hostile.payload), digest="c" * 64, offset=0)
    await hostile.exchange([header(_good(hostile), about), half])
    said, _ = await hostile.honest(NEWCOMER).ask(Have(digest="c" * 64), tries=1)
    return f"{said.kind}:{getattr(said, 'size', '')}"


def _storm(message: Message, count: int, who: str | None = None) -> Callable[[Hostile], Awaitable[str]]:
    return lambda hostile: _at_once(lambda: hostile.say(message, b"", who), count)


async def _hellos(hostile: Hostile) -> str:
    return await _at_once(lambda: hostile.say(Hello(**hostile.client.hello)), 20)


async def _at_once(ask: Callable[[], Awaitable[str]], count: int) -> str:
    return "|".join(sorted(set(await asyncio.gather(*(ask() for _ in range(count))))))


async def _in_and_out(hostile: Hostile) -> str:
    for _ in range(10):
        await hostile.say(Leave())
        said = await hostile.say(Hello(**hostile.client.hello))
    return said


def compact() -> list[Attack]:
    """Updates in compact forms that do not fit together; for a recipe whose uploads are sparse or low-rank."""

    def changed(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Hostile], Awaitable[str]]:
        async def attempt(hostile: Hostile) -> str:
            named = dict(wire.decode_named(hostile.payload))
            shapes = (name for name in sorted(named) if name.endswith("#sparse.shape"))
            name = next(name for name in shapes if len(named[name]) == 2).partition("#")[0] + part
            named[name] = change(named[name].clone())
            return await hostile.say(_good(hostile), saved(named))

        return attempt

    def first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda leaf: leaf.index_fill_(0, torch.tensor([0]), value)

    form = "BAD_FORM"
    return [
        _update("a place beyond the weight", form, changed("#sparse.places", first(2**30))),
        _update("a place below 0", form, changed("#sparse.places", first(-1))),
        _update("a place more than values", form, changed("#sparse.places", lambda leaf: torch.cat([leaf, leaf[:1]]))),
        _update("no places", form, changed("#sparse.places", lambda leaf: leaf[:0])),
        _update("places of 64 bits", form, changed("#sparse.places", lambda leaf: leaf.long())),
        _update("places that are fractions", form, changed("#sparse.places", lambda leaf: leaf.float())),
        _update("a value that is NaN", "NOT_FINITE|ROUND_CLOSED", changed("#sparse.values", first(float("nan")))),
        _update("a value of 1e30", "NORM_TOO_LARGE|ROUND_CLOSED", changed("#sparse.values", first(1e30))),
        _update("values of double precision", "BAD_DTYPE", changed("#sparse.values", lambda leaf: leaf.double())),
        _update("a shape of 10^9 × 10^9", "BAD_SHAPE", changed("#sparse.shape", lambda leaf: leaf.fill_(10**9))),
        _update("a shape that is turned", "BAD_SHAPE", changed("#sparse.shape", lambda leaf: leaf.flip(0))),
        _update("a shape below 0", "BAD_SHAPE", changed("#sparse.shape", lambda leaf: -leaf)),
        _update("a shape of 64 bits", form, changed("#sparse.shape", lambda leaf: leaf.long())),
    ]


def large() -> list[Attack]:
    """Updates as large as they may be; for a recipe with a model of 12 MB."""

    def empty(count: int) -> bytes:
        entries = {f"change/{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(count)}
        text = json.dumps(entries).encode()
        return struct.pack("<Q", len(text)) + text

    def lying(hostile: Hostile) -> bytes:
        return struct.pack("<Q", len(hostile.payload) - 8) + b'{"a":' + b"[" * (len(hostile.payload) - 13)

    tensors = empty(203_163)
    return [
        _update("203,163 empty tensors, 13 MB", "BAD_PAYLOAD", lambda h: h.say(_good(h), tensors)),
        _update("12 MB that are all header", "BAD_PAYLOAD", lambda h: h.say(_good(h), lying(h))),
        _update(
            "12 MB of one NaN", "NOT_FINITE|ROUND_CLOSED", lambda h: h.say(*CLASSES["one NaN"][1](_good(h), h.payload))
        ),
        _update("12 MB with a wrong digest", "BAD_DIGEST", lambda h: h.say(_good(h), h.payload, digest="a" * 64)),
        Attack(
            "payload",
            "a broadcast of 12 MB, 8 at a time",
            "task|wait|BUSY",
            _storm(Pull(returning=False), 8),
            open=True,
        ),
    ]


__all__ = ["compact", "framing", "large", "outcome", "payloads", "protocol"]
