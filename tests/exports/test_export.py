"""The models of a run as files: what is in them is what the run has, and whoever loads them gets it back."""

import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from rich.console import Console
from torch import Tensor, nn

import personafl
from models.cases import CHARACTERS, SPEECH, TRANSFORMER, WORDS
from personafl import BadInput, cli
from personafl.api.display import Display
from personafl.cli.tables import export_tables
from personafl.core import wire
from personafl.core.tree import Params
from personafl.data.build import load as load_data
from personafl.exports.export import Exported, _file_names
from personafl.models.cost import multiply_adds
from personafl.models.factored import FactoredConv2d, FactoredLinear
from personafl.models.modelfile import Normalized, card_of, compacted, pack, summed
from personafl.recipe.recipe import Recipe
from personafl.recipe.values import read_toml
from personafl.runs.build import prepare
from personafl.runs.result import Result
from personafl.runs.scoring import stages
from personafl.simulate.simulator import Simulation
from personafl.storage.rundir import RunDirectory
from personafl.storage.store import Store

MLP = {"model": {"name": "mlp", "hidden": [24]}}
CNN = {"model": {"name": "cnn", "channels": [6, 8], "hidden": 16}}
LOW_RANK = {"name": "fedslr", "rank_penalty": 0.05, "sparsity": 0.02}
Runs = Callable[..., Path]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Run a small recipe on the built-in digits, each once for all tests here; they must not change it."""
    folder, done = tmp_path_factory.mktemp("runs"), {}

    def ran(method: dict[str, Any], **more: Any) -> Path:
        key = json.dumps([method, more], sort_keys=True)
        if key not in done:
            data = {"partition": {"kind": "classes", "clients": 5, "per_client": 4}, "unseen": 1}
            done[key] = folder / f"run{len(done)}"
            personafl.run({"rounds": 3, "data": data, "method": method} | more, out=done[key])
        return done[key]

    return ran


def models_of(run: Path) -> tuple[Params, dict[str, Params]]:
    """Return the dense models as the client rule has them: the global one, and the last one of each client."""
    job = prepare(Recipe.parse(read_toml(run / "recipe.toml")))
    fed, checkpoint = job.federation, RunDirectory(run).checkpoint()
    simulation = Simulation(
        fed, Store(run / "states", 2**20, checkpoint.states), RunDirectory(run).server_bytes(checkpoint)
    )
    tuned, down = Store(run / "tuned", 2**20, checkpoint.tuned), simulation.down()
    own: dict[str, Params] = {}
    shared: Params = {}
    for client, name in enumerate(fed.data.client_names):
        *_, (_, states) = stages(simulation, tuned, 0, down, np.array([client]))  # the last one
        state = torch.utils._pytree.tree_map(lambda leaf: leaf[0], states)
        models = fed.algorithm.client.models(fed.problems[0], down, state)
        shared = models.get("global", {})
        own |= {name: models["personal"]} if "personal" in models else {}
    return shared, own


def named(network: nn.Module) -> Params:
    """Return the weights, also of a network that standardises its inputs."""
    return dict((network.network if isinstance(network, Normalized) else network).named_parameters())


def same_weights(network: nn.Module, params: Params) -> None:
    found = named(network)
    assert found.keys() == params.keys()
    for name, value in params.items():
        assert torch.equal(found[name], value), name


def assert_near(network: nn.Module, params: Params) -> None:
    torch.testing.assert_close(named(network), params, rtol=1e-5, atol=1e-6)


def digits(run: Path) -> Any:
    recipe = Recipe.parse(read_toml(run / "recipe.toml"))
    return load_data(recipe.data, recipe.seed)


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (LOW_RANK, MLP),
    (LOW_RANK, CNN),
    ({**LOW_RANK, "personal": "low-rank", "sparsity": 0.2}, MLP),
    ({**LOW_RANK, "shared": "sparse", "rank_penalty": 0.001}, CNN),
    ({"name": "fedavg"}, MLP),
    ({"name": "local"}, MLP),
    ({"name": "ditto"}, MLP | {"finetune": True}),
    ({"name": "ditto"}, CNN | {"engine": {"dtype": "float64"}}),
    ({"name": "fedspa"}, CNN),
    ({"name": "finetune"}, MLP),
    ({"name": "fedrep"}, MLP),
]
QUICK = (LOW_RANK, {"name": "fedavg"}, {"name": "fedrep"})


@pytest.mark.parametrize(
    ("method", "more"),
    [pytest.param(*case, marks=() if case[0] in QUICK else pytest.mark.system) for case in CASES],
    ids=str,
)
def test_what_is_loaded_is_what_the_run_has(
    runs: Runs, tmp_path: Path, method: dict[str, Any], more: dict[str, Any]
) -> None:
    run = runs(method, **more)
    shared, own = models_of(run)
    exported = personafl.export(run, tmp_path / "out", "all" if own else None)
    result, data = Result.load(run), digits(run)
    x = data.x[:7].to(next(iter((shared or own["0"]).values())).dtype)
    assert [model.client for model in exported.models] == [None] * bool(shared) + list(own)
    for model in exported.models:
        params = shared if model.client is None else own[model.client]
        dense = personafl.load_model(model.file, dense=True)
        if method.get("personal") == "low-rank":  # the method itself packs p by a decomposition, and so rounds it
            assert_near(dense, params)
        else:
            same_weights(dense, params)
        network = personafl.load_model(model.file)
        torch.testing.assert_close(network(x), dense(x), rtol=1e-5, atol=1e-5)
        assert not network.training
        assert model.bytes == os.path.getsize(model.file)
        assert model.multiply_adds == multiply_adds(network, x[:1])
        assert model.multiply_adds_dense == multiply_adds(dense, x[:1])
        assert model.parameters_dense == sum(value.numel() for value in params.values())
        assert model.bytes <= model.bytes_dense
        assert model.parameters <= model.parameters_dense
        assert model.multiply_adds <= model.multiply_adds_dense
        card = card_of(model.file)
        assert (card.method, card.model, card.client) == (method["name"], model.model, model.client)
        assert (card.parameters, card.parameters_dense) == (model.parameters, model.parameters_dense)
        assert model.bytes - card.bytes_packed == model.bytes_dense - card.bytes_dense
        assert (card.input_shape, card.classes, card.task) == ((1, 8, 8), 10, "classification")
        assert (card.dtype, card.bits) == (more.get("engine", {}).get("dtype", "float32"), None)
        assert (model.bytes_fp32 == model.bytes_dense) == (card.dtype == "float32")
        assert model.accuracies == card.accuracies
        assert (model.accuracies.get("global") is not None) == bool(shared)
        if model.client is not None:  # the run scored what is in the file
            rows = data.test[data.client_names.index(model.client)]
            hits = network(data.x[rows].to(x.dtype)).argmax(-1) == data.y[rows]
            assert float(hits.to(torch.float64).mean()) == pytest.approx(model.test_accuracy, abs=1e-9)
    if shared:
        row = next(r for r in result.rows if (r["model"], r["clients"], r["split"]) == ("global", "seen", "test"))
        assert exported.models[0].test_accuracy == row["accuracy"] == card_of(exported.models[0].file).test_accuracy


def test_fedslrs_global_model_is_smaller_on_disk_and_at_work(runs: Runs, tmp_path: Path) -> None:
    for more, kind in ((MLP, FactoredLinear), (CNN, FactoredConv2d)):
        [model] = personafl.export(runs(LOW_RANK, **more), tmp_path / kind.__name__).models
        assert model.parameters < 0.8 * model.parameters_dense
        assert model.bytes < 0.8 * model.bytes_dense
        assert model.multiply_adds < model.multiply_adds_dense
        network = personafl.load_model(model.file)
        assert any(isinstance(layer, kind) for layer in network.modules())
        assert sum(value.numel() for value in network.parameters()) < model.parameters_dense


def test_fine_tuned_models_are_the_last_ones(runs: Runs, tmp_path: Path) -> None:
    run = runs({"name": "ditto"}, **MLP, finetune=True)
    exported = personafl.export(run, tmp_path, "all")
    unseen = [model.client for model in exported.models if model.model == "personal"]  # a newcomer's first one
    assert [model.model for model in exported.models if model.client not in unseen] == ["global"] + ["tuned"] * 4
    assert len(unseen) == 1


def test_an_export_goes_on_where_another_stopped_but_never_among_others_files(runs: Runs, tmp_path: Path) -> None:
    one, other = runs(LOW_RANK, **MLP), runs({"name": "ditto"}, **MLP, finetune=True)
    first = personafl.export(one, tmp_path, ["1"])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(before) == ["client-1.md", "client-1.safetensors", "global.md", "global.safetensors"]
    personafl.export(one, tmp_path, ["2", "1", "2"])
    assert len(list(tmp_path.iterdir())) == 6
    assert all((tmp_path / name).read_bytes() == content for name, content in before.items())
    assert first.models[1].client == "1"
    with pytest.raises(BadInput, match="is there already and not from this run"):
        personafl.export(other, tmp_path)
    with pytest.raises(BadInput, match=r"global.safetensors: is there already"):
        personafl.export(one, one)  # it has a file of that name
    (tmp_path / "others").mkdir()
    for name in ("global.md", "client-9.onnx", "notes.md"):
        (tmp_path / "others" / name).touch()
    with pytest.raises(BadInput, match=r"client-9.onnx: is there already"):
        personafl.export(one, tmp_path / "others")
    (tmp_path / "others/client-9.onnx").unlink()
    with pytest.raises(BadInput, match=r"global.md: is there already"):
        personafl.export(one, tmp_path / "others")
    (tmp_path / "others/global.md").unlink()
    personafl.export(one, tmp_path / "others")
    assert all((tmp_path / name).read_bytes() == content for name, content in before.items())


def test_the_default_is_a_folder_of_the_run(runs: Runs, tmp_path: Path) -> None:
    run = shutil.copytree(runs(LOW_RANK, **MLP), tmp_path / "run")
    exported = personafl.export(run)
    assert exported.models[0].file == run / "export" / "global.safetensors"
    assert exported.models[0].file.exists()


def test_a_run_is_exported_without_what_it_started_from(tmp_path: Path) -> None:
    first = {"data": {"partition": {"kind": "iid", "clients": 2}}, "rounds": 1, **MLP}
    personafl.run(first | {"pretrain": {"rounds": 1}}, out=tmp_path / "one")
    shutil.rmtree(tmp_path / "one/pretrain")
    personafl.export(tmp_path / "one")
    personafl.run(first | {"start": str(tmp_path / "one"), "rounds": 0}, out=tmp_path / "two")
    weights = wire.decode_named((tmp_path / "one/global.safetensors").read_bytes())
    shutil.rmtree(tmp_path / "one")
    [model] = personafl.export(tmp_path / "two").models
    same_weights(personafl.load_model(model.file), weights)


@pytest.mark.parametrize(
    ("data", "model"),
    [
        (WORDS, {"name": "bag", "width": 4}),
        (CHARACTERS, {"name": "transformer", **TRANSFORMER, "dropout": 0.5, "personal": "adapter"}),
        (SPEECH, {"name": "speech", **TRANSFORMER, "adapter": "lora", "adapter_size": 2}),
    ],
)
def test_tokens_sequences_and_adapters(tmp_path: Path, data: Any, model: dict[str, Any]) -> None:
    method = {"name": "fedslr", "rank_penalty": 0.002}
    personafl.run({"rounds": 1, "method": method, "model": model}, data=data, out=tmp_path / "run")
    with pytest.raises(BadInput, match=r"data=…"):
        personafl.export(tmp_path / "run")
    exported = personafl.export(tmp_path / "run", clients="all", data=data)
    shared = wire.decode_named((tmp_path / "run/global.safetensors").read_bytes())
    file = exported.models[0].file
    same_weights(personafl.load_model(file, dense=True), shared)
    outputs = personafl.load_model(file)(data.x), personafl.load_model(file, dense=True)(data.x)
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
    assert outputs[0].shape[-1] == 3
    assert card_of(file).vocabulary == (None if data is SPEECH else data.vocabulary)


OWN = """
from torch import nn

class Own(nn.Sequential):
    def __init__(self, input_shape, classes, *, width=3):
        super().__init__(nn.Flatten(), nn.Linear(64, width), nn.Dropout(), nn.Linear(width, classes))

def build(classes, note="called.txt"):
    open(note, "w").close()
    return Own((64,), classes)
"""


def test_networks_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class is found by its name; for an object, or what a function makes, the module is given. None is called."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_network.py").write_text(OWN)
    recipe = {"rounds": 1, "data": {"partition": {"kind": "iid", "clients": 2}}}
    personafl.run(recipe | {"model": {"name": "own_network:Own", "width": 5}}, out="class")
    [model] = personafl.export("class").models
    shared = wire.decode_named(Path("class/global.safetensors").read_bytes())
    same_weights(personafl.load_model(model.file), shared)

    personafl.run(recipe | {"model": {"name": "own_network:build"}}, out="function")
    [model] = personafl.export("function").models
    (tmp_path / "called.txt").unlink()
    with pytest.raises(BadInput, match=r"no nn.Module class.*module=…"):
        personafl.load_model(model.file)
    assert not (tmp_path / "called.txt").exists()
    own = sys.modules["own_network"].Own
    shared = wire.decode_named(Path("function/global.safetensors").read_bytes())
    same_weights(personafl.load_model(model.file, module=own(64, 10)), shared)

    given = own(64, 10, width=4)
    personafl.run(recipe, model=given, out="object")
    with pytest.raises(
        BadInput, match=r"begun in Python with objects \(model=…\).*personafl.load\('object', model=…\)"
    ):
        personafl.export("object")
    [model] = personafl.export("object", model=given).models
    with pytest.raises(BadInput, match=r"object in Python.*module=…"):
        personafl.load_model(model.file)
    shared = wire.decode_named(Path("object/global.safetensors").read_bytes())
    same_weights(personafl.load_model(model.file, module=own(64, 10, width=4)), shared)
    with pytest.raises(BadInput, match="not those of its network"):
        personafl.load_model(model.file, module=own(64, 10, width=3))
    with pytest.raises(BadInput, match="begun without model=…; leave that out"):
        personafl.export("class", model=given)


def test_runs_that_cannot_be_exported(runs: Runs, tmp_path: Path) -> None:
    run = runs(LOW_RANK, **MLP)
    with pytest.raises(BadInput, match="not the directory of a run; it has no recipe"):
        personafl.export(tmp_path / "nowhere")
    with pytest.raises(BadInput, match=r"export one of those in it: .*run0"):
        personafl.export(run.parent)
    with pytest.raises(BadInput, match=r"no client '11'; did you mean '1'\?"):
        personafl.export(run, tmp_path / "out", ["11"])
    with pytest.raises(BadInput, match="fedavg makes no personal models"):
        personafl.export(runs({"name": "fedavg"}, **MLP), tmp_path / "out", "all")
    with pytest.raises(BadInput, match=r"local has no global model.*--all-clients"):
        personafl.export(runs({"name": "local"}, **MLP), tmp_path / "out")
    half = shutil.copytree(run, tmp_path / "half")
    (half / "result.json").unlink()
    with pytest.raises(BadInput, match=r"not finished \(3 of 3 rounds done\).*personafl resume .*half"):
        personafl.export(half, tmp_path / "out")
    damaged = shutil.copytree(run, tmp_path / "damaged")
    (damaged / "server-000003.safetensors").write_bytes(b"nothing")
    with pytest.raises(
        BadInput, match=r"server-000003\.safetensors: the checkpoint needs this file and it was damaged"
    ):
        personafl.export(damaged, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_that_cannot_be_loaded(runs: Runs, tmp_path: Path) -> None:
    run = runs(LOW_RANK, **MLP)
    file = personafl.export(run, tmp_path / "out").models[0].file
    sound = file.read_bytes()
    whole = sound.replace(b'"crc32":"', b'"older":"')  # files of version 0.1 have no checksum
    bad = tmp_path / "bad.safetensors"

    def refused(content: bytes, why: str) -> None:
        bad.write_bytes(content)
        with pytest.raises(BadInput, match=why) as caught:
            personafl.load_model(bad)
        assert str(bad) in str(caught.value)

    def changed(old: str, new: str) -> bytes:
        assert len(old) == len(new)
        assert old.encode() in whole
        return whole.replace(old.encode(), new.encode())

    with pytest.raises(BadInput, match="No such file"):
        personafl.load_model(tmp_path / "nothing.safetensors")
    with pytest.raises(BadInput, match=f"{tmp_path}: cannot be read"):
        personafl.load_model(tmp_path)
    for length in (0, 5, 100, len(whole) - 1):
        refused(whole[:length], "damaged, or no safetensors file.*personafl export wrote")
    refused(sound[:-1] + bytes([sound[-1] ^ 1]), "was damaged since it was written; give a file that personafl export")
    refused((run / "global.safetensors").read_bytes(), "not a model file of personafl")
    refused(changed('"format_version":"1"', '"format_version":"2"'), "format version 2.*update personafl")
    refused(changed('"classes":"10"', '"classes":"x0"'), "description is damaged .classes")
    refused(changed('"classes":"10"', '"classes":"11"'), "not those of its network")
    refused(changed("0/1.bias", "0/2.bias"), "parameters 1.bias, 2.bias are in one of them only")
    refused(changed('\\"name\\":\\"mlp\\"', '\\"name\\":\\"mlq\\"'), "no nn.Module class")
    tensors = safetensors.torch.load(whole)
    about = {key: text for key, text in safetensors.safe_open(file, "pt").metadata().items() if key != "crc32"}
    tensors["0/1.bias"] = torch.zeros(1)
    refused(safetensors.torch.save(tensors, about), "1.bias should have shape")
    tensors["0/1.bias"] = torch.zeros(24)
    tensors["x/1.bias"] = torch.zeros(24)
    refused(safetensors.torch.save(tensors, about), "not those of its network")


def test_packing_takes_the_least_room() -> None:
    """Of 32×32: factors of rank 1 have 64 numbers, and 3 sparse values beside them 3; a dense residual is added."""
    u, v = torch.arange(32.0)[:, None] + 1, torch.ones(1, 32)
    low = wire.Factored.of(torch.empty(32, 32), u, v)
    few, zero = torch.zeros(32, 32), torch.zeros(32, 32)
    few[0, :3] = 0.5
    shared: dict[str, Any] = dict.fromkeys(("few", "many", "none"), low)
    shared |= {
        "empty": wire.Factored(u[:, :0], v[:0], torch.tensor([32, 32], dtype=torch.int32)),
        "bias": torch.ones(3),
    }
    own = {"few": wire.compact(few), "many": torch.ones(32, 32), "bias": torch.ones(3)}
    own |= {name: wire.compact(zero) for name in ("none", "empty")}
    parts = compacted((shared, own))
    assert parts[1].keys() == {"few"}
    assert all(parts[0][name] is shared[name] for name in ("few", "none", "empty"))
    assert torch.equal(parts[0]["many"], u @ v + 1)
    assert torch.equal(parts[0]["bias"], 2 * torch.ones(3))
    assert wire.parameters(parts) == 64 + 3 + 1024 + 64 + 0 + 3
    whole, again = summed((shared, own)), summed(parts)
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert compacted((shared,)) == (shared,)
    few_sparse = ({"bias": wire.Sparse.of(torch.eye(4)[0])},)  # its file would be larger than that of 4 numbers
    assert torch.equal(compacted(few_sparse)[0]["bias"], torch.eye(4)[0])


def test_equal_models_are_equal_files() -> None:
    parts = ({"a": torch.arange(3.0)},)
    facts = {"run": "1", "client": "Zoë ☂", "method": "x" * 3}
    content = pack(parts, facts)
    assert content == pack(parts, facts)
    header = int.from_bytes(content[:8], "little")
    assert header % 8 == 0
    about = json.loads(content[8 : 8 + header])["__metadata__"]
    assert len(about.pop("crc32")) == 8
    assert about == {"format": "personafl model", "format_version": "1", **facts}
    assert torch.equal(safetensors.torch.load(content)["0/a"], torch.arange(3.0))


def test_file_names_are_safe_and_different() -> None:
    names = ["anna", "Anna", "bob", "a/b", "a_b", "..", "Zoë", "x" * 300, "x" * 301, "", "c.d-e_f"]
    files = _file_names(names)
    assert len({file.lower() for file in files}) == len(names)
    assert files[2] == "client-bob.safetensors"
    assert files[-1] == "client-c.d-e_f.safetensors"
    assert all(set(file) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") for file in files)
    assert max(map(len, files)) < 128
    assert files == _file_names(names)


@pytest.fixture
def main(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[str, str]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("COLUMNS", "80")

    def call(*words: str, code: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["personafl", *words])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        assert (exit_.value.code or 0) == code, captured.err
        return captured.out, captured.err

    return call


def test_the_command(runs: Runs, main: Callable[..., tuple[str, str]]) -> None:
    run = str(runs(LOW_RANK, **CNN))
    text, _ = main("export", run, "--out", "files", "--client", "0", "--client", "3", "--latency", "--batch", "4")
    for word in ("global", "personal", "2 clients", "dense", "exported", "batch of 4", "1 thread", "models: files"):
        assert word in text, word
    assert max(map(len, text.splitlines())) <= 80
    given = json.loads(main("export", run, "--out", "files", "--json")[0])
    assert given.keys() == {"run", "out", "method", "models"}
    [model] = given["models"]
    assert model["file"] == "files/global.safetensors"
    assert model["bytes"] == os.path.getsize(model["file"])
    assert model["latency"] is None
    timed = json.loads(main("export", run, "--out", "files", "--json", "--latency", "--all-clients")[0])["models"]
    assert len(timed) == 1 + 5
    assert [entry["latency"] is not None for entry in timed] == [True, True] + [False] * 4
    for entry in timed[:2]:
        spent = entry["latency"]
        assert all(math.isfinite(spent[key]) and spent[key] > 0 for key in ("dense_ms", "exported_ms"))
        assert (spent["batch"], spent["threads"]) == (20, torch.get_num_threads())
    _, error = main("export", run, "--client", "1", "--all-clients", code=2)
    assert error == "error: --client and --all-clients: give one of them\n"
    _, error = main("export", run, "--client", "nobody", "--out", "files", code=2)
    assert "has no client 'nobody'; valid: 0, 1, 2, 3, 4" in error
    assert "export" in main("--help")[0]


def test_progress_and_the_table_of_many(runs: Runs, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    exported = personafl.export(
        runs({"name": "local"}, **MLP), tmp_path, "all", listener=lambda done, total: told.append((done, total))
    )
    assert told == [(number, 5) for number in range(1, 6)]
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        for part in export_tables(exported):
            console.print(part)
    mean = 100 * np.mean([model.test_accuracy for model in exported.models if model.test_accuracy is not None])
    assert f"{mean:.1f}" in capture.get()
    assert "global" not in capture.get()
    assert isinstance(exported, Exported)
    live = Console(width=80, force_terminal=True, color_system=None, legacy_windows=False)
    with live.capture() as capture, Display(live, quiet=False).count("models written") as listen:
        listen(1, 2)
    assert "models written" in capture.get()
    with live.capture() as capture, Display(live, quiet=True).count("models written") as listen:
        listen(1, 2)
    assert capture.get() == ""


def test_weights_are_the_same_in_every_process(runs: Runs, tmp_path: Path) -> None:
    """Loading draws nothing from torch's generator, and leaves it as it was."""
    file = personafl.export(runs(LOW_RANK, **MLP), tmp_path).models[0].file
    before: Tensor = torch.random.get_rng_state()
    personafl.load_model(file)
    assert torch.equal(torch.random.get_rng_state(), before)
