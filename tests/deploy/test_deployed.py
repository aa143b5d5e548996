"""A server and devices over TLS: the simulator's bits, and what happens when devices come, go and are late."""

from __future__ import annotations

import asyncio
import json
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deploy_harness import Loopback, identity_of, loopback
from processes import SMALL, States, plain, recipe_of, simulated

from personafl.algorithms import METHODS
from personafl.core import wire
from personafl.data.build import load
from personafl.data.moments import Sums, moments_of
from personafl.deploy import pki
from personafl.deploy.device import device as device_module
from personafl.deploy.device import training
from personafl.deploy.device.datafile import OwnData, load_own
from personafl.deploy.device.dealing import deal
from personafl.deploy.device.serving import predict
from personafl.deploy.device.state import DeviceState, Pending
from personafl.deploy.device.training import LocalClient
from personafl.deploy.net import transport
from personafl.deploy.net.messages import Code, Hello, Knock, Leave, Pull, Refused, Update
from personafl.deploy.net.transport import Channel
from personafl.deploy.server.opening import deployable
from personafl.deploy.server.rounds import Rounds
from personafl.errors import BadInput
from personafl.models.modelfile import card_of
from personafl.recipe.recipe import Recipe
from personafl.runs.build import prepare
from personafl.simulate.cohort import draw_cohort
from tiers import tiered


def outcome(made: Loopback, rounds: Rounds) -> tuple[bytes, States]:
    states = {}
    for name in made.names:
        number = int(name.removeprefix("device-"))
        state = DeviceState(made.folder / "devices" / name, rounds.run, number)
        assert state.pending is None
        if state.entry:
            states[number] = plain(state.entry)
    return rounds.directory.server_bytes(rounds.directory.checkpoint()), states


def deployed(recipe: Recipe, folder: Path) -> tuple[Loopback, Rounds]:
    async def whole() -> tuple[Loopback, Rounds]:
        async with loopback(recipe, folder) as (made, server):
            await asyncio.gather(*(made.device(name) for name in made.names))
            return made, await server

    return asyncio.run(whole())


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "ditto", "fedalt", "fedslr", "local"])
def test_devices_give_the_simulators_bits(method: str, tmp_path: Path) -> None:
    recipe = recipe_of(method)
    assert outcome(*deployed(recipe, tmp_path)) == simulated(recipe)


@pytest.mark.parametrize(
    "changes",
    [
        {"federation": {"cohort": 2}},  # some are not selected, and come later as newcomers
        pytest.param({"federation": {"sampling": "bernoulli", "cohort": 0.4}, "rounds": 4}, marks=pytest.mark.system),
        {"uplink": {"form": "sparse", "keep": 0.2}},
        pytest.param(  # some send the first row of their adapters alone
            {
                "model": {"name": "mlp", "hidden": [8], "adapter": "lora", "rank": 3, "personal": "lora_B"},
                "devices": [{"clients": ["0"], "rank": 1}, {"min_samples": 0}],
            },
            marks=pytest.mark.system,
        ),
        pytest.param(  # devices of unequal size, padded in the simulator
            {"training": {"steps": 3, "least_steps": 1, "batch": "all"}}, marks=pytest.mark.system
        ),
        pytest.param(
            {"engine": {"threads": 1, "strategy": "sequential", "dtype": "float64"}}, marks=pytest.mark.system
        ),
    ],
)
def test_so_they_do_with_cohorts_compressed_uploads_and_whole_batches(changes: dict[str, Any], tmp_path: Path) -> None:
    recipe = recipe_of("fedalt", **changes)
    assert outcome(*deployed(recipe, tmp_path)) == simulated(recipe)


def test_devices_normalise_and_augment_as_the_simulator_does(tmp_path: Path) -> None:
    shown = {"normalize": "channel", "augment": {"flip": True, "crop": 2}}
    recipe = recipe_of("fedalt", data=SMALL["data"] | shown)
    made, rounds = deployed(recipe, tmp_path)
    assert outcome(made, rounds) == simulated(recipe)
    for name in made.names:  # on images as they are, a kept model scores what it did on the device
        kept = tmp_path / "devices" / name / "model.safetensors"
        found = predict(kept, str(tmp_path / "dealt" / f"{name}.safetensors"))
        assert found.score == pytest.approx(card_of(kept).test_accuracy, abs=1e-6)


@pytest.mark.parametrize("task", ["regression", pytest.param("multilabel", marks=pytest.mark.system)])
def test_other_tasks_give_the_simulators_bits(task: str, tmp_path: Path) -> None:
    """Dealt recipes say by what targets are standardised; a server without that is refused before it starts."""
    rng = np.random.default_rng(0)
    x, user = rng.normal(size=(90, 5)), np.arange(90) // 30
    numbers = 100 * x[:, :2] + 7 * user[:, None]
    np.savez(tmp_path / "rows.npz", x=x, y=numbers if task == "regression" else numbers > 0, user=user)
    data = {"source": str(tmp_path / "rows.npz"), "partition": {"kind": "users"}, "validation": 0.2}
    shape = {"input_shape": [5], "classes": 2, "target_shape": [2], "task": task, "devices": 3, "heartbeat": 0.5}
    recipe = Recipe.parse(SMALL | {"method": {"name": "fedalt"}, "data": data, "deploy": shape})
    made, rounds = deployed(recipe, tmp_path)
    assert outcome(made, rounds) == simulated(recipe)
    kept = tmp_path / "devices" / made.names[0] / "model.safetensors"
    found = predict(kept, str(tmp_path / "dealt" / f"{made.names[0]}.safetensors"))
    assert found.values.shape == (6, 2)
    if task == "multilabel":
        assert found.score == pytest.approx(card_of(kept).test_accuracy, abs=1e-6)
        return
    scale = card_of(kept).scale
    assert scale is not None
    assert max(scale.std) > 50
    assert found.truth is not None
    wrong = np.mean((found.values - found.truth.numpy()) ** 2 / np.square(scale.std))
    assert 1 - wrong == pytest.approx(card_of(kept).test_accuracy, abs=1e-4)
    with pytest.raises(BadInput, match=r"data\.scale: a server has no targets"):
        deployable(recipe)


@pytest.mark.parametrize(
    "shape", [(5,), *(pytest.param(shape, marks=pytest.mark.system) for shape in ((2, 6), (2, 5, 5)))]
)
def test_a_server_adds_up_what_its_devices_send_of_raw_inputs(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Neither the recipe nor any one device knows the moments; in other units all is the same."""
    rng = np.random.default_rng(0)
    y, user = np.arange(60) % 2, np.arange(60) // 20
    x = rng.normal(size=(60, *shape)) + y.reshape(-1, *[1] * len(shape)) + user.reshape(-1, *[1] * len(shape))
    found = []
    for units, (scale, shift) in {"plain": (1, 0), "raw": (1000, 500)}.items():
        folder = tmp_path / units
        folder.mkdir()
        np.savez(folder / "rows.npz", x=scale * x + shift, y=y, user=user)
        data = {"source": str(folder / "rows.npz"), "partition": {"kind": "users"}}
        values = SMALL | {"method": {"name": "fedalt"}, "data": data, "deploy": {"devices": 3, "heartbeat": 0.5}}
        recipe = Recipe.parse(values | {"deploy": values["deploy"] | {"input_shape": list(shape), "classes": 2}})
        made, rounds = asyncio.run(_undealt(recipe, folder))
        assert outcome(made, rounds) == simulated(recipe)
        state = wire.decode_named(outcome(made, rounds)[0])
        found.append({path: leaf for path, leaf in state.items() if leaf.is_floating_point()})
        kept = folder / "devices" / made.names[0] / "model.safetensors"
        accuracy = predict(kept, str(folder / "dealt" / f"{made.names[0]}.safetensors")).score
        assert accuracy == pytest.approx(card_of(kept).test_accuracy, abs=1e-6)
    assert all(torch.allclose(found[0][path], found[1][path], atol=1e-4) for path in found[0])


async def _undealt(recipe: Recipe, folder: Path) -> tuple[Loopback, Rounds]:
    made = await asyncio.to_thread(Loopback, recipe, folder)
    made.recipe = recipe  # as a server has it whose devices have data of their own
    server = asyncio.create_task(made.serve())
    await made.until("listening")
    await asyncio.gather(*(made.device(name) for name in made.names))
    return made, await server


def test_a_server_that_starts_again_has_the_sums_and_refuses_wrong_ones(tmp_path: Path) -> None:
    recipe = recipe_of("fedavg", 2)
    pki.init(tmp_path / "pki")
    who = [identity_of(tmp_path / "pki", f"device-{number}") for number in range(2)]
    _, files = deal(recipe, tmp_path / "dealt")
    with Rounds(recipe, tmp_path / "run") as rounds:
        clients = []
        for number, file in enumerate(files):
            state = DeviceState(tmp_path / f"{number}", rounds.run, number)
            clients.append(LocalClient(recipe, load_own(str(file), number, recipe), number, None, state))
        hello = Hello(**clients[0].hello)
        sums = Sums.read([float(64 * hello.samples), [0.1], [2.0]])
        for wrong, code in (
            (b"", Code.BAD_NAMES),
            (wire.encode(sums._replace(size=sums.size + 1)), Code.BAD_SAMPLES),
            (wire.encode(sums._replace(spread=-sums.spread)), Code.BAD_SAMPLES),
            (wire.encode(sums._replace(mean=sums.mean / 0)), Code.NOT_FINITE),
            (wire.encode(sums._replace(mean=torch.zeros(2, dtype=torch.float64))), Code.BAD_SHAPE),
        ):
            with pytest.raises(Refused) as refused:
                rounds.enrol(who[0], hello, wrong)
            assert refused.value.code is code
        rounds.enrol(who[0], hello, clients[0].sums)
    with Rounds(recipe, tmp_path / "run") as rounds:
        rounds.enrol(who[1], Hello(**clients[1].hello), clients[1].sums)
        assert rounds.served.data.normalize == "auto"
        rounds.begin()
        assert rounds.served.data.normalize == moments_of(load(recipe.data, recipe.seed))
    with Rounds(recipe, tmp_path / "run") as rounds:
        assert rounds.served.data.normalize == moments_of(load(recipe.data, recipe.seed))


def test_devices_with_networks_and_bits_of_their_own(tmp_path: Path) -> None:
    profiles = [
        {"name": "small", "clients": ["0"], "bits": 2, "model": {"name": "mlp", "hidden": [6, 6]}},
        {"name": "large", "clients": ["1", "2"]},
    ]
    recipe = recipe_of("quped", devices=profiles)
    made, rounds = deployed(recipe, tmp_path)
    assert outcome(made, rounds) == simulated(recipe)
    cards = [card_of(tmp_path / "devices" / name / "model.safetensors") for name in made.names]
    assert [card.network.options for card in cards] == [{"hidden": [6, 6]}, {"hidden": [8]}, {"hidden": [8]}]
    with pytest.raises(BadInput, match="--profile huge"):
        asyncio.run(_with_profile(recipe, tmp_path / "again", "huge"))


async def _with_profile(recipe: Recipe, folder: Path, profile: str) -> None:
    folder.mkdir()
    async with loopback(recipe, folder) as (made, _):
        await made.device("device-0", profile)


def test_a_device_that_joins_late_is_selected_from_then_on(tmp_path: Path) -> None:
    recipe = recipe_of("fedalt", 3, {"devices": 2}, rounds=6)

    async def late() -> tuple[Loopback, Rounds]:
        async with loopback(recipe, tmp_path) as (made, server):
            first = [asyncio.create_task(made.device(name)) for name in made.names[:2]]
            await made.until("closed", 2)
            third = asyncio.create_task(made.device(made.names[2]))
            await asyncio.gather(*first, third)
            return made, await server

    made, rounds = asyncio.run(late())
    cohorts = [event.closed.taken for event in made.events if event.closed is not None]
    assert cohorts[0] == (0, 1)
    assert cohorts[-1] == (0, 1, 2)
    assert (tmp_path / "devices" / "device-2" / "model.safetensors").exists()
    assert rounds.done == 6


def test_a_newcomer_after_the_last_round_gets_a_model_of_its_own(tmp_path: Path) -> None:
    recipe = recipe_of("fedalt", 3, {"devices": 2}, rounds=2)

    async def after() -> None:
        async with loopback(recipe, tmp_path, stay=True) as (made, _):
            await asyncio.gather(*(made.device(name) for name in made.names[:2]))
            await made.device(made.names[2])
            assert any("took part in 0" in text for text in made.said)

    asyncio.run(after())
    found = predict(tmp_path / "devices" / "device-2", str(tmp_path / "dealt" / "device-2.safetensors"))
    assert found.score is not None
    assert len(found.values) > 20


async def silent(made: Loopback, name: str, samples: int = 50) -> Channel:
    """Enrol a device that then does nothing."""
    line = Channel(f"localhost:{made.port}", made.files(name), lambda kind: 2**20)
    await line.ask(Knock())
    await line.ask(Hello(samples=samples, input_shape=[1, 8, 8], classes=10))
    return line


def closed(made: Loopback) -> list[tuple[int, ...]]:
    return [event.closed.taken for event in made.events if event.closed is not None]


def test_a_device_that_leaves_is_not_waited_for(tmp_path: Path) -> None:
    recipe = recipe_of("fedavg", 3, {"min_completion": 0.6}, rounds=3)

    async def leaving() -> Loopback:
        async with loopback(recipe, tmp_path) as (made, server):
            line = await silent(made, "device-2")
            devices = [asyncio.create_task(made.device(name)) for name in made.names[:2]]
            while not any("round 1" in text for text in made.said):
                await asyncio.sleep(0.01)
            await line.ask(Leave())
            await line.close()
            await asyncio.gather(server, *devices)
            return made

    assert closed(asyncio.run(leaving())) == [(0, 1)] * 3


def test_a_deadline_closes_a_round_and_what_comes_later_is_refused(tmp_path: Path) -> None:
    recipe = recipe_of("fedavg", 3, {"deadline": 0.5, "min_completion": 0.5}, rounds=2)

    async def late() -> Loopback:
        async with loopback(recipe, tmp_path) as (made, server):
            line = await silent(made, "device-2")
            devices = [asyncio.create_task(made.device(name)) for name in made.names[:2]]
            await made.until("closed")
            with pytest.raises(Refused) as caught:
                await line.ask(Update(round=0, model="0" * 64, samples=50), b"too late")
            assert caught.value.code is Code.ROUND_CLOSED
            await line.ask(Leave())
            await line.close()
            await asyncio.gather(server, *devices)
            return made

    made = asyncio.run(late())
    assert closed(made) == [(0, 1)] * 2
    assert any(event.what == "refused" and "ROUND_CLOSED" in event.text for event in made.events)
    journal = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    assert {"who": "device-2", "code": "ROUND_CLOSED"}.items() <= next(
        e for e in journal if e["event"] == "refused"
    ).items()


def test_a_round_that_too_few_have_finished_goes_on_with_others(tmp_path: Path) -> None:
    """One of three is wanted, and the one that is selected is silent; at the deadline another one is."""
    recipe = recipe_of("fedavg", 3, {"deadline": 0.3, "heartbeat": 0.1}, rounds=1, federation={"cohort": 1})
    (selected,) = draw_cohort(np.arange(3), 1, "exact", recipe.seed, 0)

    async def extended() -> Loopback:
        async with loopback(recipe, tmp_path) as (made, server):
            line = await silent(made, f"device-{selected}")
            others = [name for name in made.names if name != f"device-{selected}"]
            devices = [asyncio.create_task(made.device(name)) for name in others]
            await made.until("enrolled", 3)
            while (await line.ask(Pull(returning=False))).message.kind != "task":
                pass
            await made.until("closed")
            await line.ask(Leave())
            await line.close()
            await asyncio.gather(server, *devices)
            return made

    made = asyncio.run(extended())
    assert any(event.what == "extended" for event in made.events)
    (taken,) = closed(made)
    assert len(taken) == 1
    assert taken[0] != selected


def test_a_silent_device_does_not_hold_up_the_others_for_ever(tmp_path: Path) -> None:
    """Two of three are fewer than min_completion asks for; nobody else is there to be selected."""
    recipe = recipe_of("fedavg", 3, {"deadline": 0.3, "heartbeat": 0.1, "patience": 2}, rounds=2)

    async def held() -> Loopback:
        async with loopback(recipe, tmp_path) as (made, server):
            line = await silent(made, "device-2")
            devices = [asyncio.create_task(made.device(name)) for name in made.names[:2]]
            await made.until("closed", 2)
            await line.ask(Leave())
            await line.close()
            await asyncio.gather(server, *devices)
            return made

    made = asyncio.run(held())
    assert len(closed(made)) == 2
    assert all(set(taken) <= {0, 1} and taken for taken in closed(made))  # both, unless the machine is very busy
    assert any(event.what == "extended" for event in made.events)


def test_more_are_selected_than_wanted_and_the_last_one_keeps_its_old_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of("ditto", 3, {"over_selection": 1.5}, rounds=1, federation={"cohort": 2})
    train = LocalClient.train

    def slowly(self: LocalClient, *task: Any) -> None:
        if self.number == 2:
            while not any("round 1: 2" in str(event) for event in holder[0].events):
                threading.Event().wait(0.01)
        train(self, *task)

    holder: list[Loopback] = []
    monkeypatch.setattr(LocalClient, "train", slowly)
    monkeypatch.setattr(device_module, "_WORKER", ThreadPoolExecutor(3))  # the slow one must not hold up the others

    async def whole() -> None:
        async with loopback(recipe, tmp_path) as (made, server):
            holder.append(made)
            await asyncio.gather(server, *(made.device(name) for name in made.names))

    asyncio.run(whole())
    assert closed(holder[0]) == [(0, 1)]
    assert any(text.startswith("device-2") and "ROUND_CLOSED" in text for text in holder[0].said)
    run = json.loads((tmp_path / "run" / "journal.jsonl").read_text().splitlines()[0])["run"]
    assert DeviceState(tmp_path / "devices" / "device-2", run, 2).entry is None


def test_a_server_that_starts_again_goes_on_and_a_change_of_recipe_is_refused(tmp_path: Path) -> None:
    recipe = recipe_of("fedalt", 3, rounds=4)

    async def interrupted() -> tuple[Loopback, Rounds]:
        async with loopback(recipe, tmp_path) as (made, server):
            devices = [asyncio.create_task(made.device(name)) for name in made.names]
            await made.until("closed", 2)
            server.cancel()
            await asyncio.wait([server])
            again = asyncio.create_task(made.serve())
            await asyncio.gather(*devices)
            return made, await again

    made, rounds = asyncio.run(interrupted())
    assert outcome(made, rounds) == simulated(recipe)
    with pytest.raises(BadInput, match="choose another --out"):
        Rounds(made.recipe.model_copy(update={"rounds": 9}), tmp_path / "run")


def test_a_state_of_another_run_is_not_used(tmp_path: Path) -> None:
    state = DeviceState(tmp_path, "one", 3)
    state.commit(Pending(0, "0" * 64, b"update", {"v": torch.ones(2)}))
    with pytest.raises(BadInput, match="another run"):
        DeviceState(tmp_path, "two", 3)
    with pytest.raises(BadInput, match="another run"):
        DeviceState(tmp_path, "one", 4)
    again = DeviceState(tmp_path, "one", 3)
    assert again.pending is not None
    assert (again.pending.update, again.entry) == (b"update", None)
    again.accepted()
    assert DeviceState(tmp_path, "one", 3).entry["v"].tolist() == [1, 1]  # type: ignore[index]


def test_a_device_trains_in_its_own_process(tmp_path: Path) -> None:
    """A worker that is forked from a process with gRPC hangs or dies."""
    recipe = _named({"engine": {"workers": 4}})
    client = LocalClient(recipe, _own(tmp_path), 0, None, DeviceState(tmp_path / "state", "0" * 32, 0))
    assert [engine.strategy for engine in client.side.learners.engines] == ["sequential"]


def test_only_what_is_installed_runs_on_a_device(tmp_path: Path) -> None:
    """A recipe that names code of its own is refused by server and device."""
    for change in ({"method": {"name": "os:system"}}, {"model": {"name": "builtins:exec"}}):
        with pytest.raises(BadInput, match="a device runs only"):
            training._built(_named(change), _own(tmp_path), None)
        with pytest.raises(BadInput, match="a device runs only"):  # nor does a server wait for it
            deployable(_named(change))


def _named(change: dict[str, dict[str, Any]]) -> Recipe:
    ((key, value),) = change.items()
    section = getattr(recipe_of("fedavg"), key).model_copy(update=value)
    return recipe_of("fedavg").model_copy(update={key: section})


def _own(folder: Path) -> OwnData:
    recipe, files = deal(recipe_of("fedavg"), folder)
    return load_own(str(files[0]), 0, recipe)


@pytest.mark.parametrize(
    "change",
    [
        {"pretrain": {"rounds": 2}},
        {"deploy": None},
        {"federation": {"offline": 1}, "method": {"name": "fedbcd"}},  # its clients train only in contact
    ],
)
def test_what_only_the_simulator_does_is_refused_at_once(change: dict[str, Any], tmp_path: Path) -> None:
    values = {**recipe_of("fedavg").model_dump(mode="json", exclude_none=True), **change}
    with pytest.raises(BadInput, match=r"deploy|pretrain|offline"):
        Rounds(Recipe.parse({key: value for key, value in values.items() if value is not None}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_data_set_of_the_devices_own_is_used_as_it_is(tmp_path: Path) -> None:
    dice = np.random.default_rng(0)
    np.savez(tmp_path / "mine.npz", x=dice.random((90, 1, 8, 8), dtype=np.float32), y=np.arange(90) % 4)
    recipe = recipe_of("fedavg", 3)
    own = load_own(str(tmp_path / "mine.npz"), 2, recipe)
    assert own.data.drawing(own.data.seen).tolist() == [2]
    sizes = [int(own.data.rows(split).sizes[0]) for split in ("train", "validation", "test")]
    assert sum(sizes) == 90
    assert min(sizes) > 0
    np.savez(tmp_path / "other.npz", x=dice.random((90, 1, 9, 9), dtype=np.float32), y=np.arange(90) % 4)
    with pytest.raises(BadInput, match="input_shape"):
        load_own(str(tmp_path / "other.npz"), 2, recipe)


def test_what_a_device_keeps_predicts_without_a_server(tmp_path: Path) -> None:
    made, _ = deployed(recipe_of("fedalt", 3, rounds=5), tmp_path)
    for name in made.names:
        state, dealt = tmp_path / "devices" / name, tmp_path / "dealt" / f"{name}.safetensors"
        card = card_of(state / "model.safetensors")
        found = predict(state, str(dealt))
        assert found.score == pytest.approx(card.test_accuracy)
        assert set(card.accuracies) >= {"global", "personal", card.model}


@pytest.mark.parametrize("method", tiered(METHODS, ["fedavg", "fedalt", "ditto", "pfedme", "fedslr", "quped"]))
def test_neither_data_nor_personal_parameters_leave_a_device(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All frames in the clear, the server's directory, its log, and its report have none of them, in any round."""
    traffic: list[bytes] = []
    secrets: list[bytes] = []
    sending, commit = transport.frames, DeviceState.commit

    def watched(*args: Any, **more: Any) -> Any:
        for frame in sending(*args, **more):
            traffic.append(bytes(frame))
            yield frame

    def noted(self: DeviceState, pending: Pending) -> None:
        firsts = [leaf.flatten()[:64] for leaf in pending.state.values() if leaf.numel() >= 8]
        if not getattr(rule, "uploads_of_state", ()):  # a method may say that parts of its state go up
            secrets.extend(first.numpy().tobytes() for first in firsts if len(first.unique()) > 1)
        commit(self, pending)

    monkeypatch.setattr(transport, "frames", watched)
    monkeypatch.setattr(DeviceState, "commit", noted)
    recipe = recipe_of(method, rounds=2)
    federation = prepare(recipe).federation
    rule, public = federation.algorithm.client, wire.encode(federation.serving().broadcast())
    made, _ = deployed(recipe, tmp_path)
    secrets = [
        secret for secret in secrets if secret not in public
    ]  # what all are sent is none, such as FedBABU's head
    assert secrets or method not in ("fedalt", "ditto", "pfedme", "fedslr", "quped")  # there is something to look for
    for number, name in enumerate(made.names):
        x = load_own(str(tmp_path / "dealt" / f"{name}.safetensors"), number, made.recipe).data.x
        secrets += [sample.numpy().tobytes()[40:100] for sample in x[:20]]
    assert len(secrets) >= 60
    assert len(traffic) > 20
    disk = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    said = "".join([str(event) for event in made.events] + made.said).encode()
    for haystack in (*traffic, *disk, said):
        assert not any(secret in haystack for secret in secrets)


def test_numbers_of_devices_may_be_large_and_cost_no_memory(tmp_path: Path) -> None:
    """A date, and the largest that there is: arrays have a place for each device, not for each number."""
    recipe = recipe_of("ditto", 2, rounds=2)
    numbers = [20260131, 2**31 - 1]

    async def whole() -> tuple[Rounds, int]:
        async with loopback(recipe, tmp_path) as (made, server):
            tracemalloc.start()
            dealt = [str(tmp_path / "dealt" / f"{name}.safetensors") for name in made.names]
            devices = zip(numbers, dealt, strict=True)
            await asyncio.gather(*(made.device(f"device-{number}", data=data) for number, data in devices))
            rounds = await server
            return rounds, tracemalloc.get_traced_memory()[1]

    try:
        rounds, peak = asyncio.run(whole())
    finally:
        tracemalloc.stop()
    assert rounds.last is not None
    assert rounds.last.taken == tuple(numbers)
    assert peak < 2**26
    for number in numbers:
        assert card_of(tmp_path / "devices" / f"device-{number}" / "model.safetensors").client == str(number)
