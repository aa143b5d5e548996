"""Gaussian noise from a key: whoever has it draws the same again, and nobody else can tell it from other noise."""

import hashlib

import torch
from torch import Tensor

from personafl.core import rng, secret


def make_key(seed: int) -> bytes:
    """Return the key of a simulation, which repeats itself: it hides nothing from those who know the seed."""
    return hashlib.sha256(f"personafl privacy {seed}".encode()).digest()


def check_key(key: bytes) -> bytes:
    """Return a key that is as long as one must be."""
    if len(key) != secret.BYTES:
        raise ValueError(f"a key has {secret.BYTES} bytes, not {len(key)}")
    return key


def gaussians(key: bytes, site: str, count: int) -> Tensor:
    """Return `count` standard Gaussians of a draw site, in float64 (`core.secret`)."""
    return secret.gaussians(check_key(key), count, site)


def gaussians_on(device: torch.device, key: bytes, site: str, count: int) -> Tensor:
    """Return as many where they are needed: of another generator, that of simulations, which no secret rests on."""
    start = int.from_bytes(secret.derived(check_key(key), site, 8), "little", signed=True)
    keys = torch.full((1,), start, dtype=torch.int64, device=device)
    return rng.gaussians(keys, count, torch.float64)[0]
