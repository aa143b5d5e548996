"""Worker processes: the same results in the same order, and no trouble that stays silent."""

from __future__ import annotations

import contextvars
import dataclasses
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from personafl.algorithms import METHODS
from personafl.algorithms.training import Training
from personafl.core import tree
from personafl.core.batches import Steps
from personafl.core.optim import Sgd
from personafl.errors import BadInput, Diverged
from personafl.runs import scoring, trying
from personafl.runs.scoring import Scored, score, tune
from personafl.simulate.engine import Engine
from personafl.simulate.simulator import Simulation
from personafl.simulate.workers import local
from personafl.simulate.workers.local import LocalWorkers, WorkerFailed, cores, share_cores
from personafl.storage.store import Store
from personafl.testing import make_case
from waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forks")


class Pair(NamedTuple):
    number: int
    values: Tensor


def doubled(pair: Pair) -> Pair:
    return Pair(os.getpid(), 2 * pair.values)


@pytest.fixture
def workers() -> Any:
    made: list[LocalWorkers] = []

    def make(work: Any, count: Any = 2) -> LocalWorkers:
        made.append(LocalWorkers(work, count))
        return made[-1]

    yield make
    for each in made:
        each.close()
    assert multiprocessing.active_children() == []


def test_results_come_in_order_from_other_processes(workers: Any) -> None:
    tasks = [Pair(n, torch.full((3, n), float(n))) for n in range(9)]
    results = list(workers(doubled).map(tasks))
    assert [result.values.tolist() for result in results] == [(2 * task.values).tolist() for task in tasks]
    assert os.getpid() not in {result.number for result in results}
    assert len({result.number for result in results}) <= 2


def test_tensors_keep_dtype_and_layout_and_are_the_receivers_own(workers: Any) -> None:
    flipped = torch.arange(6.0).reshape(2, 3).t()
    sent = {"flipped": flipped, "mask": torch.tensor([True, False]), "none": torch.empty(0, 4), "one": torch.tensor(7)}
    first, second = workers(lambda task: task).map([sent, {"flipped": torch.zeros(3, 2)}])
    assert first["flipped"].stride() == flipped.stride()
    assert {name: value.tolist() for name, value in first.items()} == {n: v.tolist() for n, v in sent.items()}
    assert second["flipped"].sum() == 0  # and did not overwrite the first


class Told(NamedTuple):
    down: Any
    number: int


def test_a_broadcast_is_sent_to_a_worker_once(workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until there is another one."""
    one, other = {"w": torch.tensor([3.0])}, {"w": torch.tensor([5.0])}
    sent: list[object] = []
    plain = local._Shelf.dumps

    def watched(self: Any, message: Any) -> bytes:
        sent.append(getattr(message, "down", None))
        return plain(self, message)

    monkeypatch.setattr(local._Shelf, "dumps", watched)
    tasks = [*(Told(one, 10**power) for power in range(4)), Told(other, 1), Told(other, 10), Told(one, 2)]
    found = list(workers(lambda task: float(task.down["w"]) * task.number).map(tasks))
    assert found == [3.0, 30.0, 300.0, 3000.0, 5.0, 50.0, 6.0]
    assert sum(down is one for down in sent) <= 4  # twice to each of the two
    assert any(isinstance(down, local._Again) for down in sent)


def test_a_message_beyond_the_room_goes_through_the_pipe(workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_ROOM", 4096)
    [result] = workers(doubled).map([Pair(0, torch.arange(5000.0))])
    assert torch.equal(result.values, 2 * torch.arange(5000.0))


def test_auto_stays_here_until_a_round_is_long(workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "cores", lambda: 2)
    auto = workers(doubled, "auto")
    clock = iter([0.0, 0.01, 0.01, 0.02, 5.0, 5.2])
    monkeypatch.setattr(local.time, "perf_counter", lambda: next(clock))
    tasks = [Pair(0, torch.ones(1))] * 2
    assert {result.number for result in auto.map(tasks)} == {os.getpid()}
    assert {result.number for result in auto.map(tasks[:1])} == {os.getpid()}  # it took 0.2 s
    assert auto._pool is None  # which nothing was left for
    assert os.getpid() not in {result.number for result in auto.map(tasks)}


def test_auto_goes_on_with_workers_once_it_takes_long(workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "cores", lambda: 2)
    clock = itertools.cycle([0.0, 0.01, 0.01, 0.2])
    monkeypatch.setattr(local.time, "perf_counter", lambda: next(clock))
    found = list(workers(failing_beyond, "auto").map([0, 1, 2, 3]))
    assert [number for number, _ in found] == [0, 1, 2, 3]
    assert [doer == os.getpid() for _, doer in found] == [True, True, False, False]
    with pytest.raises(WorkerFailed, match="too many") as caught:
        list(workers(failing_beyond, "auto").map([0, 1, 4]))
    assert caught.value.task == 2


def failing_beyond(task: int) -> tuple[int, int]:
    if task > 3:
        raise ValueError("too many")
    return task, os.getpid()


def test_auto_has_one_thread_wherever_it_works(workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(2)
    try:
        assert list(workers(lambda _: torch.get_num_threads(), "auto").map([0])) == [1]
        assert list(workers(lambda _: torch.get_num_threads(), 1).map([0])) == [2]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def failing(task: int) -> int:
    if task == 1:
        raise ValueError("no such thing")
    return task


def test_an_error_names_the_task_and_ends_the_workers(workers: Any) -> None:
    made = workers(failing)
    with pytest.raises(WorkerFailed, match="no such thing") as caught:
        list(made.map([0, 1, 2]))
    assert caught.value.task == 1
    assert multiprocessing.active_children() == []
    assert list(made.map([0, 2])) == [0, 2]  # with new ones


def killed(task: int) -> int:
    if task == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return task


def test_a_worker_that_dies_is_reported(workers: Any) -> None:
    with pytest.raises(WorkerFailed, match="was killed by SIGKILL") as caught:
        list(workers(killed).map([0, 1, 2]))
    assert caught.value.task == 1


def terminated(task: int) -> int:
    os.kill(os.getpid(), signal.SIGTERM)
    return task


def test_a_signal_to_the_group_is_not_for_workers(workers: Any) -> None:
    assert list(workers(terminated).map([0, 1])) == [0, 1]


def diverging(task: int) -> int:
    raise Diverged("too far")


def test_runs_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven cores for two runs are three each; there is one for each of eight. `cores` is as imported, not patched."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(7)))

    def among(runs: int) -> int:
        share_cores(runs)
        return cores()

    assert [contextvars.copy_context().run(among, runs) for runs in (1, 2, 3, 8)] == [7, 3, 2, 1]


def test_a_daemonic_process_trains_by_itself(workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python lets it have no children, as those of a `multiprocessing.Pool`."""
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    assert cores() == 1
    assert list(workers(abs, "auto").map([-1])) == list(workers(abs, 1).map([-1])) == [1]
    with pytest.raises(BadInput, match=r"engine\.workers: 2 cannot be started from a daemonic process"):
        workers(abs, 2)


def test_our_own_errors_come_as_they_are(workers: Any) -> None:
    with pytest.raises(Diverged, match="too far"):
        list(workers(diverging).map([0]))


def test_workers_die_with_their_parent() -> None:
    script = (
        "import os, signal, multiprocessing; from personafl.simulate.workers.local import LocalWorkers\n"
        "workers = LocalWorkers(lambda task: os.getpid(), 2)\n"
        "print(*set(workers.map(range(8))), *[p.pid for p in multiprocessing.active_children()], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = {int(word) for word in done.stdout.split()}
    assert len(pids) == 2
    until(lambda: not any(_running(pid) for pid in pids))


def _running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def simulation(method: str, folder: Path, count: int, cohort: int = 5) -> Simulation:
    training = Training(work=Steps(epochs=2, batch=4), optimizer=Sgd(lr=0.1))
    fed = make_case(METHODS[method].build(training)).federation(chunk=2)
    return Simulation(dataclasses.replace(fed, workers=count, cohort=cohort), Store(folder / f"{count}", 2**30))


def everything(run: Simulation) -> dict[str, Tensor]:
    found = {f"server/{path}": leaf for path, leaf in tree.flatten(run.server).items()}
    for client in run.federation.data.seen.tolist():
        if client in run.store:
            found |= {f"{client}/{path}": leaf for path, leaf in run.store.get(client).items()}
    return found


@pytest.mark.parametrize("method", ["fedavg", "fedalt", "scaffold", "ditto"])
def test_rounds_have_the_same_bits_with_one_and_two_workers(method: str, tmp_path: Path) -> None:
    runs = [simulation(method, tmp_path, count) for count in (1, 2)]
    for run in runs:
        for number in range(3):
            run.step(number)
        run.workers.close()
    one, two = map(everything, runs)
    assert one.keys() == two.keys()
    assert [path for path, value in one.items() if not torch.equal(value, two[path])] == []
    assert multiprocessing.active_children() == []


def test_a_failed_worker_names_its_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = simulation("fedavg", tmp_path, 2)
    monkeypatch.setattr(
        type(run.federation.engines[0]), "train_for_now", lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    )
    with pytest.raises(WorkerFailed, match=r"^clients [\d, ]+: a worker process was killed"):
        run.step(0)
    assert multiprocessing.active_children() == []


@pytest.fixture
def doers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], set[int]]:
    """Return who has tried models and fine-tuned clients since this was asked last."""
    noted = tmp_path / "noted"

    def watched(plain: Any) -> Any:
        def function(*given: Any) -> Any:
            with noted.open("a") as file:
                file.write(f"{os.getpid()}\n")
            return plain(*given)

        return function

    def found() -> set[int]:
        words = noted.read_text().split()
        noted.unlink()
        return set(map(int, words))

    monkeypatch.setattr(trying, "try_shared", watched(trying.try_shared))
    monkeypatch.setattr(trying, "try_personal", watched(trying.try_personal))
    monkeypatch.setattr(Engine, "train_for_now", watched(Engine.train_for_now))
    return found


def scored(run: Simulation, folder: Path, doers: Callable[[], set[int]]) -> tuple[Scored, dict[str, Tensor]]:
    """Train a round, fine-tune some clients and a newcomer, and score all of them, without the processes that train."""
    data, tuned = run.federation.data, Store(folder / f"tuned-{run.federation.workers}", 2**30)
    run.step(0)
    doers()
    if run.learners.rule.tuning:
        tune(run, tuned, np.array([0, 2, 4]), 1)
    splits = {"validation": data.train, "test": data.test}
    found = score(run, tuned, np.arange(data.clients), splits, blends=True)
    run.workers.close()
    states = {f"{who}/{path}": leaf for who in tuned.clients.tolist() for path, leaf in tuned.get(who).items()}
    return found, states


@pytest.mark.parametrize("method", ["fedavg", "fedalt", "ditto"])
def test_workers_fine_tune_and_score_to_the_same_bits(
    method: str, tmp_path: Path, doers: Callable[[], set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some clients have no state yet, and one pass takes ten samples."""
    monkeypatch.setattr(scoring, "PASS", 10)
    runs = [simulation(method, tmp_path, count, cohort=3) for count in (1, 2)]
    (one, mine), by = scored(runs[0], tmp_path, doers), doers()
    (two, yours), others = scored(runs[1], tmp_path, doers), doers()
    assert by == {os.getpid()}
    assert len(others) == 2
    assert os.getpid() not in others
    assert mine.keys() == yours.keys()
    assert [path for path, value in mine.items() if not torch.equal(value, yours[path])] == []
    assert one.scores.keys() == two.scores.keys() >= {("global", "test"), ("global", "validation")}
    assert one.gains.keys() == two.gains.keys()
    assert ("personal" in one.gains) == (method != "fedavg")
    pairs = [(scores, two.scores[key]) for key, scores in one.scores.items()]
    pairs += [(gains, two.gains[key]) for key, gains in one.gains.items()]  # type: ignore[misc]
    for here, there in pairs:
        for name, values in vars(here).items():
            np.testing.assert_array_equal(values, vars(there)[name])


def test_a_worker_that_dies_while_scoring_names_its_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = simulation("ditto", tmp_path, 2)
    run.step(0)
    run.workers.close()
    monkeypatch.setattr(trying, "try_personal", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(WorkerFailed, match=r"^clients [\d, ]+: a worker process was killed"):
        score(run, None, np.arange(5), {"test": run.federation.data.test}, blends=False)
    assert multiprocessing.active_children() == []


def test_what_a_worker_warns_of_is_heard_once(tmp_path: Path) -> None:
    """The metric of most clients cannot be computed."""
    plain = simulation("ditto", tmp_path, 1).federation

    def refused(outputs: Tensor, targets: Tensor) -> Tensor:
        raise BadInput("metrics: never")

    (problem,) = plain.problems
    federation = dataclasses.replace(
        plain, problems=(dataclasses.replace(problem, metrics=(("none", refused),)),), workers=2
    )
    run = Simulation(federation, Store(tmp_path / "states", 2**30))
    run.step(0)
    with pytest.warns(UserWarning, match=r"never.*; a client is left out of its mean") as heard:
        found = score(run, None, np.arange(5), {"test": federation.data.test}, blends=False)
    run.workers.close()
    assert len(heard) == 1
    assert np.isnan(found.scores["personal", "test"].metrics["none"]).all()


def test_workers_end_with_their_simulation(tmp_path: Path) -> None:
    run = simulation("fedavg", tmp_path, 2)
    run.step(0)
    assert len(multiprocessing.active_children()) == 2
    del run
    assert multiprocessing.active_children() == []
