"""FedBCD and FedBCD-I against Algorithms 1 and 2 of Wu et al. 2021, in numpy; their limits and fixed points."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from least_squares import LeastSquares, Vector, personal, shared
from personafl.algorithms import METHODS, Training
from personafl.algorithms.fedbcd import BlockServer, PersonalChange
from personafl.core import tree, wire
from personafl.core.algorithm import Problem, fields_of_its_own, for_returning, reduce
from personafl.core.batches import Steps, drawn_work
from personafl.core.net import Net
from personafl.core.optim import Accelerated, Adaptive, Sgd
from personafl.core.schedule import Exponential
from personafl.errors import BadInput
from personafl.simulate.cohort import draw_cohort, draw_offline
from personafl.simulate.engine import Engine, gather, paces
from personafl.simulate.simulator import Simulation
from personafl.simulate.trainer import bound
from personafl.storage.store import Store
from personafl.testing import make_case
from personafl.uploads.codecs import TopEntries
from personafl.uploads.uplink import compressed
from tiers import tiered

CLIENTS = range(3)
K, LR, ZETA, GAMMA, PULL, STEP = 3, 0.1, 0.9, 0.7, 0.2, 0.5
FULL = Training(work=Steps(steps=K, batch=None), optimizer=Sgd(lr=LR))


@dataclasses.dataclass(frozen=True)
class Device:
    """Eq. (4) on a client's f + (penalty/2)‖x − z‖²: y = x + ζ(x − x⁻), x ← Π(y − η∇(y))."""

    problem: LeastSquares
    client: int
    box: float
    penalty: float = 0.0
    z: Vector | float = 0.0

    def steps(self, x: Vector, previous: Vector, count: int = K) -> tuple[Vector, Vector]:
        for _ in range(count):
            y = x + ZETA * (x - previous)
            gradient = self.problem.gradient(self.client, y) + self.penalty * (y - self.z)
            x, previous = np.clip(y - LR * gradient, -self.box, self.box), x
        return x, previous


def test_pulls_are_counted_as_training_is(problem: LeastSquares) -> None:
    """K epochs of minibatches of 2 (2, 4 and 3 of them an epoch), then K pulls: x − z is (1 − γ)^K of what it was."""
    work = Steps(epochs=5, least=1, batch=2)
    training = Training(work=work, optimizer=Sgd(lr=LR))
    options = {"momentum": ZETA, "box": 50.0}
    free, pulled = (
        problem.simulate(METHODS["fedbcdi"].build(training, penalty=penalty, **options), 1) for penalty in (0.0, PULL)
    )
    epochs = drawn_work(work, paces(np.arange(3), 0, 0))
    assert len(set(epochs.tolist())) > 1
    for client, count in enumerate(epochs.tolist()):
        trained, after = (personal(simulation, client) - problem.start for simulation in (free, pulled))
        np.testing.assert_allclose(after, (1 - PULL) ** count * trained, atol=1e-13)


def previous_of(simulation: Simulation, client: int) -> Vector:
    return simulation.store.get(client)["previous/weight"][0].numpy()


def alone_of(simulation: Simulation, client: int) -> float:
    return float(simulation.store.get(client)["alone"])


@pytest.mark.parametrize(("box", "acts"), [(0.6, True), (50.0, False)])
def test_two_rounds_of_fedbcd_by_hand(problem: LeastSquares, box: float, acts: bool) -> None:
    """x and x⁻ go on from round to round; the server's target is the weighted mean of all x_i."""
    algorithm = METHODS["fedbcd"].build(FULL, penalty=GAMMA, server_step=STEP, momentum=ZETA, box=box)
    simulation = problem.simulate(algorithm, 2)
    start = np.clip(problem.start, -box, box)
    z, x, previous = start, [start] * 3, [start] * 3
    for _ in range(2):
        for i in CLIENTS:
            x[i], previous[i] = Device(problem, i, box, GAMMA, z).steps(x[i], previous[i])
        z = z - STEP * (z - sum(p * own for p, own in zip(problem.weights, x, strict=True)))
    for i in CLIENTS:
        np.testing.assert_allclose(personal(simulation, i), x[i], atol=1e-12)
        np.testing.assert_allclose(previous_of(simulation, i), previous[i], atol=1e-12)
    np.testing.assert_allclose(shared(simulation), z, atol=1e-12)
    assert any(np.abs(own).max() == box for own in x) is acts


@pytest.mark.parametrize("carried", [True, False])
@pytest.mark.parametrize(("box", "acts"), [(0.6, True), (50.0, False)])
def test_two_rounds_of_fedbcdi_by_hand(problem: LeastSquares, box: float, acts: bool, carried: bool) -> None:
    """K steps without the penalty, K pulls one by one; x⁻ is the second last step's, not a pull's (E19)."""
    algorithm = METHODS["fedbcdi"].build(FULL, penalty=PULL, momentum=ZETA, box=box, carry_momentum=carried)
    simulation = problem.simulate(algorithm, 2)
    start = np.clip(problem.start, -box, box)
    z, x, previous = start, [start] * 3, [start] * 3
    touched = False
    for _ in range(2):
        for i in CLIENTS:
            x[i], previous[i] = Device(problem, i, box).steps(x[i], previous[i])
            touched |= bool(np.abs(x[i]).max() == box)
            last = x[i] - previous[i]
            for _ in range(K):
                x[i] = np.clip(x[i] - PULL * (x[i] - z), -box, box)
            previous[i] = x[i] - last if carried else previous[i]
        z = z - STEP * (z - sum(p * own for p, own in zip(problem.weights, x, strict=True)))
    for i in CLIENTS:
        np.testing.assert_allclose(personal(simulation, i), x[i], atol=1e-12)
        np.testing.assert_allclose(previous_of(simulation, i), previous[i], atol=1e-12)
        assert alone_of(simulation, i) == 0
    np.testing.assert_allclose(shared(simulation), z, atol=1e-12)
    assert touched is acts


@pytest.mark.parametrize("cohort", [3, 2])
def test_penalties_of_the_devices_own_by_hand(problem: LeastSquares, cohort: int) -> None:
    """γ_i = 0.3, 1, 0.3: penalties, pulls, and the mean of x_i weighted by n_i γ_i.

    FedBCD's mean is over all devices, of which those that never came are at x⁽⁰⁾; FedBCD-I's over the active ones.
    """
    gammas = np.array([0.3, 1.0, 0.3])
    for name, everyone in (("fedbcd", True), ("fedbcdi", False)):
        simulation = problem.simulate(METHODS[name].build(FULL, server_step=STEP, momentum=ZETA, box=50.0), 0)
        (known,) = simulation.federation.problems
        changes = {
            "problems": tuple(dataclasses.replace(known, penalty=gamma) for gamma in (0.3, 1.0)),
            "problem_of": np.array([0, 1, 0]),
            "engines": (Engine("stacked", 8), Engine("sequential", 8)),
            "cohort": cohort,
        }
        simulation = problem.simulate(simulation.federation.algorithm, 3, **changes)
        z, x, previous = problem.start, [problem.start] * 3, [problem.start] * 3
        for number in range(3):
            active = draw_cohort(np.arange(3), cohort, "exact", 0, number)
            for i in active:
                penalty = gammas[i] if everyone else 0.0
                x[i], previous[i] = Device(problem, i, 50.0, penalty, z).steps(x[i], previous[i])
                if not everyone:
                    last = x[i] - previous[i]
                    for _ in range(K):
                        x[i] = x[i] - gammas[i] * (x[i] - z)
                    previous[i] = x[i] - last
            counted = np.arange(3) if everyone else active
            weights = (problem.weights * gammas)[counted]
            target = sum(p * x[i] for p, i in zip(weights, counted, strict=True)) / weights.sum()
            z = z - STEP * (z - target)
        for i in CLIENTS:
            np.testing.assert_allclose(personal(simulation, i), x[i], atol=1e-12)
        np.testing.assert_allclose(shared(simulation), z, atol=1e-12)


def test_targets_under_partial_participation(problem: LeastSquares) -> None:
    """FedBCD's is the mean of everyone's last known x_i, x⁽⁰⁾ of those that never came; FedBCD-I's the cohort's."""
    for name, everyone in (("fedbcd", True), ("fedbcdi", False)):
        simulation = problem.simulate(METHODS[name].build(FULL, box="none"), 0, cohort=1)
        seen = set()
        for number in range(4):
            (client,) = draw_cohort(simulation.federation.data.seen, 1, "exact", 0, number)
            simulation.step(number)
            seen.add(int(client))
            known = [personal(simulation, i) if i in seen else problem.start for i in CLIENTS]
            mean = sum(p * x for p, x in zip(problem.weights, known, strict=True)) if everyone else known[client]
            np.testing.assert_allclose(simulation.server.target["weight"][0], mean, atol=1e-12)
            if number == 0:
                assert len(seen) < 3


@pytest.mark.parametrize("name", ["fedbcd", "fedbcdi"])
def test_server_rules_by_hand(name: str) -> None:
    """K_z = 3 steps are one of 1 − (1 − η̃)³ towards the target; `again` is one more."""
    server = METHODS[name].build(FULL, server_step=0.3, server_iterations=3, box=1.5).server
    state = server.init(None, {"w": torch.tensor([3.0, -1.0], dtype=torch.float64)}, 8.0)
    start = np.array([1.5, -1.0])
    assert state.model["w"].tolist() == start.tolist()
    changes = np.array([[1.0, 0.0], [-2.0, 4.0]])
    uploads = PersonalChange({"w": torch.from_numpy(changes)}, torch.zeros(2, dtype=torch.float64))
    z = start
    for _ in range(2):
        state = server.update(state, reduce(uploads, torch.tensor([1.0, 3.0])), 0)
        # FedBCD: changes over the population's weight 8. FedBCD-I: the mean, from the z that was sent.
        target = (
            z + (changes[0] + 3 * changes[1]) / 4 if name == "fedbcdi" else start + (changes[0] + 3 * changes[1]) / 8
        )
        start = target
        for _ in range(3):
            z = z - 0.3 * (z - target)
        np.testing.assert_allclose(state.target["w"], target, atol=1e-14)
        np.testing.assert_allclose(state.model["w"], z, atol=1e-14)
    np.testing.assert_allclose(server.again(state).model["w"], z - 0.3 * (z - target), atol=1e-14)


def test_a_mixed_server_takes_the_mean_of_the_models_that_its_devices_have() -> None:
    """With several servers z is w when uploads arrive, but its devices had the old z: x_i = z + (x_i − z)."""
    server = METHODS["fedbcdi"].build(FULL, box="none").server
    state = server.init(None, {"w": torch.tensor([1.0])}, 2.0)
    upload = PersonalChange({"w": torch.tensor([[4.0]])}, torch.zeros(1))  # x = 5
    mixed = state._replace(model={"w": torch.tensor([3.0])})
    after = server.update(mixed, reduce(upload, torch.ones(1)), 0)
    assert (float(after.target["w"]), float(after.model["w"])) == (5.0, 4.0)
    assert {"start", "sent", "target", "population"} == set(fields_of_its_own(type(state)))


def test_the_literal_sum_diverges_and_the_normalised_form_does_not() -> None:
    """E18: η_z Σγ = 0.5 · 10: z − x̄ is multiplied by −4 each time; with η_z = η̃/Σγ by ½."""
    x = np.random.default_rng(0).normal(size=(10, 3))
    literal, mean = np.ones(3), x.mean(axis=0)
    server = BlockServer(step=0.5)
    state = server.init(None, {"w": torch.ones(3, dtype=torch.float64)}, 10.0)  # type: ignore[arg-type]
    changes = PersonalChange({"w": torch.from_numpy(x - 1)}, torch.zeros(10, dtype=torch.float64))
    state = server.update(state, reduce(changes, torch.ones(10)), 0)
    for number in range(1, 20):
        literal = literal - 0.5 * (1.0 * (literal - x)).sum(axis=0)
        np.testing.assert_allclose(literal - mean, (-4.0) ** number * (1 - mean), rtol=1e-9)
        np.testing.assert_allclose(state.model["w"].numpy() - mean, 0.5**number * (1 - mean), rtol=0, atol=1e-14)
        state = server.again(state)
    assert np.abs(literal).max() > 1e9


def stationary(problem: LeastSquares, weights: Vector, penalty: float) -> tuple[list[Vector], Vector]:
    """The solution of (2): (H_i + γ)x_i = γz + H_i a_i, z = Σ p_i x_i, as one linear system."""
    d, n = len(problem.start), len(weights)
    system, right = np.zeros(((n + 1) * d, (n + 1) * d)), np.zeros((n + 1) * d)
    for i in range(n):
        rows = slice(i * d, (i + 1) * d)
        system[rows, rows] = problem.hessian(i) + penalty * np.eye(d)
        system[rows, n * d :] = -penalty * np.eye(d)
        right[rows] = problem.x[i].T @ problem.y[i] / len(problem.y[i])
        system[n * d :, rows] = -weights[i] * np.eye(d)
    system[n * d :, n * d :] = np.eye(d)
    parts = np.split(np.linalg.solve(system, right), n + 1)
    return parts[:-1], parts[-1]


@pytest.mark.parametrize(("cohort", "weights"), tiered([(3, "uniform"), (1, "examples")], [(1, "examples")]))
def test_fedbcd_reaches_the_stationary_point(problem: LeastSquares, cohort: int, weights: str) -> None:
    """With full gradients, also if one client of three takes part a round."""
    training = Training(work=Steps(steps=5, least=1, batch=None), optimizer=Sgd(lr=0.2))
    algorithm = METHODS["fedbcd"].build(training, penalty=GAMMA, momentum=0.5, box="none")
    simulation = problem.simulate(algorithm, 250 if cohort == 3 else 300, cohort=cohort, weights=weights)
    own, z = stationary(problem, problem.weights if weights == "examples" else np.full(3, 1 / 3), GAMMA)
    np.testing.assert_allclose(shared(simulation), z, atol=1e-7)
    for i in CLIENTS:
        np.testing.assert_allclose(personal(simulation, i), own[i], atol=1e-7)
    assert max(float(np.linalg.norm(x - z)) for x in own) > 0.1


def test_in_a_box_it_reaches_the_constrained_stationary_point(problem: LeastSquares) -> None:
    """x_i = Π(x_i − t∇F_i(x_i)) for any t > 0, and z is the mean; some coordinates are at the bound."""
    simulation = problem.simulate(METHODS["fedbcd"].build(FULL, penalty=GAMMA, box=0.3), 300)
    z = shared(simulation)
    own = [personal(simulation, i) for i in CLIENTS]
    for i in CLIENTS:
        gradient = problem.gradient(i, own[i]) + GAMMA * (own[i] - z)
        np.testing.assert_allclose(np.clip(own[i] - gradient, -0.3, 0.3), own[i], atol=1e-8)
    np.testing.assert_allclose(z, sum(p * x for p, x in zip(problem.weights, own, strict=True)), atol=1e-8)
    assert max(np.abs(x).max() for x in own) == pytest.approx(0.3, abs=1e-12)


@pytest.mark.parametrize("name", ["fedbcd", "fedbcdi"])
def test_without_penalty_momentum_and_box_it_is_local_training(problem: LeastSquares, name: str) -> None:
    """γ = ζ = 0: x_i are the iterates of SGD alone from the common start, minibatches and schedule included."""
    sgd = Sgd(lr=LR, weight_decay=0.01, clip=1.0, schedule=Exponential(rate=0.9))
    training = Training(work=Steps(epochs=2, batch=2), optimizer=sgd)
    simulation = problem.simulate(METHODS[name].build(training, penalty=0.0, momentum=0.0, box="none"), 3)
    local = problem.simulate(METHODS["local"].build(training), 3)
    for i in CLIENTS:
        np.testing.assert_allclose(personal(simulation, i), personal(local, i), atol=1e-13)


def test_a_vanishing_penalty_is_the_limit(problem: LeastSquares) -> None:
    """x_i of γ = 10⁻⁶ is within about that of x_i of γ = 0."""
    ends = [problem.simulate(METHODS["fedbcd"].build(FULL, penalty=penalty), 5) for penalty in (0.0, 1e-6, 1e-3)]
    gaps = [max(np.abs(personal(ends[0], i) - personal(end, i)).max() for i in CLIENTS) for end in ends[1:]]
    assert 0 < gaps[0] < 1e-5
    assert gaps[1] == pytest.approx(1000 * gaps[0], rel=0.05)


def test_offline_training_by_hand_and_the_wait(problem: LeastSquares) -> None:
    """One client a round in contact, both others train alone: K steps a round, up to four; nothing of it is sent.

    The uploads are the cohort's alone, and devices that were never in contact do not train.
    """
    algorithm = METHODS["fedbcdi"].build(FULL, penalty=PULL, momentum=ZETA, box=50.0)
    simulation = problem.simulate(algorithm, 0, cohort=1, offline=2)
    z, state, waited = problem.start, {}, False
    for number in range(20):
        (client,) = (int(c) for c in draw_cohort(simulation.federation.data.seen, 1, "exact", 0, number))
        done = simulation.step(number)
        x, previous, _ = state.get(client, (problem.start, problem.start, 0))
        trained, previous = Device(problem, client, 50.0).steps(x, previous)
        x = z + (1 - PULL) ** K * (trained - z)
        state[client] = x, previous + x - trained, 0
        z = z - STEP * (z - x)
        for other in state.keys() - {client}:
            x, previous, alone = state[other]
            waited |= alone == 4
            if alone < 4:
                state[other] = *Device(problem, other, 50.0).steps(x, previous), alone + 1
        assert done.clients == 1
        assert {i for i in CLIENTS if i in simulation.store} == state.keys()
        for i, (x, previous, alone) in state.items():
            np.testing.assert_allclose(personal(simulation, i), x, atol=1e-11)
            np.testing.assert_allclose(previous_of(simulation, i), previous, atol=1e-11)
            assert alone_of(simulation, i) == alone
        np.testing.assert_allclose(shared(simulation), z, atol=1e-11)
    assert waited


def test_pulls_in_the_momentum_would_slow_learning_down(problem: LeastSquares) -> None:
    """Under a constant gradient g and a fixed z, x − z tends to a multiple of g: 1 − ζ times as much if x⁻ stays.

    With q = (1 − γ)^K and E = x − z before the pulls, E(1 − q) = c·g where x⁻ is carried, with the last training step
    as momentum; where it stays, the momentum has (q − 1)E too, in all ζ/(1 − ζ) times that: E(1 − q)/(1 − ζ) = c·g.
    """
    linear = Problem(Net(nn.Linear(4, 1, bias=False).double()), lambda outputs, targets: outputs[:, 0])
    offsets = []
    for carried in (True, False):
        algorithm = METHODS["fedbcdi"].build(FULL, penalty=PULL, momentum=ZETA, box="none", carry_momentum=carried)
        fed = problem.simulate(algorithm, 0, problems=(linear,)).federation
        down = algorithm.server.broadcast(algorithm.server.init(linear, linear.net.init(torch.Generator()), 1.0))
        state = algorithm.client.init(linear, down, torch.Generator())
        data = gather(fed.data, np.array([1]), algorithm.client.phases, 0, 0)
        states = tree.map(lambda leaf: leaf[None], state)
        for _ in range(200):
            states, upload = fed.engines[0].train(bound(algorithm.client.update, linear), down, states, data)
        offsets.append(upload.change["weight"][0, 0].numpy())
    np.testing.assert_allclose(offsets[1], (1 - ZETA) * offsets[0], atol=1e-10)
    assert np.abs(offsets[0]).min() > 1e-3


def outcome(simulation: Simulation) -> dict[str, torch.Tensor]:
    states = {f"{i}/{path}": leaf for i in CLIENTS for path, leaf in simulation.store.get(i).items()}
    return states | tree.flatten(simulation.server)


def test_offline_training_is_the_same_stacked_sequential_and_compressed(problem: LeastSquares) -> None:
    """Random numbers of steps, minibatches; with everything kept, compressed uploads change nothing."""
    training = Training(work=Steps(steps=5, least=1, batch=2), optimizer=Sgd(lr=LR))
    algorithm = METHODS["fedbcdi"].build(training)
    ends = [
        outcome(problem.simulate(algorithm, 8, cohort=1, offline=1, engines=(engine,)))
        for engine in (Engine("stacked", 8), Engine("sequential", 8), Engine("stacked", 1))
    ]
    for end in ends[1:]:
        for path, leaf in ends[0].items():
            torch.testing.assert_close(end[path], leaf, rtol=0, atol=1e-12)
    whole = problem.simulate(compressed(algorithm, TopEntries(keep=1.0)), 8, cohort=1, offline=1)
    for path, leaf in ends[0].items():
        if "/" in path and path[0].isdigit():
            client, _, rest = path.partition("/")
            kept = whole.store.get(int(client))[f"state/{rest}"]
            torch.testing.assert_close(kept, leaf, rtol=0, atol=1e-12)


def test_offline_training_survives_a_checkpoint(problem: LeastSquares) -> None:
    """Six rounds in one go equal three, a save and a load, and three more, to the bit."""
    training = Training(work=Steps(steps=5, least=1, batch=2), optimizer=Sgd(lr=LR))
    straight = problem.simulate(METHODS["fedbcdi"].build(training), 6, cohort=1, offline=0.5)
    before = problem.simulate(METHODS["fedbcdi"].build(training), 3, cohort=1, offline=0.5)
    index = before.store.flush()
    store = Store(before.store._directory, 2**20, index)
    after = Simulation(before.federation, store, wire.encode(before.server))
    for number in range(3, 6):
        after.step(number)
    expected = outcome(straight)
    assert expected.keys() == outcome(after).keys()
    assert all(torch.equal(leaf, outcome(after)[path]) for path, leaf in expected.items())


def test_offline_training_changes_x_but_no_upload() -> None:
    """The hook returns a state and nothing else; a waiting device's is as before to the bit."""
    case = make_case(METHODS["fedbcdi"].build(FULL))
    _, state, data = case.one_client()
    rule = case.algorithm.client
    trained = rule.offline(case.problem, state, data)
    assert type(trained) is type(state)
    assert float(trained.alone) == 1
    assert not torch.equal(trained.model["1.weight"], state.model["1.weight"])
    for _ in range(3):
        trained = rule.offline(case.problem, trained, data)
    waiting = rule.offline(case.problem, trained, data)
    assert float(waiting.alone) == 4
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(trained), tree.leaves(waiting), strict=True))


def test_who_trains_offline() -> None:
    """A count or a share of the members, never an active one, at most who is left; another draw every round."""
    members, active = np.arange(10, 20), np.array([11, 15, 19])
    drawn = [tuple(draw_offline(members, active, 5, 0, number)) for number in range(50)]
    assert all(len(set(some)) == 5 and not {*some} & {*active} and [*some] == sorted(some) for some in drawn)
    assert len(set(drawn)) > 5
    assert {client for some in drawn for client in some} == {*members} - {*active}
    assert len(draw_offline(members, active, 0.2, 0, 0)) == 2
    assert draw_offline(members, active, 1.0, 0, 0).tolist() == sorted({*members} - {*active})


@pytest.mark.parametrize("name", ["fedbcd", "fedbcdi"])
def test_only_the_change_of_x_leaves(name: str) -> None:
    """And the loss; FedBCD's changes add up to x − x⁽⁰⁾, FedBCD-I's is x − z."""
    case = make_case(METHODS[name].build(FULL, box="none"))
    down, state, data = case.one_client()
    first, one = case.update(down, state, data)
    second, two = case.update(down, first, data)
    assert {path.split("/")[0] for path in tree.flatten(one)} == {"change", "loss"}
    sent = tree.add(one.change, two.change) if name == "fedbcd" else two.change
    for key, value in sent.items():
        torch.testing.assert_close(value, second.model[key] - down.start[key], rtol=0, atol=1e-12)
    assert for_returning(down).start == {}


@pytest.mark.parametrize("name", ["fedbcd", "fedbcdi"])
def test_a_newcomer_trains_from_z(problem: LeastSquares, name: str) -> None:
    """FedBCD: with the penalty. FedBCD-I: without, then a round's K pulls, however long it trained."""
    options = {"momentum": ZETA, "box": 50.0, "tune_epochs": 4, "penalty": GAMMA}
    simulation = problem.simulate(METHODS[name].build(FULL, **options), 2)
    fed, down = simulation.federation, simulation.down()
    rule = fed.algorithm.client
    data = gather(fed.data, fed.data.seen, rule.tuning, 0, 2)
    states = simulation.states(0, down, fed.data.seen)
    tuned = fed.engines[0].train(bound(rule.personalize, fed.problems[0]), down, states, data)
    z, held = shared(simulation), GAMMA if name == "fedbcd" else 0.0
    for i in CLIENTS:
        x, _ = Device(problem, i, 50.0, held, z).steps(z, z, count=4)
        x = z + (1 - GAMMA) ** K * (x - z) if name == "fedbcdi" else x
        np.testing.assert_allclose(tuned.model["weight"][i][0], x, atol=1e-12)


def test_clients_without_training_data_stay_where_they_are(problem: LeastSquares) -> None:
    """No step and no pull."""
    for name in ("fedbcd", "fedbcdi"):
        none = Training(work=Steps(steps=0, batch=None), optimizer=Sgd(lr=LR))
        simulation = problem.simulate(METHODS[name].build(none, penalty=1.0), 1)
        for i in CLIENTS:
            np.testing.assert_array_equal(personal(simulation, i), problem.start)


@pytest.mark.parametrize("proximal", [0.0, 5.0])
def test_fedavg_and_fedprox_with_acceleration_by_hand(problem: LeastSquares, proximal: float) -> None:
    """The paper's baselines: ASPG anew every round, from x = x⁻ = w."""
    optimizer = Accelerated(lr=LR, momentum=ZETA, box=0.6)
    training = Training(work=FULL.work, optimizer=optimizer)
    simulation = problem.simulate(METHODS["fedprox"].build(training, proximal=proximal), 2)
    w = problem.start
    for _ in range(2):
        ends = [Device(problem, i, 0.6, proximal, w).steps(w, w)[0] for i in CLIENTS]
        w = sum(p * end for p, end in zip(problem.weights, ends, strict=True))
    np.testing.assert_allclose(shared(simulation), w, atol=1e-12)


@pytest.mark.parametrize("name", ["fedbcd", "fedbcdi"])
def test_other_optimizers_are_refused(name: str) -> None:
    for optimizer, key in (
        (Sgd(momentum=0.5), r"training\.momentum"),
        (Adaptive(), r"training\.optimizer"),
        (Accelerated(), r"training\.optimizer"),
    ):
        with pytest.raises(BadInput, match=key):
            METHODS[name].build(Training(optimizer=optimizer))


def test_fedbcd_does_not_train_offline() -> None:
    assert METHODS["fedbcd"].build(FULL).client.offline is None
    assert compressed(METHODS["fedbcd"].build(FULL), TopEntries()).client.offline is None  # type: ignore[attr-defined]
