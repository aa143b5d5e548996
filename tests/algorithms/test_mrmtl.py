"""MR-MTL against its equations, worked in numpy, and its reductions."""

import numpy as np

from least_squares import LeastSquares, personal, shared
from personafl.algorithms import METHODS, Training
from personafl.core.batches import Steps
from personafl.core.optim import Sgd

LR, STEPS = 0.05, 3
TRAINING = Training(work=Steps(steps=STEPS, batch=None), optimizer=Sgd(lr=LR))
CLIENTS = range(3)


def test_two_rounds_by_hand(problem: LeastSquares) -> None:
    """w_i ← w_i − η(∇f_i(w_i) + λ(w_i − w̄)); w̄ is the mean of all w_i by samples."""
    simulation = problem.simulate(METHODS["mrmtl"].build(TRAINING, pull=0.6), 2)
    mean, own = problem.start, [problem.start] * 3
    for _ in range(2):
        own = [problem.descend(i, own[i], LR, STEPS, anchor=mean, pull=0.6) for i in CLIENTS]
        mean = sum(p * w for p, w in zip(problem.weights, own, strict=True))
    np.testing.assert_allclose(shared(simulation), mean, atol=1e-12)
    for i in CLIENTS:
        np.testing.assert_allclose(personal(simulation, i), own[i], atol=1e-12)


def test_without_a_pull_it_is_local_training(problem: LeastSquares) -> None:
    """From the common start, which is that of Local here."""
    simulations = [
        problem.simulate(METHODS[name].build(TRAINING, **options), 3)
        for name, options in (("mrmtl", {"pull": 0.0}), ("local", {}))
    ]
    for i in CLIENTS:
        one, other = (personal(simulation, i) for simulation in simulations)
        np.testing.assert_allclose(one, other, atol=1e-12)


def test_trained_to_the_end_each_round_solves_the_penalised_problem(problem: LeastSquares) -> None:
    """argmin f_i(w) + (λ/2)‖w − w̄‖² = (H_i + λI)⁻¹(X_iᵀy_i/n_i + λw̄), from whatever w_i; w̄ is the last round's mean."""
    exact = Training(work=Steps(steps=300, batch=None), optimizer=Sgd(lr=0.2, momentum=0.8))
    simulation, mean, own = problem.simulate(METHODS["mrmtl"].build(exact, pull=0.4), 2), problem.start, []
    for _ in range(2):
        own = [
            np.linalg.solve(
                problem.hessian(i) + 0.4 * np.eye(4), problem.x[i].T @ problem.y[i] / len(problem.y[i]) + 0.4 * mean
            )
            for i in CLIENTS
        ]
        mean = sum(p * w for p, w in zip(problem.weights, own, strict=True))
    np.testing.assert_allclose(shared(simulation), mean, atol=1e-8)
    for i in CLIENTS:
        np.testing.assert_allclose(personal(simulation, i), own[i], atol=1e-8)
