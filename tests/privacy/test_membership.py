"""An attack on what is released: can it be told whether a client took part better than ε allows?"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from personafl.algorithms.averaging import Averaging, Change
from personafl.privacy.distributed import client_key, lattice_for, sent
from personafl.privacy.mechanisms import Accounted
from personafl.privacy.noise import make_key
from personafl.uploads.private import PrivateServer

pytest.importorskip("dp_accounting", reason="differential privacy is accounted for by dp-accounting")

ROUNDS, RATE, OTHERS, TRIALS, DELTA = 3, 0.5, 10, 500, 1e-2
START = {"w": torch.zeros(8, dtype=torch.float64)}
DIRECTION = torch.eye(8, dtype=torch.float64)[0]
PROBLEM: Any = None


def released(noise: float, trial: int, *, member: bool) -> float:
    """Return the most telling number of a run's models: how far they went where the client that is asked for pulls."""
    rule = PrivateServer(rule=Averaging(), clip=1.0, noise=noise, cohort=RATE * OTHERS, key=make_key(trial))
    random = np.random.default_rng(trial)
    state = rule.init(PROBLEM, START, OTHERS)
    for number in range(ROUNDS):
        present = random.random(OTHERS + 1) < RATE
        others = torch.from_numpy(random.normal(size=(OTHERS, 8)))[torch.from_numpy(present[1:])]
        others[:, 0] = 0  # the attacker knows the others, and takes them away
        asked = 50 * DIRECTION[None] if member and present[0] else others[:0]
        rows = torch.cat([asked, others])
        joined = rule.join(state, None, Change({"w": rows}, torch.zeros(len(rows))), torch.ones(len(rows)))
        state = rule.update(state, joined, number)
    return float(state.own.model["w"] @ DIRECTION)


def released_by_devices(honest: int, trial: int, *, member: bool) -> float:
    """Return the same of one sum of four devices: one is lost, one tells its share, which is taken away, two are left.

    Shares are those of noise 1 that so many honest ones would have between them; one of the two is asked for.
    """
    lattice, none = lattice_for(1.0, 4, honest, 8), torch.zeros(8, dtype=torch.float64)
    two = [Change({"w": 50 * DIRECTION if member else none}, torch.zeros(())), Change({"w": none}, torch.zeros(()))]
    key = make_key(trial)
    total = sum(float(sent(up, 1.0, lattice, client_key(key, at), 0)[0]) for at, up in enumerate(two))
    return total / lattice.radius


def least_epsilon(released: Callable[..., float], how: float) -> float:
    """Return the ε that the attack shows, with 95 % confidence: below ln((TPR − δ)/FPR), at the best threshold.

    The threshold is chosen on half of the trials, and rates are bounded on the other half (Clopper and Pearson).
    """
    without, with_it = (
        np.array([released(how, 2 * trial + offset, member=member) for trial in range(TRIALS)])
        for offset, member in ((0, False), (1, True))
    )
    half = TRIALS // 2

    def shown(first: slice, threshold: float) -> float:
        false, true = (int((found[first] > threshold).sum()) for found in (without, with_it))
        high = stats.beta.ppf(0.975, false + 1, half - false) if false < half else 1.0
        low = stats.beta.ppf(0.025, true, half - true + 1) if true else 0.0
        return float(np.log(max(low - DELTA, 1e-12) / high))

    best = max(np.quantile(without[:half], [0.5, 0.8, 0.9, 0.95, 0.98, 1.0]), key=lambda t: shown(slice(half), t))
    return shown(slice(half, None), best)


@pytest.mark.system
@pytest.mark.parametrize("noise", [0.6, 1.0, 2.0])
def test_presence_is_guessed_no_better_than_epsilon_allows(noise: float) -> None:
    from personafl.privacy.accounting import epsilon

    assert least_epsilon(released, noise) <= epsilon(noise, ROUNDS, DELTA, RATE)


@pytest.mark.system
def test_with_next_to_no_noise_it_is_guessed() -> None:
    from personafl.privacy.accounting import epsilon

    assert least_epsilon(released, 0.01) > 3
    assert epsilon(0.01, ROUNDS, DELTA, RATE) > 3


@pytest.mark.system
def test_two_devices_that_are_left_hide_each_other_if_shares_are_for_two() -> None:
    """With shares for twenty the attack shows more than what is accounted for: they must be for the least that add."""
    spent = Accounted(mechanism="distributed", delta=DELTA).epsilon(1.0, [1])
    assert least_epsilon(released_by_devices, 2) <= spent
    assert least_epsilon(released_by_devices, 20) > spent
