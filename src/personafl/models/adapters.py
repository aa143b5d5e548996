"""Adapters: small personal modules inside a shared network. With all their parameters 0 the network is unchanged.

- residual (S.-A. Rebuffi et al. 2017): after each 3×3 convolution, before its norm,  y + Conv1×1(GroupNorm(y));
- bottleneck (N. Houlsby et al. 2019): at each `Site` of a transformer,  x + W₂·gelu(W₁·x + b₁) + b₂;
- lora (E. Hu et al. 2022): beside linear layers,  Wx + b + (α/r)·B(Ax) with rank r, as `peft` has it; once, or twice.

An adapter is a child called `adapter` of the layer it belongs to, which keeps its own parameters' names: a model
trained without adapters is loaded by name into one with them.
"""

import re
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from personafl.core.net import copied
from personafl.core.split import listed
from personafl.errors import BadInput

AdapterKind = Literal["residual", "bottleneck", "lora"]
_CONV1D = "transformers.pytorch_utils.Conv1D"
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
        y = super().forward(x)
        result: Tensor = y + self.adapter(x)
        return result.to(y.dtype)  # of the base, which may be a lower precision than the adapter's


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
    """scale · B(Ax) with A [rank, in] and B [out, rank]; B is 0 at the start."""

    def __init__(self, inputs: int, outputs: int, rank: int, scale: float = 1.0) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.b.weight)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out], in the adapter's own precision."""
        result: Tensor = self.b(self.a(x.to(self.a.weight.dtype)))
        return result if self.scale == 1 else self.scale * result


class TwoLowRank(LowRank):
    """scale · B(Ax) + scale · B′(A′x): the second one is called `local` (FedDPA, Y. Yang et al. 2024)."""

    def __init__(self, inputs: int, outputs: int, rank: int, scale: float = 1.0) -> None:
        super().__init__(inputs, outputs, rank, scale)
        self.local = LowRank(inputs, outputs, rank, scale)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        result: Tensor = super().forward(x) + self.local(x)
        return result


def with_adapters(
    module: nn.Module,
    kind: AdapterKind,
    *,
    size: int = 16,
    alpha: float | None = None,
    targets: Sequence[str] | None = None,
    count: Literal[1, 2] = 1,
) -> nn.Module:
    """Return a copy of a network with adapters in their places, drawn from torch's generator.

    `size` is the bottleneck's width or LoRA's rank r, scaled by α/r (None: 1); a residual adapter has its
    convolution's. `targets` are the layers that get one: names, ends of names, or regular expressions for whole names
    (None: those that the module declares as its `targets`, or all that an adapter fits). LoRA may be there twice at
    each layer: `count`. Frozen parameters are not copied.
    """
    if size < 1:
        raise BadInput(f"model.adapter_size: must be at least 1 (given: {size})")
    module = copied(module)
    if there := [name for name, _ in module.named_parameters() if is_adapter(name)]:
        raise BadInput(f"model.adapter: the model has adapters already ({there[0]}); leave model.adapter out")
    places = {name: layer for name, layer in module.named_modules() if _fits(layer, kind)}
    if not places:
        found = sorted({type(layer).__name__ for layer in module.modules()})
        needs = {"residual": "3×3 convolutions", "bottleneck": "a transformer's sites", "lora": "linear layers"}
        can = [other for other in needs if any(_fits(layer, other) for layer in module.modules())]
        remedy = f"use {' or '.join(map(repr, can))}" if can else f"the model has only {', '.join(found)}"
        raise BadInput(f"model.adapter: {kind!r} adapters need {needs[kind]}, and there are none; {remedy}")
    like = next(module.parameters(), torch.zeros(()))
    like = like.to(torch.promote_types(like.dtype, torch.float32))
    wanted = getattr(module, "targets", None) if targets is None else targets
    for name in places if wanted is None else _targeted(module, places, wanted):
        _adapt(places[name], size, 1.0 if alpha is None else alpha / size, like, TwoLowRank if count == 2 else LowRank)
    return module


def default_adapter(module: nn.Module) -> AdapterKind:
    """Return the kind that suits a network: bottleneck for sites, residual for 3×3 convolutions, else lora."""
    kinds: tuple[AdapterKind, ...] = ("bottleneck", "residual")
    return next((kind for kind in kinds if any(_fits(layer, kind) for layer in module.modules())), "lora")


def is_linear(layer: nn.Module) -> bool:
    """Say whether LoRA fits a layer: a linear one of torch's, or GPT-2's, which `transformers` calls Conv1D."""
    # Exact types: a subclass's weight may be used past its forward(), as nn.MultiheadAttention does.
    return type(layer) is nn.Linear or (is_conv1d(layer) and type(layer).__name__ == "Conv1D")


def is_adapter(name: str) -> bool:
    """Say whether a parameter belongs to an adapter, by its name."""
    return "adapter" in name.split(".")[:-1]


def _fits(layer: nn.Module, kind: str) -> bool:
    if kind == "residual":
        return type(layer) is nn.Conv2d and layer.kernel_size == (3, 3)
    return type(layer) is Site if kind == "bottleneck" else is_linear(layer)


def is_conv1d(layer: nn.Module) -> bool:
    """Say whether a layer is `transformers`' Conv1D, a linear layer whose weight is [in, out]."""
    return any(f"{kind.__module__}.{kind.__name__}" == _CONV1D for kind in type(layer).mro())


def _targeted(module: nn.Module, places: dict[str, nn.Module], targets: Sequence[str]) -> list[str]:
    """Return the names of places that a target means; each must mean one."""
    chosen = set()
    for target in targets:
        try:
            pattern = re.compile(target)
        except re.error as error:
            raise BadInput(f"model.targets: {target!r} is no name and no regular expression: {error}") from None
        meant = {name for name, _ in module.named_modules() if _means(target, pattern, name)}
        if not meant & places.keys():
            ends = listed(list(dict.fromkeys(name.rpartition(".")[2] or "(the model)" for name in places)))
            kinds = sorted({type(module.get_submodule(name)).__name__ for name in meant})
            what = f"is no layer that an adapter fits ({', '.join(kinds)})" if meant else "matches no layer"
            raise BadInput(f"model.targets: {target!r} {what}; there are: {ends}")
        chosen |= meant
    return [name for name in places if name in chosen]


def _means(target: str, pattern: re.Pattern[str], name: str) -> bool:
    # Of a Hugging Face model also as that and peft call it: here it is the child `model` of another one.
    whole = name, name.removeprefix("model.")
    return name == target or name.endswith(f".{target}") or any(map(pattern.fullmatch, whole))


def _adapt(layer: nn.Module, size: int, scale: float, like: Tensor, lora: type[LowRank]) -> None:
    """Turn a layer into its adapted subclass in place: its parameters, hooks and every name for it stay."""
    adapter: nn.Module
    if isinstance(layer, nn.Conv2d):
        adapter = Residual(layer.out_channels)
        layer.__class__ = AdaptedConv2d
    elif isinstance(layer, nn.Linear):
        adapter = lora(layer.in_features, layer.out_features, size, scale)
        layer.__class__ = AdaptedLinear
    elif is_conv1d(layer):
        from personafl.models.conv1d import AdaptedConv1D  # here, for it needs transformers

        inputs, outputs = layer.get_parameter("weight").shape
        adapter = lora(inputs, outputs, size, scale)
        layer.__class__ = AdaptedConv1D
    else:
        assert isinstance(layer, Site)
        adapter = Bottleneck(layer.width, size)
        layer.__class__ = AdaptedSite
    layer.add_module("adapter", adapter.to(like))
