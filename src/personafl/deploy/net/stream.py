"""How a message travels: one frame with its header, then its payload in chunks of 1 MB.

A payload is named by its digest, so what is left of a broken transfer is continued: the receiver keeps what it got, and
the sender goes on from there. Memory is bounded: a payload is refused by its announced size before a byte of it is
read, each peer has at most one payload on the way, and all of them together fit a budget.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

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
FRAME_BYTES = CHUNK + HEADER_BYTES  # the largest that gRPC lets through
Cap = Callable[[str], int]  # kind of message -> most bytes of its payload


@dataclass
class _Partial:
    part: Part
    data: bytearray = field(default_factory=bytearray)
    busy: bool = False


class Partials:
    """The payloads that have begun to arrive, one per peer."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._of: dict[str, _Partial] = {}

    @property
    def held(self) -> int:
        """Bytes that are reserved."""
        return sum(partial.part.size for partial in self._of.values())

    def size(self, peer: str, digest: str) -> int:
        """Return how much of a payload has arrived from a peer."""
        partial = self._of.get(peer)
        return len(partial.data) if partial is not None and partial.part.digest == digest else 0

    def newest(self, peer: str) -> Part | None:
        """Return how far the payload that a peer was sending has come, if there is one."""
        partial = self._of.get(peer)
        return None if partial is None else partial.part.model_copy(update={"offset": len(partial.data)})

    def begin(self, peer: str, part: Part) -> _Partial:
        """Return where the bytes of a payload go."""
        partial = self._of.get(peer)
        if partial is not None and partial.busy:
            raise Refused(Code.BUSY, "one payload at a time; another connection of yours is sending")
        if partial is None or (partial.part.digest, partial.part.size) != (part.digest, part.size):
            self._of.pop(peer, None)
            if self.held + part.size > self._budget:
                self._of = {peer: partial for peer, partial in self._of.items() if partial.busy}
            if self.held + part.size > self._budget:
                raise Refused(Code.BUSY, "too many payloads are on the way; try again soon")
            partial = self._of[peer] = _Partial(part)
        if part.offset == 0:
            partial.data.clear()
        if part.offset != len(partial.data):
            raise Refused(Code.BAD_OFFSET, f"{len(partial.data)} bytes of it are here")
        partial.busy = True
        return partial

    def drop(self, peer: str) -> None:
        """Forget what a peer was sending."""
        self._of.pop(peer, None)


def frames(said: Said, have: Part | None = None, offset: int = 0) -> Iterator[bytes]:
    """Yield the frames of a message; of its payload the bytes from `offset` on.

    `have` is what the sender already has of the reply that it expects.
    """
    message, payload = said
    if not payload:
        yield header(message, None, have)
        return
    yield header(message, Part(size=len(payload), digest=digest_of(payload), offset=offset), have)
    for start in range(offset, len(payload), CHUNK):
        yield payload[start : start + CHUNK]


async def receive(
    incoming: AsyncIterator[bytes], peer: str, partials: Partials, cap: Cap
) -> tuple[Message, Envelope, bytes]:
    """Read one message of a peer to its end, or refuse it. What came of a broken one is kept in `partials`."""
    try:
        first = await anext(incoming)
    except StopAsyncIteration:
        raise Refused(Code.INCOMPLETE, "no header came") from None
    message, envelope = parse(first)
    part = envelope.payload
    if part is None:
        async for _ in incoming:
            raise Refused(Code.MALFORMED, f"a {message.kind} without a payload has one frame")
        return message, envelope, b""
    if part.size > cap(message.kind):
        raise Refused(Code.TOO_LARGE, f"the payload of a {message.kind} may have {cap(message.kind)} bytes")
    if part.offset > part.size:
        raise Refused(Code.BAD_OFFSET, f"the payload has {part.size} bytes")
    partial = partials.begin(peer, part)
    try:
        async for chunk in incoming:
            if not chunk or len(chunk) > CHUNK or len(partial.data) + len(chunk) > part.size:
                partials.drop(peer)
                raise Refused(Code.TOO_LARGE, "more bytes came than were announced, or a chunk is not 1 byte to 1 MB")
            partial.data += chunk
    finally:
        partial.busy = False
    if len(partial.data) < part.size:
        raise Refused(Code.INCOMPLETE, f"{len(partial.data)} of {part.size} bytes came")
    partials.drop(peer)
    if digest_of(partial.data) != part.digest:
        raise Refused(Code.BAD_DIGEST, "the payload is not what its digest says")
    return message, envelope, bytes(partial.data)
