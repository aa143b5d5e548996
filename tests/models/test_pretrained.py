"""Hugging Face models from folders: one copy of the base, adapters beside its layers, what is wrong by name."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.folders import LENGTH, TARGETS, WORDS, Kind, adapted, folder, tokens
from personafl.core.net import Net
from personafl.core.rng import generator
from personafl.data.federated import blank
from personafl.errors import BadInput
from personafl.models import make_net_and_split, with_adapters
from personafl.models.network import SharedNetwork
from personafl.recipe.recipe import Recipe

pytest.importorskip("transformers")
pytestmark = [pytest.mark.system, pytest.mark.filterwarnings("ignore")]  # of other packages
CPU, LORA = torch.device("cpu"), {"adapter": "lora", "rank": 2}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def made(source: str | Path, data: Any = None, **options: Any) -> Net:
    return make_net_and_split(SharedNetwork(source=str(source), **options), data or tokens("next-token"))[0]


def pointers(net: Net) -> dict[str, int]:
    return {name: value.data_ptr() for name, value in net._module.named_parameters()}


@pytest.mark.parametrize("kind", TARGETS)
def test_the_base_is_in_memory_once(kind: Kind, path: Path) -> None:
    """In all networks of it, their copies and modules, and what several makers made; trained parts are not."""
    data = tokens("classification" if kind == "bert" else "next-token")
    one, two = (made(folder(kind, path), data, targets=TARGETS[kind], **LORA) for _ in range(2))
    one.init(generator(0))
    first = pointers(one)
    constant = first.keys() - one.shapes.keys()
    assert all(name.rpartition(".")[0].endswith(("adapter.a", "adapter.b", "classifier")) for name in one.shapes)
    assert len(constant) > 20
    for other in (two, copy.deepcopy(one), one.to(CPU, torch.float32)):
        assert {name for name, place in pointers(other).items() if place == first[name]} >= constant
    module = one.module()
    assert all(module.get_parameter(name).data_ptr() == first[name] for name in constant)
    other = pointers(copy.deepcopy(one))
    assert all(other[name] != first[name] for name in one.shapes)
    module.double()  # of a copy, in place: nobody else's
    assert one._module.get_parameter(min(constant)).dtype == torch.float32
    assert not one._start.keys() & constant


def test_a_base_without_adapters_is_trained_as_a_whole_and_nothing_writes_into_what_was_read(path: Path) -> None:
    data = tokens("next-token")
    net = made(folder("gpt2", path), data)
    assert sum(shape.numel() for shape in net.shapes.values()) == net.parameters
    assert "model.transformer.wte.weight" in net.shapes
    assert "model.lm_head.weight" not in net.shapes  # the same matrix
    start = net.init(generator(0))
    before = {name: value.clone() for name, value in start.items()}
    for value in start.values():
        value.add_(1.0)
    assert all(torch.equal(value, before[name]) for name, value in net.init(generator(1)).items())


def test_half_precision_is_the_bases_alone(path: Path) -> None:
    for kind, task in (("llama", "next-token"), ("bert", "classification")):
        data = tokens(task)
        net = made(folder(kind, path), data, base_dtype="bfloat16", targets=TARGETS[kind], **LORA)
        for dtype in (torch.float32, torch.float64):
            net.to(CPU, dtype)
            kinds = {name: value.dtype for name, value in net._module.named_parameters() if name not in net.shapes}
            assert set(kinds.values()) == {torch.bfloat16}
            start = {name: value.to(dtype) for name, value in net.init(generator(0)).items()}
            assert {value.dtype for value in net.init(generator(0)).values()} == {torch.float32}
            rough = net.apply({name: value + 0.1 for name, value in start.items()}, data.x)
            assert rough.dtype == torch.promote_types(dtype, torch.float32) or rough.dtype == torch.float32
            exact = made(folder(kind, path), data, targets=TARGETS[kind], **LORA).to(CPU, dtype)
            fine = exact.apply({name: value + 0.1 for name, value in start.items()}, data.x)
            assert 0 < float((rough - fine).abs().max()) < 0.1 * float(fine.abs().max())


def test_what_is_personal_and_what_is_frozen(path: Path) -> None:
    for personal, part in (("lora_A", "adapter.a"), ("lora_B", "adapter.b"), ("lora", "adapter")):
        net, split, _ = adapted("llama", path, personal=personal)
        assert split is not None
        assert {name for name in net.shapes if split.is_personal(name)} == {n for n in net.shapes if part in n}
    # FedSA-LoRA: B and the classifier are personal. FFA-LoRA: A is nobody's, as it was drawn.
    net, split, _ = adapted("bert", path, personal=["lora_B", "output"])
    assert split is not None
    assert {name.rpartition("adapter.")[2] for name in net.shapes if not split.is_personal(name)} == {"a.weight"}
    ffa, _, data = adapted("llama", path, frozen="lora_A")
    assert all(".adapter.b." in name for name in ffa.shapes)
    again = adapted("llama", path, frozen="lora_A")[0]
    place = "model.model.layers.0.self_attn.q_proj.adapter.a.weight"
    assert torch.equal(ffa._module.get_parameter(place), again._module.get_parameter(place))
    assert bool(ffa._module.get_parameter(place).any())
    # personal = "lora" alone has adapters put in, which the model does not have yet.
    implied = make_net_and_split(SharedNetwork(source=folder("llama", path), personal="lora_B"), data)[0]
    assert {name.split(".")[-4] for name in implied.shapes} >= {"q_proj", "o_proj", "down_proj"}
    assert not any("lm_head" in name for name in implied.shapes)


def test_padding_says_nothing(path: Path) -> None:
    """Texts that end early have the scores that they have without what comes after; BERT's too, which looks ahead."""
    for kind in ("gpt2", "bert"):
        net, _, data = adapted(kind, path)
        start = {name: value.double() + 0.1 for name, value in net.init(generator(0)).items()}
        short = data.x[:1, : LENGTH - 2]  # the first text ends there
        assert bool((data.x[0, LENGTH - 2 :] == 0).all())
        long, cut = net.apply(start, data.x[:1]), net.apply(start, short)
        assert float((long[:, : LENGTH - 2] - cut if kind == "gpt2" else long - cut).abs().max()) < 1e-10


def test_a_classifiers_head_is_drawn_from_the_runs_seed(path: Path) -> None:
    """Also on a base that has none, or one for other classes; a decoder needs to know its padding for it."""
    shape = tokens("classification").shape.model_copy(update={"classes": 5})
    other = blank(shape)
    for source, options in ((folder("bert", path), {}), (folder("gpt2", path), {"pad_token": 0})):
        net = made(source, other, **LORA, **options)
        head = next(name for name in net.shapes if name.endswith(("classifier.weight", "score.weight")))
        one, same, another = (net.init(generator(seed))[head] for seed in (0, 0, 1))
        assert torch.equal(one, same)
        assert not torch.equal(one, another)
        assert one.shape[0] == 5
    with pytest.raises(BadInput, match=r"a decoder needs one to find where a text ends; set model.pad_token"):
        made(folder("gpt2", path), other, **LORA)


def test_another_base_is_refused(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe that a run keeps has the digest of its base, and so has what is exported."""
    source = tmp_path / "base"
    shutil.copytree(folder("llama", path), source)
    recipe = Recipe.parse({"model": {"source": str(source), **LORA}}).anchored()
    again = Recipe.parse(recipe.model_dump(mode="json", exclude_none=True)).anchored()
    assert again.model == recipe.model
    assert len(recipe.model.options["sha256"]) == 64
    monkeypatch.chdir(tmp_path)
    own = {"devices": [{"share": 0.5, "model": {"source": "base"}}, {"share": 0.5}]}
    profile = Recipe.parse({"method": "quped", **own}).anchored().devices[0].model
    assert profile is not None
    assert profile.options == {"source": str(source), "sha256": recipe.model.options["sha256"]}
    make_net_and_split(recipe.model, tokens("next-token"))
    shutil.copyfile(Path(folder("llama", path, seed=1)) / "model.safetensors", source / "model.safetensors")
    with pytest.raises(BadInput, match=r"the model in .*base is another one, of SHA-256 .* was used before"):
        make_net_and_split(recipe.model, tokens("next-token"))


def broken(kind: str, path: Path) -> Path:
    """Return a folder in which something is wrong."""
    if path.exists():
        shutil.rmtree(path)
    shutil.copytree(folder("llama", path.parent), path)
    weights = path / "model.safetensors"
    if kind == "no config":
        (path / "config.json").unlink()
    elif kind == "no weights":
        weights.unlink()
    elif kind == "pickled":
        weights.rename(path / "pytorch_model.bin")
    elif kind == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif kind == "a layer less":
        found = load_file(weights)
        save_file({n: v for n, v in found.items() if "layers.1.self_attn.q" not in n}, weights, {"format": "pt"})
    elif kind == "unknown":
        (path / "config.json").write_text(json.dumps({"model_type": "nonesuch"}))
    elif kind == "code":
        config = json.loads((path / "config.json").read_text())
        code = {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}, "model_type": "evil"}
        (path / "config.json").write_text(json.dumps(config | code))
        (path / "evil.py").write_text("raise SystemExit('it was called')")
    elif kind == "adapters":
        (path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(path)}))
    elif kind.startswith("index"):
        found, outside = load_file(weights), path.with_name("outside.safetensors")
        save_file({"lm_head.weight": found.pop("lm_head.weight")}, outside, {"format": "pt"})
        save_file(found, path / "model-1.safetensors", {"format": "pt"})
        weights.unlink()
        files = dict.fromkeys(found, "model-1.safetensors") | {"lm_head.weight": "../outside.safetensors"}
        text = json.dumps({"metadata": {}, "weight_map": files}) if kind == "index" else "[]"
        (path / "model.safetensors.index.json").write_text(text)
    return path


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("no config", "has no config.json"),
        ("no weights", r"has no weights in \*\.safetensors"),
        ("pickled", r"has no weights in \*\.safetensors"),
        ("cut", "cannot be read"),
        ("a layer less", r"has no weights of model\.layers\.1\.self_attn\.q_proj\.weight \(1 are missing\)"),
        ("unknown", "cannot be read"),
        ("code", "cannot be read"),
        ("adapters", r"has adapters beside the model \(adapter_config\.json\)"),
        ("index", r"names '\.\./outside\.safetensors', which is no file of weights beside it"),
        ("index of nothing", r"model\.safetensors\.index\.json cannot be read"),
    ],
)
def test_a_folder_that_is_no_model(kind: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=f"model.source: .*{says}"):
        made(broken(kind, tmp_path / "bad"), **LORA)


def test_what_else_is_refused(path: Path) -> None:
    llama, gpt2, data = folder("llama", path), folder("gpt2", path), tokens("next-token")
    for options, says in (
        ({"source": "gpt2-medium"}, "model.source: gpt2-medium is no folder; .*not fetched"),
        ({"targets": ["c_attn"]}, "model.targets: 'c_attn' matches no layer; there are: q_proj, k_proj"),
        ({"targets": ["q_proj", "embed_tokens"]}, r"'embed_tokens' is no layer that an adapter fits \(Embedding\)"),
        ({"targets": ["q_proj", "("]}, r"model.targets: '\(' is no name and no regular expression"),
        ({"adapter": "residual", "rank": None}, "model.adapter: 'residual' adapters need 3×3 convolutions"),
        ({"personal": "norms"}, "model.personal: 'norms' matches no parameter"),
        ({"frozen": "lora_C"}, "model.frozen: 'lora_C' matches no parameter"),
    ):
        with pytest.raises(BadInput, match=says):
            make_net_and_split(SharedNetwork(**{"source": llama, **LORA, **options}), data)
    for shape, says in (
        ({"input_shape": (11,), "target_shape": (11,)}, "has 10 positions, and texts of this data have 11 tokens"),
        ({"vocabulary": WORDS + 1, "classes": WORDS + 1}, f"knows {WORDS} tokens, and this data has {WORDS + 1}"),
        ({"task": "multilabel", "target_shape": (WORDS,)}, "the task of this data is multilabel"),
    ):
        with pytest.raises(BadInput, match=says):
            make_net_and_split(SharedNetwork(source=gpt2, **LORA), blank(data.shape.model_copy(update=shape)))
    with pytest.raises(BadInput, match=r"has no weights of cls.predictions"):
        made(folder("bert", path), data, **LORA)
    for values, says in (
        ({"rank": 0, "adapter": "lora"}, "model.rank: input should be greater than or equal to 1"),
        ({"alpha": -1, "adapter": "lora"}, "model.alpha: input should be greater than 0"),
        ({"rank": 4}, 'rank is of lora adapters; set model.adapter = "lora"'),
        ({"targets": "q", "adapter": "bottleneck"}, "targets is of lora adapters"),
    ):
        with pytest.raises(BadInput, match=says):
            Recipe.parse({"model": values})


def test_targets_are_names_ends_and_patterns(path: Path) -> None:
    def ends(*targets: str) -> list[str]:
        shapes = made(folder("llama", path), targets=targets, **LORA).shapes
        return sorted({name.removesuffix(".adapter.a.weight") for name in shapes if ".a." in name})

    both = [f"model.model.layers.{layer}.self_attn.q_proj" for layer in (0, 1)]
    assert ends("q_proj") == ends(r".*\.q_proj") == ends("self_attn.q_proj") == both
    assert ends(both[1]) == ends(r"model\.layers\.1\.self_attn\.q_proj") == both[1:]  # as peft calls it
    assert ends("layers.1.self_attn.q_proj", "lm_head") == ["model.lm_head", both[1]]
    twice = with_adapters(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), "lora", targets=["1"])
    assert [name for name, _ in twice.named_parameters() if "adapter" in name] == [
        "1.adapter.a.weight",
        "1.adapter.b.weight",
    ]
