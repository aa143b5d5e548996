"""What machines say to each other: typed, versioned, size-capped. The payload, if any, is safetensors or text.

A message is a small JSON header, whose fields its class declares, and at most one payload of bytes. Unknown kinds,
unknown fields and values of another type are refused: nothing is guessed, nothing is unpickled.
"""

from __future__ import annotations

import functools
import json
from enum import StrEnum
from hashlib import sha256
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class Code(StrEnum):
    """Why something was refused. The names are part of the protocol: logs, replies and tests use them."""

    # who
    NO_CERTIFICATE = "NO_CERTIFICATE"
    BAD_CERTIFICATE = "BAD_CERTIFICATE"
    EXPIRED = "EXPIRED"
    REVOKED = "REVOKED"
    REVOCATIONS_UNREADABLE = "REVOCATIONS_UNREADABLE"
    WRONG_ROLE = "WRONG_ROLE"
    # any message
    BAD_VERSION = "BAD_VERSION"
    MALFORMED = "MALFORMED"
    UNKNOWN_KIND = "UNKNOWN_KIND"
    TOO_LARGE = "TOO_LARGE"
    INCOMPLETE = "INCOMPLETE"
    BAD_OFFSET = "BAD_OFFSET"
    BAD_DIGEST = "BAD_DIGEST"
    BUSY = "BUSY"
    # enrolment
    NOT_ENROLLED = "NOT_ENROLLED"
    NUMBER_TAKEN = "NUMBER_TAKEN"
    DROPPED = "DROPPED"
    OTHER_DATA = "OTHER_DATA"
    BAD_PROFILE = "BAD_PROFILE"
    WRONG_SERVER = "WRONG_SERVER"
    UNKNOWN_SERVER = "UNKNOWN_SERVER"
    OTHER_RECIPE = "OTHER_RECIPE"
    # updates
    ROUND_CLOSED = "ROUND_CLOSED"
    WRONG_ROUND = "WRONG_ROUND"
    WRONG_MODEL = "WRONG_MODEL"
    NOT_SELECTED = "NOT_SELECTED"
    DUPLICATE = "DUPLICATE"
    BAD_SAMPLES = "BAD_SAMPLES"
    BAD_PAYLOAD = "BAD_PAYLOAD"
    BAD_NAMES = "BAD_NAMES"
    BAD_FORM = "BAD_FORM"
    BAD_SHAPE = "BAD_SHAPE"
    BAD_DTYPE = "BAD_DTYPE"
    NOT_FINITE = "NOT_FINITE"
    NORM_TOO_LARGE = "NORM_TOO_LARGE"


class Refused(Exception):
    """A peer's message was refused, or ours was (`by_peer`): `code` says why, `text` what to do about it."""

    def __init__(self, code: Code, text: str, *, by_peer: bool = False) -> None:
        super().__init__(f"{code}: {text}")
        self.code, self.text, self.by_peer = code, text, by_peer


VERSION = 1
HEADER_BYTES = 64 * 2**10

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Name = Annotated[str, Field(max_length=200)]
Text = Annotated[str, Field(max_length=2000)]


class _Strict(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True, strict=True)


class Message(_Strict):
    """Base of all messages; `kind` is its name on the wire."""

    kind: ClassVar[str]
    kinds: ClassVar[dict[str, type[Message]]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.kind = cls.__name__.lower()
        if cls.kind in Message.kinds:
            raise TypeError(f"two messages are called {cls.kind!r}")
        Message.kinds[cls.kind] = cls


class Knock(Message):
    """Device: what is run here?"""


class Hello(Message):
    """Device: I take part, with so many training samples of this shape; `profile` names the kind of device."""

    samples: Count
    input_shape: Annotated[list[Count], Field(max_length=8)]
    classes: Count
    profile: Name | None = None


class Welcome(Message):
    """Server: the payload is the recipe, as TOML. `run` names the run: states belong to it."""

    run: Name


class Enrolled(Message):
    """Server: you are in."""


class Pull(Message):
    """Device: is there work? `returning`: it has a state, and needs nothing that is sent only once."""

    returning: bool


class Task(Message):
    """Server: train for this round; the payload is the broadcast, `model` the digest that the update must name.

    After `counted` rounds no update of the device counts: where it has any, the server went back since.
    """

    round: Count
    model: Digest
    counted: Count | None = None


class Wait(Message):
    """Server: nothing now; ask again."""


class Finished(Message):
    """Server: all rounds are done; the payload is the last broadcast, whole; from a coordinator, the model of all.

    `counted` is as in a `Task`.
    """

    rounds: Count
    counted: Count | None = None


class Beat(Message):
    """Device, cloud server: still at work on this round."""

    round: Count


class Alive(Message):
    """Server, coordinator: noted; `open` says whether an update for that round would still be taken."""

    open: bool


class Update(Message):
    """Device: what a round of training sends up; the payload has the declared fields and nothing else."""

    round: Count
    model: Digest
    samples: Count


class Accepted(Message):
    """Server: the update is kept, durably; `before`: it was already."""

    before: bool


class Leave(Message):
    """Device: do not select me any more; a later `Hello` ends that."""


class Left(Message):
    """Server: noted."""


class Join(Message):
    """Cloud server: my devices are there, and weigh so much together; `recipe` is the digest of what I run."""

    weight: Count
    recipe: Digest


class Joined(Message):
    """Coordinator: you are in."""


class Announce(Message):
    """Cloud server: I have what I waited for in this round, from so many devices.

    The payload is the sum of their updates where all servers have one model, else my model, without what is my own.
    """

    round: Count
    clients: Count


class Await(Message):
    """Cloud server: what follows the round that I announced? None: I have not begun."""

    round: Count | None


class Proceed(Message):
    """Coordinator: begin this round from the payload; none: from your own model.

    `mixed` is the number of the mix that the payload comes from; None: your round was mixed without you, or is the
    first.
    """

    start: Count
    mixed: Count | None


class Drop(Message):
    """Operator: leave a device out from now on; `undo`: let it in again."""

    name: Name
    undo: bool = False


class Dropped(Message):
    """Server: it is so; `before`: it was already."""

    before: bool


class Status(Message):
    """Operator: how is it going?"""


class Report(Message):
    """Server: the payload is JSON."""


class Have(Message):
    """Anyone: how much of this payload has arrived?"""

    digest: Digest


class Held(Message):
    """The other side: so many bytes."""

    size: Count


class Refusal(Message):
    """What was asked is refused."""

    code: Code = Field(strict=False)
    text: Text


class Part(_Strict):
    """A payload, of which the bytes from `offset` on follow, or are asked for."""

    size: Count
    digest: Digest
    offset: Count


class Envelope(_Strict):
    """The header of a message on the wire. `have`: what the sender already has of the reply's payload."""

    version: int
    kind: Name
    body: dict[str, Any]
    payload: Part | None = None
    have: Part | None = None


class Said(NamedTuple):
    """A message with its payload."""

    message: Message
    payload: bytes = b""


class Payload(bytes):
    """Bytes that are sent or were received: their digest is made once, however often it is asked for."""

    @functools.cached_property
    def digest(self) -> str:
        """Return their name: their SHA-256."""
        return sha256(self).hexdigest()

    @classmethod
    def named(cls, data: bytes | bytearray, digest: str) -> Payload:
        """Return bytes whose digest is known."""
        made = cls(data)
        made.digest = digest
        return made


def digest_of(payload: bytes) -> str:
    """Return the name of a payload: its SHA-256."""
    return payload.digest if isinstance(payload, Payload) else sha256(payload).hexdigest()


def header(message: Message, payload: Part | None = None, have: Part | None = None) -> bytes:
    """Return the bytes of a message's header."""
    body = message.model_dump(mode="json")
    envelope = Envelope(version=VERSION, kind=message.kind, body=body, payload=payload, have=have)
    data = envelope.model_dump_json().encode()
    if len(data) > HEADER_BYTES:
        raise ValueError(f"the header of a {message.kind} takes {len(data)} bytes")
    return data


def parse(data: bytes) -> tuple[Message, Envelope]:
    """Return the message in a header's bytes, or refuse it."""
    if len(data) > HEADER_BYTES:
        raise Refused(Code.TOO_LARGE, f"a header may have {HEADER_BYTES} bytes")
    try:
        values = json.loads(data)
        if isinstance(values, dict) and values.get("version") != VERSION:
            raise Refused(Code.BAD_VERSION, f"this side speaks version {VERSION}; update personafl")
        envelope = Envelope.model_validate(values)
        if envelope.kind not in Message.kinds:
            raise Refused(Code.UNKNOWN_KIND, f"no message is called {envelope.kind!r}")
        return Message.kinds[envelope.kind].model_validate(envelope.body), envelope
    except (ValidationError, ValueError, RecursionError) as error:
        raise Refused(Code.MALFORMED, _line(error)) from error


def _line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:200]
    return f"not JSON ({type(error).__name__})"
