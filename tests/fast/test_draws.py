"""Batches drawn on a device are those of the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from personafl.core import rng
from personafl.core.batches import Steps, draw
from personafl.fast.draws import draw_there, fits_there

WORKS = st.one_of(
    st.builds(Steps, epochs=st.integers(1, 3), batch=st.one_of(st.none(), st.integers(1, 7))),
    st.builds(Steps, steps=st.integers(1, 12), batch=st.one_of(st.none(), st.integers(1, 7))),
    st.builds(Steps, steps=st.integers(3, 6), batch=st.integers(1, 7), least=st.integers(1, 3)),
    st.builds(Steps, epochs=st.just(3), batch=st.integers(1, 7), least=st.integers(1, 3)),
)


@given(sizes=st.lists(st.integers(0, 20), min_size=1, max_size=6), work=WORKS, round_=st.integers(0, 5))
def test_they_are_those_of_the_host(sizes: list[int], work: Steps, round_: int) -> None:
    """Rows, what is real, keys, and whether there are gaps."""
    counts = np.array(sizes)
    starts = np.cumsum(counts) - counts
    rows = rng.permutations(np.array([max(counts.sum(), 1)]), rng.mix("rows", np.arange(1)))[0]
    clients = np.arange(len(counts))
    keys, pace = rng.mix("keys", round_, clients), rng.mix("pace", round_, clients)
    pool = torch.zeros(len(rows), 2), torch.zeros(len(rows))
    host = draw(pool, rows, starts, counts, work, keys, pace)
    there = draw_there(pool, torch.from_numpy(rows), starts, counts, work, keys, pace)
    for name in ("rows", "real", "key"):
        assert torch.equal(getattr(host, name), getattr(there, name)), name
    assert host.gaps == there.gaps


def test_a_last_word_may_be_mixed_on_a_device() -> None:
    """`scramble` is the last round of `mix`, for all 64 bits."""
    words = rng.mix("any", np.arange(1000))
    mixed = rng.scramble(
        (torch.from_numpy(rng.mix("other", 3).reshape(1).view(np.int64)) ^ torch.from_numpy(words.view(np.int64)))
        + rng.GOLDEN
    )
    assert np.array_equal(mixed.numpy().view(np.uint64), rng.mix("other", 3, words))


@pytest.mark.parametrize(("sizes", "fits"), [([10, 10], True), ([1, 10**6], False)])
def test_very_unequal_clients_are_left_to_the_host(sizes: list[int], fits: bool) -> None:
    """A client with one sample begins an epoch at every step, and each would be as long as the largest client."""
    work, pace = Steps(steps=100, batch=10), rng.mix("pace", np.arange(2))
    assert fits_there(np.array(sizes), work, pace) == fits
