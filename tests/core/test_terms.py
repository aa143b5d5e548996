"""Terms that methods add to a client's loss."""

from __future__ import annotations

import pytest
import torch

from personafl.core import tree
from personafl.core.descend import Quadratic, pull

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


def test_a_parameter_without_a_term_has_none_of_it() -> None:
    term, w = Quadratic({"a": torch.ones(2)}, {"b": torch.zeros(2)}, 0.5), dict.fromkeys("abc", torch.full((2,), 4.0))
    assert [term.has(name) for name in "abc"] == [True, True, False]
    assert {name: g.tolist() for name, g in term.onto(tree.zeros_like(w), w).items()} == {
        "a": [1.0, 1.0],
        "b": [2.0, 2.0],
        "c": [0.0, 0.0],
    }
    assert all(term._replace(decay=0.1).has(name) for name in "abc")


@pytest.mark.parametrize("sloped", [True, False])
@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_the_gradient_of_a_quadratic_is_that_of_its_formula(sloped: bool, held: bool, decay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    w, slope, anchor, other = ({"a": torch.randn(3, 2, generator=generator, dtype=F64)} for _ in range(4))
    term = Quadratic(slope if sloped else None, anchor if held else None, 0.7 if held else 0.0, decay)

    def value(v: tree.Params) -> torch.Tensor:
        total = tree.dot(other, v) + 0.5 * decay * tree.dot(v, v)
        total = total + tree.dot(slope, v) if sloped else total
        return total + pull(v, anchor, 0.7) if held else total

    torch.testing.assert_close(term.onto(other, w)["a"], torch.func.grad(value)(w)["a"], rtol=0, atol=1e-14)
