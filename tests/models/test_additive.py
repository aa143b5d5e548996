"""The additive model and the split input."""

from __future__ import annotations

import torch
from torch.nn import functional

from models.cases import F64, FEATURES
from personafl.core.losses import cross_entropy
from personafl.core.rng import generator
from personafl.core.tree import Params
from personafl.models import make_net
from personafl.models.network import Network

X = FEATURES.x.to(F64)


def params_of(net: object) -> Params:
    start = net.init(generator(0))  # type: ignore[attr-defined]
    return {name: value.to(F64) for name, value in start.items()}


def heads(params: Params) -> tuple[torch.Tensor, torch.Tensor]:
    features = functional.linear(X, params["body.1.weight"], params["body.1.bias"]).relu()
    shared, personal = (
        functional.linear(features, params[f"{name}.weight"], params[f"{name}.bias"]) for name in ("shared", "personal")
    )
    return shared, personal


def test_a_mixture_by_hand() -> None:
    """p = θ·softmax(shared) + (1 − θ)·softmax(personal), θ = σ(t): ½ at the start, ¾ for t = log 3; the loss −log p."""
    net = make_net(Network(name="additive", hidden=[4]), FEATURES)
    params = params_of(net)
    shared, personal = (scores.softmax(-1) for scores in heads(params))
    targets = FEATURES.y
    for t, theta in ((0.0, 0.5), (torch.tensor(3.0, dtype=F64).log().item(), 0.75)):
        params["personal.mixture"] = torch.tensor(t, dtype=F64)
        output = net.apply(params, X)
        expected = theta * shared + (1 - theta) * personal
        torch.testing.assert_close(output.exp(), expected, rtol=0, atol=1e-12)
        loss = -expected[torch.arange(5), targets].log()
        torch.testing.assert_close(cross_entropy(output, targets), loss, rtol=0, atol=1e-12)


def test_the_mixture_weight_is_learned_and_far_scores_stay_finite() -> None:
    net = make_net(Network(name="additive", hidden=[4]), FEATURES)
    params = params_of(net)
    params["shared.weight"] = params["shared.weight"] * 1e4
    gradient = torch.func.grad(lambda p: cross_entropy(net.apply(p, X), FEATURES.y).mean())(params)
    assert all(bool(value.isfinite().all()) for value in gradient.values())
    assert float(gradient["personal.mixture"]) != 0


def test_a_sum_by_hand() -> None:
    net = make_net(Network(name="additive", hidden=[4], form="sum"), FEATURES)
    params = params_of(net)
    assert "personal.mixture" not in params
    torch.testing.assert_close(net.apply(params, X), sum(heads(params)), rtol=0, atol=1e-12)


def test_private_features_reach_only_the_personal_embedding() -> None:
    """Without the personal embedding's weights the last two features have no say, and the others do."""
    net = make_net(Network(name="split_input", private=2, width=3, private_width=4), FEATURES)
    params = params_of(net)
    assert params["personal.weight"].shape == (4, 2)
    assert params["shared.weight"].shape == (3, 4)
    private, public = X.clone(), X.clone()
    private[:, 4:] += 1
    public[:, :4] += 1
    without = {**params, "personal.weight": torch.zeros(4, 2, dtype=F64)}
    assert torch.equal(net.apply(without, private), net.apply(without, X))
    assert not torch.equal(net.apply(without, public), net.apply(without, X))
    assert not torch.equal(net.apply(params, private), net.apply(params, X))
