"""Quantization of one tensor against its definitions: brute-force minimisers, finite differences, sums by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import grad, vmap

from personafl.algorithms import quantize
from personafl.algorithms.quantize import Cells, hard, nearest, prox_centers, prox_weights, soft
from personafl.core import wire
from personafl.core.net import Net
from personafl.errors import BadInput
from personafl.models.adapters import Site, with_adapters
from personafl.models.convolutional import cnn1, cnn2, lenet, resnet20
from personafl.models.parts import personal_split
from personafl.models.zoo import TextBag

F64 = torch.float64
laws = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 10**6)
levels = st.integers(2, 7)
widths = st.floats(0.0, 1.5)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


def prox_centers_exact(centers: Tensor, x: Tensor, width: float | Tensor, at: Tensor | None = None) -> Tensor:
    """Return argmin_c (width/2)·Σ_j Σ_{members i of at_j} |x_i − c_j| + ½‖c − μ‖²: towards the median, never past it.

    Arguments as of `prox_centers`. Members are those of `at`, so the sum bounds R(x, c) from above and equals it at
    `at`: unlike the linearised one, this step never increases R(x, c)·width + ½‖c − μ‖². It costs a sort of x.

    Let s_1 ≤ … ≤ s_n be the members of one center and t_k = μ + (width/2)·(n − 2k), where it would land with just k of
    them below. The minimiser is above s_k if and only if s_k < t_k. That holds for the first K members and no others,
    as s increases and t decreases; so the minimiser is min(t_K, s_{K+1}).
    """
    at = centers if at is None else at
    ordered = x.reshape(-1).sort().values
    codes = nearest(ordered, at)
    cells = Cells.of(ordered, at)
    members = cells.members().long()
    first = members.cumsum(0) - members
    place = torch.arange(1, len(ordered) + 1, device=x.device) - first[codes]  # k, from 1 in each center

    def landing(center: Tensor, count: Tensor, below: Tensor) -> Tensor:
        return center + width / 2 * (count - 2 * below).to(center.dtype)

    below = cells.sums((ordered < landing(centers[codes], members[codes], place)).long()).long()
    free = landing(centers, members, below)
    stop = ordered[(first + below).clamp(max=len(ordered) - 1)]
    return torch.where(below < members, torch.minimum(free, stop), free)


def distance(x: Tensor, centers: Tensor) -> Tensor:
    """R(x, c) = ½ Σ_i min_j |x_i − c_j|."""
    return (x.reshape(-1, 1) - centers).abs().amin(1).sum() / 2


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def centers_of(seed: int, m: int, *stack: int) -> Tensor:
    return normal(seed + 1, *stack, m).sort().values


# --- Q and R ---


def test_nearest_by_hand() -> None:
    """Borders of (−1, 0, 4) are −½ and 2: they belong to the lower center, as do all entries beyond the ends."""
    x = tensor(-9.0, -0.6, -0.5, -0.4, 0.0, 2.0, 2.1, 9.0).reshape(2, 4)
    codes = nearest(x, tensor(-1.0, 0.0, 4.0))
    assert codes.dtype == torch.int64
    assert codes.tolist() == [[0, 0, 0, 1], [1, 1, 2, 2]]
    assert hard(x, tensor(-1.0, 0.0, 4.0)).tolist() == [[-1, -1, -1, 0], [0, 0, 4, 4]]


@laws
@given(seeds, levels, st.sampled_from([torch.float32, F64]))
def test_no_center_is_nearer(seed: int, m: int, dtype: torch.dtype) -> None:
    """|x_i − Q(x)_i| = min_j |x_i − c_j|, to rounding; also if centers coincide."""
    x, centers = normal(seed, 3, 50).to(dtype), centers_of(seed, m).to(dtype)
    centers[-1] = centers[-2]
    smallest = (x[..., None] - centers).abs().amin(-1)
    torch.testing.assert_close((x - hard(x, centers)).abs(), smallest, rtol=0, atol=4 * torch.finfo(dtype).eps)


@laws
@given(seeds, levels)
def test_a_quantized_tensor_stays(seed: int, m: int) -> None:
    """Q(Q(x)) = Q(x) to the bit, and R is 0 there."""
    centers = centers_of(seed, m)
    once = hard(normal(seed, 40), centers)
    assert torch.equal(hard(once, centers), once)
    assert float(distance(once, centers)) == 0


def test_distance_by_hand() -> None:
    """Entries 0.1, 0.5 and 3 from (0, 1) are off by 0.1, 0.5 and 2: R = ½·2.6 = 1.3."""
    assert float(distance(tensor(0.1, 0.5, 3.0), tensor(0.0, 1.0))) == pytest.approx(1.3, abs=1e-15)


def test_gradients_of_the_hard_quantizer() -> None:
    """∂/∂x = 0. With incoming gradient g, ∂/∂c_j = Σ g over members: codes (0, 1, 1, 2, 0), g = (1, 2, 4, 8, 16)
    give (17, 6, 8); for R it is −½ Σ sign(x_i − c_j). The same under vmap, one client at a time.
    """
    x, g = tensor(-2.0, 0.1, -0.2, 3.0, -0.9), tensor(1.0, 2.0, 4.0, 8.0, 16.0)
    centers = tensor(-1.0, 0.0, 1.0)

    def weighted(x: Tensor, centers: Tensor) -> Tensor:
        return (hard(x, centers) * g).sum()

    by_x, by_centers = grad(weighted, (0, 1))(x, centers)
    assert by_x.tolist() == [0.0] * 5
    assert by_centers.tolist() == [17.0, 6.0, 8.0]
    assert grad(distance, 1)(x, centers).tolist() == [0.5 - 0.5, 0.5 - 0.5, -0.5]
    xs, many = torch.stack([x, -x]), torch.stack([centers, centers + 0.05])
    by_xs, by_many = vmap(grad(weighted, (0, 1)))(xs, many)
    assert not by_xs.any()
    assert by_many.tolist() == [[17.0, 6.0, 8.0], grad(weighted, 1)(-x, centers + 0.05).tolist()]


# --- Q̃ ---


@laws
@given(seeds, levels, st.floats(0.5, 8.0))
def test_gradients_of_the_soft_quantizer_by_finite_differences(seed: int, m: int, sharpness: float) -> None:
    """In x and in every center, the first and the last included; alone and stacked."""
    x, centers, g = normal(seed, 2, 3), centers_of(seed, m), normal(seed + 2, 2, 3)

    def value(x: Tensor, centers: Tensor) -> Tensor:
        return (soft(x, centers, sharpness) * g).sum()

    def differences(f: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
        step = 1e-6 * torch.eye(at.numel(), dtype=F64).reshape(-1, *at.shape)
        return torch.stack([(f(at + s) - f(at - s)) / 2e-6 for s in step]).reshape(at.shape)

    expected = differences(lambda v: value(v, centers), x), differences(lambda v: value(x, v), centers)
    for found, by_difference in zip(grad(value, (0, 1))(x, centers), expected, strict=True):
        torch.testing.assert_close(found, by_difference, rtol=0, atol=1e-7)
    stacked = vmap(grad(value, (0, 1)))(torch.stack([-x, x]), torch.stack([centers - 1, centers]))
    for found, by_difference in zip(stacked, expected, strict=True):
        torch.testing.assert_close(found[1], by_difference, rtol=0, atol=1e-7)


@pytest.mark.parametrize("m", [2, 3, 5])
def test_gradient_of_the_soft_quantizer_by_formula(m: int) -> None:
    """With σ_j = σ(P(x − (c_j + c_{j−1})/2)) and σ' = σ(1 − σ), Claim 9 is

    ∂Q̃/∂c_j = σ_j − σ_{j+1} − (c_{j+1} − c_j)·P/2·σ'_{j+1} − (c_j − c_{j−1})·P/2·σ'_j.

    Its ends, which are not printed: c_1 has σ_1 = 1, σ'_1 = 0 and c_m has σ_{m+1} = σ'_{m+1} = 0.
    """
    sharpness, centers = 3.0, centers_of(7, m)
    for x in normal(8, 20):
        s = torch.sigmoid(sharpness * (x - (centers[1:] + centers[:-1]) / 2))
        curve = (centers[1:] - centers[:-1]) * sharpness / 2 * s * (1 - s)
        lower, upper = torch.cat([tensor(1.0), s]), torch.cat([s, tensor(0.0)])
        expected = lower - upper - torch.cat([curve, tensor(0.0)]) - torch.cat([tensor(0.0), curve])
        found = grad(lambda c, x=x: soft(x, c, sharpness))(centers)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_the_soft_quantizer_tends_to_the_hard_one() -> None:
    """An entry at distance d from the nearest border is off by less than (c_m − c_1)·e^(−P·d), and the gradient in c
    tends to that of the hard one; on a border Q̃ is half-way for every P when borders are far apart.
    """
    centers, x = tensor(-1.0, 0.0, 0.5, 2.0), torch.linspace(-3, 3, 61, dtype=F64)
    gap = (x[:, None] - (centers[1:] + centers[:-1]) / 2).abs().amin(1)
    for sharpness in (10.0, 100.0, 1e4):
        off = (soft(x, centers, sharpness) - hard(x, centers)).abs()
        assert bool((off <= 3 * torch.exp(-sharpness * gap) + 1e-15).all())
    clear = x[gap > 0.01]
    limit = grad(lambda c: soft(clear, c, 1e4).sum())(centers)
    torch.testing.assert_close(limit, grad(lambda c: hard(clear, c).sum())(centers), rtol=0, atol=1e-9)
    assert float(soft(tensor(1.25), centers, 1e3)) == pytest.approx(1.25, abs=1e-12)


# --- prox in x ---


@laws
@given(seeds, levels, widths)
def test_prox_weights_is_a_global_minimiser(seed: int, m: int, width: float) -> None:
    """Of width·½·min_j |y − c_j| + ½(y − x)², entry by entry: nothing on a fine grid, no center, no point where a
    piece is stationary (x ± width/2) and no border is better; where the second best piece is clearly worse, the
    minimiser on the grid is within a step.
    """
    x, centers = 2 * normal(seed, 30), centers_of(seed, m)
    found = prox_weights(x, centers, width)
    grid = torch.linspace(-9, 9, 18001, dtype=F64)
    for entry, best in zip(x, found, strict=True):
        special = [centers, entry + tensor(-width / 2, 0.0, width / 2), (centers[1:] + centers[:-1]) / 2]

        def objective(y: Tensor, entry: Tensor = entry) -> Tensor:
            return width / 2 * (y[:, None] - centers).abs().amin(1) + (y - entry).square() / 2

        values = objective(grid)
        lowest = float(torch.cat([values, objective(torch.cat(special))]).min())
        assert float(objective(best[None])) <= lowest + 1e-12
        first, second = (entry - centers).abs().sort().values[:2]
        if second - first > 0.05 and width > 0.05:
            assert float(grid[values.argmin()]) == pytest.approx(float(best), abs=1.1e-3)


def test_prox_weights_by_hand() -> None:
    """Centers (0, 1), width 0.4: entries within 0.2 land on their center to the bit, others come 0.2 nearer. Half-way
    two points are as good, 0.3 and 0.7: the lower one is taken, and just above it the other (the prox jumps).
    """
    x = tensor(0.2, -0.15, 0.9, 0.3, -1.0, 1.7, 0.5, 0.5 + 1e-9)
    expected = tensor(0.0, 0.0, 1.0, 0.1, -0.8, 1.5, 0.3, 0.7)
    found = prox_weights(x, tensor(0.0, 1.0), 0.4)
    assert found[:3].tolist() == [0.0, 0.0, 1.0]
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-9)


@laws
@given(seeds, levels)
def test_without_width_nothing_moves(seed: int, m: int) -> None:
    """prox of 0·R is the identity, to the bit, for weights and centers."""
    x, centers = normal(seed, 25), centers_of(seed, m)
    assert torch.equal(prox_weights(x, centers, 0.0), x)
    for prox in (prox_centers, prox_centers_exact):
        assert torch.equal(prox(centers, x, 0.0), centers)
        assert torch.equal(prox(centers + 0.1, x, 0.0, centers), centers + 0.1)


# --- prox in c ---


def pull(c: Tensor, center: Tensor, members: Tensor, width: float) -> Tensor:
    """(width/2)·Σ_i |x_i − c| + ½(c − μ)² for places c [n], members fixed."""
    return width / 2 * (c[:, None] - members).abs().sum(1) + (c - center).square() / 2


@laws
@given(seeds, levels, st.floats(0.0, 0.3), st.floats(0.0, 0.5))
def test_exact_prox_of_centers_by_brute_force(seed: int, m: int, width: float, moved: float) -> None:
    """With the members of the centers before: no place on a fine grid, no member and no center's place is better. It is
    also a median (Y. Li and S. Osher 2009): of the n members and the n + 1 places μ + (width/2)·(n − 2k).
    """
    at = centers_of(seed, m)
    x = torch.cat([normal(seed, 40), at[:1].expand(3)])  # some are on a center
    before = at + moved * normal(seed + 2, m)
    found, codes = prox_centers_exact(before, x, width, at), nearest(x, at)
    for j in range(m):
        members = x[codes == j]
        n = len(members)
        grid = torch.linspace(-8, 8, 16001, dtype=F64)
        places = torch.cat([grid, members, before])
        assert float(pull(found[j : j + 1], before[j], members, width)) <= float(
            pull(places, before[j], members, width).min() + 1e-12
        )
        balanced = before[j] + width / 2 * (n - 2 * torch.arange(n + 1, dtype=F64))
        assert float(found[j]) == pytest.approx(np.median(torch.cat([members, balanced]).numpy()), abs=1e-12)


@laws
@given(seeds, levels, st.floats(1e-4, 0.05), st.floats(0.0, 0.1))
def test_linearised_prox_of_centers_is_exact_if_it_passes_no_member(
    seed: int, m: int, width: float, moved: float
) -> None:
    """Wherever no member lies between c_j before the gradient step and where it lands; else it goes no less far from
    there than the exact one, in the case where there is no gradient step.
    """
    x, at = normal(seed, 40), centers_of(seed, m)
    before = at + moved * normal(seed + 2, m)
    found, exact, codes = prox_centers(before, x, width, at), prox_centers_exact(before, x, width, at), nearest(x, at)
    for j in range(m):
        members = x[codes == j]
        low, high = min(at[j], found[j]), max(at[j], found[j])
        if not ((members >= low) & (members <= high)).any():
            assert float(found[j]) == pytest.approx(float(exact[j]), abs=1e-12)
    still, exactly = prox_centers(at, x, width), prox_centers_exact(at, x, width)
    assert bool(((still - at).abs() >= (exactly - at).abs() - 1e-12).all())


def test_prox_of_centers_by_hand() -> None:
    """Centers (0, 10), width 0.2. Of 0 there are three members above and one below: + 0.1·(3 − 1); an entry on it has
    no say. Of 10 there is one below: − 0.1. A third center, 100, has no members and stays. Sides and members are those
    before the gradient step: with μ = c + (0.7, 0, 5) the same amounts are added to μ.
    """
    x, at = tensor(1.0, 2.0, 4.0, -3.0, 0.0, 9.0), tensor(0.0, 10.0, 100.0)
    torch.testing.assert_close(prox_centers(at, x, 0.2), tensor(0.2, 9.9, 100.0), rtol=0, atol=1e-14)
    before = at + tensor(0.7, 0.0, 5.0)
    torch.testing.assert_close(prox_centers(before, x, 0.2, at), tensor(0.9, 9.9, 105.0), rtol=0, atol=1e-14)
    assert not torch.equal(prox_centers(before, x, 0.2), prox_centers(before, x, 0.2, at))


def test_the_printed_sign_moves_centers_away_from_their_median() -> None:
    """D.1 prints μ − (λη/2)·(#above − #below), its derivation gives +. A center left of its members must come nearer
    to their median and lower R; with the printed sign it moves off and R grows, by the same amount: R has slope
    ∓½·n in c. Minimising the paper's own first-order model by brute force gives the corrected place.
    """
    members, center, width = tensor(1.0, 1.5, 2.0, 2.5, 3.0), tensor(0.0), 0.1
    right = prox_centers(center, members, width)
    printed = 2 * center - right
    median, start = float(members.median()), float(distance(members, center))
    assert abs(float(right) - median) < abs(float(center) - median) < abs(float(printed) - median)
    assert float(distance(members, right)) == pytest.approx(start - 0.5 * 5 * 0.25, abs=1e-12)
    assert float(distance(members, printed)) == pytest.approx(start + 0.5 * 5 * 0.25, abs=1e-12)
    grid = torch.linspace(-1, 1, 2001, dtype=F64)
    slope = torch.where(center > members, 1.0, -1.0).sum()  # ∂|c − x|/∂c as the paper takes it
    model = (grid - center).square() / 2 + width / 2 * (grid - center) * slope
    assert float(right) == pytest.approx(float(grid[model.argmin()]), abs=1e-3)
    assert float(right) == pytest.approx(float(prox_centers_exact(center, members, width)), abs=1e-12)


def test_where_the_linearised_prox_goes_too_far() -> None:
    """A center 0.01 below its only member, width 0.2: linearised it jumps 0.1, over the member, and R grows from 0.005
    to 0.045; exactly it stops on the member. A center on nine of ten members goes off by 0.1 after the tenth,
    exactly it is held: the nine resist with 9·0.1.
    """
    center = tensor(0.0)
    for x, linear, exact in ((tensor(0.01), 0.1, 0.01), (tensor(*[0.0] * 9, 5.0), 0.1, 0.0)):
        assert float(prox_centers(center, x, 0.2)) == pytest.approx(linear, abs=1e-15)
        assert float(prox_centers_exact(center, x, 0.2)) == exact
        assert float(distance(x, tensor(linear))) > float(distance(x, center)) >= float(distance(x, tensor(exact)))


@laws
@given(seeds, levels, widths)
def test_exact_prox_of_centers_never_increases_what_it_minimises(seed: int, m: int, width: float) -> None:
    """Fixed members bound R from above and are R at the centers before, so with members free to change
    width·R(x, c) + ½‖c − μ‖² at the result is at most its value at the centers before.
    """
    x, at = normal(seed, 40), centers_of(seed, m)
    before = at + 0.1 * normal(seed + 2, m)

    def objective(c: Tensor) -> float:
        return float(width * distance(x, quantize.sorted_centers(c)) + (c - before).square().sum() / 2)

    assert objective(prox_centers_exact(before, x, width, at)) <= objective(at) + 1e-12


def test_sorted_centers() -> None:
    """Also stacked."""
    assert quantize.sorted_centers(tensor(3.0, 1.0, 2.0)).tolist() == [1.0, 2.0, 3.0]
    assert vmap(quantize.sorted_centers)(torch.tensor([[2.0, 1.0], [0.0, 5.0]])).tolist() == [[1.0, 2.0], [0.0, 5.0]]


# --- the start ---


def test_initial_centers_by_hand() -> None:
    """Evenly from min to max; for two the means of (−3, −1) and of (0, 0.5, 2.5)."""
    x = tensor(-3.0, 0.5, 2.5, -1.0, 0.0)
    torch.testing.assert_close(
        quantize.initial_centers(x, 12), torch.linspace(-3, 2.5, 12, dtype=F64), rtol=0, atol=1e-14
    )
    assert quantize.initial_centers(x, 4)[[0, -1]].tolist() == [-3.0, 2.5]
    assert quantize.initial_centers(x, 2).tolist() == [-2.0, 1.0]


def test_two_initial_centers_of_entries_of_one_sign() -> None:
    """(1, 2, 3, 6) has mean 3: below it 1, 2, the others 3, 6. Negated: −6 and (−3, −2, −1)."""
    assert quantize.initial_centers(tensor(1.0, 2.0, 3.0, 6.0), 2).tolist() == [1.5, 4.5]
    assert quantize.initial_centers(tensor(-1.0, -2.0, -3.0, -6.0), 2).tolist() == [-6.0, -2.0]


@pytest.mark.parametrize("m", [2, 3, 4, 16, 256])
@pytest.mark.parametrize("value", [0.0, 1.0, -0.1, 1e-6, 3e4])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_initial_centers_always_increase(m: int, value: float, dtype: torch.dtype) -> None:
    """Strictly, and within √ε of the entries' size, for entries that are all the same or differ in the last bit."""
    same = torch.full((4, 5), value, dtype=dtype)
    nearly = torch.cat([same, torch.nextafter(same, same + 1)])
    for x in (same, nearly, same[:1, :1]):
        centers = quantize.initial_centers(x, m)
        assert centers.dtype == dtype
        assert bool((centers.diff() > 0).all())
        assert float((centers - value).abs().max()) <= 1.1 * torch.finfo(dtype).eps ** 0.5 * (abs(value) or 1)


@laws
@given(seeds, st.integers(2, 64), st.floats(1e-5, 1e5), st.floats(-3, 3))
def test_initial_centers_lie_among_the_entries(seed: int, m: int, size: float, shift: float) -> None:
    """Strictly increasing, from min to max at most, whatever the size of the entries."""
    x = size * (normal(seed, 30) + shift)
    centers = quantize.initial_centers(x, m)
    assert centers.shape == (m,)
    assert bool((centers.diff() > 0).all())
    assert float(x.min()) <= float(centers[0]) < float(centers[-1]) <= float(x.max())


# --- which ---


@pytest.mark.parametrize("make", [cnn1, cnn2, lenet, resnet20])
def test_all_weights_but_the_ends_are_quantized(make: Callable[..., nn.Module]) -> None:
    """What is not personal as `input` or `output` and has 2 dimensions or more, for networks with one layer at each
    end.
    """
    module = make((3, 32, 32), 10)
    ends = [personal_split(module, part) for part in ("input", "output")]
    expected = [
        name
        for name, value in module.named_parameters()
        if value.ndim >= 2 and not any(split.is_personal(name) for split in ends)
    ]
    assert list(quantize.quantizable(Net(module).shapes)) == expected


def test_quantized_weights_of_cnn1() -> None:
    """The second convolution and the two hidden layers of units."""
    assert quantize.quantizable(Net(cnn1((3, 32, 32), 10)).shapes) == ("3.weight", "7.weight", "9.weight")


def test_more_layers_can_be_quantized() -> None:
    """A bag of words has an embedding and an output layer: quantizing between its ends leaves nothing to do."""
    shapes = Net(TextBag(50, 4)).shapes
    assert quantize.quantizable(shapes, "output") == ("embedding.weight",)
    assert quantize.quantizable(shapes, "none") == ("embedding.weight", "output.weight")
    with pytest.raises(BadInput, match="the first and the last one stay in full precision"):
        quantize.quantizable(shapes)


def test_norms_and_tokens_are_no_first_or_last_layer() -> None:
    """A norm in front and behind, and a token of the network's own; all weights of an end layer stay."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.recurrent = nn.LayerNorm(3), nn.GRU(3, 4)
            self.hidden, self.head, self.last_norm = nn.Linear(4, 4), nn.Linear(4, 2), nn.LayerNorm(2)
            self.token = nn.Parameter(torch.zeros(1, 3))

    assert quantize.quantizable({name: p.shape for name, p in Odd().named_parameters()}) == ("hidden.weight",)


def test_adapters_go_with_their_layer() -> None:
    """LoRA beside every layer: those of the first and last stay in full precision, like these."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    names = quantize.quantizable(Net(with_adapters(module, "lora", size=2)).shapes)
    assert len(names) == 3
    assert {name.split(".")[0] for name in names} == {"1"}


def test_an_adapter_is_no_last_layer() -> None:
    """One that comes after the head, at a site of its own, is quantized, and the head is not."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), Site(8))
    names = quantize.quantizable(Net(with_adapters(module, "bottleneck", size=2)).shapes)
    assert len(names) == 3
    assert [name.split(".")[0] for name in names] == ["1", "3", "3"]


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (nn.Linear(3, 2), "none"),
        (nn.Sequential(nn.Linear(3, 2)), "weights: 0)"),
        (nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2)), "weights: 0, 2)"),
        (nn.Sequential(nn.LayerNorm(3)), "none"),
    ],
)
def test_a_network_without_inner_layers_is_refused(module: nn.Module, named: str) -> None:
    """The message names the layers and what to do."""
    with pytest.raises(BadInput, match="no layer to quantize") as error:
        quantize.quantizable(Net(module).shapes)
    assert named in str(error.value)
    assert "take a deeper model, quantize more of it (quped's full_precision)" in str(error.value)


# --- packing ---


@laws
@given(seeds, st.integers(2, 256), st.sampled_from([(7,), (3, 5), (2, 3, 3, 3)]))
def test_packing_keeps_the_quantized_weight(seed: int, m: int, shape: tuple[int, ...]) -> None:
    """pack(x, c) restores Q_c(x) to the bit, here and from its bytes, at ⌈log₂ m⌉ bits an entry."""
    x, centers = normal(seed, *shape).float(), centers_of(seed, m).float()
    form = quantize.pack(x, centers)
    assert torch.equal(form.dense(), hard(x, centers))
    assert form.codes.numel() == math.ceil(x.numel() * (m - 1).bit_length() / 8)
    sent = wire.decode(wire.encode({"w": form}), {"w": x})
    assert torch.equal(wire.dense(sent)["w"], hard(x, centers))


@pytest.mark.parametrize("bits", range(1, 9))
def test_packing_for_every_width(bits: int) -> None:
    """m = 2^bits, every code used."""
    x, centers = torch.linspace(-1, 1, 1000), torch.linspace(-1, 1, 2**bits)
    form = quantize.pack(x, centers)
    assert len(form.unpacked().unique()) == 2**bits
    assert torch.equal(form.dense(), hard(x, centers))


# --- all of it ---


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "nearest": nearest,
    "members": lambda x, c: Cells.of(x, c).members().long(),
    "sums": lambda x, c: Cells.of(x, c).sums(x).to(x.dtype),
    "many centers' sums": lambda x, c: Cells.of(x, torch.cat([c, c + 9])).sums(x).to(x.dtype),
    "hard": hard,
    "soft": lambda x, c: soft(x, c, 5.0),
    "distance": distance,
    "prox_weights": lambda x, c: prox_weights(x, c, 0.3),
    "prox_centers": lambda x, c: prox_centers(c + 0.01, x, 0.02, c),
    "prox_centers_exact": lambda x, c: prox_centers_exact(c + 0.01, x, 0.02, c),
    "initial_centers": lambda x, c: quantize.initial_centers(x, c.shape[0]),
    "two initial_centers": lambda x, c: quantize.initial_centers(x, 2),
}


@pytest.mark.parametrize("levels", [1, 2, 3, 4, 5, 16])
def test_members_are_counted_picked_and_added_up_as_the_codes_say(levels: int) -> None:
    """Few centers go another way than many. Some entries are on borders and centers, two centers are equal."""
    centers = centers_of(8, levels)
    centers = torch.cat([centers[:-1], centers[-2:-1]]) if levels > 2 else centers
    x = torch.cat([normal(7, 50), centers, (centers[1:] + centers[:-1]) / 2])
    codes, values, cells = nearest(x, centers), normal(9, len(x)), Cells.of(x, centers)
    own = [codes == place for place in range(levels)]
    assert torch.equal(cells.pick(centers), centers[codes])
    assert cells.members().tolist() == [int(mine.sum()) for mine in own]
    sides = [int((x[mine] > c).sum() - (x[mine] < c).sum()) for mine, c in zip(own, centers, strict=True)]
    assert cells.sides(x, centers).tolist() == sides
    expected = torch.stack([values[mine].sum() for mine in own])
    torch.testing.assert_close(cells.sums(values), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_stacked_is_one_by_one(name: str) -> None:
    """Under vmap over both arguments, over one of them, and over a last axis; without warnings (they are errors)."""
    function = FUNCTIONS[name]
    xs, many = normal(3, 4, 5, 6), centers_of(4, 3, 4)
    each = torch.stack([function(x, c) for x, c in zip(xs, many, strict=True)])
    torch.testing.assert_close(vmap(function)(xs, many), each, rtol=0, atol=1e-15)
    torch.testing.assert_close(vmap(function, (2, 1))(xs.movedim(0, 2), many.T), each, rtol=0, atol=1e-15)
    of_one = torch.stack([function(x, many[0]) for x in xs])
    torch.testing.assert_close(vmap(function, (0, None))(xs, many[0]), of_one, rtol=0, atol=1e-15)
    if "initial" not in name:
        at_one = torch.stack([function(xs[0], c) for c in many])
        torch.testing.assert_close(vmap(function, (None, 0))(xs[0], many), at_one, rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_are_not_changed_and_precision_is_kept(name: str) -> None:
    """Single precision stays single, codes are integers; also with a width that is a tensor of another precision."""
    x, centers = normal(5, 4, 6).float(), centers_of(6, 3).float()
    copies = x.clone(), centers.clone()
    assert FUNCTIONS[name](x, centers).dtype == (torch.int64 if name in ("nearest", "members") else torch.float32)
    for prox in (lambda w: prox_weights(x, centers, w), lambda w: prox_centers_exact(centers, x, w)):
        torch.testing.assert_close(prox(tensor(0.25)[0]), prox(0.25), rtol=0, atol=0)
    assert torch.equal(x, copies[0])
    assert torch.equal(centers, copies[1])


@pytest.mark.parametrize(("penalty", "seed"), [(0.0, 0), (0.05, 1), (0.5, 2), (3.0, 0)])
def test_alternating_steps_never_increase_the_objective(penalty: float, seed: int) -> None:
    """Theorem 1's sufficient decrease. F(x, c) = f(x) + f(Q̃_c(x)) + λR(x, c), f(y) = ½ Σ a_i(y_i − b_i)², a ≤ 1.
    If the smooth part is L-smooth in a block and its step is η ≤ 1/(2L), each half of an iteration, with the exact
    prox, lowers F by at least ‖change‖²/(4η). Here |y − b| ≤ 5, c_m − c_1 ≤ 5 and P = 2, so per entry |Q̃'| ≤ 2.5 and
    |Q̃''| ≤ 2 in x: L ≤ 1 + 2.5² + 5·2 < 20 = 1/(2·0.025); in c a generous 20 for each of 12 entries.
    """
    curvature, target = (
        0.2 + 0.8 * torch.rand(12, generator=torch.Generator().manual_seed(seed)).double(),
        normal(seed, 12),
    )
    rate_x, rate_c, sharpness = 0.025, 0.025 / 12, 2.0

    def smooth(x: Tensor, c: Tensor) -> Tensor:
        losses = [(curvature * (y - target).square()).sum() / 2 for y in (x, soft(x, c, sharpness))]
        return losses[0] + losses[1]

    def objective(x: Tensor, c: Tensor) -> float:
        return float(smooth(x, c) + penalty * distance(x, c))

    x = normal(seed + 10, 12)
    c = quantize.initial_centers(x, 3)
    start = value = objective(x, c)
    for _ in range(300):
        new_x = prox_weights(x - rate_x * grad(smooth, 0)(x, c), c, rate_x * penalty)
        half = objective(new_x, c)
        assert half <= value - float((new_x - x).square().sum()) / (4 * rate_x) + 1e-12
        moved = c - rate_c * grad(smooth, 1)(new_x, c)
        new_c = quantize.sorted_centers(prox_centers_exact(moved, new_x, rate_c * penalty, c))
        value = objective(new_x, new_c)
        assert value <= half - float((new_c - c).square().sum()) / (4 * rate_c) + 1e-12
        x, c = new_x, new_c
    assert value < 0.7 * start
