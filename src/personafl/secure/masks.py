"""Secrets that two clients share, and the streams of masks that seeds make.

Two clients agree by X25519; HKDF-SHA256 makes of that secret, the session and a purpose the key of one use. A mask is
the stream of AES-256 in counter mode under a seed of 32 bytes, read as unsigned integers of 32 bits. It is added and
taken off modulo 2³².
"""

from collections.abc import Sequence

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from personafl.secure.faults import Breach, Fault
from personafl.secure.fixed import Vector

SEED_BYTES = 32
KEY_BYTES = 32
NONCE_BYTES = 12
_BLOCK = 2**16  # bytes of each stream at a time: the block that they are added to stays in the processor's cache
_NOUGHTS = bytes(_BLOCK)


def public_of(private: bytes) -> bytes:
    """Return the public key of a private one of 32 bytes."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agreed(private: bytes, public: bytes, session: bytes, purpose: bytes) -> bytes:
    """Return the key of 32 bytes that two clients have for a purpose in a session, each of its own and the other's."""
    if len(public) != KEY_BYTES:
        raise Breach(Fault.BAD_KEY, f"a key has {KEY_BYTES} bytes, not {len(public)}")
    try:
        secret = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise Breach(Fault.BAD_KEY, "a key with which every secret is the same") from error
    return HKDF(SHA256(), SEED_BYTES, salt=session, info=b"personafl secure " + purpose).derive(secret)


def add_streams(vector: Vector, plus: Sequence[bytes], minus: Sequence[bytes]) -> None:
    """Add the streams of some seeds to a vector, and take those of others off, modulo 2³² and in its memory."""
    if vector.dtype != np.dtype("<u4") or not vector.flags.c_contiguous or vector.ndim != 1:
        raise ValueError("a vector is one row of little-endian integers of 32 bits")
    streams = [(_stream(seed), True) for seed in plus] + [(_stream(seed), False) for seed in minus]
    room = bytearray(_BLOCK + 16)  # a cipher may ask for a block more than it writes
    words = np.frombuffer(room, dtype="<u4", count=_BLOCK // 4)
    for begin in range(0, len(vector), _BLOCK // 4):
        part = vector[begin : begin + _BLOCK // 4]
        noughts, drawn = memoryview(_NOUGHTS)[: 4 * len(part)], words[: len(part)]
        for stream, adds in streams:
            stream.update_into(noughts, room)
            (np.add if adds else np.subtract)(part, drawn, out=part)


def _stream(seed: bytes) -> CipherContext:
    if len(seed) != SEED_BYTES:
        raise ValueError(f"a seed has {SEED_BYTES} bytes, not {len(seed)}")
    return Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor()


def seal(key: bytes, nonce: bytes, content: bytes, about: bytes) -> bytes:
    """Return content that only who has the key can read, and that says what it is about."""
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, content, about)


def unseal(key: bytes, sealed: bytes, about: bytes) -> bytes:
    """Return what was sealed, if it was with this key and about this."""
    try:
        return ChaCha20Poly1305(key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], about)
    except (InvalidTag, ValueError) as error:
        raise Breach(Fault.BAD_SHARE, "a share that cannot be opened") from error
