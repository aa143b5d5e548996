"""Several servers: by hand, equal to the plain simulator where there is one, resumed, replayed, refused."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import personafl
from crash_driver import differences, outcome
from least_squares import LeastSquares, half_square, least_squares, simulator
from personafl import api
from personafl.algorithms import METHODS
from personafl.algorithms.fedavg import fedavg
from personafl.algorithms.fedbcd import fedbcd
from personafl.algorithms.training import Training
from personafl.cloud.clock import Aggregation, Turn
from personafl.core import tree, wire
from personafl.core.algorithm import Problem
from personafl.core.batches import Steps
from personafl.core.net import Net
from personafl.core.optim import Sgd
from personafl.errors import BadInput
from personafl.evaluate.score import try_shared
from personafl.exports.export import export
from personafl.models.modelfile import Normalized
from personafl.recipe.cloud import CloudSection
from personafl.recipe.recipe import Recipe
from personafl.runs.build import prepare
from personafl.simulate.cloud import CloudSimulation, make_cloud, mixed
from personafl.simulate.engine import Engine
from personafl.simulate.federation import Federation
from personafl.simulate.simulator import Simulation
from personafl.storage.rundir import RunDirectory
from personafl.storage.store import Store
from tiers import tiered

PROTOCOLS: dict[str, dict[str, Any]] = {
    "sync": {"protocol": "sync"},
    "async": {"protocol": "async", "first": 2},
    "rigorous": {"protocol": "rigorous", "first": 2},
    "gossip": {"protocol": "gossip", "mixing": "ring"},
}
SMALL: dict[str, Any] = {
    "rounds": 4,
    "data": {"partition": {"kind": "quantity", "clients": 14, "alpha": 1.0}, "unseen": 3, "validation": 0.2},
    "model": {"name": "mlp", "hidden": [6], "personal": "output"},
    "training": {"steps": 3, "least_steps": 1, "batch": 16},
    "engine": {"threads": 1},
    "evaluation": {"every": 2},
}


def recipe(cloud: dict[str, Any] | None, method: str = "fedavg", **changes: Any) -> dict[str, Any]:
    values = {**SMALL, "method": {"name": method}, **changes}
    return values if cloud is None else {**values, "cloud": cloud}


def cloud_of(protocol: str, **changes: Any) -> dict[str, Any]:
    return {"servers": 4, "active": 2, **PROTOCOLS[protocol], **changes}


def servers_of(path: Path) -> list[torch.Tensor]:
    """The tensors of all server states in the last checkpoint, in order."""
    (file,) = path.glob("server-*.safetensors")
    return [value for _, value in sorted(wire.decode_named(file.read_bytes()).items())]


def same(a: Iterable[torch.Tensor], b: Iterable[torch.Tensor]) -> None:
    for one, other in zip(a, b, strict=True):
        assert torch.equal(one, other)


# --- one server ---


@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedslr", "scaffold", "fedbcd"])
def test_one_server_with_everyone_active_is_the_plain_simulator(tmp_path: Path, method: str) -> None:
    """To the bit: states, scores, losses and bytes."""
    plain = api.run(recipe(None, method), out=tmp_path / "plain")
    cloud = api.run(recipe({"servers": 1}, method), out=tmp_path / "cloud")
    apart = {"seconds", "time"}
    assert [{k: v for k, v in row.items() if k not in apart} for row in cloud.rows] == [
        {k: v for k, v in row.items() if k not in apart} for row in plain.rows
    ]
    same(servers_of(tmp_path / "plain"), servers_of(tmp_path / "cloud"))
    a, b = outcome(tmp_path / "plain"), outcome(tmp_path / "cloud")
    assert set(b["clients"].pop("server")) == {0}
    for key in ("clients", "states", "bytes"):
        assert a[key] == b[key]
    short = [{k: v for k, v in line.items() if k not in ("time", "journal")} for line in b["metrics"]]
    assert short == a["metrics"]
    assert (tmp_path / "plain" / "global.safetensors").read_bytes() == (
        tmp_path / "cloud" / "global.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedbcd"])
def test_sync_with_everyone_active_is_the_plain_simulator_but_for_rounding(tmp_path: Path, method: str) -> None:
    """Four servers join their uploads: the sums are the same in another order."""
    double = {"engine": {"threads": 1, "dtype": "float64"}}
    api.run(recipe(None, method, **double), out=tmp_path / "plain")
    api.run(recipe({"servers": 4}, method, **double), out=tmp_path / "cloud")
    pairs = zip(servers_of(tmp_path / "plain"), servers_of(tmp_path / "cloud"), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


# --- every protocol ---


RUNNING = ["fedavg", "fedprox", "fedalt", "fedslr", "scaffold", "ditto", "fedbcd", "fedbcdi"]
EACH = {(method, list(PROTOCOLS)[place % 4]) for place, method in enumerate(RUNNING)}  # of methods and of protocols


@pytest.mark.parametrize(("method", "protocol"), tiered(itertools.product(RUNNING, PROTOCOLS), EACH))
def test_methods_run_on_every_protocol(tmp_path: Path, method: str, protocol: str) -> None:
    """They finish, learn something finite, and say when each round and each score was."""
    result = api.run(recipe(cloud_of(protocol), method), out=tmp_path / "run")
    lines = RunDirectory(tmp_path / "run").metrics()
    rounds = [line for line in lines if line["event"] == "round"]
    times = [line["time"] for line in rounds]
    assert [line["number"] for line in rounds] == [0, 1, 2, 3]
    assert times == sorted(times)
    assert times[0] > 0
    assert {line["time"] for line in lines if line["event"] == "score"} == {times[1]}
    assert {row["time"] for row in result.rows} == {times[-1]}
    for line, event in zip(rounds, journal(RunDirectory(tmp_path / "run")), strict=True):
        turns = (*event.isolated, *event.members)
        assert line["clients"] == 2 * len(turns)
        assert len(event.members) == PROTOCOLS[protocol].get("first", 4)


@pytest.mark.system
def test_all_methods_see_the_same_events(tmp_path: Path) -> None:
    events = []
    for method in ("fedavg", "ditto", "fedslr"):
        api.run(recipe(cloud_of("rigorous"), method), out=tmp_path / method)
        events.append(list(journal(RunDirectory(tmp_path / method))))
    assert events[0] == events[1] == events[2]


# --- resume and replay ---


class Crash(BaseException):
    """Ends a run from within."""


@pytest.mark.parametrize(
    ("method", "protocol"),
    tiered(itertools.product(["scaffold", "fedslr"], PROTOCOLS), [("scaffold", "gossip")]),
)
def test_a_run_that_was_stopped_ends_as_one_that_was_not(tmp_path: Path, method: str, protocol: str) -> None:
    """Killed after round 1 of 6 with a checkpoint after each, and after round 3."""
    values = recipe(cloud_of(protocol), method, rounds=6, engine={"threads": 1, "checkpoint_seconds": 0})

    def crash(progress: Any) -> None:
        if getattr(progress, "done", 0) == 2:
            raise Crash

    api.run(values, out=tmp_path / "straight")
    with pytest.raises(Crash):
        api.run(values, out=tmp_path / "stopped", listener=crash)
    with pytest.raises(Crash):
        api.resume(tmp_path / "stopped", listener=lambda method, seed: crash)
    assert RunDirectory(tmp_path / "stopped").checkpoint().rounds == 4
    api.resume(tmp_path / "stopped")
    assert differences(outcome(tmp_path / "straight"), outcome(tmp_path / "stopped")) == []


def test_stage_a_has_one_server(tmp_path: Path) -> None:
    """Also where the method of stage (a) cannot do what the cloud asks for."""
    values = recipe(cloud_of("sync", iterations=2), "fedbcd", pretrain={"rounds": 2})
    api.run(values, out=tmp_path / "run")
    first, then = (RunDirectory(tmp_path / path).metrics() for path in ("run/pretrain", "run"))
    assert [line["clients"] for line in first if line["event"] == "round"] == [11, 11]
    assert not any("time" in line for line in first)
    assert all("time" in line for line in then)


def journal(directory: RunDirectory) -> list[Aggregation]:
    """Return what happened in a run on a cloud, as its directory has it."""

    def turns(entries: list[dict[str, Any]]) -> tuple[Turn, ...]:
        return tuple(Turn(**{**entry, "devices": tuple(entry["devices"])}) for entry in entries)

    found = [entry["journal"] for entry in directory.metrics() if "journal" in entry]
    return [Aggregation(one["number"], one["time"], turns(one["members"]), turns(one["isolated"])) for one in found]


@pytest.mark.parametrize("protocol", tiered(["async", "rigorous"], ["async"]))
def test_a_replayed_journal_gives_the_same_bits(tmp_path: Path, protocol: str) -> None:
    """The clock is given another seed, so that it would tell another story."""
    values = recipe(cloud_of(protocol), "ditto")
    api.run(values, out=tmp_path / "run")
    fed = prepare(Recipe.parse(values)).federation
    assert fed.cloud is not None
    other = dataclasses.replace(fed, cloud=dataclasses.replace(fed.cloud, seed=99))
    directory = RunDirectory(tmp_path / "run")
    events = list(journal(directory))
    assert events != list(itertools.islice(other.cloud.aggregations(), 4))  # type: ignore[union-attr]
    replayed = CloudSimulation(other, Store(tmp_path / "states", 2**30), events=events)
    for number in range(4):
        replayed.step(number)
    assert wire.encode(replayed.server) == directory.server_bytes(directory.checkpoint())
    kept = Store(tmp_path / "run" / "states", 2**30, directory.checkpoint().states)
    assert len(kept) == len(replayed.store)
    for client in kept.clients.tolist():
        one, other = kept.get(client), replayed.store.get(client)
        assert one.keys() == other.keys()
        same(one.values(), [other[path] for path in one])


# --- by hand ---


@pytest.fixture
def three(tmp_path: Path) -> LeastSquares:
    return least_squares(tmp_path)


TRAINING = Training(work=Steps(steps=2, batch=None), optimizer=Sgd(lr=0.1))
ALONE = (("a",), ("b",), ("c",))


def on_cloud(
    federation: Federation, section: CloudSection, folder: Path, events: Iterable[Aggregation] | None = None
) -> CloudSimulation:
    cloud = make_cloud(section, federation.data, federation.algorithm, TRAINING.work, 0)
    federation = dataclasses.replace(federation, cloud=cloud, weights="uniform")
    return CloudSimulation(federation, Store(folder / f"cloud{len(list(folder.iterdir()))}", 2**20), None, events)


def models(simulation: Simulation) -> NDArray[np.float64]:
    return np.stack([state.model["weight"][0].numpy() for state in simulation.server])


def event(number: int, members: tuple[int, ...], isolated: tuple[int, ...] = ()) -> Aggregation:
    """Server n has the device n alone."""

    def turns(servers: tuple[int, ...]) -> tuple[Turn, ...]:
        return tuple(Turn(server, number, float(number), (server,)) for server in servers)

    return Aggregation(number, float(number), turns(members), turns(isolated))


def test_fedavg_by_hand(three: LeastSquares, tmp_path: Path) -> None:
    """Devices start from their own server's model z_n; with d_n its change, z_n ← (mean of the mixed) + d_n.

    Round 0: 0 and 1 are mixed. Round 1: 2 is alone (it still has the start), then 1 and 2 are mixed.
    """
    section = CloudSection(servers=3, members=ALONE, protocol="rigorous", first=2)
    events = [event(0, (0, 1)), event(1, (1, 2), isolated=(2,))]
    simulation = on_cloud(three.simulate(fedavg(TRAINING), 0).federation, section, tmp_path, events)
    z = dict.fromkeys(range(3), three.start)

    def change(n: int) -> NDArray[np.float64]:
        return three.descend(n, z[n], 0.1, 2) - z[n]

    simulation.step(0)
    z = {0: three.start + change(0), 1: three.start + change(1), 2: three.start}
    np.testing.assert_allclose(models(simulation), np.stack(list(z.values())), rtol=0, atol=1e-12)
    simulation.step(1)
    z[2] = z[2] + change(2)
    middle = (z[1] + z[2]) / 2
    z = {0: z[0], 1: middle + change(1), 2: middle + change(2)}
    np.testing.assert_allclose(models(simulation), np.stack(list(z.values())), rtol=0, atol=1e-12)


def test_gossip_by_hand(three: LeastSquares, tmp_path: Path) -> None:
    """Two matrices in turn; K_z = 2: z ← step(A step(A z)), both times towards the x_i of the round."""
    first, second = np.array([[0.5, 0.5, 0.0], [0.5, 0.25, 0.25], [0.0, 0.25, 0.75]]), np.eye(3)[[1, 2, 0]]
    mixing = tuple(tuple(map(tuple, matrix.tolist())) for matrix in (first, second))
    section = CloudSection(servers=3, members=ALONE, protocol="gossip", mixing=mixing, iterations=2)
    algorithm = fedbcd(TRAINING, penalty=0.7, server_step=0.4, momentum=0.0, box="none")
    simulation = on_cloud(three.simulate(algorithm, 0).federation, section, tmp_path)
    z = np.stack([three.start] * 3)
    x = [three.start] * 3
    for number, matrix in enumerate((first, second, first)):
        x = [three.descend(n, x[n], 0.1, 2, anchor=z[n], pull=0.7) for n in range(3)]
        for _ in range(2):
            w = matrix @ z
            z = w - 0.4 * (w - np.stack(x))
        simulation.step(number)
        np.testing.assert_allclose(models(simulation), z, rtol=0, atol=1e-12)


def test_cloud_iterations_are_the_servers_own_where_nothing_is_mixed(three: LeastSquares, tmp_path: Path) -> None:
    """In sync, K_z by the cloud is the method's server_iterations, to the bit."""
    ends = []
    for cloud, own in ((3, 1), (1, 3)):
        algorithm = fedbcd(TRAINING, server_iterations=own)
        section = CloudSection(servers=3, members=ALONE, iterations=cloud)
        simulation = on_cloud(three.simulate(algorithm, 0).federation, section, tmp_path)
        for number in range(3):
            simulation.step(number)
        ends.append(models(simulation))
    np.testing.assert_array_equal(*ends)


def test_mixing_leaves_out_what_is_a_servers_own() -> None:
    """SCAFFOLD inside: the weight of a server's devices is its own, x and c are mixed; rows of A sum to 1."""
    net = Net(nn.Linear(2, 1))
    rule = METHODS["scaffold"].build(Training()).server
    states = [
        rule.init(Problem(net, half_square), {"weight": torch.full((1, 2), value)}, weight)
        for value, weight in ((1.0, 10.0), (4.0, 30.0))
    ]
    result = mixed(states, np.array([1 / 3, 2 / 3]), 1)
    assert float(result.population) == 30.0
    torch.testing.assert_close(result.shared.model["weight"], torch.full((1, 2), 3.0))
    slr = METHODS["fedslr"].build(Training()).server
    inside = [slr.init(Problem(net, half_square), {"weight": torch.ones(1, 2)}, weight) for weight in (10.0, 30.0)]
    assert float(mixed(inside, np.array([0.5, 0.5]), 0).solver.population) == 10.0


def test_renaming_servers_changes_nothing_else(tmp_path: Path) -> None:
    """Servers 0, 1, 2, 3 become 2, 0, 3, 1: their states move with them, and devices do not notice."""
    order = [2, 0, 3, 1]  # new server k is the old server order[k]
    double = {"engine": {"threads": 1, "dtype": "float64"}}
    fed = prepare(Recipe.parse(recipe(cloud_of("rigorous"), "fedbcd", **double))).federation
    assert fed.cloud is not None
    names = [tuple(fed.data.client_names[c] for c in own) for own in fed.cloud.topology.devices]
    ends = []
    for members in (names, [names[old] for old in order]):
        values = recipe(cloud_of("rigorous", members=members), "fedbcd", **double)
        one = CloudSimulation(prepare(Recipe.parse(values)).federation, Store(tmp_path / f"{len(ends)}", 2**30))
        times = [one.step(number).time for number in range(6)]
        ends.append((times, one.server, {c: one.store.get(c) for c in range(14) if c in one.store}))
    (times, states, devices), (other_times, other_states, other_devices) = ends
    assert times == other_times
    for new, old in enumerate(order):
        for a, b in zip(tree.leaves(states[old]), tree.leaves(other_states[new]), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert devices.keys() == other_devices.keys()
    for client, entry in devices.items():
        for path, leaf in entry.items():
            torch.testing.assert_close(leaf, other_devices[client][path], rtol=0, atol=1e-12)


def test_devices_train_offline_with_their_server(tmp_path: Path) -> None:
    """All others of a server that has its turn, and were in contact before, train; those of other servers do not."""
    values = recipe(cloud_of("async"), "fedbcdi", federation={"offline": 1.0})
    fed = prepare(Recipe.parse(values)).federation
    assert fed.cloud is not None
    run = CloudSimulation(fed, Store(tmp_path / "states", 2**30))
    trained = 0
    for number, happened in zip(range(8), fed.cloud.aggregations(), strict=False):
        before = {c: run.store.get(c)["alone"].item() for c in fed.data.seen.tolist() if c in run.store}
        run.step(number)
        active = {device for turn in happened.members for device in turn.devices}
        turns = {turn.server for turn in happened.members}
        for client, alone in before.items():
            now = run.store.get(client)["alone"].item()
            offline = client not in active and fed.cloud.topology.home[client] in turns
            assert now == (0 if client in active else min(alone + 1, 4) if offline else alone)
            trained += offline
    assert trained > 5


# --- scores, files ---


@pytest.mark.parametrize("method", ["fedavg", "fedslr"])
def test_a_clients_global_model_is_its_own_servers(tmp_path: Path, method: str) -> None:
    """Of unseen ones too. For other runs to start from, and as global.safetensors, there is the mean of the servers."""
    values = recipe(cloud_of("gossip"), method)
    result = api.run(values, out=tmp_path / "run")
    fed = prepare(Recipe.parse(values)).federation
    assert fed.cloud is not None
    directory = RunDirectory(tmp_path / "run")
    run = CloudSimulation(fed, Store(tmp_path / "states", 2**30), directory.server_bytes(directory.checkpoint()))
    columns = result.columns
    assert columns["server"] == fed.cloud.topology.home[columns["client"]].tolist()
    assert set(columns["server"]) == {0, 1, 2, 3}
    found = [run.down(server).model for server in range(4)]
    assert not torch.equal(found[0]["1.weight"], found[1]["1.weight"])
    for row, client in enumerate(columns["client"]):
        model, clients = found[columns["server"][row]], np.array([client])
        scores = try_shared(fed.problems[0], model, fed.data, fed.data.test, clients).scores()
        assert columns["global_test_loss"][row] == pytest.approx(scores.loss[0], abs=1e-6)
    start = wire.decode_named((tmp_path / "run" / "global.safetensors").read_bytes())
    exported = export(tmp_path / "run", tmp_path / "models", clients="all" if method == "fedslr" else None)
    for name, value in api_model(exported.models[0].file).items():
        mean = torch.stack([model[name] for model in found]).mean(dim=0)
        torch.testing.assert_close(start[name], mean, rtol=0, atol=1e-6)
        torch.testing.assert_close(value, mean, rtol=0, atol=1e-5)
    assert exported.models[0].test_accuracy is None
    for model in exported.models[1:]:
        client = fed.data.client_names.index(str(model.client))
        state = Store(tmp_path / "run" / "tuned", 2**30, directory.checkpoint().tuned)
        own = state.get(client) if client in state else None
        if own is not None:
            expected = found[fed.cloud.topology.home[client]]["1.weight"] + own["own/1.weight"]
            torch.testing.assert_close(api_model(model.file)["1.weight"], expected, rtol=0, atol=1e-5)


def api_model(file: Path) -> dict[str, torch.Tensor]:
    """The dense tensors of an exported model."""
    network = personafl.load_model(file, dense=True)
    return dict((network.network if isinstance(network, Normalized) else network).state_dict())


# --- FedBCD on quadratics ---


@dataclasses.dataclass(frozen=True)
class Quadratics:
    """Devices who disagree: g_i = (1/8)‖X_i w − y_i‖² in two unknowns, curvatures from 1 to 3; γ = 1/2."""

    x: NDArray[np.float64]  # [devices, 4, 2]
    y: NDArray[np.float64]  # [devices, 4]
    folder: Path

    @classmethod
    def draw(cls, devices: int, folder: Path) -> Quadratics:
        generator = np.random.default_rng(3)
        directions, _ = np.linalg.qr(generator.normal(size=(devices, 4, 2)))
        x = directions * np.sqrt(4 * generator.uniform(1, 3, size=(devices, 1, 2)))
        return cls(x, x @ generator.normal(size=2) + 3 * generator.normal(size=(devices, 4)), folder)

    def stationary(self, weights: Iterable[float]) -> NDArray[np.float64]:
        """z = Σ p_i x_i(z) with x_i(z) = (H_i + γ)⁻¹(b_i + γz): the stationary point of problem (2)."""
        left, right = np.eye(2), np.zeros(2)
        for share, x, y in zip(weights, self.x, self.y, strict=True):
            inverse = np.linalg.inv(x.T @ x / 4 + 0.5 * np.eye(2))
            left -= share * 0.5 * inverse
            right += share * inverse @ (x.T @ y / 4)
        return np.linalg.solve(left, right)

    def simulation(
        self, section: CloudSection, step: float, events: Iterable[Aggregation] | None = None
    ) -> CloudSimulation:
        start = nn.Linear(2, 1, bias=False).double()
        nn.init.zeros_(start.weight)
        problem = Problem(Net(start), half_square)
        sizes = (4,) * len(self.x)
        simulate = simulator(self.folder, self.x.reshape(-1, 2), self.y.reshape(-1), sizes, problem)
        training = Training(work=Steps(steps=1, batch=None), optimizer=Sgd(lr=0.28))  # 1/(L + γ)
        algorithm = fedbcd(training, penalty=0.5, server_step=step, momentum=0.2, box="none")
        federation = simulate(algorithm, 0, engines=(Engine("sequential", 8),)).federation
        return on_cloud(federation, section, self.folder, events)

    def run(
        self,
        section: CloudSection,
        step: float,
        rounds: int,
        events: Iterable[Aggregation] | None = None,
        last: int = 1,
    ) -> NDArray[np.float64]:
        """Return the models of the servers, [servers, 2], as the mean over the last rounds."""
        simulation = self.simulation(section, step, events)
        found = []
        for number in range(rounds):
            simulation.step(number)
            found = [*found, models(simulation)][-last:]
        return np.mean(found, axis=0)  # type: ignore[no-any-return]


PAIRS = (("a", "b"), ("c", "d"), ("e", "f"))


@pytest.mark.parametrize("active", [None, 1])
def test_sync_reaches_the_stationary_point(tmp_path: Path, active: int | None) -> None:
    """With a constant step, whether all devices are active or one of each server's two."""
    problem = Quadratics.draw(6, tmp_path)
    found = problem.run(CloudSection(servers=3, members=PAIRS, active=active), 0.5, 100)
    np.testing.assert_allclose(found, [problem.stationary([1 / 6] * 6)], rtol=0, atol=1e-9)


@pytest.mark.parametrize("protocol", tiered(["async", "rigorous", "gossip"], ["rigorous"]))
def test_servers_with_like_devices_reach_the_stationary_point(tmp_path: Path, protocol: str) -> None:
    """Devices differ, but each server has the same two: at the stationary point no server pulls its own way."""
    two = Quadratics.draw(2, tmp_path)
    problem = dataclasses.replace(two, x=np.tile(two.x, (3, 1, 1)), y=np.tile(two.y, (3, 1)))
    found = problem.run(CloudSection(servers=3, members=PAIRS, **PROTOCOLS[protocol]), 0.5, 100)
    np.testing.assert_allclose(found, [problem.stationary([1 / 6] * 6)] * 3, rtol=0, atol=1e-8)


TURNS: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {  # (mixed, isolated before), over and over
    "gossip": [((0, 1, 2), ())],
    "async": [((0, 1), ()), ((1, 2), ()), ((0, 2), ())],
    "rigorous": [((0, 1), (2,)), ((1, 2), (0,)), ((0, 2), (1,))],
    "async with a fast server": [((0, 1), ()), ((0, 2), ())],
    "rigorous with a fast server": [((0, 1), (2,)), ((0, 2), (1,))],
}


@pytest.mark.parametrize("story", tiered(TURNS, []))
def test_servers_that_differ_reach_a_neighbourhood_as_small_as_the_step(tmp_path: Path, story: str) -> None:
    """As decentralised gradient descent does. One device a server; the mean of z_n over a cycle of events.

    The distance to the stationary point is in proportion to the step η̃: it halves with it, and the line through two
    steps meets η̃ = 0 nearer to it. But where a server has part in twice as many rounds as the others, async goes to the
    stationary point of another problem, in which its devices count double. The rigorous protocol, in which late servers
    update alone, does not.
    """
    problem = Quadratics.draw(3, tmp_path)
    turns = TURNS[story]
    section = CloudSection(servers=3, members=ALONE, **PROTOCOLS[story.split()[0]])
    fast = story == "async with a fast server"
    point = problem.stationary([0.5, 0.25, 0.25] if fast else [1 / 3] * 3)
    found = []
    for step in (0.12, 0.06):
        rounds = round(16 / step)
        events = [event(n, *turns[n % len(turns)]) for n in range(rounds)]
        found.append(problem.run(section, step, rounds, events, last=len(turns)).mean(axis=0))
    errors = [np.linalg.norm(z - point) for z in found]
    limit = 2 * found[1] - found[0]
    assert errors[0] / errors[1] == pytest.approx(2, abs=0.4)
    assert np.linalg.norm(limit - point) < 0.3 * errors[1]
    if fast:
        assert np.linalg.norm(limit - problem.stationary([1 / 3] * 3)) > 3 * errors[1]


@pytest.mark.system
def test_every_server_counts_alike_however_many_devices_it_has(tmp_path: Path) -> None:
    """Where servers have states of their own, z_n goes to the mean of n's devices: p_i = 1/(N·|Q_n|), not 1/Σ|Q_n|.

    The problem is (2) where servers have equally many devices. In sync all devices count alike in any case.
    """
    problem = Quadratics.draw(4, tmp_path)
    members = (("a", "b", "c"), ("d",))
    section = CloudSection(servers=2, members=members, protocol="gossip", mixing="full")
    found = [problem.run(section, step, round(16 / step)).mean(axis=0) for step in (0.12, 0.06)]
    limit, point = 2 * found[1] - found[0], problem.stationary([1 / 6, 1 / 6, 1 / 6, 1 / 2])
    assert np.linalg.norm(limit - point) < 0.1 * np.linalg.norm(point - problem.stationary([1 / 4] * 4))
    sync = problem.run(CloudSection(servers=2, members=members), 0.5, 100)
    np.testing.assert_allclose(sync, [problem.stationary([1 / 4] * 4)], rtol=0, atol=1e-9)


# --- bad input ---

SLOW = {"kind": "constant", "seconds": 9.0}


@pytest.mark.parametrize(
    ("cloud", "text"),
    [
        ({"protocol": "async", "first": 5}, "cloud.first: waits for 5 servers, but there are only 4; lower it"),
        ({"protocol": "async"}, "cloud.first: async needs it; say how many of the 4 servers to wait for"),
        ({"protocol": "rigorous"}, "cloud.first: rigorous needs it; say how many of the 4 servers to wait for"),
        ({"first": 2}, 'cloud.first: sync waits for all servers; remove it, or set cloud.protocol = "async"'),
        ({"mixing": "ring"}, 'cloud.mixing: sync has its own; remove it, or set cloud.protocol = "gossip"'),
        ({"protocol": "gossip"}, 'cloud.mixing: gossip needs it; set it to "full", "ring", or a doubly stochastic'),
        ({"protocol": "gossip", "mixing": [[1, 0], [0, 1]]}, "cloud.mixing: is 2×2, but there are 4 servers"),
        ({"servers": 0}, "cloud.servers: input should be greater than or equal to 1 (given: 0)"),
        ({"servers": 2, "members": [["0"], []]}, "cloud.members[1]: a server without devices; name its clients"),
        ({"servers": 2, "members": [["0"], ["1", "0"]]}, "cloud.members[1]: '0' is in cloud.members[0] too; remove"),
        ({"servers": 2, "members": [["0", "0"], ["1"]]}, "cloud.members[0]: '0' is there twice; remove it from one"),
        ({"members": [["0"], ["1"]]}, "cloud.members: has 2 lists for 4 servers; give one list per server"),
        ({"servers": 2, "members": [["0"], ["x"]]}, "cloud.members[1]: there is no client 'x'; "),
        ({"servers": 2, "members": [["0"], ["1"]]}, "cloud.members: 9 clients are in no server ("),
        ({"servers": 12}, "cloud.servers: 12 servers, but only 11 clients take part in training"),
        ({"active": 3}, "cloud.active: 3 devices of each server, but server "),
        (
            {"iterations": 2},
            "cloud.iterations: fedavg's server cannot step again without uploads; remove it (given: 2)",
        ),
        ({"arrival": {"kind": "exponential", "mean": -1}}, "cloud.arrival.mean: input should be greater than 0"),
        ({"step": {"kind": "trace", "file": "nowhere.txt"}}, "nowhere.txt: cannot read the trace"),
        (
            {"delays": [{"servers": [4], "step": SLOW}]},
            "cloud.delays[0].servers: there is no server 4; they",
        ),
        ({"delays": [{"step": SLOW}]}, "cloud.delays[0]: say whose they are (servers, devices), and arrival or step"),
        ({"delays": [{"devices": ["x"], "step": SLOW}]}, "cloud.delays[0]: there is no client 'x'; "),
        ({"arrivals": {}}, "cloud.arrivals: unknown key; did you mean 'arrival'?"),
    ],
)
def test_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cloud: dict[str, Any], text: str) -> None:
    """Named before any work: there is no run directory."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput) as error:
        api.run(recipe({"servers": 4, **cloud}), out=tmp_path / "run")
    assert text in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("key", "value"), [("cohort", 4), ("cohort", 1), ("cohort", 0.5), ("sampling", "bernoulli")])
def test_a_cloud_draws_no_cohorts(key: str, value: Any) -> None:
    with pytest.raises(BadInput, match=rf"^federation.{key}: with \[cloud\] the first devices that ask take part"):
        Recipe.parse(recipe({"servers": 4}, federation={key: value}))


def test_a_recipe_with_a_cloud_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With whole paths of traces, so that it can be resumed from any folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "times.txt").write_text("1.5\n2\n")
    mixing = [[[0.5, 0.5], [0.5, 0.5]], [[1.0, 0.0], [0.0, 1.0]]]
    cloud = {"servers": 2, "protocol": "gossip", "mixing": mixing, "step": {"kind": "trace", "file": "times.txt"}}
    api.run(recipe(cloud), out=tmp_path / "run")
    kept = api.recipe_of(tmp_path / "run")
    assert kept.cloud is not None
    assert kept.cloud.model_dump(mode="json")["step"]["file"] == str(tmp_path / "times.txt")
    assert kept == Recipe.parse(recipe(cloud)).anchored().model_copy(update={"compare": kept.compare})


def test_servers_and_devices_with_delays_of_their_own(tmp_path: Path) -> None:
    """Server 0 is never among the first, for its devices are slow; one device of server 1 is never active."""
    laws = {"slow": {"kind": "constant", "seconds": 1e6}, "late": {"kind": "constant", "seconds": 1e3}}
    given = prepare(Recipe.parse(recipe(cloud_of("async"))))
    assert given.federation.cloud is not None
    late = int(given.federation.cloud.topology.devices[1][0])
    delays = [{"servers": [0], "step": laws["slow"]}, {"devices": [str(late)], "arrival": laws["late"]}]
    cloud = prepare(Recipe.parse(recipe(cloud_of("async", delays=delays)))).federation.cloud
    assert cloud is not None
    events = list(itertools.islice(cloud.aggregations(), 8))
    turns = [turn for event in events for turn in event.members]
    plain = [turn for event in itertools.islice(given.federation.cloud.aggregations(), 8) for turn in event.members]
    assert {turn.server for turn in turns} == {1, 2, 3}
    assert {turn.server for turn in plain} == {0, 1, 2, 3}
    assert late not in {device for turn in turns for device in turn.devices}


def test_a_run_that_waits_for_one_server_says_what_that_means() -> None:
    alone = prepare(Recipe.parse(recipe(cloud_of("async", first=1))))
    assert any(note.startswith("cloud.first = 1: nothing is mixed") for note in alone.notes)
    assert not any("cloud.first" in note for note in prepare(Recipe.parse(recipe(cloud_of("async")))).notes)
