"""Devices that train without contact: as a recipe has it, and because their server cannot be reached."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from offline import Offline
from processes import plain, recipe_of, simulated
from test_cloud_deployed import driven
from test_deployed import deployed, outcome

from personafl.core import wire
from personafl.deploy.device.alone import Alone
from personafl.recipe.recipe import Recipe
from personafl.runs.build import prepare
from personafl.simulate.simulator import Simulation
from personafl.storage.journal import Journal
from personafl.storage.store import Store

LITTLE: dict[str, Any] = {"model": {"name": "linear"}, "training": {"steps": 3, "least_steps": 1, "batch": 16}}


def little(clients: int = 5, deploy: dict[str, Any] | None = None, **changes: Any) -> Recipe:
    return recipe_of("fedbcdi", clients, deploy, **{**LITTLE, "rounds": 7, **changes})


def test_devices_that_the_recipe_has_offline_give_the_simulators_bits(tmp_path: Path) -> None:
    """Some are offline at the end too; a server that starts again remembers who was."""
    recipe = little(4, federation={"cohort": 1, "offline": 0.5})
    with Offline(recipe, tmp_path) as made:
        made.go_on(4)
    with Offline(recipe, tmp_path) as made:
        server, states = made.go_on().outcome()
    wanted = simulated(recipe)
    assert server == wanted[0]
    assert {client: state for client, state in states.items() if state} == wanted[1]
    lines = Journal(tmp_path / "run" / "journal.jsonl").entries
    assert any(line["event"] == "accepted" and line.get("alone") for line in lines)


@pytest.mark.system
def test_devices_over_the_network_that_the_recipe_has_offline_give_the_simulators_bits(tmp_path: Path) -> None:
    recipe = little(4, {"heartbeat": 0.05}, federation={"cohort": 1, "offline": 0.5})
    assert outcome(*deployed(recipe, tmp_path)) == simulated(recipe)


def cut_off(made: Offline, number: int, rounds: range) -> None:
    """Let a server go through rounds without a device, which trains alone meanwhile as long as it does."""
    alone = Alone(made.clients[number])
    for _ in rounds:
        made.open()
        for other in range(len(made.clients)):
            if other != number:
                made.settle(other)
                made.train(other)
                made.settle(other)
        if alone.next is not None:
            alone.train(alone.next)
        made.rounds.close()


@pytest.mark.parametrize("pending", [False, True], ids=["settled", "pending"])
def test_a_device_that_is_cut_off_for_six_rounds_has_the_simulators_state(pending: bool, tmp_path: Path) -> None:
    """It trains for four, waits for two, and hands in; an update that was on its way when it was cut off counts."""
    recipe = little(3, rounds=10)
    with Offline(recipe, tmp_path) as made:
        made.go_on(2)
        if pending:
            made.open()
            made.train(0)
            update = made.clients[0].state.pending
            assert update is not None
            made.settle(0)
            made.clients[0].state.pending = update  # the answer was lost
            made.clients[0].state.rounds.pop()
        cut_off(made, 0, range(6))
        made.settle(0)
        trained = made.clients[0].state.alone
        made.go_on()
        found = made.outcome()
        lines = Journal(tmp_path / "run" / "journal.jsonl").entries
    first = 3 if pending else 2
    assert trained == [first, first + 1, first + 2, first + 3]
    taken = {(line["number"], line["round"]): line["alone"] for line in lines if line.get("alone")}
    assert taken == {(0, 8): trained}
    assert found == replayed(made.recipe, {line["round"]: line["taken"] for line in lines if "loss" in line}, taken)


def replayed(recipe: Recipe, cohorts: dict[int, list[int]], alone: Any) -> Any:
    """Play again who took part, and who trained alone."""
    with tempfile.TemporaryDirectory() as folder:
        simulation = Simulation(prepare(recipe).federation, Store(Path(folder) / "states", 2**30))
        simulation.alone = alone
        simulation._cohort = lambda number: np.array(cohorts[number])  # type: ignore[method-assign]
        for number in range(recipe.rounds):
            simulation.step(number)
        states = {client: plain(simulation.store.get(client)) for client in range(3)}
        return wire.encode(simulation.saved()), states


@pytest.mark.system
@pytest.mark.parametrize("protocol", ["sync", "async"])
def test_a_process_whose_line_is_cut_for_six_rounds_has_the_simulators_state(protocol: str) -> None:
    (result,) = driven("cut", protocol)
    assert result["equal"]
    assert [len(own) for own in result["alone"]].count(4) >= 1
