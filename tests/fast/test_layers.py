"""Steps with factored gradients, against plain ones in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.nn import functional
from torch.testing import assert_close

from personafl.core import tree
from personafl.core.descend import Quadratic
from personafl.core.tree import Params
from personafl.fast import layers
from personafl.fast.gradient import add_scaled, step
from personafl.fast.layers import Factored

GENERATOR = torch.Generator().manual_seed(0)
CLIENTS, BATCH = 3, 5
RATE = -0.25


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


WEIGHTS = {"first": draw(CLIENTS, 4, 6), "bias": draw(CLIENTS, 4), "second": draw(CLIENTS, 4, 4), "idle": draw(CLIENTS)}
X = draw(CLIENTS, BATCH, 2, 6)  # two places per sample, as in a sequence


def objective(params: Params, x: Tensor) -> Tensor:
    """`second` is used twice, once outside a layer, and pulled to 0."""
    hidden = functional.linear(x, params["first"], params["bias"]).tanh()
    twice = functional.linear(functional.linear(hidden, params["second"]), params["second"])
    return (twice @ params["second"]).square().mean() + 0.1 * params["second"].square().sum()


def expected(params: Params, x: Tensor) -> tuple[Params, Tensor]:
    gradient, value = grad_and_value(objective)(params, x)
    return add_scaled(params, gradient, RATE), value


def one(client: int) -> Params:
    return {name: value[client].clone() for name, value in WEIGHTS.items()}


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_WORTH", 1)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("owned", [True, False])
def test_one_client(owned: bool) -> None:
    params, before = one(1), one(1)
    moved, value = step(objective, params, X[1], RATE, owned=owned)
    assert_close((moved, value), expected(before, X[1]))
    assert not any(leaf.requires_grad for leaf in (*moved.values(), value))
    assert all(torch.equal(params[name], before[name]) for name in before) is not owned


@pytest.mark.parametrize("owned", [True, False])
def test_stacked_clients(owned: bool) -> None:
    stacked = tree.map(torch.clone, WEIGHTS)
    moved, value = vmap(lambda p, x: step(objective, p, x, RATE, owned=owned))(stacked, X)
    for client in range(CLIENTS):
        assert_close((tree.take(moved, client), value[client]), expected(one(client), X[client]))
    assert not any(leaf.requires_grad for leaf in (*moved.values(), value))


def of_a_vector(params: Params, x: Tensor) -> Tensor:
    return functional.linear(x, params["first"], params["bias"]).square().sum()


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("stacked", [True, False])
def test_a_layer_may_be_applied_to_a_vector(stacked: bool) -> None:
    found = (
        vmap(lambda p, x: step(of_a_vector, p, x, RATE))(WEIGHTS, X[:, 0, 0])[0]
        if stacked
        else tree.stack([step(of_a_vector, one(client), X[client, 0, 0], RATE)[0] for client in range(CLIENTS)])
    )
    for client in range(CLIENTS):
        gradient = grad_and_value(of_a_vector)(one(client), X[client, 0, 0])[0]
        assert_close(tree.take(found, client), add_scaled(one(client), gradient, RATE))


def test_clients_that_begin_with_one_model() -> None:
    moved, _ = vmap(lambda x: step(objective, one(0), x, RATE))(X)
    for client in range(CLIENTS):
        assert_close(tree.take(moved, client), expected(one(0), X[client])[0])


def test_a_step_leaves_parameters_that_it_does_not_own() -> None:
    """Also those that a term says nothing about."""
    params, before = one(0), one(0)
    step(objective, params, X[0], RATE, term=Quadratic(slope={"bias": WEIGHTS["bias"][1]}))
    assert_close(params, before, rtol=0, atol=0)


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_step_that_is_not_taken_changes_nothing(value: float) -> None:
    """Not even if there is NaN in it."""
    x = X.clone()
    x[1] = value
    alive = torch.tensor([True, False, True])
    stacked = tree.map(torch.clone, WEIGHTS)
    moved, _ = vmap(lambda p, x, a: step(objective, p, x, RATE, a, owned=True))(stacked, x, alive)
    assert_close(tree.take(moved, 1), one(1), rtol=0, atol=0)
    assert_close(tree.take(moved, 2), expected(one(2), X[2])[0])


def test_a_rate_of_each_clients_own() -> None:
    rates = torch.tensor([-0.5, 0.0, -0.25], dtype=torch.float64)
    moved, _ = vmap(lambda p, x, r: step(objective, p, x, r))(WEIGHTS, X, rates)
    assert_close(tree.take(moved, 1), one(1), rtol=0, atol=0)
    assert_close(tree.take(moved, 2), expected(one(2), X[2])[0])


def test_the_gradient_of_a_weight_is_never_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """nn.Linear's too: the weight's change is one product onto it."""
    kept: list[Factored] = []
    plain = Factored.onto
    monkeypatch.setattr(Factored, "onto", lambda part, *a, **named: kept.append(part) or plain(part, *a, **named))
    module = nn.Linear(6, 4).double()

    def loss(params: Params, x: Tensor) -> Tensor:
        return torch.func.functional_call(module, params, x).square().mean()

    params = {"weight": WEIGHTS["first"], "bias": WEIGHTS["bias"]}
    vmap(lambda p, x: step(loss, p, x, RATE))(params, X)
    assert [tuple(part.output.shape) for part in kept] == [(CLIENTS, 2 * BATCH, 4)]
