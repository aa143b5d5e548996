"""How a message travels: one frame with its header, then its payload in chunks of up to 1 MB, usually 128 to 512 kB.

A payload is named by its digest, so what is left of a broken transfer is continued: the receiver keeps what it got, and
the sender goes on from there. Memory is bounded: a payload is refused by its announced size before a byte of it is
read, each peer has at most one payload on the way, all of those together fit a budget, with those that were not looked
at yet, and what is kept of broken ones fits as much again. Who comes when there is no room waits its turn. Nobody holds
a place for nothing: where there is none left, the sender that would take longest gives way, and a peer's newest
connection takes the place of its older one.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from personafl.deploy.net.messages import (
    HEADER_BYTES,
    Code,
    Envelope,
    Message,
    Part,
    Refused,
    Said,
    digest_of,
    header,
    parse,
)

CHUNK = 2**20
# Bytes of a chunk, and the share of its payload that it is in between. Each costs processor time; but gRPC keeps, for
# each connection, room for as much as ever came at once, and a chunk for each peer that reads slowly.
_LEAST, _MOST, _SHARE = 2**17, 2**19, 32
_SMALL = 2**12  # bytes below which chunks are put together at once: an object for each would take more than they do
FRAME_BYTES = CHUNK + HEADER_BYTES  # the largest that gRPC lets through
GRACE = 5.0  # seconds that a sender has its place for certain, and that it may still take when others wait
_LOOK = 0.5  # seconds after which whoever is next looks again who has become slow
_TAKEN = "another connection of yours, or a faster sender, has its place"
Cap = Callable[[Message, Part], int]  # whose payload it is, and what was announced -> most bytes of it


@dataclass
class _Partial:
    part: Part
    chunks: list[bytes | bytearray] = field(default_factory=list)  # put together when all came
    size: int = 0  # of them all
    hash: Any = field(default_factory=sha256)  # of the data, made while they arrive
    clock: asyncio.Timeout | None = None  # of the call that is sending; None: nobody is
    began: tuple[float, int] = (0.0, 0)  # when it began to send, and how much was there

    def add(self, chunk: bytes) -> None:
        """Take what came, or refuse it."""
        if not chunk or len(chunk) > CHUNK or self.size + len(chunk) > self.part.size:
            raise Refused(Code.TOO_LARGE, "more bytes came than were announced, or a chunk is not 1 byte to 1 MB")
        if len(chunk) >= _SMALL:
            self.chunks.append(chunk)
        elif self.chunks and isinstance(self.chunks[-1], bytearray):
            self.chunks[-1] += chunk
        else:
            self.chunks.append(bytearray(chunk))
        self.size += len(chunk)
        self.hash.update(chunk)

    def seconds_left(self, now: float) -> float:
        """Return how long the rest takes, at the rate so far."""
        since, had = self.began
        came = self.size - had
        return (self.part.size - self.size) * (now - since) / came if came else float("inf")


class Partials:
    """The payloads that have begun to arrive, one per peer."""

    def __init__(self, budget: int, patience: float = 0.0) -> None:
        """Hold so many bytes; whoever is next waits for room for so many seconds before it is refused."""
        self._budget, self._patience = budget, patience
        self._whole = 0  # bytes that came, and are being looked at
        self._turn, self._freed = asyncio.Lock(), asyncio.Event()
        self._of: dict[str, _Partial] = {}  # those that nobody is sending in the order in which they were left
        self._slow: set[str] = set()  # who had to give way, and has not sent a whole payload since

    @property
    def held(self) -> int:
        """Bytes that are reserved for payloads on the way, and those that are kept of others."""
        return self._reserved + self._kept

    def size(self, peer: str, digest: str) -> int:
        """Return how much of a payload has arrived from a peer; whoever asks is about to send the rest."""
        partial = self._of.get(peer)
        if partial is None or partial.part.digest != digest:
            return 0
        self._end(peer)
        return partial.size

    def newest(self, peer: str) -> Part | None:
        """Return how far the payload that a peer was sending has come, if there is one."""
        partial = self._of.get(peer)
        return None if partial is None else partial.part.model_copy(update={"offset": partial.size})

    @contextlib.asynccontextmanager
    async def arriving(self, peer: str, part: Part) -> AsyncIterator[_Partial]:
        """Give where the bytes of a payload go. Who has to give way meanwhile is refused, and what came is kept."""
        clock = asyncio.timeout(None)
        partial = await self._admitted(peer, part, clock)
        try:
            async with clock:
                yield partial
        except TimeoutError:
            if not clock.expired():
                raise
            raise Refused(Code.BUSY, _TAKEN) from None
        finally:
            if partial.clock is clock:
                self._leave(peer)

    def drop(self, peer: str) -> None:
        """Forget what a peer was sending."""
        self._of.pop(peer, None)

    @contextlib.contextmanager
    def handling(self, payload: bytes) -> Iterator[None]:
        """Count a payload that has come whole, while it is looked at: many may be waiting for that."""
        self._whole += len(payload)
        try:
            yield
        finally:
            self._whole -= len(payload)
            self._freed.set()

    async def _admitted(self, peer: str, part: Part, clock: asyncio.Timeout) -> _Partial:
        """Begin a payload as soon as there is room, first come, first served."""
        now = asyncio.get_running_loop().time
        async with self._turn:
            end = now() + self._patience
            while True:
                try:
                    return self._begin(peer, part, clock)
                except Refused as refused:
                    if refused.code is not Code.BUSY or peer in self._slow or now() >= end:
                        raise
                self._freed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK):
                        await self._freed.wait()

    def _begin(self, peer: str, part: Part, clock: asyncio.Timeout) -> _Partial:
        self._end(peer)
        partial = self._of.get(peer)
        if partial is None or (partial.part.digest, partial.part.size) != (part.digest, part.size) or not part.offset:
            partial = _Partial(part)
        if part.offset != partial.size:
            raise Refused(Code.BAD_OFFSET, f"{partial.size} bytes of it are here")
        now = asyncio.get_running_loop().time()
        self._make_room(peer, part.size, now)
        partial.began, partial.clock = (now, partial.size), clock
        self._of[peer] = partial
        return partial

    def _make_room(self, peer: str, size: int, now: float) -> None:
        """Let those give way who would take longest, unless this peer had to itself."""
        while self._reserved + size > self._budget:
            left = {other: partial.seconds_left(now) for other, partial in self._of.items() if partial.clock}
            slow = [
                other
                for other, seconds in left.items()
                if seconds > GRACE and (other in self._slow or now - self._of[other].began[0] > GRACE)
            ]
            if peer in self._slow or not slow:
                raise Refused(Code.BUSY, "too many payloads are on the way; try again soon")
            slowest = max(slow, key=left.__getitem__)
            self._slow.add(slowest)
            self._end(slowest)

    def _end(self, peer: str) -> None:
        """Let the call end that is sending a peer's payload, if there is one."""
        partial = self._of.get(peer)
        if partial is not None and partial.clock is not None:
            partial.clock.reschedule(asyncio.get_running_loop().time())
            self._leave(peer)

    def _leave(self, peer: str) -> None:
        """Keep what came of a payload that nobody is sending any more, in place of what was left longest ago."""
        partial = self._of.pop(peer)
        partial.clock = None
        self._of[peer] = partial
        self._freed.set()
        left = iter([other for other, partial in self._of.items() if not partial.clock])
        while self._kept > self._budget:
            del self._of[next(left)]

    def finish(self, peer: str) -> None:
        """Forget a payload that has come whole, and that its sender was slow."""
        self.drop(peer)
        self._slow.discard(peer)

    @property
    def _reserved(self) -> int:
        return self._whole + sum(partial.part.size for partial in self._of.values() if partial.clock)

    @property
    def _kept(self) -> int:
        return sum(partial.size for partial in self._of.values() if not partial.clock)


def frames(said: Said, have: Part | None = None, offset: int = 0, chunk: int | None = None) -> Iterator[bytes]:
    """Yield the frames of a message; of its payload the bytes from `offset` on, in chunks.

    `have` is what the sender already has of the reply that it expects.
    """
    message, payload = said
    if not payload:
        yield header(message, None, have)
        return
    yield header(message, Part(size=len(payload), digest=digest_of(payload), offset=offset), have)
    each = chunk or min(max(len(payload) // _SHARE, _LEAST), _MOST)
    for start in range(offset, len(payload), each):
        yield payload[start : start + each]


async def receive(
    incoming: AsyncIterator[bytes], peer: str, partials: Partials, cap: Cap, patience: float | None = None
) -> tuple[Message, Envelope, bytes]:
    """Read one message of a peer to its end, or refuse it. What came of a broken one is kept in `partials`.

    All but a payload must be there within `patience` seconds; None: within any time.
    """
    try:
        async with asyncio.timeout(patience):
            message, envelope = parse(await anext(incoming))
            part = envelope.payload
            if part is None:
                async for _ in incoming:
                    raise Refused(Code.MALFORMED, f"a {message.kind} without a payload has one frame")
                return message, envelope, b""
    except (StopAsyncIteration, TimeoutError):
        raise Refused(Code.INCOMPLETE, "no header came") from None
    most = cap(message, part)
    if part.size > most:
        raise Refused(Code.TOO_LARGE, f"the payload of a {message.kind} may have {most} bytes")
    if part.offset > part.size:
        raise Refused(Code.BAD_OFFSET, f"the payload has {part.size} bytes")
    return message, envelope, await _payload(incoming, peer, partials, part)


async def _payload(incoming: AsyncIterator[bytes], peer: str, partials: Partials, part: Part) -> bytes:
    try:
        async with partials.arriving(peer, part) as partial:
            clock = partial.clock
            async for chunk in incoming:
                if partial.clock is not clock:  # before the clock rings
                    raise Refused(Code.BUSY, _TAKEN)
                partial.add(chunk)
    except Refused as refused:
        if refused.code is Code.TOO_LARGE:
            partials.drop(peer)
        raise
    if partial.size < part.size:
        raise Refused(Code.INCOMPLETE, f"{partial.size} of {part.size} bytes came")
    partials.finish(peer)
    if partial.hash.hexdigest() != part.digest:
        raise Refused(Code.BAD_DIGEST, "the payload is not what its digest says")
    return b"".join(partial.chunks)
