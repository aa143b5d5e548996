"""A machine's own certificate: read anew when its files change, and warned of before it ends."""

import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from personafl.deploy.net.identity import Files, identify
from personafl.errors import BadInput

_EARLY, _SHARE = timedelta(days=14), 10  # before its end, or this part of its life, whichever is less
DAY = 24 * 3600.0


class Pems(NamedTuple):
    """What the files have: all that TLS needs."""

    key: bytes
    certificate: bytes
    authority: bytes


class Own:
    """The certificate in a machine's files."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._stamp = self._stamped()
        self.pems = self._read()

    def renewed(self) -> bool:
        """Read the files if they have changed; return whether they had. Half a renewal is left for the next time."""
        try:
            stamp = self._stamped()
            if stamp == self._stamp:
                return False
            self.pems, self._stamp = self._read(), stamp
        except (OSError, BadInput):
            return False
        return True

    def ended(self) -> str | None:
        """Return what to say if the certificate has ended."""
        who = identify(self.pems.certificate)
        if who.ends > datetime.now(UTC):
            return None
        return f"the certificate of {who.name} ended on {who.ends:%Y-%m-%d %H:%M} UTC; {self._remedy}"

    def ending(self) -> str | None:
        """Return what to say if the certificate ends soon, or has ended."""
        certificate, now = x509.load_pem_x509_certificate(self.pems.certificate), datetime.now(UTC)
        begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        if ends - now > min(_EARLY, (ends - begins) / _SHARE):
            return None
        name = identify(self.pems.certificate).name
        return self.ended() or f"the certificate of {name} ends on {ends:%Y-%m-%d %H:%M} UTC; {self._remedy}"

    @property
    def _remedy(self) -> str:
        return f"renew it with personafl pki issue, and replace {self._files.certificate} and its key"

    def _stamped(self) -> list[tuple[int, int, int]]:
        found = [os.stat(path) for path in (self._files.key, self._files.certificate, self._files.authority)]
        return [(about.st_mtime_ns, about.st_size, about.st_ino) for about in found]

    def _read(self) -> Pems:
        files = self._files
        pems = Pems(files.key.read_bytes(), files.certificate.read_bytes(), files.authority.read_bytes())
        try:
            key = serialization.load_pem_private_key(pems.key, None).public_key()
            belongs = x509.load_pem_x509_certificate(pems.certificate).public_key() == key
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise BadInput(f"--identity {files.certificate}: it or its key cannot be read ({error})") from error
        if not belongs:
            raise BadInput(f"--identity {files.certificate}: {files.key} is not its key; carry both anew")
        return pems


def check_lasting(files: Files) -> None:
    """Fail if a machine's certificate has ended, or is not its authority's: others would only say no."""
    own = Own(files)
    if (text := own.ended()) is not None:
        raise BadInput(f"--identity {files.certificate}: {text}")
    try:
        certificate = x509.load_pem_x509_certificate(own.pems.certificate)
        authorities = x509.load_pem_x509_certificates(own.pems.authority)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise BadInput(f"{files.authority}: cannot be read ({error}); carry it anew") from error
    if not any(_issued(certificate, authority) for authority in authorities):
        raise BadInput(f"--identity {files.certificate}: {files.authority} did not issue it; carry both anew")


def _issued(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def warn(files: Files, tell: Callable[[str], None]) -> None:
    """Say it if a machine's certificate ends soon; one that cannot be read is on its way to be replaced."""
    try:
        text = Own(files).ending()
    except (OSError, BadInput):
        return
    if text is not None:
        tell(text)
