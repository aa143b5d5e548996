"""Adapters: small personal modules inside a shared network. With all their parameters 0 the network is unchanged.

- residual (S.-A. Rebuffi et al. 2017): after each 3×3 convolution, before its norm,  y + Conv1×1(GroupNorm(y));
- bottleneck (N. Houlsby et al. 2019): at each `Site` of a transformer,  x + W₂·gelu(W₁·x + b₁) + b₂;
- lora (E. Hu et al. 2022): beside each linear layer,  Wx + b + B(Ax).

An adapter is a child called `adapter` of the layer it belongs to, which keeps its own parameters' names: a model
trained without adapters is loaded by name into one with them.
"""

import copy
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from personafl.errors import BadInput

AdapterKind = Literal["residual", "bottleneck", "lora"]
NEAR_ZERO = 1e-3  # standard deviation of an adapter's last layer at the start


class Site(nn.Module):
    """A place in a network, for values [..., width], where a bottleneck adapter may go."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        """Return x itself."""
        return x


class AdaptedSite(Site):
    """x + adapter(x)."""

    adapter: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Add the adapter's output, same shape as x."""
        result: Tensor = x + self.adapter(x)
        return result


class AdaptedConv2d(nn.Conv2d):
    """y + adapter(y) with the convolution's own output y [batch, channels, height, width]."""

    adapter: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Add the adapter's output to the convolution's."""
        y = super().forward(x)
        result: Tensor = y + self.adapter(y)
        return result


class AdaptedLinear(nn.Linear):
    """Wx + b + adapter(x)."""

    adapter: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Add the adapter's output to the layer's, [..., out]."""
        result: Tensor = super().forward(x) + self.adapter(x)
        return result


class Residual(nn.Sequential):
    """Conv1×1(GroupNorm(y)), one group."""

    def __init__(self, channels: int) -> None:
        last = nn.Conv2d(channels, channels, 1, bias=False)
        nn.init.normal_(last.weight, std=NEAR_ZERO)
        super().__init__(nn.GroupNorm(1, channels), last)


class Bottleneck(nn.Module):
    """W₂·gelu(W₁·x + b₁) + b₂ with W₁ [size, width], W₂ [width, size]."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, size), nn.Linear(size, width)
        nn.init.normal_(self.up.weight, std=NEAR_ZERO)
        nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., width] to the same shape."""
        result: Tensor = self.up(functional.gelu(self.down(x)))
        return result


class LowRank(nn.Module):
    """B(Ax) with A [rank, in] and B [out, rank]; B is 0 at the start."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        result: Tensor = self.b(self.a(x))
        return result


def with_adapters(module: nn.Module, kind: AdapterKind, *, size: int = 16) -> nn.Module:
    """Return a copy of a network with adapters in all their places, drawn from torch's generator.

    `size` is the bottleneck's width or LoRA's rank (scaled by α/r = 1); a residual adapter has its convolution's.
    """
    if size < 1:
        raise BadInput(f"model.adapter_size: must be at least 1 (given: {size})")
    module = copy.deepcopy(module)
    if there := [name for name, _ in module.named_parameters() if is_adapter(name)]:
        raise BadInput(f"model.adapter: the model has adapters already ({there[0]}); leave model.adapter out")
    places = [layer for layer in module.modules() if _fits(layer, kind)]
    if not places:
        found = sorted({type(layer).__name__ for layer in module.modules()})
        needs = {"residual": "3×3 convolutions", "bottleneck": "a transformer's sites", "lora": "linear layers"}
        can = [other for other in needs if any(_fits(layer, other) for layer in module.modules())]
        remedy = f"use {' or '.join(map(repr, can))}" if can else f"the model has only {', '.join(found)}"
        raise BadInput(f"model.adapter: {kind!r} adapters need {needs[kind]}, and there are none; {remedy}")
    like = next(module.parameters(), torch.zeros(()))
    for layer in places:
        _adapt(layer, size, like)
    return module


def default_adapter(module: nn.Module) -> AdapterKind:
    """Return the kind that suits a network: bottleneck for sites, residual for 3×3 convolutions, else lora."""
    kinds: tuple[AdapterKind, ...] = ("bottleneck", "residual")
    return next((kind for kind in kinds if any(_fits(layer, kind) for layer in module.modules())), "lora")


def is_adapter(name: str) -> bool:
    """Say whether a parameter belongs to an adapter, by its name."""
    return "adapter" in name.split(".")[:-1]


def _fits(layer: nn.Module, kind: str) -> bool:
    # Exact types: a subclass's weight may be used past its forward(), as nn.MultiheadAttention does.
    if kind == "residual":
        return type(layer) is nn.Conv2d and layer.kernel_size == (3, 3)
    return type(layer) is (Site if kind == "bottleneck" else nn.Linear)


def _adapt(layer: nn.Module, size: int, like: Tensor) -> None:
    """Turn a layer into its adapted subclass in place: its parameters, hooks and every name for it stay."""
    adapter: nn.Module
    if isinstance(layer, nn.Conv2d):
        adapter = Residual(layer.out_channels)
        layer.__class__ = AdaptedConv2d
    elif isinstance(layer, nn.Linear):
        adapter = LowRank(layer.in_features, layer.out_features, size)
        layer.__class__ = AdaptedLinear
    else:
        assert isinstance(layer, Site)
        adapter = Bottleneck(layer.width, size)
        layer.__class__ = AdaptedSite
    layer.add_module("adapter", adapter.to(like))
