"""Who masks with whom, and how many shares open a seed.

J. Bell et al., *Secure Single-Server Aggregation with (Poly)Logarithmic Overhead*, CCS 2020: each of n clients has k
neighbours, not n − 1. The graph is Harary's, a ring in which everyone knows the k/2 next on either side, after a
permutation that is drawn anew in every session. So the neighbours of a client are k others, drawn at random.

Of n clients `lost` may drop out and `corrupt` may tell the server all they know. With X corrupt and Y surviving ones
among the k neighbours of a client, both hypergeometric, the threshold t and k, which is even, are the smallest with

    n · P[X ≥ 2t − k] ≤ 2⁻⁴⁰    nobody gets t answers for each of two lists of survivors: honest clients answer once,
                                corrupt ones for both (and so X < t: these alone open nothing)
    n · P[Y < t] ≤ 2⁻²⁰         the sum can be opened; else the round is done again, with another graph
    lost + corrupt < k, or n² · P[k given ones are all lost or corrupt] ≤ 2⁻⁴⁰
                                the honest survivors hang together: a ring is cut where k/2 in a row are gone, twice

and where no such k is below n − 1, everyone is everyone's neighbour: then X = corrupt and Y ≥ n − 1 − lost for sure.
"""

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from personafl.secure.faults import Breach, Fault

_PRIVATE, _OPENED = 40, 20  # bits: what goes wrong with a probability of at most 2^-bits


@dataclass(frozen=True)
class Degree:
    """How many neighbours a client has, k, and how many of their shares open a seed, t."""

    neighbours: int
    threshold: int


@functools.lru_cache(maxsize=256)
def degree(clients: int, lost: int, corrupt: int) -> Degree:
    """Return k and t for n clients of which some may be lost and some corrupt; fail if no threshold does for them."""
    for neighbours in range(2, clients - 1, 2):
        threshold = _threshold(clients, lost, corrupt, neighbours)
        if threshold is not None:
            return Degree(neighbours, threshold)
    others = clients - 1
    threshold = (others + corrupt) // 2 + 1
    if others < 1 or threshold > others - lost:
        raise Breach(
            Fault.TOO_FEW,
            f"{clients} clients of which {lost} may drop out and {corrupt} be corrupt: no threshold does for that",
        )
    return Degree(others, threshold)


def _threshold(clients: int, lost: int, corrupt: int, neighbours: int) -> int | None:
    """Return the smallest threshold that does with so many neighbours; None: there is none."""
    gone, union = min(lost + corrupt, clients - 1), math.log2(clients)
    if neighbours <= gone:
        row = _log_comb(clients - 1 - neighbours, gone - neighbours) - _log_comb(clients - 1, gone)
        if 2 * union + row > -_PRIVATE:
            return None
    told = _tails(clients - 1, corrupt, neighbours)  # log2 P[X ≥ x]
    for threshold in range(neighbours // 2 + 1, neighbours + 1):
        if union + told[min(2 * threshold - neighbours, neighbours + 1)] <= -_PRIVATE:
            dropped = _tails(clients - 1, lost, neighbours)
            return threshold if union + dropped[neighbours - threshold + 1] <= -_OPENED else None
    return None


def _tails(others: int, marked: int, drawn: int) -> NDArray[np.float64]:
    """Return log2 P[X ≥ x] for x = 0 … drawn + 1, X the marked ones among some that are drawn of all others."""
    low, high = max(0, drawn - (others - marked)), min(marked, drawn)
    tails = np.full(drawn + 2, -np.inf)
    for count in range(high, low - 1, -1):
        chance = _log_comb(marked, count) + _log_comb(others - marked, drawn - count) - _log_comb(others, drawn)
        tails[count] = np.logaddexp2(tails[count + 1], chance)
    tails[:low] = 0.0
    tails[tails > 0] = 0.0
    return tails


def _log_comb(n: int, k: int) -> float:
    """Return log2 of n over k; −∞: there is none."""
    if not 0 <= k <= n:
        return -math.inf
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


def neighbours(seed: bytes, clients: Sequence[int], count: int) -> dict[int, frozenset[int]]:
    """Return the neighbours of each client in the graph that a public seed makes; everyone, where they are as few."""
    if count >= len(clients) - 1:
        return {client: frozenset(clients) - {client} for client in clients}
    ring = sorted(clients, key=lambda client: hashlib.sha256(seed + client.to_bytes(8)).digest())
    steps = [step for step in range(-(count // 2), count // 2 + 1) if step]
    return {client: frozenset(ring[(place + step) % len(ring)] for step in steps) for place, client in enumerate(ring)}
