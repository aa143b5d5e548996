"""Algebra on trees of tensors: the nested dicts and NamedTuples that states and messages are made of.

Built on the tree utilities that `torch.func` itself uses, so whatever vmap accepts, these functions accept.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from personafl.core.seam import replaceable

Params = dict[str, Tensor]
Tree = Any  # a Tensor, or a dict, tuple or NamedTuple of trees
T = TypeVar("T")
_PART = 2**16  # numbers that are in float64 at a time


def map(function: Callable[..., Any], tree: T, *rest: Tree) -> T:  # noqa: A001 - used as tree.map
    """Apply a function to the leaves of trees of one shape."""
    result: T = pytree.tree_map(function, tree, *rest)
    return result


def constant(kind: type[T]) -> type[T]:
    """Have trees keep values of a frozen dataclass as they are: it has no leaves."""
    pytree.register_constant(kind)
    return kind


def on(device: torch.device, values: NDArray[Any]) -> Tensor:
    """Return an array on a device, without waiting for what the device is at."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def leaves(tree: Tree) -> list[Tensor]:
    """Return the tensors of a tree, in order."""
    return list(pytree.tree_leaves(tree))


def add(a: T, b: T) -> T:
    """Return a + b."""
    return map(torch.add, a, b)


def sub(a: T, b: T) -> T:
    """Return a − b."""
    return map(torch.sub, a, b)


def scale(tree: T, factor: float | Tensor) -> T:
    """Return factor · tree; a leaf keeps its dtype."""
    # A 0-d leaf would otherwise take the dtype of a 0-d factor.
    return map(lambda leaf: leaf * (factor.to(leaf.dtype) if isinstance(factor, Tensor) else factor), tree)


def zeros_like(tree: T) -> T:
    """Return a tree of zeros."""
    return map(torch.zeros_like, tree)


def dot(a: Tree, b: Tree) -> Tensor:
    """Return ⟨a, b⟩ over all leaves; 0 for trees without any."""
    products = leaves(map(lambda x, y: (x * y).sum(), a, b))  # map pairs dict entries by key, not by order
    return torch.stack(products).sum() if products else torch.zeros(())


def norm(tree: Tree) -> Tensor:
    """Return the Euclidean norm over all leaves."""
    return dot(tree, tree).sqrt()


def where(condition: Tensor, a: T, b: T) -> T:
    """Return a where the scalar condition holds, else b."""
    return map(lambda x, y: torch.where(condition, x, y), a, b)


@replaceable
def when(condition: Tensor, then: Callable[[], T], otherwise: T) -> T:
    """Return then() where the scalar condition holds, else the other; then() has to do without side effects."""
    return where(condition, then(), otherwise)


def finite(stacked: Tree, count: int) -> Tensor:
    """Return [count] booleans: which of the stacked entries have only finite numbers. Does not wait for a GPU."""
    numbers = [leaf for leaf in leaves(stacked) if leaf.is_floating_point() and leaf.numel()]
    rows = [leaf.reshape(count, math.prod(leaf.shape[1:])) for leaf in numbers]
    if not rows:
        return torch.ones(count, dtype=torch.bool)
    # In one pass: the largest of numbers with inf or nan among them is inf or nan. So is their sum, which a CPU is
    # faster with; but a sum may overflow.
    if rows[0].is_cuda:
        return torch.stack([torch.linalg.vector_norm(row, torch.inf, dim=1).isfinite() for row in rows]).all(0)
    good = torch.stack([row.sum(dim=1).isfinite() for row in rows]).all(0)
    return good if good.all() else torch.stack([row.isfinite().all(dim=1) for row in rows]).all(0)


def stack(trees: Sequence[T]) -> T:
    """Join trees of one shape along a new first axis."""
    return map(lambda *entries: torch.stack(entries), trees[0], *trees[1:])


def take(stacked: T, index: int) -> T:
    """Return one entry of a stacked tree, as a copy of its own."""
    return map(lambda leaf: leaf[index].clone(), stacked)


def flatten(tree: Tree) -> dict[str, Tensor]:
    """Return {path: tensor}; a path joins dict keys, field names and positions with '/'."""
    entries = pytree.tree_leaves_with_path(tree)
    named = {path_name(path): leaf for path, leaf in entries}
    if len(named) != len(entries):
        raise ValueError("two leaves have the same path; keys of nested dicts may not contain '/'")
    return named


def unflatten(like: T, named: dict[str, Tensor]) -> T:
    """Return a tree of the shape of `like` with the leaves of `flatten`'s output."""
    result: T = pytree.tree_map_with_path(lambda path, _: named[path_name(path)], like)
    return result


def path_name(path: Sequence[Any]) -> str:
    """Return a leaf's path as text."""
    return "/".join(_key(entry) for entry in path)


def _key(entry: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    raise TypeError(f"unknown tree node {entry!r}")


def accumulate(total: Tensor, leaf: Tensor, weight: float) -> Tensor:
    """Add weight·leaf in place; a part at a time, for what PyTorch makes in float64 of a large one takes longest."""
    if leaf.dtype == total.dtype or leaf.numel() <= _PART or not total.is_contiguous():
        return total.add_(leaf, alpha=weight)
    for part, own in zip(torch.split(total.view(-1), _PART), torch.split(leaf.reshape(-1), _PART), strict=True):
        part.add_(own, alpha=weight)
    return total
