"""Who takes part in a round: a function of the seed and the round, the same for every method."""

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from personafl.core import rng

Sampling = Literal["exact", "bernoulli", "cyclic"]
_BLOCK = 2**16  # clients hashed at a time: what a processor's cache holds


def draw_cohort(clients: NDArray[np.int64], size: int, sampling: Sampling, seed: int, round_: int) -> NDArray[np.int64]:
    """Return the clients of a round in ascending order.

    "exact": `size` of them, uniformly without replacement. "bernoulli": each one independently with probability
    size/len(clients), so the number varies and may be 0. "cyclic": the next `size` of an order that is drawn once and
    begins again at its end, so a client comes back after ⌊len(clients)/size⌋ rounds at the earliest.
    """
    if sampling == "exact" and size == len(clients):
        return clients
    if sampling == "cyclic":
        order = clients[np.argsort(rng.mix(seed, "cycle", 0, clients), kind="stable")]
        return np.sort(order[(round_ * size + np.arange(size)) % len(clients)])
    if sampling == "bernoulli":
        return _below(size / len(clients), clients, seed, round_)[0]
    # The smallest draws win. They are looked for among somewhat more than are expected below a bar: 10⁶ clients take
    # milliseconds then. Were there too few, which has a probability below 10⁻⁹, all are looked at.
    bar = (size + 6 * math.sqrt(size) + 10) / len(clients)
    some, draws = _below(bar, clients, seed, round_)
    if len(some) < size:
        some, draws = clients, rng.mix(seed, "cohort", round_, clients)
    return np.sort(some[np.argpartition(draws, size - 1)[:size]])


def _below(bar: float, clients: NDArray[np.int64], seed: int, round_: int) -> tuple[NDArray[np.int64], rng.Words]:
    """Return the clients whose draw of a round, taken as a number in [0, 1), is below a bar; and these draws."""
    found, limit = [], np.uint64(min(int(bar * 2.0**64), 2**64 - 1))
    for start in range(0, len(clients), _BLOCK):
        part = clients[start : start + _BLOCK]
        draws = rng.mix(seed, "cohort", round_, part)
        chosen = np.flatnonzero(draws < limit)
        found.append((part[chosen], draws[chosen]))
    return np.concatenate([some for some, _ in found]), np.concatenate([draws for _, draws in found])


def draw_offline(
    members: NDArray[np.int64], active: NDArray[np.int64], wanted: int | float, seed: int, round_: int
) -> NDArray[np.int64]:
    """Return who of a server's members trains without contact in a round, in ascending order.

    `wanted` is a count, or a share of the members; where fewer are not active, it is all of those.
    """
    others = np.setdiff1d(members, active)
    size = wanted if isinstance(wanted, int) else round(wanted * len(members))
    order = np.argsort(rng.mix(seed, "offline", round_, others), kind="stable")
    return np.sort(others[order[:size]])
