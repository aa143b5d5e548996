"""Layers as training computes them: one call for all stacked clients, and gradients of weights that stay factored.

The gradient of a linear layer's weight is a product, gᵀx, of what came in and the loss's gradient at what came out. A
plain step W ← W + γ gᵀx is one matrix product onto W then; the gradient itself, as large as the weight, is never
written. This holds for any network: whoever calls `torch.nn.functional.linear`, as `nn.Linear` does, has it.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    handle_torch_function,
    has_torch_function,
)

from personafl.fast.bfloat16 import exactly, rounded, rounding
from personafl.fast.stack import Outside, Stack

_CONVOLUTIONS = (functional.conv1d, functional.conv2d, functional.conv3d)
_WORTH = 2**14  # entries of one client's weight from which a pass over it costs more than a call
_FEW = 128  # samples up to which an exact product onto a weight is cheaper than a rounded one and a pass over it


class Factored(NamedTuple):
    """A part of a weight's gradient: ∇W = outputᵀ · input, [(clients,) samples, …] each."""

    output: Tensor
    input: Tensor

    def onto(self, weight: Tensor, factor: float | Tensor, *, owned: bool) -> Tensor:
        """Return weight + factor · ∇W, in the weight's place if it is `owned`; a factor per client is [clients]."""
        output = self.output.to(weight.dtype)
        if isinstance(factor, Tensor):
            output, factor = output * factor.to(output.dtype).reshape(-1, *[1] * (output.ndim - 1)), 1.0
        add = torch.baddbmm if weight.ndim == 3 else torch.addmm
        with exactly(weight):
            return add(weight, output.mT, self.input.to(weight.dtype), alpha=factor, out=weight if owned else None)


class Scattered(NamedTuple):
    """A part of a matrix's gradient: output [(clients,) samples, …] in some rows, the same number for all clients."""

    output: Tensor
    rows: Tensor | slice  # [(clients,) samples]

    def onto(self, matrix: Tensor, factor: float | Tensor, *, owned: bool) -> Tensor:
        """Do as `Factored.onto`."""
        output = self.output
        if isinstance(factor, Tensor):
            output, factor = output * factor.to(output.dtype).reshape(-1, *[1] * (output.ndim - 1)), 1.0
        matrix = matrix if owned else matrix.clone()
        if isinstance(self.rows, slice):
            matrix[..., self.rows, :].add_(output, alpha=factor)
            return matrix
        rows = self.rows
        if matrix.ndim == 3:  # clients' matrices one below the other
            rows = rows + matrix.shape[1] * torch.arange(len(matrix), device=rows.device).unsqueeze(1)
        matrix.flatten(0, -2).index_add_(0, rows.flatten(), output.flatten(0, -2), alpha=factor)
        return matrix


def gram_outputs(known: Tensor, gram: Tensor, coefficients: Tensor, rows: Tensor | slice) -> Tensor:
    """Return known + gram · coefficients, the outputs of samples in these rows; see `fast.gram`.

    Where the gram has fewer columns than there are coefficients, it is for the first of them. The coefficients'
    gradient is not this function's: it is that at the outputs, in the samples' rows.
    """
    parts = (known, gram, coefficients)
    if not has_torch_function(parts):
        raise RuntimeError("gram_outputs: only within Layers")
    result: Tensor = handle_torch_function(gram_outputs, parts, *parts, rows)
    return result


class Layers(TorchFunctionMode):
    """While it is entered, linear layers are computed here, for stacked clients or (stack None) for one.

    `kept` gets the factored gradients of weights among `weights`, by name; autograd is not given these.
    """

    def __init__(self, stack: Stack | None, weights: Mapping[str, Tensor], *, factored: bool) -> None:
        super().__init__()
        self._stack = stack
        self._names = {id(weight): name for name, weight in weights.items()} if factored else {}
        self.kept: dict[str, list[Factored | Scattered]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute linear layers, and what torch cannot; leave the rest to torch."""
        if func is functional.linear and not kwargs:
            return self._linear(*args)
        if func is gram_outputs:
            return self._gram_outputs(*args)
        if self._stack is None and func is functional.group_norm:
            return _group_norm(*args, **(kwargs or {}))
        if self._stack is not None and func in _CONVOLUTIONS:
            if rounding(args[0]):
                return _biased_after(func, *args, **(kwargs or {}))
            if func is functional.conv2d and not kwargs and on_gpu(args[0]):
                return self._convolution(*args)
        return func(*args, **(kwargs or {}))

    def _convolution(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, *rest: Any
    ) -> Tensor:
        from personafl.fast.convolution import Convolution, products_pay  # for a GPU alone

        stack, pads = self._stack, _pair(padding)
        plain = _pair(stride) == (1, 1) and all(_pair(value) == (1, 1) for value in rest)  # rest: dilation, groups
        if stack is None or not (plain and pads and x.ndim == 4 and stack.has(x) and stack.has(weight)):
            return functional.conv2d(x, weight, bias, stride, padding, *rest)
        own = stack.plain(x), stack.plain(weight)
        if any(p >= k for p, k in zip(pads, weight.shape[2:], strict=True)) or not products_pay(*own, pads):
            return functional.conv2d(x, weight, bias, stride, padding, *rest)
        with Outside():
            result: Tensor = Convolution.apply(*own, pads)  # type: ignore[no-untyped-call]
        each = stack.each(result)
        return each if bias is None else each + bias.reshape(-1, 1, 1)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        stack, keep = self._stack, self._keeper(weight)
        if x.ndim == 1:  # a product of a matrix and a vector, which is no large one
            return functional.linear(x, weight, bias)
        if stack is None:
            if keep is None or weight.numel() < _WORTH:
                return functional.linear(x, weight, bias)
            flat: Tensor = Linear.apply(x.flatten(0, -2), weight, bias, keep)  # type: ignore[no-untyped-call]
            return flat.reshape(*x.shape[:-1], len(weight))
        if not (stack.has(x) and stack.has(weight)):
            return functional.linear(x, weight, bias)
        shape = x.shape[:-1]
        x, weight = stack.plain(x).flatten(1, -2), stack.plain(weight)
        bias = None if bias is None else stack.plain(bias)
        with Outside():
            result: Tensor = Linear.apply(x, weight, bias, keep)  # type: ignore[no-untyped-call]
            result = result.reshape(stack.clients, *shape, weight.shape[1])
        return stack.each(result)

    def _gram_outputs(self, known: Tensor, gram: Tensor, coefficients: Tensor, rows: Tensor | slice) -> Tensor:
        stack, keep = self._stack, self._keeper(coefficients)
        if stack is not None and isinstance(rows, Tensor):
            rows = stack.plain(rows)

        def function(*values: Tensor) -> Tensor:
            result: Tensor = _GramOutputs.apply(*values, rows, keep)  # type: ignore[no-untyped-call]
            return result

        parts = (known, gram, coefficients)
        return function(*parts) if stack is None else stack.call(function, *parts)

    def _keeper(self, weight: Tensor) -> Callable[[Factored | Scattered], None] | None:
        """Return what takes parts of a weight's gradient, if they are kept."""
        name = self._names.get(id(weight))
        return None if name is None else self.kept.setdefault(name, []).append


def _pair(value: Any) -> tuple[int, int] | None:
    """Return a setting of a convolution for rows and columns; None where it is a word."""
    if isinstance(value, str):
        return None
    return (value, value) if isinstance(value, int) else tuple(value)


def on_gpu(x: Tensor) -> bool:
    """Say whether x is where products of matrices may be faster than convolutions."""
    return x.device.type == "cuda"


def entered() -> bool:
    """Say whether layers are computed by `Layers` now."""
    return isinstance(_get_current_function_mode(), Layers)  # type: ignore[no-untyped-call]


def _biased_after(
    func: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any, **options: Any
) -> Tensor:
    """Return a convolution with its bias added: under vmap, autocast rounds all of its arguments but a shared bias."""
    result = func(x, weight, None, *rest, **options)
    return result if bias is None else result + bias.to(result.dtype).reshape(-1, *[1] * (weight.ndim - 2))


def _group_norm(
    x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Return the group norm; on a CPU scaled and shifted by itself, if all that is trained are its scale and shift.

    With its channels last, torch's backward takes the gradient of such an x, which nobody needs, from where there is no
    memory (torch 2.13): the process ends.
    """
    if x.requires_grad or x.device.type != "cpu" or not any(p is not None and p.requires_grad for p in (weight, bias)):
        return functional.group_norm(x, groups, weight, bias, eps)
    exact, shape = torch.promote_types(x.dtype, torch.float32), [-1] + [1] * (x.ndim - 2)
    outputs = functional.group_norm(x.to(exact), groups, eps=eps)
    outputs = outputs if weight is None else outputs * weight.reshape(shape)
    return (outputs if bias is None else outputs + bias.reshape(shape)).to(x.dtype)


class Linear(torch.autograd.Function):
    """x Wᵀ + b: x [(clients,) samples, in], weight [(clients,) out, in], bias [(clients,) out]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, keep: Any) -> Tensor:
        """Return it, the product with weights that all clients have in common as one."""
        shared = x.ndim == 3 and not weight.stride(0)
        if rounding(x):  # here, so that it is done once
            x, bias = rounded(x), None if bias is None else rounded(bias)
            weight = rounded(weight[:1]).expand_as(weight) if shared else rounded(weight)
        ctx.save_for_backward(x, weight)
        ctx.keep = keep
        if shared:  # all clients have the same, as in the first step of a round
            outputs = x @ weight[0].mT  # no view made here: autograd would let nn.ReLU(inplace=True) not write into it
            return outputs if bias is None else outputs.add_(bias.unsqueeze(1))
        if bias is None:
            return x @ weight.mT
        return torch.baddbmm(bias.unsqueeze(1), x, weight.mT) if x.ndim == 3 else torch.addmm(bias, x, weight.mT)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients; that of the weight in factors if somebody keeps these."""
        x, weight = ctx.saved_tensors
        at_x, at_weight, at_bias, _ = ctx.needs_input_grad
        if at_weight and ctx.keep is not None and (x.shape[-2] <= _FEW or not rounding(x)):
            ctx.keep(Factored(gradient, x))
            at_weight = False
        return (
            gradient @ weight if at_x else None,
            gradient.mT @ x if at_weight else None,
            gradient.sum(-2) if at_bias else None,
            None,
        )


class _GramOutputs(torch.autograd.Function):
    """known + gram · coefficients, with the gradient of `gram_outputs`; known and gram are constants."""

    @staticmethod
    def forward(ctx: Any, known: Tensor, gram: Tensor, coefficients: Tensor, rows: Any, keep: Any) -> Tensor:
        ctx.rows, ctx.keep = rows, keep
        ctx.save_for_backward(coefficients)
        if not gram.shape[-1]:
            return known.clone()
        add = torch.baddbmm if coefficients.ndim == 3 else torch.addmm
        with exactly(known):
            return add(known, gram, coefficients[..., : gram.shape[-1], :])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (coefficients,) = ctx.saved_tensors
        part = Scattered(gradient, ctx.rows)
        if ctx.keep is None:
            return None, None, part.onto(torch.zeros_like(coefficients), 1.0, owned=True), None, None
        ctx.keep(part)
        return None, None, None, None, None
