"""APFL against Algorithm 1 of Deng et al. 2020, worked in numpy, and its limits."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from least_squares import LeastSquares, shared
from personafl.algorithms import METHODS, Training
from personafl.core import tree
from personafl.core.algorithm import Problem
from personafl.core.batches import Steps
from personafl.core.losses import cross_entropy
from personafl.core.net import Net
from personafl.core.optim import Adaptive, Sgd
from personafl.core.schedule import Exponential
from personafl.errors import BadInput
from personafl.runs.scoring import tune
from personafl.simulate.simulator import Simulation
from personafl.storage.store import Store
from personafl.testing import check_algorithm, make_case

LR, STEPS = 0.05, 3
TRAINING = Training(work=Steps(steps=STEPS, batch=None), optimizer=Sgd(lr=LR))
MINIBATCHES = Training(work=Steps(epochs=2, batch=2), optimizer=Sgd(lr=LR, momentum=0.9, weight_decay=0.01, clip=1.0))
CLIENTS = range(3)


def own(simulation: Simulation, client: int) -> tuple[np.ndarray, float]:
    state = simulation.store.get(client)
    return state["own/weight"][0].numpy(), float(state["mixing"])


def personal_model(simulation: Simulation, client: int) -> torch.Tensor:
    fed, down = simulation.federation, simulation.down()
    states = simulation.states(0, down, np.array([client]))
    return fed.algorithm.client.models(fed.problems[0], down, tree.map(lambda leaf: leaf[0], states))["personal"][
        "weight"
    ]


def loss(problem: LeastSquares, i: int, w: np.ndarray) -> float:
    return 0.5 * float(np.mean((problem.x[i] @ w - problem.y[i]) ** 2))


@pytest.mark.parametrize("adaptive", [False, True])
def test_two_rounds_by_hand(problem: LeastSquares, adaptive: bool) -> None:
    """w, v and α step at once: ∇f(w), α∇f(v̄) and ⟨v − w, ∇f(v̄)⟩ with v̄ = αv + (1−α)w, all of the same point.

    The rate decays by half a round for all three; v and α have their own. The loss is the mean of f(w) and f(v̄).
    """
    options = {"mixing_lr": 0.2} if adaptive else {}
    sgd = Sgd(lr=LR, schedule=Exponential(rate=0.5))
    algorithm = METHODS["apfl"].build(
        Training(work=TRAINING.work, optimizer=sgd), mixing=0.3, adaptive=adaptive, personal_lr=0.08, **options
    )
    simulation = problem.simulate(algorithm, 0)
    w, v, mixing = problem.start, [problem.start] * 3, [0.3] * 3
    for t in range(2):
        ends, losses = [], []
        for i in CLIENTS:
            local, seen = w, []
            for _ in range(STEPS):
                mixture = mixing[i] * v[i] + (1 - mixing[i]) * local
                g, gap = problem.gradient(i, mixture), v[i] - local
                seen.append((loss(problem, i, local) + loss(problem, i, mixture)) / 2)
                local = local - 0.5**t * LR * problem.gradient(i, local)
                v[i] = v[i] - 0.5**t * 0.08 * mixing[i] * g
                if adaptive:
                    mixing[i] = float(np.clip(mixing[i] - 0.5**t * 0.2 * gap @ g, 0, 1))
            ends.append(local)
            losses.append(np.mean(seen))
        assert simulation.step(t).loss == pytest.approx(problem.weights @ losses, abs=1e-6)
        w = sum(p * end for p, end in zip(problem.weights, ends, strict=True))
    np.testing.assert_allclose(shared(simulation), w, atol=1e-12)
    for i in CLIENTS:
        found, weight = own(simulation, i)
        np.testing.assert_allclose(found, v[i], atol=1e-12)
        assert weight == pytest.approx(mixing[i], abs=1e-12)
        assert (abs(weight - 0.3) > 1e-4) == adaptive
        expected = mixing[i] * v[i] + (1 - mixing[i]) * w  # with the shared model as it is now
        np.testing.assert_allclose(personal_model(simulation, i)[0], expected, atol=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"mixing": 0.0}, marks=pytest.mark.system),
        {"mixing": 0.7},
        pytest.param({"mixing": 0.4, "adaptive": True}, marks=pytest.mark.system),
    ],
)
def test_the_shared_path_is_fedavg(problem: LeastSquares, options: dict[str, object]) -> None:
    """To the bit for every α: v̄ does not pull on w. And with α = 0 the personal model is the shared one."""
    server = Adaptive(lr=0.1)
    fedavg = problem.simulate(METHODS["fedavg"].build(MINIBATCHES, server=server), 3)
    apfl = problem.simulate(METHODS["apfl"].build(MINIBATCHES, server=server, **options), 3)
    assert np.array_equal(shared(apfl), shared(fedavg))
    for i in CLIENTS:
        same = np.array_equal(personal_model(apfl, i)[0], shared(fedavg))
        assert same == (options["mixing"] == 0.0)


@pytest.mark.system
def test_without_the_shared_model_it_is_local_training(problem: LeastSquares) -> None:
    """α = 1: v̄ = v, trained by itself from the common start, to the bit."""
    local = problem.simulate(METHODS["local"].build(MINIBATCHES), 3)
    apfl = problem.simulate(METHODS["apfl"].build(MINIBATCHES, mixing=1.0), 3)
    for i in CLIENTS:
        assert torch.equal(personal_model(apfl, i), local.store.get(i)["model/weight"])


@pytest.mark.parametrize("rate", [1.0, 100.0])
def test_the_mixing_weight_stays_between_0_and_1(problem: LeastSquares, rate: float) -> None:
    """With steps that throw it out: some clients end at a bound, none beyond it."""
    simulation = problem.simulate(METHODS["apfl"].build(TRAINING, adaptive=True, mixing_lr=rate), 4)
    weights = [own(simulation, i)[1] for i in CLIENTS]
    assert all(0 <= weight <= 1 for weight in weights)
    assert any(weight in (0.0, 1.0) for weight in weights)


def test_the_mixing_weights_gradient_by_finite_differences() -> None:
    """One step from a v apart from w moves α by −η_α·d/dα f(αv + (1−α)w), for a network that is not linear."""
    torch.manual_seed(0)
    net = Net(nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 10)).double())
    one_step = Training(work=Steps(steps=1, batch=None), optimizer=Sgd(lr=LR))
    case = make_case(
        METHODS["apfl"].build(one_step, adaptive=True, mixing=0.4, mixing_lr=1e-3), Problem(net, cross_entropy)
    )
    down, state, data = case.one_client()
    state = state._replace(own=tree.map(lambda value: value + 0.3 * torch.randn_like(value), state.own))
    batch = next(data.phases["local"].each())

    def value(mixing: float) -> float:
        gap = tree.sub(state.own, down.model)
        return float(case.problem.mean_loss(tree.add(down.model, tree.map(lambda part: mixing * part, gap)), batch))

    slope = (value(0.4 + 1e-5) - value(0.4 - 1e-5)) / 2e-5
    moved = float(case.update(down, state, data)[0].mixing)
    assert abs(slope) > 0.1
    assert (0.4 - moved) / 1e-3 == pytest.approx(slope, rel=1e-7)


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_newcomer_trains_its_own_model_with_the_shared_one_fixed(
    problem: LeastSquares, tmp_path: Path, adaptive: bool
) -> None:
    """v ← v − ηα∇f(v̄) from v = w_T; and α ← clip(α − η⟨v − w_T, ∇f(v̄)⟩)."""
    algorithm = METHODS["apfl"].build(TRAINING, mixing=0.6, adaptive=adaptive, tune_epochs=4)
    simulation = problem.simulate(algorithm, 1, cohort=1)
    newcomers = [i for i in CLIENTS if i not in simulation.store]
    tuned = Store(tmp_path / "tuned", 2**20)
    tune(simulation, tuned, np.array(newcomers), 1)
    for i in newcomers:
        w = v = shared(simulation)
        mixing = 0.6
        for _ in range(4):
            g, gap = problem.gradient(i, mixing * v + (1 - mixing) * w), v - w
            v = v - LR * mixing * g
            mixing = float(np.clip(mixing - LR * gap @ g, 0, 1)) if adaptive else mixing
        np.testing.assert_allclose(tuned.get(i)["own/weight"][0], v, atol=1e-12)
        assert float(tuned.get(i)["mixing"]) == pytest.approx(mixing, abs=1e-12)
    assert len(newcomers) == 2


@pytest.mark.system
def test_the_adaptive_variant_keeps_the_laws() -> None:
    check_algorithm(METHODS["apfl"].build(MINIBATCHES, adaptive=True))


def test_a_rate_for_a_fixed_mixing_weight_is_refused() -> None:
    with pytest.raises(BadInput, match=r"method\.mixing_lr: .* method\.adaptive"):
        METHODS["apfl"].build(TRAINING, mixing_lr=0.1)
