"""Noise that devices add to sums which are all a server sees: the simulator's bits, its ledger, keys and dropouts."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deploy_harness import loopback
from processes import SMALL, recipe_of, simulated
from test_deployed import deployed, outcome

from personafl.core import wire
from personafl.deploy.device import sharing
from personafl.deploy.device.state import DeviceState
from personafl.deploy.device.summing import Summing
from personafl.deploy.net.transport import ask_status
from personafl.deploy.server.opening import deployable
from personafl.deploy.server.rounds import Rounds
from personafl.deploy.server.summing import SummedRounds
from personafl.errors import BadInput, Failed
from personafl.models.modelfile import card_of
from personafl.privacy.distributed import client_key, lattice_for, sent
from personafl.privacy.mechanisms import Accounted
from personafl.privacy.noise import make_key
from personafl.recipe.recipe import Recipe
from personafl.runs.build import prepare
from personafl.secure.client import Client
from personafl.secure.fixed import Grid
from personafl.secure.messages import Session
from personafl.simulate.simulator import Simulation
from personafl.storage.journal import Journal
from personafl.storage.store import Store
from tiers import tiered

pytest.importorskip("dp_accounting", reason="differential privacy is accounted for by dp-accounting")

NOISY = {"clip": 0.5, "noise": 2.0, "mechanism": "distributed"}
DATA = {**SMALL["data"], "normalize": "none"}


def shared(method: str = "fedavg", clients: int = 4, **changes: Any) -> Recipe:
    values = {"rounds": 2, "federation": {"cohort": clients}, "privacy": NOISY, "secure": {}, **changes}
    return recipe_of(method, clients, data=DATA, **values)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have devices make the keys that simulated clients have."""
    whose = sharing.own_key

    def simulated_key(directory: Path) -> bytes:
        whose(directory)
        return client_key(make_key(0), int(directory.name.removeprefix("device-")))

    monkeypatch.setattr(sharing, "own_key", simulated_key)


def spent(rounds: int, noise: float = 2.0) -> float:
    return Accounted(mechanism="distributed", delta=1e-5).epsilon(noise, [rounds])


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("method", ["fedavg", pytest.param("fedalt", marks=pytest.mark.system)])
def test_devices_give_the_simulators_bits(method: str, tmp_path: Path) -> None:
    """And the ledger has a line for each round; no loss is known, and the server has no key."""
    recipe = shared(method)
    made, rounds = deployed(recipe, tmp_path)
    assert outcome(made, rounds) == simulated(recipe)
    entries = Journal(tmp_path / "run" / "journal.jsonl").entries
    facts = {"mechanism": "distributed", "noise": 2.0, "rate": 1.0, "clip": 0.5, "attempt": 0}
    assert [entry["privacy"] for entry in entries if entry["event"] == "sealed"] == [facts] * 2
    assert [entry["loss"] for entry in entries if entry["event"] == "closed"] == [None] * 2
    assert not (tmp_path / "run" / "noise.key").exists()
    said = json.loads((tmp_path / "run" / "deployed.json").read_text())["privacy"]
    assert (said["epsilon"], said["mechanism"]) == (spent(2), "distributed")
    for name in made.names:
        assert stat.S_IMODE((tmp_path / "devices" / name / "noise.key").stat().st_mode) == 0o600
        card = card_of(tmp_path / "devices" / name / "model.safetensors")
        assert (card.epsilon, card.delta) == (spent(2), 1e-5)
        assert "devices that [secure] allows" in str(card.assumption)


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("stage", tiered(range(5), quick=[2]))
def test_a_device_that_goes_at_a_stage_takes_its_noise_with_it(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five one may go. The sum is that of a simulation whose cohort is who is left, each with a share for four."""
    recipe, victim = shared("fedavg", 5, rounds=1), 2
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
    federation = prepare(recipe).federation
    server: Any = federation.algorithm.server
    assert server.honest == 4
    simulation = Simulation(federation, Store(tmp_path / "states", 2**30))
    monkeypatch.setattr(Simulation, "_cohort", lambda *_: np.array(left))
    simulation.step(0)
    assert rounds.directory.server_bytes(rounds.directory.checkpoint()) == wire.encode(simulation.saved())


@pytest.mark.system
def test_a_run_stops_at_its_budget_and_says_what_it_spent(tmp_path: Path) -> None:
    """Noise 2 spends 2.4 in one round and 3.6 in two, of 3: of five rounds there is one."""
    recipe = shared(clients=3, rounds=5, privacy={**NOISY, "epsilon": 3.0}, model={"name": "linear"})

    async def whole() -> tuple[list[str], dict[str, Any]]:
        async with loopback(recipe, tmp_path, stay=True) as (made, _):
            await asyncio.gather(*(made.device(name) for name in made.names))
            report = await ask_status(f"localhost:{made.port}", made.files("coordinator"))
            return [event.text for event in made.events if event.what == "finished"], report

    said, report = asyncio.run(whole())
    assert said == ["1 rounds; the budget of privacy is spent"]
    facts = {"epsilon": spent(1), "delta": 1e-5, "budget": 3.0, "noise": 2.0, "mechanism": "distributed"}
    assert {key: report["privacy"][key] for key in facts} == facts
    assert "devices that [secure] allows" in report["privacy"]["assumption"]


def test_a_vector_that_is_masked_again_has_the_same_noise(tmp_path: Path) -> None:
    """After a kill its key is there; for another update, or in another round, the noise is another one."""
    (tmp_path / "state").mkdir()
    key = sharing.own_key(tmp_path / "state")
    assert sharing.own_key(tmp_path / "state") == key
    assert sharing.own_key(_made(tmp_path / "other")) != key
    (tmp_path / "state" / "noise.key").write_bytes(b"short")
    with pytest.raises(BadInput, match="has 5 bytes and not 32"):
        sharing.own_key(tmp_path / "state")


def _made(path: Path) -> Path:
    path.mkdir()
    return path


def test_how_much_noise_is_in_the_recipe_and_in_who_must_survive(tmp_path: Path) -> None:
    """A session of more clients has smaller shares, and opens no sum of fewer than these are enough for."""
    recipe = shared(clients=10)
    client: Any = type("Device", (), {"recipe": recipe, "state": DeviceState(tmp_path / "state", "run", 0)})()
    upload: Any = prepare(shared()).federation.algorithm.client.uploads({"a": torch.zeros(2000)}, torch.zeros(()))
    for clients, least, corrupt in ((10, 7, 1), (40, 28, 4)):
        session = Session("run", 0, "0" * 32, "0" * 64, least, corrupt, 2000, Grid(clients, 1.0, 1.0))
        found = sharing.noisy(client, session, upload)
        lattice = lattice_for(2.0, clients, least - corrupt, 2000)
        key = sharing.own_key(tmp_path / "state")
        assert (found == sent(upload, 0.5, lattice, key, 0).numpy().astype(np.uint32)).all()
        share = found.view(np.int32).astype(np.float64) / lattice.radius
        assert (least - corrupt) * float((share**2).mean()) == pytest.approx(4.0, rel=0.15)


@pytest.mark.system
def test_no_vector_leaves_a_device_without_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is masked is far from the update on the grid, by its share of the noise."""
    masked: dict[int, Any] = {}
    mask = Client.mask

    def seen(self: Client, inbox: Any, vector: Any) -> Any:
        masked[self._number] = vector.copy()
        return mask(self, inbox, vector)

    monkeypatch.setattr(Client, "mask", seen)
    recipe = shared(clients=3, rounds=1, model={"name": "linear"})
    deployed(recipe, tmp_path)
    assert len(masked) == 3
    for vector in masked.values():
        assert len(vector) == 650  # 64·10 + 10, and no loss
        lattice = lattice_for(2.0, 3, 3, 650)
        spread = float((vector.view(np.int32) / lattice.radius).std())
        assert spread == pytest.approx(2.0 / np.sqrt(3), rel=0.15)


def test_what_a_server_refuses(tmp_path: Path) -> None:
    authority: Any = None
    with pytest.raises(BadInput, match=r"^privacy\.noise: a sum of 4 clients with noise 900000 would wrap"):
        SummedRounds(shared(privacy={**NOISY, "noise": 9e5}), tmp_path / "run", authority)
    with pytest.raises(BadInput, match=r"data.normalize: 'auto' adds up what clients have"):
        deployable(recipe_of("fedavg", 4, federation={"cohort": 4}, privacy=NOISY, secure={}))
