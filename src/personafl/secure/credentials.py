"""Who says something: signatures by the keys of certificates that one authority has issued."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from personafl.secure.faults import Breach, Fault

_WITH = ec.ECDSA(hashes.SHA256())


@dataclass(frozen=True)
class Credentials:
    """A client's certificate, in PEM, and the key that belongs to it."""

    certificate: bytes
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def read(cls, certificate: bytes, key: bytes) -> Self:
        """Return them from PEM."""
        private: Any = serialization.load_pem_private_key(key, None)
        return cls(certificate, private)

    def sign(self, content: bytes) -> bytes:
        """Return a signature (ECDSA with SHA-256)."""
        return self.key.sign(content, _WITH)


class Authority:
    """Checks certificates and signatures against the authority's own certificate.

    `number_of` returns the client's number that a certificate is for; None: it is not for a client.
    """

    def __init__(self, certificate: bytes, number_of: Callable[[bytes], int | None]) -> None:
        self._authority = x509.load_pem_x509_certificate(certificate)
        self._number_of = number_of
        self._known: dict[bytes, tuple[x509.Certificate, int | None]] = {}  # that it has issued, by their PEM

    def check(self, number: int, certificate: bytes, content: bytes, signature: bytes) -> None:
        """Refuse what was not signed by the holder of a certificate for this number."""
        held, whose = self._issued(certificate)
        if whose != number:
            raise Breach(Fault.BAD_CERTIFICATE, f"the certificate of client {number} is not for it")
        if not held.not_valid_before_utc <= datetime.now(UTC) < held.not_valid_after_utc:
            raise Breach(Fault.BAD_CERTIFICATE, f"the certificate of client {number} has ended, or has not begun")
        key: Any = held.public_key()
        try:
            key.verify(signature, content, _WITH)
        except InvalidSignature as error:
            raise Breach(Fault.BAD_SIGNATURE, f"not signed by client {number}, or for another session") from error

    def _issued(self, certificate: bytes) -> tuple[x509.Certificate, int | None]:
        if certificate not in self._known:
            try:
                held = x509.load_pem_x509_certificate(certificate)
                held.verify_directly_issued_by(self._authority)
                if not isinstance(held.public_key(), ec.EllipticCurvePublicKey):
                    raise TypeError("another kind of key")
            except (ValueError, TypeError, InvalidSignature) as error:
                raise Breach(
                    Fault.BAD_CERTIFICATE, f"a certificate that the authority did not issue ({error})"
                ) from error
            self._known[certificate] = held, self._number_of(certificate)
        return self._known[certificate]
