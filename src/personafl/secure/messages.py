"""What is said in the protocol, in five stages:

    client                              server
    Keys      two public keys, signed     ──▶  Roster     everyone's
    Sealed    a share for each neighbour  ──▶  Inbox      the shares that neighbours sealed for the client
    Masked    its vector under masks      ──▶  Survivors  whose vectors arrived, and whose did not
    Consent   that list, signed           ──▶  Consents   everyone's
    Opened    shares of one seed of each neighbour

A client of which a stage's message does not come in time has dropped out, and is not heard any more.
"""

import contextlib
import functools
import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from personafl.secure.faults import Breach, Fault
from personafl.secure.fixed import Grid, Vector
from personafl.secure.graph import Degree, degree

T = TypeVar("T")
_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {}
Shares = tuple[tuple[int, bytes], ...]  # (client, share), in ascending order


@dataclass(frozen=True)
class Session:
    """One try to sum the vectors of a round; every signature and every secret belongs to one."""

    run: str
    round: int
    attempt: str  # drawn anew for every try
    model: str  # the digest of what clients were sent
    least: int  # survivors without whom no sum is opened
    corrupt: int  # clients that may tell the server all they know
    length: int  # entries of a vector
    grid: Grid

    @functools.cached_property
    def digest(self) -> bytes:
        """Its SHA-256."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).digest()

    def degree(self, clients: int) -> Degree:
        """Return k and t for those who have advertised their keys.

        Where none of a sum may be missing, one may still be lost while seeds are opened, if they are enough for that:
        a try that breaks then is not made again.
        """
        if clients < self.least:
            raise Breach(Fault.TOO_FEW, f"{clients} clients, and a sum is of at least {self.least}")
        if clients == self.least:
            with contextlib.suppress(Breach):
                return degree(clients, 1, self.corrupt)
        return degree(clients, clients - self.least, self.corrupt)


class _Said:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", strict=True, ser_json_bytes="base64", val_json_bytes="base64"
    )

    def encoded(self) -> bytes:
        """Return it as JSON."""
        return _adapter(type(self)).dump_json(self)


@dataclass(frozen=True)
class Keys(_Said):
    """Client: my public keys for this session, by which shares for me are sealed and my masks are agreed on."""

    number: int
    certificate: bytes
    sealing: bytes
    masking: bytes
    commitment: bytes  # the SHA-256 of the seed of its own mask
    signature: bytes

    def content(self, session: Session) -> bytes:
        """Return what is signed."""
        parts = self.number.to_bytes(8) + self.sealing + self.masking + self.commitment
        return b"personafl secure keys" + session.digest + hashlib.sha256(parts).digest()


@dataclass(frozen=True)
class Roster(_Said):
    """Server: the keys of all who advertised some, by ascending numbers."""

    keys: tuple[Keys, ...]

    @functools.cached_property
    def digest(self) -> bytes:
        """Its SHA-256: the public seed of the graph, which nobody chooses alone."""
        return hashlib.sha256(self.encoded()).digest()


@dataclass(frozen=True)
class Sealed(_Said):
    """Client: a share of each of my two seeds for each neighbour, sealed for it."""

    number: int
    shares: Shares


@dataclass(frozen=True)
class Inbox(_Said):
    """Server: what your neighbours have sealed for you."""

    shares: Shares


@dataclass(frozen=True)
class Masked:
    """Client: my vector under all masks."""

    number: int
    vector: Vector

    def encoded(self) -> bytes:
        """Return the entries' bytes."""
        return self.vector.astype("<u4", copy=False).tobytes()

    @classmethod
    def decoded(cls, number: int, data: bytes) -> "Masked":
        """Return it from bytes."""
        if len(data) % 4:
            raise Breach(Fault.BAD_LENGTH, f"{len(data)} bytes are no vector")
        return cls(number, np.frombuffer(data, dtype="<u4"))


@dataclass(frozen=True)
class Survivors(_Said):
    """Server: whose vectors are summed, and who had shared keys but sent none; ascending."""

    active: tuple[int, ...]
    dropped: tuple[int, ...]

    def content(self, session: Session, roster: Roster) -> bytes:
        """Return what is signed."""
        return b"personafl secure survivors" + session.digest + roster.digest + hashlib.sha256(self.encoded()).digest()


@dataclass(frozen=True)
class Consent(_Said):
    """Client: this is the list that I was shown, and the only one that I open seeds for."""

    number: int
    signature: bytes


@dataclass(frozen=True)
class Consents(_Said):
    """Server: the consents of all survivors that gave it."""

    consents: tuple[Consent, ...]


@dataclass(frozen=True)
class Kept(_Said):
    """Server: what it keeps besides the sum when seeds begin to be opened; from there no session can be begun anew."""

    session: Session
    roster: Roster
    survivors: Survivors
    consents: Consents


@dataclass(frozen=True)
class Opened(_Said):
    """Client: shares of active neighbours' own masks, and of the masking keys of dropped ones."""

    number: int
    own: Shares
    keys: Shares


def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def decoded(kind: type[T], data: bytes) -> T:
    """Return a message from JSON, or refuse it."""
    try:
        found: T = _adapter(kind).validate_json(data)
    except (ValidationError, ValueError, RecursionError) as error:
        raise Breach(Fault.MALFORMED, f"not {kind.__name__}") from error
    return found
