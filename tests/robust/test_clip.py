"""Running medians and capped weights, by hand."""

import pytest
import torch

from personafl.robust.clip import RunningMedian
from personafl.robust.weighing import capped


def test_a_clip_follows_the_medians_of_the_last_rounds() -> None:
    """Medians 2, 8, 3, then 100: of the last three each time 2, 5, 3, 8; and twice that."""
    clip = RunningMedian(times=2.0, rounds=3)
    medians, found = clip.blank(), []
    for norms in ([1.0, 2.0, 50.0], [8.0], [2.0, 4.0], [100.0, 100.0, 1e9]):
        level, medians = clip.moved(medians, torch.tensor(norms, dtype=torch.float64))
        found.append(level)
    assert found == [4.0, 10.0, 6.0, 16.0]


@pytest.mark.parametrize(
    ("weights", "most", "expected"),
    [
        ([1, 2, 3], 0.5, [1, 2, 3]),  # 3 of 6 is a half
        ([1, 1, 8], 0.5, [1, 1, 2]),  # c = ½ (2 + c)
        ([1, 1, 1, 1e6], 0.25, [1, 1, 1, 1]),
        ([1, 5, 9], 0.4, [1, 2, 2]),  # c = 0.4 (1 + 2c)
        ([1, 5, 9], 0.2, [5, 5, 5]),  # a third is the least that the largest can have
        ([1, 5, 12], 0.2, [5, 5, 5]),  # all alike, as the one in the middle: a claim is worth nothing to their sum
        ([2, 1e6], 0.2, [2, 2]),
        ([1, 4, 4], 0.2, [3, 3, 3]),  # and the sum is never more than it was
        ([7], 0.1, [7]),
    ],
)
def test_weights_are_cut_to_a_share(weights: list[float], most: float, expected: list[float]) -> None:
    found = capped(torch.tensor(weights, dtype=torch.float64), most)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
