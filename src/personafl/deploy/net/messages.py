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

from personafl.deploy.net.promise import Promise


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
    # sums of updates that nobody sees singly
    OTHER_TRY = "OTHER_TRY"
    BREACH = "BREACH"


class Refused(Exception):
    """A peer's message was refused, or ours was (`by_peer`): `code` says why, `text` what to do about it."""

    def __init__(self, code: Code, text: str, *, by_peer: bool = False) -> None:
        super().__init__(f"{code}: {text}")
        self.code, self.text, self.by_peer = code, text, by_peer
        self.about: dict[str, Any] = {}  # what is known of the message: its kind, round and the digest of its payload


VERSION, HEADER_BYTES = 1, 64 * 2**10
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Name = Annotated[str, Field(max_length=200)]
Text = Annotated[str, Field(max_length=2000)]
MOST_ALONE, MOST_NAMED = 1000, 4000
Members = Annotated[list[Count], Field(max_length=1000)]  # servers of a cloud
Alone = Annotated[list[Count], Field(max_length=MOST_ALONE)]  # rounds without contact, in ascending order


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


class Moved(_Strict):
    """A device's server is out: after `counted` rounds none of its updates counts; `had`: one in the last of them does.

    `introduce`: its new server must know more of it, which it sends with its `Hello`.
    """

    counted: Count
    had: bool
    introduce: bool


class Knock(Message):
    """Device: what is run here?"""


class Hello(Message):
    """Device: I take part, with so many training samples of this shape; `profile` names the kind of device."""

    samples: Count
    input_shape: Annotated[list[Count], Field(max_length=8)]
    classes: Count
    profile: Name | None = None


class Welcome(Message):
    """Server: the payload is the recipe, as TOML. `run` names the run: states belong to it.

    `moved` is for a device whose server is out, when it comes to another one; `home` names that one's own run.
    """

    run: Name
    moved: Moved | None = None
    home: Name | None = None


class Enrolled(Message):
    """Server: you are in."""


class Pull(Message):
    """Device: is there work? `returning`: it has a state, and needs nothing that is sent only once."""

    returning: bool


class Task(Message):
    """Server: train for this round; the payload is the broadcast, `model` the digest that the update must name.

    After `counted` rounds no update of the device counts: where it has any, the server went back since. `alone` are the
    rounds since its last update in which it was to train without contact.
    """

    round: Count
    model: Digest
    counted: Count | None = None
    alone: Alone = Field(default_factory=list)


class Wait(Message):
    """Server: nothing now; ask again. `alone` is as in a `Task`."""

    alone: Alone = Field(default_factory=list)


class Finished(Message):
    """Server: all rounds are done; the payload is the last broadcast, whole; from a coordinator, the model of all.

    `counted` and `alone` are as in a `Task`.
    """

    rounds: Count
    counted: Count | None = None
    alone: Alone = Field(default_factory=list)
    privacy: Promise | None = None


class Beat(Message):
    """Device, cloud server: still at work on this round."""

    round: Count


class Alive(Message):
    """Server, coordinator: noted; `open` says whether an update for that round would still be taken.

    To a cloud server: `moved` is how many devices of servers that are out it has now, `at` the round that it is in,
    `ready` whether it has announced that, and `after` the round that this follows, if any.
    """

    open: bool
    moved: Count = 0
    at: Count = 0
    ready: bool = False
    after: Count | None = None


class Update(Message):
    """Device: what a round of training sends up; the payload has the declared fields and nothing else.

    `alone` are the rounds since its last update that it has trained without contact.
    """

    round: Count
    model: Digest
    samples: Count
    alone: Alone = Field(default_factory=list)


class Accepted(Message):
    """Server: the update is kept, durably; `before`: it was already."""

    before: bool


class Leave(Message):
    """Device: do not select me any more; a later `Hello` ends that. `alone` is as in an `Update`."""

    alone: Alone = Field(default_factory=list)


class Left(Message):
    """Server: noted."""


class Join(Message):
    """Cloud server: my devices are there, and weigh so much together; `recipe` is the digest of what I run."""

    weight: Count
    recipe: Digest
    run: Name = ""  # that their states belong to


class Joined(Message):
    """Coordinator: you are in."""


class Mix(_Strict):
    """A mix: its number, and the servers that it had."""

    mixed: Count
    members: Members


class Announce(Message):
    """Cloud server: I have what I waited for in this round, from so many devices.

    The payload is the sum of their updates where all servers have one model, else my model, without what is my own.
    `taken` are their numbers, unless they are too many to say. `heard` is the last mix that I had part in.
    """

    round: Count
    clients: Count
    taken: Annotated[list[Count], Field(max_length=MOST_NAMED)] = Field(default_factory=list)
    heard: Mix | None = None


class Await(Message):
    """Cloud server: what follows the round that I announced? None: I have not begun."""

    round: Count | None


class Adopt(Message):
    """Cloud server: whose devices are mine now? The answer is a `Report`."""


class Proceed(Message):
    """Coordinator: begin this round from the payload; none: from your own model.

    `mixed` is the number of the mix that the payload comes from; None: your round was mixed without you, or is the
    first. `members` are the servers that it had.
    """

    start: Count
    mixed: Count | None
    members: Members = Field(default_factory=list)


class Drop(Message):
    """Operator: leave a device out from now on; `undo`: let it in again.

    Or a server of a cloud, for good: `to` is the one that has its devices then; None: all that are left.
    """

    name: Name
    undo: bool = False
    to: Name | None = None


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


class Heard(Said):
    """A message that came; its payload has this digest."""

    digest = ""


class Payload(bytes):
    """Bytes that are sent: their digest is made once, however often it is asked for."""

    @functools.cached_property
    def digest(self) -> str:
        """Return their name: their SHA-256."""
        return sha256(self).hexdigest()


def digest_of(payload: bytes | memoryview) -> str:
    """Return the name of a payload: its SHA-256."""
    return payload.digest if isinstance(payload, Payload) else sha256(payload).hexdigest()


def header(message: Message, payload: Part | None = None, have: Part | None = None) -> bytes:
    """Return the bytes of a message's header."""
    about, body = {"payload": payload, "have": have}, message.model_dump(mode="json")
    data = Envelope(version=VERSION, kind=message.kind, body=body, **about).model_dump_json().encode()
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
