"""A server with a buffer: by hand, equal to the plain simulator where it waits for all, resumed, refused."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from crash_driver import differences, outcome
from least_squares import LeastSquares, least_squares, personal, shared
from personafl import api
from personafl.algorithms import METHODS
from personafl.algorithms.ditto import ditto
from personafl.algorithms.fedavg import fedavg
from personafl.algorithms.training import Training
from personafl.cloud.clock import DeviceTimes
from personafl.core import wire
from personafl.core.algorithm import Algorithm
from personafl.core.batches import Steps
from personafl.core.optim import Sgd
from personafl.errors import BadInput
from personafl.latency.laws import Constant, Exponential
from personafl.recipe.recipe import Recipe
from personafl.runs.build import prepare
from personafl.simulate.buffer import Arrival, Buffer, Update
from personafl.simulate.buffered import BufferedSimulation
from personafl.simulate.engine import gather
from personafl.storage.rundir import RunDirectory
from personafl.storage.store import Store
from tiers import tiered

SMALL: dict[str, Any] = {
    "rounds": 6,
    "data": {"partition": {"kind": "quantity", "clients": 14, "alpha": 1.0}, "unseen": 3, "validation": 0.2},
    "model": {"name": "mlp", "hidden": [6], "personal": "output"},
    "training": {"steps": 3, "least_steps": 1, "batch": 16},
    "engine": {"threads": 1},
    "evaluation": {"every": 2},
}
REFUSED = {  # their servers do not only average
    "feddyn",
    "scaffold",
    "local",
    "binaryrelax",
    "fedslr",
    "fedbcd",
    "fedbcdi",
    "feddbe",
    "fedpac",
    "fedproto",
    "ifca",
    "pfedhn",
    "fedfomo",
}
AVERAGE = sorted(METHODS.keys() - REFUSED)
TRAINING = Training(work=Steps(steps=2, batch=None), optimizer=Sgd(lr=0.1))


def recipe(buffer: dict[str, Any] | None, method: str = "fedavg", **changes: Any) -> dict[str, Any]:
    values = {**SMALL, "method": {"name": method}, **changes}
    return values if buffer is None else {**values, "buffer": buffer}


def rounds_of(path: Path) -> list[dict[str, Any]]:
    return [line for line in RunDirectory(path).metrics() if line["event"] == "round"]


def server_of(path: Path) -> dict[str, torch.Tensor]:
    """The server's tensors in the last checkpoint, and what is under way."""
    (file,) = path.glob("server-*.safetensors")
    return wire.decode_named(file.read_bytes())


# --- synchronous ---


LATE = {"arrival": {"kind": "pareto", "shape": 1.1}, "step": {"kind": "lognormal", "median": 1.0, "sigma": 2.0}}


@pytest.mark.parametrize(
    ("method", "dtype"),
    tiered(
        itertools.product(
            ["fedavg", "fedadam", "ditto", "fedalt", "finetune", "fedspa", "quped"], ["float32", "float64"]
        ),
        [("fedadam", "float64"), ("ditto", "float32")],
    ),
)
def test_a_buffer_for_everyone_is_the_plain_simulator(tmp_path: Path, method: str, dtype: str) -> None:
    """To the bit, whatever the latencies: states, scores, losses and bytes."""
    engine = {"engine": {"threads": 1, "dtype": dtype}}
    plain = api.run(recipe(None, method, **engine), out=tmp_path / "plain")
    whole = api.run(recipe({"size": 11, **LATE}, method, **engine), out=tmp_path / "whole")
    apart = {"seconds", "time"}
    assert [{k: v for k, v in row.items() if k not in apart} for row in whole.rows] == [
        {k: v for k, v in row.items() if k not in apart} for row in plain.rows
    ]
    expected, found = server_of(tmp_path / "plain"), server_of(tmp_path / "whole")
    assert {f"server/{name}" for name in expected} == found.keys()
    for name, value in expected.items():
        assert torch.equal(value, found[f"server/{name}"])
    a, b = outcome(tmp_path / "plain"), outcome(tmp_path / "whole")
    for key in ("clients", "states", "bytes"):
        assert a[key] == b[key]
    assert {(line["staleness"], line["most_stale"], line["dropped"]) for line in rounds_of(tmp_path / "whole")} == {
        (0.0, 0, 0)
    }
    more = ("time", "staleness", "most_stale", "dropped")
    assert [{k: v for k, v in line.items() if k not in more} for line in b["metrics"]] == a["metrics"]
    models = [(tmp_path / name / "global.safetensors").read_bytes() for name in ("plain", "whole")]
    assert models[0] == models[1]


def test_the_synchronous_time_is_that_of_the_slowest() -> None:
    buffer = make(size=5, concurrency=5, clients=5, arrival=Exponential(mean=2.0), step=Exponential(mean=1.0))
    now = 0.0
    for update in itertools.islice(buffer.updates(), 4):
        now += buffer.devices.times(np.arange(5), update.number).max()
        assert update.time == pytest.approx(now, rel=1e-12)
        assert update.started == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("training", [{"epochs": 2}, {"steps": 4, "least_steps": 1}])
def test_a_client_takes_as_long_as_it_has_steps(training: dict[str, Any]) -> None:
    """Those that it is trained with, of one second each."""
    instant = {"arrival": {"kind": "constant", "seconds": 0.0}, "step": {"kind": "constant", "seconds": 1.0}}
    job = prepare(Recipe.parse(recipe({"size": 11, **instant}, training=training)))
    fed = job.federation
    assert fed.buffer is not None
    now = 0.0
    for update in itertools.islice(fed.buffer.updates(), 5):
        batches = gather(fed.data, fed.data.seen, fed.algorithm.client.phases, fed.seed, update.number).phases["local"]
        now += 2 if "epochs" in training else int(batches.real.any(-1).sum(-1).max())
        assert update.time == now


# --- events ---


def make(
    *,
    size: int,
    concurrency: int,
    clients: int,
    max_staleness: int | None = None,
    discount: Any = "polynomial",
    arrival: Any = None,
    step: Any = None,
    seed: int = 0,
) -> Buffer:
    """Client i takes i + 1 steps; unless told, a step takes a second and nothing else takes time."""
    times = DeviceTimes(
        arrival=arrival or Constant(seconds=0.0),
        step=step or Constant(seconds=1.0),
        steps=lambda devices, number: devices + 1,
        seed=seed,
    )
    return Buffer(
        size=size,
        concurrency=concurrency,
        max_staleness=max_staleness,
        discount=discount,
        clients=np.arange(clients),
        devices=times,
    )


def trace(buffer: Buffer, count: int) -> list[Update]:
    return list(itertools.islice(buffer.updates(), count))


def test_fully_asynchronous_by_hand() -> None:
    """Clients 0, 1 and 2 take 1, 2 and 3 s, all train at any time, and each upload makes a version.

    0 ends at 1, 2, 3, …; 1 at 2, 4, …; 2 at 3, 6, … At one time who started first comes first.
    """
    expected = [  # (time, who starts, who arrives, from which version)
        (1.0, (0, 1, 2), 0, 0),
        (2.0, (0,), 1, 0),  # started at 0 s, client 0 at 1 s
        (2.0, (1,), 0, 1),
        (3.0, (0,), 2, 0),
        (3.0, (2,), 0, 3),
        (4.0, (0,), 1, 2),
        (4.0, (1,), 0, 5),
        (5.0, (0,), 0, 7),
        (6.0, (0,), 2, 4),
    ]
    assert trace(make(size=1, concurrency=3, clients=3), 9) == [
        Update(number, time, started, (Arrival(client, number - version),))
        for number, (time, started, client, version) in enumerate(expected)
    ]


def test_a_buffer_of_two_by_hand() -> None:
    """0 and 1 (1 and 2 s) make version 1 at 2 s, and start from it; 2 (from version 0) and 0 make version 2 at 3 s.

    At 4 s 1 arrives, one version late, and after it 0, which is not. Then 0 at 5 s, and 2 and 1 at 6 s, 2 first.
    """
    assert trace(make(size=2, concurrency=3, clients=3), 4) == [
        Update(0, 2.0, (0, 1, 2), (Arrival(0, 0), Arrival(1, 0))),
        Update(1, 3.0, (0, 1), (Arrival(2, 1), Arrival(0, 0))),
        Update(2, 4.0, (0, 2), (Arrival(1, 1), Arrival(0, 0))),
        Update(3, 6.0, (0, 1), (Arrival(0, 0), Arrival(2, 1))),
    ]


def test_what_is_too_stale_is_dropped_by_hand() -> None:
    """As fully asynchronous, but 2 is three versions late at 3 s: dropped; the buffer waits for 0, at the same time."""
    updates = trace(make(size=1, concurrency=3, clients=3, max_staleness=2), 5)
    assert updates[:3] == trace(make(size=1, concurrency=3, clients=3), 3)
    assert updates[3] == Update(3, 3.0, (0,), (Arrival(0, 0),), (Arrival(2, 3),))
    assert updates[4].started == (0, 2)  # two arrived, so two start


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_events_are_lawful(data: st.DataObject) -> None:
    """For any buffer: so many train at any time, nobody twice, versions and staleness are right, time ascends."""
    clients = data.draw(st.integers(1, 12))
    concurrency = data.draw(st.integers(1, clients))
    size = data.draw(st.integers(1, concurrency))
    bound = data.draw(st.none() | st.integers(0, 4))
    law = data.draw(st.sampled_from([Constant(seconds=0.0), Exponential(mean=1.0)]))
    seed = data.draw(st.integers(0, 99))
    buffer = make(
        size=size, concurrency=concurrency, clients=clients, max_staleness=bound, arrival=law, step=law, seed=seed
    )
    training: dict[int, int] = {}  # client -> version
    before = 0.0
    for version, update in enumerate(trace(buffer, 25)):
        assert update.number == version
        assert update.time >= before
        before = update.time
        assert not training.keys() & set(update.started)
        training |= dict.fromkeys(update.started, version)
        assert len(training) == concurrency
        assert len(update.taken) == size
        for arrival in (*update.taken, *update.dropped):
            assert arrival.staleness == version - training.pop(arrival.client)
        assert all(bound is None or arrival.staleness <= bound for arrival in update.taken)
        assert all(bound is not None and arrival.staleness > bound for arrival in update.dropped)


def test_who_starts_is_a_fair_draw_of_the_idle() -> None:
    """One at a time of 4 that take equally long: the one that arrived is idle too; each starts in a quarter."""
    buffer = make(size=1, concurrency=1, clients=4)
    starts = [update.started[0] for update in itertools.islice(buffer.updates(), 4000)]
    counts = np.bincount(starts)
    np.testing.assert_allclose(counts / 4000, 0.25, atol=0.03)
    other = make(size=1, concurrency=1, clients=4, seed=1)
    assert starts[:50] != [update.started[0] for update in itertools.islice(other.updates(), 50)]


# --- numbers by hand ---


@pytest.fixture
def three(tmp_path: Path) -> LeastSquares:
    return least_squares(tmp_path)


def buffered(problem: LeastSquares, algorithm: Algorithm, buffer: Buffer, folder: Path) -> BufferedSimulation:
    federation = dataclasses.replace(problem.simulate(algorithm, 0).federation, buffer=buffer)
    return BufferedSimulation(federation, Store(folder / f"own{len(list(folder.iterdir()))}", 2**20))


@pytest.mark.parametrize("discount", ["polynomial", "none"])
def test_fully_asynchronous_numbers(three: LeastSquares, tmp_path: Path, discount: str) -> None:
    """w ← w + (x_i − w_v)/√(1 + s), x_i two steps from w_v; weights cancel where one upload is alone."""
    simulation = buffered(three, fedavg(TRAINING), make(size=1, concurrency=3, clients=3, discount=discount), tmp_path)
    versions = [three.start]
    story = [(0, 0), (1, 0), (0, 1), (2, 0), (0, 3), (1, 2)]  # (client, version it started from)
    for number, (client, version) in enumerate(story):
        change = three.descend(client, versions[version], 0.1, 2) - versions[version]
        late = number - version
        versions.append(versions[-1] + change * (1.0 if discount == "none" else 1 / np.sqrt(1 + late)))
        done = simulation.step(number)
        np.testing.assert_allclose(shared(simulation), versions[-1], rtol=0, atol=1e-12)
        assert (done.staleness, done.most_stale, done.dropped, done.clients) == (late, late, 0, 1)
    assert done.time == 4.0


def test_a_buffer_of_two_numbers(three: LeastSquares, tmp_path: Path) -> None:
    """Weights are the samples, 3, 7 and 5; the discount is not normalised away; the loss is not discounted."""
    simulation = buffered(three, fedavg(TRAINING), make(size=2, concurrency=3, clients=3), tmp_path)
    start = three.start

    def change(client: int, w: NDArray[np.float64]) -> NDArray[np.float64]:
        return three.descend(client, w, 0.1, 2) - w

    simulation.step(0)
    first = start + (3 * change(0, start) + 7 * change(1, start)) / 10
    np.testing.assert_allclose(shared(simulation), first, rtol=0, atol=1e-12)
    done = simulation.step(1)
    second = first + (5 * change(2, start) / np.sqrt(2) + 3 * change(0, first)) / 8
    np.testing.assert_allclose(shared(simulation), second, rtol=0, atol=1e-12)
    assert (done.staleness, done.most_stale, done.dropped, done.time) == (0.5, 1, 0, 3.0)

    def loss(client: int, w: NDArray[np.float64]) -> float:
        x, y = three.x[client], three.y[client]
        return float(np.mean([0.5 * np.mean((x @ v - y) ** 2) for v in (w, three.descend(client, w, 0.1, 1))]))

    assert done.loss == pytest.approx((5 * loss(2, start) + 3 * loss(0, first)) / 8, abs=1e-12)


def test_a_dropped_upload_leaves_its_client_trained(three: LeastSquares, tmp_path: Path) -> None:
    """Ditto: 2's personal model is there from the time at which it arrives, and the shared one does without it."""
    rule = ditto(TRAINING, personal_lr=0.1)
    buffer = make(size=1, concurrency=3, clients=3, max_staleness=2)
    bounded = buffered(three, rule, buffer, tmp_path)
    for number in range(3):
        bounded.step(number)
    assert 2 not in bounded.store
    before = shared(bounded)
    done = bounded.step(3)
    assert (done.dropped, done.clients, done.staleness) == (1, 1, 0.0)
    change = three.descend(0, before, 0.1, 2) - before
    np.testing.assert_allclose(shared(bounded), before + change, rtol=0, atol=1e-12)
    free = buffered(three, rule, make(size=1, concurrency=3, clients=3), tmp_path)
    for number in range(4):
        free.step(number)
    np.testing.assert_array_equal(personal(bounded, 2), personal(free, 2))


def test_bytes_are_counted_where_they_cross(three: LeastSquares, tmp_path: Path) -> None:
    """Down when a client starts, up when it arrives, also if it is dropped."""
    plain = three.simulate(fedavg(TRAINING), 0).step(0)
    down, up = plain.bytes_down // 3, plain.bytes_up // 3
    buffer = make(size=1, concurrency=3, clients=3, max_staleness=2)
    simulation = buffered(three, fedavg(TRAINING), buffer, tmp_path)
    counted = [simulation.step(number) for number in range(5)]
    assert [done.bytes_down // down for done in counted] == [3, 1, 1, 1, 2]
    assert [done.bytes_up // up for done in counted] == [1, 1, 1, 2, 1]


# --- runs ---


@pytest.mark.parametrize("method", tiered(AVERAGE, ["fedavg", "fedalt"]))
def test_methods_that_average_run(tmp_path: Path, method: str) -> None:
    """They finish, and say when each round was and how stale its uploads."""
    buffer = {"size": 2, "concurrency": 6, "max_staleness": 3}
    result = api.run(recipe(buffer, method, training={"steps": 1, "batch": 8}, rounds=4), out=tmp_path / "run")
    lines = rounds_of(tmp_path / "run")
    times = [line["time"] for line in lines]
    assert times == sorted(times)
    assert {row["time"] for row in result.rows} == {times[-1]}
    assert [line["clients"] for line in lines] == [2] * 4
    assert all(0 <= line["staleness"] <= line["most_stale"] <= 3 for line in lines)


class Crash(BaseException):
    """Ends a run from within."""


UPLINKS: dict[str, dict[str, Any]] = {"dense": {"form": "dense"}, "sparse": {"form": "sparse", "keep": 0.2}}


@pytest.mark.parametrize(
    ("method", "uplink"),
    tiered(itertools.product(["fedadam", "ditto", "fedalt"], UPLINKS), [("fedadam", "dense"), ("ditto", "sparse")]),
)
def test_a_run_that_was_stopped_ends_as_one_that_was_not(tmp_path: Path, method: str, uplink: str) -> None:
    """Killed after rounds 3 and 6 of 9 with clients under way, of whom some were so for rounds."""
    buffer = {"size": 2, "concurrency": 7, "max_staleness": 4}
    engine = {"threads": 1, "checkpoint_seconds": 0}
    values = recipe(buffer, method, rounds=9, engine=engine, uplink=UPLINKS[uplink])

    def crash(progress: Any) -> None:
        if getattr(progress, "done", 0) == 3:
            raise Crash

    api.run(values, out=tmp_path / "straight")
    with pytest.raises(Crash):
        api.run(values, out=tmp_path / "stopped", listener=crash)
    assert len(server_of(tmp_path / "stopped")["waiting/0/clients"]) == 5
    with pytest.raises(Crash):
        api.resume(tmp_path / "stopped", listener=lambda method, seed: crash)
    assert RunDirectory(tmp_path / "stopped").checkpoint().rounds == 6
    api.resume(tmp_path / "stopped")
    assert differences(outcome(tmp_path / "straight"), outcome(tmp_path / "stopped")) == []


def test_devices_of_several_kinds_are_stopped_and_resumed(tmp_path: Path) -> None:
    """States of two shapes wait side by side."""
    devices = [{"share": 0.5, "model": {"name": "linear"}}, {"share": 0.5, "model": {"name": "mlp", "hidden": [4]}}]
    values = recipe(
        {"size": 2, "concurrency": 8}, "quped", devices=devices, engine={"threads": 1, "checkpoint_seconds": 0}
    )

    def crash(progress: Any) -> None:
        if getattr(progress, "done", 0) == 3:
            raise Crash

    api.run(values, out=tmp_path / "straight")
    with pytest.raises(Crash):
        api.run(values, out=tmp_path / "stopped", listener=crash)
    assert {"waiting/0/clients", "waiting/1/clients"} <= server_of(tmp_path / "stopped").keys()
    api.resume(tmp_path / "stopped")
    assert differences(outcome(tmp_path / "straight"), outcome(tmp_path / "stopped")) == []


@pytest.mark.parametrize("part", ["waiting/0/clients", "waiting/0/uploads/loss", "waiting/0/bytes"])
def test_damaged_work_under_way_is_named(tmp_path: Path, part: str) -> None:
    values = recipe({"size": 2, "concurrency": 7}, "fedalt", engine={"threads": 1, "checkpoint_seconds": 0})

    def crash(progress: Any) -> None:
        raise Crash

    with pytest.raises(Crash):
        api.run(values, out=tmp_path / "run", listener=crash)
    kept = server_of(tmp_path / "run")
    kept.pop(part)
    (file,) = (tmp_path / "run").glob("server-*.safetensors")
    file.write_bytes(safetensors.torch.save(kept))
    with pytest.raises(BadInput, match=rf"^{file}: the checkpoint needs this file and it was damaged"):
        api.resume(tmp_path / "run")


def test_all_methods_see_the_same_events(tmp_path: Path) -> None:
    stories = []
    for method in ("fedavg", "ditto", "fedper"):
        api.run(recipe({"size": 3, "max_staleness": 1}, method), out=tmp_path / method)
        keys = ("time", "staleness", "most_stale", "dropped", "clients")
        stories.append([{key: line[key] for key in keys} for line in rounds_of(tmp_path / method)])
    assert stories[0] == stories[1] == stories[2]
    assert sum(line["dropped"] for line in stories[0]) > 0


def test_a_fast_server_is_ahead_in_time(tmp_path: Path) -> None:
    """A few slow clients hold up a synchronous server, not one with a buffer: as many rounds take less time."""
    ends = {}
    for size in (11, 4, 1):
        api.run(recipe({"size": size, **LATE}), out=tmp_path / str(size))
        ends[size] = rounds_of(tmp_path / str(size))[-1]["time"]
    assert ends[1] < ends[4] < ends[11]


def test_stage_a_waits_for_all(tmp_path: Path) -> None:
    values = recipe({"size": 2}, "fedalt", pretrain={"rounds": 2, "method": {"name": "scaffold"}})
    api.run(values, out=tmp_path / "run")
    assert [line["clients"] for line in rounds_of(tmp_path / "run" / "pretrain")] == [11, 11]
    assert [line["clients"] for line in rounds_of(tmp_path / "run")] == [2] * 6


# --- bad input ---


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"buffer": {}}, "buffer.size: "),
        ({"buffer": {"size": 0}}, "buffer.size: input should be greater than or equal to 1 (given: 0)"),
        (
            {"buffer": {"size": 5, "concurrency": 4}},
            "buffer.size: waits for 5 uploads, but only 4 clients train at a time; lower it",
        ),
        ({"buffer": {"size": 12}}, "buffer.size: waits for 12 uploads, but only 11 clients train at a time; lower it"),
        (
            {"buffer": {"size": 2, "concurrency": 12}},
            "buffer.concurrency: 12 clients at a time, but only 11 take part in training; lower it, or remove it",
        ),
        (
            {"buffer": {"size": 2, "max_staleness": -1}},
            "buffer.max_staleness: input should be greater than or equal to 0 (given: -1)",
        ),
        ({"buffer": {"size": 2, "discount": "linear"}}, "buffer.discount: input should be 'polynomial' or 'none'"),
        ({"buffer": {"sizes": 2, "size": 1}}, "buffer.sizes: unknown key; did you mean 'size'?"),
        (
            {"buffer": {"size": 2, "step": {"kind": "constant", "seconds": -1}}},
            "buffer.step.seconds: input should be greater than or equal to 0",
        ),
        ({"buffer": {"size": 2, "step": {"kind": "trace", "file": "no.txt"}}}, "no.txt: cannot read the trace"),
        (
            {"buffer": {"size": 2}, "cloud": {"servers": 2}},
            "buffer: it is for one server, and [cloud] has several; remove one of the two sections",
        ),
        (
            {"buffer": {"size": 2}, "federation": {"cohort": 4}},
            "federation.cohort: with [buffer] who is free takes part; remove it, and set buffer.concurrency",
        ),
        (
            {"buffer": {"size": 2}, "federation": {"sampling": "bernoulli"}},
            "federation.sampling: with [buffer] who is free takes part; remove it",
        ),
    ],
)
def test_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], text: str) -> None:
    """Named before any work: there is no run directory."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput) as error:
        api.run({**recipe(None), **changes}, out=tmp_path / "run")
    assert text in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", sorted(METHODS.keys() - set(AVERAGE)))
def test_methods_that_cannot(tmp_path: Path, method: str) -> None:
    why = "(does not only average changes of what it sent|sends each client a message of its own)"
    with pytest.raises(BadInput, match=f"^buffer: {method}'s server {why}"):
        api.run(recipe({"size": 2}, method), out=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_with_a_buffer_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With whole paths of traces, so that it can be resumed from any folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "times.txt").write_text("1.5\n2\n")
    buffer = {"size": 2, "concurrency": 4, "max_staleness": 1, "step": {"kind": "trace", "file": "times.txt"}}
    api.run(recipe(buffer), out=tmp_path / "run")
    kept = api.recipe_of(tmp_path / "run")
    assert kept.buffer is not None
    assert kept.buffer.model_dump(mode="json")["step"]["file"] == str(tmp_path / "times.txt")
    assert kept == Recipe.parse(recipe(buffer)).anchored().model_copy(update={"compare": kept.compare})
