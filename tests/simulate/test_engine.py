"""How clients are cut into stacks."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from personafl.core import rng
from personafl.core.batches import Steps, counted_steps
from personafl.simulate.engine import Engine


@given(st.lists(st.integers(0, 5), max_size=40), st.integers(1, 12), st.integers(1, 12))
def test_everyone_is_in_one_chunk_and_no_chunk_is_too_large(steps: list[int], chunk: int, least: int) -> None:
    clients = 100 + np.arange(len(steps))
    chunks = list(Engine("stacked", chunk, least).chunks(clients, np.array(steps, dtype=np.int64)))
    assert sorted(client for members in chunks for client in members) == clients.tolist()
    assert all(0 < len(members) <= chunk for members in chunks)


def test_those_with_equally_many_steps_go_together() -> None:
    """Three take 5 steps, four 2, one 1. Each number has its own stack if one client is enough for one. If it takes
    two, the last goes with those before; if four, those with 5 do not make a stack, nor does what is left then.
    """
    steps = np.array([2, 5, 2, 1, 5, 2, 5, 2])

    def cut(least: int) -> list[list[int]]:
        return [steps[members].tolist() for members in Engine("stacked", 8, least).chunks(np.arange(8), steps)]

    assert cut(1) == [[5, 5, 5], [2, 2, 2, 2], [1]]
    assert cut(2) == [[5, 5, 5], [2, 2, 2, 2, 1]]
    assert cut(4) == [[5, 5, 5, 2, 2, 2, 2, 1]]


def test_equal_clients_keep_their_order() -> None:
    chunks = Engine("stacked", 2).chunks(np.array([7, 3, 9]), np.zeros(3, dtype=np.int64))
    assert [chunk.tolist() for chunk in chunks] == [[7, 3], [9]]


def test_counted_steps() -> None:
    """⌈n/b⌉ an epoch: 0, 1, 1 and 2 batches of 4 samples; a number of steps is for those with data."""
    sizes, pace = np.array([0, 1, 4, 5]), rng.mix(np.arange(4))
    assert counted_steps(Steps(epochs=3, batch=4), sizes, pace).tolist() == [0, 3, 3, 6]
    assert counted_steps(Steps(epochs=3, batch=None), sizes, pace).tolist() == [0, 3, 3, 3]
    assert counted_steps(Steps(steps=7), sizes, pace).tolist() == [0, 7, 7, 7]
