"""FedALA by hand, in float64."""

import numpy as np
import torch

from head_by_hand import LR, PROBLEM, TRAINING, arrays, full_batches, near, other, slopes
from personafl.algorithms.averaging import Model
from personafl.algorithms.fedala import Weighed, fedala
from personafl.algorithms.fedavg import fedavg
from personafl.core.tree import Params

PHASES = {"warmup": 3, "weigh": 1, "local": 1}


def by_hand(shared: Params, own: Params, steps: int, rate: float) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Steps on the weights of W and b, each from 1: w ← clip(w − η ∇f(B, ψ̂) ⊙ (ψ − ψ_i)), ψ̂ = ψ_i + (ψ − ψ_i) ⊙ w."""
    body, *upper = arrays(shared)
    mine = arrays(own)[1:]
    gaps = [a - b for a, b in zip(upper, mine, strict=True)]
    weights = [np.ones_like(gap) for gap in gaps]
    start = list(upper)
    for _ in range(steps):
        slope = slopes(body, *start)
        moves = (slope["1.weight"] * gaps[0], slope["1.bias"] * gaps[1])
        weights = [np.clip(w - rate * move, 0.0, 1.0) for w, move in zip(weights, moves, strict=True)]
        start = [b + gap * w for b, gap, w in zip(mine, gaps, weights, strict=True)]
    return weights, start


def trained(rounds: int, steps: int) -> None:
    shared, own, rate = other(1), other(2), 1.7
    rule = fedala(TRAINING, weight_lr=rate).client
    upper = {name: own[name] for name in ("1.weight", "1.bias")}
    ones = {name: torch.ones_like(value) for name, value in upper.items()}
    state, up = rule.update(PROBLEM, Model(shared), Weighed(upper, ones, torch.tensor(rounds)), full_batches(PHASES))
    weights, start = by_hand(shared, own, steps, rate)
    assert any(0.0 < w < 1.0 for w in weights[0].ravel())
    assert 0.0 in weights[0] or 1.0 in weights[0]  # some are clipped
    near(state.weights["1.weight"], weights[0])
    near(state.weights["1.bias"], weights[1])
    body = arrays(shared)[0]
    slope = slopes(body, *start)
    near(shared["0.weight"] + up.change["0.weight"], body - LR * slope["0.weight"])
    near(shared["1.weight"] + up.change["1.weight"], start[0] - LR * slope["1.weight"])
    near(state.upper["1.weight"], start[0] - LR * slope["1.weight"])
    near(state.upper["1.bias"], start[1] - LR * slope["1.bias"])
    assert int(state.rounds) == rounds + 1


def test_a_round_learns_weights_then_trains() -> None:
    trained(rounds=2, steps=1)


def test_the_second_round_warms_up() -> None:
    trained(rounds=1, steps=4)


def test_the_first_round_is_fedavgs() -> None:
    """ψ_i = ψ: weights have no gradient, and stay 1."""
    down, data = Model(other(1)), full_batches(PHASES)
    rule, plain = fedala(TRAINING).client, fedavg(TRAINING).client
    state, up = rule.update(PROBLEM, down, rule.init(PROBLEM, down, torch.Generator()), data)
    expected = plain.update(PROBLEM, down, plain.init(PROBLEM, down, torch.Generator()), data)[1]
    assert all(torch.equal(value, expected.change[name]) for name, value in up.change.items())
    assert all(bool((value == 1).all()) for value in state.weights.values())


def test_the_personal_model_is_the_newest_body_and_the_weighed_head() -> None:
    shared, own = other(1), other(2)
    upper = {name: own[name] for name in ("1.weight", "1.bias")}
    quarter = {name: torch.full_like(value, 0.25) for name, value in upper.items()}
    model = fedala(TRAINING).client.models(PROBLEM, Model(shared), Weighed(upper, quarter, torch.tensor(3)))["personal"]
    assert torch.equal(model["0.weight"], shared["0.weight"])
    near(model["1.bias"], 0.75 * arrays(own)[2] + 0.25 * arrays(shared)[2])
