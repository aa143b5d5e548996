"""Clients with smaller adapters than others in one shared LoRA, for any method whose server averages changes.

Y. Cho et al., *Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models* (HETLoRA), EMNLP 2024.
Of B·A with A [R, in] and B [out, R], a client of rank r ≤ R has the first r rows of A and the first r columns of B:

    received:  A[r:] = 0, B[:, r:] = 0;    then ∇A[r:] ∝ B[:, r:]ᵀ(…) = 0 and ∇B[:, r:] ∝ (…)A[r:]ᵀ = 0: both stay 0
    sent:      the changes of the first r; a server has 0 for the others

So it trains an adapter of rank r by whatever method, beside the same scale α/R as all. Here the mean is over changes,
and one who does not have a row counts as one who has left it as it was. (HETLoRA averages what clients have, padded
with zeros, so that rows which few have shrink, weighs clients by ‖BA‖ to counter that, and lets ranks fall while it
trains: none of this is here.) What is sent to clients is one message for all of them, whole.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from personafl.core import tree, wire
from personafl.core.algorithm import Algorithm, Problem
from personafl.core.batches import Data
from personafl.core.tree import Params, Tree
from personafl.errors import BadInput
from personafl.uploads.aroundclient import AroundClient

_MATRIX = re.compile(r"(.*\.)?adapter\.(local\.)?([ab])\.weight")
_AXIS = {"a": 0, "b": 1}  # which axis of a matrix is the rank's


@dataclass(frozen=True, kw_only=True)
class RankedClient(AroundClient):
    """Client rule: another one's, for adapters of the rank that the client's problem has."""

    @property
    def packed(self) -> Callable[[Problem, Any, Any], dict[str, tuple[Tree, ...]]] | None:
        """As the method, of what a client has of a message."""
        own = self.rule.packed
        if own is None:
            return None
        return lambda problem, message, state: own(problem, _cut(message, problem.rank), state)

    def init(self, problem: Problem, down: Any, generator: torch.Generator) -> Tree:
        """As the method, from what a client has of a message."""
        return self.rule.init(problem, _cut(down, problem.rank), generator)

    def update(self, problem: Problem, down: Any, state: Any, data: Data) -> tuple[Tree, Tree]:
        """As the method, and send the first rows alone."""
        state, upload = self.rule.update(problem, _cut(down, problem.rank), state, data)
        return state, _first(upload, problem.rank)

    def personalize(self, problem: Problem, down: Any, state: Any, data: Data) -> Tree:
        """As the method, from what a client has of a message."""
        return self.rule.personalize(problem, _cut(down, problem.rank), state, data)

    def models(self, problem: Problem, down: Any, state: Any) -> dict[str, Params]:
        """As the method; the model that all share is the server's, whole."""
        found = self.rule.models(problem, _cut(down, problem.rank), state)
        return found | ({"global": self.rule.models(problem, down, state)["global"]} if "global" in found else {})


def ranked(algorithm: Algorithm) -> Algorithm:
    """Return the method for clients whose problems may have a rank."""
    return dataclasses.replace(algorithm, client=RankedClient(rule=algorithm.client))


def check_rank(rank: int, shapes: Mapping[str, torch.Size], key: str) -> None:
    """Fail if the trained parameters of these shapes have no adapters of which a client can have a part."""
    trained = {name: shape[axis] for name, shape in shapes.items() if (axis := _axis(name)) is not None}
    others = {
        name.replace(*pair) for name in trained for pair in ((".a.weight", ".b.weight"), (".b.weight", ".a.weight"))
    }
    if not trained or others > trained.keys():  # where one is constant, the other's rows would not stay 0
        what = "of the shared ones one matrix is frozen" if trained else "the model has none"
        raise BadInput(f'{key}: is of lora adapters, and {what}; set model.adapter = "lora", with nothing of it frozen')
    if rank > (most := max(trained.values())):
        raise BadInput(f"{key}: {rank} is above {most}, that of the shared adapters; lower it, or raise model.rank")


def _axis(name: str) -> int | None:
    found = _MATRIX.fullmatch(name)
    return None if found is None else _AXIS[found[3]]


def _each(message: Tree, function: Callable[[Tensor, int], Tree]) -> Tree:
    """Return a message with every matrix of an adapter as a function of it and of the rank's axis."""

    def one(path: Any, leaf: Tree) -> Tree:
        axis = _axis(tree.path_name(path))
        return leaf if axis is None else function(leaf.dense() if wire.is_form(leaf) else leaf, axis)

    return pytree.tree_map_with_path(one, message, is_leaf=wire.is_form)


def _inside(shape: torch.Size, axis: int, rank: int) -> Tensor:
    """Return which entries of a matrix are in the first so many rows or columns."""
    return (torch.arange(shape[axis]) < rank).unsqueeze(1 - axis).expand(shape)


def _cut(message: Tree, rank: int | None) -> Tree:
    """Return a message with 0 in all others."""
    if rank is None:
        return message
    return _each(message, lambda leaf, axis: leaf * _inside(leaf.shape, axis, rank).to(leaf))


def _first(upload: Tree, rank: int | None) -> Tree:
    """Return an upload with these alone, in the form that takes least room."""
    if rank is None:
        return upload

    def few(leaf: Tensor, axis: int) -> Tree:
        places = _inside(leaf.shape, axis, rank).flatten().nonzero().flatten()
        return wire.kept(leaf, places.to(leaf.device))

    return _each(upload, few)
