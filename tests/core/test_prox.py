"""Each proximal operator against its definition: argmin_x t·R(x) + ½‖x − v‖²."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from personafl.core import prox

F64 = torch.float64
seeds = st.integers(0, 10**6)
widths = st.floats(0.0, 3.0)
laws = settings(max_examples=30, deadline=None)


def normal(seed: int, *shape: int) -> Tensor:
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def nuclear(v: Tensor, width: float) -> Tensor:
    left, right = prox.nuclear(v, width)
    return left @ right


REGULARIZERS: dict[str, Callable[[Tensor], Tensor]] = {
    "l1": lambda x: x.abs().sum(),
    "nuclear": lambda x: torch.linalg.svdvals(x).sum(),
}
PROXES: dict[str, Callable[[Tensor, float], Tensor]] = {"l1": prox.l1, "nuclear": nuclear}
MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: lambda v, p=p: p(v, 0.7) for name, p in PROXES.items()},
    "box": lambda v: prox.box(v, -1.0, 0.5),
}


def test_l1_by_grid() -> None:
    """In one dimension the argmin over a grid of step 10⁻³ is within half a step of prox (the objective is strictly
    convex and symmetric about it to first order), for values on both sides of the threshold.
    """
    grid = np.linspace(-4, 4, 8001)
    for v in (-2.5, -0.8, -0.3, 0.0, 0.3, 0.8, 2.5):
        for width in (0.0, 0.3, 0.8, 1.7):
            best = grid[np.argmin(width * np.abs(grid) + 0.5 * (grid - v) ** 2)]
            assert float(prox.l1(torch.tensor(v, dtype=F64), width)) == pytest.approx(best, abs=1e-3)


def test_l1_by_hand() -> None:
    """sign(v)·max(|v| − 1, 0): exact zeros inside the threshold, its edge included."""
    v = torch.tensor([-3.0, -1.0, -0.5, 0.0, 1.0, 2.5], dtype=F64)
    assert prox.l1(v, 1.0).tolist() == [-2.0, 0.0, 0.0, 0.0, 0.0, 1.5]


def test_box_by_hand() -> None:
    """[−5, 0.2, 5] clamps to [−1, 0.2, 0.5]."""
    assert prox.box(torch.tensor([-5.0, 0.2, 5.0], dtype=F64), -1.0, 0.5).tolist() == [-1.0, 0.2, 0.5]


@laws
@given(seeds)
def test_a_projection_is_the_nearest_point(seed: int) -> None:
    """⟨v − P(v), x − P(v)⟩ ≤ 0 for every x of the set characterises the projection; x are projected random points."""
    v, p = normal(seed, 3, 4), MAPS["box"](normal(seed, 3, 4))
    assert torch.equal(MAPS["box"](p), p)
    for other in range(20):
        x = MAPS["box"](normal(seed + 1 + other, 3, 4))
        assert float(((v - p) * (x - p)).sum()) <= 1e-12


@laws
@given(seeds, widths, st.sampled_from(sorted(PROXES)))
def test_no_perturbation_decreases_the_objective(seed: int, width: float, name: str) -> None:
    """With P = t·R + ½‖· − v‖² (1-strongly convex), P(x) ≥ P(prox) + ½‖x − prox‖² for every x: near, far, and v, 0."""
    v = normal(seed, 3, 4)
    best = PROXES[name](v, width)

    def objective(x: Tensor) -> float:
        return float(width * REGULARIZERS[name](x) + 0.5 * (x - v).square().sum())

    candidates = [v, torch.zeros_like(v)]
    candidates += [best + size * normal(seed + i, 3, 4) for i, size in enumerate((1e-4, 1e-2, 0.1, 1.0, 3.0), 1)]
    for x in candidates:
        assert objective(x) >= objective(best) + 0.5 * float((x - best).square().sum()) - 1e-10


@laws
@given(seeds, widths)
def test_nuclear_satisfies_the_optimality_condition(seed: int, width: float) -> None:
    """v − X ∈ t·∂‖X‖_*: with X = UΣVᵀ (rank r), G = v − X has UᵀGV = t·I, GV = t·U, UᵀG = t·Vᵀ and spectral norm ≤ t
    (Watson 1992).
    """
    v = normal(seed, 4, 3)
    left, right = prox.nuclear(v, width)
    u = left / torch.linalg.vector_norm(left, dim=0)
    g = v - left @ right
    torch.testing.assert_close(g @ right.T, width * u, rtol=0, atol=1e-10)
    torch.testing.assert_close(u.T @ g, width * right, rtol=0, atol=1e-10)
    assert float(torch.linalg.matrix_norm(g, ord=2)) <= width + 1e-10


def test_nuclear_by_hand_and_its_rank() -> None:
    """diag(5, 3, 1) at width 2 is diag(3, 1, 0): two singular values are above 2, so the factors have rank 2."""
    left, right = prox.nuclear(torch.diag(torch.tensor([5.0, 3.0, 1.0], dtype=F64)), 2.0)
    assert (left.shape, right.shape) == ((3, 2), (2, 3))
    expected = torch.diag(torch.tensor([3.0, 1.0, 0.0], dtype=F64))
    torch.testing.assert_close(left @ right, expected, rtol=0, atol=1e-12)
    for width, rank in ((0.5, 3), (1.0, 2), (4.9, 1), (5.0, 0), (9.0, 0)):
        assert prox.nuclear(torch.diag(torch.tensor([5.0, 3.0, 1.0], dtype=F64)), width)[0].shape[1] == rank
    assert torch.equal(nuclear(torch.eye(2, dtype=F64), 1.5), torch.zeros(2, 2, dtype=F64))


@laws
@given(seeds, st.integers(1, 5), st.integers(1, 5))
def test_nuclear_at_width_zero_reproduces_the_matrix(seed: int, rows: int, columns: int) -> None:
    """prox of 0·R is the identity."""
    v = normal(seed, rows, columns)
    torch.testing.assert_close(nuclear(v, 0.0), v, rtol=0, atol=1e-10)


@laws
@given(seeds, seeds, st.sampled_from(sorted(MAPS)))
def test_nonexpansive(one: int, two: int, name: str) -> None:
    """‖prox(a) − prox(b)‖² ≤ ⟨prox(a) − prox(b), a − b⟩ ≤ ‖a − b‖² (firmly non-expansive)."""
    a, b = normal(one, 3, 4), normal(two, 3, 4)
    moved = MAPS[name](a) - MAPS[name](b)
    inner = float((moved * (a - b)).sum())
    assert float(moved.square().sum()) <= inner + 1e-10
    assert inner <= float((a - b).square().sum()) + 1e-10


def test_conv_kernel_as_matrix_entry_by_entry() -> None:
    """Entry [o, i, y, x] of a kernel is at row o·kh + y, column i·kw + x."""
    o, i, kh, kw = 2, 3, 4, 5
    kernel = torch.arange(o * i * kh * kw, dtype=F64).reshape(o, i, kh, kw)
    matrix = prox.as_matrix(kernel)
    assert matrix.shape == (o * kh, i * kw)
    for a, b, y, x in np.ndindex(o, i, kh, kw):
        assert matrix[a * kh + y, b * kw + x] == kernel[a, b, y, x]


@pytest.mark.parametrize("shape", [(4,), (3, 5), (2, 3, 4), (2, 3, 4, 5), (1, 1, 1, 1), (2, 3, 1, 2)])
def test_from_matrix_undoes_as_matrix(shape: tuple[int, ...]) -> None:
    """from_matrix(as_matrix(w), w.shape) = w."""
    weight = normal(0, *shape)
    matrix = prox.as_matrix(weight)
    assert matrix.ndim == 2
    assert torch.equal(prox.from_matrix(matrix, weight.shape), weight)


def spiked(rows: int, columns: int, spikes: list[float], noise: float, seed: int) -> Tensor:
    """A matrix with these singular values and below them a bulk of about `noise`."""
    rng = torch.Generator().manual_seed(seed)
    u = torch.linalg.qr(torch.randn((rows, len(spikes)), generator=rng, dtype=F64)).Q
    v = torch.linalg.qr(torch.randn((columns, len(spikes)), generator=rng, dtype=F64)).Q
    bulk = noise * torch.randn((rows, columns), generator=rng, dtype=F64) / (rows**0.5 + columns**0.5)
    return (u * torch.tensor(spikes, dtype=F64)) @ v.T + bulk


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("shape", [(300, 280), (270, 400)])
def test_a_partial_decomposition_is_used_and_is_right(
    shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Near an earlier result no whole decomposition is made, and the prox is the same to rounding."""
    matrix = spiked(*shape, [9.0, 5.0, 3.0, 1.5, 1.2], 0.4, 1).to(dtype)
    near = prox.nuclear(matrix + 0.01 * spiked(*shape, [1.0], 1.0, 2).to(dtype), 1.0)[1]
    exact = nuclear(matrix, 1.0)
    whole = torch.linalg.svd

    def small_only(a: Tensor, full_matrices: bool = True) -> Any:
        assert min(a.shape) < 100, "the whole matrix was decomposed"
        return whole(a, full_matrices=full_matrices)

    monkeypatch.setattr(torch.linalg, "svd", small_only)
    left, right = prox.nuclear(matrix, 1.0, near)
    assert left.shape[1] == 5
    torch.testing.assert_close(left @ right, exact, rtol=0, atol=1e-4 if dtype == torch.float32 else 1e-10)


@pytest.mark.parametrize(
    ("spikes", "noise"),
    [
        ([9.0, 5.0] + [2.0] * 40, 0.4),  # many more above the width than before
        ([9.0, 5.0], 1.1),  # a bulk that reaches the width
        ([9.0, 5.0, 1.0001], 0.999),  # hardly any gap
        ([7.0], 0.1),  # fewer than before
        ([0.5], 0.1),  # none
    ],
)
@pytest.mark.parametrize("aimed", ["at the matrix", "at another"])
def test_a_partial_decomposition_never_misses(spikes: list[float], noise: float, aimed: str) -> None:
    """Whatever the start, the result is the exact prox: the whole decomposition steps in where it is needed."""
    matrix = spiked(280, 260, spikes, noise, 3)
    near = prox.nuclear(matrix, 3.0)[1] if aimed == "at the matrix" else spiked(2, 260, [1.0], 1.0, 4)
    left, right = prox.nuclear(matrix, 1.0, near)
    torch.testing.assert_close(left @ right, nuclear(matrix, 1.0), rtol=0, atol=1e-9)


def test_low_rank_is_nuclear_in_the_shape_of_the_weight() -> None:
    """Also for a stack of kernels, under vmap; vectors have no matrix form and are left alone by `shrink`."""
    rng = torch.Generator().manual_seed(1)
    kernels = torch.randn((3, 4, 3, 2, 5), generator=rng, dtype=F64)
    for kernel, found in zip(kernels, torch.func.vmap(lambda k: prox.low_rank(k, 1.5))(kernels), strict=True):
        expected = prox.from_matrix(nuclear(prox.as_matrix(kernel), 1.5), kernel.shape)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    params = {"weight": kernels[0], "bias": torch.ones(4, dtype=F64)}
    assert torch.equal(prox.shrink("low-rank", 1.5)(params)["bias"], params["bias"])
    torch.testing.assert_close(prox.shrink("sparse", 0.4)(params)["bias"], torch.full((4,), 0.6, dtype=F64))
