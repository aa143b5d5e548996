"""Uploads form a commutative monoid; the mean loss is over real samples."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from personafl.core import tree
from personafl.core.algorithm import Empty, Problem, Reduced, fields_of_its_own, join, own_fields, reduce
from personafl.core.batches import Batch
from personafl.core.losses import MeanLoss, cross_entropy
from personafl.core.net import Net

F64 = torch.float64
laws = settings(max_examples=40, deadline=None)


class Up(NamedTuple):
    change: dict[str, Tensor]
    loss: Tensor


def _rows(stacked: Any, rows: Tensor | slice) -> Any:
    return tree.map(lambda leaf: leaf[rows], stacked)


def uploads(clients: int, seed: int, dtype: torch.dtype = F64) -> tuple[Up, Tensor]:
    """Small integers and integer weights: sums are exact in any order."""
    rng = torch.Generator().manual_seed(seed)

    def whole(*shape: int) -> Tensor:
        return torch.randint(-9, 10, (clients, *shape), generator=rng).to(dtype)

    weights = torch.randint(1, 9, (clients,), generator=rng)
    return Up({"w": whole(2, 3), "b": whole(3), "none": whole(0)}, whole()), weights


def same(a: Reduced, b: Reduced) -> bool:
    pairs = zip(tree.leaves(a.total), tree.leaves(b.total), strict=True)
    equal = all(torch.equal(x, y) for x, y in pairs)
    return equal and (a.weight, a.clients, a.dtypes) == (b.weight, b.clients, b.dtypes)


@laws
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 10**6))
def test_plus_is_a_commutative_monoid(i: int, j: int, k: int, seed: int) -> None:
    """a+b = b+a, (a+b)+c = a+(b+c), and the reduction of no uploads at all is neutral."""
    a, b, c = (reduce(*uploads(n, seed + n0)) for n0, n in enumerate((i, j, k)))
    assert same(a.plus(b), b.plus(a))
    assert same(a.plus(b).plus(c), a.plus(b.plus(c)))
    nothing = reduce(*uploads(0, seed))
    assert same(a.plus(nothing), a)
    assert same(nothing.plus(a), a)


@laws
@given(st.integers(2, 9), st.integers(0, 10**6), st.data())
def test_chunks_and_order_do_not_matter(clients: int, seed: int, data: st.DataObject) -> None:
    """Reducing any permutation, cut anywhere, is reducing all at once."""
    stacked, weights = uploads(clients, seed)
    whole = reduce(stacked, weights)
    order = torch.tensor(data.draw(st.permutations(range(clients))))
    cut = data.draw(st.integers(1, clients - 1))
    parts = [reduce(_rows(stacked, rows), weights[rows]) for rows in (order[:cut], order[cut:])]
    assert same(parts[0].plus(parts[1]), whole)
    assert whole.clients == clients


def test_mean_by_hand() -> None:
    """Values 1, 4, −2 with weights 1, 2, 5: (1 + 8 − 10)/8 = −1/8; the leaf of twos stays 2."""
    stacked = Up({"w": torch.tensor([[1.0], [4.0], [-2.0]], dtype=F64)}, torch.full((3,), 2.0, dtype=F64))
    reduced = reduce(stacked, torch.tensor([1.0, 2.0, 5.0]))
    assert float(reduced.weight) == 8
    mean = reduced.mean()
    assert isinstance(mean, Up)
    assert mean.change["w"].tolist() == [-0.125]
    assert float(mean.loss) == 2


def test_the_mean_of_equal_uploads_is_the_upload() -> None:
    """Whatever the weights."""
    stacked, weights = uploads(1, 3)
    many = reduce(_rows(stacked, torch.zeros(5, dtype=torch.int64)), torch.tensor([0.1, 0.7, 3.0, 11.0, 0.2]))
    for x, y in zip(tree.leaves(many.mean()), tree.leaves(tree.take(stacked, 0)), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)
    assert weights.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sums_are_kept_in_double_and_the_dtype_is_restored(dtype: torch.dtype) -> None:
    """2²⁴ + 1 + … in single precision loses every 1: here 1000 of them arrive before rounding to the dtype."""
    values = torch.ones(1001, 1).to(dtype)
    values[0] = 2**24
    reduced = reduce({"w": values}, torch.ones(1001))
    assert reduced.total["w"].dtype == F64
    assert float(reduced.total["w"]) == 2**24 + 1000
    assert reduced.mean()["w"].dtype == dtype


def test_a_message_without_tensors_reduces_to_itself() -> None:
    """Local training sends nothing."""
    reduced = reduce(Empty(), torch.ones(3))
    assert (reduced.total, reduced.clients, reduced.mean()) == (Empty(), 3, Empty())


NET = Net(nn.Linear(2, 3).double())
PARAMS = NET.init(torch.Generator())


def batch(x: Tensor, real: list[bool]) -> Batch:
    return Batch(x, torch.zeros(len(x), dtype=torch.int64), torch.tensor(real), torch.tensor(0))


def test_mean_loss_is_over_the_real_samples() -> None:
    """Mean of the two real cross-entropies, by torch; gradient likewise."""
    x = torch.tensor([[1.0, 2.0], [0.5, -1.0], [3.0, 3.0]], dtype=F64)
    problem = Problem(NET, cross_entropy)
    padded = batch(x, [True, False, True])

    def reference(params: Any) -> Tensor:
        return nn.functional.cross_entropy(NET.apply(params, x[[0, 2]]), torch.zeros(2, dtype=torch.int64))

    assert float(problem.mean_loss(PARAMS, padded)) == pytest.approx(float(reference(PARAMS)), abs=1e-12)
    got = torch.func.grad(lambda p: problem.mean_loss(p, padded))(PARAMS)
    expected = torch.func.grad(reference)(PARAMS)
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("bad", [1e30, float("inf"), float("nan")])
def test_padded_samples_have_no_say_however_large_their_loss(bad: float) -> None:
    """0·∞ is nan, so a mask that multiplies is not enough."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.tensor([1.0, bad, 3.0], dtype=F64)

    x = torch.zeros(3, 2, dtype=F64)
    assert float(MeanLoss(NET, loss)(PARAMS, batch(x, [True, False, True]))) == 2


def test_the_loss_of_no_samples_is_zero() -> None:
    """An empty mean is 0, with gradient 0."""
    empty = batch(torch.ones(2, 2, dtype=F64), [False, False])
    assert float(MeanLoss(NET, cross_entropy)(PARAMS, empty)) == 0
    gradient = torch.func.grad(lambda p: MeanLoss(NET, cross_entropy)(p, empty))(PARAMS)
    assert all(bool((leaf == 0).all()) for leaf in gradient.values())


def test_personal_net_is_the_local_one_where_there_is_one() -> None:
    """`local_net`, else `net`."""
    other = Net(nn.Linear(2, 3))
    assert Problem(NET, cross_entropy).personal_net is NET
    assert Problem(NET, cross_entropy, local_net=other).personal_net is other


def test_fields_of_a_server_can_be_its_own() -> None:
    """The mark is on the type alone: its instances are as before."""

    @own_fields("loss")
    class State(NamedTuple):
        change: int
        loss: int

    assert fields_of_its_own(State) == ("loss",)
    assert State(1, 2)._asdict() == {"change": 1, "loss": 2}
    assert fields_of_its_own(Up) == ()


def test_a_few_uploads_are_joined_in_place() -> None:
    """As `plus` does it; what was joined before is gone."""
    stacked = {"w": torch.arange(12.0).reshape(3, 4), "loss": torch.tensor([1.0, 2.0, 4.0])}
    weights = torch.tensor([5, 2, 1])
    first = join(None, _rows(stacked, slice(1)), weights[:1])
    found = join(first, _rows(stacked, slice(1, 3)), weights[1:])
    expected = reduce(stacked, weights)
    assert found.total["w"] is first.total["w"]
    assert (found.clients, float(found.weight)) == (3, 8.0)
    torch.testing.assert_close(found.total, expected.total, rtol=0, atol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("clients", [1, 31, 32, 100])
@pytest.mark.parametrize("rounded", [True, False])
def test_a_gpu_sums_uploads_as_a_cpu_does(clients: int, rounded: bool) -> None:
    """In single precision for a few at a time, but never rounded to TF32."""
    torch.backends.cuda.matmul.allow_tf32 = rounded
    uploads = torch.randn(clients, 7, 5, generator=torch.Generator().manual_seed(0))
    weights = torch.arange(1, clients + 1)
    found = reduce({"w": uploads.cuda()}, weights.cuda()).total["w"]
    assert torch.backends.cuda.matmul.allow_tf32 == rounded
    torch.backends.cuda.matmul.allow_tf32 = False
    exact = reduce({"w": uploads}, weights).total["w"]
    scale = reduce({"w": uploads.abs()}, weights).total["w"]
    assert found.dtype == torch.float64
    assert float(((found.cpu() - exact).abs() / scale).max()) < 1e-6
