"""Sums over clients on a GPU."""

import torch
from torch import Tensor

from personafl.core import algorithm
from personafl.core.seam import definition

_FEW = 32


def weighted_sum(weights: Tensor, stacked: Tensor) -> Tensor:
    """Return what `core.algorithm.weighted_sum` does.

    On a GPU single precision is summed as it is for a few clients at a time: a copy in float64 takes it far longer.
    """
    few, rest = divmod(len(weights), _FEW)
    if not (stacked.is_cuda and stacked.dtype == torch.float32 and few):
        return definition(algorithm.weighted_sum)(weights, stacked)
    whole = few * _FEW
    products = torch.backends.cuda.matmul
    rounded, products.allow_tf32 = products.allow_tf32, False
    try:
        rows = weights[:whole].to(stacked.dtype).reshape(few, 1, _FEW)
        sums = torch.bmm(rows, stacked[:whole].reshape(few, _FEW, -1))
    finally:
        products.allow_tf32 = rounded
    total = sums.sum((0, 1), dtype=torch.float64).reshape(stacked.shape[1:])
    return total + weighted_sum(weights[whole:], stacked[whole:]) if rest else total
