"""Devices that are left out: dropped by an operator, revoked, or silent for too long. The others go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clouds import CloudCluster, cloud_recipe
from deploy_harness import Loopback, channel, identity_of, loopback
from processes import SMALL, recipe_of
from test_deployed import closed, silent

import personafl
from personafl.deploy import pki
from personafl.deploy.net.messages import Code, Drop, Hello, Pull, Refused, Update
from personafl.deploy.net.operating import ask_drop
from personafl.deploy.net.transport import Channel, ask_status
from personafl.deploy.server.cloudserver import CloudRounds
from personafl.deploy.server.rounds import Rounds
from personafl.deploy.server.service import Event
from personafl.errors import BadInput
from personafl.recipe.recipe import Recipe
from personafl.simulate.cohort import draw_cohort
from tiers import tiered

HELLO = Hello(samples=50, input_shape=[1, 8, 8], classes=10)
RAW = SMALL["data"] | {"normalize": "none"}
ALL = {"min_completion": 1.0}  # every update is wanted, and no deadline of a test is ever reached


async def operated(made: Loopback, name: str, *, undo: bool = False) -> bool:
    return await ask_drop(f"localhost:{made.port}", made.files("coordinator"), name, undo=undo)


async def code_of(asked: Awaitable[Any]) -> Code:
    with pytest.raises(Refused) as caught:
        await asked
    return caught.value.code


def journal(folder: Path, event: str) -> list[dict[str, Any]]:
    lines = (folder / "run" / "journal.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["event"] == event]


def others_go_on(
    folder: Path, recipe: Recipe, out: Callable[[Loopback, Channel], Awaitable[None]], *, at_work: bool = True
) -> Loopback:
    """Let one of three devices ask for work and be silent; leave it `out`, and wait until the others are done."""

    async def whole() -> Loopback:
        async with loopback(recipe, folder) as (made, server):
            line = await silent(made, "device-2")
            devices = [asyncio.create_task(made.device(name)) for name in made.names[:2]]
            while at_work and (await line.ask(Pull(returning=False))).message.kind != "task":
                pass
            await out(made, line)
            await line.close()
            await asyncio.gather(server, *devices)
            return made

    return asyncio.run(whole())


def test_a_dropped_device_is_not_waited_for_not_selected_and_refused(tmp_path: Path) -> None:
    async def out(made: Loopback, line: Channel) -> None:
        assert await operated(made, "device-2") is False
        assert await operated(made, "device-2") is True
        for message in (HELLO, Pull(returning=False), Update(round=0, model="0" * 64, samples=50)):
            assert await code_of(line.ask(message)) is Code.DROPPED
        report = await ask_status(f"localhost:{made.port}", made.files("coordinator"))
        assert [row["dropped"] for row in report["devices"]] == [False, False, True]

    made = others_go_on(tmp_path, recipe_of("fedavg", 3, ALL, rounds=2), out)
    assert closed(made) == [(0, 1)] * 2
    assert [entry["cohort"] for entry in journal(tmp_path, "opened")] == [[0, 1, 2], [0, 1]]
    assert len(journal(tmp_path, "dropped")) == 1


def test_a_dropped_device_ends_with_a_line_and_comes_back_when_that_is_undone(tmp_path: Path) -> None:
    recipe = recipe_of("fedavg", 2, ALL, rounds=2)

    async def whole() -> Loopback:
        async with loopback(recipe, tmp_path) as (made, server):
            first = asyncio.create_task(made.device("device-0"))
            await made.until("enrolled")
            await operated(made, "device-0")
            with pytest.raises(BadInput, match=r"DROPPED.*personafl drop device-0 --undo"):
                await first
            assert await operated(made, "device-0", undo=True) is False
            assert await operated(made, "device-0", undo=True) is True
            await asyncio.gather(server, *map(made.device, made.names))
            return made

    assert closed(asyncio.run(whole())) == [(0, 1)] * 2


@pytest.mark.parametrize("who", ["device-0", "cloud-0"])
def test_only_an_operator_drops(who: str, tmp_path: Path) -> None:
    async def tried() -> None:
        async with loopback(recipe_of("fedavg", 3), tmp_path) as (made, _):
            line = await silent(made, "device-2")
            other = Channel(f"localhost:{made.port}", made.files(who), lambda kind: 2**20)
            assert await code_of(other.ask(Drop(name="device-2"))) is Code.WRONG_ROLE
            with pytest.raises(BadInput, match="NOT_ENROLLED: device-9 did not enrol here"):
                await operated(made, "device-9")
            await asyncio.gather(line.close(), other.close())

    asyncio.run(tried())


def enrolled(folder: Path, recipe: Recipe, count: int, kind: Callable[..., Rounds] = Rounds, *more: Any) -> Rounds:
    """Return rounds with silent devices, that have begun."""
    pki.init(folder / "pki")
    rounds = kind(recipe, folder / "run", *more)
    for number in range(count):
        rounds.enrol(identity_of(folder / "pki", f"device-{number}"), HELLO)
    rounds.begin()
    rounds.open_next()
    return rounds


def take(rounds: Rounds, number: int) -> None:
    """Take an update of a device in the open round, without its content."""
    going = rounds.open
    assert going is not None
    rounds.journal.write("accepted", round=going.number, number=number, digest="0" * 64)
    going.taken[number] = "0" * 64
    rounds._latest[number] = going.number, "0" * 64


def test_what_a_dropped_device_sent_in_the_open_round_is_left_out_also_after_a_restart(tmp_path: Path) -> None:
    recipe = recipe_of("fedavg", 3, ALL, data=RAW)
    with enrolled(tmp_path, recipe, 3) as rounds:
        take(rounds, 0)
        take(rounds, 1)
        rounds.drop("device-1")
        assert rounds.open is not None
        assert set(rounds.open.taken) == {0}
        assert not rounds.complete
    with Rounds(recipe, tmp_path / "run") as rounds:
        assert rounds.open is not None
        assert (set(rounds.open.taken), rounds.last_taken(1), rounds.members[1].dropped) == ({0}, None, True)
        assert not rounds.wants(1)
        take(rounds, 2)
        assert rounds.complete
        rounds.drop("device-1", undo=True)
        assert not rounds.complete  # it is selected in this round, and may send again
        assert rounds.wants(1)
    with Rounds(recipe, tmp_path / "run") as rounds:
        assert not rounds.members[1].dropped


def test_a_round_whose_whole_cohort_is_dropped_goes_on_with_others(tmp_path: Path) -> None:
    recipe = recipe_of("fedavg", 3, ALL, rounds=1, data=RAW, federation={"cohort": 1})
    (chosen,) = draw_cohort(np.arange(3), 1, "exact", recipe.seed, 0).tolist()
    with enrolled(tmp_path, recipe, 3) as rounds:
        everyone = {0, 1, 2}
        assert not rounds.stranded(everyone)
        rounds.drop(f"device-{chosen}")
        assert rounds.stranded(everyone)
        (added,) = rounds.widen(everyone)
        assert added != chosen
        assert rounds.wants(added)
        assert not rounds.complete
        for number in everyone - {chosen}:
            rounds.drop(f"device-{number}")
        assert not rounds.stranded(everyone)
        assert not rounds.complete  # no round closes without anybody


def test_a_server_without_devices_waits_for_one(tmp_path: Path) -> None:
    """It went through all its rounds without an update."""
    recipe = recipe_of("fedavg", 2, {"devices": 1}, data=RAW)
    with enrolled(tmp_path, recipe, 1) as rounds:
        take(rounds, 0)
        rounds._updates.clear()
        rounds.drop("device-0")
        rounds.open = None
        rounds.open_next()
        assert not rounds.complete
        assert not rounds.enough
        rounds.enrol(identity_of(tmp_path / "pki", "device-1"), HELLO)
        assert rounds.widen({1}) == [1]


def test_a_dropped_device_has_no_place_among_the_first_that_ask(tmp_path: Path) -> None:
    recipe = cloud_recipe("fedavg", 6, ALL, cloud={"servers": 2, "active": 2})
    with enrolled(tmp_path, recipe, 4, CloudRounds, 0) as rounds:
        assert rounds.task(0, False) is not None
        assert rounds.task(1, False) is not None
        assert not rounds.wants(2)
        rounds.drop("device-0")
        assert not rounds.wants(0)
        assert rounds.task(2, False) is not None
        assert not rounds.wants(3)
        rounds.drop("device-3")
        take(rounds, 1)
        assert not rounds.complete
        rounds.drop("device-2")  # only one is there now, and it is done
        assert rounds.complete


def test_a_revoked_device_is_not_waited_for_and_not_selected(tmp_path: Path) -> None:
    async def out(made: Loopback, line: Channel) -> None:
        assert await asyncio.to_thread(pki.revoke, made.folder / "pki", "device-2")
        assert await code_of(line.ask(Pull(returning=False))) is Code.REVOKED

    made = others_go_on(tmp_path, recipe_of("fedavg", 3, ALL, rounds=2), out)
    assert closed(made) == [(0, 1)] * 2
    assert [entry["cohort"] for entry in journal(tmp_path, "opened")] == [[0, 1, 2], [0, 1]]


def test_nor_is_one_that_was_revoked_while_the_server_was_away_unless_it_has_a_new_certificate(tmp_path: Path) -> None:
    recipe = recipe_of("fedavg", 3, ALL, rounds=1, data=RAW)

    async def whole() -> Loopback:
        async with loopback(recipe, tmp_path) as (made, server):
            lines = [await silent(made, name) for name in ("device-1", "device-2")]
            server.cancel()
            await asyncio.wait([server])
            for name in ("device-1", "device-2"):
                await asyncio.to_thread(pki.revoke, tmp_path / "pki", name)
            again = asyncio.create_task(made.serve())
            await made.until("listening", 2)
            await silent(made, "device-1")  # with a new certificate
            device = asyncio.create_task(made.device("device-0"))
            while (await ask_status(f"localhost:{made.port}", made.files("coordinator")))["open"] is None:
                await asyncio.sleep(0.01)
            await operated(made, "device-1")
            await asyncio.gather(again, device, *(line.close() for line in lines))
            return made

    made = asyncio.run(whole())
    (opened,) = journal(tmp_path, "opened")
    assert opened["cohort"] == [0, 1]
    assert closed(made) == [(0,)]


@pytest.mark.parametrize(
    ("devices", "quiet", "share"),
    tiered([(3, 1, 1.0), (4, 1, 1.0), (10, 3, 1.0), (10, 3, 0.8), (4, 1, 0.8)], [(3, 1, 1.0)]),
)
def test_some_silent_devices_do_not_hold_up_the_others(devices: int, quiet: int, share: float, tmp_path: Path) -> None:
    """The silent ones give signs of life, so nobody else is selected for them; deadlines pass, and the round closes."""
    section = {"deadline": 0.3, "heartbeat": 0.1, "patience": 2, "min_completion": share}
    recipe = recipe_of("fedavg", devices, section, rounds=2, training={"steps": 1, "batch": 8})

    async def held() -> Loopback:
        async with loopback(recipe, tmp_path) as (made, server):
            lines = [await silent(made, name) for name in made.names[-quiet:]]
            working = [asyncio.create_task(made.device(name)) for name in made.names[:-quiet]]
            await made.until("closed", 2)
            for name in made.names[-quiet:]:
                await operated(made, name)  # or the server would wait for them at the end
            await asyncio.gather(server, *working, *(line.close() for line in lines))
            return made

    made = asyncio.run(held())
    assert len(closed(made)) == 2
    assert all(taken and set(taken) <= set(range(devices - quiet)) for taken in closed(made))


@pytest.mark.system
def test_a_server_of_a_cloud_closes_without_a_silent_device_and_drops_it(tmp_path: Path) -> None:
    """At its last deadline it waited for ever for what follows a round that it had not handed in."""
    section = {"deadline": 0.3, "heartbeat": 0.1, "patience": 2, "min_completion": 1.0}
    recipe = cloud_recipe("fedavg", 4, section, cloud={"servers": 2}, rounds=2, training={"steps": 1, "batch": 8})
    made = CloudCluster(recipe, tmp_path)
    quiet = f"device-{made.members[1][0]}"

    async def whole() -> None:
        running = []
        for name in ("coordinator", *made.servers):
            events: asyncio.Queue[Event] = asyncio.Queue()
            running.append(asyncio.create_task(made.role(name, events.put_nowait)))
            assert (await events.get()).what == "listening"
        async with channel(made.port_of(quiet), made.files_of(quiet)) as line:
            await line.ask(HELLO)
            running += [asyncio.create_task(made.role(name, print)) for name in made.devices if name != quiet]
            while made.done() < 2:
                await asyncio.sleep(0.01)
            operator = made.files_of("coordinator")
            with pytest.raises(BadInput, match="a device is dropped at its server"):
                await ask_drop(f"localhost:{made.port}", operator, quiet, undo=False)
            await ask_drop(f"localhost:{made.port_of(quiet)}", operator, quiet, undo=False)
        await asyncio.gather(*running)

    asyncio.run(whole())
    assert [entry["taken"] for entry in made.journal("cloud-1") if entry["event"] == "sealed"] == [
        [made.members[1][1]]
    ] * 2


def test_the_function_in_python_and_the_command(tmp_path: Path) -> None:
    from test_commands import run

    async def whole() -> None:
        async with loopback(recipe_of("fedavg", 3), tmp_path) as (made, _):
            line = await silent(made, "device-2")
            identity = made.files("coordinator").certificate
            where = f"localhost:{made.port}"
            given = {"identity": identity}
            assert await asyncio.to_thread(personafl.drop_device, where, "device-2", **given) is False
            words = ("drop", "device-2", "--server", where, "--identity", identity)
            assert "device-2: was dropped before" in await asyncio.to_thread(run, *words)
            said = await asyncio.to_thread(run, "status", "--server", where, "--identity", identity)
            assert "dropped" in said
            assert "device-2: let in again" in await asyncio.to_thread(run, *words, "--undo")
            await line.close()

    asyncio.run(whole())
