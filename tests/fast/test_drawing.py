"""Batches drawn on a device are those of the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from personafl.core import rng
from personafl.core.batches import Padding, Steps, draw
from personafl.fast.drawing import draw_there, drawn, fits_there

WORKS = st.one_of(
    st.builds(Steps, epochs=st.integers(1, 3), batch=st.one_of(st.none(), st.integers(1, 7))),
    st.builds(Steps, steps=st.integers(1, 12), batch=st.one_of(st.none(), st.integers(1, 7))),
    st.builds(Steps, steps=st.integers(3, 6), batch=st.integers(1, 7), least=st.integers(1, 3)),
    st.builds(Steps, epochs=st.just(3), batch=st.integers(1, 7), least=st.integers(1, 3)),
)


@given(sizes=st.lists(st.integers(0, 20), min_size=1, max_size=6), work=WORKS, round_=st.integers(0, 5))
def test_they_are_those_of_the_host(sizes: list[int], work: Steps, round_: int) -> None:
    """Rows, what is real, and keys."""
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


def padding(sizes: list[int], work: Steps) -> Padding:
    counts, clients = np.array(sizes), rng.mix("any", np.arange(len(sizes)))
    pool, rows = (torch.zeros(9), torch.zeros(9)), np.arange(9)
    starts = np.cumsum(counts) - counts
    return drawn(pool, rows, torch.from_numpy(rows), starts % 9, counts, work, clients, clients).padding


def test_whether_steps_may_be_missing() -> None:
    """Batches of 2: 4 and 3 samples take two steps each, 1 sample one."""
    assert not padding([4, 3], Steps(epochs=1, batch=2)).gaps
    assert padding([4, 1], Steps(epochs=1, batch=2)).gaps
    assert padding([4, 0], Steps(steps=2, batch=2)).gaps
    assert not padding([4, 1], Steps(steps=2, batch=2)).gaps


def test_what_is_padding_for_all_is_left_out() -> None:
    """6 and 3 samples by 4: steps of 4 and 3, then of 2 and none; 6 and 5: of 4 and 4, then of 2 and 1."""
    assert padding([6, 3], Steps(epochs=1, batch=4)) == Padding(most=6)
    counts, keys, rows = np.array([5, 4]), rng.mix("any", np.arange(2)), np.arange(9)
    pool, work = (torch.arange(9.0), torch.arange(9.0)), Steps(steps=2, batch=3)
    batches = drawn(pool, rows, torch.from_numpy(rows), np.array([0, 5]), counts, work, keys, keys)
    assert batches.padding == Padding(gaps=False, widths=(3, 2), even=(True, False), most=5)
    for client in range(2):
        own = batches._replace(rows=batches.rows[client], real=batches.real[client], key=batches.key[client])
        first, last = own.each()
        assert (first.x.shape, first.full, last.x.shape, last.full) == ((3,), True, (2,), False)
        assert last.real.tolist() == [True, client == 0]


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
