"""FedRoD by hand, in float64."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from personafl.algorithms.fedavg import fedavg
from personafl.algorithms.fedrod import Head, class_counts, fedrod
from personafl.algorithms.training import Training
from personafl.core.algorithm import Problem
from personafl.core.batches import Batches, Data, Steps
from personafl.core.losses import cross_entropy
from personafl.core.net import Net
from personafl.core.optim import Sgd
from personafl.core.shape import DataShape
from personafl.core.split import Split
from personafl.core.tree import Params
from personafl.errors import BadInput

LR = 0.3
TRAINING = Training(work=Steps(steps=2, batch=None), optimizer=Sgd(lr=LR))
NET = Net(nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 4)).double())
PROBLEM = Problem(NET, cross_entropy, split=Split(("1.*",)), data=DataShape(input_shape=(3,), classes=4))
TARGETS = np.array([0, 2, 2, 2, 1])  # class 3 is not there
INPUTS = np.random.default_rng(0).normal(size=(5, 3))


def two_steps(targets: np.ndarray, steps: int = 2) -> Data:
    rows = torch.arange(len(targets)).repeat(steps, 1)
    x, y = torch.from_numpy(INPUTS[: len(targets)]), torch.from_numpy(targets)
    batches = Batches(x, y, rows, torch.ones_like(rows, dtype=torch.bool), torch.zeros(steps, dtype=torch.int64))
    return Data({"local": batches, "tune": batches}, torch.tensor(len(targets)), torch.tensor(0.0))


def start() -> Params:
    return NET.init(torch.Generator())


def softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def by_hand(model: Params, phi: np.ndarray, shift: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Two steps: z = xBᵀ, ĝ = zWᵀ + b, and δ = softmax(ĝ + log n) − 1_y over 5; ∇W = δᵀz, ∇b = Σδ, ∇B = (δW)ᵀx.

    With ε = softmax(ĝ + zΦᵀ + f) − 1_y over 5: ∇Φ = εᵀz, ∇f = Σε, and nothing of ε reaches B, W or b.
    """
    body, weight, bias = (model[name].numpy().copy() for name in ("0.weight", "1.weight", "1.bias"))
    own = np.zeros(4)
    truth = np.eye(4)[TARGETS]
    for _ in range(2):
        z = INPUTS @ body.T
        scores = z @ weight.T + bias
        delta = (softmax(scores + shift) - truth) / 5
        epsilon = (softmax(scores + z @ phi.T + own) - truth) / 5
        gradients = delta.T @ z, delta.sum(0), (delta @ weight).T @ INPUTS
        phi, own = phi - LR * epsilon.T @ z, own - LR * epsilon.sum(0)
        weight, bias, body = weight - LR * gradients[0], bias - LR * gradients[1], body - LR * gradients[2]
    return {"0.weight": body, "1.weight": weight, "1.bias": bias}, phi, own


def test_two_steps_by_hand() -> None:
    """n = (1, 1, 3, 0): log n shifts the scores of the shared model alone; class 3 has no part in its softmax."""
    rule, model = fedrod(TRAINING).client, start()
    down = rule.expects(PROBLEM, model)
    state, upload = rule.update(PROBLEM, down, rule.init(PROBLEM, down, torch.Generator()), two_steps(TARGETS))
    with np.errstate(divide="ignore"):
        w, phi, own = by_hand(model, np.zeros((4, 2)), np.log([1.0, 1.0, 3.0, 0.0]))
    for name, value in w.items():
        np.testing.assert_allclose((model[name] + upload.change[name]).numpy(), value, rtol=0, atol=1e-13)
    np.testing.assert_allclose(state.head["1.weight"].numpy(), phi, rtol=0, atol=1e-13)
    np.testing.assert_allclose(state.head["1.bias"].numpy(), own, rtol=0, atol=1e-13)
    assert upload.change["1.bias"][3] == 0.0

    x = torch.from_numpy(INPUTS)
    personal = rule.models(PROBLEM, down, state)["personal"]
    z = INPUTS @ model["0.weight"].numpy().T
    expected = NET.apply(model, x).numpy() + z @ phi.T + own
    np.testing.assert_allclose(NET.apply(personal, x).numpy(), expected, rtol=0, atol=1e-13)


def test_with_balanced_classes_the_shared_path_is_fedavgs() -> None:
    data, model = two_steps(np.array([3, 2, 1, 0])), start()
    change = {}
    for method in (fedavg, fedrod):
        rule = method(TRAINING).client
        down = rule.expects(PROBLEM, model)
        change[method] = rule.update(PROBLEM, down, rule.init(PROBLEM, down, torch.Generator()), data)[1].change
    for name, value in change[fedavg].items():
        torch.testing.assert_close(value, change[fedrod][name], rtol=0, atol=1e-13)


def test_a_newcomer_trains_its_head_alone() -> None:
    """One step from φ = 0: φ = −η ∇_ψ f of the shared model."""
    rule, model = fedrod(TRAINING, tune_lr=0.7).client, start()
    tuned = rule.personalize(PROBLEM, rule.expects(PROBLEM, model), Head(_zeros(model)), two_steps(TARGETS, 1))
    z = INPUTS @ model["0.weight"].numpy().T
    delta = (softmax(NET.apply(model, torch.from_numpy(INPUTS)).numpy()) - np.eye(4)[TARGETS]) / 5
    np.testing.assert_allclose(tuned.head["1.weight"].numpy(), -0.7 * delta.T @ z, rtol=0, atol=1e-13)


def _zeros(model: Params) -> Params:
    return {name: torch.zeros_like(value) for name, value in model.items() if name.startswith("1.")}


def test_classes_are_counted_among_real_targets() -> None:
    batches = two_steps(np.array([0, 2, 2])).phases["local"]
    padded = batches._replace(real=torch.tensor([[True, True, False], [True, False, False]]))
    assert class_counts(PROBLEM, padded).tolist() == [2, 0, 1, 0]
    words = padded._replace(pool_y=torch.tensor([[0, 3], [1, -1], [2, 2]]))  # next tokens; -1 is not scored
    assert class_counts(PROBLEM, words).tolist() == [2, 1, 0, 2]


@pytest.mark.parametrize("part", [("0.*",), ("0.*", "1.bias"), ("1.*", "0.*")])
def test_a_head_that_is_no_layer_of_scores_is_refused(part: tuple[str, ...]) -> None:
    problem = dataclasses.replace(PROBLEM, split=Split(part))
    with pytest.raises(BadInput, match=r"^model\.personal: fedrod adds the scores of two linear heads"):
        fedrod(TRAINING).client.expects(problem, start())
