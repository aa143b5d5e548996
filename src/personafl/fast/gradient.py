"""The gradient of an objective, by the cheapest way that the surroundings allow. Equal numbers.

`torch.func.grad` works everywhere, at the price of one more layer of dispatch for every operation, forward and back. It
is not needed for a client on its own, where PyTorch's own tape does, nor under the one `vmap` that stacks clients: a
client's loss depends on its own parameters alone, so the gradient of the sum of all losses, taped on the stacked
tensors beneath `vmap`, has every client's gradient in it.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.func import grad_and_value

from personafl.core import descend, tree
from personafl.core.batches import Batch
from personafl.core.descend import Quadratic
from personafl.core.optim import Optimizer, chain
from personafl.core.samples import guarded
from personafl.core.seam import definition
from personafl.core.tree import Params, Tree
from personafl.fast.layers import Factored, Layers, Scattered
from personafl.fast.stack import Outside, Stack, stack_around, transformed

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


S = TypeVar("S")


def gradient_and_value(objective: Callable[[Params, S], Tensor], params: Params, batch: S) -> tuple[Params, Tensor]:
    """Return ∇objective(params; batch) with respect to params, and the objective."""
    if isinstance(batch, Batch) and batch.guard:
        return guarded(objective, params, batch, batch.guard)  # type: ignore[arg-type]
    stack = stack_around()
    if not _tapeable(params, stack):
        gradient, value = grad_and_value(objective)(params, batch)
        return gradient, value
    tape = _taped(objective, params, batch, stack, factored=False)
    return tape.each(_filled(tape.leaves, tape.dense))


def pullback(
    function: Callable[[Params, S], Tensor], params: Params, batch: S
) -> tuple[Tensor, Callable[[Tensor], Params]]:
    """Return what `core.descend.pullback` does."""
    stack = stack_around()
    if not _tapeable(params, stack):
        return definition(descend.pullback)(function, params, batch)
    leaves, value, _ = _recorded(function, params, batch, stack, factored=False)

    def pull(gradient: Tensor) -> Params:
        gradient = gradient if stack is None else stack.plain(gradient)
        with Outside():
            dense = torch.autograd.grad(value, list(leaves.values()), gradient, allow_unused=True)
        return _each(stack, _filled(leaves, dict(zip(leaves, dense, strict=True))))

    return _each(stack, {"": value.detach()})[""], pull


def step(
    objective: Callable[[Params, S], Tensor],
    params: Params,
    batch: S,
    factor: float | Tensor,
    alive: Tensor | None = None,
    *,
    term: Quadratic | None = None,
    owned: bool = False,
) -> tuple[Params, Tensor]:
    """Return params + factor · ∇(objective + term)(params; batch), and the objective at params.

    `alive`, [] of booleans, says whether the step is taken. If the params are `owned`, their memory is used.
    """
    stack = stack_around()
    if not _tapeable(params, stack):
        gradient, value = grad_and_value(objective)(params, batch)
        gradient = gradient if term is None else term.onto(gradient, params)
        moved = add_scaled(params, gradient, factor)
        return (moved if alive is None else tree.where(alive, moved, params)), value
    tape = _taped(objective, params, batch, stack, factored=True)
    rate, moved = number(factor), Params()
    with Outside(), torch.no_grad():
        taken = None if alive is None else tape.plain(alive)
        rate = tape.plain(rate) if isinstance(rate, Tensor) else rate
        for name, leaf in tape.leaves.items():
            value, own, dense = leaf.detach(), owned, tape.dense[name]
            if term is not None and term.has(name):  # first, for it is to be taken where the step begins
                parts = [None if part is None else tape.plain(part) for part in term.parts(name)]
                value, own = _moved_by(term, parts, value, rate, taken, into=own), True
            if dense is not None:
                value, own = added(value, _masked(dense, taken), rate, into=own), True
            for part in tape.factored.get(name, ()):
                value, own = _kept(part, taken).onto(value, rate, owned=own), True
            moved[name] = value if own else value.clone()
    return tape.each(moved)


def _moved_by(
    term: Quadratic,
    parts: list[Tensor | None],
    value: Tensor,
    rate: float | Tensor,
    taken: Tensor | None,
    *,
    into: bool,
) -> Tensor:
    """Return value + rate · ∇term(value), the gradient never written; `parts` are the term's slope and anchor."""
    slope, anchor = parts
    if taken is not None:
        rate = taken.to(value.dtype) * rate
    if term.decay:  # rate · (strength + decay) of the value itself, then what the anchor adds
        strength = term.decay if anchor is None else term.decay + term.strength
        value, into = added(value, value, strength * rate, into=into), True
        value = value if anchor is None else added(value, anchor, -term.strength * rate, into=True)
    elif anchor is not None:
        part = -term.strength * rate
        if isinstance(part, Tensor):
            part = part.to(value.dtype).reshape(-1, *[1] * (value.ndim - 1)) if part.ndim else part.to(value.dtype)
        value, into = value.lerp_(anchor, part) if into else value.lerp(anchor, part), True
    if slope is not None:
        value = added(value, slope, rate, into=into)
    return value


def _kept(part: Factored | Scattered, taken: Tensor | None) -> Factored | Scattered:
    """Return 0 in place of numbers that are not taken."""
    if isinstance(part, Scattered):
        return part._replace(output=_masked(part.output, taken))
    return Factored(*(_masked(side, taken) for side in part))


def _masked(value: Tensor, taken: Tensor | None) -> Tensor:
    """Do so for a tensor: `taken` is [] for one client, [clients] for those of a stack."""
    if taken is None:
        return value
    return torch.where(taken.reshape(-1, *[1] * (value.ndim - 1)) if taken.ndim else taken, value, 0.0)


def _tapeable(params: Params, stack: Stack | None) -> bool:
    """Say whether PyTorch's tape does: for one client, or for those that one vmap stacks."""
    return (stack is not None or not transformed()) and not any(value.requires_grad for value in params.values())


class _Tape(NamedTuple):
    """What a backward pass left: tensors are plain, of stacked clients [clients, …]."""

    stack: Stack | None
    leaves: Params
    dense: dict[str, Tensor | None]  # gradients; None: none, or all of it is factored
    factored: dict[str, list[Factored | Scattered]]
    value: Tensor

    def each(self, values: Params) -> tuple[Params, Tensor]:
        """Return values and the objective as one client sees them."""
        return _each(self.stack, values), self.value if self.stack is None else self.stack.each(self.value)

    def plain(self, value: Tensor) -> Tensor:
        """Return the reverse for one value."""
        return value if self.stack is None else self.stack.plain(value)


def _each(stack: Stack | None, values: Params) -> Params:
    return values if stack is None else {name: stack.each(value) for name, value in values.items()}


def _filled(leaves: Params, dense: dict[str, Tensor | None]) -> Params:
    """Return gradients, 0 where there is none."""
    return {name: torch.zeros_like(leaves[name]) if g is None else g for name, g in dense.items()}


def _recorded(
    function: Callable[[Params, S], Tensor], params: Params, batch: S, stack: Stack | None, *, factored: bool
) -> tuple[Params, Tensor, Layers]:
    """Return leaves for the params, and the function's value with its tape; all plain."""
    plain = params if stack is None else {name: stack.plain(value) for name, value in params.items()}
    with Outside():
        leaves = {name: value.detach().requires_grad_() for name, value in plain.items()}
    shown = _each(stack, leaves)
    with torch.enable_grad(), Layers(stack, shown, factored=factored) as layers:
        value = function(shown, batch)
        return leaves, value if stack is None else stack.plain(value), layers


def _taped(
    objective: Callable[[Params, S], Tensor], params: Params, batch: S, stack: Stack | None, *, factored: bool
) -> _Tape:
    leaves, value, layers = _recorded(objective, params, batch, stack, factored=factored)
    with Outside():
        dense: tuple[Tensor | None, ...] = (None,) * len(leaves)
        if value.requires_grad:  # of the sum over clients: each has a say in its own value alone
            dense = torch.autograd.grad(value, list(leaves.values()), torch.ones_like(value), allow_unused=True)
        return _Tape(stack, leaves, dict(zip(leaves, dense, strict=True)), layers.kept, value.detach())
