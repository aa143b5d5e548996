"""Numbers over clients, by hand."""

import math

import numpy as np
import pytest

from personafl.evaluate.summary import hurt, summarize, wilson


def arrays(*values: list[float]) -> list[np.ndarray]:
    return [np.array(value, dtype=np.float64) for value in values]


def test_means_spread_and_quantiles() -> None:
    """Accuracies 0.2, 0.4, 0.9 with 1, 1, 8 samples; a client without samples does not count.

    mean 1.5/3 = 0.5; weighted (0.2 + 0.4 + 7.2)/10 = 0.78; variance (0.09 + 0.01 + 0.16)/3 = 0.26/3;
    linear quantiles: q25 = 0.3, q75 = 0.65, q10 = 0.2 + 0.2·0.2 = 0.24.
    """
    accuracy, loss = arrays([0.2, np.nan, 0.9, 0.4], [1.0, np.nan, 3.0, 2.0])
    summary = summarize(accuracy, loss, np.array([1, 0, 8, 1]))
    assert summary.accuracy == pytest.approx(0.5)
    assert summary.accuracy_weighted == pytest.approx(0.78)
    assert summary.accuracy_std == pytest.approx(math.sqrt(0.26 / 3))
    assert summary.loss == pytest.approx(2.0)
    assert summary.count == 3
    assert summary.quantiles == pytest.approx(
        {"0.00": 0.2, "0.10": 0.24, "0.25": 0.3, "0.50": 0.4, "0.75": 0.65, "0.90": 0.8, "1.00": 0.9}
    )


@pytest.mark.parametrize(
    ("clients", "expected"), [(1, 0.0), (9, 0.0), (10, 0.0), (11, 0.5), (20, 0.5), (30, 1.0), (70, 3.0)]
)
def test_worst_decile_is_the_mean_of_the_worst_tenth_rounded_up(clients: int, expected: float) -> None:
    """Client i of n has i: the worst k = ⌈n/10⌉ have mean (k − 1)/2; the order they come in does not matter."""
    accuracy = np.random.default_rng(0).permutation(clients).astype(np.float64)
    assert summarize(accuracy, accuracy, np.ones(clients, np.int64)).worst_decile == expected


def test_nobody_with_samples_is_nan_and_not_a_warning() -> None:
    nothing = np.full(2, np.nan)
    summary = summarize(nothing, nothing, np.zeros(2, np.int64))
    assert summary.count == 0
    assert math.isnan(summary.accuracy)
    assert math.isnan(hurt(nothing, nothing, np.zeros(2, np.int64)).share)


def test_hurt_counts_clients_that_lose_and_how_much() -> None:
    """Changes −0.1, −0.3, 0, +0.5, and one without samples: 2 of 4 hurt, by 0.2 on average."""
    personal, shared = arrays([0.4, 0.3, 0.5, 1.0, np.nan], [0.5, 0.6, 0.5, 0.5, np.nan])
    result = hurt(personal, shared, np.array([5, 5, 5, 5, 0]))
    assert result.share == 0.5
    assert result.mean_loss == pytest.approx(0.2)
    assert (result.low, result.high) == wilson(2, 4)
    unhurt = hurt(shared, shared, np.array([5, 5, 5, 5, 0]))
    assert (unhurt.share, unhurt.mean_loss) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        # Newcombe 1998, Table I, method 3 (score without continuity correction).
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (29, 29, 0.8830, 1.0),
    ],
)
def test_wilson_interval(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson(successes, trials) == pytest.approx((low, high), abs=5e-5)
