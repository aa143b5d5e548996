"""Schedules at given rounds, by hand."""

from __future__ import annotations

import pytest
import torch

from personafl.core.schedule import Constant, Exponential, Linear, Schedule, Step

# schedule, {round: factor}
BY_HAND: dict[str, tuple[Schedule, dict[int, float]]] = {
    "constant": (Constant(), {0: 1.0, 7: 1.0, 1000: 1.0}),
    "exponential": (Exponential(rate=0.9), {0: 1.0, 1: 0.9, 2: 0.81, 10: 0.9**10}),
    "step": (Step(every=3, factor=0.1), {0: 1.0, 2: 1.0, 3: 0.1, 5: 0.1, 6: 0.01, 9: 0.001}),
    # T = 10, peak at warmup·T = 4: (t+1)/4 for t = 0..3, then (10−t)/6.
    "linear": (
        Linear(rounds=10, warmup=0.4),
        {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, 4: 1.0, 5: 5 / 6, 7: 0.5, 9: 1 / 6, 10: 0.0, 12: 0.0},
    ),
    "linear without warm-up": (Linear(rounds=4, warmup=0.0), {0: 1.0, 1: 0.75, 3: 0.25, 4: 0.0}),
    "linear, all warm-up": (Linear(rounds=4, warmup=1.0), {0: 0.25, 3: 1.0}),
}


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float64])
@pytest.mark.parametrize("name", sorted(BY_HAND))
def test_factors_by_hand(name: str, dtype: torch.dtype) -> None:
    """The docstring's formula, to double precision whatever the dtype of the round number."""
    schedule, expected = BY_HAND[name]
    for round_, factor in expected.items():
        got = schedule(torch.tensor(round_, dtype=dtype))
        assert got.shape == ()
        assert float(got) == pytest.approx(factor, abs=1e-14), round_


@pytest.mark.parametrize("name", sorted(BY_HAND))
def test_factors_stay_in_range_and_fall_after_the_peak(name: str) -> None:
    """0 ≤ factor ≤ 1; it never falls while warming up and never rises after."""
    schedule, _ = BY_HAND[name]
    factors = torch.stack([schedule(torch.tensor(t)) for t in range(30)])
    assert bool(((factors >= 0) & (factors <= 1)).all())
    steps, peak = factors.diff(), int(factors.argmax())
    assert bool((steps[:peak] >= 0).all())
    assert bool((steps[peak:] <= 0).all())


@pytest.mark.parametrize("name", sorted(BY_HAND))
def test_rounds_under_vmap(name: str) -> None:
    """vmap over rounds = one by one."""
    schedule, _ = BY_HAND[name]
    rounds = torch.arange(12)
    assert torch.equal(torch.func.vmap(schedule)(rounds), torch.stack([schedule(t) for t in rounds]))
