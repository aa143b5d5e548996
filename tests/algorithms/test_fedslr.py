"""FedSLR against Algorithms 1–3, its facts and theorems, and a convex solver; float64."""

import itertools
import sys
from pathlib import Path

import cvxpy
import numpy as np
import pytest
import torch
from torch import nn
from torch.func import grad

from matrix_least_squares import (
    CLIENTS,
    SIZES,
    Matrix,
    MatrixLeastSquares,
    factored,
    kept,
    matrix_least_squares,
    model,
    soft,
    svt,
)
from personafl.algorithms import METHODS, Training
from personafl.algorithms.averaging import Change
from personafl.algorithms.fedslr import SlrServer, fedslr
from personafl.core import prox, tree, wire
from personafl.core.algorithm import Algorithm, Problem, packed, reduce
from personafl.core.batches import Steps
from personafl.core.losses import cross_entropy
from personafl.core.net import Net
from personafl.core.optim import Sgd
from personafl.core.schedule import Exponential
from personafl.errors import Diverged
from personafl.simulate.cohort import draw_cohort
from personafl.testing import check_algorithm, make_case
from tiers import tiered

LR, STEPS, ETA, RANK, SPARSE = 0.05, 4, 0.7, 0.4, 0.3
SGD = Sgd(lr=LR)
ZERO, ONE = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
TRAINING = Training(work=Steps(steps=STEPS, batch=None), optimizer=SGD)


def exact(problem: MatrixLeastSquares) -> Training:
    """Phase I to 1e-13: with η_g = 1/(2L) the local problem has curvature 2L to 3L, so a step of 1/(3L) cuts by 3."""
    return Training(work=Steps(steps=28, batch=None), optimizer=Sgd(lr=1 / (3 * problem.smoothness())))


@pytest.fixture
def matrices(tmp_path: Path) -> MatrixLeastSquares:
    return matrix_least_squares(tmp_path)


def algorithm(**options: object) -> Algorithm:
    settings = {"rank_penalty": RANK, "sparsity": SPARSE, "step": ETA, **options}
    return fedslr(TRAINING, **settings)  # type: ignore[arg-type]


def cohorts(size: int, rounds: int) -> list[list[int]]:
    return [draw_cohort(np.arange(len(SIZES)), size, "exact", 0, t).tolist() for t in range(rounds)]


def algorithm_2(
    problem: MatrixLeastSquares, cohort: int, rounds: int, weights: np.ndarray
) -> tuple[list[Matrix], list[Matrix], list[Matrix]]:
    """The paper's Algorithm 2 (errata E9, E10 mended): the server tracks every γ_i. With all clients: Algorithm 1.

    Phase I by STEPS full-batch gradient steps, phase II by one pass of one full batch. Returns the w_t, p_i and γ_i.
    """
    w = problem.start
    p, gamma = [np.zeros_like(w) for _ in CLIENTS], [np.zeros_like(w) for _ in CLIENTS]
    models = []
    for members in cohorts(cohort, rounds):
        ends = {}
        for i in members:
            end = w
            for _ in range(STEPS):
                end = end - LR * (problem.gradient(i, end) - gamma[i] + (end - w) / ETA)
            gamma[i] = gamma[i] + (w - end) / ETA
            p[i] = soft(p[i] - LR * problem.gradient(i, w + p[i]), SPARSE * LR)
            ends[i] = end
        mean = sum(weights[i] * ends[i] for i in members) / sum(weights[i] for i in members)
        w = svt(mean - ETA * sum(weights[i] * gamma[i] for i in CLIENTS) / weights.sum(), RANK * ETA)
        models.append(w)
    return models, p, gamma


@pytest.mark.parametrize("weights", ["uniform", "examples"])
@pytest.mark.parametrize("cohort", [4, 3, 1])
def test_every_iterate_is_that_of_tracking_all_duals(matrices: MatrixLeastSquares, cohort: int, weights: str) -> None:
    """Algorithm 3, which keeps γ̄ alone, gives the iterates of Algorithms 1 (all clients) and 2 (some)."""
    p = np.ones(len(SIZES)) if weights == "uniform" else np.array(SIZES, dtype=float)
    models, own, duals = algorithm_2(matrices, cohort, 12, p)
    simulation = matrices.simulate(algorithm(), 0, cohort=cohort, weights=weights)
    for number, expected in enumerate(models):
        simulation.step(number)
        np.testing.assert_allclose(model(simulation), expected, atol=1e-11)
    taken = {i for members in cohorts(cohort, 12) for i in members}
    for i in taken:
        np.testing.assert_allclose(kept(simulation, i, "own/weight"), own[i], atol=1e-11)
        np.testing.assert_allclose(kept(simulation, i, "solver/dual/weight"), duals[i], atol=1e-11)
    mean = sum(p[i] * duals[i] for i in CLIENTS) / p.sum()
    np.testing.assert_allclose(simulation.server.solver.dual["weight"].numpy(), mean, atol=1e-11)


def test_the_dual_is_the_gradient_at_an_exact_solution(matrices: MatrixLeastSquares) -> None:
    """Fact 2: γ_{i,t+1} = ∇f_i(w_{i,t+1}), with w_{i,t+1} = w_t − η_g(γ_{i,t+1} − γ_{i,t})."""
    step = 1 / (2 * matrices.smoothness())
    simulation = matrices.simulate(fedslr(exact(matrices), rank_penalty=RANK, step=step), 0)
    before = [np.zeros_like(matrices.start) for _ in CLIENTS]
    for number in range(3):
        w = model(simulation)
        simulation.step(number)
        for i in CLIENTS:
            gamma = kept(simulation, i, "solver/dual/weight")
            solution = w - step * (gamma - before[i])
            np.testing.assert_allclose(gamma, matrices.gradient(i, solution), atol=1e-11)
            before[i] = gamma


def convex_solution(problem: MatrixLeastSquares, penalty: str, weights: np.ndarray) -> Matrix:
    w = cvxpy.Variable(problem.start.shape)
    losses = [
        weight * cvxpy.sum_squares(x @ w.T - y) / (2 * len(x))
        for x, y, weight in zip(problem.x, problem.y, weights / weights.sum(), strict=True)
    ]
    norm = cvxpy.normNuc(w) if penalty == "low-rank" else cvxpy.norm1(cvxpy.vec(w, order="C"))
    tight = dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), 1e-11)
    cvxpy.Problem(cvxpy.Minimize(sum(losses) + RANK * norm)).solve(solver=cvxpy.CLARABEL, **tight)
    solution: Matrix = w.value
    return solution


@pytest.mark.parametrize(
    ("penalty", "weights"), tiered([("low-rank", "examples"), ("sparse", "uniform")], [("low-rank", "examples")])
)
def test_iterates_reach_the_solution_of_a_convex_solver(
    matrices: MatrixLeastSquares, penalty: str, weights: str
) -> None:
    """(P1) with η_g = 1/(2L) as the theorems ask: least squares + λ‖W‖_* (or λ‖W‖₁), solved by an interior point."""
    p = np.ones(len(SIZES)) if weights == "uniform" else np.array(SIZES, dtype=float)
    step = 1 / (2 * matrices.smoothness())
    few = Training(work=Steps(steps=8, batch=None), optimizer=exact(matrices).optimizer)
    built = fedslr(few, rank_penalty=RANK, step=step, shared=penalty)  # type: ignore[arg-type]
    simulation = matrices.simulate(built, 200, weights=weights)
    expected = convex_solution(matrices, penalty, p)
    np.testing.assert_allclose(model(simulation), expected, atol=1e-6)
    if penalty == "low-rank":
        assert np.linalg.matrix_rank(model(simulation), tol=1e-9) == np.linalg.matrix_rank(expected, tol=1e-4) < 4


def test_alternatives_stop_elsewhere_or_are_not_low_rank(matrices: MatrixLeastSquares) -> None:
    """Appendix A.2: GPGD's fixed point is not (P1)'s solution, and the mean of LPGD's low-rank models has full rank."""
    expected = convex_solution(matrices, "low-rank", np.ones(len(SIZES)))
    many = Training(work=Steps(steps=20, batch=None), optimizer=SGD)
    gpgd = matrices.simulate(fedslr(many, rank_penalty=RANK, solver="gpgd"), 30, weights="uniform")
    assert np.abs(model(gpgd) - expected).max() > 0.05
    lpgd = matrices.simulate(fedslr(many, rank_penalty=3.0, solver="lpgd"), 15, weights="uniform")
    assert np.linalg.matrix_rank(model(lpgd), tol=1e-6) == 4


def potential(problem: MatrixLeastSquares, w: Matrix, ends: list[Matrix], duals: list[Matrix], step: float) -> float:
    """Definition 1."""
    total = RANK * float(np.linalg.svd(w, compute_uv=False).sum())
    for i in CLIENTS:
        gap = w - ends[i]
        total += (problem.loss(i, ends[i]) + float((duals[i] * gap).sum()) + float((gap**2).sum()) / (2 * step)) / 4
    return total


def test_the_potential_never_rises(matrices: MatrixLeastSquares) -> None:
    """Lemma 3: with exact local solutions and a small η_g the potential of Definition 1 decreases in each round."""
    step = 1 / (2.5 * matrices.smoothness())  # L²η + L/2 − 1/(2η) < 0
    simulation = matrices.simulate(fedslr(exact(matrices), rank_penalty=RANK, step=step), 0, weights="uniform")
    before = [np.zeros_like(matrices.start) for _ in CLIENTS]
    values = []
    for number in range(15):
        w = model(simulation)
        simulation.step(number)
        duals = [kept(simulation, i, "solver/dual/weight") for i in CLIENTS]
        ends = [w - step * (duals[i] - before[i]) for i in CLIENTS]
        values.append(potential(matrices, model(simulation), ends, duals, step))
        before = duals
    assert all(after <= earlier + 1e-12 for earlier, after in itertools.pairwise(values))
    assert values[0] - values[-1] > 0.01


def test_without_penalties_it_is_feddyn(matrices: MatrixLeastSquares) -> None:
    """λ = 0: the shared path is FedDyn's with α = 1/η_g, to the bit; a huge μ leaves p_i = 0."""
    ours = matrices.simulate(algorithm(rank_penalty=0.0, sparsity=1e9), 5, cohort=2)
    theirs = matrices.simulate(METHODS["feddyn"].build(TRAINING, pull=1 / ETA), 5, cohort=2)
    assert np.array_equal(model(ours), model(theirs))
    for i in CLIENTS:
        if i in ours.store:
            assert not kept(ours, i, "own/weight").any()


def test_phase_two_without_sparsity_fits_the_residual(matrices: MatrixLeastSquares) -> None:
    """μ = 0 and many steps on p_i: w + p_i is a least-squares solution of client i's own data, wherever w is."""
    built = fedslr(TRAINING, rank_penalty=RANK, sparsity=0.0, step=ETA, personal_epochs=600, personal_lr=0.2)
    simulation = matrices.simulate(built, 1)
    w = matrices.start  # the w_0 that phase II used
    for i in CLIENTS:
        own = w + kept(simulation, i, "own/weight")
        assert np.abs(matrices.gradient(i, own)).max() < 1e-3


def test_learning_rate_and_threshold_follow_the_schedule(matrices: MatrixLeastSquares) -> None:
    """η_l = lr·0.5^t in round t also sets the width μη_l of phase II."""
    training = Training(work=Steps(epochs=1, batch=None), optimizer=Sgd(lr=LR, schedule=Exponential(rate=0.5)))
    simulation = matrices.simulate(fedslr(training, rank_penalty=0.0, sparsity=SPARSE, step=ETA), 0)
    p = [np.zeros_like(matrices.start) for _ in CLIENTS]
    for number in range(3):
        w, lr = model(simulation), LR * 0.5**number
        simulation.step(number)
        p = [soft(p[i] - lr * matrices.gradient(i, w + p[i]), SPARSE * lr) for i in CLIENTS]
    np.testing.assert_allclose(kept(simulation, 1, "own/weight"), p[1], atol=1e-12)


def mean_of_ends(problem: MatrixLeastSquares, w: Matrix, width: float | None) -> Matrix:
    """Plain local descent, with the nuclear prox in each step if a width is given; the plain mean of the ends."""
    ends = []
    for i in CLIENTS:
        end = w
        for _ in range(STEPS):
            end = end - LR * problem.gradient(i, end)
            end = end if width is None else svt(end, width)
        ends.append(end)
    mean: Matrix = sum(ends) / len(ends)  # type: ignore[assignment]
    return mean


def test_variants_by_hand(matrices: MatrixLeastSquares) -> None:
    """GPGD: prox_{λη_l} of the mean; LPGD: prox_{λη_l} in each local step; S+S: ‖·‖₁ at the server; two rounds each."""
    runs = {name: matrices.simulate(algorithm(solver=name), 2, weights="uniform") for name in ("gpgd", "lpgd")}
    gpgd = lpgd = matrices.start
    for _ in range(2):
        gpgd = svt(mean_of_ends(matrices, gpgd, None), RANK * LR)
        lpgd = mean_of_ends(matrices, lpgd, RANK * LR)
    np.testing.assert_allclose(model(runs["gpgd"]), gpgd, atol=1e-12)
    np.testing.assert_allclose(model(runs["lpgd"]), lpgd, atol=1e-12)
    sparse = matrices.simulate(algorithm(shared="sparse"), 1, weights="uniform")
    dense = matrices.simulate(algorithm(rank_penalty=0.0), 1, weights="uniform")
    np.testing.assert_allclose(model(sparse), soft(model(dense), RANK * ETA), atol=1e-12)


@pytest.mark.parametrize("shared", ["low-rank", "sparse"])
def test_a_low_rank_personal_part_by_hand(matrices: MatrixLeastSquares, shared: str) -> None:
    """LR+LR and S+LR: p_i ← prox_{μη_l‖·‖_*}(p_i − η_l∇f_i(w_t + p_i)); stored as factors."""
    built = algorithm(shared=shared, personal="low-rank", sparsity=1.5)
    simulation = matrices.simulate(built, 0)
    p = np.zeros_like(matrices.start)
    for number in range(4):
        w = model(simulation)
        simulation.step(number)
        p = svt(p - LR * matrices.gradient(2, w + p), 1.5 * LR)
    np.testing.assert_allclose(kept(simulation, 2, "own/weight"), p, atol=1e-12)
    assert 0 < np.linalg.matrix_rank(p, tol=1e-9) < 3


def test_the_personal_part_may_start_at_the_model(matrices: MatrixLeastSquares) -> None:
    """personal_start = "model": p_i starts at w_0 also for a client whose first round is later; w_0 is sent once."""
    simulation = matrices.simulate(algorithm(personal_start="model"), 6, cohort=1, weights="uniform")
    late = next(members[0] for members in cohorts(1, 6)[1:] if members[0] != cohorts(1, 6)[0][0])
    first = next(t for t, members in enumerate(cohorts(1, 6)) if late in members)
    again = matrices.simulate(algorithm(personal_start="model"), first, cohort=1, weights="uniform")
    w = model(again)
    again.step(first)
    expected = soft(matrices.start - LR * matrices.gradient(late, w + matrices.start), SPARSE * LR)
    np.testing.assert_allclose(kept(again, late, "own/weight"), expected, atol=1e-12)
    assert simulation.broadcast().start.keys() == {"weight"}


def test_norms_and_biases_of_the_personal_part_start_at_zero() -> None:
    """personal_start = "model": w + p has weights 2·w_0 and norms as they are, gain 1 and shift 0; those are not sent.

    Then phase II by hand, one full-batch step: p ← S_{μη}(p − η∇f(w_0 + p)).
    """
    net = Net(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.GroupNorm(2, 6), nn.Tanh(), nn.Linear(6, 10)))
    problem = Problem(net.to(torch.device("cpu"), torch.float64), cross_entropy)
    training = Training(work=Steps(epochs=1, batch=None), optimizer=Sgd(lr=LR))
    case = make_case(fedslr(training, personal_start="model", sparsity=SPARSE), problem)
    down, state, data = case.one_client()
    w = down.model
    assert down.start.keys() == {"1.weight", "4.weight"}
    mixed = case.algorithm.client.models(problem, down, state)["personal"]
    for name, value in w.items():
        assert torch.equal(mixed[name], 2 * value if name in down.start else value)
    assert torch.equal(mixed["2.weight"], torch.ones(6, dtype=torch.float64))
    after, _ = case.update(down, state, data)
    (batch,) = data.phases["personal"].each()
    slope = grad(problem.mean_loss)(mixed, batch)
    for name in w:
        start = w[name].numpy() if w[name].ndim > 1 else np.zeros(w[name].shape)
        expected = soft(start - LR * slope[name].numpy(), SPARSE * LR)
        np.testing.assert_allclose(after.own[name].numpy(), expected, atol=1e-12)


def test_low_rank_weights_travel_as_factors(matrices: MatrixLeastSquares) -> None:
    """A 4×5 matrix of rank 2 takes 18 numbers as factors, 20 whole; of rank 3 it is sent whole. Bytes are as sent."""
    strong = matrices.simulate(algorithm(rank_penalty=2.0), 1)
    assert factored(strong)
    form = strong.broadcast().model["weight"]
    assert form.u.shape[1] <= 2
    np.testing.assert_allclose((form.u @ form.v).numpy(), model(strong), atol=1e-14)
    message = strong.broadcast()
    assert wire.parameters(message.model) == form.u.shape[1] * 9
    assert wire.ranks(message) == {"model/weight": form.u.shape[1]}
    assert strong.step(1).bytes_down == 4 * len(wire.encode(message))
    assert not factored(matrices.simulate(algorithm(rank_penalty=1e-6), 1))


def test_packed_models_sum_to_the_models(matrices: MatrixLeastSquares) -> None:
    """What a device stores, made dense and summed, is w and w + p_i; a sparse p_i is stored by its entries."""
    built = algorithm(rank_penalty=2.0, sparsity=1.0)
    simulation = matrices.simulate(built, 6)
    problem = simulation.federation.problems[0]
    state = tree.take(simulation.states(0, simulation.down(), np.array([1])), 0)
    models = built.client.models(problem, simulation.down(), state)
    parts = packed(built.client, problem, simulation.broadcast(), state)
    for name, expected in models.items():
        dense = [wire.dense(part)["weight"] for part in parts[name]]
        torch.testing.assert_close(sum(dense), expected["weight"], rtol=0, atol=1e-14)
    own = parts["personal"][1]["weight"]
    assert isinstance(own, wire.Masked)
    assert 0 < len(own.values) < 12


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"shared": "sparse"}, marks=pytest.mark.system),
        pytest.param({"solver": "gpgd"}, marks=pytest.mark.system),
        pytest.param({"solver": "lpgd"}, marks=pytest.mark.system),
        pytest.param({"personal": "low-rank"}, marks=pytest.mark.system),
        {"personal_start": "model"},
    ],
)
def test_laws_hold_when_the_model_is_factored(options: dict[str, str]) -> None:
    """Messages and the server's state then have compact forms whose size changes from round to round."""
    training = Training(work=Steps(epochs=2, batch=4), optimizer=Sgd(lr=0.1, weight_decay=1e-3))
    check_algorithm(fedslr(training, rank_penalty=0.05, sparsity=0.05, **options))  # type: ignore[arg-type]


def test_non_finite_weights_are_named(matrices: MatrixLeastSquares) -> None:
    """Layer and round are in the message."""
    simulation = matrices.simulate(algorithm(), 1)
    total = Change({"weight": torch.full((4, 5), float("inf"), dtype=torch.float64)}, ZERO)
    uploads = reduce(tree.stack([total]), ONE.reshape(1))
    with pytest.raises(Diverged, match=r"round 8: layer weight has non-finite entries .* lower training.lr"):
        simulation.federation.algorithm.server.update(simulation.server, uploads, 7)


def test_a_failed_decomposition_is_named(matrices: MatrixLeastSquares, monkeypatch: pytest.MonkeyPatch) -> None:
    """LAPACK may give up on finite input too."""

    def fail(*_: object) -> None:
        raise torch.linalg.LinAlgError("failed to converge")

    simulation = matrices.simulate(algorithm(), 0)
    monkeypatch.setattr(sys.modules[SlrServer.__module__], "nuclear", fail)
    with pytest.raises(Diverged, match=r"round 1: the singular values of layer weight could not be computed"):
        simulation.step(0)


def test_the_servers_state_does_not_grow_with_the_clients() -> None:
    """Algorithm 3: as many bytes for ten thousand clients as for a hundred."""
    start = {"weight": torch.randn(30, 20), "bias": torch.randn(30)}
    sizes = {len(wire.encode(SlrServer().init(None, start, count))) for count in (100.0, 10_000.0)}  # type: ignore[arg-type]
    assert len(sizes) == 1


def test_matrices_of_convolutions_are_shrunk_in_their_matrix_form() -> None:
    """The server's prox of a kernel [o, i, kh, kw] is the SVT of its (o·kh) × (i·kw) matrix; biases are left alone."""
    generator = torch.Generator().manual_seed(1)
    start = {"conv": torch.randn((6, 5, 3, 2), generator=generator).double(), "bias": torch.ones(6).double()}
    server = SlrServer(rank_penalty=0.3, step=1.0)
    state = server.init(None, start, 1.0)  # type: ignore[arg-type]
    nothing = reduce(tree.stack([Change(tree.zeros_like(start), ZERO)]), ONE.reshape(1))
    after = server.broadcast(server.update(state, nothing, 0)).model
    matrix = start["conv"].permute(0, 2, 1, 3).reshape(18, 10).numpy()
    expected = svt(matrix, 0.3).reshape(6, 3, 5, 2).transpose(0, 2, 1, 3)
    np.testing.assert_allclose(wire.dense(after)["conv"].numpy(), expected, atol=1e-12)
    assert torch.equal(after["bias"], start["bias"])
    assert prox.as_matrix(wire.dense(after)["conv"]).shape == (18, 10)
