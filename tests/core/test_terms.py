"""Terms that methods add to a client's loss."""

from __future__ import annotations

import pytest
import torch

from personafl.core.terms import pull

F64 = torch.float64


def test_pull_by_hand() -> None:
    """(λ/2)‖w − a‖²: w − a = (3, 4) and 12, λ = 0.5: ¼·169; its gradient is λ(w − a)."""
    w = {"a": torch.tensor([4.0, 4.0], dtype=F64), "b": torch.tensor(10.0, dtype=F64)}
    anchor = {"b": torch.tensor(-2.0, dtype=F64), "a": torch.tensor([1.0, 0.0], dtype=F64)}
    assert float(pull(w, anchor, 0.5)) == pytest.approx(169 / 4, abs=1e-12)
    gradient = torch.func.grad(lambda v: pull(v, anchor, 0.5))(w)
    assert gradient["a"].tolist() == [1.5, 2.0]
    assert float(gradient["b"]) == 6


def test_no_pull() -> None:
    """At the anchor, at strength 0, and without parameters it is 0."""
    w = {"a": torch.ones(2, dtype=F64)}
    assert (
        float(pull(w, w, 3.0)) == float(pull(w, {"a": torch.zeros(2, dtype=F64)}, 0.0)) == float(pull({}, {}, 1)) == 0
    )
