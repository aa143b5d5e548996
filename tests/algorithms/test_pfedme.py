"""pFedMe against Algorithm 1 of Dinh et al. 2020, worked in numpy, and the Moreau envelope it descends on."""

from pathlib import Path

import numpy as np

from least_squares import LeastSquares, personal, shared
from personafl.algorithms import METHODS, Training
from personafl.core.batches import Steps
from personafl.core.optim import Sgd
from personafl.runs.scoring import tune
from personafl.storage.store import Store

LR, STEPS, INNER = 0.05, 3, 4
PULL, OUTER = 2.0, 0.15
TRAINING = Training(work=Steps(steps=STEPS, batch=None), optimizer=Sgd(lr=LR))
EXACT = Training(work=Steps(steps=1, batch=None), optimizer=Sgd(lr=0.2))  # with many inner steps
CLIENTS = range(3)
pfedme = METHODS["pfedme"].build


def local(problem: LeastSquares, client: int, w: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """w_i and θ of a client's round, each minibatch being all its data."""
    theta = w
    for _ in range(steps):
        theta = problem.descend(client, theta, LR, INNER, anchor=w, pull=PULL)
        w = w - OUTER * PULL * (w - theta)
    return w, theta


def proximal(problem: LeastSquares, client: int, w: np.ndarray) -> np.ndarray:
    """argmin_θ f_i(θ) + (λ/2)‖θ − w‖² = (H_i + λI)⁻¹(X_iᵀy_i/n_i + λw)."""
    right = problem.x[client].T @ problem.y[client] / len(problem.y[client]) + PULL * w
    return np.linalg.solve(problem.hessian(client) + PULL * np.eye(4), right)


def envelope(problem: LeastSquares, client: int, w: np.ndarray) -> float:
    """F_i(w) = f_i(θ̂) + (λ/2)‖θ̂ − w‖²."""
    theta = proximal(problem, client, w)
    loss = 0.5 * np.mean((problem.x[client] @ theta - problem.y[client]) ** 2)
    return float(loss + 0.5 * PULL * np.sum((theta - w) ** 2))


def test_two_rounds_by_hand(problem: LeastSquares) -> None:
    """θ from w_t and then from minibatch to minibatch; w_i ← w_i − ηλ(w_i − θ); w ← (1 − β)w + βΣp_i w_i."""
    algorithm = pfedme(TRAINING, pull=PULL, inner_steps=INNER, outer_lr=OUTER, server=Sgd(lr=0.7))
    simulation = problem.simulate(algorithm, 2)
    w = problem.start
    for _ in range(2):
        ends = [local(problem, i, w, STEPS) for i in CLIENTS]
        w = 0.3 * w + 0.7 * sum(p * end[0] for p, end in zip(problem.weights, ends, strict=True))
    np.testing.assert_allclose(shared(simulation), w, atol=1e-12)
    for i in CLIENTS:
        np.testing.assert_allclose(personal(simulation, i), ends[i][1], atol=1e-12)


def test_the_personal_model_is_the_proximal_point(problem: LeastSquares) -> None:
    """With many inner steps θ is the minimum of f_i + (λ/2)‖θ − w‖² in closed form: the penalty acts on θ."""
    simulation = problem.simulate(pfedme(EXACT, pull=PULL, inner_steps=80, outer_lr=OUTER), 1)
    for i in CLIENTS:
        np.testing.assert_allclose(personal(simulation, i), proximal(problem, i, problem.start), atol=1e-12)


def test_a_step_is_one_on_the_envelope(problem: LeastSquares) -> None:
    """λ(w − θ̂) = ∇F_i(w): a client alone moves w by −η times the central differences of F_i."""
    for seed in CLIENTS:
        simulation = problem.simulate(pfedme(EXACT, pull=PULL, inner_steps=80, outer_lr=OUTER), 1, cohort=1, seed=seed)
        (client,) = [i for i in CLIENTS if i in simulation.store]
        numerical = np.array(
            [
                (envelope(problem, client, problem.start + h) - envelope(problem, client, problem.start - h)) / 2e-4
                for h in 1e-4 * np.eye(4)
            ]
        )
        np.testing.assert_allclose((problem.start - shared(simulation)) / OUTER, numerical, atol=1e-8)


def test_it_reaches_the_optimum_of_the_envelopes(problem: LeastSquares) -> None:
    """Σ p_i λ(w − A_i(b_i + λw)) = 0 with A_i = (H_i + λI)⁻¹, b_i = X_iᵀy_i/n_i; θ_i is the proximal point there."""
    simulation = problem.simulate(pfedme(EXACT, pull=PULL, inner_steps=40, outer_lr=0.9), 60)
    left, right = np.zeros((4, 4)), np.zeros(4)
    for i, p in enumerate(problem.weights):
        inverse = np.linalg.inv(problem.hessian(i) + PULL * np.eye(4))
        left += p * (np.eye(4) - PULL * inverse)
        right += p * inverse @ (problem.x[i].T @ problem.y[i] / len(problem.y[i]))
    optimum = np.linalg.solve(left, right)
    np.testing.assert_allclose(shared(simulation), optimum, atol=1e-8)
    for i in CLIENTS:
        np.testing.assert_allclose(personal(simulation, i), proximal(problem, i, optimum), atol=1e-8)


def test_the_penalty_is_on_the_client_s_own_w(problem: LeastSquares) -> None:
    """After several minibatches θ is the proximal point of the moved w_i, not of w_t."""
    training = Training(work=Steps(steps=2, batch=None), optimizer=Sgd(lr=0.2))
    simulation = problem.simulate(pfedme(training, pull=PULL, inner_steps=80, outer_lr=OUTER), 1)
    for i in CLIENTS:
        first = proximal(problem, i, problem.start)
        moved = problem.start - OUTER * PULL * (problem.start - first)
        np.testing.assert_allclose(personal(simulation, i), proximal(problem, i, moved), atol=1e-12)


def test_fine_tuning_is_a_longer_round_from_the_shared_model(problem: LeastSquares, tmp_path: Path) -> None:
    """tune_epochs minibatches of all data from w_T, whether the client has a θ_i already or not; w_T stays."""
    algorithm = pfedme(TRAINING, pull=PULL, inner_steps=INNER, outer_lr=OUTER, tune_epochs=6)
    simulation = problem.simulate(algorithm, 1, cohort=2)
    assert len(simulation.store) == 2
    w = shared(simulation).copy()
    store = Store(tmp_path / "tuned", 2**20)
    tune(simulation, store, simulation.federation.data.seen, 1)
    for i in CLIENTS:
        np.testing.assert_allclose(store.get(i)["model/weight"][0], local(problem, i, w, 6)[1], atol=1e-12)
    assert np.array_equal(shared(simulation), w)
