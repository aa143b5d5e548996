"""Sums of clipped gradients of single samples, the gradient of each not written: of plain networks, for all clients.

A sample's gradient of a linear layer's weight is a product gᵀx, whose norm is ‖g‖ · ‖x‖, and a sum of them, each with a
factor, is one matrix product (I. Goodfellow, *Efficient Per-Example Gradient Computations*, 2015). A convolution is a
linear layer on patches, whose products are written, for they are small.

No sample may see another here: so this is for chains of layers that are known, and losses that are, and whatever else
there is goes the way of `core.samples`, where that holds of itself.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from personafl.core import losses, tasks
from personafl.core.batches import Batch
from personafl.core.guard import Guard
from personafl.core.losses import MeanLoss
from personafl.core.net import Net
from personafl.core.samples import clip_factors, gaussians_of_each
from personafl.core.samples import clipped_sums as defined
from personafl.core.samples import noisy_mean as defined_mean
from personafl.core.seam import definition
from personafl.core.tree import Params
from personafl.fast.network import PoolFirst
from personafl.fast.stack import Outside, stack_around, transformed

_EACH = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.Identity)  # of one number at a time
_LOSSES = {
    losses.cross_entropy,
    *(task.loss for task in (tasks.task_named("regression"), tasks.task_named("multilabel"))),
}


class _Seen(NamedTuple):
    """A layer's input and output [clients, samples, places, …]; of a norm, its normalised input.

    What a convolution sees has places last, as its outputs have: nothing large is turned for that.
    """

    weight: str | None
    bias: str | None
    input: Tensor
    output: Tensor
    norm: bool = False
    places_last: bool = False


def clipped_sums(
    objective: Any, params: Params, batch: Batch, clip: Tensor, free: Params | None
) -> tuple[Params, Tensor]:
    """Return what `core.samples.clipped_sums` does."""
    stack = stack_around()
    if free is not None or not _plain(objective) or (stack is None and transformed()):
        return definition(defined)(objective, params, batch, clip, free)

    def plain(value: Tensor) -> Tensor:
        return value.unsqueeze(0) if stack is None else stack.plain(value)

    names = list(params)
    given = {name: plain(value).detach() for name, value in (objective.fixed | params).items()}
    x, y, real, most = (plain(value) for value in (batch.x, batch.y, batch.real, clip))
    with Outside(), torch.enable_grad():
        seen: list[_Seen] = []
        outputs = _applied(objective.net, given, x, seen)
        values = objective.loss(outputs.flatten(0, 1), y.flatten(0, 1)).reshape(real.shape)
        slopes = torch.autograd.grad(values.sum(), [each.output for each in seen])
        slopes = tuple(slope.mT if each.places_last else slope for each, slope in zip(seen, slopes, strict=True))
    with Outside(), torch.no_grad():
        sums = _sums(seen, slopes, {name: given[name].shape for name in names}, most, real)
        found = {name: sums[name].squeeze(0) if stack is None else sums[name] for name in names}
        values = values.detach().squeeze(0) if stack is None else values.detach()
    return (found, values) if stack is None else ({n: stack.each(v) for n, v in found.items()}, stack.each(values))


def noisy_mean(sums: Params, guard: Guard) -> Params:
    """Return what `core.samples.noisy_mean` does, with as few passes over the noise as there can be."""
    stack = stack_around()
    if stack is None and transformed():
        return definition(defined_mean)(sums, guard)

    def plain(value: Tensor) -> Tensor:
        return value.unsqueeze(0) if stack is None else stack.plain(value)

    names = sorted(sums)
    totals = [plain(sums[name]) for name in names]
    clip, noise, size, keys = (plain(value) for value in (guard.clip, guard.noise, guard.size, guard.key))
    with Outside(), torch.no_grad():
        dtype, count = totals[0].dtype, sum(total[0].numel() for total in totals)
        scale, share = (noise * clip / size).to(dtype), size.reciprocal().to(dtype)
        drawn = gaussians_of_each(keys, count, dtype).mul_(scale.unsqueeze(1))
        parts = drawn.split_with_sizes([total[0].numel() for total in totals], 1)
        found = {
            name: part.view(total.shape).addcmul_(total, share.reshape(-1, *[1] * (total.ndim - 1)))
            for name, part, total in zip(names, parts, totals, strict=True)
        }
    return {name: value.squeeze(0) if stack is None else stack.each(value) for name, value in found.items()}


def _plain(objective: Any) -> bool:
    """Say whether an objective is a known loss of a chain of known layers."""
    if not isinstance(objective, MeanLoss) or objective.loss not in _LOSSES:
        return False
    return all(_known(layer) and _whole(objective.net, prefix, layer) for prefix, layer in _layers(objective.net))


def _layers(net: Net) -> Iterator[tuple[str, nn.Module]]:
    def inside(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if type(module) not in (nn.Sequential, PoolFirst):
            yield prefix, module
            return
        for name, child in module._modules.items():  # also one that is there twice
            assert child is not None
            yield from inside(f"{prefix}.{name}".lstrip("."), child)

    return inside("", net._module)


def _whole(net: Net, prefix: str, layer: nn.Module) -> bool:
    """Say whether all parameters of a layer are trained, by its own names and no other layer's, or all are frozen."""
    every = {id(value) for name, value in net._module.named_parameters() if name in net.shapes}
    found = {
        (f"{prefix}.{name}".lstrip(".") in net.shapes, id(value) in every) for name, value in layer.named_parameters()
    }
    return found <= {(True, True)} or found <= {(False, False)}


def _known(layer: nn.Module) -> bool:
    if layer._forward_hooks or layer._forward_pre_hooks:
        return False
    kind = type(layer)
    if kind is nn.Flatten:
        return bool(layer.start_dim == 1 and layer.end_dim == -1)
    if kind is nn.Conv2d:
        return bool(layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str))
    if kind is nn.LayerNorm:
        return isinstance(layer, nn.LayerNorm) and layer.bias is not None and len(layer.normalized_shape) == 1
    if kind is nn.MaxPool2d:
        return not layer.return_indices
    return kind is nn.Linear or kind in _EACH


def _applied(net: Net, values: Params, x: Tensor, seen: list[_Seen]) -> Tensor:
    """Return the outputs of x [clients, samples, …], and put down what layers with parameters saw."""
    clients, count = x.shape[:2]
    for prefix, layer in _layers(net):
        names = [f"{prefix}.{name}".lstrip(".") for name in ("weight", "bias")]
        weight, bias = (values.get(name) for name in names)
        if isinstance(layer, nn.Linear) and weight is not None:
            rows = x.flatten(2, -2) if x.ndim > 3 else x.unsqueeze(2)  # [clients, samples, places, in]
            given = rows.detach()
            outputs = (rows.flatten(1, 2) @ weight.mT).reshape(*rows.shape[:3], -1)
            outputs = outputs if bias is None else outputs + bias[:, None, None]
            outputs = outputs if outputs.requires_grad else outputs.requires_grad_()
            seen.append(_Seen(names[0], None if bias is None else names[1], given, outputs))
            x = outputs.reshape(*x.shape[:-1], outputs.shape[-1])
        elif isinstance(layer, nn.Conv2d) and weight is not None:
            x = _convolved(layer, weight, bias, x, seen, names)
        elif isinstance(layer, nn.LayerNorm) and weight is not None and bias is not None:
            given = functional.layer_norm(x, layer.normalized_shape, eps=layer.eps)
            spread = [1] * (x.ndim - 2)
            outputs = given * weight.reshape(clients, *spread, -1) + bias.reshape(clients, *spread, -1)
            outputs = outputs if outputs.requires_grad else outputs.requires_grad_()
            seen.append(_Seen(names[0], names[1], given.detach(), outputs, norm=True))
            x = outputs
        elif isinstance(layer, nn.Flatten):
            x = x.flatten(2)
        else:
            x = layer(x.flatten(0, 1))
            x = x.reshape(clients, count, *x.shape[1:])
    return x


def _convolved(
    layer: nn.Conv2d, weight: Tensor, bias: Tensor | None, x: Tensor, seen: list[_Seen], names: list[str]
) -> Tensor:
    found, sizes = _Patches.apply(x.flatten(0, 1), layer)  # type: ignore[no-untyped-call]
    patches: Tensor = found.reshape(*x.shape[:2], *found.shape[1:])  # [clients, samples, in · k², places]
    outputs: Tensor = weight.flatten(2).unsqueeze(1) @ patches
    outputs = outputs if bias is None else outputs + bias[:, None, :, None]
    outputs = outputs if outputs.requires_grad else outputs.requires_grad_()
    held = patches.detach().mT
    seen.append(_Seen(names[0], None if bias is None else names[1], held, outputs, places_last=True))
    return outputs.reshape(*outputs.shape[:3], *sizes)


class _Patches(torch.autograd.Function):
    """What a convolution looks at in images [images, in, …]: [images, in · k², places], and how many places there are.

    `functional.unfold` has the same, and on a GPU starts a kernel for each image; this is one copy of a view.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any) -> tuple[Tensor, torch.Size]:
        """Copy them."""
        ctx.layer, ctx.size = layer, x.shape[2:]
        (rows, columns), wide = layer.padding, x
        if rows or columns:
            wide = functional.pad(x, (columns, columns, rows, rows))
        reach = [d * (k - 1) + 1 for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        places = [(n - r) // s + 1 for n, r, s in zip(wide.shape[2:], reach, layer.stride, strict=True)]
        steps = [
            each * step
            for how in (layer.dilation, layer.stride)
            for each, step in zip(how, wide.stride()[2:], strict=True)
        ]
        view = wide.as_strided((*wide.shape[:2], *layer.kernel_size, *places), (*wide.stride()[:2], *steps))
        return view.reshape(len(x), -1, places[0] * places[1]), torch.Size(places)

    @staticmethod
    def backward(ctx: Any, slope: Tensor, _: Any) -> tuple[Tensor, None]:
        """Add up what each point of an image has in its patches."""
        layer = ctx.layer
        return functional.fold(slope, ctx.size, layer.kernel_size, layer.dilation, layer.padding, layer.stride), None


def _sums(
    seen: list[_Seen], slopes: tuple[Tensor, ...], shapes: dict[str, torch.Size], clip: Tensor, real: Tensor
) -> Params:
    """Return the sums of the clipped gradients of trained parameters, [clients, …]."""
    squares, written = torch.zeros_like(slopes[0][..., 0].flatten(2)[..., 0]), Params()
    slopes = tuple(torch.where(_like(real, slope), slope, 0.0) for slope in slopes)
    for each, slope in zip(seen, slopes, strict=True):
        if each.weight in shapes:
            if each.norm:
                written[each.weight] = (
                    (slope * each.input).flatten(2, -2).sum(2) if slope.ndim > 3 else slope * each.input
                )
            elif slope.shape[2] > 1:
                written[each.weight] = slope.mT @ each.input  # [clients, samples, out, in]
            else:
                squares = squares + _square(slope) * _square(each.input)
        if each.bias in shapes:
            written[each.bias] = slope.flatten(2, -2).sum(2) if slope.ndim > 3 else slope
    for value in written.values():
        squares = squares + _square(value)
    factors, counts = clip_factors(squares, clip.unsqueeze(-1), real)
    sums = Params()
    for each, slope in zip(seen, slopes, strict=True):
        if each.weight in shapes and each.weight not in written:
            kept = torch.where(_like(counts, slope), slope, 0.0) * _like(factors, slope)
            held = torch.where(_like(counts, each.input), each.input, 0.0)
            sums[each.weight] = (kept.flatten(1, 2).mT @ held.flatten(1, 2)).reshape(shapes[each.weight])
    for name, value in written.items():
        sums[name] = (
            (torch.where(_like(counts, value), value, 0.0) * _like(factors, value)).sum(1).reshape(shapes[name])
        )
    return sums


def _square(value: Tensor) -> Tensor:
    return value.flatten(2).square().sum(2)


def _like(each: Tensor, value: Tensor) -> Tensor:
    """Return what samples have [clients, samples], with as many axes as a value."""
    return each.reshape(*each.shape, *[1] * (value.ndim - 2)).to(each.dtype)
