"""Steps onto parameters in one pass over them, in their own memory where nobody else has them."""

import functools
from typing import TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from personafl.core import tree
from personafl.core.optim import Optimizer, chain
from personafl.core.tree import Params, Tree
from personafl.fast.stack import stack_around

T = TypeVar("T")


def moved(
    optimizer: Optimizer, gradient: Params, state: Tree, params: Params, *, owned: bool = False
) -> tuple[Params, Tree]:
    """Return the parameters after an optimizer's step, and its state; if they are `owned`, in their place."""
    if optimizer.factor is not None:
        return add_scaled(params, gradient, optimizer.factor, into=owned), state
    if optimizer.each is not None:
        return optimizer.each(functools.partial(moved, owned=owned), gradient, state, params)
    if optimizer.parts:
        *front, last = optimizer.parts
        gradient, kept = chain(*front).update(gradient, state[:-1], params)
        params, own = moved(last, gradient, state[-1], params, owned=owned)
        return params, (*kept, own)
    step, state = optimizer.update(gradient, state, params)
    return tree.add(params, step), state


def add_scaled(a: T, b: T, factor: float | Tensor, *, into: bool = False) -> T:
    """Return a + factor · b, in one pass and with one rounding, laid out in memory as b is; a leaf keeps its dtype.

    `into`: a's memory may be used for it.
    """
    rate = number(factor)
    return tree.map(lambda x, y: added(x, y, rate, into=into), a, b)


def added(x: Tensor, y: Tensor, factor: float | Tensor, *, into: bool = False) -> Tensor:
    """Do so for one leaf; a factor [n] is one for each entry of the first axis."""
    if x.stride() != y.stride():  # adding across layouts is slow: pay for it once, not at every step
        x, into = torch.empty_like(y).copy_(x), True
    if isinstance(factor, Tensor):
        rates = factor.to(x.dtype).reshape((*factor.shape, *[1] * (x.ndim - factor.ndim)))
        if not into:
            return x.addcmul(y, rates)
        stack = stack_around()  # vmap has no rule for addcmul_, and would run it in a loop
        return x.addcmul_(y, rates) if stack is None else stack.call(Tensor.addcmul_, x, y, rates)
    return x.add_(y, alpha=factor) if into else x.add(y, alpha=factor)


def number(factor: float | Tensor) -> float | Tensor:
    """Return a factor as a number where that costs nothing: on the CPU, and one for all of the stacked clients."""
    if isinstance(factor, Tensor) and (factor.device.type != "cpu" or is_functorch_wrapped_tensor(factor)):
        return factor
    return float(factor)
