"""A Ray cluster of two nodes on this machine: the same bits as without it, and no trouble that stays silent."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from crash_driver import COMMON, differences, outcome
from personafl import Recipe, api, cli
from personafl.core import tree
from personafl.errors import BadInput, Diverged, PersonaError
from personafl.recipe.values import apply_overrides
from personafl.runs import checkpoints, learners, loop, recording
from personafl.runs.build import prepare
from personafl.runs.listener import Progress
from personafl.runs.scoring import Scored, score
from personafl.simulate.cloud import make_simulation
from personafl.simulate.cohort import draw_cohort
from personafl.simulate.ray import cluster, node
from personafl.simulate.ray.cluster import connected
from personafl.simulate.ray.driver import RayWorkers, _RemoteWorker
from personafl.simulate.ray.node import Node, pack_tensors
from personafl.simulate.simulator import Simulation
from personafl.simulate.trainer import Chunk
from personafl.simulate.workers.local import LocalWorkers, WorkerFailed, done_by
from personafl.simulate.workers.nodestore import NodeStore, StatesLost
from personafl.storage.rundir import RunDirectory
from personafl.storage.store import Store
from simulate.inline_ray import RAY
from waiting import until

installed = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install 'personafl[ray]'"
)
needs_namespace = pytest.mark.skipif(os.geteuid() != 0, reason="a network of its own needs root")

CLONE_NEWNET = 0x40000000
RECIPE = apply_overrides({}, [*COMMON, "rounds=5", "engine.strategy=sequential", "engine.checkpoint_seconds=0"])


@contextlib.contextmanager
def own_network() -> Iterator[None]:
    """Put this thread, and what it starts, into a network that has a loopback and nothing else, where that is allowed.

    Other threads stay where they are.
    """
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as before:
        assert libc.unshare(CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            yield
        finally:
            assert libc.setns(before.fileno(), CLONE_NEWNET) == 0


NODE = {"num_cpus": 1, "include_dashboard": False, "node_ip_address": "127.0.0.1"}


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two nodes with one core each, on the loopback, with a token and without a dashboard."""
    token = tmp_path_factory.mktemp("token") / "token"
    token.write_text("0123456789abcdef" * 4)
    with own_network(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        cluster._ray("127.0.0.1:0")
        from ray.cluster_utils import Cluster

        started = Cluster()
        for _ in range(2):
            started.add_node(**NODE)
        yield started
        started.shutdown()


@pytest.fixture(scope="module")
def address(machines: Any) -> str:
    found: str = machines.address
    return found


@pytest.fixture(scope="module")
def connection(address: str) -> Iterator[None]:
    with connected(address):
        yield


def chunks(count: int) -> list[Chunk]:
    down = {"w": torch.arange(3.0)}
    return [Chunk(0, np.array([n]), 0, down, {"s": torch.full((1, 2), float(n))}) for n in range(count)]


@installed
@pytest.mark.system
@pytest.mark.usefixtures("connection")
def test_chunks_are_done_in_order_by_both_nodes_and_come_back_as_they_are() -> None:
    states = {
        "flipped": torch.arange(6.0).reshape(2, 3).t(),
        "mask": torch.tensor([True, False]),
        "none": torch.empty(0, 4),
        "one": torch.tensor(7),
        "half": torch.ones(2, dtype=torch.bfloat16),
    }

    def work(chunk: Chunk) -> Any:
        import ray

        chunk.states["flipped"] += 1  # what came may be written to
        return ray.get_runtime_context().get_node_id(), int(chunk.clients[0]), chunk.down, chunk.states

    workers = RayWorkers(work, "auto")
    results = list(workers.map(chunk._replace(states=states) for chunk in chunks(9)))
    workers.close()
    assert [client for _, client, _, _ in results] == list(range(9))
    assert len({node for node, *_ in results}) == 2
    states["flipped"] += 1
    for _, _, down, got in results:
        assert down["w"].tolist() == [0, 1, 2]
        assert got["flipped"].stride() == states["flipped"].stride()
        assert {name: (value.dtype, value.tolist()) for name, value in got.items()} == {
            name: (value.dtype, value.tolist()) for name, value in states.items()
        }


SELDOM = ["engine.checkpoint_seconds=1000", "evaluation.every=2"]  # so states are read between checkpoints


BITS = {
    "no states": ["method.name=fedavg"],
    "a part of the model": ["method.name=fedalt", "model.name=mlp", "model.personal=output", *SELDOM],
    "fine-tuned": ["method.name=ditto", "model.name=mlp", "finetune=true", "method.tune_epochs=2", *SELDOM],
    "fine-tuned newcomers of a cloud": [
        *("method.name=fedalt", "model.name=mlp", "model.personal=output", "federation.cohort=1.0"),
        *("cloud.servers=2", "cloud.active=1", "engine.strategy=stacked", *SELDOM),
    ],
    "a correction": ["method.name=scaffold", "training.momentum=0", *SELDOM],
    "a whole model": ["method.name=ditto", "engine.strategy=stacked", "engine.memory_mb=1", *SELDOM],
    "offline": ["method.name=fedbcdi", "training.momentum=0", "federation.cohort=3", "federation.offline=2", *SELDOM],
    "a cloud": [
        *("method.name=fedbcd", "training.momentum=0", "federation.cohort=1.0"),
        *("cloud.servers=2", "cloud.protocol=gossip", "cloud.mixing=full"),
        *SELDOM,
    ],
    "messages of each one's own": [
        "method.name=fedfomo",
        "method.models=2",
        "model.name=mlp",
        "finetune=true",
        *SELDOM,
    ],
    "a buffer": ["method.name=ditto", "federation.cohort=1.0", "buffer.size=2", "buffer.concurrency=4", *SELDOM],
    "a robust rule": [
        *("method.name=ditto", "federation.cohort=3", "robust.rule=trimmed-mean", "robust.f=1"),
        *('robust.pre=["nnm"]', "robust.clip={times=1.5}", *SELDOM),
    ],
}


@installed
@pytest.mark.system
@pytest.mark.usefixtures("connection")
@pytest.mark.parametrize("words", BITS.values(), ids=BITS)
def test_a_run_has_the_same_bits_as_on_this_machine(words: list[str], tmp_path: Path) -> None:
    recipe = apply_overrides(RECIPE, words)
    api.run(recipe, out=tmp_path / "there")
    with done_by(LocalWorkers):
        api.run(recipe, out=tmp_path / "here")
    assert differences(outcome(tmp_path / "here"), outcome(tmp_path / "there")) == []


IN_PROCESS = ["a part of the model", "fine-tuned", "messages of each one's own", "a buffer", "a robust rule"]


@pytest.mark.parametrize("case", IN_PROCESS)
def test_so_it_has_with_nodes_in_this_process(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", RAY)
    recipe = apply_overrides(RECIPE, BITS[case])
    fetched: set[int] = set()
    fetch = RayWorkers.fetch

    def watched(self: RayWorkers, node: int, *given: Any, **more: Any) -> Any:
        fetched.add(node)
        return fetch(self, node, *given, **more)

    monkeypatch.setattr(RayWorkers, "fetch", watched)
    with done_by(RayWorkers):
        api.run(recipe, out=tmp_path / "there")
    api.run(recipe, out=tmp_path / "here")
    assert fetched == {0, 1}
    assert differences(outcome(tmp_path / "here"), outcome(tmp_path / "there")) == []


def same(one: Scored, two: Scored) -> bool:
    """Say whether scores have the same bits."""
    columns = [
        (values, two.scores[key].measures()[name])
        for key, scores in one.scores.items()
        for name, values in scores.measures().items()
    ]
    return one.scores.keys() == two.scores.keys() and all(np.array_equal(*pair, equal_nan=True) for pair in columns)


def test_clients_are_scored_and_fine_tuned_where_their_states_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of a state is brought here for it, nor is a network run here."""
    monkeypatch.setitem(sys.modules, "ray", RAY)
    job = prepare(Recipe.parse(apply_overrides(RECIPE, BITS["fine-tuned"])))
    clients, splits = np.arange(job.federation.data.clients), {"test": job.federation.data.test}
    found, tuned = [], []
    for name, make in (("there", RayWorkers), ("here", LocalWorkers)):
        with done_by(make):
            simulation = make_simulation(job.federation, Store(tmp_path / name, 2**20))
        simulation.step(0)
        with monkeypatch.context() as patch:
            if make is RayWorkers:
                patch.setattr(RayWorkers, "fetch", None)
                patch.setattr(simulation, "trainer", None)
                patch.setattr(simulation, "shape", lambda which, down: down)
                patch.setattr(simulation, "global_model", lambda down: down)
            found.append(score(simulation, None, clients, splits, blends=False))
            tuned.append({int(who[0]): tree.flatten(states) for who, states in simulation.personalize(clients, 1)})
        simulation.workers.close()
    assert same(*found)
    assert found[0].scores.keys() == {("global", "test"), ("personal", "test")}
    assert tuned[0].keys() == tuned[1].keys() == set(clients.tolist())
    for client, states in tuned[0].items():
        assert all(torch.equal(leaf, tuned[1][client][path]) for path, leaf in states.items())


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the bytes of the tensors that this process sends and receives."""
    travelled: Counter[str] = Counter()
    pack, unpack = node._packed, node._unpacked

    @functools.wraps(pack)
    def packed(value: Tensor) -> Any:
        travelled["sent"] += value.nbytes
        return pack(value)

    @functools.wraps(unpack)
    def unpacked(packed: Any) -> Tensor:
        value = unpack(packed)
        travelled["received"] += value.nbytes
        return value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node, "_packed", packed)
        patch.setattr(node, "_unpacked", unpacked)
        pack_tensors()
        yield travelled
    pack_tensors()


def uploaded(simulation: Simulation, clients: NDArray[np.int64]) -> int:
    """Return the bytes of uploads: of a client its model, loss and a flag; of larger chunks sums, and a weight."""
    numbers = sum(leaf.numel() for leaf in tree.leaves(simulation.broadcast())) + 1
    chunks = [len(chunk) for _, _, chunk in simulation.groups(clients)]
    return sum(4 * size * numbers if size < 3 else 8 * (numbers + 1) for size in chunks) + len(clients)


@installed
@pytest.mark.system
@pytest.mark.usefixtures("connection")
@pytest.mark.parametrize("strategy", ["sequential", "stacked"])
def test_states_stay_on_the_nodes_until_someone_reads_them(strategy: str, tmp_path: Path) -> None:
    """Ditto's state and broadcast are a model each."""
    changes = ["method.name=ditto", "federation.cohort=7", f"engine.strategy={strategy}"]
    job = prepare(Recipe.parse(apply_overrides(RECIPE, changes)))
    simulation = make_simulation(job.federation, Store(tmp_path / "states", 2**20))
    clients = job.federation.data.seen
    model = sum(leaf.nbytes for leaf in tree.leaves(simulation.broadcast()))
    with counted() as travelled:
        simulation.step(0)
        for number in range(1, 4):
            travelled.clear()
            simulation.step(number)
            assert travelled == {"sent": model, "received": uploaded(simulation, clients)}
        travelled.clear()
        simulation.store.take(clients[:2])
        assert travelled == {"received": 2 * model}
        simulation.store.flush()
        assert travelled == {"received": len(clients) * model}  # each once
        travelled.clear()
        simulation.store.flush()
        simulation.step(4)
        assert travelled == {"sent": model, "received": uploaded(simulation, clients)}  # they are still there
    simulation.workers.close()


@installed
@pytest.mark.system
@pytest.mark.usefixtures("connection")
def test_scoring_sends_the_broadcast_and_no_states(tmp_path: Path) -> None:
    job = prepare(Recipe.parse(apply_overrides(RECIPE, ["method.name=ditto", "federation.cohort=7"])))
    data = job.federation.data
    simulation = make_simulation(job.federation, Store(tmp_path / "states", 2**20))
    with done_by(LocalWorkers):
        local = make_simulation(job.federation, Store(tmp_path / "local", 2**20))
    for each in (simulation, local):
        each.step(0)
    model = sum(leaf.nbytes for leaf in tree.leaves(simulation.broadcast()))
    splits = {"test": data.test, "validation": data.validation}
    with counted() as travelled:
        found = score(simulation, None, data.seen, splits, blends=True)
    assert travelled == {"sent": 2 * model}  # for the shared model, and for the others
    simulation.workers.close()
    assert same(found, score(local, None, data.seen, splits, blends=True))


@installed
@pytest.mark.system
@pytest.mark.usefixtures("connection")
def test_states_go_from_node_to_node_without_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = prepare(Recipe.parse(apply_overrides(RECIPE, ["method.name=ditto"])))
    here, there = (Store(tmp_path / name, 2**20) for name in ("here", "there"))
    simulation = make_simulation(job.federation, there)
    workers = simulation.workers
    assert isinstance(workers, RayWorkers)
    assert isinstance(simulation.store, NodeStore)
    with counted() as travelled:
        for number in range(4):  # all on one node, and in the next round all on the other
            monkeypatch.setattr(workers, "_chosen", lambda load, states, turn=number % 2: workers._workers[turn])
            travelled.clear()
            simulation.step(number)
            cohort = draw_cohort(job.federation.data.seen, 5, "exact", job.recipe.seed, number)
            assert (simulation.store.places(cohort) == number % 2).all()
            assert travelled["received"] == uploaded(simulation, cohort)
    simulation.store.flush()
    workers.close()
    with done_by(LocalWorkers):
        local = make_simulation(job.federation, here)
    for number in range(4):
        local.step(number)
    for client in local.store.clients.tolist():
        assert all(torch.equal(leaf, there.get(client)[path]) for path, leaf in local.store.get(client).items())


@installed
@pytest.mark.system
@pytest.mark.usefixtures("connection")
def test_states_of_clients_under_way_stay_too(tmp_path: Path) -> None:
    job = prepare(Recipe.parse(apply_overrides(RECIPE, BITS["a buffer"])))
    assert job.federation.buffer is not None
    simulation = make_simulation(job.federation, Store(tmp_path / "states", 2**20))
    model = sum(leaf.nbytes for leaf in tree.leaves(simulation.broadcast()))
    with counted() as travelled:
        for event in itertools.islice(job.federation.buffer.updates(), 4):
            travelled.clear()
            simulation.step(event.number)
            assert travelled["received"] == len(event.started) * (model + 4 + 1)
        travelled.clear()
        simulation.saved()
        assert travelled == {"received": 2 * model}  # 4 train at a time, and 2 of them have arrived
    simulation.workers.close()


@installed
@pytest.mark.system
@pytest.mark.usefixtures("connection")
def test_the_states_of_nodes_leave_nothing_behind(tmp_path: Path) -> None:
    folders = Path(tempfile.gettempdir())
    (orphan := folders / f"{node._PREFIX}orphan").mkdir()
    (orphan / "lock").touch()
    job = prepare(Recipe.parse(apply_overrides(RECIPE, ["method.name=ditto"])))
    simulation = make_simulation(job.federation, Store(tmp_path / "states", 2**20))
    before = set(folders.glob(f"{node._PREFIX}*"))
    simulation.step(0)
    made = set(folders.glob(f"{node._PREFIX}*")) - before
    assert len(made) == 2
    assert not orphan.exists()
    simulation.workers.close()
    assert not any(folder.exists() for folder in made)
    with pytest.raises(StatesLost, match="the newest states of 5 clients ended with the workers; the last checkpoint"):
        simulation.store.flush()


@installed
@pytest.mark.system
@pytest.mark.usefixtures("connection")
def test_clients_that_diverge_are_named_as_on_this_machine(tmp_path: Path) -> None:
    recipe = apply_overrides(RECIPE, ["method.name=ditto", "training.lr=1e30", "rounds=3"])
    with pytest.raises(Diverged) as there:
        api.run(recipe, out=tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    with done_by(LocalWorkers), pytest.raises(Diverged) as here:
        api.run(recipe, out=tmp_path / "run")
    assert str(there.value) == str(here.value)
    assert "gave non-finite numbers for clients" in str(here.value)


@installed
def test_a_chunk_goes_where_its_states_are_if_nobody_stays_idle() -> None:
    workers = RayWorkers(print, 1)
    one, two, other = workers._workers = [_RemoteWorker(None, Node("", "", 2), place, set()) for place in (0, 0, 1)]

    def chosen(load: dict[_RemoteWorker, int], **states: int) -> _RemoteWorker:
        return workers._chosen(Counter(load), Counter({int(name[1:]): count for name, count in states.items()}))

    assert chosen({}, n0=1, n1=2) is other
    assert chosen({other: 1}, n0=1, n1=2) is one  # for it is idle
    assert chosen({one: 1, two: 1, other: 2}, n0=1, n1=2) is other
    assert chosen({one: 1, two: 1, other: 3}, n0=1, n1=2) is one  # there is too much to do
    assert chosen({one: 2, two: 1, other: 1}, n0=2, n1=1) is two
    assert chosen({one: 2, two: 2, other: 1}) is other  # newcomers


@pytest.fixture
def one_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have one checkpoint, after the second round, and that of the end."""
    save = checkpoints.Run.save
    monkeypatch.setattr(checkpoints.Run, "save", lambda run, after: save(run, 0 if run.total.rounds == 2 else after))


DITTO = apply_overrides(RECIPE, ["method.name=ditto", "method.tune_epochs=1", "engine.checkpoint_seconds=1000"])


def at_round(number: int, action: Callable[[], None]) -> Callable[[Any], None]:
    def listener(progress: Any) -> None:
        if isinstance(progress, Progress) and progress.round.number + 1 == number:
            action()

    return listener


def wait_for_nodes(count: int) -> None:
    """Wait until the head has noticed who is gone."""
    import ray

    until(lambda: sum(node["Alive"] for node in ray.nodes()) == count)


def kill_a_process(workers: RayWorkers, which: str) -> None:
    import ray

    actor = {"worker": workers._workers[-1], "states": workers._states[-1]}[which].actor
    os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)


@installed
@pytest.mark.system
@pytest.mark.usefixtures("connection", "one_checkpoint")
@pytest.mark.parametrize(
    ("what", "message", "back"),
    [
        ("worker", "clients .*: a worker on node 127.0.0.1 died", RayWorkers),
        pytest.param(
            "states", "(clients .*: )?node 127.0.0.1 died with the states it had", LocalWorkers, marks=pytest.mark.slow
        ),
        ("node", "(clients .*: )?(a worker on )?node 127.0.0.1 died", LocalWorkers),
    ],
    ids=["worker", "states", "node"],
)
def test_what_dies_is_named_and_the_run_goes_on(
    what: str, message: str, back: Any, machines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[RayWorkers] = []
    begin = RayWorkers.__init__
    monkeypatch.setattr(RayWorkers, "__init__", lambda self, *given: [begin(self, *given), made.append(self)][0])
    extra = machines.add_node(**NODE) if what == "node" else None

    def kill() -> None:
        if extra is None:
            kill_a_process(made[0], what)
        else:
            for processes in extra.all_processes.values():
                os.kill(processes[0].process.pid, signal.SIGKILL)

    with pytest.raises(PersonaError, match=f"^round 5: {message}.*the last checkpoint is kept") as caught:
        api.run(DITTO, out=tmp_path / "killed", listener=at_round(4, kill))
    assert "\n" not in str(caught.value)
    assert str(caught.value).count("personafl resume") == 1
    if extra is not None:
        machines.remove_node(extra, allow_graceful=False)
        wait_for_nodes(2)
    assert RunDirectory(tmp_path / "killed").checkpoint().rounds == 2
    with done_by(back):
        api.resume(tmp_path / "killed")
    with done_by(LocalWorkers):
        api.run(DITTO, out=tmp_path / "whole")
    assert differences(outcome(tmp_path / "whole"), outcome(tmp_path / "killed")) == []


@installed
@pytest.mark.system
@pytest.mark.usefixtures("connection")
@pytest.mark.parametrize(("what", "after", "kept"), [("scoring", 1, 0), ("fine-tuning", 5, 5)])
def test_a_worker_that_dies_between_rounds_or_after_them_is_named_and_the_run_goes_on(
    what: str, after: int, kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[RayWorkers] = []
    begin = RayWorkers.__init__
    monkeypatch.setattr(RayWorkers, "__init__", lambda self, *given: [begin(self, *given), made.append(self)][0])
    with monkeypatch.context() as patch:
        where, name = {"fine-tuning": (loop, "tuning"), "scoring": (recording, "score")}[what]
        plain = getattr(where, name)

        def after_the_worker(*given: Any, **more: Any) -> Any:
            kill_a_process(made[0], "worker")
            return plain(*given, **more)

        patch.setattr(where, name, after_the_worker)
        message = rf"^after round {after}: clients .*: a worker on node 127.0.0.1 died"
        with pytest.raises(PersonaError, match=message) as caught:
            api.run(DITTO, out=tmp_path / "killed")
    assert "\n" not in str(caught.value)
    assert "the last checkpoint is kept" in str(caught.value)
    assert RunDirectory(tmp_path / "killed").checkpoint().rounds == kept
    api.resume(tmp_path / "killed")
    with done_by(LocalWorkers):
        api.run(DITTO, out=tmp_path / "whole")
    assert differences(outcome(tmp_path / "whole"), outcome(tmp_path / "killed")) == []


class Crash(BaseException):
    """Ends a run from within."""


def crash() -> None:
    raise Crash


@installed
@pytest.mark.system
@pytest.mark.usefixtures("connection", "one_checkpoint")
def test_what_is_under_way_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    recipe = apply_overrides(RECIPE, [*BITS["a buffer"], "rounds=6"])
    with pytest.raises(Crash):
        api.run(recipe, out=tmp_path / "there", listener=at_round(3, crash))
    assert RunDirectory(tmp_path / "there").checkpoint().rounds == 2
    api.resume(tmp_path / "there")
    with done_by(LocalWorkers):
        api.run(recipe, out=tmp_path / "here")
    assert differences(outcome(tmp_path / "here"), outcome(tmp_path / "there")) == []


@installed
@pytest.mark.slow
def test_the_death_of_the_head_ends_the_command_and_the_run_goes_on(machines: Any, tmp_path: Path) -> None:
    """Ray itself ends a process whose node dies; so there is no message of ours."""
    words = [*COMMON, "method.name=ditto", "rounds=300", "engine.strategy=sequential", "engine.checkpoint_seconds=0"]
    own = type(machines)()
    head, _ = own.add_node(**NODE), own.add_node(**NODE)
    command = [sys.executable, "-c", "from personafl.cli import main; main()", "run", *words, "--out", tmp_path / "run"]
    with subprocess.Popen(
        [*command, "--engine", "ray", "--address", own.address], stdout=subprocess.DEVNULL
    ) as process:
        until(lambda: RunDirectory(tmp_path / "run").checkpoint().rounds >= 3, process)
        for processes in head.all_processes.values():
            os.kill(processes[0].process.pid, signal.SIGKILL)
        assert process.wait() == 1
    own.shutdown()
    assert 3 <= RunDirectory(tmp_path / "run").checkpoint().rounds < 300
    with done_by(LocalWorkers):
        api.resume(tmp_path / "run")
        api.run(apply_overrides({}, words), out=tmp_path / "whole")
    assert differences(outcome(tmp_path / "whole"), outcome(tmp_path / "run")) == []


@installed
@pytest.mark.system
@pytest.mark.usefixtures("connection")
def test_errors_of_the_work_come_as_they_are() -> None:
    def diverge(chunk: Chunk) -> Any:
        raise Diverged("too far")

    def fail(chunk: Chunk) -> Any:
        return 1 // int(chunk.clients[0] - 1)

    with pytest.raises(Diverged, match=r"^too far$"):
        list(RayWorkers(diverge, 1).map(chunks(1)))
    with pytest.raises(WorkerFailed, match="ZeroDivisionError") as caught:
        list(RayWorkers(fail, 1).map(chunks(3)))
    assert caught.value.task == 1


@installed
@pytest.mark.system
@needs_namespace
@pytest.mark.usefixtures("connection")
def test_nothing_listens_but_on_the_loopback() -> None:
    """In the cluster's own network; sl, local address, remote address, state (0A: listening) in /proc/net."""
    four, six = (Path(f"/proc/thread-self/net/{name}").read_text() for name in ("tcp", "tcp6"))
    local = {line.split()[1].split(":")[0] for text in (four, six) for line in text.splitlines() if " 0A " in line}
    assert "0100007F" in local
    assert local <= {"0100007F", "0000000000000000FFFF00000100007F"}  # 127.0.0.1, alone or within IPv6


@installed
@pytest.mark.system
def test_a_wrong_token_is_refused(address: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from personafl.cli import main; main()", "run", *COMMON, "rounds=1"]
    done = subprocess.run(
        [*command, "--out", tmp_path / "run", "--engine", "ray", "--address", address],
        env={**os.environ, "RAY_AUTH_TOKEN": "f" * 64, "COLUMNS": "500"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "InvalidAuthToken" in done.stderr  # of Ray
    assert f"--address {address}: cannot join" in done.stderr
    assert not (tmp_path / "run").exists()


@installed
@pytest.mark.system
@pytest.mark.usefixtures("connection")
def test_a_node_with_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr("personafl.__version__", "9.9")
    message = r"node 127.0.0.1 has personafl .*, this machine has 9.9; install personafl==9.9 there"
    with pytest.raises(BadInput, match=message):
        cluster._check_nodes(ray)


@installed
@pytest.mark.parametrize(
    ("where", "what"), [("127.0.0.1:9", "nothing answers"), ("elsewhere", "not HOST:PORT"), ("127.0.0.1:x", "not HOST")]
)
def test_an_address_without_a_cluster(where: str, what: str) -> None:
    with pytest.raises(BadInput, match=what), connected(where):
        pass


def test_without_ray_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"pip install 'personafl\[ray\]'"), connected():
        pass


def test_a_cluster_does_not_train_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learners, "named_device", lambda name: torch.device("cuda"))
    with done_by(RayWorkers), pytest.raises(BadInput, match=r"set engine\.device=cpu"):
        prepare(Recipe.parse(RECIPE))


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--engine", "rey"], "no engine 'rey'; valid: local, ray"),
        (["--address", "10.0.0.1:6379"], "--address: is for --engine ray"),
    ],
)
def test_words_that_do_not_go_together(
    words: list[str], what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["personafl", "run", *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert what in capsys.readouterr().err
