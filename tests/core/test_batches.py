"""How batches are drawn: who sees what, how often, and independence of the rest of the stack."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from personafl.core import rng
from personafl.core.batches import (
    Batch,
    Batches,
    Repeated,
    Steps,
    Zipped,
    counted_samples,
    counted_steps,
    draw,
    drawn_work,
)

laws = settings(max_examples=40, deadline=None)
client_sizes = st.lists(st.integers(1, 9), min_size=1, max_size=4)
batch_widths = st.one_of(st.none(), st.integers(1, 12))


def pool(total: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(total, dtype=torch.float64), torch.arange(total)


def drawn(sizes: list[int], work: Steps, seed: int = 0) -> tuple[Batches, list[set[int]]]:
    """Return the batches, and the pool rows each client owns (a shuffled pool, so rows are not ranges)."""
    n = np.array(sizes, dtype=np.int64)
    rows = np.random.default_rng(seed).permutation(int(n.sum()))
    starts = np.cumsum(n) - n
    keys = rng.mix(seed, np.arange(len(n)))
    batches = draw(pool(len(rows)), rows, starts, n, work, keys, rng.mix("pace", keys))
    return batches, [set(rows[a : a + b].tolist()) for a, b in zip(starts, n, strict=True)]


def contents(batches: Batches, client: int) -> list[list[int]]:
    """The real rows of each step that has any."""
    steps = zip(batches.rows[client], batches.real[client], strict=True)
    return [rows[real].tolist() for rows, real in steps if bool(real.any())]


@laws
@given(client_sizes, batch_widths, st.integers(1, 3), st.integers(0, 99))
def test_every_epoch_visits_every_own_row_once(sizes: list[int], batch: int | None, epochs: int, seed: int) -> None:
    """With width b, client c takes ⌈n_c/b⌉ steps an epoch: full batches and one short; each epoch is a permutation of
    its rows. Steps beyond are padding, and padding repeats an own row, never someone else's.
    """
    batches, owned = drawn(sizes, Steps(epochs=epochs, batch=batch), seed)
    for client, (size, own) in enumerate(zip(sizes, owned, strict=True)):
        got = contents(batches, client)
        width = min(batch or size, size)
        per_epoch = math.ceil(size / width)
        assert len(got) == per_epoch * epochs
        for epoch in range(epochs):
            steps = got[epoch * per_epoch : (epoch + 1) * per_epoch]
            assert [len(step) for step in steps[:-1]] == [width] * (per_epoch - 1)
            assert len(steps[-1]) == size - width * (per_epoch - 1)
            assert sorted(row for step in steps for row in step) == sorted(own)
        assert set(batches.rows[client].reshape(-1).tolist()) <= own


@laws
@given(client_sizes, batch_widths, st.integers(1, 12), st.integers(0, 99))
def test_steps_go_on_into_the_next_epoch(sizes: list[int], batch: int | None, steps: int, seed: int) -> None:
    """Every client takes exactly `steps` steps, the first ones of as many epochs as it takes."""
    batches, _ = drawn(sizes, Steps(steps=steps, batch=batch), seed)
    enough, _ = drawn(sizes, Steps(epochs=steps, batch=batch), seed)
    assert batches.rows.shape[1] == steps
    for client in range(len(sizes)):
        assert len(contents(batches, client)) == steps
        assert contents(batches, client) == contents(enough, client)[:steps]


@laws
@given(client_sizes, batch_widths, st.integers(0, 99), st.booleans(), st.sampled_from([None, 1, 3]))
def test_batches_do_not_depend_on_the_rest_of_the_stack(
    sizes: list[int], batch: int | None, seed: int, whole_epochs: bool, least: int | None
) -> None:
    """A client drawn alone has the batches, and the dropout keys, that it has among others, up to padding."""
    work = Steps(**{"epochs" if whole_epochs else "steps": 5}, batch=batch, least=least)
    together, _ = drawn(sizes, work, seed)
    n = np.array(sizes)
    rows, starts = np.random.default_rng(seed).permutation(int(n.sum())), np.cumsum(n) - n
    keys = rng.mix(seed, np.arange(len(n)))
    for c in range(len(sizes)):
        one = slice(c, c + 1)
        alone = draw(pool(len(rows)), rows, starts[one], n[one], work, keys[one], rng.mix("pace", keys[one]))
        assert contents(alone, 0) == contents(together, c)
        assert torch.equal(alone.key[0], together.key[c, : alone.key.shape[1]])


def test_real_samples_come_first_in_a_batch() -> None:
    """So positions within a batch, and with them dropout masks, do not depend on padding."""
    batches, _ = drawn([3, 7], Steps(epochs=1, batch=5))
    assert batches.rows.shape == (2, 2, 5)
    assert batches.real.int().tolist() == [[[1, 1, 1, 0, 0], [0] * 5], [[1] * 5, [1, 1, 0, 0, 0]]]


def test_full_batch_is_one_step_an_epoch() -> None:
    """batch=None, or larger than the data: everyone's whole data in each step."""
    for batch in (None, 100):
        batches, owned = drawn([3, 7], Steps(epochs=2, batch=batch))
        assert batches.rows.shape == (2, 2, 7)
        for client in range(2):
            assert [set(step) for step in contents(batches, client)] == [owned[client]] * 2


def test_epochs_are_shuffled_anew() -> None:
    """Orders differ between epochs, clients and keys (equal with probability 1/20! each)."""
    batches, _ = drawn([20, 20], Steps(epochs=2, batch=20))
    orders = [tuple(step) for client in range(2) for step in contents(batches, client)]
    assert len(set(orders)) == 4
    again, _ = drawn([20, 20], Steps(epochs=2, batch=20))
    assert torch.equal(again.rows, batches.rows)


def test_dropout_keys_differ_by_client_and_step() -> None:
    """No two of 2·40 keys are equal."""
    batches, _ = drawn([20, 20], Steps(epochs=2, batch=1))
    assert len(set(batches.key.reshape(-1).tolist())) == 80


def test_a_client_without_data_takes_no_step() -> None:
    """Its batches are all padding, by epochs and by steps, also at the end of the rows, also when nobody has data."""
    for sizes in ([0, 3], [3, 0], [0, 0]):
        for work in (Steps(epochs=2, batch=2), Steps(steps=3, batch=2)):
            n = np.array(sizes)
            rows, starts = np.arange(3), np.cumsum(n) - n
            batches = draw(pool(3), rows, starts, n, work, rng.mix(np.arange(2)), rng.mix(np.arange(2)))
            for client, size in enumerate(sizes):
                assert bool(batches.real[client].any()) is (size > 0)


def test_no_work_is_no_steps() -> None:
    """Zero epochs or steps."""
    for work in (Steps(epochs=0), Steps(steps=0)):
        batches, _ = drawn([3, 7], work)
        assert batches.rows.shape[1] == batches.real.shape[1] == batches.key.shape[1] == 0
        assert list(Batches(*batches[:2], *(leaf[0] for leaf in batches[2:5])).each()) == []


def test_uneven_clients_take_memory_by_the_steps_they_take() -> None:
    """One row and 4000 rows at batch 1: the small client is padded, not shuffled 4000 times beside the large one,
    which would take 4000·2·4000 numbers (256 MB).
    """
    import tracemalloc

    tracemalloc.start()
    try:
        for work in (Steps(epochs=1, batch=1), Steps(steps=4000, batch=1)):
            batches, _ = drawn([1, 4000], work)
            assert int(batches.real[1].sum()) == 4000
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


def test_each_gathers_the_rows() -> None:
    """A batch's x and y are the pool's at its rows."""
    batches, _ = drawn([3, 7], Steps(epochs=1, batch=4))
    one = Batches(*batches[:2], *(leaf[1] for leaf in batches[2:5]))
    for step, batch in enumerate(one.each()):
        assert torch.equal(batch.x, one.rows[step].double())
        assert torch.equal(batch.y, one.rows[step])
        assert torch.equal(batch.real, one.real[step])
        assert batch.key == one.key[step]


def phase(values: list[list[float]], real: list[list[bool]]) -> Batches:
    """One client's batches [steps, batch] whose pool is the values in order."""
    flat = torch.tensor(values).flatten()
    rows = torch.arange(len(flat)).reshape(len(values), -1)
    return Batches(flat, flat, rows, torch.tensor(real), torch.arange(len(values)))


def test_zipped_phases_go_side_by_side() -> None:
    """Step s has batch s of each phase, of any width; it counts if all of them have a real sample."""
    yes, no = True, False
    one = phase([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [[yes, yes], [yes, no], [no, no]])
    two = phase([[7.0], [8.0], [9.0]], [[yes], [no], [yes]])
    steps = list(Zipped((one, two)).each())
    assert [[part.x.tolist() for part in step.parts] for step in steps] == [
        [[1.0, 2.0], [7.0]],
        [[3.0, 4.0], [8.0]],
        [[5.0, 6.0], [9.0]],
    ]
    assert [bool(step.real.any()) for step in steps] == [yes, no, no]
    assert Zipped((one, two)).device == one.device == one.rows.device


def test_phases_of_unequal_length_cannot_be_zipped() -> None:
    one, two = phase([[1.0], [2.0]], [[True], [True]]), phase([[1.0]], [[True]])
    with pytest.raises(ValueError, match="shorter"):
        list(Zipped((one, two)).each())


def test_repeated_is_the_same_batch_again() -> None:
    batch = Batch(torch.ones(2), torch.ones(2), torch.tensor([True, False]), torch.tensor(5))
    steps = list(Repeated(batch, 3).each())
    assert len(steps) == 3
    assert all(step is batch for step in steps)
    assert Repeated(batch, 3).device == batch.real.device


@pytest.mark.parametrize("given", [{}, {"epochs": 1, "steps": 1}])
def test_steps_wants_one_of_epochs_and_steps(given: dict[str, int]) -> None:
    """Neither, or both, is a mistake."""
    with pytest.raises(ValueError, match="either epochs or steps"):
        Steps(**given)


def test_a_random_number_of_steps_is_uniform() -> None:
    """K ~ U{2, …, 5}: of 4000 clients each number has 1000 ± 4.5 standard deviations (27 each)."""
    counts = np.bincount(drawn_work(Steps(steps=5, least=2), rng.mix(3, np.arange(4000))), minlength=6)
    assert counts[:2].tolist() == [0, 0]
    assert np.abs(counts[2:] - 1000).max() < 125
    assert drawn_work(Steps(steps=5), rng.mix(3, np.arange(7))).tolist() == [5] * 7
    assert drawn_work(Steps(steps=5, least=5), rng.mix(3, np.arange(7))).tolist() == [5] * 7


def test_random_steps_are_the_first_ones_of_all_steps() -> None:
    """A client that takes K of 5 steps has the first K minibatches, the rest is padding; phases of one pace agree."""
    sizes = np.array([7, 3, 9, 5])
    rows, starts = np.arange(24), np.cumsum(sizes) - sizes
    pace = rng.mix(8, np.arange(4))
    expected = drawn_work(Steps(steps=5, least=1), pace)
    assert len(set(expected.tolist())) > 1
    for phase in ("one", "two"):
        keys = rng.mix(phase, np.arange(4))
        some = draw(pool(24), rows, starts, sizes, Steps(steps=5, least=1, batch=4), keys, pace)
        whole = draw(pool(24), rows, starts, sizes, Steps(steps=5, batch=4), keys, pace)
        for client, count in enumerate(expected):
            assert contents(some, client) == contents(whole, client)[:count]


def test_random_epochs_are_the_first_ones_of_all_epochs() -> None:
    """Clients of 7, 3, 9 and 5 samples have 2, 1, 3 and 2 minibatches of 4 an epoch; K whole epochs of them."""
    sizes, work = np.array([7, 3, 9, 5]), Steps(epochs=5, least=1, batch=4)
    rows, starts = np.arange(24), np.cumsum(sizes) - sizes
    pace, keys = rng.mix(8, np.arange(4)), rng.mix("one", np.arange(4))
    epochs = drawn_work(work, pace)
    assert epochs.tolist() == drawn_work(Steps(steps=5, least=1), pace).tolist()
    assert len(set(epochs.tolist())) > 1
    assert counted_steps(work, sizes, pace).tolist() == (np.array([2, 1, 3, 2]) * epochs).tolist()
    assert counted_samples(work, sizes, pace).tolist() == (sizes * epochs).tolist()
    some = draw(pool(24), rows, starts, sizes, work, keys, pace)
    whole = draw(pool(24), rows, starts, sizes, Steps(epochs=5, batch=4), keys, pace)
    for client, count in enumerate(counted_steps(work, sizes, pace)):
        assert contents(some, client) == contents(whole, client)[:count]


@pytest.mark.parametrize("given", [{"epochs": 2, "least": 3}, {"steps": 3, "least": 4}, {"steps": 3, "least": 0}])
def test_the_least_number_is_at_most_the_largest(given: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="least"):
        Steps(**given)


@laws
@given(client_sizes, batch_widths, st.integers(1, 3), st.booleans())
def test_samples_are_counted_without_being_drawn(sizes: list[int], batch: int | None, many: int, epochs: bool) -> None:
    work = Steps(epochs=many, batch=batch) if epochs else Steps(steps=many, batch=batch)
    n = np.array(sizes, dtype=np.int64)
    batches, _ = drawn(sizes, work)
    counted = counted_samples(work, n, rng.mix("pace", rng.mix(0, np.arange(len(n)))))
    seen = batches.real.sum((1, 2)).numpy()
    assert (counted == seen).all() if epochs else (counted >= seen).all()
    assert (counted <= many * n).all()
