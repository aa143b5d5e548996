"""What is done before a rule, against its definition, and rules after it."""

import numpy as np
import pytest
import torch
from torch import Tensor

from personafl.errors import BadInput
from personafl.robust.mixing import Arc, Bucketing, Clip, NearestNeighbours
from personafl.robust.rule import aggregated, parts_of
from personafl.robust.table import MIXES, RULES


def drawn(n: int, d: int) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(n + d), dtype=torch.float64)


@pytest.mark.parametrize(("n", "d", "f"), [(7, 3, 2), (10, 1, 3), (5, 30, 0)])
def test_nearest_neighbours_are_averaged(n: int, d: int, f: int) -> None:
    x = drawn(n, d).numpy()
    expected = [x[np.argsort(((x - one) ** 2).sum(1), kind="stable")[: n - f]].mean(0) for one in x]
    np.testing.assert_allclose(NearestNeighbours(f=f)(drawn(n, d)).numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("n", "size", "buckets"), [(6, 2, 3), (7, 3, 3), (5, 1, 5), (4, 9, 1)])
def test_buckets_divide_the_vectors(n: int, size: int, buckets: int) -> None:
    """With unit vectors, what is in a bucket is what its mean has; each is in one bucket alone."""
    found = Bucketing(size=size)(torch.eye(n, dtype=torch.float64), key=5)
    members = found > 0
    assert len(found) == buckets
    assert members.sum(0).tolist() == [1] * n
    assert members.sum(1).tolist() == [min(size, n - size * at) for at in range(buckets)]
    torch.testing.assert_close(found, members / members.sum(1, keepdim=True).double())
    other = Bucketing(size=size)(torch.eye(n, dtype=torch.float64), key=6)
    assert buckets in (1, n) or not torch.equal(found, other)


def test_long_vectors_are_shortened() -> None:
    vectors = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]], dtype=torch.float64)
    expected = torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(Clip(norm=1.0)(vectors), expected)
    with pytest.raises(BadInput, match=r"robust.clip: 0 leaves nothing of any upload"):
        Clip(norm=0.0)(vectors)


@pytest.mark.parametrize(("n", "f"), [(7, 2), (10, 4), (9, 1), (5, 0)])
def test_arc_shortens_the_longest_to_the_next(n: int, f: int) -> None:
    x = drawn(n, 4).numpy()
    norms = np.linalg.norm(x, axis=1)
    cut = int(2 * f * (n - f) / n)
    most = sorted(norms)[n - cut - 1]
    expected = x * np.minimum(1, most / norms)[:, None]
    np.testing.assert_allclose(Arc(f=f)(drawn(n, 4)).numpy(), expected, rtol=0, atol=1e-12)
    assert int((np.linalg.norm(expected, axis=1) < norms - 1e-9).sum()) == cut


@pytest.mark.parametrize("name", list(RULES))
@pytest.mark.parametrize("before", [("nnm",), ("bucketing",), ("arc", "nnm"), ("nnm", "bucketing")])
def test_a_rule_after_mixing_is_the_rule_of_what_was_mixed(name: str, before: tuple[str, ...]) -> None:
    """The matrices multiply: what is never built comes to what it would have come to."""
    vectors, rule = drawn(14, 5), RULES[name](f=1)
    steps = [MIXES[step](f=1) for step in before]
    stack = torch.cat([vectors, torch.zeros(1, 5).double()]) if rule.from_centre else vectors
    found = torch.cat(list(aggregated(rule, lambda: parts_of(stack), 14, steps, key=9)))
    for step in steps:
        vectors = step(vectors, 9)
    torch.testing.assert_close(found, rule(vectors), rtol=0, atol=1e-9)


def test_buckets_count_for_the_rule_that_follows() -> None:
    """Six vectors hold against two hostile ones; three buckets of them do not."""
    rule, vectors = RULES["median"](f=2), drawn(6, 2)
    rule(vectors)
    with pytest.raises(BadInput, match="among at least 5, and here are 3"):
        list(aggregated(rule, lambda: parts_of(vectors), 6, [Bucketing(f=2, size=2)]))


def test_mixing_too_few_is_refused() -> None:
    with pytest.raises(BadInput, match="NearestNeighbours holds against 3 hostile uploads among at least 7"):
        NearestNeighbours(f=3)(drawn(6, 2))
