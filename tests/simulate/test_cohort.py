"""Who takes part: the right number, fairly, and the same for every method."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from personafl import api
from personafl.core import rng
from personafl.simulate import cohort
from personafl.simulate.cohort import draw_cohort

POPULATION = np.arange(3, 43)  # seen clients need not start at 0


@given(size=st.integers(1, 40), seed=st.integers(0, 2**40), number=st.integers(0, 10**6))
def test_exact_draws_distinct_clients_in_order(size: int, seed: int, number: int) -> None:
    cohort = draw_cohort(POPULATION, size, "exact", seed, number)
    assert len(cohort) == size
    assert (np.diff(cohort) > 0).all()
    assert np.isin(cohort, POPULATION).all()
    assert np.array_equal(cohort, draw_cohort(POPULATION, size, "exact", seed, number))


@pytest.mark.parametrize("bar", ["as it is", "too low"])
@pytest.mark.parametrize(("clients", "size"), [(1, 1), (40, 1), (40, 39), (5000, 600), (300_000, 100)])
def test_the_smallest_draws_win(monkeypatch: pytest.MonkeyPatch, clients: int, size: int, bar: str) -> None:
    """However many there are: among those below a bar that is looked for first, or among all."""
    if bar == "too low":
        monkeypatch.setattr(cohort, "_below", lambda *_: (np.zeros(0, np.int64), np.zeros(0, np.uint64)))
    population = 3 * np.arange(clients)
    expected = population[np.argsort(rng.mix(5, "cohort", 7, population))[:size]]
    assert draw_cohort(population, size, "exact", 5, 7).tolist() == sorted(expected.tolist())


def test_exact_is_uniform() -> None:
    """χ² of 40 counts over 4,000 rounds of 10: each expects 1,000, variance 1000·(1 − ¼), so Σ/750 has mean 39."""
    counts = np.zeros(43)
    for number in range(4000):
        counts[draw_cohort(POPULATION, 10, "exact", 7, number)] += 1
    statistic = ((counts[3:] - 1000) ** 2).sum() / 750
    assert 10 < statistic < 39 + 5 * np.sqrt(2 * 39)


def test_pairs_are_independent() -> None:
    """Two given clients meet in 10·9/(40·39) of the rounds, and rounds do not repeat each other."""
    draws = [draw_cohort(POPULATION, 10, "exact", 1, number) for number in range(8000)]
    together = np.mean([3 in set(cohort) and 4 in set(cohort) for cohort in draws])
    expected = 90 / 1560
    assert abs(together - expected) < 5 * np.sqrt(expected / 8000)
    assert len({tuple(cohort) for cohort in draws}) == 8000


def test_seeds_and_rounds_differ() -> None:
    first = draw_cohort(POPULATION, 20, "exact", 0, 0)
    assert not np.array_equal(first, draw_cohort(POPULATION, 20, "exact", 0, 1))
    assert not np.array_equal(first, draw_cohort(POPULATION, 20, "exact", 1, 0))


@pytest.mark.parametrize("sampling", ["exact", "bernoulli"])
def test_everybody(sampling: str) -> None:
    assert np.array_equal(draw_cohort(POPULATION, 40, sampling, 0, 0), POPULATION)  # type: ignore[arg-type]


def test_bernoulli_has_the_right_mean_and_variance() -> None:
    """Sizes are binomial(40, ¼): mean 10, variance 7.5."""
    sizes = np.array([len(draw_cohort(POPULATION, 10, "bernoulli", 3, number)) for number in range(4000)])
    assert abs(sizes.mean() - 10) < 5 * np.sqrt(7.5 / 4000)
    assert abs(sizes.var() - 7.5) < 1


def test_bernoulli_may_draw_nobody() -> None:
    """(1 − 1/40)^40 = 36 % of rounds."""
    empty = np.mean([len(draw_cohort(POPULATION, 1, "bernoulli", 0, number)) == 0 for number in range(2000)])
    assert abs(empty - (39 / 40) ** 40) < 5 * np.sqrt(0.36 * 0.64 / 2000)


@pytest.mark.parametrize("method", ["fedavg", "fedadam", "ditto", "local"])
def test_a_run_with_empty_rounds(tmp_path: Path, method: str) -> None:
    recipe = {
        "rounds": 8,
        "data": {"partition": {"kind": "iid", "clients": 4}},
        "model": {"name": "linear"},
        "training": {"steps": 1, "batch": "all"},
        "federation": {"cohort": 1, "sampling": "bernoulli"},
        "method": {"name": method},
        "engine": {"threads": 1},
    }
    result = api.run(recipe, out=tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rounds = [r for r in (json.loads(line, parse_constant=_refused) for line in lines) if r["event"] == "round"]
    empty = [r for r in rounds if r["clients"] == 0]
    assert 0 < len(empty) < len(rounds) == 8
    assert all((r["loss"], r["bytes_down"], r["bytes_up"]) == (None, 0, 0) for r in empty)
    assert all(np.isfinite(row["accuracy"]) for row in result.rows)


def _refused(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


@pytest.mark.parametrize(("clients", "size"), [(12, 6), (7, 2), (10, 3), (5, 5), (100, 7)])
def test_turns_are_apart_and_fair(clients: int, size: int) -> None:
    """Everybody's turn comes again after ⌊clients/size⌋ rounds at the earliest, and equally often."""
    who = np.arange(clients) * 3 + 1
    turns: dict[int, list[int]] = {int(one): [] for one in who}
    rounds = 2 * clients
    for number in range(rounds):
        drawn = draw_cohort(who, size, "cyclic", 5, number)
        assert len(set(drawn.tolist())) == size
        assert np.all(np.diff(drawn) > 0)
        for one in drawn.tolist():
            turns[one].append(number)
    assert {len(own) for own in turns.values()} == {2 * size}
    assert min(int(np.diff(own).min()) for own in turns.values()) == clients // size
    if size < clients:
        assert draw_cohort(who, size, "cyclic", 6, 0).tolist() != draw_cohort(who, size, "cyclic", 5, 0).tolist()
