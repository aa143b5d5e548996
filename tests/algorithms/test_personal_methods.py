"""Local, Finetune and Ditto against their equations, worked in numpy, and their reductions to each other."""

from pathlib import Path

import numpy as np

from least_squares import LeastSquares, personal, shared
from personafl.algorithms import METHODS, Training
from personafl.core.batches import Steps
from personafl.core.optim import Sgd
from personafl.runs.scoring import score, tune
from personafl.storage.store import Store

LR, STEPS = 0.05, 3
TRAINING = Training(work=Steps(steps=STEPS, batch=None), optimizer=Sgd(lr=LR))
EXACT = Training(work=Steps(steps=400, batch=None), optimizer=Sgd(lr=0.2, momentum=0.8))
CLIENTS = range(3)


def test_local_by_hand_and_at_its_optimum(problem: LeastSquares) -> None:
    """x_i ← τ steps on f_i; trained to the end it is client i's own least-squares solution."""
    simulation = problem.simulate(METHODS["local"].build(TRAINING), 2)
    for i in CLIENTS:
        expected = problem.descend(i, problem.start, LR, 2 * STEPS)
        np.testing.assert_allclose(personal(simulation, i), expected, atol=1e-12)
    trained = problem.simulate(METHODS["local"].build(EXACT), 3)
    for i in (1, 2):  # client 0 has fewer samples than unknowns
        optimum, *_ = np.linalg.lstsq(problem.x[i], problem.y[i], rcond=None)
        np.testing.assert_allclose(personal(trained, i), optimum, atol=1e-8)


def test_local_sends_no_model(problem: LeastSquares) -> None:
    simulation = problem.simulate(METHODS["local"].build(TRAINING), 0)
    done = simulation.step(0)
    assert done.bytes_down == 0
    assert done.bytes_up < 3 * 100  # the training loss and a header


def test_ditto_two_rounds_by_hand(problem: LeastSquares) -> None:
    """v_i ← v_i − η(∇f_i(v_i) + λ(v_i − w_t)), w_t as received; the shared path is FedAvg."""
    simulation = problem.simulate(METHODS["ditto"].build(TRAINING, pull=0.6, personal_lr=0.02), 2)
    w, v = problem.start, [problem.start] * 3
    for _ in range(2):
        v = [problem.descend(i, v[i], 0.02, STEPS, anchor=w, pull=0.6) for i in CLIENTS]
        ends = [problem.descend(i, w, LR, STEPS) for i in CLIENTS]
        w = sum(p * end for p, end in zip(problem.weights, ends, strict=True))
    np.testing.assert_allclose(shared(simulation), w, atol=1e-12)
    for i in CLIENTS:
        np.testing.assert_allclose(personal(simulation, i), v[i], atol=1e-12)


def test_ditto_reaches_the_regularised_optimum(problem: LeastSquares) -> None:
    """argmin f_i(v) + (λ/2)‖v − w‖² = (H_i + λI)⁻¹(X_iᵀy_i/n_i + λw)."""
    simulation = problem.simulate(METHODS["ditto"].build(EXACT, pull=0.4), 1)
    for i in CLIENTS:
        left = problem.hessian(i) + 0.4 * np.eye(4)
        right = problem.x[i].T @ problem.y[i] / len(problem.y[i]) + 0.4 * problem.start
        np.testing.assert_allclose(personal(simulation, i), np.linalg.solve(left, right), atol=1e-9)


def test_reductions(problem: LeastSquares) -> None:
    """Ditto's and Finetune's shared paths are FedAvg to the bit; Ditto without pull is Local from w_0."""
    fedavg = shared(problem.simulate(METHODS["fedavg"].build(TRAINING), 3))
    assert np.array_equal(shared(problem.simulate(METHODS["finetune"].build(TRAINING), 3)), fedavg)
    ditto = problem.simulate(METHODS["ditto"].build(TRAINING, pull=0.0), 3)
    assert np.array_equal(shared(ditto), fedavg)
    local = problem.simulate(METHODS["local"].build(TRAINING), 3)
    for i in CLIENTS:
        np.testing.assert_allclose(personal(ditto, i), personal(local, i), atol=1e-13)


def test_ditto_with_a_strong_pull_stays_at_the_shared_model(problem: LeastSquares) -> None:
    """λ → ∞: v_i → w_t (with η small enough to be stable, η(H + λ) < 2)."""
    training = Training(work=Steps(steps=300, batch=None), optimizer=Sgd(lr=1e-4))
    simulation = problem.simulate(METHODS["ditto"].build(training, pull=1e4), 1)
    for i in CLIENTS:
        np.testing.assert_allclose(personal(simulation, i), problem.start, atol=1e-3)


def test_finetune_personalizes_from_the_last_shared_model(problem: LeastSquares, tmp_path: Path) -> None:
    """Scoring a Finetune client means τ' steps on f_i from w_T: its loss is f_i there."""
    algorithm = METHODS["finetune"].build(
        Training(work=Steps(steps=STEPS, batch=None), optimizer=Sgd(lr=LR)), tune_epochs=4, tune_lr=0.1
    )
    simulation = problem.simulate(algorithm, 2)
    data = simulation.federation.data
    tuned = Store(tmp_path / "tuned", 2**20)
    tune(simulation, tuned, data.seen, 2)
    scores = score(simulation, tuned, data.seen, {"train": data.train}, blends=False).scores
    for i in CLIENTS:
        tuned = problem.descend(i, shared(simulation), 0.1, 4)
        loss = 0.5 * np.mean((problem.x[i] @ tuned - problem.y[i]) ** 2)
        np.testing.assert_allclose(scores["personal", "train"].loss[i], loss, rtol=1e-6)
    assert len(simulation.store) == 0  # nothing is kept between rounds
