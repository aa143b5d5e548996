"""Optimizers as pairs of pure functions, in the manner of optax: what they keep is a tree like any other.

`init(params) -> state`, `update(gradient, state, params) -> (step, state)`; the caller adds the step. Small pieces are
joined with `chain`. `Sgd`, `Adaptive` and `Accelerated` are the same as plain fields,
for recipes.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.prox import box as into_box
from personafl.core.schedule import FORBID_UNKNOWN, Constant, Decay, NonNegative, Rate, Schedule
from personafl.core.tree import Params, Tree


def _here(params: Params, state: Tree) -> Params:
    return params


class Optimizer(NamedTuple):
    """A pair of pure functions; where `look` is given, the gradient is to be taken at `look(params, state)`.

    The rest is what is known of it, for whoever can make use of that. `factor`, where given, says that the step is
    factor · gradient; `decay`, unless 0, that it is gradient + decay · params; `linear` that it is a linear function of
    the gradients so far, one for all entries of a parameter, and `alike` that it is one for all parameters too. `parts`
    are those of a chain; `each` takes a kind of step, given as a function like `update` of an optimizer more, with the
    optimizer of each block.
    """

    init: Callable[[Params], Tree]
    update: Callable[[Params, Tree, Params], tuple[Params, Tree]]
    look: Callable[[Params, Tree], Params] = _here
    factor: float | Tensor | None = None
    decay: float = 0.0
    linear: bool = False
    alike: bool = False
    parts: tuple[Optimizer, ...] = ()
    each: Callable[[Stepping, Params, Tree, Params], tuple[Params, Tree]] | None = None


Stepping = Callable[[Optimizer, Params, Tree, Params], tuple[Params, Tree]]


class Moments(NamedTuple):
    """What an adaptive method keeps: step count, first and second moment."""

    steps: Tensor
    first: Params
    second: Params


def _stateless(function: Callable[[Params, Params], Params]) -> Optimizer:
    return Optimizer(lambda params: (), lambda g, state, params: (function(g, params), state))


def scale(factor: float | Tensor) -> Optimizer:
    """Multiply by a factor; a descent step ends with `scale(-lr)`."""
    return _stateless(lambda g, params: tree.scale(g, factor))._replace(factor=factor, linear=True, alike=True)


def add_decayed_weights(decay: float) -> Optimizer:
    """Add decay · params: the gradient of (decay/2)‖params‖²."""
    step = _stateless(lambda g, params: tree.map(lambda a, p: torch.add(a, p, alpha=decay), g, params))
    return step._replace(decay=decay)


def clip_by_global_norm(limit: float) -> Optimizer:
    """Scale the gradient down to norm `limit` when it is longer."""
    return _stateless(lambda g, params: tree.scale(g, limit / tree.norm(g).clamp(min=limit)))


def trace(momentum: float, nesterov: bool = False) -> Optimizer:
    """Heavy-ball momentum as PyTorch has it: b ← momentum·b + g; Nesterov returns g + momentum·b."""

    def update(g: Params, state: Params, params: Params) -> tuple[Params, Params]:
        state = tree.map(lambda b, a: torch.add(a, b, alpha=momentum), state, g)
        return (tree.map(lambda a, b: torch.add(a, b, alpha=momentum), g, state) if nesterov else state), state

    return Optimizer(tree.zeros_like, update, linear=True, alike=True)


def _adaptive(
    second: Callable[[Tensor, Tensor], Tensor], b1: float, b2: float | None, eps: float, start: float
) -> Optimizer:
    """m ← b1·m + (1−b1)·g, v ← second(v, g²), step m/(√v + eps); b2 given: both moments are bias-corrected."""

    def init(params: Params) -> Moments:
        device = next((p.device for p in params.values()), None)
        return Moments(
            torch.zeros((), dtype=torch.float64, device=device),  # 1 − b2^steps cancels in single precision
            tree.zeros_like(params),
            tree.map(lambda p: torch.full_like(p, start), params),
        )

    def update(g: Params, state: Moments, params: Params) -> tuple[Params, Moments]:
        steps = state.steps + 1
        m = tree.map(lambda a, b: b1 * a + (1 - b1) * b, state.first, g)
        v = tree.map(lambda a, b: second(a, b * b), state.second, g)
        first, squared = m, v
        if b2 is not None:
            first, squared = tree.scale(m, 1 / (1 - b1**steps)), tree.scale(v, 1 / (1 - b2**steps))
        step = tree.map(lambda a, b: a / (b.sqrt() + eps), first, squared)
        return step, Moments(steps, m, v)

    return Optimizer(init, update)


def scale_by_adam(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Optimizer:
    """Adam (Kingma & Ba 2015), bias-corrected: v ← b2·v + (1−b2)·g²."""
    return _adaptive(lambda v, sq: b2 * v + (1 - b2) * sq, b1, b2, eps, 0.0)


def scale_by_yogi(b1: float = 0.9, b2: float = 0.99, eps: float = 1e-3) -> Optimizer:
    """Yogi as in Reddi et al. 2021, Algorithm 2: v ← v − (1−b2)·g²·sign(v − g²), v₀ = eps²."""
    return _adaptive(lambda v, sq: v - (1 - b2) * sq * torch.sign(v - sq), b1, None, eps, eps**2)


def scale_by_adagrad(b1: float = 0.0, eps: float = 1e-3) -> Optimizer:
    """Adagrad as in Reddi et al. 2021, Algorithm 2: v ← v + g², v₀ = eps²."""
    return _adaptive(lambda v, sq: v + sq, b1, None, eps, eps**2)


def chain(*parts: Optimizer) -> Optimizer:
    """Apply the parts one after the other."""

    def update(g: Params, state: Tree, params: Params) -> tuple[Params, Tree]:
        kept = []
        for part, own in zip(parts, state, strict=True):
            g, own = part.update(g, own, params)
            kept.append(own)
        return g, tuple(kept)

    def init(params: Params) -> Tree:
        return tuple(part.init(params) for part in parts)

    factor = parts[0].factor if len(parts) == 1 else None
    linear, alike = (all(getattr(part, what) for part in parts) for what in ("linear", "alike"))
    return Optimizer(init, update, factor=factor, linear=linear, alike=alike, parts=parts)


def accelerated(step: Optimizer, momentum: float, box: float | None) -> Optimizer:
    """Take a stateless step from y = x + momentum·(x − previous x), then project onto [−box, box]; keeps previous x."""

    def look(params: Params, previous: Params) -> Params:
        return tree.map(lambda x, before: x + momentum * (x - before), params, previous)

    def update(g: Params, previous: Params, params: Params) -> tuple[Params, Params]:
        ahead = look(params, previous)
        moved = tree.add(ahead, step.update(g, step.init(ahead), ahead)[0])
        if box is not None:
            moved = tree.map(lambda x: into_box(x, -box, box), moved)
        return tree.sub(moved, params), params

    return Optimizer(lambda params: params, update, look)


def by_block(blocks: Mapping[str, Optimizer], block_of: Callable[[str], str | None] | None = None) -> Optimizer:
    """Give each parameter the optimizer of its block: `block_of` its name, or the first glob that its name matches."""

    def first_match(name: str) -> str | None:
        return next((pattern for pattern in blocks if fnmatch.fnmatchcase(name, pattern)), None)

    def divide(params: Params) -> dict[str, Params]:
        parts: dict[str, Params] = {block: {} for block in blocks}
        for name, value in params.items():
            block = (block_of or first_match)(name)
            if block is None:
                raise ValueError(f"no block of {list(blocks)} covers parameter {name!r}; end with '*'")
            parts[block][name] = value
        return {block: part for block, part in parts.items() if part}

    def init(params: Params) -> Tree:
        return {pattern: blocks[pattern].init(part) for pattern, part in divide(params).items()}

    def each(step: Stepping, g: Params, state: Tree, params: Params) -> tuple[Params, Tree]:
        values, moved, kept = divide(params), Params(), {}
        for pattern, part in divide(g).items():
            found, kept[pattern] = step(blocks[pattern], part, state[pattern], values[pattern])
            moved |= found
        return {name: moved[name] for name in g}, kept

    def update(g: Params, state: Tree, params: Params) -> tuple[Params, Tree]:
        return each(lambda own, *given: own.update(*given), g, state, params)

    def look(params: Params, state: Tree) -> Params:
        found = Params()
        for pattern, part in divide(params).items():
            found |= blocks[pattern].look(part, state[pattern])
        return {name: found[name] for name in params}

    return Optimizer(init, update, look, linear=all(block.linear for block in blocks.values()), each=each)


class _Rated:
    """What has a learning rate in each round."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_UNKNOWN
    lr: float
    schedule: Schedule

    def rate(self, round_: Tensor) -> Tensor:
        """Return the learning rate of one round."""
        return self.lr * self.schedule(round_)


@dataclass(frozen=True, kw_only=True)
class Sgd(_Rated):
    """SGD: clip, then weight decay, then momentum, then the learning rate of the round."""

    optimizer: Literal["sgd"] = "sgd"
    lr: Rate = 0.1
    momentum: Decay = 0.0
    nesterov: bool = False
    weight_decay: NonNegative = 0.0
    clip: Rate | None = None
    schedule: Schedule = field(default_factory=Constant)

    def at(self, round_: Tensor) -> Optimizer:
        """Return the optimizer of one round."""
        steps = [trace(self.momentum, self.nesterov)] if self.momentum else []
        steps.append(scale(-self.rate(round_)))
        return chain(*_front(self.clip, self.weight_decay), *steps)


@dataclass(frozen=True, kw_only=True)
class Adaptive(_Rated):
    """Adam, Yogi or Adagrad with the learning rate of the round; adamw's weight decay comes after the moments.

    So it is x ← x − rate · (m/(√v + eps) + weight_decay · x) (Loshchilov & Hutter 2019).
    """

    optimizer: Literal["adam", "adamw", "yogi", "adagrad"] = "adam"
    lr: Rate = 1e-3
    b1: Decay = 0.9
    b2: Decay = 0.999
    eps: Rate = 1e-8
    weight_decay: NonNegative = 0.0
    clip: Rate | None = None
    schedule: Schedule = field(default_factory=Constant)

    def at(self, round_: Tensor) -> Optimizer:
        """Return the optimizer of one round."""
        core = {
            "adam": lambda: scale_by_adam(self.b1, self.b2, self.eps),
            "adamw": lambda: scale_by_adam(self.b1, self.b2, self.eps),
            "yogi": lambda: scale_by_yogi(self.b1, self.b2, self.eps),
            "adagrad": lambda: scale_by_adagrad(self.b1, self.eps),
        }[self.optimizer]()
        if self.optimizer == "adamw":
            return chain(*_front(self.clip, 0.0), core, *_front(None, self.weight_decay), scale(-self.rate(round_)))
        return chain(*_front(self.clip, self.weight_decay), core, scale(-self.rate(round_)))


@dataclass(frozen=True, kw_only=True)
class Accelerated(_Rated):
    """Accelerated projected gradient: clip, then weight decay, then the learning rate of the round, from y.

    y = x + momentum·(x − previous x), where the gradient is taken too; x = Π(y − rate·∇f(y)) with Π onto [−box, box] in
    every coordinate, None: everywhere. The previous x of the first step is the start.
    """

    optimizer: Literal["accelerated"] = "accelerated"
    lr: Rate = 0.1
    momentum: Decay = 0.9
    box: Rate | None = None
    weight_decay: NonNegative = 0.0
    clip: Rate | None = None
    schedule: Schedule = field(default_factory=Constant)

    def at(self, round_: Tensor) -> Optimizer:
        """Return the optimizer of one round."""
        step = chain(*_front(self.clip, self.weight_decay), scale(-self.rate(round_)))
        return accelerated(step, self.momentum, self.box)


OptimizerSpec = Sgd | Adaptive
LocalOptimizer = OptimizerSpec | Accelerated  # a server has gradients at its model alone, and cannot look ahead


def _front(clip: float | None, weight_decay: float) -> list[Optimizer]:
    parts = [] if clip is None else [clip_by_global_norm(clip)]
    return parts + ([add_decayed_weights(weight_decay)] if weight_decay else [])
