"""A disk that is full at each write of a server, of devices and of a coordinator: none ends, the bits are the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from damages import CLOUD, handed
from deploy_harness import loopback
from full import Full
from offline import Offline, quick_recipe
from processes import recipe_of, simulated
from test_deployed import outcome

from personafl.deploy.net.messages import Announce, Join
from personafl.deploy.server.agreement import fingerprint
from personafl.deploy.server.coordination import Coordination
from personafl.errors import StorageFailed
from tiers import tiered

T = TypeVar("T")


def surely(task: Callable[[], T], again: Callable[[], T] | None = None) -> T:
    """Do something until it can be written, as servers and devices do."""
    while True:
        try:
            return task()
        except StorageFailed as error:
            assert "the disk is full: free some space" in str(error)  # noqa: PT017 - it goes on
        task = again or task


class Patient(Offline):
    """A server and devices that wait for space."""

    def _client(self, number: int) -> Any:
        return surely(lambda: super(Patient, self)._client(number))

    def train(self, number: int) -> None:
        """Where the server cannot note that it hands out a task it is asked again; the device writes again."""
        rounds = self.rounds
        task = rounds.task
        rounds.task = lambda *given: surely(lambda: task(*given))  # type: ignore[method-assign]
        try:
            surely(lambda: super(Patient, self).train(number), self.clients[number].state.write)
        finally:
            rounds.task = task  # type: ignore[method-assign]

    def settle(self, number: int) -> None:
        """Where the server cannot keep an update it is sent again; where the device cannot, it writes again."""
        rounds, state = self.rounds, self.clients[number].state
        accept = rounds.accept
        rounds.accept = lambda *given: surely(lambda: accept(*given))  # type: ignore[method-assign]
        try:
            surely(lambda: super(Patient, self).settle(number), state.write)
        finally:
            rounds.accept = accept  # type: ignore[method-assign]

    def go_on(self, done: int | None = None) -> Offline:
        rounds = self.rounds
        while rounds.done < self.recipe.rounds:
            if rounds.open is None:
                surely(rounds.open_next)
            for number in range(len(self.clients)):
                self.train(number)
                self.settle(number)
            surely(rounds.close)
        surely(rounds.final)
        return self


def patient(folder: Path, full: Full) -> Any:
    """Run to the end; a process that cannot even start is started again."""
    with full:
        while True:
            try:
                run = Patient(recipe(), folder)
                break
            except StorageFailed:
                pass
        with run:
            return run.go_on().outcome()


def recipe() -> Any:
    return quick_recipe(rounds=2)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("whole")
    with Full(folder / "run", 10**9) as server, Full(folder / "devices", 10**9) as devices:
        found = patient(folder, Full(folder / "nothing", 10**9))
    assert found == simulated(recipe())
    return found, {"run": server.count, "devices": devices.count}


@pytest.mark.parametrize("where", ["run", "devices"])
@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.system)])
@pytest.mark.parametrize("length", tiered([1, 4], [1]))
def test_a_full_disk_changes_nothing(length: int, every: int, where: str, wanted: Any, tmp_path: Path) -> None:
    bits, points = wanted
    assert points[where] > 50
    for at in range(0, points[where], every):
        folder = tmp_path / f"at-{at}"
        full = Full(folder / where, at, length)
        assert patient(folder, full) == bits, at
        assert full.failures > 0
        Offline(recipe(), folder).__exit__()  # and it can be read again


def coordinate(folder: Path, full: Full) -> tuple[Any, int]:
    with full:
        made = surely(lambda: Coordination(CLOUD, folder / "run"))
        with made:
            for server in range(2):
                surely(lambda: made.join(server, Join(weight=10, recipe=fingerprint(CLOUD))))  # noqa: B023
            for round_ in range(3):
                for server in range(2):
                    announce = Announce(round=round_, clients=2)
                    surely(lambda: made.announce(server, announce, handed(made, server)))  # noqa: B023
                assert not made.is_behind
            surely(made.go_on)
            assert made.finished
            return ([made.following(server, 2) for server in range(2)], dict(made.mixes), made.last), full.count


@pytest.mark.parametrize("every", [13, pytest.param(1, marks=pytest.mark.system)])
@pytest.mark.parametrize("length", tiered([1, 4], [1]))
def test_nor_does_a_coordinators(length: int, every: int, tmp_path: Path) -> None:
    bits, points = coordinate(tmp_path / "whole", Full(tmp_path / "whole" / "run", 10**9))
    assert points > 50
    for at in range(0, points, every):
        folder = tmp_path / f"at-{at}"
        found, _ = coordinate(folder, Full(folder / "run", at, length))
        assert found == bits, at
        with Coordination(CLOUD, folder / "run") as again:
            assert again.finished
            assert [again.following(server, 2) for server in range(2)] == bits[0]


def test_a_server_and_its_devices_wait_for_space(tmp_path: Path) -> None:
    """Over real sockets, with the disk of all full for a while in each of three places."""
    made_of = recipe_of("scaffold", 2, {"heartbeat": 0.2}, rounds=2, model={"name": "linear"})

    async def played() -> Any:
        async with loopback(made_of, tmp_path) as (made, server):
            with (
                Full(tmp_path / "run", 4, 3) as early,
                Full(tmp_path / "run", 40, 3) as later,
                Full(tmp_path / "devices", 20, 3) as devices,
            ):
                await asyncio.gather(*(made.device(name) for name in made.names))
                return made, await server, [full.failures for full in (early, later, devices)]

    made, rounds, failures = asyncio.run(played())
    assert failures == [3, 3, 3]
    assert outcome(made, rounds) == simulated(made_of)
    assert [event for event in made.events if event.what == "full"]
    assert [text for text in made.said if "the disk is full" in text]
