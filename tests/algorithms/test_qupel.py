"""Federated Mutual Learning and QuPeL against their equations, worked in numpy; float64."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from personafl.algorithms.averaging import Model
from personafl.algorithms.fml import fml
from personafl.algorithms.quped import Centered
from personafl.algorithms.qupel import qupel
from personafl.core import rng
from personafl.core.net import Net
from personafl.errors import BadInput
from quped_by_hand import (
    ETA,
    F64,
    HALVED,
    NAMES,
    PROBLEM,
    ROUND,
    SHARE,
    SHARED,
    data_of,
    drawn,
    plain,
    scores,
    softmax,
    taught,
    tensors,
)


def test_mutual_learning_by_hand() -> None:
    """FML: x as in QuPeD; then w_i descends on (1−λ_p) f(w) + λ_p KL(x ‖ w), at the new x; both as training says."""
    inputs, targets, x, w = drawn()
    factor, decay = 0.5**ROUND, 0.2
    gradient = taught(x, softmax(scores(w, inputs)), inputs, targets)
    new = {name: x[name] - ETA * factor * (gradient[name] + decay * x[name]) for name in NAMES}
    gradient = taught(w, softmax(scores(new, inputs)), inputs, targets)
    rule = fml(HALVED, distillation=SHARE, shared_lr=SHARED).client
    data = data_of(inputs, targets)
    after, upload = rule.update(PROBLEM, Model(tensors(w)), Centered(tensors(x), {}), data)
    for name in NAMES:
        np.testing.assert_allclose(after.model[name].numpy(), new[name], atol=1e-12)
        step = -SHARED * factor * (gradient[name] + decay * w[name])
        np.testing.assert_allclose(upload.change[name].numpy(), step, atol=1e-12)


def test_qupel_by_hand() -> None:
    """x ← x − η₁(∇f(x) + λ_p(x − w) + decay·x), w_i ← w_i − η₃λ_p(w_i − x) with a constant η₃.

    With other architectures it is refused.
    """
    inputs, targets, x, w = drawn()
    gradient = plain(x, inputs, targets)
    eta = ETA * 0.5**ROUND
    new = {name: x[name] - eta * (gradient[name] + SHARE * (x[name] - w[name]) + 0.2 * x[name]) for name in NAMES}
    rule = qupel(HALVED, proximity=SHARE, shared_lr=SHARED).client
    after, upload = rule.update(PROBLEM, Model(tensors(w)), Centered(tensors(x), {}), data_of(inputs, targets))
    for name in NAMES:
        np.testing.assert_allclose(after.model[name].numpy(), new[name], atol=1e-12)
        np.testing.assert_allclose(upload.change[name].numpy(), -SHARED * SHARE * (w[name] - new[name]), atol=1e-12)
    other = dataclasses.replace(PROBLEM, local_net=Net(nn.Linear(3, 3)).to(torch.device("cpu"), F64))
    with pytest.raises(BadInput, match="qupel compares weights"):
        rule.init(other, Model(tensors(w)), rng.generator(0))
