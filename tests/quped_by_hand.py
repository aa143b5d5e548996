"""One step of QuPeD and its relatives, worked in numpy; float64."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from personafl.algorithms import Training
from personafl.algorithms.quped import QupedClient, quped
from personafl.core.algorithm import Problem
from personafl.core.batches import Batches, Data, Steps
from personafl.core.losses import cross_entropy
from personafl.core.net import Net
from personafl.core.optim import Sgd
from personafl.core.schedule import Exponential

Array = NDArray[np.float64]
F64 = torch.float64
ETA, CENTER, SHARED, SHARE, PENALTY, ROUND, SAMPLES = 0.3, 0.2, 0.4, 0.35, 0.05, 3, 7
DEEP = Net(lambda: nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(3)))).to(torch.device("cpu"), F64)
PROBLEM = Problem(DEEP, cross_entropy)
NAMES = ("0.weight", "1.weight", "2.weight")


TRAINING = Training(work=Steps(steps=1, batch=None), optimizer=Sgd(lr=ETA))
HALVED = Training(
    work=Steps(steps=1, batch=None), optimizer=Sgd(lr=ETA, weight_decay=0.2, schedule=Exponential(rate=0.5))
)


def client(training: Training = TRAINING, **changes: object) -> QupedClient:
    settings = {"bits": 1, "center_lr": CENTER, **changes}
    built = quped(training, distillation=SHARE, penalty=PENALTY, shared_lr=SHARED, **settings).client  # type: ignore[arg-type]
    assert isinstance(built, QupedClient)
    return built


def drawn() -> tuple[Array, Array, dict[str, Array], dict[str, Array]]:
    """Inputs, one-hot targets, a personal and a shared model."""
    generator = np.random.default_rng(2)
    labels = generator.integers(3, size=SAMPLES)
    x, w = ({name: generator.normal(size=(3, 3)) for name in NAMES} for _ in range(2))
    return generator.normal(size=(SAMPLES, 3)), np.eye(3)[labels], x, w


def data_of(inputs: Array, targets: Array, steps: int = 1, number: int = ROUND) -> Data:
    rows = torch.arange(SAMPLES).expand(steps, SAMPLES)
    batches = Batches(
        torch.from_numpy(inputs),
        torch.from_numpy(targets.argmax(1)),
        rows,
        torch.ones_like(rows, dtype=torch.bool),
        torch.zeros(steps, dtype=torch.int64),
    )
    return Data({"local": batches, "tune": batches}, torch.tensor(SAMPLES), torch.tensor(float(number), dtype=F64))


def tensors(model: dict[str, Array]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(value.copy()) for name, value in model.items()}


def scores(model: dict[str, Array], inputs: Array) -> Array:
    return inputs @ model["0.weight"].T @ model["1.weight"].T @ model["2.weight"].T


def softmax(s: Array) -> Array:
    e = np.exp(s - s.max(1, keepdims=True))
    p: Array = e / e.sum(1, keepdims=True)
    return p


def backward(model: dict[str, Array], inputs: Array, g: Array) -> dict[str, Array]:
    """Gradients of a linear network of three layers, given that of the scores."""
    first, second, third = (model[name] for name in NAMES)
    h1 = inputs @ first.T
    return {
        "2.weight": g.T @ (h1 @ second.T),
        "1.weight": (g @ third).T @ h1,
        "0.weight": (g @ third @ second).T @ inputs,
    }


def taught(model: dict[str, Array], teacher: Array, inputs: Array, targets: Array) -> dict[str, Array]:
    """∇ of (1−λ_p) f + λ_p KL(p ‖ q): with q = softmax(s), ∂f/∂s = q − y and ∂KL/∂s = q − p."""
    q = softmax(scores(model, inputs))
    return backward(model, inputs, ((1 - SHARE) * (q - targets) + SHARE * (q - teacher)) / len(inputs))


def by_hand(
    inputs: Array,
    targets: Array,
    x: dict[str, Array],
    c: Array,
    w: dict[str, Array],
    *,
    scale: str = "mean",
    clip: float = np.inf,
    penalty: float = PENALTY * ROUND,
    factor: float = 1.0,
    decay: float = 0.0,
    shared_decay: float = 0.0,
) -> tuple[dict[str, Array], Array, dict[str, Array]]:
    """One iteration, lines 10–14, with the hard quantizer on the middle layer.

    `scale` says how η₂ goes with a center's members, `clip` limits ∇_c, `factor` is the schedule's of η₁ and η₃,
    `decay` is added to the gradient of x.
    """
    eta = ETA * factor
    teacher = softmax(scores(w, inputs))
    gradient = taught(x, teacher, inputs, targets)
    quantized = {**x, "1.weight": c[np.abs(x["1.weight"][..., None] - c).argmin(-1)]}
    through = taught(quantized, teacher, inputs, targets)  # nothing for the quantized weights themselves
    gradient |= {name: gradient[name] + through[name] for name in ("0.weight", "2.weight")}
    x = {name: x[name] - eta * (gradient[name] + decay * x[name]) for name in NAMES}
    middle = x["1.weight"]
    nearest = np.abs(middle[..., None] - c).argmin(-1)
    offset = middle - c[nearest]
    width = penalty * eta / 2
    x["1.weight"] = np.where(np.abs(offset) <= width, c[nearest], middle - np.sign(offset) * width)

    members = np.abs(x["1.weight"][..., None] - c).argmin(-1)
    per_weight = taught({**x, "1.weight": c[members]}, teacher, inputs, targets)["1.weight"]
    after = []
    for j in range(len(c)):
        own = members == j
        above, below = ((side & own).sum() for side in (x["1.weight"] > c[j], x["1.weight"] < c[j]))
        slope = np.clip(per_weight[own].sum(), -clip, clip)
        rate = CENTER * {"mean": 1 / own.sum(), "sqrt": 1 / np.sqrt(own.sum() * len(c)), "sum": 1.0}[scale]
        after.append(c[j] - rate * slope + penalty * rate / 2 * (above - below))
    c = np.sort(after)

    members = np.abs(x["1.weight"][..., None] - c).argmin(-1)
    for_w = np.zeros_like(inputs)
    for model in (x, {**x, "1.weight": c[members]}):
        q = softmax(scores(model, inputs))
        ratio = np.log(teacher) - np.log(q)
        for_w += teacher * (ratio - (teacher * ratio).sum(1, keepdims=True)) / len(inputs)  # ∂KL/∂(teacher's scores)
    gradient = backward(w, inputs, for_w)
    return x, c, {name: w[name] - SHARED * factor * (SHARE * gradient[name] + shared_decay * w[name]) for name in NAMES}


def plain(model: dict[str, Array], inputs: Array, targets: Array) -> dict[str, Array]:
    """∇f."""
    return backward(model, inputs, (softmax(scores(model, inputs)) - targets) / len(inputs))
