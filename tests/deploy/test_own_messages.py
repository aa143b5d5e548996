"""A server that sends each device its own: the simulator's bits, also after a crash, and exports and final models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from offline import QUICK, Offline, identity
from processes import SMALL, recipe_of, simulated
from test_deployed import deployed, outcome
from test_everywhere import run as run_by_name

from crash_driver import outcome as left_by
from personafl import api, export, load_model
from personafl.core import tree, wire
from personafl.deploy.net.messages import Code, Refused, Update
from personafl.deploy.net.payload import opened
from personafl.deploy.server.agreement import deployable_cloud
from personafl.deploy.server.opening import deployable
from personafl.errors import BadInput
from personafl.flower.app import write_app
from personafl.models.modelfile import card_of
from personafl.runs.listener import Progress
from tiers import tiered

OPTIONS: dict[str, dict[str, Any]] = {"pfedhn": {"width": 8, "vector": 3}, "fedfomo": {"models": 2}}


def run(method: str, path: Path, **changes: Any) -> dict[str, Any]:
    """Run it in the simulator with small options."""
    found: dict[str, Any] = run_by_name(method, path, options=OPTIONS[method], **changes)
    return found


class Stopped(Exception):
    pass


@pytest.mark.parametrize("method", tiered(list(OPTIONS), ["pfedhn"]))
def test_it_runs_in_every_executor(method: str, tmp_path: Path) -> None:
    """Of four clients one is unseen, and two take part in each round."""
    partition = {"kind": "dirichlet", "clients": 4, "alpha": 0.5}
    data = {"partition": partition, "unseen": 0.25, "validation": 0.2}
    changes: dict[str, Any] = {"federation": {"cohort": 2}, "data": data, "finetune": True}
    plain, engine = run(method, tmp_path / "plain", **changes), SMALL["engine"]
    assert run(method, tmp_path / "workers", **changes, engine=engine | {"workers": 2}) == plain
    stacked = run(method, tmp_path / "stacked", **changes, engine=engine | {"strategy": "stacked"})
    for client, entry in plain["states"].items():
        for name, (_, leaf) in entry.items():
            other = np.frombuffer(stacked["states"][client][name][1], np.float32)
            np.testing.assert_allclose(np.frombuffer(leaf, np.float32), other, atol=1e-5)

    def stop(progress: Any) -> None:
        if isinstance(progress, Progress) and progress.done == 1:
            raise Stopped

    recipe = api.recipe_of(tmp_path / "plain")
    often = recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"checkpoint_seconds": 0})})
    with pytest.raises(Stopped):
        api.run(often, out=tmp_path / "stopped", listener=stop)
    api.resume(tmp_path / "stopped")
    assert left_by(tmp_path / "stopped")["states"] == plain["states"]


def test_the_models_of_pfedhn_are_what_its_server_makes(tmp_path: Path) -> None:
    """They are scored, exported and resumed though clients keep nothing; there is no global one."""
    data = {"partition": {"kind": "dirichlet", "clients": 4, "alpha": 0.5}, "unseen": 0.25}
    run("pfedhn", tmp_path / "run", data=data)
    result = api.Result.load(tmp_path / "run")
    rows = {(row["model"], row["clients"]): row["accuracy"] for row in result.rows}
    assert rows.keys() == {("personal", "seen"), ("personal", "unseen")}
    exported = export(tmp_path / "run", clients="all")
    assert len(exported.models) == 4
    (file,) = (tmp_path / "run").glob("server-*.safetensors")
    named = wire.decode_named(file.read_bytes())
    rule = api.recipe_of(tmp_path / "run").algorithm().server
    start = {name.removeprefix("hyper/start/"): leaf for name, leaf in named.items() if name.startswith("hyper/start/")}
    state = tree.unflatten(rule.init(None, start, 1.0), named)  # type: ignore[arg-type]
    for client in state.clients.tolist():
        assert rule.address is not None
        made = rule.address(state, np.array([client]))["model"]
        (model,) = (one for one in exported.models if one.client == str(client))
        inside = load_model(model.file).network.state_dict()
        for name, leaf in made.items():
            torch.testing.assert_close(inside[name], leaf[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("pfedhn", {}),
        pytest.param("fedfomo", {}, marks=pytest.mark.system),
        pytest.param("fedfomo", {"federation": {"cohort": 2}}, marks=pytest.mark.system),  # with newcomers, later
        pytest.param("pfedhn", {"uplink": {"form": "sparse", "keep": 0.2}}, marks=pytest.mark.system),
    ],
)
def test_devices_give_the_simulators_bits(method: str, changes: dict[str, Any], tmp_path: Path) -> None:
    recipe = recipe_of(method, options=OPTIONS[method], **changes)
    made, rounds = deployed(recipe, tmp_path)
    assert outcome(made, rounds) == simulated(recipe)
    if method == "pfedhn":  # the model that each keeps is its own
        base, final = rounds._base, rounds.final()
        for number, name in enumerate(made.names):
            kept = tmp_path / "devices" / name / "model.safetensors"
            assert card_of(kept).model == "personal"
            message = opened(final.to(number), base.first_message(), type(base.first_message()))
            inside = load_model(kept).network.state_dict()
            assert all(inside[path].equal(leaf) for path, leaf in message.model.items())


@pytest.mark.parametrize("method", OPTIONS)
def test_a_server_that_is_started_again_knows_what_it_sent_whom(method: str, tmp_path: Path) -> None:
    """In the middle of a round: who has trained sends its update, and nobody else's name of a message is taken."""
    recipe = recipe_of(method, rounds=4, options=OPTIONS[method], **QUICK)
    with Offline(recipe, tmp_path / "whole") as whole:
        expected = whole.go_on().outcome()
    with Offline(recipe, tmp_path / "broken") as run:
        run.go_on(2).open()
        run.train(0)
        run.settle(0)
        run.train(1)
        before = [run.rounds.task(number, False) for number in (1, 2)]
    with Offline(recipe, tmp_path / "broken") as again:
        assert [again.rounds.task(number, False) for number in (1, 2)] == before
        names = [task[1] for task in before if task is not None]
        assert len({*names, again.rounds._open.letters.digest}) == 3
        client, pending = again.clients[1], again.clients[1].state.pending
        assert pending is not None
        told: dict[str, Any] = {"round": pending.round, "samples": client.samples, "alone": client.state.alone}
        for wrong in (names[1], again.rounds._open.letters.digest):
            with pytest.raises(Refused) as refused:
                again.rounds.accept(identity(1), Update(**told, model=wrong), pending.update)
            assert refused.value.code == Code.WRONG_MODEL
        assert again.go_on().outcome() == expected


@pytest.mark.parametrize("method", OPTIONS)
def test_deployments_that_send_all_the_same_refuse_it(method: str, tmp_path: Path) -> None:
    recipe = recipe_of(method, data={**SMALL["data"], "normalize": "none"})
    with pytest.raises(BadInput, match=rf"^method\.name: {method}'s server .* a Flower app sends all the same"):
        write_app(recipe, tmp_path / "app")
    assert not (tmp_path / "app").exists()
    with pytest.raises(BadInput, match=rf"^robust: {method}'s server sends each client"):
        deployable(recipe_of(method, robust={"rule": "median"}, federation={"weights": "uniform"}))
    with pytest.raises(BadInput, match=rf"^cloud: {method}'s server sends each client"):
        deployable_cloud(recipe_of(method, cloud={"servers": 2}, data={**SMALL["data"], "normalize": "none"}))
