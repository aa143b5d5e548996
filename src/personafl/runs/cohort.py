"""Who takes part in a round: a function of the seed and the round, the same for every method."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from personafl.core import rng

__all__ = ["Sampling", "draw_cohort", "draw_offline"]

Sampling = Literal["exact", "bernoulli"]


def draw_cohort(clients: NDArray[np.int64], size: int, sampling: Sampling, seed: int, round_: int) -> NDArray[np.int64]:
    """Return the clients of a round in ascending order.

    "exact": `size` of them, uniformly without replacement. "bernoulli": each one independently with probability
    size/len(clients), so the number varies and may be 0.
    """
    if sampling == "exact" and size == len(clients):
        return clients
    draws = rng.mix(seed, "cohort", round_, clients)
    if sampling == "exact":
        return np.sort(clients[np.argpartition(draws, size - 1)[:size]])
    return clients[draws < size / len(clients) * 2.0**64]


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
