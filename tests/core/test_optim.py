"""Optimizers against torch.optim and against the papers' loops, step by step in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from personafl.core import optim, tree
from personafl.core.optim import Accelerated, Adaptive, LocalOptimizer, Optimizer, OptimizerSpec, Sgd
from personafl.core.schedule import Exponential
from personafl.core.tree import Params
from personafl.fast.gradient import moved

F64 = torch.float64
ROUND = torch.tensor(0)
STEPS = 7


def start(seed: int = 0, dtype: torch.dtype = F64) -> Params:
    rng = torch.Generator().manual_seed(seed)
    shapes = {"body.weight": (3, 2), "body.bias": (3,), "head.scale": ()}
    return {name: torch.randn(shape, generator=rng, dtype=F64).to(dtype) for name, shape in shapes.items()}


def gradient(params: Params) -> Params:
    """∇ of Σ cos(3w) + w⁴/4: bounded away from anything an optimizer could get right by symmetry."""
    return tree.map(lambda w: -3 * torch.sin(3 * w) + w**3, params)


def run(optimizer: Optimizer, params: Params, steps: int = STEPS) -> Params:
    state = optimizer.init(params)
    for _ in range(steps):
        step, state = optimizer.update(gradient(optimizer.look(params, state)), state, params)
        params = tree.add(params, step)
    return params


def by_torch(make: Callable[..., torch.optim.Optimizer], clip: float | None = None) -> Params:
    params = {name: value.clone().requires_grad_() for name, value in start().items()}
    optimizer = make(list(params.values()))
    for _ in range(STEPS):
        for name, g in gradient({name: value.detach() for name, value in params.items()}).items():
            params[name].grad = g
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(list(params.values()), clip)
        optimizer.step()
    return {name: value.detach() for name, value in params.items()}


def assert_close(a: Any, b: Any, atol: float = 1e-12) -> None:
    for (name, x), (other, y) in zip(tree.flatten(a).items(), tree.flatten(b).items(), strict=True):
        assert name == other
        torch.testing.assert_close(x, y, rtol=0, atol=atol)


sgd, adam = torch.optim.SGD, torch.optim.Adam
AGAINST_TORCH: dict[str, tuple[OptimizerSpec, Callable[..., Any]]] = {
    "sgd": (Sgd(lr=0.1), lambda p: sgd(p, lr=0.1)),
    "momentum": (Sgd(lr=0.05, momentum=0.9), lambda p: sgd(p, lr=0.05, momentum=0.9)),
    "nesterov": (
        Sgd(lr=0.05, momentum=0.8, nesterov=True),
        lambda p: sgd(p, lr=0.05, momentum=0.8, nesterov=True),
    ),
    "decay": (Sgd(lr=0.1, weight_decay=0.3), lambda p: sgd(p, lr=0.1, weight_decay=0.3)),
    "nesterov and decay": (
        Sgd(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.2),
        lambda p: sgd(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.2),
    ),
    "adam": (Adaptive(lr=0.1), lambda p: adam(p, lr=0.1)),
    "adam, other betas, decay": (
        Adaptive(lr=0.03, b1=0.8, b2=0.95, eps=1e-4, weight_decay=0.1),
        lambda p: adam(p, lr=0.03, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.1),
    ),
    "adamw": (
        Adaptive(optimizer="adamw", lr=0.03, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.03, weight_decay=0.1),
    ),
    "adam, no first moment": (Adaptive(lr=0.03, b1=0.0), lambda p: adam(p, lr=0.03, betas=(0.0, 0.999))),
}


@pytest.mark.parametrize("name", sorted(AGAINST_TORCH))
def test_equals_torch(name: str) -> None:
    """Seven steps from one start give torch.optim's parameters."""
    spec, reference = AGAINST_TORCH[name]
    assert_close(run(spec.at(ROUND), start()), by_torch(reference))


def test_clipping_equals_torch() -> None:
    """clip, then decay, then momentum. torch divides by norm + 10⁻⁶, hence the tolerance; the clip does bite."""
    spec = Sgd(lr=0.1, momentum=0.9, weight_decay=0.1, clip=0.5)
    reference = by_torch(lambda p: sgd(p, lr=0.1, momentum=0.9, weight_decay=0.1), clip=0.5)
    clipped = run(spec.at(ROUND), start())
    assert_close(clipped, reference, atol=1e-5)
    unclipped = run(Sgd(lr=0.1, momentum=0.9, weight_decay=0.1).at(ROUND), start())
    assert float(tree.norm(tree.sub(clipped, unclipped))) > 0.1


@pytest.mark.parametrize("kind", ["yogi", "adagrad"])
def test_equals_reddi_algorithm_2(kind: str) -> None:
    """m ← β₁m + (1−β₁)g; Yogi v ← v − (1−β₂)g²·sign(v − g²), Adagrad v ← v + g²; w ← w − η·m/(√v + τ); v₀ = τ²,
    no bias correction; written out entry by entry with Python floats.
    """
    b1, b2, tau, lr = 0.9, 0.99, 1e-3, 0.05
    spec = Adaptive(optimizer=kind, lr=lr, b1=b1, b2=b2, eps=tau)  # type: ignore[arg-type]
    got = run(spec.at(ROUND), start())
    for name, value in start().items():
        for place, w in enumerate(value.reshape(-1).tolist()):
            m, v = 0.0, tau**2
            for _ in range(STEPS):
                g = float(gradient({"w": torch.tensor(w, dtype=F64)})["w"])
                m = b1 * m + (1 - b1) * g
                sign = (v > g * g) - (v < g * g)
                v = v + g * g if kind == "adagrad" else v - (1 - b2) * g * g * sign
                w -= lr * m / (v**0.5 + tau)
            assert float(got[name].reshape(-1)[place]) == pytest.approx(w, abs=1e-12)


def test_adam_in_single_precision_corrects_the_bias_in_double() -> None:
    """After one step m/c1 = g and v/c2 = g² whatever b2, so the step is −lr·g/(|g| + eps) to float32's last digits;
    1 − 0.9999 in float32 is wrong by 2·10⁻⁴ already.
    """
    params = {"w": torch.tensor([0.5, -2.0])}
    optimizer = optim.scale_by_adam(b2=0.9999)
    step, _ = optimizer.update(params, optimizer.init(params), params)
    assert step["w"].dtype == torch.float32
    torch.testing.assert_close(step["w"], torch.tensor([1.0, -1.0]), rtol=0, atol=1e-6)


def test_clip_by_global_norm() -> None:
    """(3, 4) and 12 have global norm 13: at limit 6.5 all entries halve; at limit 13 or more, and at zero, nothing."""
    g = {"a": torch.tensor([3.0, 4.0], dtype=F64), "b": torch.tensor(12.0, dtype=F64)}

    def clipped(limit: float, tree_: Params) -> Params:
        return optim.clip_by_global_norm(limit).update(tree_, (), tree_)[0]

    assert_close(clipped(6.5, g), {"a": torch.tensor([1.5, 2.0], dtype=F64), "b": torch.tensor(6.0, dtype=F64)})
    assert_close(clipped(13.0, g), g)
    assert_close(clipped(1e6, g), g)
    assert_close(clipped(1.0, tree.zeros_like(g)), tree.zeros_like(g))


@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_points_ahead_are_the_iterates_of_nesterov_in_torch(clip: float | None) -> None:
    """y_{k+1} = y_k − η(g + μb), b ← μb + g, with g at y_k, is torch's Nesterov: it walks along the y."""
    spec = Accelerated(lr=0.05, momentum=0.8, weight_decay=0.2, clip=clip)
    reference = by_torch(lambda p: sgd(p, lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.2), clip)
    optimizer, params = spec.at(ROUND), start()
    state = optimizer.init(params)
    for _ in range(STEPS):
        step, state = optimizer.update(gradient(optimizer.look(params, state)), state, params)
        params = tree.add(params, step)
    assert_close(optimizer.look(params, state), reference, atol=1e-12 if clip is None else 1e-5)
    assert float(tree.norm(tree.sub(params, reference))) > 1e-3


def test_acceleration_stays_in_its_box() -> None:
    """Entries of the start beyond ±0.5 are put there by the first step, to rounding."""
    assert max(float(leaf.abs().max()) for leaf in start().values()) > 0.5
    for steps in (1, STEPS):
        end = run(Accelerated(lr=0.05, box=0.5).at(ROUND), start(), steps)
        assert max(float(leaf.abs().max()) for leaf in end.values()) == pytest.approx(0.5, abs=1e-15)


def test_blocks_look_ahead_each_in_its_own_way() -> None:
    """An accelerated block beside a plain one = each run on its block alone."""
    blocks = {"head.*": Sgd(lr=0.1).at(ROUND), "body.*": Accelerated(lr=0.05, box=1.0).at(ROUND)}
    params = start()
    head = {name: value for name, value in params.items() if name.startswith("head")}
    body = {name: value for name, value in params.items() if name.startswith("body")}
    together = run(optim.by_block(blocks), params)
    assert list(together) == list(params)
    assert_close(together, run(blocks["body.*"], body) | run(blocks["head.*"], head))


def test_by_block_gives_each_block_its_own_rate() -> None:
    """Plain steps −rate·g with the rate of the first pattern that matches; names come back in their order."""
    optimizer = optim.by_block({"head.*": optim.scale(-1.0), "*.bias": optim.scale(-0.1), "*": optim.scale(-0.01)})
    params = start()
    g = gradient(params)
    step, _ = optimizer.update(g, optimizer.init(params), params)
    rates = {"body.weight": 0.01, "body.bias": 0.1, "head.scale": 1.0}
    assert list(step) == list(params)
    assert_close(step, {name: -rates[name] * g[name] for name in params})


def test_by_block_keeps_the_blocks_states_apart() -> None:
    """Momentum on one block and Adam on the other = each run on its block alone (the gradient is coordinate-wise)."""
    blocks = {"head.*": Adaptive(lr=0.1).at(ROUND), "body.*": Sgd(lr=0.05, momentum=0.9).at(ROUND)}
    params = start()
    together = run(optim.by_block(blocks), params)
    head = {name: value for name, value in params.items() if name.startswith("head")}
    body = {name: value for name, value in params.items() if name.startswith("body")}
    assert_close(together, run(blocks["body.*"], body) | run(blocks["head.*"], head))


def test_by_block_refuses_an_uncovered_name() -> None:
    """The error names the parameter."""
    with pytest.raises(ValueError, match=r"body\.weight"):
        optim.by_block({"head.*": optim.scale(-1.0), "*.bias": optim.scale(-1.0)}).init(start())


def test_chain_applies_parts_in_order() -> None:
    """Decay 2 then scale −½ gives −½(g + 2w); scale first gives −½g + 2w; the empty chain is the identity."""
    params, g = start(), gradient(start())
    decay, half = optim.add_decayed_weights(2.0), optim.scale(-0.5)
    for parts, expected in (
        ((decay, half), tree.map(lambda a, w: -0.5 * (a + 2 * w), g, params)),
        ((half, decay), tree.map(lambda a, w: -0.5 * a + 2 * w, g, params)),
        ((), g),
    ):
        optimizer = optim.chain(*parts)
        assert_close(optimizer.update(g, optimizer.init(params), params)[0], expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_the_rate_of_the_round_is_exact(dtype: torch.dtype) -> None:
    """lr·rateᵗ = 0.1·0.9³, not its float32 rounding, in a float64 run."""
    optimizer = Sgd(lr=0.1, schedule=Exponential(rate=0.9)).at(torch.tensor(3, dtype=dtype))
    g = {"w": torch.ones(2, dtype=F64)}
    assert optimizer.update(g, optimizer.init(g), g)[0]["w"].tolist() == pytest.approx([-0.0729] * 2, abs=1e-15)


SPECS: dict[str, LocalOptimizer] = {name: spec for name, (spec, _) in AGAINST_TORCH.items()} | {
    "yogi": Adaptive(optimizer="yogi", lr=0.05, eps=1e-3),
    "adagrad": Adaptive(optimizer="adagrad", lr=0.05, eps=1e-3),
    "clip and schedule": Sgd(lr=0.1, clip=0.5, schedule=Exponential(rate=0.5)),
    "accelerated": Accelerated(lr=0.05, momentum=0.8, box=0.7, clip=3.0, schedule=Exponential(rate=0.5)),
}


@pytest.mark.parametrize("name", sorted(SPECS))
def test_vmap_equals_one_by_one(name: str) -> None:
    """Stacked clients take the steps they take alone; each client has its own round number."""
    clients = [start(seed) for seed in range(3)]
    rounds = torch.arange(3)

    def train(params: Params, round_: Tensor) -> Params:
        return run(SPECS[name].at(round_), params)

    stacked = vmap(train)(tree.stack(clients), rounds)
    assert_close(stacked, tree.stack([train(c, t) for c, t in zip(clients, rounds, strict=True)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(SPECS))
def test_dtype_is_kept(name: str, dtype: torch.dtype) -> None:
    """A scalar parameter too stays in the dtype of the model."""
    assert {leaf.dtype for leaf in tree.leaves(run(SPECS[name].at(ROUND), start(dtype=dtype)))} == {dtype}


@pytest.mark.parametrize("name", sorted(SPECS))
def test_nothing_to_train_is_fine(name: str) -> None:
    """A block without parameters (nothing personal, say) takes the empty step, also where the norm is clipped."""
    assert run(SPECS[name].at(ROUND), {}) == {}


@pytest.mark.parametrize("name", sorted(SPECS))
def test_updates_are_pure(name: str) -> None:
    """Gradient, state and parameters are as before, and the same call gives the same step."""
    optimizer, params = SPECS[name].at(ROUND), start()
    _, state = optimizer.update(gradient(params), optimizer.init(params), params)
    g = gradient(params)
    before = tree.map(torch.clone, (g, state, params))
    once, _ = optimizer.update(g, state, params)
    assert_close((g, state, params), before, atol=0)
    assert_close(optimizer.update(g, state, params)[0], once, atol=0)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("blocks", [False, True], ids=["whole", "blocks"])
def test_a_step_in_one_pass_is_a_step_added(name: str, blocks: bool) -> None:
    """`moved` = params + `update`, and the same state, for every optimizer: fused or not, at several steps."""
    optimizer = SPECS[name].at(torch.tensor(2.0))
    if blocks:
        optimizer = optim.by_block({"*.bias": optimizer, "*": optim.scale(-0.1)})
    params, state = start(), optimizer.init(start())
    for _ in range(3):
        g = gradient(optimizer.look(params, state))
        step, stepped = optimizer.update(g, state, params)
        there, after = moved(optimizer, g, state, params)
        assert_close(there, tree.add(params, step))
        assert_close(after, stepped, atol=0)
        params, state = there, after
