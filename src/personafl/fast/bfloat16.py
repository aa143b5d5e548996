"""Training with products and convolutions in bfloat16, an option (`engine.dtype`): torch's autocast, seen from inside.

Weights, updates and losses stay as exact as they are. What training computes in fewer products (`fast.gram`) stays
exact too.
"""

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import Tensor

_EXACT: AbstractContextManager[None] = contextlib.nullcontext()


def rounded_products(device: torch.device) -> AbstractContextManager[object]:
    """Have products round their factors, and their results, to bfloat16.

    On a CPU rounded weights are not kept for another use: every step has weights of its own.
    """
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=device.type != "cpu")


def rounding(value: Tensor) -> bool:
    """Say whether products with a tensor are rounded now."""
    return not value.is_meta and torch.is_autocast_enabled(value.device.type)  # shapes alone have no autocast


def rounded(value: Tensor) -> Tensor:
    """Return a factor as such products have it."""
    return value.to(torch.bfloat16)


def exactly(value: Tensor) -> AbstractContextManager[object]:
    """Have products with a tensor not rounded, whatever is around."""
    return torch.autocast(value.device.type, enabled=False) if rounding(value) else _EXACT
