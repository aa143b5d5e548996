"""Device profiles: who gets which network and bits, what comes out of such runs, and what is refused."""

from __future__ import annotations

import json
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import personafl
from crash_driver import differences, outcome
from personafl import BadInput, Recipe, api, cli
from personafl.algorithms import METHODS, Training
from personafl.algorithms.averaging import Averaging, Model
from personafl.algorithms.fedavg import FedAvgClient
from personafl.algorithms.local import LocalClient
from personafl.algorithms.personal import Personal
from personafl.core.algorithm import Algorithm, ClientRule, Problem
from personafl.core.batches import Data, Steps
from personafl.core.optim import Sgd
from personafl.core.tree import Params, Tree
from personafl.data.build import load
from personafl.evaluate.choice import Gains
from personafl.evaluate.score import Scores
from personafl.models.cost import multiply_adds
from personafl.models.modelfile import card_of
from personafl.recipe.devices import DeviceSection
from personafl.runs.build import prepare
from personafl.runs.given import Given
from personafl.runs.job import Job
from personafl.runs.listener import Progress
from personafl.runs.profiles import deal
from personafl.runs.result import _with_choice
from personafl.runs.scoring import Scored
from personafl.runs.trying import SHARES

SMALL: dict[str, Any] = {
    "rounds": 3,
    "data": {"partition": {"kind": "quantity", "clients": 12, "alpha": 3.0}, "unseen": 3, "validation": 0.2},
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"epochs": 1, "batch": 16},
    "federation": {"cohort": 6},
    "method": {"name": "local", "alone_epochs": 2},
    "evaluation": {"every": 0},
    "engine": {"threads": 1, "dtype": "float64"},
}
PHONE = {"name": "phone", "share": 0.5, "model": {"name": "mlp", "hidden": [16]}}
LAPTOP = {"name": "laptop", "share": 0.25, "model": {"name": "cnn", "channels": [4, 4], "hidden": 12}}
TABLET = {"share": 0.25}  # the shared network; its name is "devices 3"
THREE = [PHONE, LAPTOP, TABLET]
SIZES = {"phone": 64 * 16 + 16 + 16 * 10 + 10, "laptop": 4 * 9 + 4 + 16 * 9 + 4 + 16 * 12 + 12 + 130, "devices 3": 610}


def recipe(*devices: Mapping[str, Any], **sections: Any) -> dict[str, Any]:
    changed = {k: {**SMALL.get(k, {}), **v} if isinstance(v, dict) else v for k, v in sections.items()}
    return {**SMALL, **changed, "devices": list(devices)}


def ready(*devices: Mapping[str, Any], **sections: Any) -> Job:
    return prepare(Recipe.parse(recipe(*devices, **sections)))


def sections(*devices: Mapping[str, Any]) -> list[DeviceSection]:
    return list(Recipe.parse(recipe(*devices)).devices)


@dataclass(frozen=True, kw_only=True)
class BesideClient(ClientRule):
    """FedAvg, and beside it a model of one's own, of any architecture, that is trained alone."""

    shared: FedAvgClient
    own: LocalClient

    @property
    def phases(self) -> Mapping[str, Steps]:
        return {**self.shared.phases, **self.own.phases}

    @property
    def tuning(self) -> Mapping[str, Steps]:
        return self.own.tuning

    def init(self, problem: Problem, down: Model, generator: torch.Generator) -> Personal:
        return self.own.init(problem, None, generator)  # type: ignore[arg-type]

    def update(self, problem: Problem, down: Model, state: Personal, data: Data) -> tuple[Tree, Tree]:
        own, _ = self.own.update(problem, None, state, data)  # type: ignore[arg-type]
        return own, self.shared.update(problem, down, None, data)[1]  # type: ignore[arg-type]

    def personalize(self, problem: Problem, down: Model, state: Personal, data: Data) -> Personal:
        return self.own.personalize(problem, None, state, data)  # type: ignore[arg-type]

    def models(self, problem: Problem, down: Model, state: Personal) -> dict[str, Params]:
        return {"global": down.model, "personal": state.model}


def beside() -> Algorithm:
    training = Training(work=Steps(epochs=1, batch=16), optimizer=Sgd(lr=0.1))
    client = BesideClient(shared=FedAvgClient(training=training), own=LocalClient(training=training, alone=training))
    return Algorithm("beside", client, Averaging(), own_networks=True, uses_bits=True)


# --- who gets which ---


def counts(profile: Any, members: Any) -> list[int]:
    return np.bincount(profile[members], minlength=3).tolist()


def test_shares_are_dealt_by_largest_remainder() -> None:
    """Of 7 seen: 3.5, 2.1, 1.4 are 3, 2, 1 and the one left goes to 0.5; of 2 unseen: 1, 0.6, 0.4 are 1, 1, 0."""
    data = load(Recipe.parse(recipe(data={"partition": {"kind": "iid", "clients": 9}, "unseen": 2})).data, 0)
    devices = sections({"share": 0.5}, {"share": 0.3}, {"share": 0.2})
    profile = deal(devices, data, 0)
    assert (counts(profile, data.seen), counts(profile, data.unseen)) == ([4, 2, 1], [1, 1, 0])
    assert np.array_equal(profile, deal(devices, data, 0))
    others = [deal(devices, data, seed) for seed in range(1, 9)]
    assert all(counts(other, data.seen) == [4, 2, 1] for other in others)
    assert len({other.tobytes() for other in others}) > 4
    thirds = sections(*[{"share": 1 / 3}] * 3)
    assert counts(deal(thirds, data, 0), data.seen) == [3, 2, 2]  # a tie goes to the first


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(0, 5))
def test_no_share_is_off_by_a_client(parts: list[int], seed: int) -> None:
    data = _DIGITS
    assume(min(parts) * len(data.seen) >= sum(parts))  # else a device may have no client
    profile = deal([DeviceSection(share=part / sum(parts)) for part in parts], data, seed)
    for members in (data.seen, data.unseen):
        found = np.bincount(profile[members], minlength=len(parts))
        assert found.sum() == len(members)
        assert (abs(found - np.array(parts) / sum(parts) * len(members)) < 1).all()


_DIGITS = load(Recipe.parse({"data": {"partition": {"kind": "iid", "clients": 23}, "unseen": 6}}).data, 0)


def test_names_and_sizes() -> None:
    """A client is in the range that its training samples are in, ends included, unless it is named."""
    data = load(Recipe.parse(SMALL).data, 0)
    order = np.argsort(data.train.sizes, kind="stable")
    sizes = data.train.sizes[order]
    low, high = int(sizes[4]), int(sizes[8])
    assert sizes[0] < low < high < sizes[-1]
    named = [data.client_names[order[-1]], data.client_names[order[0]]]
    profile = deal(
        sections({"max_samples": low}, {"clients": named}, {"min_samples": low + 1, "max_samples": high - 1},
                 {"min_samples": high}),
        data, 0,
    )  # fmt: skip
    expected = np.where(data.train.sizes <= low, 0, np.where(data.train.sizes < high, 2, 3))
    expected[[order[-1], order[0]]] = 1
    assert np.array_equal(profile, expected)
    assert set(profile.tolist()) == {0, 1, 2, 3}


def test_profiles_become_problems() -> None:
    """One problem and engine per profile; all share one network, and equal sections are one network too."""
    fed = ready(PHONE, LAPTOP, {"share": 0.25, "model": {"name": "mlp", "hidden": [16]}}).federation
    assert [problem.personal_net.parameters for problem in fed.problems] == [1210, SIZES["laptop"], 1210]
    assert len({id(problem.net) for problem in fed.problems}) == 1
    assert fed.problems[0].local_net is fed.problems[2].local_net
    assert [engine.strategy for engine in fed.engines] == ["stacked", "sequential", "stacked"]
    assert all(problem.bits is None for problem in fed.problems)
    assert fed.problems[0].personal_net.init(torch.Generator()).keys() == fed.problems[0].net.shapes.keys()


def test_the_shared_network_by_its_own_name_is_the_shared_network() -> None:
    same = {"share": 0.5, "model": {"name": "mlp", "hidden": [8]}}
    fed = ready(same, {"share": 0.5}).federation
    assert all(problem.personal_net is problem.net for problem in fed.problems)
    fed = ready(same, {"share": 0.5}, model={"adapter": "lora"}).federation  # not with adapters
    assert fed.problems[0].personal_net is not fed.problems[0].net
    assert fed.problems[0].personal_net.parameters == 610
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    given = Given(model=module)  # an object has no name
    fed = prepare(Recipe.parse(recipe(same, {"share": 0.5})), given=given).federation
    assert [problem.personal_net.parameters for problem in fed.problems] == [610, 650]


def test_a_printed_recipe_can_be_given_devices() -> None:
    text = Recipe.parse({}).to_toml() + "[[devices]]\nshare = 1\n"
    assert Recipe.parse(tomllib.loads(text)).devices == (DeviceSection(share=1),)


def test_bits_reach_the_problem() -> None:
    devices = {"share": 0.5, "bits": 1}, {"share": 0.5, "bits": 8}
    fed = prepare(Recipe.parse(recipe(*devices)), given=Given(algorithm=beside())).federation
    assert [problem.bits for problem in fed.problems] == [1, 8]


def test_penalties_reach_the_problem_and_the_weights() -> None:
    """Uploads count n_i γ_i, or γ_i where all count alike; the population is the sum over who takes part."""
    devices = {"share": 0.25, "penalty": 0.2}, {"share": 0.75, "penalty": 1.0}
    for weights in ("examples", "uniform"):
        values = recipe(*devices, federation={"weights": weights}) | {"method": {"name": "fedbcdi"}}
        fed = prepare(Recipe.parse(values)).federation
        assert [problem.penalty for problem in fed.problems] == [0.2, 1.0]
        samples = fed.data.train.sizes if weights == "examples" else np.ones(fed.data.clients)
        expected = samples * np.array([0.2, 1.0])[fed.problem_of]
        assert fed.roster.weights_of(fed.data.seen).tolist() == expected[fed.data.seen].tolist()
        assert fed.roster.population == pytest.approx(expected[fed.data.seen].sum())


def test_methods_that_allow_it_say_so() -> None:
    assert METHODS["local"].build(Training()).own_networks
    assert not METHODS["local"].build(Training()).uses_bits
    assert not METHODS["fedavg"].build(Training()).own_networks


# --- runs ---


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("devices") / "mixed"
    api.run(recipe(*THREE), out=path)
    return path


def test_every_client_is_as_in_a_run_where_all_have_its_device(mixed: Path, tmp_path: Path) -> None:
    """Scores per group of devices: each equals that of a run in which the group's network is the shared one."""
    table = api.Result.load(mixed).clients
    assert Counter(table.device[table.clients == "seen"]) == {"phone": 5, "laptop": 2, "devices 3": 2}
    assert Counter(table.device[table.clients == "unseen"]) == {"phone": 1, "laptop": 1, "devices 3": 1}
    for device in THREE:
        name = device.get("name", "devices 3")
        model = device.get("model", SMALL["model"])
        pure = api.run({**SMALL, "model": model}, out=tmp_path / str(name)).clients
        assert "device" not in pure
        mine, other = table[table.device == name], pure[table.device == name]
        for key in ("personal_test_accuracy", "personal_test_loss", "personal_validation_loss"):
            np.testing.assert_allclose(mine[key].astype(float), other[key].astype(float), rtol=0, atol=1e-10)
        assert not np.allclose(
            table[table.device != name].personal_test_loss.astype(float),
            pure[table.device != name].personal_test_loss.astype(float),
        )


def test_rows_and_tables_of_a_mixed_run(mixed: Path) -> None:
    """Parameters are means over clients: of 9 seen, 5 with 1210, 2 of the CNN and 2 with 610."""
    result = api.Result.load(mixed)
    header, *lines = (mixed / "clients.csv").read_text().splitlines()
    assert header.split(",")[:5] == ["client", "name", "clients", "device", "train"]
    assert [line.split(",")[3] for line in lines] == result.columns["device"]
    parameters = {row["clients"]: row["parameters"] for row in result.rows if row["split"] == "test"}
    seen = (5 * SIZES["phone"] + 2 * SIZES["laptop"] + 2 * SIZES["devices 3"]) / 9
    assert parameters == {"seen": round(seen), "unseen": round(sum(SIZES.values()) / 3)}
    assert {row["model"] for row in result.rows} == {"personal"}
    assert all(row["count"] == {"seen": 9, "unseen": 3}[row["clients"]] for row in result.rows)


class Crash(BaseException):
    """Ends a run from within."""


def crash_after(rounds: int) -> Callable[[Any], None]:
    def listener(progress: Any) -> None:
        if isinstance(progress, Progress) and progress.done >= rounds:
            raise Crash

    return listener


def test_resume_comes_to_the_same_bits(mixed: Path, tmp_path: Path) -> None:
    values = recipe(*THREE, engine={"checkpoint_seconds": 0.0, "dtype": "float32"})
    api.run(values, out=tmp_path / "straight")
    for rounds in (1, 2):
        with pytest.raises(Crash):
            api.run(values, out=tmp_path / f"stopped{rounds}", listener=crash_after(rounds))
        api.resume(tmp_path / f"stopped{rounds}")
        assert differences(outcome(tmp_path / f"stopped{rounds}"), outcome(tmp_path / "straight")) == []
    with pytest.raises(BadInput, match=r"begun with another recipe \(see devices\)"):
        api.run({**values, "devices": THREE[::-1]}, out=tmp_path / "stopped1", resume=True)


def test_models_of_all_devices_load_from_their_files_alone(mixed: Path, tmp_path: Path) -> None:
    exported = personafl.export(mixed, tmp_path / "out", "all")
    columns = api.Result.load(mixed).columns
    recipe_ = Recipe.parse(SMALL)
    data = load(recipe_.data, recipe_.seed)
    device_of = dict(zip(columns["name"], columns["device"], strict=True))
    assert len(exported.models) == 12
    for model in exported.models:
        assert model.client is not None
        device = device_of[model.client]
        network, card = personafl.load_model(model.file), card_of(model.file)
        assert sum(value.numel() for value in network.parameters()) == SIZES[device] == model.parameters_dense
        assert card.network.name == ("cnn" if device == "laptop" else "mlp")
        assert card.network.options.get("hidden") == {"phone": [16], "laptop": 12, "devices 3": [8]}[device]
        rows = data.test[data.client_names.index(model.client)]
        x = data.x[rows].double()
        hits = network(x).argmax(-1) == data.y[rows]
        assert float(hits.double().mean()) == pytest.approx(model.test_accuracy, abs=1e-9)
        assert model.multiply_adds == multiply_adds(network, x[:1])
    assert len({model.multiply_adds for model in exported.models}) == 3


def test_a_global_model_beside_own_networks(tmp_path: Path) -> None:
    """All are scored with the global model; only those who have its network in full precision choose."""
    devices = [PHONE, {**LAPTOP, "model": None, "bits": 2}, TABLET]
    values = recipe(*({k: v for k, v in device.items() if v is not None} for device in devices))
    result = api.run(values, algorithm=beside(), out=tmp_path / "run")
    table = result.clients
    columns = ["global_test_accuracy", "personal_test_accuracy", "chosen_test_accuracy"]
    assert table[columns].notna().all(axis=None)
    bound = table[table.device != "devices 3"]
    assert (bound.chosen_test_accuracy == bound.personal_test_accuracy).all()
    assert (bound.chosen_test_loss == bound.personal_test_loss).all()
    free = table[table.device == "devices 3"]
    assert len(free) == 3
    assert {(row["model"], row["clients"]) for row in result.rows} >= {("chosen", "seen"), ("chosen", "unseen")}
    assert all(row["count"] == {"seen": 9, "unseen": 3}[row["clients"]] for row in result.rows)
    plain = api.run({**SMALL}, algorithm=beside(), out=tmp_path / "plain").clients
    np.testing.assert_allclose(table.global_test_loss.astype(float), plain.global_test_loss.astype(float), atol=1e-10)
    exported = personafl.export(tmp_path / "run", clients="all", algorithm=beside())
    assert exported.models[0].parameters_dense == 610
    assert personafl.load_model(exported.models[0].file)(torch.zeros(2, 1, 8, 8).double()).shape == (2, 10)


def test_who_cannot_choose_is_no_evidence_for_the_others() -> None:
    """The choice of six clients is the same with two others beside them, who keep their own models."""
    draw = np.random.default_rng(0)
    names = [*(f"blend {share}" for share in SHARES), "personal"]
    samples = np.full(6, 10)

    def scores() -> Scores:
        return Scores(draw.random(6), draw.random(6), samples)

    def gains() -> Gains:
        right, sure = draw.integers(0, 8, 6).astype(float), draw.random(6) * 3
        return Gains(right, right + 1, sure, sure + 1, sure, samples)

    free = Scored(
        {(name, "test"): scores() for name in ("global", *names)}, {name: gains() for name in names}, np.ones(6, bool)
    )

    def among(values: Any, filler: float) -> Any:
        given = {key: value for key, value in vars(values).items() if isinstance(value, np.ndarray)}
        kinds = {key: np.full(2, 0 if value.dtype.kind == "i" else filler) for key, value in given.items()}
        return type(values)(**{key: np.concatenate([kinds[key], value]) for key, value in given.items()})

    whole = Scored(
        {key: among(part, 0.5 if key[0] in ("global", "personal") else np.nan) for key, part in free.scores.items()},
        {name: among(part, np.nan) for name, part in free.gains.items()},
        np.r_[np.zeros(2, bool), np.ones(6, bool)],
    )
    alone, together = (_with_choice(part, 0.3)["chosen", "test"] for part in (free, whole))
    assert np.array_equal(together.accuracy[2:], alone.accuracy)
    assert np.array_equal(together.accuracy[:2], [0.5, 0.5])
    assert (alone.accuracy != free.scores["personal", "test"].accuracy).any()


def test_fine_tuned_and_unevenly_sized_clients(tmp_path: Path) -> None:
    """With fine-tuning for all, the sizes of "tuned" models count every device, also where few took part in a round."""
    devices = [{"max_samples": 60, "model": {"name": "mlp", "hidden": [16]}}, {"min_samples": 61}]
    result = api.run(recipe(*devices, finetune=True, rounds=1, federation={"cohort": 2}), out=tmp_path / "run")
    small = np.array(result.columns["train"]) <= 60
    assert result.columns["device"] == ["devices 1" if own else "devices 2" for own in small]
    for row in result.rows:
        own = small[np.array(result.columns["clients"]) == row["clients"]]
        assert row["parameters"] == round(np.where(own, 1210, 610).mean())
    assert {row["model"] for row in result.rows} == {"personal", "tuned"}


def test_profiles_may_only_name_groups(tmp_path: Path) -> None:
    """Any method takes profiles that ask for nothing: the numbers are those of a run without them."""
    method = {"name": "ditto", "tune_epochs": 1}
    plain = api.run({**SMALL, "method": method}, out=tmp_path / "plain")
    grouped = api.run({**recipe({"share": 0.5}, {"share": 0.5}), "method": method}, out=tmp_path / "grouped")
    assert set(grouped.columns["device"]) == {"devices 1", "devices 2"}
    for key, values in plain.columns.items():
        if key.endswith("loss"):
            np.testing.assert_allclose(values, grouped.columns[key], rtol=0, atol=1e-10)
    assert [row["parameters"] for row in plain.rows] == [row["parameters"] for row in grouped.rows]


def test_pretraining_has_no_devices(tmp_path: Path) -> None:
    values = recipe(*THREE, pretrain={"rounds": 1})
    api.run(values, out=tmp_path / "run")
    assert Recipe.parse(values).for_pretraining().devices == ()  # type: ignore[union-attr]
    assert "device" not in api.Result.load(tmp_path / "run/pretrain").columns
    assert "device" in api.Result.load(tmp_path / "run").columns


@pytest.mark.system
def test_a_comparison_deals_alike(tmp_path: Path) -> None:
    """Methods and variants of a seed see the same devices; a method that cannot use them is refused before any run."""
    variants = {"longer": {"method": {"name": "local", "alone_epochs": 3}}}
    compare = {"methods": ["local", "longer", "fedavg"], "variants": variants}
    with pytest.raises(
        BadInput, match=r"^fedavg: devices: fedavg .*compare\.variants\.fedavg\.devices = \[\]; or leave out .*"
    ):
        api.compare(recipe(*THREE, rounds=1, compare=compare), seeds=[0, 1], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    compare["variants"] = {**variants, "fedavg": {"devices": []}}
    found = api.compare(recipe(*THREE, rounds=1, compare=compare), seeds=[0, 1], out=tmp_path / "out")
    devices = [result.columns.get("device") for result in found.results]
    assert devices[0] == devices[1] != devices[3] == devices[4]
    assert devices[2] is devices[5] is None


def test_the_command_line(mixed: Path, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def main(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["personafl", *words])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        assert not exit_.value.code, capsys.readouterr().err
        return capsys.readouterr().out

    monkeypatch.setattr(sys, "path", [*sys.path])
    assert "personal" in main("show", str(mixed))
    parameters = next(row["parameters"] for row in api.Result.load(mixed).rows if row["clients"] == "seen")
    assert f"{parameters:,}" in main("show", str(mixed), "--details")
    assert "12 clients" in main("export", str(mixed), "--all-clients", "--out", str(tmp_path / "out"), "--quiet")
    file = tmp_path / "own.toml"
    file.write_text(
        'rounds = 1\nmodel.name = "mlp"\n'
        '[[devices]]\nshare = 0.5\nmodel = { name = "linear" }\n[[devices]]\nshare = 0.5\n'
    )
    text = main("recipe", str(file))
    (tmp_path / "whole.toml").write_text(text)
    assert main("recipe", str(tmp_path / "whole.toml")) == text
    words = ("--method", "local", "--partition", "iid:clients=4", "--out", str(tmp_path / "run"), "--quiet", "--json")
    rows = json.loads(main("run", str(tmp_path / "whole.toml"), *words))["rows"]
    assert rows[0]["parameters"] == (650 + 64 * 64 + 64 + 650) / 2
    described = main("model", "describe", str(file), "--partition", "iid:clients=4", "method.name=local")
    assert "Measured for this method" in described


# --- what is refused ---

HALF = {"share": 0.5}
WHOLE = {"share": 1.0}
RECIPES: list[tuple[list[Any], str]] = [
    ([{"bits": 2}], r"^devices\[0\]: say whose it is in one way: share, clients, or min_samples and max_samples$"),
    ([{**HALF, "min_samples": 3}, HALF], r"^devices\[0\]: say whose it is in one way"),
    ([HALF, {**HALF, "clients": ["1"]}], r"^devices\[1\]: say whose it is in one way"),
    ([{"share": 0.5}, {"share": 0.4}], r"^devices\[0\]\.share: the shares add up to 0\.9, not 1; change them"),
    ([{"share": 0.5}, {"share": 0.5 + 1e-8}], r"^devices\[0\]\.share: the shares add up to 1\.00000001, not 1"),
    ([{"share": 0}, WHOLE], r"^devices\[0\]\.share: input should be greater than 0 \(given: 0\)$"),
    ([{"share": 1.5}], r"^devices\[0\]\.share: input should be less than or equal to 1 \(given: 1\.5\)$"),
    ([WHOLE | {"bits": 0}], r"^devices\[0\]\.bits: input should be greater than or equal to 1 \(given: 0\)$"),
    ([HALF, HALF | {"bits": 9}], r"^devices\[1\]\.bits: input should be less than or equal to 8 \(given: 9\)$"),
    ([WHOLE | {"penalty": 0}], r"^devices\[0\]\.penalty: input should be greater than 0 \(given: 0\)$"),
    ([HALF | {"penalty": 1}, HALF], r"^devices\[1\]\.penalty: uploads are weighted by it .*; give it to all, or none$"),
    ([WHOLE | {"bit": 2}], r"^devices\[0\]\.bit: unknown key; did you mean 'bits'\?$"),
    ([HALF, {"clients": ["1"]}], r"^devices\[1\]: devices\[0\] has a share, and shares go with shares only; "),
    ([{"max_samples": 3}, WHOLE], r"^devices\[0\]: devices\[1\] has a share, and shares go with shares only; "),
    ([{"clients": []}], r"^devices\[0\]\.clients: name at least one client"),
    ([{"clients": ["1", "1"]}], r"^devices\[0\]\.clients: '1' is there twice"),
    ([{"clients": [7]}], r"^devices\[0\]\.clients: input should be a valid string \(given: 7\)$"),
    ([{"clients": ["1"]}, {"clients": ["2", "1"]}], r"^devices\[1\]\.clients: '1' is in devices\[0\] too; remove it"),
    ([{"min_samples": 9, "max_samples": 8}], r"^devices\[0\]: min_samples = 9 is above max_samples = 8; swap them$"),
    (
        [{"max_samples": 50}, {"min_samples": 50}],
        r"^devices\[1\]\.min_samples: 50 samples and more overlaps with 0 to 50 samples of devices\[0\]; both ends",
    ),
    ([{"min_samples": 9}, {"max_samples": 9}], r"^devices\[1\]\.max_samples: 0 to 9 samples overlaps with 9 samples"),
    ([{"min_samples": 1}, {"min_samples": 7}], r"^devices\[1\]\.min_samples: .* overlaps with 1 samples and more"),
    ([{"min_samples": -1}], r"^devices\[0\]\.min_samples: input should be greater than or equal to 0"),
    ([HALF | {"name": "a"}, HALF | {"name": "a"}], r"^devices\[1\]\.name: 'a' is there twice; choose another name$"),
    ([HALF | {"name": "devices 2"}, HALF], r"^devices\[1\]\.name: 'devices 2' is there twice"),
    (
        [WHOLE | {"model": 5}],
        r"^devices\[0\]\.model: is a section, not a value .*write devices\[0\]\.model\.name=…$",
    ),
    (
        [WHOLE | {"model": {"name": "mlp", "personal": "output"}}],
        r"^devices\[0\]\.model: a client's own network is personal as a whole; remove personal$",
    ),
    (["phone"], r"^devices\[0\]: is a section, not a value"),
]


@pytest.mark.parametrize(("devices", "message"), RECIPES)
def test_recipes_that_cannot_be(devices: list[Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Recipe.parse({"devices": devices})


@pytest.mark.parametrize("devices", [{"bits": 2}, 3, "phone"])
def test_devices_are_a_list(devices: Any) -> None:
    with pytest.raises(BadInput, match=r"^my\.toml: devices: is a list of sections; write \[\[devices\]\]"):
        Recipe.parse({"devices": devices}, "my.toml")


RUNS: list[tuple[list[dict[str, Any]], str]] = [
    ([{"clients": ["1", "99"]}, {"min_samples": 0}], r"^devices\[0\]\.clients: there is no client '99'; did you mean"),
    ([{"clients": ["zz"]}], r"^devices\[0\]\.clients: there is no client 'zz'; valid: 0, 1, 10"),
    ([{"clients": ["0", "1"]}], r"^devices: 10 of 12 clients are in no entry \(2, .*\); add an entry with their names"),
    ([{"min_samples": 40}], r"^devices: \d of 12 clients are in no entry .* to [123]\d training samples\); add"),
    ([{"min_samples": 0, "max_samples": 9999}, {"min_samples": 10000}], r"^devices\[1\]\.min_samples: no client gets"),
    ([{"max_samples": 0}, {"min_samples": 1}], r"^devices\[0\]\.max_samples: no client gets .*; change it, or remove"),
    ([{"share": 0.99}, {"share": 0.01}], r"^devices\[1\]\.share: no client gets this device \(of 12 clients\); change"),
    ([WHOLE | {"model": {"name": "cnn9"}}], r"^devices\[0\]\.model\.name: no model 'cnn9'; did you mean 'cnn"),
    (
        [HALF, HALF | {"model": {"name": "mlp", "width": 3}}],
        r"^devices\[1\]\.model\.width: unknown key; valid: buffers, dropout, hidden, name, norm$",
    ),
    ([WHOLE | {"model": {"name": "mlp", "hidden": [0]}}], r"^devices\[0\]\.model\.hidden: input should be greater"),
    ([WHOLE | {"model": {"name": "cnn1"}}], r"^devices\[0\]\.model: 'cnn1' cannot be built .*at least 16×16"),
    ([WHOLE | {"model": {"name": "bag"}}], r"^devices\[0\]\.model\.name: 'bag' is for text"),
    (
        [WHOLE | {"bits": 2}],
        r"^devices: local keeps every weight in full precision and has no use for devices\[0\]\.bits",
    ),
    (
        [WHOLE | {"penalty": 1.0}],
        r"^devices: local has no penalty .*remove it, use a method that can \(fedbcd, fedbcdi\)",
    ),
]


@pytest.mark.parametrize(("devices", "message"), RUNS)
def test_runs_that_cannot_start(tmp_path: Path, devices: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        api.run(recipe(*devices), out=tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_pull_goes_no_further_than_the_shared_model() -> None:
    with pytest.raises(
        BadInput, match=r"^devices\[0\]\.penalty: 1\.5 is above 1, the most that fedbcdi allows; lower it$"
    ):
        prepare(Recipe.parse(recipe(WHOLE | {"penalty": 1.5}) | {"method": {"name": "fedbcdi"}}))
    prepare(Recipe.parse(recipe(WHOLE | {"penalty": 1.5}) | {"method": {"name": "fedbcd"}}))


@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedalt"])
def test_methods_of_one_network_refuse_others(tmp_path: Path, method: str) -> None:
    """The error names a method that can."""
    message = rf"^devices: {method} trains the shared .*devices\[1\]\.model; remove it, use a method that can \(local"
    with pytest.raises(BadInput, match=message):
        api.run(recipe(HALF, PHONE, model={"personal": "output"}) | {"method": {"name": method}}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
