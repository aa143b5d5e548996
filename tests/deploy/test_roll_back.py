"""A server goes back to an earlier round, and its devices with it, without anybody's hand on them."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from deploy_harness import loopback
from offline import Offline, identity, quick_recipe
from processes import recipe_of

from crash_driver import Failpoints, ended, forked
from personafl.core import tree, wire
from personafl.deploy.net.messages import Code, Refused, Update
from personafl.deploy.server.going_back import roll_back
from personafl.deploy.server.rounds import Rounds
from personafl.errors import BadInput
from personafl.storage.rundir import RunDirectory


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with Offline(quick_recipe(), tmp_path_factory.mktemp("whole")) as run:
        return run.go_on().outcome()


def poisoned(run: Offline, number: int, norm: float) -> bytes:
    """Return an update of a device that has a norm which the server takes, and no use."""
    state = run.clients[number].state
    assert state.pending is not None
    like = run.rounds._likes[0]
    update = wire.decode(state.pending.update, like)
    leaves = tree.leaves(update)
    entries = sum(leaf.numel() for leaf in leaves if leaf.is_floating_point())
    return wire.encode(
        tree.map(lambda leaf: leaf * 0 + norm / entries**0.5 if leaf.is_floating_point() else leaf, update)
    )


@pytest.mark.parametrize("back", [1, 2])
def test_going_back_undoes_rounds_on_server_and_devices(back: int, wanted: Any, tmp_path: Path) -> None:
    with Offline(quick_recipe(), tmp_path) as run:
        run.go_on(3).open()
        run.train(0)  # and is killed before it sends anything
        recipe = run.recipe
    roll_back(recipe, tmp_path / "run", 3 - back)
    directory = RunDirectory(tmp_path / "run")
    assert directory.checkpoint().rounds == 3 - back
    assert len(list((tmp_path / "run").glob("server-*.safetensors"))) == 3 - back
    with Offline(recipe, tmp_path) as run:
        assert run.rounds.done == 3 - back
        assert [run.rounds.counted(number) for number in range(2)] == [3 - back] * 2
        assert run.go_on().outcome() == wanted
        assert [text for text in run.said if "goes on with its state after round" in text]
        assert not [text for text in run.said if "newcomer" in text]


def test_an_update_of_large_norm_is_undone_and_devices_outlive_it(tmp_path: Path) -> None:
    """One update within the bound makes all that follow too large; the server goes back to before it."""
    recipe = recipe_of("fedavg", 2, training={"steps": 2, "batch": 16})
    with Offline(recipe, tmp_path / "whole") as run:
        honest = run.go_on().outcome()
    with Offline(recipe, tmp_path / "run") as run:
        run.go_on(1).open()
        for number in range(2):
            run.train(number)
        run.settle(0)
        state = run.clients[1].state
        assert state.pending is not None
        update = Update(round=1, model=state.pending.model, samples=run.clients[1].samples)
        run.rounds.accept(identity(1), update, poisoned(run, 1, 9.9e5))
        run.settle(1)  # the honest twin hears that another one was taken
        run.rounds.close()
        run.open()
        for number in range(2):
            run.train(number)
            run.settle(number)
            assert run.clients[number].state.pending is None  # it goes on, with its old state
            assert not run.rounds.wants(number)  # and is not asked for the same again
        assert sum("NORM_TOO_LARGE" in text or "NOT_FINITE" in text for text in run.said) == 2
        assert not run.rounds.complete
    roll_back(run.recipe, tmp_path / "run" / "run", 1)
    with Offline(recipe, tmp_path / "run") as run:
        assert run.go_on().outcome() == honest


def test_a_device_without_a_state_from_then_begins_like_a_newcomer(tmp_path: Path) -> None:
    with Offline(quick_recipe(), tmp_path) as run:
        run.go_on(3)
        recipe = run.recipe
    folder = tmp_path / "devices" / "device-0"
    for file in sorted(folder.glob("state-*"))[:-1]:
        file.unlink()
    roll_back(recipe, tmp_path / "run", 1)
    with Offline(recipe, tmp_path) as run:
        run.go_on()
        assert [text for text in run.said if "begins like a newcomer" in text]
        assert run.clients[0].state.rounds == [1, 2, 3]


def test_where_a_run_cannot_go_back_to_is_said(tmp_path: Path) -> None:
    recipe = quick_recipe(deploy={"checkpoints": 2})
    with Offline(recipe, tmp_path) as run:
        run.go_on(3)
        with pytest.raises(BadInput, match=r"another process \(\d+\) is running it"):
            roll_back(run.recipe, tmp_path / "run", 2)
    assert sorted(path.name for path in (tmp_path / "run").glob("server-*")) == [
        f"server-00000{number}.safetensors" for number in (2, 3)
    ]
    for rounds, text in ((1, "it can go back to 2 "), (3, "is at the end of this round already")):
        with pytest.raises(BadInput, match=text):
            roll_back(run.recipe, tmp_path / "run", rounds)
    with pytest.raises(BadInput, match="does not exist"):
        roll_back(run.recipe, tmp_path / "elsewhere", 1)
    roll_back(run.recipe, tmp_path / "run", 2)
    assert RunDirectory(tmp_path / "run").checkpoint().before == ()


@pytest.mark.system
def test_a_crash_in_the_middle_leaves_the_old_or_the_new(wanted: Any, tmp_path: Path) -> None:
    with Offline(quick_recipe(), tmp_path / "origin") as run:
        run.go_on(3)
        recipe = run.recipe
    seen, at = set(), 0
    while True:
        folder = tmp_path / f"at-{at}"
        shutil.copytree(tmp_path / "origin", folder)

        def work(folder: Path = folder, at: int = at) -> None:
            Failpoints(folder / "run", at)
            roll_back(recipe, folder / "run", 1)

        code = ended(forked(work))
        with Rounds(recipe, folder / "run") as rounds:
            seen.add(rounds.done)
            assert rounds.done in (1, 3)
        if at % 5 == 0 or not code:
            with Offline(recipe, folder) as run:
                assert run.go_on().outcome() == wanted
        shutil.rmtree(folder)
        if not code:
            break
        at += 1
    assert seen == {1, 3}


def test_devices_that_run_on_go_back_with_their_server(tmp_path: Path) -> None:
    """Over real sockets: the server is stopped, goes back and starts again; devices just go on."""
    recipe = recipe_of("scaffold", 2, {"heartbeat": 0.2}, rounds=4, model={"name": "linear"})

    async def played() -> tuple[Any, Any]:
        async with loopback(recipe, tmp_path) as (made, server):
            devices = [asyncio.create_task(made.device(name)) for name in made.names]
            await made.until("closed", 2)
            server.cancel()
            await asyncio.wait([server])
            done = await asyncio.to_thread(lambda: RunDirectory(tmp_path / "run").checkpoint().rounds)
            await asyncio.to_thread(roll_back, made.recipe, tmp_path / "run", done - 1)
            again = asyncio.create_task(made.serve())
            await asyncio.gather(*devices)
            return made, await again

    made, rounds = asyncio.run(played())
    assert rounds.done == 4
    assert [text for text in made.said if "goes on with its state after round" in text or "newcomer" in text]
    assert not [text for text in made.said if "newcomer" in text and "round 0" not in text]
    from test_deployed import outcome, simulated

    assert outcome(made, rounds) == simulated(recipe)


def test_an_update_that_is_refused_for_ever_still_ends_a_device() -> None:
    from personafl.deploy.device.device import _DROPPED

    assert {Code.NORM_TOO_LARGE, Code.NOT_FINITE, Code.ROUND_CLOSED} <= _DROPPED
    assert not _DROPPED & {Code.BAD_SHAPE, Code.BAD_NAMES, Code.BAD_SAMPLES, Code.REVOKED, Code.TOO_LARGE}
    assert issubclass(Refused, Exception)
