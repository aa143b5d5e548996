"""FedCP by hand, in float64."""

import dataclasses

import numpy as np
import pytest
import torch

from head_by_hand import (
    INPUTS,
    LR,
    NET,
    PROBLEM,
    TRAINING,
    Arrays,
    X,
    arrays,
    drawn,
    full_batches,
    near,
    normed,
    other,
    relu,
    risks,
    stepped,
)
from personafl.algorithms.averaging import Change, Model
from personafl.algorithms.fedalt import Own
from personafl.algorithms.fedcp import fedcp
from personafl.core.algorithm import reduce
from personafl.core.heads import with_head
from personafl.core.split import Split
from personafl.core.tree import Params, stack
from personafl.errors import BadInput

BODY, HEAD = ("0.weight",), ("1.weight", "1.bias")
POLICY = drawn(7, weight=(4, 2), bias=(4,), scale=(4,), shift=(4,))
OWN = drawn(8, weight=(4, 2), bias=(4,))
LAMBDA = 3.0
DOWN = Model(other(1) | {f"policy/{name}": torch.from_numpy(value) for name, value in POLICY.items()})
STATE = Own({f"1.{name}": torch.from_numpy(value) for name, value in OWN.items()})
HEADED = dataclasses.replace(PROBLEM, local_net=with_head(NET, PROBLEM.split, "gated"))


def scored(z: np.ndarray, policy: Arrays, along: np.ndarray, own: Arrays, shared: Arrays) -> np.ndarray:
    """(a, c) = ReLU(LayerNorm(P (z ⊙ v/‖v‖) + p)), r = e^a/(e^a + e^c); own of r ⊙ z, shared of the rest."""
    pairs = relu(normed((z * along) @ policy["weight"].T + policy["bias"], policy["scale"], policy["shift"]))
    a, c = pairs[:, :2], pairs[:, 2:]
    r = np.exp(a) / (np.exp(a) + np.exp(c))
    return (r * z) @ own["weight"].T + own["bias"] + ((1 - r) * z) @ shared["weight"].T + shared["bias"]


def mmd(z: np.ndarray, before: np.ndarray) -> np.ndarray:
    """The mean over all pairs (i, j) of k(z_i, z_j) + k(z⁰_i, z⁰_j) − 2 k(z_i, z⁰_j)."""

    def kernel(u: np.ndarray, v: np.ndarray) -> np.ndarray:
        apart = ((u[:, None] - v[None]) ** 2).sum(-1)
        return sum(np.exp(-apart / (2 * a)) for a in (10, 15, 20, 50))

    return (kernel(z, z) + kernel(before, before) - 2 * kernel(z, before)).mean()


def along(weight: np.ndarray) -> np.ndarray:
    total = weight.sum(0)
    return total / np.sqrt((total**2).sum())


def test_two_steps_by_hand() -> None:
    """θ, φ_i and ω step along the loss's derivative; v_i, z⁰ and the shared head are those of the round's start."""
    rule = fedcp(TRAINING, strength=LAMBDA).client
    state, up = rule.update(HEADED, DOWN, STATE, full_batches({"local": 2}))
    body, weight, bias = arrays(DOWN.model)
    shared, before, v = {"weight": weight, "bias": bias}, INPUTS @ body.T, along(OWN["weight"])
    values = {"body": body} | {f"own {n}": x for n, x in OWN.items()} | {f"policy {n}": x for n, x in POLICY.items()}

    def part(values: Arrays, kind: str) -> Arrays:
        return {name.split()[1]: value for name, value in values.items() if name.startswith(kind)}

    def loss(values: Arrays) -> np.ndarray:
        z = INPUTS @ values["body"].T
        scores = scored(z, part(values, "policy"), v, part(values, "own"), shared)
        return risks(scores).mean() + LAMBDA * mmd(z, before)

    losses = []
    for _ in range(2):
        losses.append(loss(values))
        values = stepped(loss, values, LR)
    near(up.change["0.weight"], values["body"] - body)
    for name in ("weight", "bias"):
        near(state.personal[f"1.{name}"], values[f"own {name}"])
        near(up.change[f"1.{name}"], (values[f"own {name}"] - shared[name]) / 2)
    for name, value in POLICY.items():
        near(up.change[f"policy/{name}"], values[f"policy {name}"] - value)
    near(up.loss, np.mean(losses))
    assert np.abs(mmd(INPUTS @ values["body"].T, before)) > 1e-6


def test_the_personal_model_is_a_network_with_a_gated_head() -> None:
    models = fedcp(TRAINING).client.models(HEADED, DOWN, STATE)
    body, weight, bias = arrays(DOWN.model)
    z, shared = INPUTS @ body.T, {"weight": weight, "bias": bias}
    near(HEADED.personal_net.apply(models["personal"], X), scored(z, POLICY, along(OWN["weight"]), OWN, shared))
    near(NET.apply(models["global"], X), z @ weight.T + bias)


def test_the_shared_head_is_the_mean_of_halves() -> None:
    """With weights 2 and 1: (W, b) ← (2·½(ψ + φ_1) + ½(ψ + φ_2))/3."""
    algorithm, model = fedcp(TRAINING), other(1)
    server = algorithm.server.init(PROBLEM, model, 3.0)
    down: Model = algorithm.server.broadcast(server)
    ups = []
    for seed in (2, 3):
        change = {name: torch.zeros_like(value) for name, value in down.model.items()}
        change |= {name: 0.5 * (other(seed)[name] - model[name]) for name in HEAD}
        ups.append(Change(change, torch.zeros(()).double()))
    server = algorithm.server.update(server, reduce(stack(ups), torch.tensor([2.0, 1.0])), 0)
    after = algorithm.server.broadcast(server).model
    for name in HEAD:
        one, two, shared = (params[name].numpy() for params in (other(2), other(3), model))
        near(after[name], (2 * (shared + one) / 2 + (shared + two) / 2) / 3)
    near(after["0.weight"], model["0.weight"].numpy())


def test_the_policy_starts_as_a_linear_layer_and_follows_from_the_start() -> None:
    def policy(model: Params) -> Params:
        server = fedcp(TRAINING).server
        return server.broadcast(server.init(PROBLEM, model, 1.0)).model

    first, again, second = policy(other(1)), policy(other(1)), policy(other(2))
    weight = first["policy/weight"]
    assert weight.shape == (4, 2)
    assert 0.3 < weight.abs().max() < 1 / np.sqrt(2)  # U(±1/√2)
    assert torch.equal(weight, again["policy/weight"])
    assert not torch.equal(weight, second["policy/weight"])
    near(first["policy/scale"], np.ones(4))


@pytest.mark.parametrize("part", [("0.*",), ("1.bias",), ("0.*", "1.*")])
def test_a_part_that_is_no_layer_of_outputs_is_refused(part: tuple[str, ...]) -> None:
    problem = dataclasses.replace(PROBLEM, split=Split(part))
    with pytest.raises(BadInput, match=r"^model\.personal: fedcp uses what goes into the network's last linear layer"):
        fedcp(TRAINING).client.expects(problem, other(1))
