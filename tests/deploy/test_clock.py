"""A server or coordinator that was stopped for a while does not call others late for that."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from deploy_harness import Loopback, channel, loopback
from processes import recipe_of
from test_cloud_deployed import coordinating, driven, two
from test_deployed import closed, silent

from personafl.deploy import pki
from personafl.deploy.net.messages import Beat, Join, Leave, Pull
from personafl.deploy.net.transport import ask_status
from personafl.deploy.server import clock
from personafl.deploy.server.agreement import fingerprint
from tiers import tiered


class Jumping:
    """A clock that can be put forward, as the real one is while a process is stopped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead, self.looks = 0.0, 0
        monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=self._monotonic))

    def _monotonic(self) -> float:
        self.looks += 1
        return time.monotonic() + self.ahead

    async def jump(self, seconds: float) -> None:
        """Put it forward, and wait until that must have been noticed."""
        self.ahead += seconds
        looks = self.looks
        while self.looks < looks + 20:
            await asyncio.sleep(0.01)


def test_the_clock_stands_still_while_its_process_does(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 100.2, 100.6, 105.6, 105.7, 1105.7, 1105.8])
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: next(times)))
    made = clock.Clock()
    found = [made.look() for _ in range(6)]
    assert [round(now - 100, 1) for now, _ in found] == [0.2, 0.6, 1.1, 1.2, 1.7, 1.8]
    assert [away for _, away in found] == [False, False, False, False, True, False]


@pytest.mark.parametrize("seconds", tiered([10.0, 1000.0], [1000.0]))
def test_a_coordinator_that_was_away_calls_nobody_gone(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = two("sync")
    section = recipe.deploy
    assert section is not None
    recipe = recipe.model_copy(update={"deploy": section.model_copy(update={"server_timeout": 8.0})})

    async def away() -> list[bool]:
        moved = Jumping(monkeypatch)
        async with coordinating(recipe, tmp_path) as (port, _):
            for name in ("cloud-0", "cloud-1"):
                async with channel(port, pki.issue(tmp_path / "pki", name)) as line:
                    await line.ask(Join(weight=10, recipe=fingerprint(recipe)))
                    await line.ask(Beat(round=0))
            await moved.jump(seconds)
            report = await ask_status(f"localhost:{port}", pki.issue(tmp_path / "pki", "coordinator"))
            return [row["gone"] for row in report["servers"]]

    assert asyncio.run(away()) == [False, False]


def test_a_server_that_was_away_closes_no_round_for_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of("fedavg", 3, {"min_completion": 0.5, "deadline": 600.0}, rounds=1)

    async def away() -> Loopback:
        moved = Jumping(monkeypatch)
        async with loopback(recipe, tmp_path) as (made, server):
            line = await silent(made, "device-2")
            devices = [asyncio.create_task(made.device(name)) for name in made.names[:2]]
            while (await line.ask(Pull(returning=False))).message.kind != "task":
                pass
            while sum("update accepted" in text for text in made.said) < 2:
                await asyncio.sleep(0.01)
            await moved.jump(1000.0)
            assert not closed(made)
            await line.ask(Leave())
            await line.close()
            await asyncio.gather(server, *devices)
            return made

    assert closed(asyncio.run(away())) == [(0, 1)]


@pytest.mark.system
def test_a_coordinator_that_is_stopped_and_goes_on_mixes_all_servers() -> None:
    (result,) = driven("paused")
    assert result["gone"] == []
    assert result["mixed"] == [[0, 1]] * 6
    assert result["equal"]
