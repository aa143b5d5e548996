"""A small problem that methods with a body and a linear head are worked on by hand: 5 samples, 3 inputs, 4 classes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from personafl.algorithms.training import Training
from personafl.core.algorithm import Problem
from personafl.core.batches import Batches, Data, Steps
from personafl.core.losses import cross_entropy
from personafl.core.net import Net
from personafl.core.optim import Sgd
from personafl.core.shape import DataShape
from personafl.core.split import Split
from personafl.core.tree import Params

LR = 0.3
TRAINING = Training(work=Steps(steps=1, batch=None), optimizer=Sgd(lr=LR))
NET = Net(nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 4)).double())
PROBLEM = Problem(NET, cross_entropy, split=Split(("1.*",)), data=DataShape(input_shape=(3,), classes=4))
TARGETS = np.array([0, 2, 2, 2, 1])  # class 3 is not there
INPUTS = np.random.default_rng(0).normal(size=(5, 3))
X, TRUTH = torch.from_numpy(INPUTS), np.eye(4)[TARGETS]
Arrays = dict[str, np.ndarray]


def full_batches(phases: dict[str, int], rows: tuple[int, ...] = (0, 1, 2, 3, 4)) -> Data:
    """Return phases of so many steps, each with all of a client's samples."""
    made = {}
    for name, steps in phases.items():
        index = torch.tensor(rows).repeat(steps, 1)
        made[name] = Batches(
            X, torch.from_numpy(TARGETS), index, torch.ones_like(index, dtype=torch.bool), torch.zeros(steps).long()
        )
    return Data(made, torch.tensor(len(rows)), torch.tensor(0.0))


def other(seed: int) -> Params:
    """Return parameters of the network."""
    drawn = np.random.default_rng(seed)
    return {name: torch.from_numpy(drawn.normal(size=tuple(shape))) for name, shape in NET.shapes.items()}


def arrays(params: Params) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (B, W, b): the body [2, 3], the head's weight [4, 2] and bias [4]."""
    return tuple(params[name].numpy().copy() for name in ("0.weight", "1.weight", "1.bias"))  # type: ignore[return-value]


def softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def slopes(body: np.ndarray, weight: np.ndarray, bias: np.ndarray, rows: tuple[int, ...] = (0, 1, 2, 3, 4)) -> Arrays:
    """Return the gradients of f: with z = xBᵀ and δ = (softmax(zWᵀ + b) − 1_y)/n they are δᵀz, Σδ and (δW)ᵀx."""
    x = INPUTS[list(rows)]
    z = x @ body.T
    delta = (softmax(z @ weight.T + bias) - TRUTH[list(rows)]) / len(rows)
    return {"0.weight": (delta @ weight).T @ x, "1.weight": delta.T @ z, "1.bias": delta.sum(0)}


def normed(x: np.ndarray, scale: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """Return a layer norm over the last axis."""
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale + shift


def relu(x: np.ndarray) -> np.ndarray:
    return np.where(x.real > 0, x, 0)


def risks(scores: np.ndarray) -> np.ndarray:
    """Return −log softmax at the truth, [samples]."""
    return np.log(np.exp(scores).sum(1)) - (scores * TRUTH).sum(1)


def stepped(loss: Callable[[Arrays], np.ndarray], values: Arrays, rate: float = LR) -> Arrays:
    """Return values − rate · gradient: each derivative is Im f(x + ih)/h, exact to rounding for h as small as this."""
    after = {}
    for name, value in values.items():
        slope = np.zeros_like(value)
        for at in np.ndindex(value.shape):
            moved = value.astype(complex)
            moved[at] += 1e-30j
            slope[at] = loss(values | {name: moved}).imag / 1e-30
        after[name] = value - rate * slope
    return after


def drawn(seed: int, **shapes: tuple[int, ...]) -> Arrays:
    generator = np.random.default_rng(seed)
    return {name: generator.normal(size=shape) for name, shape in shapes.items()}


def near(found: torch.Tensor, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-13)
