"""FedDBE by hand, in float64."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from head_by_hand import INPUTS, LR, NET, PROBLEM, TRAINING, TRUTH, X, arrays, full_batches, near, other, softmax
from personafl.algorithms.feddbe import Consensus, Moved, Shift, feddbe
from personafl.core import tree
from personafl.core.algorithm import reduce
from personafl.core.net import Net
from personafl.core.split import Split
from personafl.errors import BadInput

MEAN = np.array([0.4, -0.7])


@pytest.mark.parametrize("known", [0.0, 1.0])
def test_two_steps_by_hand(known: float) -> None:
    """z = xBᵀ, δ = (softmax((z + s)Wᵀ + b) − 1_y)/5: ∇W = δᵀ(z + s), ∇b = Σδ, ∇s = Wᵀ Σδ.

    m ← (1 − μ)m + μ z̄_B, so that κ ½ mean_j (m − z̄)²_j has the gradient κ μ/2 · (m − z̄) at each of 2 means, over 5
    samples: ∇B = (δW + κ μ (m − z̄)/(2·5))ᵀ x.
    """
    kappa, mu = 3.0, 0.4
    rule, model = feddbe(TRAINING, strength=kappa, momentum=mu).client, other(1)
    down = Consensus(model, torch.from_numpy(MEAN), torch.tensor(known))
    shift = np.array([0.2, 0.5])
    state, up = rule.update(PROBLEM, down, Shift(torch.from_numpy(shift)), full_batches({"local": 2}))
    body, weight, bias = arrays(model)
    running, seen, losses = np.zeros(2), [], []
    for _ in range(2):
        z = INPUTS @ body.T
        chances = softmax((z + shift) @ weight.T + bias)
        delta = (chances - TRUTH) / 5
        running = (1 - mu) * running + mu * z.mean(0)
        seen.append(z.mean(0))
        losses.append(-np.log((chances * TRUTH).sum(1)).mean() + known * kappa * 0.5 * ((running - MEAN) ** 2).mean())
        pulled = delta @ weight + known * kappa * mu * (running - MEAN) / (2 * 5)
        steps = pulled.T @ INPUTS, delta.T @ (z + shift), delta.sum(0), weight.T @ delta.sum(0)
        body, weight, bias, shift = (
            value - LR * step for value, step in zip((body, weight, bias, shift), steps, strict=True)
        )
    near(model["0.weight"] + up.change["0.weight"], body)
    near(model["1.weight"] + up.change["1.weight"], weight)
    near(model["1.bias"] + up.change["1.bias"], bias)
    near(state.shift, shift)
    near(up.mean, np.mean(seen, 0))
    near(up.loss, np.mean(losses))

    personal = rule.models(PROBLEM, down, state)["personal"]
    body, weight, bias = arrays(model)
    near(NET.apply(personal, X), (INPUTS @ body.T + shift) @ weight.T + bias)


def test_a_server_keeps_the_first_rounds_mean() -> None:
    algorithm, model = feddbe(TRAINING), other(1)
    server = algorithm.server.init(PROBLEM, model, 2.0)
    assert algorithm.server.broadcast(server).known == 0
    for means in (([1.0, 0.0], [4.0, 3.0]), ([9.0, 9.0], [9.0, 9.0])):
        ups = [Moved(tree.zeros_like(model), torch.tensor(m).double(), torch.zeros(()).double()) for m in means]
        server = algorithm.server.update(server, reduce(tree.stack(ups), torch.tensor([2.0, 1.0])), 0)
        down = algorithm.server.broadcast(server)
        near(down.mean, np.array([2.0, 1.0]))  # (2·[1, 0] + [4, 3])/3
        assert down.known == 1


def test_a_newcomer_learns_its_shift_alone() -> None:
    rule, model = feddbe(TRAINING, tune_lr=0.7).client, other(1)
    down = rule.expects(PROBLEM, model)
    tuned = rule.personalize(PROBLEM, down, rule.init(PROBLEM, down, torch.Generator()), full_batches({"tune": 1}))
    body, weight, bias = arrays(model)
    delta = (softmax(INPUTS @ body.T @ weight.T + bias) - TRUTH) / 5
    near(tuned.shift, -0.7 * weight.T @ delta.sum(0))


def test_a_head_without_a_bias_is_refused() -> None:
    net = Net(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4, bias=False)).double())
    with pytest.raises(BadInput, match="the last layer has no bias, and feddbe needs one"):
        feddbe(TRAINING).client.expects(dataclasses.replace(PROBLEM, net=net), net.init(torch.Generator()))


@pytest.mark.parametrize("part", [("0.*",), ("1.bias",), ("0.*", "1.*")])
def test_a_part_that_is_no_layer_of_outputs_is_refused(part: tuple[str, ...]) -> None:
    problem = dataclasses.replace(PROBLEM, split=Split(part))
    with pytest.raises(BadInput, match=r"^model\.personal: feddbe uses what goes into the network's last linear layer"):
        feddbe(TRAINING).client.expects(problem, other(1))
