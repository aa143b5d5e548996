"""FedAlt and FedSim against Algorithms 1–3 of Pillutla et al. 2022, worked in numpy, and their limits."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from least_squares import LeastSquares, half_square
from personafl.algorithms import METHODS, Training
from personafl.core.algorithm import Algorithm, Problem
from personafl.core.batches import Steps
from personafl.core.net import Net
from personafl.core.optim import Adaptive, Sgd
from personafl.core.schedule import Exponential
from personafl.core.split import Split
from personafl.core.tree import flatten
from personafl.errors import BadInput
from personafl.simulate.engine import gather
from personafl.simulate.simulator import Simulation
from personafl.simulate.trainer import bound
from personafl.testing import make_case
from tiers import tiered

LR, LR_V, STEPS = 0.05, 0.03, 3
TRAINING = Training(work=Steps(steps=STEPS, batch=None), optimizer=Sgd(lr=LR))
CLIENTS = range(3)


class TwoParts(nn.Module):
    """wᵀx in two blocks: u acts on the first two inputs, v on the last two."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.v = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.u(x[:, :2]) + self.v(x[:, 2:])


def simulate(problem: LeastSquares, algorithm: Algorithm, rounds: int, personal: str = "v.*", **changes: object):
    torch.manual_seed(3)
    module = TwoParts().double()
    start = np.concatenate([module.u.weight.detach()[0].numpy(), module.v.weight.detach()[0].numpy()])
    parts = Problem(Net(module), half_square, split=Split((personal,)))
    return start, problem.simulate(algorithm, rounds, problems=(parts,), **changes)


def shared_of(simulation: Simulation) -> np.ndarray:
    return simulation.server.shared.model["u.weight"][0].numpy()


def own(simulation: Simulation, client: int) -> np.ndarray:
    return simulation.store.get(client)["personal/v.weight"][0].numpy()


def test_fedalt_two_rounds_by_hand(problem: LeastSquares) -> None:
    """v: τ_v steps with u as received; then u: τ_u steps with the new v; the server averages u."""
    start, simulation = simulate(problem, METHODS["fedalt"].build(TRAINING, personal_lr=LR_V), 2)
    u, v = start[:2], [start[2:]] * 3
    for _ in range(2):
        ends = []
        for i in CLIENTS:
            for _ in range(STEPS):
                v[i] = v[i] - LR_V * problem.gradient(i, np.concatenate([u, v[i]]))[2:]
            local = u
            for _ in range(STEPS):
                local = local - LR * problem.gradient(i, np.concatenate([local, v[i]]))[:2]
            ends.append(local)
        u = sum(p * end for p, end in zip(problem.weights, ends, strict=True))
    np.testing.assert_allclose(shared_of(simulation), u, atol=1e-12)
    for i in CLIENTS:
        np.testing.assert_allclose(own(simulation, i), v[i], atol=1e-12)


def test_fedsim_two_rounds_by_hand(problem: LeastSquares) -> None:
    """Both parts step at once, with both gradients at the same point and their own rates."""
    start, simulation = simulate(problem, METHODS["fedsim"].build(TRAINING, personal_lr=LR_V), 2)
    u, v = start[:2], [start[2:]] * 3
    for _ in range(2):
        ends = []
        for i in CLIENTS:
            local = u
            for _ in range(STEPS):
                g = problem.gradient(i, np.concatenate([local, v[i]]))
                local, v[i] = local - LR * g[:2], v[i] - LR_V * g[2:]
            ends.append(local)
        u = sum(p * end for p, end in zip(problem.weights, ends, strict=True))
    np.testing.assert_allclose(shared_of(simulation), u, atol=1e-12)
    for i in CLIENTS:
        np.testing.assert_allclose(own(simulation, i), v[i], atol=1e-12)


@pytest.mark.parametrize("name", ["fedalt", "fedsim"])
def test_decay_of_the_personal_part_alone_by_hand(problem: LeastSquares, name: str) -> None:
    """A full-batch step of each, by which v shrinks by γ_v·μ more, and u by γ_u·(decay of training) as ever."""
    mu, decay = 0.7, 0.2
    training = Training(work=Steps(steps=1, batch=None), optimizer=Sgd(lr=LR, weight_decay=decay))
    start, simulation = simulate(problem, METHODS[name].build(training, personal_lr=LR_V, personal_decay=mu), 1)
    u, end = start[:2], 0.0
    for i in CLIENTS:
        v = start[2:] - LR_V * (problem.gradient(i, start)[2:] + mu * start[2:])
        at = np.concatenate([u, v]) if name == "fedalt" else start
        end = end + problem.weights[i] * (u - LR * (problem.gradient(i, at)[:2] + decay * u))
        np.testing.assert_allclose(own(simulation, i), v, atol=1e-13)
    np.testing.assert_allclose(shared_of(simulation), end, atol=1e-13)


def test_fine_tuning_with_decay_ends_at_ridge_regression(problem: LeastSquares) -> None:
    """v* = (X_vᵀX_v/n + μI)⁻¹ X_vᵀ(y − X_u u)/n, at a constant rate whatever the schedule of the rounds."""
    mu = 0.5
    training = Training(work=Steps(epochs=1, batch=None), optimizer=Sgd(lr=0.3, schedule=Exponential(rate=0.5)))
    options = {"personal_decay": mu, "tune_epochs": 150}
    _, simulation = simulate(problem, METHODS["fedalt"].build(training, **options), 2)
    fed, down = simulation.federation, simulation.down()
    states = simulation.states(0, down, fed.data.seen)
    data = gather(fed.data, fed.data.seen, fed.algorithm.client.tuning, 0, 2)
    tuned = fed.engines[0].train(bound(fed.algorithm.client.personalize, fed.problems[0]), down, states, data)
    for i in CLIENTS:
        x_u, x_v = problem.x[i][:, :2], problem.x[i][:, 2:]
        rest = problem.y[i] - x_u @ shared_of(simulation)
        best = np.linalg.solve(x_v.T @ x_v / len(rest) + mu * np.eye(2), x_v.T @ rest / len(rest))
        np.testing.assert_allclose(tuned.personal["v.weight"][i][0], best, atol=1e-10)


@pytest.mark.parametrize("name", ["fedalt", "fedsim"])
def test_nothing_personal_is_fedavg(problem: LeastSquares, name: str) -> None:
    """To the bit, with momentum at the client and Adam at the server."""
    training = Training(work=Steps(epochs=2, batch=2), optimizer=Sgd(lr=LR, momentum=0.9))
    server = Adaptive(lr=0.1)
    _, fedavg = simulate(problem, METHODS["fedavg"].build(training, server=server), 3)
    _, partial = simulate(problem, METHODS[name].build(training, server=server), 3, personal="nothing")
    for key, value in fedavg.server.model.items():
        assert torch.equal(partial.server.shared.model[key], value)


@pytest.mark.parametrize("name", ["fedalt", "fedsim"])
def test_the_personal_part_goes_at_a_tenth_of_the_rate_unless_it_is_said(name: str) -> None:
    """The papers' methods of others that are built on these have one rate for both parts."""
    rates = [
        METHODS[name].build(TRAINING, **given).client.personal.optimizer.lr for given in ({}, {"personal_lr": 0.3})
    ]  # type: ignore[attr-defined]
    assert rates == [TRAINING.optimizer.lr * 0.1, 0.3]
    for other in ("fedper", "fedrep", "lgfedavg", "fedbn"):
        assert METHODS[other].build(TRAINING).client.personal.optimizer.lr == TRAINING.optimizer.lr  # type: ignore[attr-defined]


def test_everything_personal_is_local_training(problem: LeastSquares) -> None:
    """FedSim with u empty: each client trains the whole model from the common start, and nothing is averaged."""
    training = Training(work=Steps(epochs=2, batch=2), optimizer=Sgd(lr=LR))
    _, partial = simulate(problem, METHODS["fedsim"].build(training, personal_lr=LR), 3, personal="*")
    _, local = simulate(problem, METHODS["local"].build(training), 3)
    assert partial.server.shared.model == {}
    for i in CLIENTS:
        for part in ("u", "v"):
            mine = partial.store.get(i)[f"personal/{part}.weight"]
            np.testing.assert_allclose(mine, local.store.get(i)[f"model/{part}.weight"], atol=1e-13)


def test_without_coupling_fedalt_is_fedsim(problem: LeastSquares) -> None:
    """χ = 0: if f_i(u, v) = g_i(u) + h_i(v), the partial gradients do not depend on the other part."""

    class Separate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.u, self.v = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.u(x[:, :2]), self.v(x[:, 2:])], dim=1)

    def separate(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 0.5 * (outputs[:, 0] - targets) ** 2 + 0.5 * (outputs[:, 1] + targets) ** 2

    torch.manual_seed(0)
    parts = Problem(Net(Separate().double()), separate, split=Split(("v.*",)))
    ends = {}
    for name in ("fedalt", "fedsim"):
        simulation = problem.simulate(METHODS[name].build(TRAINING, personal_lr=LR_V), 3, problems=(parts,))
        ends[name] = [shared_of(simulation), *(own(simulation, i) for i in CLIENTS)]
    for alternating, simultaneous in zip(ends["fedalt"], ends["fedsim"], strict=True):
        np.testing.assert_allclose(alternating, simultaneous, atol=1e-14)


@pytest.mark.parametrize("name", tiered(["fedalt", "fedsim"], []))
def test_gradients_vanish_with_decaying_steps(problem: LeastSquares, name: str) -> None:
    """Theorems 1 and 2: with partial participation, ∇_u F and all ∇_v f_i go to 0 as steps decay.

    With constant steps the sampling of clients keeps the shared part moving: its gradient stays away from 0.
    """

    def last_norms(sgd: Sgd, rounds: int) -> tuple[float, float]:
        training = Training(work=Steps(steps=2, batch=None), optimizer=sgd)
        _, end = simulate(
            problem, METHODS[name].build(training, personal_lr=sgd.lr), rounds, cohort=2, weights="uniform"
        )
        gradients = [problem.gradient(i, np.concatenate([shared_of(end), own(end, i)])) for i in CLIENTS]
        shared_gradient = np.mean([g[:2] for g in gradients], axis=0)
        return float(np.linalg.norm(shared_gradient)), max(float(np.linalg.norm(g[2:])) for g in gradients)

    decaying = last_norms(Sgd(lr=0.3, schedule=Exponential(rate=0.985)), 500)
    constant = last_norms(Sgd(lr=0.3), 100)
    assert max(decaying) < 0.02
    assert constant[0] > 4 * decaying[0]


def test_stateless_clients_begin_again_every_time(problem: LeastSquares) -> None:
    """v_i starts from the common start in every round, nothing is stored, and the start is sent every time."""
    start, simulation = simulate(problem, METHODS["fedalt"].build(TRAINING, personal_lr=LR_V, stateful=False), 2)
    u = start[:2]
    for _ in range(2):
        ends = []
        for i in CLIENTS:
            v, local = start[2:], u
            for _ in range(STEPS):
                v = v - LR_V * problem.gradient(i, np.concatenate([u, v]))[2:]
            for _ in range(STEPS):
                local = local - LR * problem.gradient(i, np.concatenate([local, v]))[:2]
            ends.append(local)
        u = sum(p * end for p, end in zip(problem.weights, ends, strict=True))
    np.testing.assert_allclose(shared_of(simulation), u, atol=1e-12)
    assert len(simulation.store) == 0


def test_the_personal_start_is_sent_once(problem: LeastSquares) -> None:
    """The first contact costs both parts, later ones the shared part; stateless clients are sent both every time."""
    _, stateful = simulate(problem, METHODS["fedalt"].build(TRAINING), 0)
    first, second = stateful.step(0).bytes_down, stateful.step(1).bytes_down
    _, stateless = simulate(problem, METHODS["fedalt"].build(TRAINING, stateful=False), 0)
    assert stateless.step(0).bytes_down == stateless.step(1).bytes_down == first
    assert second < first


def test_personal_parameters_are_absent_from_the_upload() -> None:
    for name in ("fedalt", "fedsim"):
        case = make_case(METHODS[name].build(TRAINING))
        down, state, data = case.one_client()
        state, upload = case.update(down, state, data)
        assert {path.split("/")[-1] for path in flatten(upload)} == {"1.weight", "1.bias", "loss"}
        assert {path.split("/")[-1] for path in flatten(state)} == {"4.weight", "4.bias"}


def test_partial_finetuning_moves_the_personal_part_only(problem: LeastSquares) -> None:
    """FT (part.): v is trained from the shared model with u fixed."""
    algorithm = METHODS["finetune"].build(TRAINING, part="personal", tune_epochs=4, tune_lr=0.1)
    _, simulation = simulate(problem, algorithm, 1)
    case = simulation.federation
    data = gather(case.data, case.data.seen, case.algorithm.client.tuning, 0, 1)
    down = simulation.down()
    tuned = case.engines[0].train(
        lambda d, s, x: case.algorithm.client.personalize(case.problems[0], d, s, x),
        down,
        simulation.states(0, down, case.data.seen),
        data,
    )
    w = np.concatenate([down.model["u.weight"][0].numpy(), down.model["v.weight"][0].numpy()])
    for i in CLIENTS:
        v = w[2:]
        for _ in range(4):
            v = v - 0.1 * problem.gradient(i, np.concatenate([w[:2], v]))[2:]
        np.testing.assert_allclose(tuned.model["v.weight"][i][0], v, atol=1e-12)
        assert torch.equal(tuned.model["u.weight"][i], down.model["u.weight"])


def test_a_method_that_divides_the_network_needs_a_split(problem: LeastSquares, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"model\.personal"):
        problem.simulate(METHODS["fedalt"].build(TRAINING), 1)


def test_the_personal_phase_has_its_own_amount_of_work() -> None:
    """τ_v and τ_u: steps or epochs, each on its own."""
    client = METHODS["fedalt"].build(TRAINING, personal_steps=7).client
    assert client.phases["personal"] == Steps(steps=7, batch=None)
    assert client.phases["local"] == Steps(steps=STEPS, batch=None)
    assert METHODS["fedalt"].build(TRAINING, personal_epochs=2).client.phases["personal"].epochs == 2
    with pytest.raises(BadInput, match="personal_steps"):
        METHODS["fedalt"].build(TRAINING, personal_epochs=2, personal_steps=7)
