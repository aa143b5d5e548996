"""Every rule against its own definition, by brute force on small cases in float64."""

import itertools
import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from personafl.errors import BadInput
from personafl.robust.choosing import Bulyan, Krum, Mda, Monna, MultiKrum, Smea
from personafl.robust.coordinates import Meamed, Median, TrimmedMean
from personafl.robust.rule import CHUNK, Rule, aggregated, parts_of
from personafl.robust.table import RULES
from personafl.robust.weighing import Caf, CenteredClipping, GeometricMedian, Mean

Array = NDArray[np.float64]
CASES = [(7, 3, 2), (9, 5, 2), (11, 2, 2), (8, 1, 1), (5, 40, 0)]


def drawn(n: int, d: int, seed: int = 0) -> Tensor:
    """Vectors of which the last is far off."""
    found = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5
    found[-1] *= 30
    return found


def close(rule: Rule, vectors: Tensor, expected: Array) -> None:
    np.testing.assert_allclose(rule(vectors).numpy(), expected, rtol=0, atol=1e-9)


def middle(values: list[float]) -> float:
    ordered, n = sorted(values), len(values)
    return ordered[n // 2] if n % 2 else (ordered[n // 2 - 1] + ordered[n // 2]) / 2


def around(values: list[float], count: int) -> float:
    centre = middle(values)
    return float(np.mean(sorted(values, key=lambda value: abs(value - centre))[:count]))


def krum_scores(x: Array, others: int) -> list[float]:
    return [sum(sorted(((a - b) ** 2).sum() for j, b in enumerate(x) if j != i)[:others]) for i, a in enumerate(x)]


@pytest.mark.parametrize(("n", "d", "f"), CASES)
def test_rules_of_coordinates(n: int, d: int, f: int) -> None:
    vectors = drawn(n, d)
    columns: list[list[float]] = vectors.T.tolist()
    close(Mean(f=f), vectors, np.array([np.mean(column) for column in columns]))
    close(Median(f=f), vectors, np.array([middle(column) for column in columns]))
    close(TrimmedMean(f=f), vectors, np.array([np.mean(sorted(column)[f : n - f]) for column in columns]))
    close(Meamed(f=f), vectors, np.array([around(column, n - f) for column in columns]))


@pytest.mark.parametrize(("n", "d", "f"), CASES)
def test_krum_takes_the_vector_that_is_near_to_most(n: int, d: int, f: int) -> None:
    x = drawn(n, d).numpy()
    order = np.argsort(krum_scores(x, n - f - 1), kind="stable")
    close(Krum(f=f), drawn(n, d), x[order[0]])
    close(MultiKrum(f=f), drawn(n, d), x[order[: n - f]].mean(0))


@pytest.mark.parametrize(("n", "d", "f"), CASES)
@pytest.mark.parametrize("trusted", [0, 2])
def test_monna_is_the_mean_around_whom_it_trusts(n: int, d: int, f: int, trusted: int) -> None:
    x = drawn(n, d).numpy()
    near = np.argsort(((x - x[trusted]) ** 2).sum(1), kind="stable")[: n - f]
    close(Monna(f=f, trusted=trusted), drawn(n, d), x[near].mean(0))


@pytest.mark.parametrize(("n", "d", "f"), CASES)
def test_mda_has_the_least_diameter(n: int, d: int, f: int) -> None:
    x = drawn(n, d).numpy()

    def diameter(members: tuple[int, ...]) -> float:
        return max((float(((x[i] - x[j]) ** 2).sum()) for i, j in itertools.combinations(members, 2)), default=0.0)

    best = min(itertools.combinations(range(n), n - f), key=diameter)
    close(Mda(f=f), drawn(n, d), x[list(best)].mean(0))


@pytest.mark.parametrize(("n", "d", "f"), CASES)
def test_smea_has_the_least_eigenvalue(n: int, d: int, f: int) -> None:
    x = drawn(n, d).numpy()

    def largest(members: tuple[int, ...]) -> float:
        covariance = np.cov(x[list(members)].T, bias=True).reshape(d, d)
        return float(np.linalg.eigvalsh(covariance)[-1])

    best = min(itertools.combinations(range(n), n - f), key=largest)
    close(Smea(f=f), drawn(n, d), x[list(best)].mean(0))


@pytest.mark.parametrize(("n", "d", "f"), [(7, 3, 1), (12, 4, 2), (11, 2, 2), (3, 5, 0)])
def test_bulyan_chooses_by_krum_and_trims(n: int, d: int, f: int) -> None:
    x = drawn(n, d).numpy()
    left, taken = list(range(n)), list[int]()
    while len(taken) < n - 2 * f:
        scores = krum_scores(x[left], max(0, len(left) - f - 2))
        taken.append(left.pop(int(np.argmin(scores))))
    expected = np.array([around(column, n - 4 * f) for column in x[taken].T.tolist()])
    close(Bulyan(f=f), drawn(n, d), expected)


@pytest.mark.parametrize(("n", "d", "f"), CASES)
def test_the_geometric_median_has_the_least_sum_of_distances(n: int, d: int, f: int) -> None:
    """A few steps are those of the definition; after many the gradient Σ (z − x_i)/‖z − x_i‖ is zero."""
    x = drawn(n, d).numpy()
    z = np.zeros(d)
    for _ in range(3):
        weights = 1 / np.maximum(0.1, np.linalg.norm(x - z, axis=1))
        z = (weights[:, None] * x).sum(0) / weights.sum()
    close(GeometricMedian(smoothing=0.1, steps=3), drawn(n, d), z)
    if d > 1:  # on a line it is one of the vectors, where there is no gradient
        found = GeometricMedian(smoothing=1e-9, steps=400)(drawn(n, d)).numpy()
        off = found - x
        distance = np.linalg.norm(off, axis=1)
        if distance.min() > 1e-3:
            assert np.linalg.norm((off / distance[:, None]).sum(0)) < 1e-4


@pytest.mark.parametrize(("n", "d", "f"), CASES)
@pytest.mark.parametrize("steps", [1, 4])
def test_centered_clipping_moves_a_guess(n: int, d: int, f: int, steps: int) -> None:
    vectors = drawn(n, d)
    for centre in (None, drawn(1, d, 1)[0]):
        v = np.zeros(d) if centre is None else centre.numpy()
        for _ in range(steps):
            off = vectors.numpy() - v
            v = v + (off * np.minimum(1, 0.7 / np.linalg.norm(off, axis=1))[:, None]).mean(0)
        found = CenteredClipping(radius=0.7, steps=steps)(vectors, centre)
        np.testing.assert_allclose(found.numpy(), v, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("n", "d", "f"), CASES)
def test_caf_is_the_mean_with_the_least_spread(n: int, d: int, f: int) -> None:
    x = drawn(n, d).numpy()
    shares, least, best = np.ones(n), math.inf, x.mean(0)
    while shares.sum() > n - 2 * f:
        mean = shares @ x / shares.sum()
        off = x - mean
        values, vectors = np.linalg.eigh((shares[:, None] * off).T @ off / shares.sum())
        if values[-1] < least:
            least, best = values[-1], mean
        along = (off @ vectors[:, -1]) ** 2
        shares = np.maximum(0, shares * (1 - along / along[shares > 0].max()))
    close(Caf(f=f), drawn(n, d), best)


def test_caf_ends_however_far_off_a_vector_is() -> None:
    vectors = drawn(9, 3)
    vectors[0], vectors[5] = 1e12, -1e30
    assert float(Caf(f=2)(vectors).abs().max()) < 30


@pytest.mark.parametrize("name", [name for name in RULES if name != "mean"])
def test_a_rule_holds_where_the_mean_does_not(name: str) -> None:
    """Nine vectors about 1 and two of a million: the result stays about 1, in whatever order they come.

    Bulyan's last choices are by one neighbour, which two have in each other: the first of them is taken.
    """
    vectors = 1 + 0.01 * torch.randn(11, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    vectors[4], vectors[9] = 1e6, -1e6
    rule = RULES[name](f=2)
    kept = torch.ones(6, dtype=torch.float64)
    found = rule(vectors, kept) if rule.from_centre else rule(vectors)
    assert float((found - 1).abs().max()) < (0.3 if name == "centered-clipping" else 0.05)
    if name == "bulyan":
        return
    back = rule(vectors.flip(0), kept) if rule.from_centre else rule(vectors.flip(0))
    torch.testing.assert_close(found, back, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", list(RULES))
def test_equal_vectors_give_that_vector(name: str) -> None:
    one = torch.tensor([0.1, -2.0, 3e-3], dtype=torch.float64)
    rule = RULES[name](f=1)
    found = rule(one.repeat(7, 1), one) if rule.from_centre else rule(one.repeat(7, 1))
    torch.testing.assert_close(found, one, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", list(RULES))
def test_parts_of_vectors_give_parts_of_the_result(name: str) -> None:
    """Vectors in several parts, in any precision, are as vectors in one; the result has the vectors' dtype."""
    vectors = drawn(8, 2 * 3).float()
    rule = RULES[name](f=1)
    stack = torch.cat([vectors, torch.zeros(1, 6)]) if rule.from_centre else vectors
    parts = lambda: (stack[:, at : at + 2].double() for at in (0, 2, 4))  # noqa: E731
    torch.testing.assert_close(torch.cat(list(aggregated(rule, parts, 8))).float(), rule(vectors))
    assert rule(vectors).dtype == torch.float32


def test_vectors_are_read_in_parts_of_a_fixed_size() -> None:
    parts = [part.shape for part in parts_of(torch.zeros(2, CHUNK + 3))]
    assert parts == [(2, CHUNK), (2, 3)]


@pytest.mark.parametrize(("name", "least"), [(name, 11 if name == "bulyan" else 5) for name in RULES if name != "mean"])
def test_too_few_vectors_are_refused(name: str, least: int) -> None:
    rule = RULES[name](f=2)
    assert rule.least == least
    rule(drawn(least, 2))
    with pytest.raises(BadInput, match=f"holds against 2 hostile uploads among at least {least}, and here are"):
        rule(drawn(least - 1, 2))


@pytest.mark.parametrize("rule", [Mda(f=15), Smea(f=15)])
def test_too_many_sets_are_refused(rule: Rule) -> None:
    with pytest.raises(BadInput, match=r"goes through all 40,225,345,056 sets of 25 of 40 uploads"):
        rule(torch.zeros(40, 2))


def test_monna_trusts_one_of_the_vectors() -> None:
    with pytest.raises(BadInput, match="trusts vector 3, and there are 3; name one of 0 to 2"):
        Monna(trusted=3)(torch.zeros(3, 2))
