"""A. Shamir, *How to Share a Secret*, CACM 1979: any t shares give the secret, fewer say nothing of it.

The secret s is the constant term of a polynomial of degree t − 1 over the integers modulo a prime p above 2²⁵⁶, whose
other coefficients are drawn: share x is its value at x, 1 ≤ x. All of a secret's 32 bytes are one number below p.
"""

import secrets
from collections.abc import Mapping, Sequence

SECRET_BYTES = 32
SHARE_BYTES = 33
PRIME = 2**256 + 297


def split(secret: bytes, holders: Sequence[int], threshold: int) -> dict[int, bytes]:
    """Return a share of a secret for each holder, a positive number, such that any `threshold` of them give it back."""
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret has {SECRET_BYTES} bytes, not {len(secret)}")
    if not 1 <= threshold <= len(holders):
        raise ValueError(f"a threshold of {threshold} for {len(holders)} holders")
    if len(set(holders)) != len(holders) or min(holders) < 1:
        raise ValueError("holders are different positive numbers")
    terms = [int.from_bytes(secret), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {holder: _value(terms, holder).to_bytes(SHARE_BYTES) for holder in holders}


def join(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Return the secret of shares, by holder; of more than the threshold, the rest must agree with it."""
    if len(shares) < threshold:
        raise ValueError(f"{len(shares)} shares, and {threshold} are needed")
    points = {holder: int.from_bytes(share) for holder, share in shares.items()}
    if any(len(share) != SHARE_BYTES for share in shares.values()) or max(points.values()) >= PRIME:
        raise ValueError("not a share")
    used = sorted(points)[:threshold]
    for other in sorted(points)[threshold:]:
        if _at(other, used, points) != points[other]:
            raise ValueError("the shares are not of one secret")
    secret = _at(0, used, points)
    if secret >> (8 * SECRET_BYTES):
        raise ValueError("the shares are not of a secret")
    return secret.to_bytes(SECRET_BYTES)


def _value(terms: Sequence[int], at: int) -> int:
    """Return Σ terms_i · at^i mod p, by Horner's rule."""
    total = 0
    for term in reversed(terms):
        total = (total * at + term) % PRIME
    return total


def _at(where: int, used: Sequence[int], points: Mapping[int, int]) -> int:
    """Return the value at a place of the polynomial through some points: Σ_i y_i Π_{j≠i} (where − x_j)/(x_i − x_j)."""
    total = 0
    for one in used:
        above, below = 1, 1
        for other in used:
            if other != one:
                above = above * (where - other) % PRIME
                below = below * (one - other) % PRIME
        total += points[one] * above * pow(below, -1, PRIME)
    return total % PRIME
