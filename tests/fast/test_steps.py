"""Steps in one pass, in the parameters' own memory or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from personafl.core import tree
from personafl.fast import gradient
from personafl.fast.gradient import add_scaled

F64 = torch.float64


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


def test_add_scaled_keeps_the_layout_of_the_second_and_the_dtype_of_the_first() -> None:
    """a + 3b where b is transposed in memory; a float64 factor does not widen float32 leaves, of any rank."""
    a, b = torch.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(3, 2).T
    for factor in (3.0, torch.tensor(3.0, dtype=F64)):
        total = add_scaled({"w": a, "s": torch.tensor(1.0)}, {"w": b, "s": torch.tensor(2.0)}, factor)
        assert torch.equal(total["w"], a + 3 * b)
        assert total["w"].stride() == b.stride()
        assert total["w"].dtype == total["s"].dtype == torch.float32
        assert total["s"] == 7.0


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("into", [True, False])
def test_add_scaled_of_stacked_clients(shared: bool, into: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """x + c·y with one factor for all or one for each client, for leaves of every rank; where told, in x's memory.

    The factor stays a tensor, as on a GPU; what does not stack makes torch warn.
    """
    monkeypatch.setattr(gradient, "number", lambda factor: factor)
    x = {"w": torch.ones(2, 3, 4, dtype=F64), "b": torch.ones(2, 3, dtype=F64), "s": torch.ones(2, dtype=F64)}
    y = tree.map(lambda leaf: torch.arange(leaf.numel(), dtype=F64).reshape(leaf.shape), x)
    factor = torch.tensor([3.0, 3.0] if shared else [3.0, 5.0], dtype=F64)
    expected = tree.map(lambda leaf: 1 + factor.reshape(-1, *[1] * (leaf.ndim - 1)) * leaf, y)

    def one(a: Any, b: Any, rate: Tensor) -> Any:
        return add_scaled(a, b, rate, into=into)

    total = vmap(one, in_dims=(0, 0, None if shared else 0))(x, y, factor[0] if shared else factor)
    assert same(total, expected)
    assert same(x, expected) is into
