"""What a ServerApp and a ClientApp say to each other: `deploy`'s messages, each in a record of its own.

Flower starts a ClientApp anew for each message, so each one says what the run is. Records with equal content are sent
to the SuperLink once, so what is the same for all nodes is kept apart from what is not.
"""

from collections.abc import Mapping
from typing import Annotated, TypeVar

from flwr.app import ConfigRecord, RecordDict
from pydantic import Field

from personafl.deploy.net.messages import Code, Count, Hello, Message, Refused, Said, Update, header, parse

M = TypeVar("M", bound=Message)


class Call(Message):
    """Server: this is about that run; the payload is its recipe, as TOML."""

    run: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]  # a folder of the node is called so


class Fate(Message):
    """Server: so many rounds are closed, and `taken` is the last one that an update of this node was taken in."""

    rounds: Count
    taken: Count | None


class Present(Hello):
    """Node: I take part as this client. `pending` is the round of an update whose fate it does not know.

    `returning`: it has a state, and needs nothing that is sent only once.
    """

    number: Count
    returning: bool
    pending: Count | None


class Trained(Update):
    """Node: an update. `returning`: it has a state if this is taken."""

    returning: bool


def pack(*said: Said) -> RecordDict:
    """Return messages as the content of one of Flower's."""
    return RecordDict(
        {
            message.kind: ConfigRecord({"header": header(message), "payload": payload or b""})
            for message, payload in said
        }
    )


def has(content: RecordDict, kind: type[Message]) -> bool:
    """Say whether there is a message of a kind."""
    return kind.kind in content.config_records


def unpack(content: RecordDict, kind: type[M]) -> tuple[M, bytes]:
    """Return the message of a kind and its payload, or refuse the content."""
    record: Mapping[str, object] = content.config_records.get(kind.kind) or {}
    head, payload = record.get("header"), record.get("payload")
    if not isinstance(head, bytes) or not isinstance(payload, bytes):
        raise Refused(Code.MALFORMED, f"has no {kind.kind!r}; is there a personafl app on the other side?")
    message, _ = parse(head)
    if not isinstance(message, kind):
        raise Refused(Code.UNKNOWN_KIND, f"is {message.kind!r} where {kind.kind!r} should be")
    return message, payload
