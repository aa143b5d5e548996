"""Low-rank layers as two smaller ones: what makes a network with factored weights take less work.

The matrix form of a weight (`prox.as_matrix`) is u @ v with rank r. A linear layer is then

    y = u(v x) + b

and a convolution W[o, i, a, b] = Σ_r u[(o, a), r]·v[r, (i, b)] is one along the rows, then one along the columns:

    z[r, h, q] = Σ_{i, b} v[r, (i, b)]·x[i, h, q·s_w + b·d_w − p_w]           1 × k_w, with the horizontal stride, …
    y[o, p, q] = Σ_{r, a} u[(o, a), r]·z[r, p·s_h + a·d_h − p_h, q] + b[o]    k_h × 1, with the vertical ones

Padding, of whatever mode, copies whole columns first and whole rows of z then, so it divides in the same way.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from personafl.core import wire
from personafl.core.net import copied
from personafl.errors import BadInput

_WORTH = 2  # so many times fewer multiply-adds; with hardly fewer, two passes over memory take longer than one

Layer = nn.Linear | nn.Conv2d
Factors = dict[Layer, tuple[Tensor, Tensor]]


class _TwoLayers(nn.Sequential):
    """Two layers in place of one, whose weight and bias they still have."""

    @property
    def bias(self) -> Tensor | None:
        """The bias of the layer they stand for."""
        last: Any = self[1]
        bias: Tensor | None = last.bias
        return bias

    def _weights(self) -> tuple[Tensor, Tensor]:
        first, second = (cast(Tensor, layer.weight) for layer in self)
        return first, second


class FactoredLinear(_TwoLayers):
    """x ↦ u(v x) + b with u [out, rank], v [rank, in]."""

    def __init__(self, layer: nn.Linear, u: Tensor, v: Tensor) -> None:
        rank = len(v)
        super().__init__(
            _filled(nn.Linear(layer.in_features, rank, bias=False, device="meta"), v),
            _filled(nn.Linear(rank, layer.out_features, device="meta"), u, layer.bias),
        )

    @property
    def weight(self) -> Tensor:
        """The weight of the layer they stand for, [out, in]."""
        first, second = self._weights()
        return second @ first


class FactoredConv2d(_TwoLayers):
    """A convolution with kernel 1 × k_w to `rank` channels, then one with kernel k_h × 1."""

    def __init__(self, layer: nn.Conv2d, u: Tensor, v: Tensor) -> None:
        rank, (kh, kw), mode = len(v), layer.kernel_size, layer.padding_mode
        (sh, sw), (dh, dw), (whole, rows, columns) = layer.stride, layer.dilation, _padding(layer)
        early = kh == 1  # then rows that the stride passes over need not be computed at all
        first = nn.Conv2d(
            layer.in_channels,
            rank,
            (1, kw),
            (sh if early else 1, sw),
            whole if early else columns,
            (1, dw),
            bias=False,
            padding_mode=mode,
            device="meta",
        )
        second = nn.Conv2d(
            rank,
            layer.out_channels,
            (kh, 1),
            (1 if early else sh, 1),
            0 if early else rows,
            (dh, 1),
            padding_mode=mode,
            device="meta",
        )
        across = v.reshape(rank, layer.in_channels, 1, kw)
        down = u.reshape(layer.out_channels, kh, rank).transpose(1, 2).unsqueeze(-1)  # [o, rank, kh, 1]
        super().__init__(_filled(first, across), _filled(second, down, layer.bias))

    @property
    def weight(self) -> Tensor:
        """The weight of the layer they stand for, [o, i, kh, kw]."""
        first, second = self._weights()
        return torch.einsum("riyb,orax->oiab", first, second)


def factorize(module: nn.Module, weights: Mapping[str, Tensor | wire.Factored], example: Tensor) -> nn.Module:
    """Return a copy of a network with these weights, low-rank layers as two where that takes half the multiply-adds.

    `weights` are by parameter name, some as factors; a parameter that is not there keeps its value. Multiply-adds are
    those of all calls of the layer when the network is applied to `example`, a batch of inputs whose values do not
    matter. A convolution's first half has as many rows as its input (unless k_h = 1), so with a vertical stride, or
    where a large kernel leaves few rows, two layers may be the dearer ones. Everything else stays one layer with a
    dense weight: layers of other kinds, subclasses, convolutions with groups, and weights that layers share.
    """
    module = copied(module)
    _check(module, weights)
    factors = _factors(module, weights)
    pays = _paying(module, factors, example)
    parameters = dict(module.named_parameters())
    for name, value in weights.items():
        parameters[name].data = (value.dense() if isinstance(value, wire.Factored) else value).clone()
    halves = {layer: _divided(layer, *factors[layer]) for layer in pays}
    # With duplicates: a layer used under two names is replaced in both places.
    for name, layer in list(module.named_modules(remove_duplicate=False)):
        if isinstance(layer, nn.Linear | nn.Conv2d) and layer in halves:
            if layer is module:
                return halves[layer]
            parent, _, own = name.rpartition(".")
            setattr(module.get_submodule(parent), own, halves[layer])
    return module


def _check(module: nn.Module, weights: Mapping[str, Tensor | wire.Factored]) -> None:
    shapes = {name: list(value.shape) for name, value in module.named_parameters()}
    for name, value in weights.items():
        given = value.shape.tolist() if isinstance(value, wire.Factored) else list(value.shape)
        if given != shapes.get(name):
            has = f"has shape {shapes[name]} here" if name in shapes else "is not here"
            raise BadInput(f"model: these weights are another network's: {name}, of shape {given} there, {has}")


def _factors(module: nn.Module, weights: Mapping[str, Tensor | wire.Factored]) -> Factors:
    """Return (u, v) of the layers that can be divided."""
    users = Counter(id(value) for layer in module.modules() for value in layer._parameters.values())
    found: Factors = {}
    for name, layer in module.named_modules():
        # Exact types: a subclass may do something else in its forward(). Hooks would be lost.
        if type(layer) not in (nn.Linear, nn.Conv2d) or layer._forward_hooks or layer._forward_pre_hooks:
            continue
        assert isinstance(layer, nn.Linear | nn.Conv2d)
        value = weights.get(f"{name}.weight" if name else "weight")
        grouped = isinstance(layer, nn.Conv2d) and layer.groups > 1
        if isinstance(value, wire.Factored) and users[id(layer.weight)] == 1 and not grouped:
            found[layer] = _at_least_rank_1(value.u, value.v)
    return found


def _at_least_rank_1(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """torch has no convolution to 0 channels; one that is 0 does as well."""
    return (u, v) if len(v) else (u.new_zeros(len(u), 1), v.new_zeros(1, v.shape[1]))


def _paying(module: nn.Module, factors: Factors, example: Tensor) -> list[Layer]:
    """Return the layers that in two take at most half the multiply-adds, by running the network as it is."""
    whole: Counter[Layer] = Counter()
    halves: Counter[Layer] = Counter()

    def record(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        rank = len(factors[layer][1])
        if isinstance(layer, nn.Linear):
            rows = output.numel() // layer.out_features
            whole[layer] += rows * layer.weight.numel()
            halves[layer] += rows * rank * (layer.in_features + layer.out_features)
            return
        kh, kw = layer.kernel_size
        places = output.numel() // layer.out_channels  # batch × rows × columns
        before = places if kh == 1 else places // output.shape[-2] * inputs[0].shape[-2]  # with the rows of the input
        whole[layer] += places * layer.weight.numel()
        halves[layer] += places * rank * layer.out_channels * kh + before * rank * layer.in_channels * kw

    handles = [layer.register_forward_hook(record) for layer in factors]
    if handles:
        with torch.no_grad():
            module(example)
    for handle in handles:
        handle.remove()
    return [layer for layer, cost in halves.items() if _WORTH * cost <= whole[layer]]


def _divided(layer: Layer, u: Tensor, v: Tensor) -> nn.Module:
    halves = FactoredConv2d(layer, u, v) if isinstance(layer, nn.Conv2d) else FactoredLinear(layer, u, v)
    return halves.train(layer.training)


def _filled(layer: Layer, weight: Tensor, bias: Tensor | None = None) -> Layer:
    layer.weight = nn.Parameter(weight.contiguous().clone(), requires_grad=False)
    layer.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False))
    return layer


def _padding(layer: nn.Conv2d) -> tuple[Any, Any, Any]:
    """Return the padding of the whole layer, of its vertical and of its horizontal half."""
    whole = layer.padding
    if isinstance(whole, str):  # "same" and "valid" mean for each half what they mean for the whole
        return whole, whole, whole
    return whole, (whole[0], 0), (0, whole[1])
