"""The samples of a phase, each once."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from personafl.core.batches import Batches, Padding
from personafl.fast.minibatches import distinct_rows, most_distinct


def batches_of(rows: torch.Tensor, most: int = 0) -> Batches:
    pool = torch.zeros(10)
    return Batches(pool, pool, rows, torch.ones_like(rows, dtype=torch.bool), rows[..., 0], Padding(most=most))


@given(st.lists(st.lists(st.integers(0, 9), min_size=6, max_size=6), min_size=1, max_size=4), st.integers(0, 4))
def test_distinct_rows(lists: list[list[int]], room: int) -> None:
    """Each client's row numbers once, and where they are; stacked clients get lists of one length, found or given."""
    rows = torch.tensor(lists).reshape(len(lists), 3, 2)
    most = max(len(set(numbers)) for numbers in lists)
    for given_ in (0, most + room):
        own, place = torch.func.vmap(lambda each, most=given_: distinct_rows(batches_of(each, most)))(rows)
        assert own.shape[1] == min(given_ or most, 6)
        for numbers, mine, at in zip(rows, own, place, strict=True):
            np.testing.assert_array_equal(mine[at], numbers)
            assert set(mine.tolist()) == set(numbers.flatten().tolist())
            alone, there = distinct_rows(batches_of(numbers))
            np.testing.assert_array_equal(alone, np.unique(numbers))
            np.testing.assert_array_equal(alone[there], numbers)


def test_how_many_there_may_be() -> None:
    """No more than a client has, nor than its steps see; 0 if nothing is known."""
    rows = torch.zeros(3, 2, dtype=torch.int64)
    assert [most_distinct(batches_of(rows, most)) for most in (0, 4, 9)] == [0, 4, 6]


def test_rows_of_images() -> None:
    """Rows of any shape, alone and stacked, over a shared and an own pool."""
    pool = torch.arange(48.0).reshape(4, 3, 2, 2)
    rows = torch.tensor([[[3, 0]], [[1, 1]]])
    real, key = torch.ones_like(rows, dtype=torch.bool), torch.zeros(2, 1, dtype=torch.int64)

    def first(pool: torch.Tensor, rows: torch.Tensor, real: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return next(Batches(pool, pool, rows, real, key).each()).x

    assert torch.equal(first(pool, rows[0], real[0], key[0]), pool[[3, 0]])
    assert torch.equal(torch.func.vmap(first, (None, 0, 0, 0))(pool, rows, real, key), pool[rows[:, 0]])
    own = torch.stack([pool, -pool])
    stacked = torch.func.vmap(first)(own, rows, real, key)
    assert torch.equal(stacked, torch.stack([pool[[3, 0]], -pool[[1, 1]]]))
