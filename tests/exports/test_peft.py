"""Adapters as peft's folders: out to the same scores, and in again to the same adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import personafl
from models.folders import LENGTH, PAD, TARGETS, WORDS, Kind, Logits, adapted, folder, peft_model, tokens
from personafl.core.rng import generator
from personafl.errors import BadInput
from personafl.models import make_net_and_split
from personafl.models.network import SharedNetwork

peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
pytestmark = [pytest.mark.system, pytest.mark.filterwarnings("ignore")]  # of other packages


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def trained(
    kind: Kind, path: Path, out: Path, method: str, more: dict[str, Any] | None = None, **model: Any
) -> tuple[personafl.Result, np.ndarray]:
    """Return a short run of three clients, and some texts; `more` are other keys of a recipe."""
    dice = np.random.default_rng(0)
    x = dice.integers(1, WORDS, (30, LENGTH + 1))
    x[::4, LENGTH - 1 :] = PAD
    y = np.where(x[:, 1:] == PAD, -1, x[:, 1:]) if kind != "bert" else np.arange(30) % 3
    x = x[:, :LENGTH]
    data = {f"c{i}": (x[i::3], y[i::3]) for i in range(3)}
    given = {
        "source": folder(kind, path),
        "adapter": "lora",
        "rank": 2,
        "alpha": 3.0,
        "targets": TARGETS[kind],
        **model,
    }
    settings = {"training.lr": 0.5, **{f"model.{key}": value for key, value in given.items()}, **(more or {})}
    return personafl.run(data, method, rounds=2, settings=settings, out=out), x


def scores(kind: Kind, path: Path, where: Path, x: np.ndarray) -> torch.Tensor:
    auto = transformers.AutoModelForSequenceClassification if kind == "bert" else transformers.AutoModelForCausalLM
    base = auto.from_pretrained(folder(kind, path), attn_implementation="eager", dtype=torch.float64)
    model = peft.PeftModel.from_pretrained(base, str(where)).double().eval()
    with torch.no_grad():
        return Logits(model)(torch.from_numpy(x)).float()


@pytest.mark.parametrize(
    ("kind", "method", "model"),
    [
        ("gpt2", "fedsim", {"personal": "lora_B"}),
        ("llama", "fedavg", {"frozen": "lora_A"}),
        ("bert", "fedsim", {"personal": ["lora_B", "output"]}),
        ("gpt2", "fedalt", {"personal": "lora_local", "adapters": 2}),  # as one of twice the rank
    ],
)
def test_peft_gives_the_scores_of_what_was_exported(
    kind: Kind, method: str, model: dict[str, Any], path: Path, tmp_path: Path
) -> None:
    result, x = trained(kind, path, tmp_path / "run", method, **model)
    clients = "all" if method != "fedavg" else None
    exported = result.export(tmp_path / "out", clients, peft=True)
    assert len(exported.models) == (4 if clients else 1)
    for file in (each.file for each in exported.models):
        ours = personafl.load_model(file)(torch.from_numpy(x)).detach()
        theirs = scores(kind, path, file.with_suffix(""), x)
        assert float((ours[..., : theirs.shape[-1]] - theirs[..., : ours.shape[-1]]).abs().max()) < 1e-5
        plain = scores(kind, path, exported.models[-1].file.with_suffix(""), x)
        assert file == exported.models[-1].file or float((plain - theirs).abs().max()) > 1e-5
        assert file.stat().st_size < 20_000  # the base is not in it: its smallest matrix file has more
        assert file.with_suffix("").joinpath("adapter_model.safetensors").stat().st_size < 10_000


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_training_starts_from_a_folder_of_pefts(kind: Kind, path: Path, tmp_path: Path) -> None:
    model = peft_model(kind, path)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                value.normal_()
    model.save_pretrained(tmp_path / "theirs")
    if kind == "gpt2":  # a regular expression for names as peft has them
        config = tmp_path / "theirs" / "adapter_config.json"
        targets = {"target_modules": r"transformer\.h\.\d\.(attn\.c_attn|mlp\.c_fc)"}
        config.write_text(json.dumps(json.loads(config.read_text()) | targets))
    data = tokens("classification" if kind == "bert" else "next-token")
    source = {"source": folder(kind, path), "adapter": "lora"}
    record = SharedNetwork(**source, adapter_from=str(tmp_path / "theirs"))
    net = make_net_and_split(record, data)[0].to(torch.device("cpu"), torch.float64)
    start = {name: value.double() for name, value in net.init(generator(0)).items()}
    with torch.no_grad():
        assert float((net.apply(start, data.x) - Logits(model)(data.x)).abs().max()) < 1e-5  # its file is float32 or so
    known = record.anchored()
    assert (known.rank, known.alpha) == (2, 3.0)
    assert known.anchored() == known
    assert make_net_and_split(known, data)[0].shapes == net.shapes
    with pytest.raises(BadInput, match=r"model.rank: is 2 in .*theirs; remove it here"):
        SharedNetwork(**source, rank=3, adapter_from=str(tmp_path / "theirs")).anchored()


def test_other_adapters_in_the_folder_are_refused_by_a_run_and_a_file_of_it(path: Path, tmp_path: Path) -> None:
    """With A frozen they are in no checkpoint and no file: a run would go on with others, and a file be another."""
    theirs = tmp_path / "theirs"
    peft_model("llama", path).save_pretrained(theirs)
    result, x = trained(
        "llama", path, tmp_path / "run", "fedavg", adapter_from=str(theirs), frozen="lora_A", rank=None, alpha=None,
        targets=None,
    )  # fmt: skip
    (file,) = (each.file for each in result.export(tmp_path / "out").models)
    personafl.load_model(file)(torch.from_numpy(x))
    torch.manual_seed(1)
    peft_model("llama", path).save_pretrained(theirs)
    for again in (lambda: personafl.load_model(file), lambda: result.extend(3)):
        with pytest.raises(BadInput, match=r"model.adapter_from: the model in .*theirs is another one, of SHA-256"):
            again()


def test_what_is_refused(path: Path, tmp_path: Path) -> None:
    result, _ = trained("llama", path, tmp_path / "whole", "fedavg", adapter=None, rank=None, alpha=None, targets=None)
    with pytest.raises(BadInput, match="peft: is for lora adapters on a Hugging Face model"):
        result.export(tmp_path / "out", peft=True)
    assert not list((tmp_path / "out").iterdir())
    where = tmp_path / "theirs"
    record = {"source": folder("gpt2", path), "adapter": "lora", "adapter_from": str(where)}
    data = tokens("next-token")
    with pytest.raises(BadInput, match=r"model.adapter_from: .*theirs has no adapter_config.json"):
        make_net_and_split(SharedNetwork(**record), data)
    peft_model("llama", path).save_pretrained(where)
    with pytest.raises(BadInput, match=r"model\.targets: '.*' matches no layer; there are: c_attn"):
        make_net_and_split(SharedNetwork(**record), data)
    config = json.loads((where / "adapter_config.json").read_text())
    for change, says in (
        ({"use_dora": True}, "use_dora = True"),
        ({"peft_type": "IA3"}, "of the kind IA3"),
        ({"r": "x"}, "no r,"),
        ({"r": 0}, "has r = 0, lora_alpha = 3; both must be above 0"),
        ({"lora_alpha": float("nan")}, "lora_alpha = nan; both must be above 0"),
        ({"lora_alpha": -1}, "lora_alpha = -1; both must be above 0"),
    ):
        (where / "adapter_config.json").write_text(json.dumps(config | change))
        with pytest.raises(BadInput, match=says):
            make_net_and_split(SharedNetwork(**{**record, "source": folder("llama", path)}), data)
    (where / "adapter_config.json").write_text("[1]")
    with pytest.raises(BadInput, match=r"has no adapter_config.json that can be read"):
        make_net_and_split(SharedNetwork(**record), data)
    (where / "adapter_config.json").write_text(json.dumps(config))
    (where / "adapter_model.safetensors").write_bytes(b"no")
    with pytest.raises(BadInput, match=r"adapter_model.safetensors cannot be read"):
        adapted("llama", path, rank=None, alpha=None, targets=None, adapter_from=str(where))


@pytest.mark.parametrize("method", ["quped", "fedslr"])
def test_quantized_and_sparse_adapters(method: str, path: Path, tmp_path: Path) -> None:
    """QuPeD's clients have adapters of 2 bits, FedSLR's the shared low-rank ones and sparse ones; peft loads both."""
    options = {"quped": {"method.bits": 2}, "fedslr": {"method.rank_penalty": 0.01, "method.sparsity": 0.001}}[method]
    result, x = trained("gpt2", path, tmp_path / "run", method, more=options)
    clients = [each for each in result.export(tmp_path / "out", "all", peft=True).models if each.client is not None]
    for file in (each.file for each in clients):
        ours = personafl.load_model(file)
        adapters = {name: value for name, value in ours.named_parameters() if "adapter" in name}
        assert len(adapters) == 8
        if method == "quped":
            assert {value.unique().numel() for value in adapters.values()} <= {1, 2, 3, 4}
            assert len({float(value) for leaf in adapters.values() for value in leaf.detach().unique()}) > 8
        theirs = scores("gpt2", path, file.with_suffix(""), x)
        found = ours(torch.from_numpy(x)).detach()
        assert float((found - theirs[..., : found.shape[-1]]).abs().max()) < 1e-5
    if method == "fedslr":
        assert result.rows[0]["parameters"] < 400  # of 512, of the low-rank model and of the sparse one
