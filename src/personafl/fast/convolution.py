"""Convolutions of stacked clients, each with weights of its own, as products of matrices.

To torch they are one convolution with a group for each client. cuDNN runs the gradients of many groups one after the
other, and groups of a single channel as depthwise ones: on a GPU both take several times as long as products do. With
the columns X [clients, channels · k², samples · pixels], what a filter sees at each place,

    y = W X;   ∂W = g Xᵀ;   ∂x = the convolution of g, padded by k − 1 − p, with the filters turned by 180°.

X is made anew where it is needed: it is k² times as large as x, and would else be kept from the forward to the backward
pass. Equal results up to rounding.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_FEW = 4  # channels up to which torch's own way is that of depthwise convolutions
_MANY = 256  # channels from which a product is better than cuDNN's gradients of groups
_SMALL = 9  # pixels of a filter up to which cuDNN has, in TF32, gradients of all groups at once
_MOST = 2**29  # entries of the columns: more would take too much memory for what is gained


def products_pay(x: Tensor, weight: Tensor, padding: tuple[int, int]) -> bool:
    """Say whether products are faster: x [clients, samples, channels, …], weight [clients, filters, channels, …]."""
    rows, columns = (size + 2 * pad for size, pad in zip(x.shape[3:], padding, strict=True))
    if x.shape[0] * x.shape[1] * rows * columns * weight[0, 0].numel() > _MOST:
        return False
    channels, pixels = weight.shape[2], weight[0, 0, 0].numel()
    return not _rounds(x) or channels <= _FEW or channels >= _MANY or pixels > _SMALL


def _rounds(x: Tensor) -> bool:
    """Say whether products are rounded to TF32, in which cuDNN's convolutions of groups are fast forwards."""
    return x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32


class Convolution(torch.autograd.Function):
    """x ∗ W of stacked clients, with steps of one pixel: x [clients, samples, channels, …], padded by p < k."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, padding: tuple[int, int]) -> Tensor:
        """Return [clients, samples, filters, …]."""
        ctx.save_for_backward(x, weight)
        ctx.padding = padding
        return _convolved(x, weight, padding)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients at x and W."""
        x, weight = ctx.saved_tensors
        at_x = at_weight = None
        if ctx.needs_input_grad[0]:
            rest = tuple(k - 1 - p for k, p in zip(weight.shape[3:], ctx.padding, strict=True))
            at_x = _convolved(gradient, weight.transpose(1, 2).flip(3, 4), rest)
        if ctx.needs_input_grad[1]:
            each = gradient.transpose(1, 2).flatten(2)  # [clients, filters, samples · pixels]
            at_weight = (each @ _columns(x, weight.shape[3:], ctx.padding).mT).reshape(weight.shape)
        return at_x, at_weight, None


def _convolved(x: Tensor, weight: Tensor, padding: tuple[int, int]) -> Tensor:
    """Return [clients, samples, filters, …]."""
    (clients, samples, channels), (filters, *kernel) = x.shape[:3], (weight.shape[1], *weight.shape[3:])
    sizes = [size + 2 * pad - k + 1 for size, pad, k in zip(x.shape[3:], padding, kernel, strict=True)]
    if x.device.type == "cuda" and _rounds(x) and channels > _FEW:
        groups = x.transpose(0, 1).flatten(1, 2), weight.flatten(0, 1)
        found = functional.conv2d(*groups, padding=padding, groups=clients)
        return found.reshape(samples, clients, filters, *sizes).transpose(0, 1)
    found = weight.flatten(2) @ _columns(x, torch.Size(kernel), padding)
    return found.reshape(clients, filters, samples, *sizes).transpose(1, 2)


def _columns(x: Tensor, kernel: torch.Size, padding: tuple[int, int]) -> Tensor:
    """Return X [clients, channels · k², samples · pixels]."""
    (rows, columns), (pad_rows, pad_columns) = kernel, padding
    wide = functional.pad(x.transpose(1, 2), (pad_columns, pad_columns, pad_rows, pad_rows)).contiguous()
    windows = wide.unfold(3, rows, 1).unfold(4, columns, 1)  # [clients, channels, samples, …, k, k]
    return windows.permute(0, 1, 5, 6, 2, 3, 4).flatten(1, 3).flatten(2)
