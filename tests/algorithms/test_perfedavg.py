"""Per-FedAvg against Algorithm 1 of Fallah et al. 2020, worked in numpy, and the gradient of MAML."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import grad

from least_squares import LeastSquares, half_square, shared
from personafl.algorithms import METHODS, Training
from personafl.algorithms.perfedavg import Variant, meta_gradient
from personafl.core import tree
from personafl.core.algorithm import Problem
from personafl.core.batches import Batch, Batches, Data, Steps, Together
from personafl.core.net import Net
from personafl.core.optim import Adaptive, Sgd
from personafl.core.tree import Params
from personafl.errors import BadInput
from personafl.runs.scoring import tune
from personafl.simulate.engine import gather
from personafl.storage.store import Store
from personafl.testing import check_algorithm, make_case

LR, RATE, STEPS = 0.05, 0.2, 3
TRAINING = Training(work=Steps(steps=STEPS, batch=None), optimizer=Sgd(lr=LR))
CLIENTS = range(3)
VARIANTS: tuple[Variant, ...] = ("first-order", "hessian-free")
perfedavg = METHODS["perfedavg"].build


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_rounds_by_hand(problem: LeastSquares, variant: Variant) -> None:
    """D = D′ = D″ = all data, ∇²f_i = H_i: w ← w − β(I − αH_i)∇f_i(w − α∇f_i(w)), or without the bracket.

    The differences are those of a linear function, so δ does not matter but for rounding.
    """
    simulation = problem.simulate(perfedavg(TRAINING, variant=variant, inner_lr=RATE, delta=0.01), 2)
    w = problem.start
    for _ in range(2):
        ends = []
        for i in CLIENTS:
            bracket = np.eye(4) - RATE * problem.hessian(i) if variant == "hessian-free" else np.eye(4)
            local = w
            for _ in range(STEPS):
                local = local - LR * bracket @ problem.gradient(i, problem.descend(i, local, RATE, 1))
            ends.append(local)
        w = sum(p * end for p, end in zip(problem.weights, ends, strict=True))
    np.testing.assert_allclose(shared(simulation), w, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_minibatch_has_its_part(problem: LeastSquares, variant: Variant) -> None:
    """w̃ by D ("inner"), g by D′ ("local"), the Hessian by D″ ("hessian"): here one client's data each."""
    simulation = problem.simulate(perfedavg(TRAINING, variant=variant, inner_lr=RATE), 0)
    pool = simulation.federation.data
    bounds = {"inner": (0, 3), "local": (3, 10), "hessian": (10, 15)}
    client = simulation.federation.algorithm.client
    phases = {}
    for name in client.phases:
        rows = torch.arange(*bounds[name])[None]
        phases[name] = Batches(pool.x, pool.y, rows, torch.ones_like(rows, dtype=torch.bool), torch.zeros(1).long())
    data = Data(phases, torch.tensor(15), torch.tensor(0.0))
    down = simulation.down()
    state = client.init(simulation.federation.problems[0], down, torch.Generator())
    _, up = client.update(simulation.federation.problems[0], down, state, data)
    adapted = problem.descend(0, problem.start, RATE, 1)
    g = problem.gradient(1, adapted)
    direction = g - RATE * problem.hessian(2) @ g if variant == "hessian-free" else g
    np.testing.assert_allclose(up.change["weight"][0], -LR * direction, atol=1e-12)
    np.testing.assert_allclose(up.loss, 0.5 * np.mean((problem.x[1] @ adapted - problem.y[1]) ** 2), rtol=1e-12)


def test_the_minibatches_of_a_step_are_drawn_independently() -> None:
    """D, D′ and D″ go through the same data in different orders; the step counts agree."""
    training = Training(work=Steps(epochs=2, batch=4), optimizer=Sgd(lr=LR))
    case = make_case(perfedavg(training, variant="hessian-free"))
    _, _, data = case.one_client(3)
    rows = [batches.rows for batches in data.phases.values()]
    assert len(rows) == 3
    assert len({tuple(own.flatten().tolist()) for own in rows}) == 3
    assert len({own.shape for own in rows}) == 1


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("optimizer", [Sgd(lr=LR, momentum=0.9, weight_decay=0.1, clip=0.5), Adaptive(lr=LR)])
def test_without_an_inner_step_it_is_fedavg(problem: LeastSquares, variant: Variant, optimizer: Sgd | Adaptive) -> None:
    """α = 0: to the bit, loss included, by minibatches with a server optimizer."""
    training = Training(work=Steps(epochs=2, batch=2), optimizer=optimizer)
    server = Adaptive(lr=0.1)
    one = problem.simulate(perfedavg(training, variant=variant, inner_lr=0.0, server=server), 0)
    two = problem.simulate(METHODS["fedavg"].build(training, server=server), 0)
    for number in range(3):
        assert one.step(number).loss == two.step(number).loss
    assert np.array_equal(shared(one), shared(two))


def tanh_problem() -> tuple[Problem, Params, Together]:
    """A small network, and two minibatches of which the first is D and D″, as in the gradient of MAML."""
    torch.manual_seed(4)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    net = Net(module)
    key, real = torch.tensor(0), torch.ones(6, dtype=torch.bool)
    first, second = (Batch(torch.randn(6, 3).double(), torch.randn(6).double(), real, key) for _ in range(2))
    return Problem(net, half_square), net.init(torch.Generator()), Together((first, second, first))


def test_hessian_free_tends_to_the_gradient_of_maml() -> None:
    """∇_w f(w − α∇f(w; D); D′) by differentiating twice; central differences are off by O(δ²), first order by O(α)."""
    problem, w, step = tanh_problem()
    inner, outer, _ = step.parts

    def adapted_loss(w: Params) -> Tensor:
        return problem.mean_loss(tree.sub(w, tree.scale(grad(problem.mean_loss)(w, inner), RATE)), outer)

    exact = grad(adapted_loss)(w)

    def gap(step: Together, delta: float) -> float:
        return float(tree.norm(tree.sub(meta_gradient(problem, w, step, RATE, delta)[0], exact)))

    wide, narrow = gap(step, 1e-1), gap(step, 1e-2)
    assert wide / narrow == pytest.approx(100, rel=0.05)
    assert gap(step, 1e-4) < 1e-8
    assert gap(Together((inner, outer)), 1e-4) > 0.01


def test_the_direction_is_the_gradient_that_the_optimizer_sees() -> None:
    """One client step moves w by −β times the direction: nothing is differentiated through it a second time."""
    problem, w, step = tanh_problem()
    pool_x, pool_y = (torch.cat([getattr(batch, part) for batch in step.parts]) for part in ("x", "y"))
    algorithm = perfedavg(TRAINING, variant="hessian-free", inner_lr=RATE, delta=0.1)
    real, key = torch.ones(1, 6, dtype=torch.bool), torch.zeros(1, dtype=torch.int64)
    phases = {
        name: Batches(pool_x, pool_y, torch.arange(6 * place, 6 * place + 6)[None], real, key)
        for place, name in enumerate(("inner", "local", "hessian"))
    }
    down = algorithm.server.broadcast(algorithm.server.init(problem, w, 1.0))
    state = algorithm.client.init(problem, down, torch.Generator())
    _, up = algorithm.client.update(problem, down, state, Data(phases, torch.tensor(18), torch.tensor(0.0)))
    direction, loss = meta_gradient(problem, w, step, RATE, 0.1)
    for name, change in up.change.items():
        torch.testing.assert_close(change, -LR * direction[name], rtol=0, atol=1e-14)
    assert float(up.loss) == float(loss)


@pytest.mark.parametrize(
    ("options", "steps"), [({}, 5), ({"tune_steps": 4}, 4), ({"tune_epochs": 3}, 3)], ids=["default", "steps", "epochs"]
)
def test_the_personal_model_is_adapted_by_plain_sgd(
    problem: LeastSquares, tmp_path: Path, options: dict[str, int], steps: int
) -> None:
    """x_i = w_T, then steps of rate α on f_i (all data a step), whatever β's optimizer is; five epochs by default."""
    training = Training(work=Steps(steps=STEPS, batch=None), optimizer=Adaptive(lr=LR, weight_decay=0.1))
    simulation = problem.simulate(perfedavg(training, inner_lr=RATE, **options), 2)
    assert len(simulation.store) == 0
    store = Store(tmp_path / "tuned", 2**20)
    tune(simulation, store, simulation.federation.data.seen, 2)
    for i in CLIENTS:
        expected = problem.descend(i, shared(simulation), RATE, steps)
        np.testing.assert_allclose(store.get(i)["model/weight"][0], expected, atol=1e-12)


def test_test_data_is_not_adapted_to() -> None:
    """With NaN for every test sample, the adapted model is the same."""
    case = make_case(perfedavg(TRAINING, inner_lr=RATE, tune_epochs=2))
    client = case.algorithm.client
    x = case.data.x.clone()
    x[torch.from_numpy(case.data.test.flat)] = torch.nan
    down, state, _ = case.one_client()
    ends = []
    for data in (case.data, dataclasses.replace(case.data, x=x)):
        stacked = gather(data, data.seen[1:2], client.tuning, 0, 0)
        own = {n: b._replace(rows=b.rows[0], real=b.real[0], key=b.key[0]) for n, b in stacked.phases.items()}
        ends.append(client.personalize(case.problem, down, state, stacked._replace(phases=own)).model)
    for name, value in ends[0].items():
        assert torch.equal(value, ends[1][name])
        assert not torch.equal(value, down.model[name])


def test_one_amount_of_adaptation() -> None:
    with pytest.raises(BadInput, match=r"method\.tune_steps"):
        perfedavg(TRAINING, tune_steps=2, tune_epochs=1)


@pytest.mark.system
def test_the_hessian_free_variant_keeps_the_laws() -> None:
    training = Training(work=Steps(epochs=2, batch=4), optimizer=Sgd(lr=0.1, momentum=0.9, clip=1.0))
    check_algorithm(perfedavg(training, variant="hessian-free", inner_lr=RATE))
