"""Several servers and a coordinator: the simulator's bits, servers and coordinators that are killed, and refusals."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from clouds import CloudCluster, cloud_recipe, played, waiting
from deploy_harness import channel, identity_of
from together import Together

from personafl.core import tree, wire
from personafl.deploy import pki
from personafl.deploy.device.dealing import deal
from personafl.deploy.device.training import LocalClient
from personafl.deploy.net.messages import Announce, Beat, Code, Hello, Join, Proceed, Refused, Said, digest_of
from personafl.deploy.net.transport import Channel, ask_status
from personafl.deploy.server import coordinator as coordinator_module
from personafl.deploy.server import server as server_module
from personafl.deploy.server.agreement import Sum, fingerprint, sum_like
from personafl.deploy.server.cloudserver import CloudRounds, CloudServerConfig, run_cloud_server
from personafl.deploy.server.coordination import Coordination
from personafl.deploy.server.coordinator import run_coordinator
from personafl.deploy.server.limits import Limits
from personafl.deploy.server.rounds import Rounds
from personafl.deploy.server.service import Event, ServiceConfig
from personafl.errors import BadInput
from personafl.recipe.devices import DeviceSection
from personafl.recipe.recipe import Recipe
from personafl.runs.build import prepare
from personafl.simulate.cloud import without_own
from tiers import tiered

DRIVER = Path(__file__).with_name("clouds.py")


def driven(*words: str) -> list[dict[str, Any]]:
    """Run the driver in a process of its own: it forks, which a process that has used gRPC must not."""
    done = subprocess.run([sys.executable, str(DRIVER), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


async def in_one_process(made: CloudCluster) -> None:
    """Run all of a cloud; servers begin one after the other, for networks are drawn with torch's generator."""
    running = []
    for name in ("coordinator", *made.servers):
        events: asyncio.Queue[Event] = asyncio.Queue()
        running.append(asyncio.create_task(made.role(name, events.put_nowait)))
        said = asyncio.create_task(events.get())
        await asyncio.wait({running[-1], said}, return_when=asyncio.FIRST_COMPLETED)
        assert not running[-1].done(), running[-1].exception()  # whose first word would be waited for in vain
        assert said.result().what == "listening"
    await asyncio.gather(*running, *(made.role(name, print) for name in made.devices))


@pytest.mark.parametrize("protocol", ["sync", "async"])
def test_a_cloud_in_one_process_gives_the_simulators_bits(protocol: str, tmp_path: Path) -> None:
    """A coordinator, two servers and their four devices, over sockets; what did not wait is played again."""
    recipe = two(protocol, rounds=2)
    made = CloudCluster(recipe, tmp_path)

    asyncio.run(in_one_process(made))
    servers, states = made.outcome()
    wanted = played(recipe, None if protocol == "sync" else made.aggregations())
    assert servers == wanted[0]
    assert protocol != "sync" or states == wanted[1]
    assert made.rounds_known()


OTHERWISE: dict[str, dict[str, Any]] = {
    "gossip": {"protocol": "gossip", "mixing": "ring"},
    "gossip again": {"protocol": "gossip", "mixing": [[0.5, 0.5], [0.5, 0.5]], "iterations": 3},
    "sync again": {"protocol": "sync", "iterations": 2},
    "async again": {"protocol": "async", "first": 2, "iterations": 2},
    "rigorous again": {"protocol": "rigorous", "first": 1, "iterations": 2},
}


@pytest.mark.parametrize(
    ("how", "method"),
    tiered(
        itertools.product(OTHERWISE, ("fedbcd", "fedbcdi")), [("gossip again", "fedbcd"), ("rigorous again", "fedbcd")]
    ),
)
def test_servers_that_mix_otherwise_and_step_again_give_the_simulators_bits(
    how: str, method: str, tmp_path: Path
) -> None:
    """Without a network: a coordinator, two servers and their devices, in turn."""
    recipe = cloud_recipe(method, 4, cloud={"servers": 2, **OTHERWISE[how]}, rounds=3, **LINEAR)
    with Together(recipe, tmp_path) as made:
        made.go_on()
    assert made.outcome() == made.replayed()


@pytest.mark.parametrize(
    ("how", "robust"),
    [
        ("gossip", {"rule": "centered-clipping", "f": 1, "clip": {"times": 1.5}}),
        ("sync", {"rule": "mean", "clip": {"times": 1.0, "rounds": 2}, "most": 0.4}),
        ("sync", {"rule": "centered-clipping", "f": 1, "clip": {"times": 1.5}}),
        pytest.param("sync", {"rule": "trimmed-mean", "f": 1, "pre": ["nnm"]}, marks=pytest.mark.system),
        pytest.param("async", {"rule": "trimmed-mean", "f": 1, "pre": ["nnm"]}, marks=pytest.mark.system),
    ],
)
def test_each_server_takes_its_own_devices_updates_by_the_rule(
    how: str, robust: dict[str, Any] | None, tmp_path: Path
) -> None:
    """To the simulator's bits: medians and guesses are a server's own, and are not mixed."""
    cloud = {"protocol": how, **({"first": 1} if how == "async" else {})} | OTHERWISE.get(how, {})
    changes = {"robust": robust} if robust else {}
    recipe = cloud_recipe("ditto", 6, cloud={"servers": 2, **cloud}, rounds=3, **LINEAR, **changes)
    with Together(recipe, tmp_path) as made:
        made.go_on()
    assert made.outcome() == made.replayed()
    state = without_own(prepare(recipe).federation.serving().state)
    assert state.medians == state.centre == state.fates == ()


@pytest.mark.system
@pytest.mark.parametrize("how", ["sync", "async"])
def test_a_device_that_sends_too_much_is_clipped_by_its_own_server(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a word in the recipe: five thousand times the update moves no model further than three honest ones."""
    cloud = {"servers": 2, "protocol": how, **({"first": 2} if how == "async" else {})}
    train = LocalClient.train

    def moved(folder: str, **changes: Any) -> float:
        recipe = cloud_recipe("fedavg", 6, cloud=cloud, rounds=1, **LINEAR, **changes)
        with Together(recipe, tmp_path / folder) as made:
            before = wire.dense(made.cloud[0]._server.broadcast())
            made.go_on()
            after = [wire.dense(each._server.broadcast()) for each in made.cloud]
            return max(float(tree.norm(tree.sub(model, before))) for model in after)

    def hostile(client: LocalClient, round_: int, model: str, broadcast: bytes) -> None:
        train(client, round_, model, broadcast)
        pending = client.state.pending
        if client.number == 0 and pending is not None:
            sent = wire.decode_named(pending.update)
            long = {name: leaf if name == "loss" else 5e3 * leaf for name, leaf in sent.items()}
            client.state.pending = dataclasses.replace(pending, update=wire.encode(long))

    honest = moved("honest")
    monkeypatch.setattr(LocalClient, "train", hostile)
    assert moved("clipped") < 3 * honest
    assert moved("mean", robust={"rule": "mean"}) > 100 * honest


LINEAR: dict[str, Any] = {"model": {"name": "linear"}, "training": {"steps": 2, "batch": 16}}
Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def small() -> Results:
    """Clouds of processes, by what was done to them."""
    found: Results = {}
    for result in driven("small"):
        found.setdefault(result["what"], []).append(result)
    return found


@pytest.mark.system
def test_three_servers_with_three_devices_each_give_the_simulators_bits(small: Results) -> None:
    assert [result["method"] for result in small["equal"] if result["equal"]] == ["fedbcd", "fedavg"]


@pytest.mark.system
def test_a_server_that_is_killed_and_started_again_rejoins(small: Results) -> None:
    """Two of three are waited for. What is late is taken, the coordinator is killed too, and nothing is lost."""
    (result,) = small["kills"]
    assert result["equal"]
    assert result["rounds"] == 24
    assert min(result["mixes"]) > 1
    assert result["most_stale"] >= 1  # one that was killed while it waited has handed in before


@pytest.mark.system
def test_a_server_that_stays_away_is_not_waited_for(small: Results) -> None:
    (result,) = small["down"]
    assert result["gone"] == [2]
    assert result["rounds"] == 6
    assert result["last"] == [0, 1]
    assert result["equal"]


@pytest.mark.system
def test_a_cloud_whose_processes_are_killed_at_some_of_their_writes_gives_the_simulators_bits() -> None:
    results = driven("failpoints", "80", "sync")
    assert [result for result in results if not result.get("equal", True)] == []
    counts = {result["victim"]: result["failpoints"] for result in results if "failpoints" in result}
    assert list(counts) == ["coordinator", "cloud-0", "device-0"]
    assert min(counts.values()) >= 1
    assert sum(counts.values()) >= 5


@pytest.mark.slow
def test_a_cloud_killed_at_every_write() -> None:
    assert [result for result in driven("failpoints") if not result.get("equal", True)] == []


@pytest.mark.slow
def test_a_hundred_clouds_killed_at_random() -> None:
    assert [result for result in driven("random", "100") if not (result["equal"] and result["rounds_known"])] == []


@pytest.mark.slow
def test_other_protocols_with_kills() -> None:
    assert all(result["equal"] for result in (*driven("kills"), *driven("down")))


def two(protocol: str, **changes: Any) -> Recipe:
    return cloud_recipe("fedbcd", 4, cloud={"servers": 2, **waiting(protocol, 2)}, **changes)


def handed(recipe: Recipe, folder: Path, place: int) -> tuple[CloudRounds, Announce, bytes]:
    """Return a server that has begun, and something that it may hand in."""
    rounds = CloudRounds(recipe, folder / f"cloud-{place}", place)
    state = wire.encode(without_own(rounds._base.serving().state))
    return rounds, Announce(round=0, clients=2), state


def joined(recipe: Recipe, path: Path) -> Coordination:
    made = Coordination(recipe, path)
    for server in range(2):
        made.join(server, Join(weight=10, recipe=fingerprint(recipe)))
    return made


def test_a_coordinator_refuses_what_is_out_of_turn(tmp_path: Path) -> None:
    recipe = two("async")
    rounds, announce, state = handed(recipe, tmp_path, 0)
    with rounds, joined(recipe, tmp_path / "run") as made:
        for message, payload, code in (
            (Announce(round=1, clients=2), state, Code.WRONG_ROUND),
            (announce, b"no tensors", Code.BAD_PAYLOAD),
            (Announce(round=0, clients=0), state, Code.BAD_SAMPLES),
            (announce, wire.encode({"target": {}}), Code.BAD_NAMES),
        ):
            with pytest.raises(Refused) as caught:
                made.announce(0, message, payload)
            assert caught.value.code is code
        assert made.announce(0, announce, state) is False
        assert made.announce(0, announce, state) is True
        with pytest.raises(Refused) as caught:
            made.announce(0, Announce(round=0, clients=1), state)
        assert caught.value.code is Code.DUPLICATE
        assert not made.follows(0, 0)


def test_a_sum_that_weighs_nothing_is_refused(tmp_path: Path) -> None:
    """The mean would not be finite."""
    recipe = two("sync")
    with joined(recipe, tmp_path / "run") as made:
        nothing = wire.encode(sum_like(made._base)[0])
        with pytest.raises(Refused) as caught:
            made.announce(0, Announce(round=0, clients=2), nothing)
        assert caught.value.code is Code.BAD_SAMPLES
        assert not made.is_waiting(0)


def test_a_coordinator_that_starts_again_knows_what_it_heard(tmp_path: Path) -> None:
    """Versions, staleness, who waits and who is gone come back; a mix that the crash cut off is done."""
    recipe = two("async", rounds=3)
    servers = [handed(recipe, tmp_path, place) for place in range(2)]
    _, announce, state = servers[0]
    with joined(recipe, tmp_path / "run") as made:
        made.announce(0, announce, state)
        made.lose(1)
        assert (made.done, made.round_of(0), made.round_of(1)) == (1, 1, 0)
        made.find(1)
        made.announce(0, Announce(round=1, clients=2), state)
    with Coordination(recipe, tmp_path / "run") as made:
        assert (made.done, made.gone, made.is_waiting(0)) == (1, set(), True)
        assert made.following(0, 0).message == Proceed(start=1, mixed=0, members=[0])
        made.announce(1, announce, state)
        assert made.last is not None
        assert (made.last.members, made.last.staleness) == ((0, 1), (0, 1))
        assert made.following(1, 0) == made.following(1, 0)
        before = made.following(1, 0)
    checkpoint = tmp_path / "run" / "checkpoint.json"
    assert json.loads(checkpoint.read_text())["rounds"] == 2
    with Coordination(recipe, tmp_path / "run") as made:
        assert (made.done, dict(made.mixes), made.staleness) == (2, {0: 2, 1: 1}, {0: 0, 1: 1})
        assert made.following(1, 0) == before
        made.announce(0, Announce(round=2, clients=2), state)
        made.announce(1, Announce(round=2, clients=2), state)
        assert made.finished
        with pytest.raises(Refused) as caught:
            made.announce(0, Announce(round=3, clients=2), state)
        assert caught.value.code is Code.ROUND_CLOSED
    with Coordination(recipe, tmp_path / "run") as made:
        assert made.finished
        assert made.following(1, 2).message == Proceed(start=3, mixed=2, members=[0, 1])
    for rounds, *_ in servers:
        rounds.__exit__()


def test_a_server_that_comes_late_in_rigorous_mode_goes_on_alone(tmp_path: Path) -> None:
    recipe = two("rigorous", rounds=3)
    rounds, announce, state = handed(recipe, tmp_path, 0)
    with rounds, joined(recipe, tmp_path / "run") as made:
        made.lose(1)
        made.announce(0, announce, state)
        made.announce(1, announce, state)
        assert made.following(1, 0).message == Proceed(start=1, mixed=None)
        assert made.following(1, 0).payload == b""
        assert made.isolated[1] == 1


def test_a_device_at_the_wrong_server_is_told_where_it_belongs(tmp_path: Path) -> None:
    recipe, _ = deal(two("sync"), tmp_path / "dealt")
    pki.init(tmp_path / "pki")
    assert recipe.cloud is not None
    assert recipe.cloud.members is not None
    stranger = f"device-{recipe.cloud.members[1][0]}"
    hello = Hello(samples=5, input_shape=[1, 8, 8], classes=10)
    with CloudRounds(recipe, tmp_path / "run", 0) as rounds:
        with pytest.raises(Refused, match=f"{stranger} is cloud-1's") as caught:
            rounds.enrol(identity_of(tmp_path / "pki", stranger), hello)
        assert caught.value.code is Code.WRONG_SERVER
        assert not rounds.members
        rounds.enrol(identity_of(tmp_path / "pki", f"device-{recipe.cloud.members[0][0]}"), hello)
        with pytest.raises(Refused, match="no server's"):
            rounds.enrol(identity_of(tmp_path / "pki", "device-anna"), hello)
        assert len(rounds.members) == 1


def test_the_first_that_ask_take_part(tmp_path: Path) -> None:
    recipe = cloud_recipe("fedavg", 6, cloud={"servers": 2, "active": 2})
    pki.init(tmp_path / "pki")
    with CloudRounds(recipe, tmp_path / "run", 0) as rounds:
        for number in range(3):
            hello = Hello(samples=5, input_shape=[1, 8, 8], classes=10)
            rounds.enrol(identity_of(tmp_path / "pki", f"device-{number}"), hello)
        rounds.begin()
        rounds.open_next()
        assert rounds.task(2, False) is not None
        assert not rounds.complete
        assert rounds.task(0, False) is not None
        assert not rounds.wants(1)
        assert rounds.task(1, False) is None
        assert rounds.task(2, False) is not None
    with CloudRounds(recipe, tmp_path / "run", 0) as rounds:
        assert rounds.open is not None
        assert rounds.open.cohort == (2, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"protocol": "gossip"}, "cloud.mixing: gossip needs it"),
        ({"protocol": "async", "first": 4}, "cloud.first: waits for 4 servers, but there are only 3"),
        ({"iterations": 2}, "cloud.iterations: fedavg's server cannot step again"),
    ],
)
def test_what_a_cloud_of_processes_does_not_do_is_refused_at_once(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=message):
        Coordination(cloud_recipe("fedavg", cloud=change), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_cloud_of_processes_refuses_penalties_of_the_devices_own(tmp_path: Path) -> None:
    recipe = cloud_recipe("fedbcd").model_copy(update={"devices": (DeviceSection(share=1, penalty=0.5),)})
    with pytest.raises(BadInput, match=r"^devices\[0\]\.penalty: is for the simulator and for one server"):
        Coordination(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_single_server_and_a_recipe_for_several(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--coordinator"):
        Rounds(cloud_recipe("fedavg"), tmp_path / "run")
    alone = cloud_recipe("fedavg").model_copy(update={"cloud": None})
    with pytest.raises(BadInput, match="cloud: missing"):
        Coordination(alone, tmp_path / "run")


@contextlib.asynccontextmanager
async def coordinating(recipe: Recipe, folder: Path) -> AsyncIterator[tuple[int, ServiceConfig]]:
    """Start a coordinator, and end it with the block."""
    await asyncio.to_thread(pki.init, folder / "pki")
    config = ServiceConfig(
        recipe=recipe,
        out=folder / "run",
        files=pki.issue(folder / "pki", "coordinator"),
        revocations=folder / "pki" / "revoked.pem",
        listen="localhost:0",
    )
    events: asyncio.Queue[Event] = asyncio.Queue()
    running = asyncio.create_task(run_coordinator(config, events.put_nowait))
    try:
        listening = await events.get()
        yield int(listening.text.split()[1].strip(",")), config
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


def test_who_may_join(tmp_path: Path) -> None:
    recipe = two("sync")
    join = Join(weight=10, recipe=fingerprint(recipe))

    async def refusals() -> list[Code]:
        found = []
        async with coordinating(recipe, tmp_path) as (port, _):
            for name, message in (
                ("cloud-2", join),
                ("cloud-berlin", join),
                ("device-0", join),
                ("cloud-0", Beat(round=0)),
                ("cloud-0", join.model_copy(update={"recipe": "0" * 64})),
            ):
                async with channel(port, pki.issue(tmp_path / "pki", name)) as line:
                    with pytest.raises(Refused) as caught:
                        await line.ask(message)
                    found.append(caught.value.code)
            async with channel(port, pki.issue(tmp_path / "pki", "cloud-0")) as line:
                await line.ask(join)
                await line.ask(Beat(round=0))
            report = await ask_status(f"localhost:{port}", pki.issue(tmp_path / "pki", "coordinator"))
            assert [row["joined"] for row in report["servers"]] == [True, False]
            assert report["refused"]["UNKNOWN_SERVER"] == 2
        return found

    unknown = Code.UNKNOWN_SERVER
    assert asyncio.run(refusals()) == [unknown, unknown, Code.WRONG_ROLE, Code.NOT_ENROLLED, Code.OTHER_RECIPE]


def test_a_server_that_is_none_of_the_recipes_does_not_start(tmp_path: Path) -> None:
    pki.init(tmp_path / "pki")
    config = CloudServerConfig(
        recipe=two("sync"),
        out=tmp_path / "run",
        files=pki.issue(tmp_path / "pki", "cloud-7"),
        revocations=tmp_path / "pki" / "revoked.pem",
        listen="localhost:0",
        coordinator="localhost:1",
    )
    with pytest.raises(BadInput, match=r"cloud-7; the servers of the recipe are cloud-0 to cloud-1"):
        asyncio.run(run_cloud_server(config, lambda event: None))
    assert not (tmp_path / "run").exists()


def test_dealt_data_say_which_server_a_device_belongs_to(tmp_path: Path) -> None:
    recipe, _ = deal(cloud_recipe("fedavg", 7), tmp_path)
    assert recipe.cloud is not None
    found = sorted(int(name) for names in recipe.cloud.members or () for name in names)
    assert found == list(range(7))
    assert sorted(map(len, recipe.cloud.members or ())) == [2, 2, 3]


def summed(made: Coordination, value: float, weight: float = 10.0) -> bytes:
    """Return a sum that a server may hand in, with all its numbers the same."""
    total, _ = sum_like(made._base)[0]
    return wire.encode(
        Sum(tree.map(lambda leaf: torch.full_like(leaf, value), total), torch.tensor(weight, dtype=torch.float64))
    )


def refused_by(made: Coordination, message: Announce, payload: bytes) -> Code | None:
    try:
        made.announce(0, message, payload)
    except Refused as refused:
        assert not made.is_waiting(0)
        return refused.code
    return None


@pytest.mark.parametrize(
    ("value", "weight", "clients", "code"),
    [
        (1e30, 10.0, 2, Code.NORM_TOO_LARGE),
        (1e300, 10.0, 2, Code.NORM_TOO_LARGE),
        (float("inf"), 10.0, 2, Code.NOT_FINITE),
        (1e300, 1e300, 2, Code.BAD_SAMPLES),
        (1.0, 11.0, 2, Code.BAD_SAMPLES),  # than joined
        (1.0, -1.0, 2, Code.BAD_SAMPLES),
        (1.0, float("nan"), 2, Code.NOT_FINITE),
        (1.0, 1e-300, 2, Code.NORM_TOO_LARGE),
        (1.0, 10.0, 3, Code.BAD_SAMPLES),  # devices, of two
        (1.0, 10.0, 2, None),
    ],
)
def test_a_sum_is_bounded_as_updates_are(
    value: float, weight: float, clients: int, code: Code | None, tmp_path: Path
) -> None:
    recipe, _ = deal(two("sync"), tmp_path / "dealt")
    with joined(recipe, tmp_path / "run") as made:
        assert refused_by(made, Announce(round=0, clients=clients), summed(made, value, weight)) is code


def test_a_sum_of_devices_that_came_later_may_weigh_more_than_joined(tmp_path: Path) -> None:
    """Without cloud.members nobody knows who comes; a device has max_samples at most."""
    with joined(two("sync", deploy={"max_samples": 100}), tmp_path / "run") as made:
        announce = Announce(round=0, clients=2)
        assert refused_by(made, announce, summed(made, 1.0, 201.0)) is Code.BAD_SAMPLES
        assert refused_by(made, announce, summed(made, 1.0, 200.0)) is None


def test_what_a_server_joins_with_is_bounded_too(tmp_path: Path) -> None:
    recipe, _ = deal(two("sync"), tmp_path / "dealt")
    with Coordination(recipe, tmp_path / "run") as made:
        for weight in (0, 2**52):
            with pytest.raises(Refused) as caught:
                made.join(0, Join(weight=weight, recipe=fingerprint(recipe)))
            assert caught.value.code is Code.BAD_SAMPLES
        assert not made.weights


@pytest.mark.parametrize(("value", "code"), [(1e30, Code.NORM_TOO_LARGE), (1e5, Code.NORM_TOO_LARGE), (1.0, None)])
def test_a_model_of_a_server_is_bounded_by_its_change(value: float, code: Code | None, tmp_path: Path) -> None:
    recipe = two("async", deploy={"norm_bound": 1e4})
    with joined(recipe, tmp_path / "run") as made:
        far = tree.map(lambda leaf: leaf + value, made._models[0])
        assert refused_by(made, Announce(round=0, clients=2), wire.encode(far)) is code


def test_a_mix_that_would_not_be_finite_is_made_without_the_server_that_caused_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It raised, and raised again at every start. Here all is taken, as if the bound were too large."""
    monkeypatch.setattr(Limits, "check_sum", lambda *_: None)
    recipe = two("sync", rounds=2)
    announce = Announce(round=0, clients=2)
    with joined(recipe, tmp_path / "run") as made:
        made.announce(0, announce, summed(made, 1.0))
        made.announce(1, announce, summed(made, 1e300))
        assert made.done == 1
        assert made.diverged == [(0, 1)]
        state = made.following(0, 0).payload
        assert made.following(1, 0).message == Proceed(start=1, mixed=0, members=[0, 1])
    with joined(recipe, tmp_path / "other") as made:
        made.announce(0, announce, summed(made, 1.0))
        made.lose(1)
        assert made.following(0, 0).payload == state
    with Coordination(recipe, tmp_path / "run") as made:
        assert made.done == 1
        assert made.following(0, 0).payload == state
        for server in range(2):  # nobody is left: the model stays as it is
            made.announce(server, Announce(round=1, clients=2), summed(made, 1e300))
        assert made.finished
        assert made.diverged == [(1, 0), (1, 1)]
        assert made.following(0, 1).payload == state
    lines = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    assert [(line["round"], line["server"]) for line in lines if line["event"] == "diverged"] == [
        (0, 1),
        (1, 0),
        (1, 1),
    ]


def test_a_run_that_an_endless_sum_had_stopped_goes_on(tmp_path: Path) -> None:
    """As version 0.1 left it: the sum was taken, and every start diverged."""
    recipe = two("sync", rounds=1)
    with joined(recipe, tmp_path / "run") as made:
        made.announce(0, Announce(round=0, clients=2), summed(made, 1.0))
        payload = summed(made, 1e300)
        made._file(1, 0).write_bytes(payload)
        made.journal.write("ready", server=1, round=0, digest=digest_of(payload), clients=2)
    with Coordination(recipe, tmp_path / "run") as made:
        assert made.finished
        assert made.diverged == [(0, 1)]


def test_a_server_does_not_take_just_anything_from_a_coordinator(tmp_path: Path) -> None:
    recipe = two("sync", rounds=2)
    pki.init(tmp_path / "pki")
    with CloudRounds(recipe, tmp_path / "cloud-0", 0) as rounds:
        rounds.enrol(identity_of(tmp_path / "pki", "device-0"), Hello(samples=5, input_shape=[1, 8, 8], classes=10))
        good = wire.encode(rounds._serving().state)
        endless = wire.encode(tree.map(lambda leaf: leaf / 0, rounds._serving().state))
        for wrong in (b"no tensors", endless):
            with pytest.raises(BadInput, match="--coordinator: sent a model that is not taken"):
                rounds.begin(wrong)
        rounds.begin(good)
        rounds.open_next()
        for message, payload in (
            (Proceed(start=1, mixed=0), endless),
            (Proceed(start=0, mixed=0), good),
            (Proceed(start=3, mixed=0), good),
        ):
            with pytest.raises(BadInput, match="--coordinator: s"):
                rounds.proceed(Said(message, payload))
        assert rounds.done == 0


def test_a_coordinator_and_servers_that_start_again_at_the_end_know_who_is_done(tmp_path: Path) -> None:
    """They waited for those who had left, 30 seconds and longer."""
    made = CloudCluster(two("sync", rounds=1), tmp_path)

    asyncio.run(in_one_process(made))
    assert sorted(entry["server"] for entry in made.journal("coordinator") if entry["event"] == "left") == [0, 1]
    with pytest.MonkeyPatch.context() as patched:  # who is waited for now is waited for without end
        for module in (coordinator_module, server_module):
            patched.setattr(module, "PATIENCE", 1e6)
        patched.setattr(Channel, "ask", None)
        for name in ("coordinator", "cloud-0"):
            asyncio.run(made.role(name, print))
