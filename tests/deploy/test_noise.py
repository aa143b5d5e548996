"""[privacy] on a server of real devices: its bits, its key, its ledger, and what a kill or a roll-back does."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from deploy_harness import loopback
from offline import QUICK, Offline, identity
from processes import SMALL, States, plain, recipe_of
from test_deployed import deployed, outcome

from crash_driver import Failpoints, ended, forked
from personafl.core import wire
from personafl.deploy.net.messages import Code, Refused, Update
from personafl.deploy.net.transport import ask_status
from personafl.deploy.server import noise as noise_module
from personafl.deploy.server.going_back import roll_back
from personafl.deploy.server.rounds import Rounds
from personafl.errors import BadInput
from personafl.models.modelfile import card_of
from personafl.privacy.accounting import epsilon
from personafl.privacy.noise import make_key
from personafl.recipe.recipe import Recipe
from personafl.runs.build import prepare
from personafl.simulate.simulator import Simulation
from personafl.storage.backup import back_up
from personafl.storage.journal import Journal
from personafl.storage.rundir import RunDirectory
from personafl.storage.store import Store
from personafl.uploads.private import PrivateServer

pytest.importorskip("dp_accounting", reason="differential privacy is accounted for by dp-accounting")

NOISY = {"clip": 0.5, "noise": 0.5}
CYCLIC = {"cohort": 1, "sampling": "cyclic", "apart": 3}


def private(method: str = "fedavg", clients: int = 2, **changes: Any) -> Recipe:
    values = {"federation": {"cohort": clients}, "privacy": NOISY, "rounds": 4, **QUICK, **changes}
    return recipe_of(method, clients, values.pop("deploy", None), data=SMALL["data"] | {"normalize": "none"}, **values)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Have servers make the key that a simulation has."""
    monkeypatch.setattr(noise_module, "fresh_key", lambda: make_key(0))
    return make_key(0)


def simulated(recipe: Recipe) -> tuple[bytes, States]:
    """Return what a simulation comes to whose noise is bound to its sums, as a server's is."""
    federation = prepare(recipe).federation
    server = federation.algorithm.server
    if isinstance(server, PrivateServer):
        algorithm = dataclasses.replace(federation.algorithm, server=dataclasses.replace(server, bound=True))
        federation = dataclasses.replace(federation, algorithm=algorithm)
    with tempfile.TemporaryDirectory() as folder:
        simulation = Simulation(federation, Store(Path(folder) / "states", 2**30))
        for number in range(recipe.rounds):
            simulation.step(number)
        clients = [int(c) for c in federation.data.seen if int(c) in simulation.store]
        states = {client: plain(simulation.store.get(client)) for client in clients}
        return wire.encode(simulation.saved()), states


def ledger(path: Path) -> list[dict[str, Any]]:
    return [entry for entry in Journal(path / "journal.jsonl").entries if entry["event"] == "sealed"]


@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedalt", "local"])
def test_devices_give_the_simulators_bits(method: str, known: bytes, tmp_path: Path) -> None:
    recipe = private(method, 3, model=SMALL["model"], rounds=3)
    made, rounds = deployed(recipe, tmp_path)
    assert outcome(made, rounds) == simulated(recipe)
    assert [entry["round"] for entry in ledger(tmp_path / "run") if "privacy" in entry] == (
        [] if method == "local" else [0, 1, 2]
    )
    for name in made.names:  # what a device keeps says what it rests on
        card = card_of(tmp_path / "devices" / name / "model.safetensors")
        assert card.epsilon == (0 if method == "local" else epsilon(0.5, 3, 1e-5))
        assert card.delta == 1e-5


@pytest.mark.parametrize(
    "changes",
    [
        {"privacy": {"clip": {"start": 0.1, "noise": 0.5}, "noise": 0.5}},
        {"privacy": NOISY | {"mechanism": "discrete"}},
        {"privacy": NOISY | {"mechanism": "tree"}, "federation": CYCLIC},
        {"privacy": NOISY | {"mechanism": "banded"}, "federation": CYCLIC},
    ],
    ids=["adaptive", "discrete", "tree", "banded"],
)
def test_so_they_do_with_other_mechanisms(changes: dict[str, Any], known: bytes, tmp_path: Path) -> None:
    """The tree ends after three rounds and the next one begins."""
    recipe = private("fedalt", 3, model=SMALL["model"], **changes)
    with Offline(recipe, tmp_path) as run:
        found = run.go_on().outcome()
    assert found == simulated(recipe)


def test_the_key_is_nobody_elses_and_is_shown_nowhere(tmp_path: Path) -> None:
    keys = []
    for name in ("one", "two"):
        with Offline(private(), tmp_path / name) as run:
            run.go_on()
            run.rounds.final()
            report = json.dumps(run.rounds.noise.facts())  # type: ignore[union-attr]
        file = tmp_path / name / "run" / "noise.key"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        keys.append(key := file.read_bytes())
        assert len(key) == 32
        assert key.hex() not in report
        for other in (tmp_path / name).rglob("*"):
            if other.is_file() and other != file:
                assert key not in other.read_bytes(), other
                assert key.hex().encode() not in other.read_bytes(), other
    assert keys[0] != keys[1]
    back_up(tmp_path / "one" / "run", tmp_path / "copy")
    assert (tmp_path / "copy" / "noise.key").read_bytes() == keys[0]
    assert stat.S_IMODE((tmp_path / "copy" / "noise.key").stat().st_mode) == 0o600


@pytest.mark.parametrize(("left", "said"), [(None, "was lost"), (b"short", "has 5 bytes and not 32")])
def test_a_key_that_was_lost_or_damaged(left: bytes | None, said: str, tmp_path: Path) -> None:
    with Offline(private(), tmp_path) as run:
        run.go_on(1)
    key = tmp_path / "run" / "noise.key"
    key.unlink()
    if left is not None:
        key.write_bytes(left)
    with pytest.raises(BadInput, match=said):
        Rounds(run.recipe, tmp_path / "run")


def test_a_round_is_sealed_before_its_noise_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill in between: nothing more is taken, so that the noise meets the same sum again."""
    with Offline(private(), tmp_path) as run:
        run.go_on(1).open()
        run.train(0)
        run.train(1)
        run.settle(0)
        monkeypatch.setattr(Rounds, "_joined", _killed)
        with pytest.raises(KeyboardInterrupt):
            run.rounds.close()
        monkeypatch.undo()
    assert [entry["taken"] for entry in ledger(tmp_path / "run")] == [[0, 1], [0]]
    with Offline(run.recipe, tmp_path) as run:
        assert run.rounds.complete
        late = run.clients[1].state.pending
        assert late is not None
        update = Update(round=1, model=late.model, samples=run.clients[1].samples)
        with pytest.raises(Refused) as refused:
            run.rounds.accept(identity(1), update, late.update)
        assert refused.value.code is Code.ROUND_CLOSED
        run.rounds.close()
        assert [entry["taken"] for entry in ledger(tmp_path / "run")] == [[0, 1], [0]]
        assert run.rounds.last is not None
        assert run.rounds.last.taken == (0,)


def _killed(self: Rounds) -> None:
    raise KeyboardInterrupt


def state_of(path: Path) -> dict[str, torch.Tensor]:
    directory = RunDirectory(path)
    return wire.decode_named(directory.server_bytes(directory.checkpoint()))


@pytest.mark.parametrize("mechanism", ["gaussian", "banded", "tree"])
def test_a_round_done_again_has_other_noise_and_is_paid_for_twice(mechanism: str, known: bytes, tmp_path: Path) -> None:
    """Even with the same data; and noise that is taken back begins anew, as does whose turn it is."""
    federation = {"cohort": 1, "sampling": "cyclic", "apart": 2} if mechanism != "gaussian" else {"cohort": 2}
    recipe = private(privacy={"clip": 1e-3, "noise": 50.0, "mechanism": mechanism}, federation=federation)
    with Offline(recipe, tmp_path) as run:
        run.go_on(3)
        recipe = run.recipe
    first = state_of(tmp_path / "run")
    roll_back(recipe, tmp_path / "run", 1)
    with Offline(recipe, tmp_path) as run:
        run.go_on(3)
        spent = run.rounds.noise.spent  # type: ignore[union-attr]
        second = state_of(tmp_path / "run")
        names = [name for name in first if name.startswith("own/model")]
        assert names
        for name in names:  # clips are tiny: what differs is noise
            assert not torch.allclose(first[name], second[name], rtol=0.01)
        if mechanism != "gaussian":
            assert second["past"].tolist() == [1, 2]
        often = {"gaussian": 5, "banded": 3}.get(mechanism)  # 3 and 2 rounds: ⌈3/2⌉ + ⌈2/2⌉ turns
        if often:
            assert spent.epsilon == epsilon(50.0, often, 1e-5)
        assert [entry["privacy"]["attempt"] for entry in ledger(tmp_path / "run")] == [0, 0, 0, 1, 1]
        assert run.rounds.noise.facts()["roll_backs"] == 1  # type: ignore[union-attr]


def test_a_run_stops_at_its_budget_also_after_going_back(tmp_path: Path) -> None:
    """Noise was computed for four rounds; two were taken back, and so two are left out."""
    recipe = private(privacy={"clip": 0.5, "epsilon": 5.0})
    with Offline(recipe, tmp_path) as run:
        run.go_on(3)
        recipe = run.recipe
    roll_back(recipe, tmp_path / "run", 1)
    with Offline(recipe, tmp_path) as run:
        assert not run.rounds.finished
        run.go_on(2)
        assert run.rounds.finished
        run.rounds.final()
        told = json.loads((tmp_path / "run" / "deployed.json").read_text())
    assert told["rounds"] == 2
    assert 4.99 < told["privacy"]["epsilon"] <= 5.0
    with Rounds(recipe, tmp_path / "run") as rounds:
        assert rounds.finished


def test_a_server_says_that_its_budget_is_spent(tmp_path: Path) -> None:
    recipe = private(privacy={"clip": 0.5, "noise": 2.0, "epsilon": 3.0}, deploy={"heartbeat": 0.2})

    async def whole() -> tuple[list[str], int, dict[str, Any]]:
        async with loopback(recipe, tmp_path, stay=True, metrics="127.0.0.1:0") as (made, _):
            await asyncio.gather(*(made.device(name) for name in made.names))
            report = await ask_status(f"localhost:{made.port}", made.files("coordinator"))
            port = next(event.text for event in made.events if event.what == "metrics").split()[1].strip(":")
            reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
            writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
            page = (await reader.read()).decode()
            writer.close()
            assert f"personafl_privacy_epsilon {report['privacy']['epsilon']}" in page
            return [event.text for event in made.events if event.what == "finished"], report["done"], report

    said, done, report = asyncio.run(whole())
    assert report["finished"]
    spent = report["privacy"]
    assert spent.pop("assumption").endswith("(no amplification)")
    facts = {"epsilon": epsilon(2.0, done, 1e-5), "delta": 1e-5, "budget": 3.0, "noise": 2.0}
    assert spent == {**facts, "mechanism": "gaussian", "roll_backs": 0}
    assert epsilon(2.0, done, 1e-5) <= 3.0 < epsilon(2.0, done + 1, 1e-5)
    assert said == [f"{done} rounds; the budget of privacy is spent"]


def test_no_device_takes_part_twice_in_the_rounds_between(tmp_path: Path) -> None:
    """Three devices, turns three apart, and one that misses its turn: others do not jump in too soon."""
    recipe = private(clients=3, rounds=9, federation=CYCLIC, privacy=NOISY | {"mechanism": "banded"})
    turns: dict[int, list[int]] = {}
    with Offline(recipe, tmp_path) as run:
        away = 1
        while not run.rounds.finished:
            run.open()
            going = run.rounds.open
            assert going is not None
            if going.cohort == (away,) and going.number < 6:
                assert run.rounds.widen({0, 2}) == [
                    n for n in (0, 2) if not turns.get(n) or going.number - turns[n][-1] >= 3
                ]
                run.rounds.drop(f"device-{away}")
            for number in range(3):
                run.train(number)
                run.settle(number)
            assert run.rounds.complete  # also where nobody came, and nobody else's turn may come before the next
            closed = run.rounds.close()
            for number in closed.taken:
                turns.setdefault(number, []).append(closed.number)
            if run.rounds.members[away].dropped:
                run.rounds.drop(f"device-{away}", undo=True)
    for own in turns.values():
        assert all(later - sooner >= 3 for sooner, later in itertools.pairwise(own))
    assert sum(map(len, turns.values())) >= 6


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": SMALL["data"]}, "data.normalize: 'auto' adds up what clients have"),
        ({"method": "scaffold"}, "privacy: what scaffold's clients send"),
    ],
)
def test_what_a_server_refuses(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    method = changes.pop("method", "fedavg")
    values = {"federation": {"cohort": 2}, "privacy": NOISY, "data": SMALL["data"] | {"normalize": "none"}, **changes}
    with pytest.raises(BadInput) as error:
        Rounds(recipe_of(method, 2, **QUICK, **values), tmp_path / "run")
    assert said in str(error.value)


def test_what_is_personal_stays_on_the_device(tmp_path: Path) -> None:
    """Not a number of the personal parts is in what is sent, nor in anything that the server has."""
    recipe = private("fedalt", 2, model=SMALL["model"], privacy=NOISY | {"mechanism": "discrete"})
    with Offline(recipe, tmp_path) as run:
        run.go_on(2).open()
        for number in range(2):
            run.train(number)
        sent = b"".join(client.state.pending.update for client in run.clients if client.state.pending)
        own = [leaf for client in run.clients for leaf in client.state.pending.state.values()]  # type: ignore[union-attr]
        for number in range(2):
            run.settle(number)
        kept = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
        run.rounds.close()
        kept += [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    rows = [row for leaf in own for row in leaf.reshape(-1, leaf.shape[-1] if leaf.ndim else 1) if row.numel() > 1]
    assert len(rows) > 4
    assert not any(row.numpy().tobytes() in data for row in rows for data in (sent, *kept))


@pytest.mark.parametrize(
    ("mechanism", "every"),
    [
        *(pytest.param(name, 13, marks=pytest.mark.system) for name in ("gaussian", "banded")),
        *(pytest.param(name, 1, marks=pytest.mark.slow) for name in ("gaussian", "banded")),
    ],
)
def test_killed_at_any_write_a_server_comes_to_the_same_bits_and_ledger(
    mechanism: str, every: int, known: bytes, tmp_path: Path
) -> None:
    federation = {"cohort": 1, "sampling": "cyclic", "apart": 2} if mechanism == "banded" else {"cohort": 2}
    recipe = private(rounds=2, privacy=NOISY | {"mechanism": mechanism}, federation=federation)
    with Offline(recipe, tmp_path / "whole") as run:
        wanted = run.go_on().outcome()
    facts = [{key: entry[key] for key in ("round", "taken", "privacy")} for entry in ledger(tmp_path / "whole" / "run")]
    at = 0
    while True:
        folder = tmp_path / f"at-{at}"
        folder.mkdir()

        def work(folder: Path = folder, at: int = at) -> None:
            Failpoints(folder / "run", at)
            with Offline(recipe, folder) as run:
                run.go_on()

        code = ended(forked(work))
        with Offline(recipe, folder) as run:
            assert run.go_on().outcome() == wanted, at
        lines = ledger(folder / "run")
        assert [{key: entry[key] for key in ("round", "taken", "privacy")} for entry in lines] == facts
        shutil.rmtree(folder)
        if not code:
            break
        at += every
    assert at > 60
