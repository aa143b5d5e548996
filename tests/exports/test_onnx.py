"""ONNX files: onnxruntime alone gets torch's scores from them, and quantized weights are in them as packed codes."""

import importlib.util
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import safetensors.torch
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import personafl
from models.cases import CASES, CHARACTERS, IMAGES, TRANSFORMER, data_of
from personafl import BadInput, cli
from personafl.algorithms import quantize
from personafl.core import wire
from personafl.exports import onnxfile
from personafl.exports.card import model_card
from personafl.exports.export import Exported
from personafl.exports.onnxfile import onnx_file
from personafl.models import make_net_and_split
from personafl.models.factored import FactoredConv2d, FactoredLinear
from personafl.models.modelfile import card_of
from personafl.models.network import SharedNetwork
from personafl.runs.result import Result
from tiers import tiered

DIGITS = {"partition": {"kind": "classes", "clients": 4, "per_client": 4}}
SMALL = {"rounds": 1, "data": DIGITS, "training": {"steps": 2}}
CNN = {"name": "cnn", "channels": [6, 8], "hidden": 64}
QUPED = {"name": "quped", "bits": 2}


def session_of(content: bytes | Path) -> Any:
    given = content if isinstance(content, bytes) else str(content)
    return onnxruntime.InferenceSession(given, providers=["CPUExecutionProvider"])


def scores_of(content: bytes | Path, x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(session_of(content).run(["scores"], {"x": x.numpy()})[0])


def tensors_of(content: bytes | Path) -> dict[str, np.ndarray]:
    model = onnx.load_from_string(content if isinstance(content, bytes) else content.read_bytes())
    return {entry.name: numpy_helper.to_array(entry) for entry in model.graph.initializer}


def quantized(network: nn.Module, bits: int) -> nn.Module:
    """Put all weights of ≥ 2 dimensions on centers."""
    for value in network.parameters():
        if value.ndim >= 2:
            value.data = quantize.hard(value.data, quantize.initial_centers(value.data, 2**bits))
    return network


MORE: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "transformer": (CHARACTERS, {**TRANSFORMER, "dropout": 0.5}, {"adapter": "bottleneck", "adapter_size": 3}),
    "mlp": (IMAGES, {"hidden": [40]}, {"adapter": "lora", "adapter_size": 2}),
    "cnn": (IMAGES, {"channels": [3, 4], "hidden": 6}, {"adapter": "residual"}),
}
NETWORKS = {name: (name, data, options, {}) for name, (data, options) in CASES.items()} | {
    f"{name} with adapters": (name, *rest) for name, rest in MORE.items()
}


@pytest.mark.parametrize("case", tiered(NETWORKS, ["mlp with adapters"]))
def test_every_network(case: str) -> None:
    name, data, options, adapters = NETWORKS[case]
    network = quantized(make_net_and_split(SharedNetwork(name=name, **options, **adapters), data)[0].module().eval(), 2)
    content = onnx_file(network, data.x, {"client": "Zoë"})
    for count in (1, 2, 5):
        x = data.x[:count]
        torch.testing.assert_close(scores_of(content, x), network(x), rtol=1e-5, atol=1e-5)
    model = onnx.load_from_string(content)
    assert [(entry.key, entry.value) for entry in model.metadata_props] == [("client", "Zoë")]
    assert b".py" not in content  # torch notes where in the code a node is from


def by_hand(weight: np.ndarray) -> onnx.ModelProto:
    """scores = x @ weight."""
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size])
        for name, size in zip(("x", "scores"), weight.shape, strict=True)
    ]
    node = helper.make_node("MatMul", ["x", "w"], ["scores"])
    graph = helper.make_graph([node], "g", ends[:1], ends[1:], [numpy_helper.from_array(weight, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


@pytest.mark.parametrize("shape", [(64, 96), (53, 71)])  # with and without a byte that is filled up
@pytest.mark.parametrize("levels", [1, 2, 3, 4, 5, 8, 9, 16, 17, 100, 256])
def test_codes_restore_weights_to_the_bit(levels: int, shape: tuple[int, int]) -> None:
    """The identity times the weight is the weight; the codes are those of the wire, whole ones in a byte."""
    random = np.random.default_rng(levels)
    codes = np.concatenate([np.arange(levels), random.integers(0, levels, math.prod(shape) - levels)]).reshape(shape)
    centers = np.sort(random.standard_normal(levels).astype(np.float32))
    packed = onnxfile._with_lookups(by_hand(centers[codes]))
    onnx.checker.check_model(packed, full_check=True)
    content = packed.SerializeToString()
    assert np.array_equal(scores_of(content, torch.eye(shape[0])).numpy(), centers[codes])
    bits = next(width for width in (1, 2, 4, 8) if levels <= 2**width)
    found = tensors_of(content)
    sent = wire.Quantized.of(torch.from_numpy(codes), torch.zeros(2**bits))
    assert found["w.codes"].nbytes == math.ceil(math.prod(shape) * bits / 8)
    assert np.array_equal(found["w.codes"], sent.codes.numpy())
    assert np.array_equal(found["w.centers"][:levels], centers)
    assert len(found["w.centers"]) == 2**bits
    assert "w" not in found


def test_weights_stay_whole_where_codes_are_not_smaller() -> None:
    random = np.random.default_rng(0)
    many = random.permutation(64 * 96).astype(np.float32).reshape(64, 96)
    for values in (many, np.where(many < 6000, many % 257, 0), np.ones((4, 4), np.float32), many.astype(np.float64)):
        plain = by_hand(values)
        assert (
            onnxfile._with_lookups(plain).graph
            == onnxfile._rebuilt(plain, plain.graph.node, plain.graph.initializer).graph
        )
    plain = by_hand(many % 256)
    assert onnxfile._with_lookups(plain).ByteSize() < plain.ByteSize() / 3


@pytest.mark.parametrize("levels", [2, 4, 5, 256])
def test_onnxruntime_restores_weights_once(tmp_path: Path, levels: int) -> None:
    """What it runs for each input is the product alone."""
    weight = np.random.default_rng(0).integers(0, levels, (64, 96)).astype(np.float32)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "ready.onnx")
    options.log_severity_level = 3  # it warns that such a file is for this machine
    content = onnxfile._with_lookups(by_hand(weight)).SerializeToString()
    onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    assert [node.op_type for node in onnx.load(tmp_path / "ready.onnx").graph.node] == ["MatMul"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """QuPeD beside local training, on the built-in digits; tests must not change it."""
    path = tmp_path_factory.mktemp("runs") / "both"
    recipe = SMALL | {"model": CNN, "compare": {"options": {"quped": {"bits": 2}}}}
    personafl.compare(recipe, methods=["quped", "local"], out=path)
    return path / "quped-seed0"


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """The global model and that of client 2, with ONNX files; tests must not change them."""
    return personafl.export(run, tmp_path_factory.mktemp("exported"), ["2"], onnx=True)


ALONE = """
import sys
for name in ("torch", "personafl", "onnx", "onnxscript", "safetensors"):
    sys.modules[name] = None  # importing it fails
import numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1])
numpy.save(sys.argv[3], session.run(["scores"], {"x": numpy.load(sys.argv[2])})[0])
"""


@pytest.mark.system
def test_a_device_needs_numpy_and_onnxruntime_alone(exported: Exported, tmp_path: Path) -> None:
    x = torch.rand(7, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    np.save(tmp_path / "x.npy", x.numpy())
    for model in exported.models:
        assert model.onnx is not None
        device = tmp_path / "device"
        device.mkdir(exist_ok=True)
        file = device / "model.onnx"
        file.write_bytes(model.onnx.read_bytes())  # this one file and nothing beside it
        words = [sys.executable, "-I", "-c", ALONE, file, tmp_path / "x.npy", tmp_path / "scores.npy"]
        done = subprocess.run(words, capture_output=True, text=True, cwd=device)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        wanted = personafl.load_model(model.file)(x)
        scores = torch.from_numpy(np.load(tmp_path / "scores.npy"))
        torch.testing.assert_close(scores, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.system
def test_a_2_bit_cnn1_takes_a_sixteenth_of_its_quantized_layers(tmp_path: Path) -> None:
    """In both files, exactly: 2 bits a weight and 4 centers a layer; all else is in full precision."""
    images = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    data = data_of(images, torch.arange(4) % 3)
    recipe = {"rounds": 1, "method": QUPED, "model": {"name": "cnn1"}, "training": {"steps": 1, "batch": 2}}
    personafl.run(recipe, data=data, out=tmp_path / "run")
    shared, own = personafl.export(tmp_path / "run", clients="all", data=data, onnx=True).models
    assert shared.onnx is not None
    assert own.onnx is not None
    layers = {"3.weight": 64 * 64 * 25, "7.weight": 384 * 1024, "9.weight": 192 * 384}
    stored, graph = safetensors.torch.load_file(own.file), tensors_of(own.onnx)
    for name, entries in layers.items():
        inner = f"network.{name}"  # behind what standardises inputs
        codes, centers = graph[f"{inner}.codes"], graph[f"{inner}.centers"]
        assert np.array_equal(codes, stored[f"0/{name}#quantized.codes"].numpy())
        assert np.array_equal(centers, stored[f"0/{name}#quantized.centers"].numpy())
        assert codes.nbytes + centers.nbytes == 4 * entries / 16 + 4 * 4
        assert inner not in graph
    whole = sum(4 * entries for entries in layers.values())
    packed = whole // 16 + 3 * 16
    others = own.parameters_dense * 4 - whole
    for size in (own.bytes, own.bytes_onnx):
        assert packed + others < size < packed + others + 6000  # beside the weights: names, nodes, the description
    assert own.bits == 2
    assert shared.bits is None
    assert shared.bytes_onnx is not None
    assert shared.bytes_onnx > whole + others


@pytest.mark.system
def test_files_say_the_same_about_themselves(run: Path, exported: Exported, tmp_path: Path) -> None:
    personafl.export(run, tmp_path, ["2"], onnx=True)
    for model in exported.models:
        assert model.onnx is not None
        with safetensors.safe_open(model.file, "pt") as file:
            about = file.metadata()
        props = onnx.load(model.onnx).metadata_props
        del about["crc32"]  # of this file alone
        assert {entry.key: entry.value for entry in props} == about
        for path in (model.file, model.onnx, model.card):
            assert path.read_bytes() == (tmp_path / path.name).read_bytes()
        assert model.bytes_onnx == model.onnx.stat().st_size
    assert len(list(tmp_path.iterdir())) == 3 * 2


@pytest.mark.system
def test_low_rank_layers_are_two_and_sparse_ones_dense(tmp_path: Path) -> None:
    method = {"name": "fedslr", "rank_penalty": 0.05, "sparsity": 0.02}
    recipe = SMALL | {"rounds": 3, "method": method, "model": {**CNN, "hidden": 16}}
    path = personafl.run(recipe, out=tmp_path / "run").path
    shared, own = personafl.export(path, clients=["0"], onnx=True).models
    network = personafl.load_model(shared.file)
    divided = [layer for layer in network.modules() if isinstance(layer, FactoredConv2d | FactoredLinear)]
    assert divided
    assert shared.onnx is not None
    assert own.onnx is not None
    assert shared.onnx.stat().st_size < own.onnx.stat().st_size
    nodes = [node.op_type for node in onnx.load(shared.onnx).graph.node]
    assert sum(nodes.count(kind) for kind in ("Conv", "Gemm", "MatMul")) == 4 + len(divided)
    x = torch.rand(5, 1, 8, 8)
    torch.testing.assert_close(scores_of(shared.onnx, x), network(x), rtol=1e-5, atol=1e-5)


@pytest.mark.system
def test_runs_in_double_precision_give_single_precision(tmp_path: Path) -> None:
    recipe = SMALL | {"method": QUPED, "model": CNN, "engine": {"dtype": "float64"}}
    model = personafl.export(personafl.run(recipe, out=tmp_path / "run").path, clients=["1"], onnx=True).models[1]
    assert model.onnx is not None
    x = torch.rand(5, 1, 8, 8)
    wanted = personafl.load_model(model.file)(x.double()).float()
    torch.testing.assert_close(scores_of(model.onnx, x), wanted, rtol=1e-5, atol=1e-5)
    assert "float64 [batch, 1, 8, 8]" in model.card.read_text()


class LengthAsked(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.reshape(len(x), -1))


class Unknown(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.lgamma(super().forward(x).exp())


@pytest.mark.system
def test_networks_of_ones_own(tmp_path: Path) -> None:
    """BatchNorm by batch statistics, and a forward() that asks for the batch's length."""
    layers = [nn.Linear(64, 5), nn.BatchNorm1d(5), nn.Linear(5, 10)]
    given = LengthAsked(*layers)
    recipe = SMALL | {"model": {"buffers": "dropped"}}
    path = personafl.run(recipe, model=given, out=tmp_path / "one").path
    [model] = personafl.export(path, model=given, onnx=True).models
    assert model.onnx is not None
    assert "module=…" in model.card.read_text()
    given = Unknown(nn.Flatten(), nn.Linear(64, 10))
    path = personafl.run(SMALL, model=given, out=tmp_path / "two").path
    with pytest.raises(BadInput, match=r"global.onnx: not written.*torch cannot.*lgamma.*export without --onnx"):
        personafl.export(path, model=given, onnx=True)
    assert list((path / "export").iterdir()) == []


@pytest.mark.system
def test_a_file_with_other_scores_is_not_written(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = onnxfile._with_lookups

    def wrong(plain: onnx.ModelProto) -> onnx.ModelProto:
        model = right(plain)
        for tensor in model.graph.initializer:
            if tensor.name.endswith("centers"):
                tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) + np.float32(0.01), tensor.name))
        return model

    monkeypatch.setattr(onnxfile, "_with_lookups", wrong)
    with pytest.raises(BadInput, match=r"client-0.onnx: not written, cnn: onnxruntime's scores are .* from torch's"):
        personafl.export(run, tmp_path / "out", ["0"], onnx=True)
    assert {path.stem for path in (tmp_path / "out").iterdir()} == {"global"}
    monkeypatch.setattr(onnxfile, "_with_lookups", lambda plain: onnx.ModelProto())
    with pytest.raises(BadInput, match=r"global.onnx: not written, cnn: onnxruntime cannot run"):
        personafl.export(run, tmp_path / "other", onnx=True)


def test_a_network_too_large_for_one_file_is_refused() -> None:
    """Its weights are not there."""
    with pytest.raises(BadInput, match=r"its weights take 2\.2 GiB in single precision, and such a file has at most 2"):
        onnxfile.onnx_file(nn.Linear(600_000, 1000, device="meta"), torch.zeros(1, 600_000), {})


def test_without_the_packages_nothing_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxscript" else find(name))
    with pytest.raises(BadInput, match=r"need onnxscript; install with: pip install 'personafl\[onnx\]'"):
        personafl.export(tmp_path / "no run", tmp_path / "out", onnx=True)
    assert not (tmp_path / "out").exists()


def test_model_cards(run: Path, exported: Exported, tmp_path: Path) -> None:
    shared, own = exported.models
    beside, result = Result.load(run.parent / "local-seed0"), Result.load(run)
    place = result.columns["client"].index(2)
    assert own.accuracies == {
        "global": result.columns["global_test_accuracy"][place],
        "personal": result.columns["personal_test_accuracy"][place],
        "local": beside.columns["personal_test_accuracy"][place],
    }
    assert card_of(own.file).accuracies == own.accuracies
    means = {row["model"]: row["accuracy"] for row in result.rows if row["split"] == "test"}
    assert shared.accuracies["personal"] == means["personal"]
    text = own.card.read_text()
    share = 100 * own.bytes / card_of(own.file).bytes_fp32
    for words in (
        "# Personal model of client 2\n",
        "| Method | quped |",
        "| Network | cnn |",
        "| Input | float32 [batch, 1, 8, 8], which the model standardises itself |",
        "| Weights | 2-bit in quantized layers, else float32 |",
        f"| `client-2.safetensors` | {own.bytes / 1e3:.1f} kB = {share:.1f} % of FP32",
        f"| **personal model (this one)** | {100 * own.accuracies['personal']:.1f} % |",
        f"| trained on the client's data alone | {100 * own.accuracies['local']:.1f} % |",
        'personafl.load_model("client-2.safetensors")',
        'onnxruntime.InferenceSession("client-2.onnx")',
    ):
        assert words in text, words
    assert "| Weights | float32 |" in shared.card.read_text()
    shutil.copytree(shared.file.parent, tmp_path / "again")
    again = personafl.export(run, tmp_path / "again").models[0]  # the ONNX file of before is still there
    assert again.onnx is None
    assert "global.onnx" in again.card.read_text()
    local = personafl.export(run.parent / "local-seed0", tmp_path / "local", ["2"]).models[0]
    assert local.accuracies.keys() == {"personal"}
    assert "onnx" not in local.card.read_text()


def test_the_code_in_a_card_works(exported: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    model = exported.models[1]
    monkeypatch.chdir(model.file.parent)
    x = torch.rand(3, 1, 8, 8)
    found = []
    for number, block in enumerate(model.card.read_text().split("```python\n")[1:]):
        names: dict[str, Any] = {"x": x.numpy() if number else x}
        exec(block.partition("```")[0], names)
        found.append(torch.as_tensor(names["scores"]))
    assert len(found) == 2
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_names_do_not_break_a_card(run: Path, tmp_path: Path) -> None:
    file = personafl.export(run, tmp_path).models[0].file
    card = card_of(file).model_copy(update={"client": "a|b_c*\n# d", "model": "personal"})
    assert model_card(card, file).startswith("# Personal model of client a\\|b\\_c\\* \\# d\n")


@pytest.mark.system
def test_the_command(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def call(*words: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["personafl", "export", str(run), "--out", "files", *words])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        assert not exit_.value.code
        found = capfd.readouterr()
        return found.out, found.err

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "path", [*sys.path])
    text, error = call("--client", "1", "--onnx", "--latency")
    assert "torch" not in error
    for word in ("bits", "FP32", "onnx", "client 1"):
        assert word in text, word
    assert max(map(len, text.splitlines())) <= 80
    own = json.loads(call("--client", "1", "--onnx", "--json")[0])["models"][1]
    assert (own["onnx"], own["card"], own["bits"]) == ("files/client-1.onnx", "files/client-1.md", 2)
    assert own["bytes_onnx"] == (tmp_path / own["onnx"]).stat().st_size
    [line] = [line.split() for line in text.splitlines() if line.startswith("client 1")]
    assert line[2] == "exported"
    assert line[5] == "2"
    assert line[7] == f"{100 * own['bytes'] / own['bytes_fp32']:.1f}"
