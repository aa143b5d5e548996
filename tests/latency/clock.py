"""Play the clock of the simulated cloud with the paper's devices, beside what `personafl latency` says.

    python tests/latency/clock.py [MIXES [SEED]]

10 servers of 10 devices, the 3 earliest active, Exp(2) + U{1..5} · Exp(1); times between mixes in units of sync's.
"""

from __future__ import annotations

import itertools
import sys

import numpy as np
from numpy.typing import NDArray

from personafl.cloud.clock import Phases, play
from personafl.cloud.protocol import Coordinator
from personafl.cloud.topology import Topology
from personafl.core import rng
from personafl.latency.laws import Exponential


def phases(seed: int) -> Phases:
    """Return the rounds of the paper's servers."""

    def steps(devices: NDArray[np.int64], number: int) -> NDArray[np.int64]:
        return 1 + np.floor(5 * rng.uniforms(seed, "steps", number, devices)).astype(np.int64)

    homes = np.repeat(np.arange(10), 10)
    topology = Topology(homes, tuple(np.arange(100).reshape(10, 10)))
    laws = {"arrival": Exponential(mean=2.0), "step": Exponential(mean=1.0)}
    return Phases(topology=topology, active=3, **laws, steps=steps, seed=seed)


def pace(first: int, rigorous: bool, mixes: int, seed: int) -> float:
    """Return the mean time between two mixes, without those at the beginning."""
    played = play(Coordinator(10, first, rigorous=rigorous), phases(seed))
    times = [event.time for event in itertools.islice(played, mixes)]
    skipped = mixes // 10
    return (times[-1] - times[skipped]) / (mixes - 1 - skipped)


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    mixes, seed = (*given, *(4000, 0)[len(given) :])
    sync = pace(10, False, mixes, seed)
    print(f"sync: {sync:.2f} a mix")
    for first in (3, 5, 7):
        kept, alone = (pace(first, rigorous, mixes, seed) / sync for rigorous in (False, True))
        print(f"B = {first}: async {kept:.3f}, rigorous {alone:.3f}")
