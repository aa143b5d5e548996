"""Sums that are all a server sees, over TLS: the simulator's bits, dropouts, and what is refused."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from deploy_harness import channel, loopback
from processes import SMALL, recipe_of, simulated
from test_deployed import deployed, outcome

from personafl.core import wire
from personafl.deploy.device.state import DeviceState, Pending
from personafl.deploy.device.summing import Summing
from personafl.deploy.device.tries import Tries
from personafl.deploy.net.messages import Accepted, Code, Message, Refused, Said, Update, Wait
from personafl.deploy.net.stages import Begin, Try
from personafl.deploy.server.going_back import roll_back
from personafl.deploy.server.opening import deployable
from personafl.deploy.server.rounds import Rounds
from personafl.errors import BadInput, Failed
from personafl.recipe.recipe import Recipe
from personafl.runs.build import prepare
from personafl.secure.circle import Circle
from personafl.secure.faults import Breach, Fault
from personafl.secure.fixed import Grid
from personafl.secure.messages import Keys, decoded
from personafl.simulate.simulator import Simulation
from personafl.storage.store import Store
from tiers import tiered

DATA = {**SMALL["data"], "normalize": "none"}


def summed(method: str, clients: int = 4, secure: dict[str, Any] | None = None, **changes: Any) -> Any:
    return recipe_of(method, clients, secure=secure or {}, data=DATA, **{"rounds": 2, **changes})


@pytest.mark.parametrize("method", ["fedavg", pytest.param("fedalt", marks=pytest.mark.system)])
def test_devices_give_the_simulators_bits(method: str, tmp_path: Path) -> None:
    recipe = summed(method)
    assert outcome(*deployed(recipe, tmp_path)) == simulated(recipe)


@pytest.mark.parametrize("stage", tiered(range(5), quick=[2]))
def test_a_device_that_goes_at_a_stage_is_left_out_as_a_whole(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five one may go. The sum is that of a simulation whose cohort is who is left; once the vector is masked and
    sent, its device is in it.
    """
    recipe, victim = summed("fedavg", 5, rounds=1), 2
    said, opened = Summing._said, DeviceState.open

    async def goes(self: Summing, session: Any, at: int, *rest: Any) -> Any:
        if at == stage and self._client.number == victim:
            raise Failed("gone")
        return await said(self, session, at, *rest)

    def goes_last(self: DeviceState) -> None:
        if stage == 4 and self._number == victim:
            raise Failed("gone")
        opened(self)

    monkeypatch.setattr(Summing, "_said", goes)
    monkeypatch.setattr(DeviceState, "open", goes_last)

    async def whole() -> Rounds:
        async with loopback(recipe, tmp_path) as (made, server):
            ended = await asyncio.gather(*(made.device(name) for name in made.names), return_exceptions=True)
            assert [type(one) for one in ended if one is not None] == [Failed]
            return await server

    rounds = asyncio.run(whole())
    left = [number for number in range(5) if stage > 2 or number != victim]
    assert rounds.last is not None
    assert rounds.last.taken == tuple(left)
    simulation = Simulation(prepare(recipe).federation, Store(tmp_path / "states", 2**30))
    monkeypatch.setattr(Simulation, "_cohort", lambda *_: np.array(left))
    simulation.step(0)
    assert rounds.directory.server_bytes(rounds.directory.checkpoint()) == wire.encode(simulation.saved())


@pytest.mark.system
def test_a_try_that_breaks_is_made_again_with_other_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody may be lost, and a device forgets its keys in the first try: all begin anew, and come to the same."""
    recipe = summed("fedavg", 4, {"dropouts": 0.0, "stage": 5.0}, rounds=1)
    said, keys, broken = Summing._said, list[bytes](), set[str]()

    async def forgets(self: Summing, session: Any, at: int, payload: bytes, kind: Any) -> Any:
        if at == 0:
            keys.append(decoded(Keys, payload).masking)
        if at == 2 and self._client.number == 1 and not broken:
            broken.add(session.attempt)
            raise Breach(Fault.BAD_SHARE, "forgotten")
        return await said(self, session, at, payload, kind)

    monkeypatch.setattr(Summing, "_said", forgets)
    made, rounds = deployed(recipe, tmp_path)
    entries = map(json.loads, (tmp_path / "run" / "journal.jsonl").read_text().splitlines())
    tries = [entry["attempt"] for entry in entries if entry["event"] == "tried"]
    assert len(tries) > 1
    assert len(set(tries)) == len(tries)
    assert broken < set(tries)
    assert len(set(keys)) == len(keys) >= 8
    assert outcome(made, rounds) == simulated(recipe)


CIRCLE = Circle((0, 2, 3), 2)


@pytest.mark.parametrize(
    ("opened", "tries"),
    [
        (3, Tries()),
        (-1, Tries(3, "8" * 32)),
        (-1, Tries(4, "0" * 32)),
        (-1, Tries(3, "7" * 32).with_mask(CIRCLE)),
    ],
    ids=["opened", "in a later try", "in a later round", "masked in it"],
)
def test_a_device_that_may_be_in_a_sum_is_in_no_other(opened: int, tries: Tries) -> None:
    """Its server offers another try of the round: it takes no step, and waits to hear that the first counts."""
    asked: list[Message] = []
    state = SimpleNamespace(pending=Pending(3, "0" * 64, b"", {}), opened=opened, tries=tries)
    offers = [Try(attempt="7" * 32, clients=4, most=4, weight=1.0), Wait(), Accepted(before=True)]

    class Server:
        async def ask(self, message: Message, payload: bytes = b"") -> Said:
            asked.append(message)
            return Said(offers.pop(0))

    async def pause() -> None:
        pass

    client: Any = SimpleNamespace(state=state)
    summing = Summing(client, Server(), None, None, pause, lambda *_: None)  # type: ignore[arg-type]
    asyncio.run(summing.settle())
    assert {type(message) for message in asked} == {Begin}


def test_a_device_that_counts_more_than_a_sum_is_for_takes_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its entries would not fit beside the others', and the sum could wrap."""
    monkeypatch.setattr(Summing, "_agreed", lambda self, offered: (SimpleNamespace(grid=Grid(4, 5.0, 1.0)), None))
    recipe = SimpleNamespace(federation=SimpleNamespace(weights="examples"))
    client: Any = SimpleNamespace(samples=6, recipe=recipe)
    summing = Summing(client, None, None, None, None, None)  # type: ignore[arg-type]
    with pytest.raises(Breach) as raised:
        asyncio.run(summing._take_part(Try(attempt="0" * 32, clients=4, most=4, weight=5.0)))
    assert raised.value.fault is Fault.BAD_NUMBER


def test_a_try_is_noted_before_keys_are_made_and_before_a_masked_vector_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a kill right after anything is said would leave: the try, and from the vector on who could open it."""
    said, noted = Summing._said, dict[tuple[int, int], Tries]()

    async def looked(self: Summing, session: Any, at: int, *rest: Any) -> Any:
        client = self._client
        kept = DeviceState(client.state.directory, client.run, client.number).tries
        assert (kept.round, kept.attempt) == (session.round, session.attempt)
        noted[client.number, at] = kept
        return await said(self, session, at, *rest)

    monkeypatch.setattr(Summing, "_said", looked)
    deployed(summed("fedavg", 4, rounds=1), tmp_path)
    circles = {number: Circle(tuple(sorted({0, 1, 2, 3} - {number})), 2) for number in range(4)}
    for (number, at), tries in noted.items():
        assert list(tries.masked.values()) == ([circles[number]] if at >= 2 else [])
    assert len(noted) == 16


def test_tries_go_forward() -> None:
    """A device comes back to a try only as long as it has masked nothing in it; another round has other ones."""
    tries = Tries().with_keys(2, "5")
    assert tries.allow(2, "5")
    assert tries.allow(2, "6")
    assert not tries.allow(2, "4")
    assert not tries.allow(1, "6")
    tries = tries.with_mask(CIRCLE)
    assert not tries.allow(2, "5")
    assert tries.with_keys(2, "6").masked == {"5": CIRCLE}
    assert tries.with_keys(3, "1") == Tries(3, "1")
    assert Tries.of(json.loads(json.dumps(tries.said()))) == tries
    assert Tries.of(None) == Tries()


def test_a_state_remembers_what_was_opened(tmp_path: Path) -> None:
    state = DeviceState(tmp_path, "run", 1)
    state.commit(Pending(2, "0" * 64, b"update", {}))
    state.open()
    assert DeviceState(tmp_path, "run", 1).opened == 2
    tries = state.tries.with_keys(2, "5").with_mask(CIRCLE)
    state.tried(tries)
    state.refused()
    kept = DeviceState(tmp_path, "run", 1)
    assert (kept.opened, kept.tries) == (2, tries)
    kept.go_back(0)
    assert (kept.opened, kept.tries) == (2, tries)


def test_a_single_update_is_refused(tmp_path: Path) -> None:
    async def whole() -> None:
        recipe = summed("fedavg", 3)
        async with loopback(recipe, tmp_path) as (made, _), channel(made.port, made.files("device-0")) as device:
            for payload in (b"", b"update"):
                with pytest.raises(Refused) as refused:
                    await device.ask(Update(round=0, model="0" * 64, samples=1), payload)
                assert refused.value.code is Code.UNKNOWN_KIND

    asyncio.run(whole())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"method": {"name": "scaffold"}}, "secure: what scaffold's clients send"),
        ({"method": {"name": "local"}}, "secure: what local's clients send"),
        ({"data": {**DATA, "normalize": "auto"}}, "shows a server sums of each device's inputs"),
        ({"federation": {"cohort": 2}}, "secure.least: no sum of fewer than 3"),
    ],
)
def test_what_would_show_more_is_refused(change: dict[str, Any], match: str) -> None:
    values = {**summed("fedavg").model_dump(mode="json", exclude_none=True), **change}
    with pytest.raises(BadInput, match=match):
        deployable(Recipe.parse(values))


def test_a_run_of_sums_does_not_go_back(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="devices are in one sum of a round"):
        roll_back(summed("fedavg"), tmp_path, 0)
