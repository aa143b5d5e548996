"""BinaryRelax against its two lines, worked in numpy; its quantizer against brute force; float64."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from least_squares import LeastSquares, personal
from personafl.algorithms import Training, quantize
from personafl.algorithms.binaryrelax import BinaryRelaxClient, binaryrelax, on_grid
from personafl.algorithms.local import local
from personafl.algorithms.personal import Personal
from personafl.core import wire
from personafl.core.algorithm import Empty, Problem
from personafl.core.batches import Batches, Data, Steps
from personafl.core.losses import cross_entropy
from personafl.core.net import Net
from personafl.core.optim import Sgd
from personafl.testing import check_algorithm

Array = NDArray[np.float64]
F64 = torch.float64
ETA, RELAX, GROWTH, ROUND, SAMPLES = 0.3, 0.7, 1.5, 2, 7
NET = Net(lambda: nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(3)))).to(torch.device("cpu"), F64)
PROBLEM = Problem(NET, cross_entropy)


def client(**changes: object) -> BinaryRelaxClient:
    training = Training(work=Steps(steps=1, batch=None), optimizer=Sgd(lr=ETA))
    built = binaryrelax(training, relax=RELAX, growth=GROWTH, **{"bits": 1, **changes}).client  # type: ignore[arg-type]
    assert isinstance(built, BinaryRelaxClient)
    return built


def drawn() -> tuple[Array, Array, list[Array]]:
    """Inputs, one-hot targets and the weights of three layers."""
    generator = np.random.default_rng(5)
    labels = generator.integers(3, size=SAMPLES)
    return generator.normal(size=(SAMPLES, 3)), np.eye(3)[labels], [generator.normal(size=(3, 3)) for _ in range(3)]


def two_steps(inputs: Array, targets: Array, number: int) -> Data:
    rows = torch.arange(SAMPLES).expand(2, SAMPLES)
    real, key = torch.ones_like(rows, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    batches = Batches(torch.from_numpy(inputs), torch.from_numpy(targets.argmax(1)), rows, real, key)
    return Data({"local": batches}, torch.tensor(SAMPLES), torch.tensor(float(number), dtype=F64))


def by_hand(inputs: Array, targets: Array, y: list[Array], share: float) -> list[Array]:
    """Two steps: y ← y − η ∇f(x), x = y with the middle layer moved by `share` of the way to mean|y|·sign(y)."""
    for _ in range(2):
        a, b, c = y[0], y[1] + share * (np.abs(y[1]).mean() * np.sign(y[1]) - y[1]), y[2]
        scores = inputs @ a.T @ b.T @ c.T
        p = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        d = (p - targets) / SAMPLES  # of the mean cross-entropy in the scores
        gradients = [(d @ c @ b).T @ inputs, (d @ c).T @ (inputs @ a.T), d.T @ (inputs @ a.T @ b.T)]
        y = [value - ETA * gradient for value, gradient in zip(y, gradients, strict=True)]
    return y


@pytest.mark.parametrize(
    ("freeze_after", "share"),
    [(None, RELAX * GROWTH**ROUND / (RELAX * GROWTH**ROUND + 1)), (ROUND, 1.0), (ROUND + 1, 1.575 / 2.575)],
)
def test_a_round_by_hand(freeze_after: int | None, share: float) -> None:
    """In round 2 λ = 0.7·1.5² = 1.575, so x is λ/(λ+1) of the way to Q(y); from `freeze_after` on it is there."""
    inputs, targets, y = drawn()
    state = Personal({f"{layer}.weight": torch.from_numpy(value.copy()) for layer, value in enumerate(y)})
    rule = client(freeze_after=freeze_after)
    after, _ = rule.update(PROBLEM, Empty(), state, two_steps(inputs, targets, ROUND))
    for layer, expected in enumerate(by_hand(inputs, targets, y, share)):
        np.testing.assert_allclose(after.model[f"{layer}.weight"].numpy(), expected, rtol=0, atol=1e-13)


def test_the_personal_model_is_on_the_grid_and_packs_to_itself() -> None:
    _, _, y = drawn()
    state = Personal({f"{layer}.weight": torch.from_numpy(value.copy()) for layer, value in enumerate(y)})
    for bits in (1, 2, 3):
        rule = client(bits=bits)
        model = rule.models(PROBLEM, Empty(), state)["personal"]
        assert len(model["1.weight"].unique()) <= 2**bits
        assert torch.equal(model["0.weight"], state.model["0.weight"])
        [part] = rule.packed(PROBLEM, Empty(), state)["personal"]
        assert isinstance(part["1.weight"], wire.Quantized)
        assert all(torch.equal(value, model[name]) for name, value in wire.dense(part).items())


def test_one_bit_is_the_nearest_scaled_sign() -> None:
    """‖y − α·s‖² over s in {±1}^n and α: brute force over all signs, each with its best α = ⟨y, s⟩/n."""
    y = np.random.default_rng(0).normal(size=6) + 0.3
    signs = np.array(np.meshgrid(*[[-1.0, 1.0]] * 6)).reshape(6, -1).T
    best = min(((y - (y @ s) / 6 * s) ** 2).sum() for s in signs)
    x = torch.from_numpy(y)
    assert ((x - quantize.hard(x, on_grid(x, 1))) ** 2).sum().item() == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("bits", [2, 3])
def test_more_bits_are_near_the_best_scale(bits: int) -> None:
    """Against a fine search over α: the alternation may stop at a local minimum, and does within 5 % here."""
    y = np.random.default_rng(1).normal(size=400)
    levels = np.arange(-(2**bits) + 1, 2**bits, 2.0)
    errors = [(np.abs(y[:, None] - alpha * levels).min(1) ** 2).sum() for alpha in np.linspace(0.01, 1.5, 3000)]
    x = torch.from_numpy(y)
    found = ((x - quantize.hard(x, on_grid(x, bits))) ** 2).sum().item()
    assert min(errors) * (1 - 1e-9) <= found <= 1.05 * min(errors)


def test_without_bits_it_is_local_training(problem: LeastSquares) -> None:
    training = Training(work=Steps(epochs=2, batch=3), optimizer=Sgd(lr=0.1))
    alone, relaxed = (problem.simulate(build(training), 2) for build in (local, binaryrelax))
    for number in range(3):
        assert (personal(alone, number) == personal(relaxed, number)).all()


@pytest.mark.system
def test_laws_with_bits() -> None:
    net = Net(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 7), nn.Linear(7, 10)))
    training = Training(work=Steps(epochs=2, batch=4), optimizer=Sgd(lr=0.1, momentum=0.9))
    check_algorithm(binaryrelax(training, bits=2), Problem(net.to(torch.device("cpu"), F64), cross_entropy))
