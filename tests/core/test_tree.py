"""Laws of the algebra on trees. Leaves are float64 and small integers, so sums and products are exact."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from personafl.core import tree

F64 = torch.float64


class Pair(NamedTuple):
    left: Any
    right: Any


def build(shape: Any, draw_leaf: Any) -> Any:
    """A tree with fresh leaves, of the structure of nested tuples that `structures` draws."""
    kind, children = shape
    if kind == "leaf":
        return draw_leaf(children)
    built = [build(child, draw_leaf) for child in children]
    if kind == "dict":
        return {f"k{i}": child for i, child in enumerate(built)}
    return Pair(built[0], tuple(built[1:])) if kind == "named" else tuple(built)


leaf_shapes = st.lists(st.integers(0, 3), max_size=2).map(tuple)
structures = st.recursive(
    leaf_shapes.map(lambda s: ("leaf", s)),
    lambda inner: st.tuples(st.sampled_from(["dict", "named", "tuple"]), st.lists(inner, min_size=1, max_size=3)),
    max_leaves=5,
)


@st.composite
def alike(draw: Any, count: int) -> tuple[Any, ...]:
    """Return `count` trees of one structure."""
    shape = draw(structures)
    rng = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    return tuple(build(shape, lambda s: torch.randint(-9, 10, s, generator=rng).to(F64)) for _ in range(count))


def same(a: Any, b: Any) -> bool:
    x, y = tree.flatten(a), tree.flatten(b)
    return type(a) is type(b) and x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)


laws = settings(max_examples=40, deadline=None)


@laws
@given(alike(3))
def test_add_is_a_commutative_group(trees: tuple[Any, ...]) -> None:
    """a+b = b+a, (a+b)+c = a+(b+c), a+0 = a, a−a = 0, (a−b)+b = a."""
    a, b, c = trees
    assert same(tree.add(a, b), tree.add(b, a))
    assert same(tree.add(tree.add(a, b), c), tree.add(a, tree.add(b, c)))
    assert same(tree.add(a, tree.zeros_like(a)), a)
    assert same(tree.sub(a, a), tree.zeros_like(a))
    assert same(tree.add(tree.sub(a, b), b), a)


@laws
@given(alike(2), st.integers(-5, 5), st.integers(-5, 5))
def test_scale_is_linear(trees: tuple[Any, ...], s: int, t: int) -> None:
    """s(a+b) = sa+sb, (s+t)a = sa+ta, s(ta) = (st)a; a tensor factor does what a number does."""
    a, b = trees
    assert same(tree.scale(tree.add(a, b), s), tree.add(tree.scale(a, s), tree.scale(b, s)))
    assert same(tree.scale(a, s + t), tree.add(tree.scale(a, s), tree.scale(a, t)))
    assert same(tree.scale(tree.scale(a, t), s), tree.scale(a, s * t))
    assert same(tree.scale(a, torch.tensor(s)), tree.scale(a, s))


@laws
@given(alike(3), st.integers(-5, 5))
def test_dot_is_an_inner_product_and_norm_is_its_root(trees: tuple[Any, ...], s: int) -> None:
    """⟨a,b⟩ = ⟨b,a⟩, ⟨sa+c,b⟩ = s⟨a,b⟩+⟨c,b⟩, ⟨a,a⟩ = Σ entries², ‖a‖² = ⟨a,a⟩, ‖a+b‖ ≤ ‖a‖+‖b‖."""
    a, b, c = trees
    assert tree.dot(a, b) == tree.dot(b, a)
    assert tree.dot(tree.add(tree.scale(a, s), c), b) == s * tree.dot(a, b) + tree.dot(c, b)
    assert tree.dot(a, a) == sum(float((leaf**2).sum()) for leaf in tree.leaves(a))
    assert tree.norm(a) ** 2 == pytest.approx(float(tree.dot(a, a)), abs=1e-10)
    assert tree.norm(tree.add(a, b)) <= tree.norm(a) + tree.norm(b) + 1e-12


def test_dot_pairs_dict_entries_by_key() -> None:
    """⟨{x:1, y:10}, {y:3, x:2}⟩ = 1·2 + 10·3 = 32, whatever the insertion order (by order it would be 23)."""
    one, two, three, ten = (torch.tensor([float(n)], dtype=F64) for n in (1, 2, 3, 10))
    assert tree.dot({"x": one, "y": ten}, {"y": three, "x": two}) == 32


def test_a_tree_without_leaves_has_dot_and_norm_zero() -> None:
    """An empty sum is 0: a method with nothing personal still has a norm of its personal part."""
    assert tree.dot({}, {}) == 0
    assert tree.norm({"personal": ()}) == 0


def test_scale_keeps_the_dtype_of_a_scalar_leaf() -> None:
    """A float32 parameter stays float32 under a float64 rate, 0-d ones too (torch promotes 0-d with 0-d)."""
    scaled = tree.scale({"s": torch.tensor(2.0), "v": torch.ones(2)}, torch.tensor(0.5, dtype=F64))
    assert scaled["s"].dtype == scaled["v"].dtype == torch.float32
    assert scaled["s"] == 1


@laws
@given(alike(2), st.booleans())
def test_where_picks_a_whole_side(trees: tuple[Any, ...], condition: bool) -> None:
    """where(true, a, b) = a and where(false, a, b) = b."""
    a, b = trees
    assert same(tree.where(torch.tensor(condition), a, b), a if condition else b)


@laws
@given(st.integers(1, 4).flatmap(lambda n: alike(n)))
def test_take_undoes_stack(trees: tuple[Any, ...]) -> None:
    """take(stack(ts), i) = ts[i], a copy of its own."""
    stacked = tree.stack(trees)
    for i, one in enumerate(trees):
        assert same(tree.take(stacked, i), one)
    for copy, leaf in zip(tree.leaves(tree.take(stacked, 0)), tree.leaves(stacked), strict=True):
        assert leaf.numel() == 0 or copy.untyped_storage().data_ptr() != leaf.untyped_storage().data_ptr()


@laws
@given(alike(2))
def test_unflatten_undoes_flatten(trees: tuple[Any, ...]) -> None:
    """unflatten(like, flatten(a)) = a for any `like` of a's structure, types of the nodes included."""
    a, like = trees
    again = tree.unflatten(like, tree.flatten(a))
    assert same(again, a)
    assert len(tree.flatten(a)) == len(tree.leaves(a))


def test_paths_name_keys_fields_and_positions() -> None:
    """A path joins dict keys, field names and positions with '/'."""
    leaf = torch.zeros(())
    assert list(tree.flatten(Pair({"w": leaf}, (leaf, leaf)))) == ["left/w", "right/0", "right/1"]


def test_flatten_refuses_two_leaves_of_one_path() -> None:
    """{"a": {"b": x}, "a/b": y} would lose a leaf silently."""
    leaf = torch.zeros(())
    with pytest.raises(ValueError, match="same path"):
        tree.flatten({"a": {"b": leaf}, "a/b": leaf})


@laws
@given(st.integers(1, 4), st.data())
def test_finite_flags_the_right_rows(count: int, data: st.DataObject) -> None:
    """A row is flagged iff one of its floats, in any leaf, is inf, −inf or nan; integers always pass."""
    trees = data.draw(alike(count))
    stacked = {"t": tree.stack(trees), "n": torch.arange(count), "s": torch.zeros(count, dtype=F64)}
    bad = data.draw(st.sets(st.integers(0, count - 1)))
    for row in bad:
        candidates = [leaf for leaf in tree.leaves(stacked) if leaf.is_floating_point() and leaf[row].numel()]
        leaf: Tensor = candidates[data.draw(st.integers(0, len(candidates) - 1))]
        flat = leaf[row].reshape(-1)
        spot = data.draw(st.integers(0, flat.numel() - 1))
        value = data.draw(st.sampled_from([float("inf"), float("-inf"), float("nan")]))
        leaf.view(count, -1)[row, spot] = value
    assert tree.finite(stacked, count).tolist() == [row not in bad for row in range(count)]


def test_operations_do_not_change_their_arguments() -> None:
    """Every operation is pure."""
    a, b = {"w": torch.ones(2, dtype=F64)}, {"w": torch.full((2,), 2.0, dtype=F64)}
    (
        tree.add(a, b),
        tree.sub(a, b),
        tree.scale(a, 3.0),
        tree.stack([a, b]),
        tree.where(torch.tensor(True), b, a),
    )
    assert same(a, {"w": torch.ones(2, dtype=F64)})
    assert same(b, {"w": torch.full((2,), 2.0, dtype=F64)})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_finite_on_a_gpu(bad: float) -> None:
    """The largest finite number is one, whatever sums would make of it."""
    stacked = torch.full((4, 3), torch.finfo(torch.float32).max, device="cuda")
    stacked[2, 1] = bad
    assert tree.finite({"a": stacked, "b": torch.ones(4, 0, device="cuda")}, 4).tolist() == [True, True, False, True]


@pytest.mark.parametrize("shape", [(3,), (2**16,), (3, 2**15 + 1), (2**18 + 5,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_what_is_added_in_parts_is_what_is_added_at_once(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    leaf = (1000 * torch.randn(shape, generator=generator)).to(dtype)
    total = torch.randn(shape, generator=generator, dtype=F64)
    expected = total.clone().add_(leaf, alpha=0.37)
    assert tree.accumulate(total, leaf, 0.37) is total
    assert torch.equal(total, expected)
    turned = total.t().contiguous().t() if total.ndim == 2 else total
    assert torch.equal(tree.accumulate(turned.clone(), leaf, 0.37), expected.add_(leaf, alpha=0.37))
