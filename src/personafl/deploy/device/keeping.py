"""A device's secret keys: 32 random bytes in its directory, for the owner's eyes alone."""

import secrets
from pathlib import Path

from personafl.errors import BadInput
from personafl.storage.files import atomic_write, storage

KEY_BYTES = 32


def kept_key(path: Path, *, known: bool = False) -> bytes:
    """Return the key that a device has, or make it one; `known`: it had one, and another would not do."""
    if not path.exists():
        if known:
            raise BadInput(
                f"{path}: was lost, and noise cannot be drawn again without it; put a copy back, or choose another "
                "--state, and the device begins like a newcomer"
            )
        atomic_write(path, secrets.token_bytes(KEY_BYTES), private=True)
    with storage(path):
        path.chmod(0o600)
        key = path.read_bytes()
    if len(key) != KEY_BYTES:
        remedy = "put a copy back" if known else "remove it"
        raise BadInput(f"{path}: is damaged, for it has {len(key)} bytes and not {KEY_BYTES}; {remedy}")
    return key
