"""Protected samples on devices: the bits of a simulation with their keys, a ledger, a budget, a policy."""

from __future__ import annotations

import asyncio
import stat
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import SMALL, known_key, recipe_of, simulated, with_known_keys
from test_deployed import deployed, outcome
from test_metrics import ask, named, parsed

from personafl.core import wire
from personafl.core.algorithm import Empty
from personafl.deploy import pki
from personafl.deploy.device import protecting
from personafl.deploy.device.condition import Condition
from personafl.deploy.device.dealing import deal
from personafl.deploy.device.pages import shown
from personafl.deploy.device.policy import Policy
from personafl.deploy.device.training import LocalClient
from personafl.deploy.server.opening import deployable, open_federation
from personafl.errors import BadInput
from personafl.models.modelfile import card_of
from personafl.privacy.accounting import compose
from personafl.recipe.recipe import Recipe
from personafl.runs.build import prepare
from personafl.simulate.trainer import Chunk, Trainer
from personafl.storage.journal import Journal

pytest.importorskip("dp_accounting", reason="differential privacy is accounted for by dp-accounting")

DATA = {**SMALL["data"], "normalize": "none"}
NOISY = {"noise": 1.5, "clip": 0.5}


def guarded(method: str = "fedavg", clients: int = 3, **changes: Any) -> Recipe:
    return recipe_of(method, clients, **{"rounds": 2, "data": DATA, "sample_privacy": NOISY, **changes})


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have devices make keys that a simulation can be given."""
    monkeypatch.setattr(protecting, "kept_key", known_key)


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    ("method", "changes"),
    [
        pytest.param("fedavg", {}, marks=pytest.mark.system),
        pytest.param("ditto", {"sample_privacy": {**NOISY, "sampling": "epochs"}}, marks=pytest.mark.system),
        pytest.param("fedalt", {"uplink": {"form": "sparse", "keep": 0.2}}, marks=pytest.mark.system),
        pytest.param("mrmtl", {"federation": {"cohort": 2}, "rounds": 3}, marks=pytest.mark.system),
        pytest.param(
            "fedavg",
            {"rounds": 3, "sample_privacy": {**NOISY, "epsilon": 3.0, "sampling": "epochs"}},
            marks=pytest.mark.system,
        ),
    ],
)
def test_devices_give_the_simulators_bits(method: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """And a ledger, a key that is the owner's alone, a card with the epsilon of the ledger, and no loss is known."""
    recipe = guarded(method, **changes)
    made, rounds = deployed(recipe, tmp_path)
    assert outcome(made, rounds) == simulated(recipe)
    closed = [e for e in Journal(tmp_path / "run" / "journal.jsonl").entries if e["event"] == "closed"]
    assert [entry["loss"] for entry in closed] == [None] * recipe.rounds
    for name in made.names:
        folder = tmp_path / "devices" / name
        assert stat.S_IMODE((folder / "samples.key").stat().st_mode) == 0o600
        steps = [pair for line in Journal(folder / "samples.jsonl").entries for pair in line["steps"]]
        spent = compose([(1.5, rate, count) for rate, count in steps], 1e-5)
        card = card_of(folder / "model.safetensors")
        assert (card.sample_epsilon, card.sample_delta, card.sample_covers) == (
            pytest.approx(spent, abs=1e-9),
            1e-5,
            "all",
        )
        budget = recipe.sample_privacy.epsilon if recipe.sample_privacy else None
        assert budget is None or (0 < spent <= budget and len(steps) < recipe.rounds)


class Alone:
    """One device's client without any network, started as often as wanted."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.served, _ = deal(guarded(**changes), folder)
        self.folder, self.state = folder, folder / "state"
        server = open_federation(self.served).serving()
        self.first = wire.encode(server.broadcast())
        other = torch.utils._pytree.tree_map(lambda leaf: leaf + 0.01, server.broadcast())
        self.second = wire.encode(other)

    def started(self, policy: Policy | None = None) -> LocalClient:
        data, text = str(self.folder / "device-1.safetensors"), self.served.to_toml().encode()
        return LocalClient.opened(text, "the recipe", data, 1, None, self.state, "0" * 32, policy or Policy())

    def trained(self, broadcast: bytes, round_: int = 0) -> bytes:
        """Start, train, and return the update."""
        client = self.started()
        client.train(round_, "0" * 64, broadcast)
        assert client.state.pending is not None
        return client.state.pending.update

    @property
    def lines(self) -> list[tuple[int, int]]:
        entries = Journal(self.state / "samples.jsonl").entries
        return [(line["round"], line["attempt"]) for line in entries]

    def forget(self) -> None:
        """Be as if killed before the state was written."""
        for file in self.state.glob("state-*.safetensors"):
            file.unlink()


@pytest.mark.usefixtures("known")
def test_an_update_has_the_bits_of_a_simulated_one(tmp_path: Path) -> None:
    alone = Alone(tmp_path)
    alone.state = tmp_path / "device-1"
    client = alone.started()
    client.train(0, "0" * 64, alone.first)
    who = with_known_keys(prepare(alone.served.model_copy(update={"deploy": None})).federation).learners
    trainer, down = Trainer(who), wire.dense(open_federation(alone.served).serving().broadcast())
    done = trainer(Chunk(0, np.array([1]), 0, down, Empty()))
    change, wanted = client.pending_upload().change, done.uploads.change
    assert change.keys() == wanted.keys()
    assert all(torch.equal(leaf, wanted[name][0]) for name, leaf in change.items())


def test_a_device_shows_what_it_has_spent(tmp_path: Path) -> None:
    pki.init(tmp_path / "pki")
    files, now = pki.issue(tmp_path / "pki", "device-1"), Condition()
    alone = Alone(tmp_path)
    client = alone.started()
    client.train(0, "0" * 64, alone.first)
    now.protected = client.protected

    async def looked() -> bytes:
        async with shown("127.0.0.1:0", files, now) as port:
            assert port is not None
            return await ask(port, b"GET /metrics HTTP/1.1\r\n\r\n")

    found = parsed(asyncio.run(looked()).partition(b"\r\n\r\n")[2].decode())
    ((rate, count),) = Journal(alone.state / "samples.jsonl").entries[0]["steps"]
    assert named(found, "device_sample_steps") == count
    assert named(found, "device_sample_epsilon") == pytest.approx(compose([(1.5, rate, count)], 1e-5), rel=1e-6)


def test_a_training_that_is_repeated_is_the_same_and_another_one_has_its_own_noise(tmp_path: Path) -> None:
    """What is drawn for another broadcast in a round differs by more than the broadcasts do, and is paid for."""
    alone = Alone(tmp_path, training={"epochs": 1, "batch": "all"}, sample_privacy={"noise": 50.0, "clip": 1e-3})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalClient, "train", killed_after_noise)
        with pytest.raises(KeyboardInterrupt):
            alone.trained(alone.first)
    assert alone.lines == [(0, 0)]
    assert alone.started().state.pending is None
    first = alone.trained(alone.first)
    assert alone.lines == [(0, 0)]
    second = alone.trained(alone.second)
    assert alone.lines == [(0, 0), (0, 1)]
    assert alone.trained(alone.first) == first
    assert alone.lines == [(0, 0), (0, 1)]
    like = alone.started()._upload
    one, other = (wire.dense(wire.decode(data, wire.dense(like))) for data in (first, second))
    assert float(one.loss) == float(other.loss) == 0.0
    numbers = [torch.cat([leaf.flatten() for leaf in upload.change.values()]) for upload in (one, other)]
    both = torch.stack(numbers)
    assert abs(float(torch.corrcoef(both)[0, 1])) < 0.5


def killed_after_noise(self: LocalClient, round_: int, model: str, broadcast: bytes) -> None:
    """Train, and be killed before anything is kept of it."""
    assert self.protected is not None
    self.protected.begin(round_, self.side.learners.rule.phases, broadcast, self.state.newest)
    raise KeyboardInterrupt


def test_a_device_trains_no_more_when_its_budget_is_spent(tmp_path: Path) -> None:
    """A pass at z = 2 costs 1.99 and two cost 2.94, of 2.5: the second update is of no step."""
    alone = Alone(
        tmp_path,
        sample_privacy={"noise": 2.0, "epsilon": 2.5, "sampling": "epochs"},
        training={"epochs": 1, "batch": 16},
    )
    for round_, still in ((0, False), (1, True)):
        client = alone.started()
        client.train(round_, "0" * 64, alone.first)
        change = client.pending_upload().change
        assert all(bool((leaf == 0).all()) for leaf in change.values()) is still
        client.state.accepted()
    assert alone.lines == [(0, 0)]
    assert alone.started().protected.epsilon == pytest.approx(compose([(2.0, 1.0, 1)], 1e-5))  # type: ignore[union-attr]


def test_what_was_lost_is_missed(tmp_path: Path) -> None:
    alone = Alone(tmp_path)
    alone.trained(alone.first)
    key = alone.state / "samples.key"
    kept = key.read_bytes()
    key.unlink()
    with pytest.raises(BadInput, match=r"samples\.key: was lost"):
        alone.started()
    key.write_bytes(kept[:-1])
    with pytest.raises(BadInput, match=r"samples\.key: is damaged"):
        alone.started()
    key.write_bytes(kept)
    (alone.state / "samples.jsonl").unlink()
    with pytest.raises(BadInput, match=r"samples\.jsonl: was lost"):
        alone.started()


def test_without_an_accountant_noise_is_drawn_and_a_budget_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    monkeypatch.setattr(protecting.importlib.util, "find_spec", lambda name: None)
    alone = Alone(tmp_path / "noise")
    client = alone.started()
    client.train(0, "0" * 64, alone.first)
    assert client.protected is not None
    assert (client.protected.epsilon, client.protected.facts()) == (None, {})
    assert client.protected.steps > 0
    with pytest.raises(BadInput, match="dp-accounting is not installed"):
        Alone(tmp_path / "budget", sample_privacy={**NOISY, "epsilon": 3.0}).started()


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ({"least_sample_noise": 2.0}, r"least_sample_noise = 2.0: the recipe has sample_privacy.noise = 1.5"),
        ({"most_sample_epsilon": 4.0}, r"most_sample_epsilon = 4.0: the recipe has no sample_privacy.epsilon"),
        ({"most_sample_delta": 1e-6}, r"most_sample_delta = 1e-06: the recipe has sample_privacy.delta = 1e-05"),
    ],
)
def test_a_policy_may_ask_for_more(policy: dict[str, float], said: str, tmp_path: Path) -> None:
    alone = Alone(tmp_path)
    with pytest.raises(BadInput, match=said):
        alone.started(Policy(**policy))
    plain_ = recipe_of("fedavg", data=DATA)
    with pytest.raises(BadInput, match="has no sample_privacy"):
        Policy(**policy).check_recipe(plain_, ("",), "the recipe")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sample_privacy": {"epsilon": 3.0}}, r"sample_privacy.noise: on real devices it is a number"),
        ({"data": SMALL["data"]}, r"data.normalize: 'auto' adds up .* \[sample_privacy\] does not cover"),
        ({"method": "fedrod"}, "sample_privacy: fedrod looks at samples otherwise"),
    ],
)
def test_refused_before_any_device_is_asked(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        deployable(guarded(**changes))


def test_a_device_refuses_what_its_server_should_have(tmp_path: Path) -> None:
    """A recipe with a method that looks at samples otherwise is trained nowhere."""
    alone = Alone(tmp_path)
    text = alone.served.to_toml().replace('"fedavg"', '"fedrod"').encode()
    data = str(tmp_path / "device-1.safetensors")
    with pytest.raises(BadInput, match="fedrod looks at samples otherwise"):
        LocalClient.opened(text, "the recipe", data, 1, None, tmp_path / "other", "0" * 32)
