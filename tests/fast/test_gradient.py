"""The gradient by every way, against torch.func's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, grad_and_value, vmap
from torch.testing import assert_close

from personafl.core.tree import Params
from personafl.fast.gradient import gradient_and_value
from personafl.fast.stack import differentiated, stack_around

GENERATOR = torch.Generator().manual_seed(0)
CLIENTS, BATCH = 4, 5


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


WEIGHTS = {"w": draw(CLIENTS, 3, 2), "b": draw(CLIENTS, 3), "unused": draw(CLIENTS, 2)}
X = draw(CLIENTS, BATCH, 2)


def squares(params: Params, x: Tensor) -> Tensor:
    return (x @ params["w"].T + params["b"]).tanh().square().sum()


def one(params: Params) -> Params:
    return {name: value[0] for name, value in params.items()}


def test_one_client() -> None:
    gradient, value = gradient_and_value(squares, one(WEIGHTS), X[0])
    expected, loss = grad_and_value(squares)(one(WEIGHTS), X[0])
    assert_close((gradient, value), (expected, loss), rtol=0, atol=0)
    assert gradient["unused"].tolist() == [0.0, 0.0]
    assert not value.requires_grad


def test_stacked_clients_have_each_their_own() -> None:
    gradient, value = vmap(lambda w, x: gradient_and_value(squares, w, x))(WEIGHTS, X)
    for client in range(CLIENTS):
        own = {name: leaf[client] for name, leaf in WEIGHTS.items()}
        expected, loss = grad_and_value(squares)(own, X[client])
        assert_close(({name: leaf[client] for name, leaf in gradient.items()}, value[client]), (expected, loss))
    assert not value.requires_grad


def test_clients_that_share_their_parameters_have_each_their_own_gradient() -> None:
    """The first step of a round: the model is the same for all, and not stacked."""
    shared = one(WEIGHTS)
    gradient, _ = vmap(lambda x: gradient_and_value(squares, shared, x))(X)
    expected = torch.stack([grad(squares)(shared, x)["w"] for x in X])
    assert_close(gradient["w"], expected)


def test_what_the_objective_closes_over_may_be_stacked() -> None:
    anchors = draw(CLIENTS, 3)

    def pulled(params: Params, x: Tensor, anchor: Tensor) -> Tensor:
        return squares(params, x) + (params["b"] * anchor).sum()

    def own(params: Params, x: Tensor, anchor: Tensor) -> Params:
        return gradient_and_value(lambda w, batch: pulled(w, batch, anchor), params, x)[0]

    assert_close(vmap(own)(WEIGHTS, X, anchors), vmap(grad(pulled))(WEIGHTS, X, anchors))


@pytest.mark.parametrize("around", [lambda f: f, vmap], ids=["alone", "stacked"])
def test_through_a_gradient(around: Callable[..., Callable[..., Params]]) -> None:
    """Under torch.func.grad, and of an objective that has a gradient in it."""
    weights, x = (WEIGHTS, X) if around is vmap else (one(WEIGHTS), X[0])

    def length(inner: Callable[..., Params]) -> Callable[[Params, Tensor], Tensor]:
        return lambda w, batch: inner(w, batch)["w"].square().sum()

    expected = around(grad(length(grad(squares))))(weights, x)
    over = around(grad(length(lambda w, batch: gradient_and_value(squares, w, batch)[0])))(weights, x)
    inside = around(lambda w, batch: gradient_and_value(length(grad(squares)), w, batch)[0])(weights, x)
    assert_close(over, expected)
    assert_close(inside, expected)


def test_a_constant_has_no_slope_and_grad_mode_does_not_matter() -> None:
    with torch.no_grad():
        gradient, value = gradient_and_value(lambda w, x: x.sum(), one(WEIGHTS), X[0])
        steep, _ = gradient_and_value(squares, one(WEIGHTS), X[0])
    assert not any(leaf.any() for leaf in gradient.values())
    assert value == X[0].sum()
    assert steep["w"].any()
    assert gradient_and_value(lambda w, x: x.sum(), {}, X[0])[0] == {}


def test_differentiated() -> None:
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(differentiated())
        return x.square().sum()

    look(X)
    vmap(look)(X)
    grad(look)(X)
    vmap(grad(look))(X)
    assert seen == [False, False, True, True]


def test_an_outer_tape_goes_on() -> None:
    """Parameters that come from a tape outside keep their way back to it."""
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    weights = {name: value * scale for name, value in one(WEIGHTS).items()}
    gradient, _ = gradient_and_value(squares, weights, X[0])
    assert gradient["w"].requires_grad


def test_the_stack_is_the_one_vmap_around() -> None:
    seen = []

    def looked(x: Tensor) -> Tensor:
        seen.append(stack_around())
        return x.sum()

    looked(X[0])
    vmap(looked)(X)
    grad(looked)(X[0])
    vmap(grad(looked))(X)
    grad(lambda x: vmap(looked)(x).sum())(X)
    assert [stack if stack is None else stack.clients for stack in seen] == [None, CLIENTS, None, None, None]
