"""Gaussian noise from secrets: whoever has one draws the same again, and nobody else can tell it from other noise."""

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

BYTES = 32  # of a key


def derived(key: bytes, site: str, size: int = BYTES) -> bytes:
    """Return bytes of a key for one draw site: SHAKE-256, which cannot be told from random without the key."""
    return hashlib.shake_256(key + site.encode()).digest(size)


def gaussians(key: bytes, count: int, site: str = "") -> Tensor:
    """Return `count` standard Gaussians of a draw site, in float64.

    Two numbers of 53 bits in (0, 1) make two Gaussians (Box and Muller).
    """
    pairs = (count + 1) // 2
    bits = np.frombuffer(derived(key, site, 16 * pairs), dtype="<u8").reshape(2, pairs) >> np.uint64(11)
    first, angle = torch.from_numpy(bits.astype(np.int64)).to(torch.float64).add_(0.5).mul_(2.0**-53)
    radius, angle = first.log_().mul_(-2).sqrt_(), angle.mul_(2 * math.pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count]
