"""Certificates: an authority of one's own, what it issues, and the list of what it revoked.

    DIR/ca.pem, ca.key       the authority; the key stays here
    DIR/NAME.pem, NAME.key   what it issued, to be carried to the machine of that name
    DIR/issued.json          every certificate so far: name, number, serial, end
    DIR/revoked.pem          the revocation list, signed; servers read it anew when it changes

A name says what the holder may do: `server`, `coordinator`, `cloud-NAME`, `device-NAME`. A device has a number besides,
which its random draws come from: the one in its name, as in device-7, or else the lowest that is free.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from personafl.deploy.net.identity import NUMBER_URI, Files, role_of
from personafl.errors import BadInput
from personafl.storage.files import atomic_write, read_json, storage, write_json

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_SLACK = timedelta(minutes=5)  # clocks differ
_CLIENT, _SERVER = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH
# Devices never serve: their certificates must not pass for a server's.
_USES = {"device": [_CLIENT], "server": [_SERVER], "cloud": [_CLIENT, _SERVER], "coordinator": [_CLIENT, _SERVER]}


@dataclass(frozen=True)
class Issued:
    """One certificate that was issued."""

    name: str
    number: int | None  # of a device
    serial: int
    ends: str
    revoked: bool = False


def init(directory: Path, days: int = 3650) -> Path:
    """Make an authority in a new directory; return its certificate."""
    certificate = directory / "ca.pem"
    if (directory / "ca.key").exists() or certificate.exists():
        raise BadInput(f"{directory}: has an authority already; choose another directory")
    with storage(directory):
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o700)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "personafl authority")])
    made = (
        _begun(name, name, key, timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_others=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write_key(directory / "ca.key", key)
    atomic_write(certificate, made.public_bytes(serialization.Encoding.PEM))
    _Authority(directory).write_revocations()
    return certificate


def issue(
    directory: Path, name: str, hosts: Sequence[str] = LOCAL_HOSTS, lifetime: timedelta = timedelta(days=90)
) -> Files:
    """Issue a certificate and its key; again for the same name, it is renewed and keeps its number.

    `hosts` are the names and addresses under which a server is reached; devices have none.
    """
    return issue_all(directory, [name], hosts, lifetime)[name]


def issue_all(
    directory: Path, names: Sequence[str], hosts: Sequence[str] = LOCAL_HOSTS, lifetime: timedelta = timedelta(days=90)
) -> dict[str, Files]:
    """Issue certificates as `issue` does, in time that grows with their number alone; return the files of each."""
    for name in names:
        role_of(name)
    issued: dict[str, Files] = {}
    with _Authority(directory).locked() as authority:
        made = [(name, *authority.signed(name, hosts, lifetime)) for name in names]
        authority.save()  # before they exist: a number is never given out twice
        for name, key, certificate in made:
            files = Files(directory / f"{name}.pem", directory / f"{name}.key", directory / "ca.pem")
            _write_key(files.key, key)
            atomic_write(files.certificate, certificate.public_bytes(serialization.Encoding.PEM))
            issued[name] = files
    return issued


def revoke(directory: Path, name: str) -> int:
    """Revoke all certificates of a name; return how many were valid until now."""
    role_of(name)
    with _Authority(directory).locked() as authority:
        found = [entry for entry in authority.issued if entry.name == name]
        if not found:
            raise BadInput(f"{directory}: never issued {name!r}; see issued.json for the names")
        authority.issued = [
            Issued(**{**asdict(entry), "revoked": entry.revoked or entry.name == name}) for entry in authority.issued
        ]
        authority.save()
        authority.write_revocations()
        return sum(not entry.revoked for entry in found)


class _Authority:
    """An authority's directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            self.certificate = x509.load_pem_x509_certificate((directory / "ca.pem").read_bytes())
            key: Any = serialization.load_pem_private_key((directory / "ca.key").read_bytes(), None)
        except FileNotFoundError as error:
            raise BadInput(f"{directory}: has no authority; make one with: personafl pki init {directory}") from error
        except (OSError, ValueError, TypeError) as error:
            raise BadInput(f"{directory}: the authority cannot be read ({error})") from error
        self.key: ec.EllipticCurvePrivateKey = key
        self._path = directory / "issued.json"
        self.issued: list[Issued] = []
        self._numbers: dict[str, int] = {}  # of devices, by name
        self._taken: set[int] = set()
        self._lowest = 0  # number that may be free

    def _read(self) -> list[Issued]:
        return [Issued(**entry) for entry in read_json(self._path)["issued"]] if self._path.exists() else []

    @contextlib.contextmanager
    def locked(self) -> Iterator[_Authority]:
        """Hold the directory: two commands must not give out one number."""
        with storage(self.directory), open(self.directory / "lock", "w", opener=_private) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.issued = self._read()
            self._numbers = {entry.name: entry.number for entry in self.issued if entry.number is not None}
            self._taken = set(self._numbers.values())
            yield self

    def signed(
        self, name: str, hosts: Sequence[str], lifetime: timedelta
    ) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
        """Make a key and its certificate, and note it."""
        role = role_of(name)
        number = self.number_for(name) if role == "device" else None
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.DNSName(name)]
        names += [_host(host) for host in hosts] if role != "device" else []
        names += [x509.UniformResourceIdentifier(f"{NUMBER_URI}{number}")] if number is not None else []
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        made = (
            _begun(subject, self.certificate.subject, key, lifetime)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_others=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(_USES[role]), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        self.issued.append(Issued(name, number, made.serial_number, made.not_valid_after_utc.isoformat()))
        return key, made

    def number_for(self, name: str) -> int:
        """Return a device's number: as before, or the one in its name, or the lowest that is free."""
        if name in self._numbers:
            return self._numbers[name]
        wanted = name.removeprefix("device-")
        if wanted.isascii() and wanted.isdigit():
            number = int(wanted)
            if number >= 2**31 or number in self._taken:
                raise BadInput(f"name {name!r}: its number is too large or another device's; choose another name")
        else:
            number = next(number for number in itertools.count(self._lowest) if number not in self._taken)
            self._lowest = number
        self._numbers[name] = number
        self._taken.add(number)
        return number

    def save(self) -> None:
        """Write the list of all certificates."""
        write_json(self._path, {"issued": [asdict(entry) for entry in self.issued]})

    def write_revocations(self) -> None:
        """Write and sign the revocation list."""
        now = datetime.now(UTC)
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificate.subject)
            .last_update(now - _SLACK)
            .next_update(self.certificate.not_valid_after_utc)
        )
        for entry in self.issued:
            if entry.revoked:
                one = x509.RevokedCertificateBuilder().serial_number(entry.serial).revocation_date(now).build()
                builder = builder.add_revoked_certificate(one)
        made = builder.sign(self.key, hashes.SHA256())
        atomic_write(self.directory / "revoked.pem", made.public_bytes(serialization.Encoding.PEM))


def _begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, lifetime: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, now + lifetime) - _SLACK)
        .not_valid_after(now + lifetime)
    )


def _key_usage(*, signs_others: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_others,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_others,
        crl_sign=signs_others,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    """Write a private key that only its owner can read, at no time anyone else."""
    data = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with storage(path):
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            os.fsync(descriptor)
