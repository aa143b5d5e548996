"""The simulator on real digits: equal numbers however clients are run, fair means, exact bytes, honest failures."""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from personafl import api
from personafl.algorithms import METHODS
from personafl.algorithms.averaging import Averaging
from personafl.algorithms.training import Training
from personafl.core import rng, tree, wire
from personafl.core.algorithm import Algorithm, Problem, ServerRule
from personafl.core.batches import Steps
from personafl.core.losses import cross_entropy
from personafl.core.net import Net
from personafl.core.optim import Sgd
from personafl.data.config import DataConfig, Dirichlet, Quantity
from personafl.errors import BadInput, Diverged
from personafl.evaluate.score import Scores
from personafl.runs.build import prepare
from personafl.runs.result import Result
from personafl.runs.scoring import score, tune
from personafl.simulate import simulator
from personafl.simulate.cohort import draw_cohort
from personafl.simulate.engine import Engine, gather
from personafl.simulate.federation import Federation
from personafl.simulate.simulator import Simulation
from personafl.simulate.trainer import bound
from personafl.storage.rundir import RunDirectory
from personafl.storage.store import Store
from personafl.testing import make_case

CPU = torch.device("cpu")
SMALL = {
    "rounds": 3,
    "data": {"partition": {"kind": "quantity", "clients": 9, "alpha": 1.0}, "unseen": 2, "validation": 0.2},
    "model": {"name": "mlp", "hidden": [8], "personal": "output"},
    "training": {"epochs": 1, "batch": 16},
    "federation": {"cohort": 4},
    "engine": {"threads": 1},
}


def recipe(**sections: Any) -> dict[str, Any]:
    """The small recipe with sections changed."""
    return {**SMALL, **{k: {**SMALL.get(k, {}), **v} if isinstance(v, dict) else v for k, v in sections.items()}}  # type: ignore[dict-item]


def mlp(width: int) -> Net:
    return Net(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))).to(
        CPU, torch.float64
    )


def final_scores(run: Simulation) -> dict[tuple[str, str], Scores]:
    """Fine-tune whoever has no state, and score all on their test data."""
    data = run.federation.data
    with tempfile.TemporaryDirectory() as folder:
        tuned = Store(Path(folder) / "tuned", 2**30)
        newcomers = np.array([client for client in data.seen if int(client) not in run.store], dtype=np.int64)
        if run.federation.algorithm.client.tuning:
            tune(run, tuned, newcomers, 3)
        return score(run, tuned, data.seen, {"test": data.test}, blends=False).scores


def federation(method: str, *, cohort: int = 5, engine: Engine | None = None, **changes: Any) -> Federation:
    """Twelve clients of very unequal size, float64."""
    from personafl.data.build import load

    data = load(DataConfig(partition=Quantity(clients=12, alpha=1.0)), 0)
    data = dataclasses.replace(data, x=data.x.double())
    training = Training(work=Steps(epochs=1, batch=16), optimizer=Sgd(lr=0.2, momentum=0.5))
    fed = Federation(
        algorithm=METHODS[method].build(training),
        data=data,
        problems=(Problem(mlp(8), cross_entropy),),
        problem_of=np.zeros(data.clients, dtype=np.int64),
        engines=(engine or Engine("stacked", 1024),),
        seed=5,
        cohort=cohort,
        sampling="exact",
        weights="examples",
        dtype=torch.float64,
    )
    return dataclasses.replace(fed, **changes)


@pytest.fixture
def simulate() -> Iterator[Callable[..., Simulation]]:
    with tempfile.TemporaryDirectory() as folder:

        def make(fed: Federation, budget: int = 2**30) -> Simulation:
            return Simulation(fed, Store(Path(tempfile.mkdtemp(dir=folder)) / "states", budget))

        yield make


def everything(simulation: Simulation) -> dict[str, Tensor]:
    found = {f"server/{path}": leaf for path, leaf in tree.flatten(simulation.server).items()}
    for client in range(simulation.federation.data.clients):
        if client in simulation.store:
            found |= {f"{client}/{path}": leaf for path, leaf in simulation.store.get(client).items()}
    return found


@pytest.mark.parametrize(("method", "cohort"), [("fedavg", 12), ("ditto", 5)])
def test_stacked_equals_sequential_equals_chunked(simulate: Any, method: str, cohort: int) -> None:
    """Three rounds on digits, all or five of twelve clients, in chunks, and a store that keeps nothing."""
    outcomes = []
    for strategy, chunk, budget in (
        ("stacked", 1024, 2**30),
        ("stacked", 3, 0),
        ("sequential", 1024, 2**30),
        ("sequential", 2, 5000),
    ):
        run = simulate(federation(method, cohort=cohort, engine=Engine(strategy, chunk)), budget)  # type: ignore[arg-type]
        rounds = [run.step(number) for number in range(3)]
        scores = final_scores(run)
        outcomes.append((everything(run), [r.loss for r in rounds], scores))
    first, losses, scores = outcomes[0]
    for other, other_losses, other_scores in outcomes[1:]:
        assert first.keys() == other.keys()
        for path, leaf in first.items():
            torch.testing.assert_close(leaf, other[path], rtol=0, atol=1e-10)
        np.testing.assert_allclose(losses, other_losses, rtol=0, atol=1e-10)
        for key, value in scores.items():
            np.testing.assert_allclose(value.loss, other_scores[key].loss, rtol=0, atol=1e-9)
            np.testing.assert_array_equal(value.accuracy, other_scores[key].accuracy)


@pytest.mark.parametrize(("method", "draws"), [("ditto", False), ("local", True)])
def test_newcomers_are_as_if_each_began_alone(simulate: Any, method: str, draws: bool) -> None:
    run = simulate(federation(method))
    fed, down, clients = run.federation, run.down(), np.array([3, 4, 9])
    states = run.states(0, down, clients)
    for row, client in enumerate(clients.tolist()):
        alone = fed.learners.cast(fed.algorithm.client.init(fed.problems[0], down, rng.generator(5, "init", client)))
        for path, leaf in tree.flatten(alone).items():
            assert torch.equal(tree.flatten(states)[path][row], leaf)
    assert all(leaf.is_contiguous() for leaf in tree.leaves(states))
    assert draws == any(not torch.equal(leaf[0], leaf[1]) for leaf in tree.leaves(states))


@pytest.mark.parametrize("weights", ["examples", "uniform"])
@pytest.mark.parametrize("strategy", ["stacked", "sequential"])
def test_the_mean_is_the_one_by_hand(simulate: Any, weights: str, strategy: str) -> None:
    """FedAvg's new model is Σ nᵢ xᵢ / Σ nᵢ (or Σ xᵢ / m) of clients trained alone, so padding weighs nothing."""
    run = simulate(federation("fedavg", weights=weights, engine=Engine(strategy, 2)))  # type: ignore[arg-type]
    fed = run.federation
    down = wire.dense(fed.algorithm.server.broadcast(run.server))
    cohort = draw_cohort(fed.data.seen, 5, "exact", 5, 0)
    sizes = fed.data.train.sizes[cohort]
    assert len(set(sizes.tolist())) > 1
    alone = []
    for client in cohort:
        data = gather(fed.data, np.array([client]), fed.algorithm.client.phases, 5, 0)
        states = run.states(0, down, np.array([client]))
        _, up = Engine("sequential", 1).train(bound(fed.algorithm.client.update, fed.problems[0]), down, states, data)
        alone.append(tree.flatten(tree.take(up, 0)))
    share = sizes / sizes.sum() if weights == "examples" else np.full(5, 0.2)
    before = {path: leaf.clone() for path, leaf in down.model.items()}
    done = run.step(0)
    assert done.loss == pytest.approx(sum(s * up["loss"].item() for s, up in zip(share, alone, strict=True)), abs=1e-12)
    after = wire.dense(fed.algorithm.server.broadcast(run.server)).model
    for path, start in before.items():
        change = sum(s * up[f"change/{path}"] for s, up in zip(share, alone, strict=True))
        gap = min((start + sign * change - after[path]).abs().max().item() for sign in (1, -1))  # either convention
        assert gap < 1e-12


def test_bytes_are_those_of_the_messages(simulate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encode every message of every client of three rounds and add up the lengths."""
    up: list[int] = []
    real = ServerRule.join

    def spy(rule: ServerRule, state: Any, joined: Any, uploads: Any, weights: Tensor) -> Any:
        up.extend(len(wire.encode(tree.take(uploads, row))) for row in range(len(weights)))
        return real(rule, state, joined, uploads, weights)

    monkeypatch.setattr(ServerRule, "join", spy)
    run = simulate(federation("ditto", engine=Engine("stacked", 2)))
    for number in range(3):
        up.clear()
        message = len(wire.encode(run.federation.algorithm.server.broadcast(run.server)))
        done = run.step(number)
        assert (done.bytes_down, done.bytes_up, done.clients) == (5 * message, sum(up), 5)
        assert len(up) == 5


class Ran(NamedTuple):
    path: Path
    result: Result
    drawn: list[list[int]]  # the cohorts


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Ran]:
    """Run the small recipe with a method, once."""

    @functools.cache
    def run(method: str, seed: int = 0) -> Ran:
        drawn: list[list[int]] = []
        real = simulator.draw_cohort

        def spy(*arguments: Any) -> Any:
            drawn.append(real(*arguments).tolist())
            return real(*arguments)

        path = tmp_path_factory.mktemp("runs") / method
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(simulator, "draw_cohort", spy)
            return Ran(path, api.run(recipe(method={"name": method}, seed=seed), out=path), drawn)

    return run


SOME = ("fedavg", "local", "finetune", "fedalt", "fedslr", "quped", "fedbcd")  # of each kind of state


@pytest.mark.parametrize("methods", [SOME, pytest.param(tuple(METHODS), marks=pytest.mark.system)], ids=["some", "all"])
def test_methods_see_the_same_split_and_cohorts(methods: tuple[str, ...], ran: Callable[..., Ran]) -> None:
    def seen(run: Ran) -> str:
        return json.dumps([json.loads((run.path / "split.json").read_text()), run.drawn])

    first = {seen(ran(method)) for method in methods}
    other = {seen(ran(method, seed=1)) for method in ("fedavg", "ditto")}
    assert (len(first), len(other)) == (1, 1)
    assert first != other


def test_architectures_meet_in_one_run(simulate: Any) -> None:
    """Local with two problems: each client equals the one of a run where everybody has its architecture."""
    net = mlp(8)
    problems = (Problem(net, cross_entropy, local_net=mlp(4)), Problem(net, cross_entropy, local_net=mlp(16)))
    kinds = np.arange(12) % 2
    engines = (Engine("stacked", 2), Engine("sequential", 1024))
    mixed = simulate(federation("local", problems=problems, problem_of=kinds, engines=engines), 3000)
    pure = [
        simulate(federation("local", problems=(problem,), problem_of=np.zeros(12, dtype=np.int64), engines=(engine,)))
        for problem, engine in zip(problems, engines, strict=True)
    ]
    for number in range(3):
        rounds = [run.step(number) for run in (mixed, *pure)]
        assert len({done.clients for done in rounds}) == 1
    trained = [client for client in range(12) if client in mixed.store]
    assert {0, 1} <= {client % 2 for client in trained}
    for client in trained:
        mine, other = mixed.store.get(client), pure[client % 2].store.get(client)
        assert mine.keys() == other.keys()
        for path, leaf in mine.items():
            torch.testing.assert_close(leaf, other[path], rtol=0, atol=1e-12)
    data = mixed.federation.data
    both = [final_scores(run)["personal", "test"] for run in (mixed, *pure)]
    expected = np.where(kinds[data.seen] == 0, both[1].loss, both[2].loss)
    np.testing.assert_allclose(both[0].loss, expected, atol=1e-10)
    assert np.array_equal(both[0].samples, data.test.sizes[data.seen])


class Poisoned:
    """FedAvg's client, but some clients' losses are not numbers from a round on."""

    def __init__(self, real: Any, bad: tuple[int, ...], start: int) -> None:
        self.real, self.bad, self.start = real, torch.tensor(bad), start

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def update(self, problem: Problem, down: Any, state: Any, data: Any) -> Any:
        state, up = self.real.update(problem, down, state, data)
        hit = (data.examples == self.bad).any() & (data.round >= self.start)
        return state, up._replace(loss=torch.where(hit, torch.nan, up.loss))


@pytest.mark.parametrize("strategy", ["stacked", "sequential"])
def test_divergence_names_the_clients(simulate: Any, strategy: str) -> None:
    fed = federation("fedavg", cohort=12, engine=Engine(strategy, 5))  # type: ignore[arg-type]
    sizes = fed.data.train.sizes
    unique = [c for c in range(12) if (sizes == sizes[c]).sum() == 1][:1]
    rule = Poisoned(fed.algorithm.client, tuple(sizes[unique]), 2)
    run = simulate(dataclasses.replace(fed, algorithm=Algorithm("poisoned", rule, fed.algorithm.server)))  # type: ignore[arg-type]
    run.step(0)
    run.step(1)
    name = fed.data.client_names[unique[0]]
    with pytest.raises(Diverged, match=rf"^round 3: training gave .* for clients {name}; lower training\.lr"):
        run.step(2)


def test_a_diverged_run_keeps_its_checkpoint(tmp_path: Path) -> None:
    """The rate jumps to 1e19 after round 2: round 3 diverges, and does so again after a resume."""
    path = tmp_path / "run"
    schedule = {"kind": "step", "every": 2, "factor": 1e20}
    values = recipe(training={"schedule": schedule}, engine={"checkpoint_seconds": 0}, model={"name": "mlp"}, rounds=9)
    with pytest.raises(Diverged, match=r"^round \d: .*non-finite") as first:
        api.run(values, out=path)
    kept = RunDirectory(path).checkpoint().rounds
    assert kept == 2
    assert f"round {kept + 1}: " in str(first.value)
    assert f"the checkpoint after round {kept} is kept in {path}" in str(first.value)
    assert not (path / "result.json").exists()
    with pytest.raises(Diverged) as second:
        api.resume(path)
    assert str(second.value) == str(first.value)
    assert RunDirectory(path).checkpoint().rounds == kept
    assert len([m for m in RunDirectory(path).metrics() if m["event"] == "round"]) == kept


def test_divergence_at_once(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match=r"^round \d+: .*clients .*the checkpoint after round \d+ is kept"):
        api.run(recipe(training={"lr": 1e38}, rounds=20), out=tmp_path / "run")


def test_divergence_in_fine_tuning(tmp_path: Path) -> None:
    values = recipe(method={"name": "finetune", "tune_lr": 1e38, "tune_epochs": 9}, model={"name": "mlp"})
    with pytest.raises(Diverged, match=r"^after round 3: fine-tuning gave .* for clients .*"):
        api.run(values, out=tmp_path / "run")
    assert RunDirectory(tmp_path / "run").checkpoint().rounds == 3


ROW = {
    *("method", "seed", "model", "clients", "split", "accuracy", "accuracy_weighted", "accuracy_std", "worst_decile"),
    *("share_hurt", "share_hurt_low", "share_hurt_high", "hurt_mean_loss", "loss", "quantiles", "count"),
    *("bytes_up", "bytes_down", "bytes_stored", "parameters", "seconds"),
}


@pytest.mark.parametrize("method", sorted(METHODS))
def test_rows(ran: Callable[..., Ran], method: str) -> None:
    """Every row names its numbers; the result on disk is strict JSON and equals the one returned."""
    path, result, _ = ran(method)
    assert all(row.keys() == ROW for row in result.rows)
    named = [(row["model"], row["clients"], row["split"]) for row in result.rows]
    assert len(set(named)) == len(named)
    shared_only = {"fedavg", "fedprox", "fedavgm", "fedadam", "fedyogi", "fedadagrad", "feddyn", "scaffold"}
    expected = {"global"} if method in shared_only else {"global", "personal", "chosen"}
    expected = {"global", "personal"} if method == "fedcp" else expected  # of another architecture
    alone = ("local", "binaryrelax", "fedproto", "gpfl", "ifca", "fedem", "pfedhn", "fedfomo")
    assert {model for model, _, _ in named} == ({"personal"} if method in alone else expected)
    assert {clients for _, clients, _ in named} == {"seen", "unseen"}
    assert {split for _, _, split in named} == {"test", "validation"}
    for row in result.rows:
        assert all(np.isfinite(value) for value in row.values() if isinstance(value, float))
        assert 0 <= row["worst_decile"] <= row["accuracy"] <= 1
        assert row["count"] == {"seen": 7, "unseen": 2}[row["clients"]]
    text = (path / "result.json").read_text()
    stored = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} in result.json"))
    assert stored["rows"] == result.rows
    rounds = [entry for entry in RunDirectory(path).metrics() if entry["event"] == "round"]
    assert result.rows[0]["bytes_up"] == sum(entry["bytes_up"] for entry in rounds)
    assert result.rows[0]["bytes_down"] == sum(entry["bytes_down"] for entry in rounds)
    scores = [entry for entry in RunDirectory(path).metrics() if entry["event"] == "score"]
    assert {(entry["clients"], entry["count"], entry["split"]) for entry in scores} == {("seen", 7, "test")}


def test_engine_fits_memory() -> None:
    problem = Problem(mlp(8), cross_entropy)
    one = 16 * 4 * problem.net.parameters
    assert Engine.fitted(problem, "auto", 10 * one, CPU) == Engine("stacked", 10, 64)
    assert Engine.fitted(problem, "sequential", 1, CPU) == Engine("sequential", 1, 64)
    assert Engine.fitted(problem, "stacked", 2**50, CPU).chunk == 1024
    conv = Problem(Net(lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 10))), cross_entropy)
    assert Engine.fitted(conv, "auto", 2**30, CPU).strategy == "sequential"


def test_prepare_uses_the_recipe() -> None:
    from personafl.recipe.recipe import Recipe

    values = recipe(federation={"sampling": "bernoulli", "weights": "uniform"}, seed=3, method={"name": "fedadam"})
    values["data"] = {"partition": Dirichlet(clients=6).model_dump()}
    fed = prepare(Recipe.parse(values)).federation
    assert (fed.cohort, fed.sampling, fed.weights, fed.seed, fed.algorithm.name) == (
        4,
        "bernoulli",
        "uniform",
        3,
        "fedadam",
    )
    assert isinstance(fed.algorithm.server, Averaging)


def test_a_checkpoint_with_another_kind_of_state_is_refused_with_what_to_do() -> None:
    with make_case(METHODS["fedavg"].build(Training())).simulation() as simulation:
        (server,) = simulation.servers
        again = server.decoded(wire.encode(server.state), server.state)
        assert torch.equal(tree.leaves(again)[0], tree.leaves(server.state)[0])
        other = wire.encode({"fates": torch.zeros(3)})
        with pytest.raises(
            BadInput, match="not expected; go on with the version of personafl that began it, or begin a"
        ):
            server.decoded(other, server.state)
