"""Paired differences over clients and seeds: intervals worked by hand, and how often they hold the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from personafl.evaluate.paired import Paired, paired


def of(*seeds: list[float], clients: list[list[int]] | None = None) -> Paired:
    whose = clients or [list(range(len(part))) for part in seeds]
    found = paired([np.array(part) for part in seeds], [np.array(part) for part in whose])
    assert found is not None
    return found


def test_one_seed_is_the_paired_t_interval() -> None:
    """1, 2, 3: mean 2, standard deviation 1; t of 2 degrees of freedom is 4.3027, so ± 4.3027/√3 = 2.484."""
    found = of([1.0, 2.0, 3.0])
    assert (found.mean, found.half) == (pytest.approx(2), pytest.approx(2.484, abs=5e-4))
    assert not of([1.0, 2.0, 2.0, -3.0]).told_apart
    assert (found.clients, found.seeds) == (3, 1)


def test_the_same_clients_in_all_seeds_are_two_random_factors() -> None:
    """Seeds (1, 3) and (2, 6): mean 3, seed means 2 and 4, client means 1.5 and 4.5, all four residuals ± ½.

    Mean squares: clients 2(1.5² + 1.5²)/1 = 9, seeds 2(1 + 1)/1 = 4, rest 4·¼/1 = 1. The variance of the mean is
    (9 + 4 - 1)/4 = 3, with 3²/((9/4)² + (4/4)²) = 1.4845 degrees of freedom.
    """
    found = of([1.0, 3.0], [2.0, 6.0])
    assert found.mean == pytest.approx(3)
    assert found.half == pytest.approx(stats.t.ppf(0.975, 9 / (81 / 16 + 1)) * math.sqrt(3))


def test_seeds_that_differ_less_than_chance_add_nothing() -> None:
    """(1, 3, 5) and (2, 2, 5): both means 3; client means 1.5, 2.5, 5, so 2(2.25 + 0.25 + 4)/2 = 6.5 over 6."""
    found = of([1.0, 3.0, 5.0], [2.0, 2.0, 5.0])
    assert found.half == pytest.approx(stats.t.ppf(0.975, 2) * math.sqrt(6.5 / 6))


def test_clients_of_their_own_in_every_seed() -> None:
    """(0, 2) and (10, 12): between seeds 5² with one degree of freedom, far above 1/2 within: ± 12.706·5."""
    found = of([0.0, 2.0], [10.0, 12.0], clients=[[0, 1], [2, 3]])
    assert (found.mean, found.half) == (pytest.approx(6), pytest.approx(12.7062 * 5, rel=1e-5))
    assert found.clients == 4


def test_a_seed_counts_as_much_as_another_whatever_its_clients() -> None:
    """The table has the mean of seed means: (1 + 4)/2, where all six clients pooled would give 2."""
    found = of([1.0, 1.0, 1.0, 1.0], [4.0, 4.0])
    assert found.mean == pytest.approx(2.5)


def test_shares_and_the_other_way_round() -> None:
    """Above 0: 2 of 4 and 1 of 2; below: 1 of 4 and none; one is not known, and 0 is neither."""
    found = of([1.0, 2.0, -1.0, 0.0, math.nan], [1.0, 0.0])
    assert (found.better, found.worse) == (0.5, 0.125)
    assert (-found).better == 0.125
    assert (-found).mean == -found.mean


def test_what_cannot_be_said() -> None:
    assert paired([np.array([math.nan])], [np.array([0])]) is None
    assert paired([], []) is None
    alone = of([3.0])
    assert math.isnan(alone.half)
    assert not alone.told_apart
    same = of([0.0, 0.0], [0.0, 0.0])
    assert (same.mean, same.half, same.told_apart) == (0, 0, False)


@pytest.mark.parametrize(
    ("clients", "seeds", "by_client", "by_seed"), [(12, 1, 1.0, 0.0), (30, 3, 1.0, 0.3), (100, 3, 0.2, 0.5)]
)
def test_intervals_hold_the_truth_as_often_as_they_say(
    clients: int, seeds: int, by_client: float, by_seed: float
) -> None:
    """Of 600 draws with mean 0, 95 % ± 2.6 (three standard errors), and a little more where seeds are truncated."""
    generator = np.random.default_rng(0)
    held = 0
    for _ in range(600):
        own, shift = generator.normal(0, by_client, clients), generator.normal(0, by_seed, seeds)
        parts = [own + shift[seed] + generator.normal(size=clients) for seed in range(seeds)]
        found = paired(parts, [np.arange(clients)] * seeds)
        held += found is not None and abs(found.mean) <= found.half
    assert 0.92 < held / 600 < 0.985
