"""Uploads as vectors of integers, and sums of them as sums of uploads. The loss is an entry with a range of its own."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.tree import Tree
from personafl.secure.fixed import LOSS_RANGE, Grid, Vector, unwrapped, wrapped


def grids_of(upload: Any, grid: Grid) -> Tree:
    """Return the grid of each leaf of an upload, by its path."""
    return {path: replace(grid, range=LOSS_RANGE) if path == "loss" else grid for path in tree.flatten(upload)}


def rounded(stacked: Any, weights: Tensor, grid: Grid) -> Tree:
    """Return w·u of stacked uploads [clients, …], rounded to what is sent; sums of that are exact in float64."""
    grids = grids_of(stacked, grid)
    leaves = {path: grids[path].real(grids[path].integers(leaf, weights)) for path, leaf in _named(stacked)}
    return tree.unflatten(stacked, leaves)


def length_of(upload: Any) -> int:
    """Return how many entries the vector of an upload has."""
    return sum(leaf.numel() for leaf in tree.leaves(upload))


def vector_of(upload: Any, weight: float, grid: Grid) -> Vector:
    """Return what is masked of an upload that counts so much: its integers modulo 2³²."""
    grids, one = grids_of(upload, grid), torch.tensor([weight], dtype=torch.float64)
    parts = [wrapped(grids[path].integers(leaf[None], one).flatten()) for path, leaf in _named(upload)]
    return np.concatenate(parts).astype("<u4", copy=False)


def total_of(vector: Vector, like: Any, grid: Grid) -> Tree:
    """Return Σ w·u, like an upload but in float64, from the sum of vectors modulo 2³²."""
    integers, grids, begin = torch.from_numpy(unwrapped(vector)), grids_of(like, grid), 0
    leaves = {}
    for path, leaf in _named(like):
        leaves[path] = grids[path].real(integers[begin : begin + leaf.numel()]).reshape(leaf.shape)
        begin += leaf.numel()
    return tree.unflatten(like, leaves)


def _named(upload: Any) -> list[tuple[str, Tensor]]:
    return list(tree.flatten(upload).items())
