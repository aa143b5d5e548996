"""FedAvg, FedProx and the server optimizers against their equations, worked in numpy."""

import numpy as np
import pytest
import torch

from least_squares import LeastSquares, shared
from personafl.algorithms import METHODS, Training
from personafl.core.batches import Steps
from personafl.core.optim import Sgd
from personafl.core.schedule import Exponential

LR, STEPS = 0.05, 3
TRAINING = Training(work=Steps(steps=STEPS, batch=None), optimizer=Sgd(lr=LR))
CLIENTS = range(3)


def mean_change(problem: LeastSquares, w: np.ndarray, weights: np.ndarray, **term: object) -> np.ndarray:
    ends = [problem.descend(i, w, LR, STEPS, **term) for i in CLIENTS]
    return sum(p * (end - w) for p, end in zip(weights, ends, strict=True))


@pytest.mark.parametrize("weights", ["examples", "uniform"])
def test_fedavg_two_rounds_by_hand(problem: LeastSquares, weights: str) -> None:
    """w ← w + Σ p_i (w_i − w), w_i three gradient steps from w; p_i = n_i/n or 1/3."""
    w = problem.start
    p = problem.weights if weights == "examples" else np.full(3, 1 / 3)
    for _ in range(2):
        w = w + mean_change(problem, w, p)
    simulation = problem.simulate(METHODS["fedavg"].build(TRAINING), 2, weights=weights)
    np.testing.assert_allclose(shared(simulation), w, atol=1e-12)


def test_fedavg_with_one_step_is_gradient_descent_on_the_pooled_data(problem: LeastSquares) -> None:
    """One full-batch step, p_i = n_i/n: the mean gradient is that of all data, so it reaches the pooled optimum."""
    one = Training(work=Steps(steps=1, batch=None), optimizer=Sgd(lr=0.3))
    simulation = problem.simulate(METHODS["fedavg"].build(one), 300)
    optimum, *_ = np.linalg.lstsq(np.concatenate(problem.x), np.concatenate(problem.y), rcond=None)
    np.testing.assert_allclose(shared(simulation), optimum, atol=1e-9)


def test_fedavg_with_several_steps_stalls_away_from_the_optimum(problem: LeastSquares) -> None:
    """Client drift: with unequal clients and τ > 1 the fixed point of FedAvg is not the optimum."""
    many = Training(work=Steps(steps=20, batch=None), optimizer=Sgd(lr=0.3))
    simulation = problem.simulate(METHODS["fedavg"].build(many), 60)
    optimum, *_ = np.linalg.lstsq(np.concatenate(problem.x), np.concatenate(problem.y), rcond=None)
    assert np.linalg.norm(shared(simulation) - optimum) > 0.05


def test_fedavg_with_one_client_is_torch_sgd(problem: LeastSquares) -> None:
    """A cohort of one client trains as torch.optim.SGD does, momentum and weight decay included."""
    sgd = Sgd(lr=LR, momentum=0.9, nesterov=True, weight_decay=0.01)
    training = Training(work=Steps(steps=4, batch=None), optimizer=sgd)
    simulation = problem.simulate(METHODS["fedavg"].build(training), 1, cohort=1)
    ends = []
    for x, y in zip(problem.x, problem.y, strict=True):
        w = torch.tensor(problem.start, requires_grad=True)
        optimizer = torch.optim.SGD([w], lr=LR, momentum=0.9, nesterov=True, weight_decay=0.01)
        for _ in range(4):
            optimizer.zero_grad()
            (0.5 * (torch.tensor(x) @ w - torch.tensor(y)) ** 2).mean().backward()
            optimizer.step()
        ends.append(w.detach().numpy())
    gaps = [np.abs(shared(simulation) - end).max() for end in ends]
    assert min(gaps) < 1e-12


def test_learning_rate_follows_the_schedule(problem: LeastSquares) -> None:
    """Round t uses lr·0.5^t."""
    sgd = Sgd(lr=LR, schedule=Exponential(rate=0.5))
    simulation = problem.simulate(METHODS["fedavg"].build(Training(work=Steps(steps=1, batch=None), optimizer=sgd)), 3)
    w = problem.start
    for t in range(3):
        w = w - LR * 0.5**t * sum(p * problem.gradient(i, w) for i, p in enumerate(problem.weights))
    np.testing.assert_allclose(shared(simulation), w, atol=1e-12)


def test_fedprox_by_hand_and_its_limits(problem: LeastSquares) -> None:
    """Local steps on f_i + (μ/2)‖w − w_t‖²; μ = 0 is FedAvg to the bit."""
    fedprox = METHODS["fedprox"].build
    w = problem.start
    for _ in range(2):
        w = w + mean_change(problem, w, problem.weights, anchor=w, pull=0.7)
    np.testing.assert_allclose(shared(problem.simulate(fedprox(TRAINING, proximal=0.7), 2)), w, atol=1e-12)
    plain = shared(problem.simulate(METHODS["fedavg"].build(TRAINING), 2))
    assert np.array_equal(shared(problem.simulate(fedprox(TRAINING, proximal=0.0), 2)), plain)


def test_fedprox_solves_the_proximal_problem(problem: LeastSquares) -> None:
    """With many local steps w_i = (H_i + μI)⁻¹(X_iᵀy_i/n_i + μ w_t): the closed form of the proximal problem."""
    exact = Training(work=Steps(steps=400, batch=None), optimizer=Sgd(lr=0.2, momentum=0.8))
    simulation = problem.simulate(METHODS["fedprox"].build(exact, proximal=0.5), 1)
    w = 0.0
    for i in CLIENTS:
        left = problem.hessian(i) + 0.5 * np.eye(4)
        right = problem.x[i].T @ problem.y[i] / len(problem.y[i]) + 0.5 * problem.start
        w = w + problem.weights[i] * np.linalg.solve(left, right)
    np.testing.assert_allclose(shared(simulation), w, atol=1e-9)


def test_server_momentum_by_hand(problem: LeastSquares) -> None:
    """b ← β·b + Δ, w ← w + η·b."""
    algorithm = METHODS["fedavgm"].build(TRAINING, server_lr=0.5, server_momentum=0.8)
    w, b = problem.start, 0.0
    for _ in range(3):
        b = 0.8 * b + mean_change(problem, w, problem.weights)
        w = w + 0.5 * b
    np.testing.assert_allclose(shared(problem.simulate(algorithm, 3)), w, atol=1e-12)


def adaptive(problem: LeastSquares, rounds: int, second: object, start: float, b1: float, eps: float, b2: float | None):
    """Reddi et al., Algorithm 2, with η = 0.1; b2 given: Adam's bias correction."""
    w, m, v = problem.start, np.zeros(4), np.full(4, start)
    for t in range(1, rounds + 1):
        change = mean_change(problem, w, problem.weights)
        m = b1 * m + (1 - b1) * change
        v = second(v, change**2)
        scaled = (m / (1 - b1**t), v / (1 - b2**t)) if b2 is not None else (m, v)
        w = w + 0.1 * scaled[0] / (np.sqrt(scaled[1]) + eps)
    return w


def test_adaptive_servers_by_hand(problem: LeastSquares) -> None:
    """FedAdam, FedYogi and FedAdagrad over four rounds."""
    expected = {
        "fedadam": adaptive(problem, 4, lambda v, s: 0.95 * v + 0.05 * s, 0.0, 0.9, 1e-6, 0.95),
        "fedyogi": adaptive(problem, 4, lambda v, s: v - 0.05 * s * np.sign(v - s), 1e-4, 0.9, 1e-2, None),
        "fedadagrad": adaptive(problem, 4, lambda v, s: v + s, 1e-4, 0.3, 1e-2, None),
    }
    options = {
        "fedadam": {"server_lr": 0.1, "b1": 0.9, "b2": 0.95, "eps": 1e-6},
        "fedyogi": {"server_lr": 0.1, "b1": 0.9, "b2": 0.95, "eps": 1e-2},
        "fedadagrad": {"server_lr": 0.1, "b1": 0.3, "eps": 1e-2},
    }
    for name, w in expected.items():
        simulation = problem.simulate(METHODS[name].build(TRAINING, **options[name]), 4)
        np.testing.assert_allclose(shared(simulation), w, atol=1e-12, err_msg=name)
