"""Who is calling: read from the certificate that TLS has verified, and checked again at every call.

TLS looks at a certificate once, when a connection begins. Connections live long, so its end and the revocation list are
looked at here, each time.
"""

import contextlib
import functools
import os
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from cryptography import x509
from cryptography.x509.oid import NameOID

from personafl.deploy.net.messages import Code, Refused
from personafl.errors import BadInput

NUMBER_URI = "personafl:client:"
_NAME = re.compile(r"server|coordinator|(cloud|device)-[a-z0-9]([a-z0-9._-]{0,40}[a-z0-9])?")


@dataclass(frozen=True)
class Files:
    """Where one machine's certificate, key and authority are."""

    certificate: Path
    key: Path
    authority: Path

    @classmethod
    def beside(cls, certificate: Path) -> Self:
        """Return a certificate with its key and ca.pem, which lie beside it; fail if one is not there."""
        files = cls(certificate, certificate.with_suffix(".key"), certificate.with_name("ca.pem"))
        for path in (files.certificate, files.key, files.authority):
            if not path.is_file():
                raise BadInput(f"--identity {certificate}: {path} is not there; see personafl pki issue")
        return files


@dataclass(frozen=True)
class Identity:
    """The holder of a certificate."""

    name: str
    role: str  # server, coordinator, cloud or device
    number: int | None  # of a device
    serial: int
    ends: datetime

    def check_role(self, *allowed: str) -> None:
        """Refuse whoever is none of these."""
        if self.role not in allowed:
            raise Refused(Code.WRONG_ROLE, f"{self.name} is a {self.role}; this is for: {', '.join(allowed)}")


class Revocations:
    """The revocation list in a file, read anew when the file changes. Unreadable or not signed: everyone is refused."""

    def __init__(self, path: Path, authority: Path) -> None:
        self._path, self._authority = path, authority
        self._stamp: tuple[int, int, int] | None = None
        self._revoked: frozenset[int] = frozenset()
        self._load()

    def check(self, identity: Identity) -> None:
        """Refuse a certificate that has ended or is revoked."""
        if identity.ends <= datetime.now(UTC):
            raise Refused(Code.EXPIRED, f"the certificate of {identity.name} ended on {identity.ends:%Y-%m-%d %H:%M}")
        try:
            self._load()
        except BadInput as error:
            raise Refused(Code.REVOCATIONS_UNREADABLE, str(error)) from error
        if identity.serial in self._revoked:
            raise Refused(Code.REVOKED, f"the certificate of {identity.name} was revoked")

    def listed(self) -> frozenset[int]:
        """Return the serials of revoked certificates; those that were last read, if that cannot be done now."""
        with contextlib.suppress(BadInput):
            self._load()
        return self._revoked

    def _load(self) -> None:
        try:
            about = os.stat(self._path)
            stamp = (about.st_mtime_ns, about.st_size, about.st_ino)
            if stamp == self._stamp:
                return
            listed = x509.load_pem_x509_crl(self._path.read_bytes())
            key: Any = x509.load_pem_x509_certificate(self._authority.read_bytes()).public_key()
        except (OSError, ValueError) as error:
            raise BadInput(f"{self._path}: the revocation list cannot be read ({error})") from error
        if not listed.is_signature_valid(key):
            raise BadInput(f"{self._path}: the revocation list is not signed by {self._authority}")
        self._stamp, self._revoked = stamp, frozenset(entry.serial_number for entry in listed)


def number_of(pem: bytes) -> int | None:
    """Return the number of the device that a certificate is for, whoever issued it; None: it is for no device."""
    try:
        return identify(pem).number
    except Refused:
        return None


def role_of(name: str) -> str:
    """Return what a name may do: server, coordinator, cloud or device; fail on any other name."""
    if not _NAME.fullmatch(name):
        raise BadInput(
            f"name {name!r}: use server, coordinator, cloud-NAME or device-NAME, NAME in small letters, digits, - . _"
        )
    return name.partition("-")[0]


@functools.lru_cache(maxsize=2**14)
def identify(pem: bytes) -> Identity:
    """Return who holds a certificate that TLS has verified."""
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        (common,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        others = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        name = str(common.value)
        role = role_of(name)
        if name not in others.get_values_for_type(x509.DNSName):
            raise BadInput(f"{name!r} is not among its alternative names")
        uris = others.get_values_for_type(x509.UniformResourceIdentifier)
        numbers = [int(uri.removeprefix(NUMBER_URI)) for uri in uris if uri.startswith(NUMBER_URI)]
        if len(numbers) != (role == "device"):
            raise BadInput(f"{name!r} has {len(numbers)} numbers")
    except (ValueError, x509.ExtensionNotFound, BadInput) as error:
        raise Refused(Code.BAD_CERTIFICATE, f"not a certificate of personafl pki ({error})") from error
    ends = certificate.not_valid_after_utc
    return Identity(name, role, numbers[0] if numbers else None, certificate.serial_number, ends)
