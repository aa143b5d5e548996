"""Clients with certificates, and a server that takes them through a session, with anything gone wrong that is asked."""

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from numpy.typing import NDArray

from personafl.secure.circle import Circle
from personafl.secure.client import Client
from personafl.secure.credentials import Authority, Credentials
from personafl.secure.fixed import Grid
from personafl.secure.messages import Session
from personafl.secure.server import Aggregation, Stage

NOW = datetime.now(UTC)
Vectors = dict[int, NDArray[np.uint32]]


def named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


@functools.cache
def authority_key(name: str) -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def signed(
    subject: str, key: ec.EllipticCurvePrivateKey, by: str = "authority", ends: datetime = NOW + timedelta(days=1)
) -> bytes:
    builder = x509.CertificateBuilder(named(by), named(subject), key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(NOW - timedelta(days=2)).not_valid_after(ends)
    return builder.sign(authority_key(by), hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@functools.cache
def person(number: int) -> Credentials:
    key = ec.generate_private_key(ec.SECP256R1())
    return Credentials(signed(f"client {number}", key), key)


def number_of(certificate: bytes) -> int | None:
    (name,) = x509.load_pem_x509_certificate(certificate).subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    kind, _, number = str(name.value).partition(" ")
    return int(number) if kind == "client" else None


def authority() -> Authority:
    return Authority(signed("authority", authority_key("authority")), number_of)


def session_of(clients: int, *, least: int | None = None, corrupt: int = 0, length: int = 5, **other: Any) -> Session:
    least = clients - clients * 3 // 10 if least is None else least
    base = Session("run", 3, "a" * 32, "m" * 64, least, corrupt, length, Grid(clients, 1.0, 1.0))
    return replace(base, **other)


def vectors_of(numbers: Collection[int], length: int, seed: int = 0) -> Vectors:
    generator = np.random.default_rng(seed)
    return {number: generator.integers(0, 2**32, length, dtype=np.uint32) for number in sorted(numbers)}


def total(vectors: Vectors, numbers: Collection[int]) -> NDArray[np.uint32]:
    """Return the sum modulo 2³², by Python's own integers."""
    columns = zip(*(vectors[number].tolist() for number in numbers), strict=True)
    return np.array([sum(column) % 2**32 for column in columns], dtype=np.uint32)


class Round:
    """A session of everyone, step by step. `changed[stage]` changes what the server tells or clients say in it."""

    def __init__(
        self,
        session: Session,
        numbers: Collection[int],
        *,
        ca: Authority | None = None,
        before: Mapping[int, Collection[Circle]] | None = None,
    ) -> None:
        """`before` are the circles of earlier tries that clients remember."""
        self.ca = ca or authority()
        self.session, self.numbers = session, sorted(numbers)
        self.clients = {
            number: Client(session, number, person(number), self.ca, (before or {}).get(number, ()))
            for number in self.numbers
        }
        self.server = Aggregation(session, self.numbers, self.ca)
        self.vectors = vectors_of(self.numbers, session.length)

    def run(self, *, gone: Mapping[Stage, Collection[int]] | None = None, until: Stage = Stage.DONE) -> "Round":
        """Go through the stages; `gone` are clients from which a stage hears nothing, and nothing after it."""
        silent: set[int] = set()
        while self.server.stage < until:
            stage = self.server.stage
            silent |= set((gone or {}).get(stage, ()))
            for number in sorted(self.server.awaited - silent):
                self.server.hear(self.step(number))
            self.server.close()
        return self

    def step(self, number: int, told: Any = None) -> Any:
        """Let a client take its step in the stage that the server is in."""
        client, stage = self.clients[number], self.server.stage
        if stage is Stage.KEYS:
            return client.advertise()
        told = self.server.answer(number) if told is None else told
        steps: dict[Stage, Callable[[], Any]] = {
            Stage.SHARES: lambda: client.share(told),
            Stage.VECTORS: lambda: client.mask(told, self.vectors[number].copy()),
            Stage.CONSENTS: lambda: client.consent(told),
            Stage.OPENINGS: lambda: client.open(told),
        }
        return steps[stage]()

    def at(self, stage: Stage, *, gone: Mapping[Stage, Collection[int]] | None = None) -> "Round":
        """Go on to the beginning of a stage."""
        return self.run(gone=gone, until=stage)
