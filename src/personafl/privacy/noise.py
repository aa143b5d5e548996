"""Gaussian noise from a key: whoever has it draws the same again, and nobody else can tell it from other noise."""

import hashlib

import numpy as np
import torch
from torch import Tensor

_KEY = 32  # bytes


def make_key(seed: int) -> bytes:
    """Return the key of a simulation, which repeats itself: it hides nothing from those who know the seed."""
    return hashlib.sha256(f"personafl privacy {seed}".encode()).digest()


def check_key(key: bytes) -> bytes:
    """Return a key that is as long as one must be."""
    if len(key) != _KEY:
        raise ValueError(f"a key has {_KEY} bytes, not {len(key)}")
    return key


def gaussians(key: bytes, site: str, count: int) -> Tensor:
    """Return `count` standard Gaussians of a draw site, in float64.

    The bits are SHAKE-256's for the key and the site, a stream that cannot be told from random without the key; two
    numbers of 53 bits in (0, 1) make two Gaussians (Box and Muller).
    """
    check_key(key)
    pairs = (count + 1) // 2
    stream = hashlib.shake_256(key + site.encode()).digest(16 * pairs)
    bits = np.frombuffer(stream, dtype="<u8").reshape(2, pairs) >> np.uint64(11)
    first, second = (bits.astype(np.float64) + 0.5) * 2.0**-53
    radius, angle = np.sqrt(-2 * np.log(first)), 2 * np.pi * second
    return torch.from_numpy(np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count])
