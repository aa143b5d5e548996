"""Named personal parts of a module."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from models.cases import CASES, CHARACTERS, FEATURES, IMAGES, TRANSFORMER
from personafl.algorithms import METHODS
from personafl.algorithms.training import Training
from personafl.core.split import Split
from personafl.errors import BadInput
from personafl.models import default_model, make_net, make_net_and_split, personal_split
from personafl.models.adapters import is_adapter
from personafl.models.network import Network, SharedNetwork


def chosen(name: str, personal: str | list[str]) -> list[str]:
    data, options = CASES[name]
    net, split = make_net_and_split(SharedNetwork(name=name, personal=personal, adapter_size=2, **options), data)
    assert split is not None
    split.check(list(net.shapes))
    return [n for n in net.shapes if split.is_personal(n)]


@pytest.mark.parametrize(
    ("name", "personal", "expected"),
    [
        ("mlp", "input", ["1.weight", "1.bias"]),
        ("mlp", "output", ["3.weight", "3.bias"]),
        ("mlp", "body", ["1.weight", "1.bias"]),
        ("mlp", ["body", "3.bias"], ["1.weight", "1.bias", "3.bias"]),
        ("mlp", "*.bias", ["1.bias", "3.bias"]),
        ("mlp", r"re:[1]\..*", ["1.weight", "1.bias"]),
        ("mlp", ["input", "3.bias"], ["1.weight", "1.bias", "3.bias"]),
        ("lenet", "output", ["11.weight", "11.bias"]),
        ("resnet18", "input", ["stem.weight", "norm.weight", "norm.bias"]),
        ("resnet18", "output", ["output.weight", "output.bias"]),
        ("bag", "input", ["embedding.weight"]),
        ("window", "output", ["output.weight", "output.bias"]),
        ("window", "auto", ["norm_in.weight", "norm_in.bias", "norm.weight", "norm.bias"]),
        ("mlp", "auto", ["3.weight", "3.bias"]),
        ("speech", "input", [f"subsample.{i}.{what}" for i in (0, 2) for what in ("weight", "bias")]),
        ("speech", "output", ["blocks.1.hidden_out.weight", "blocks.1.hidden_out.bias"]),
        ("additive", "personal", ["personal.weight", "personal.bias", "personal.mixture"]),
        ("additive", "output", ["personal.weight", "personal.bias", "personal.mixture"]),
        ("additive", "body", ["body.1.weight", "body.1.bias", "shared.weight", "shared.bias"]),
        ("additive", "personal*", ["personal.weight", "personal.bias", "personal.mixture"]),
        ("additive", "input", ["body.1.weight", "body.1.bias"]),
        ("split_input", "personal", ["personal.weight", "personal.bias"]),
        ("split_input", "input", ["personal.weight", "personal.bias"]),
        ("split_input", "output", ["output.weight", "output.bias"]),
    ],
)
def test_parts(name: str, personal: str | list[str], expected: list[str]) -> None:
    got = chosen(name, personal)
    assert sorted(got) == sorted(expected)


def test_a_transformers_input_and_output_are_whole_blocks() -> None:
    for part, block in (("input", "blocks.0."), ("output", "blocks.1.")):
        names = chosen("transformer", part)
        assert len(names) == 12
        assert all(name.startswith(block) for name in names)


@pytest.mark.system
def test_body_and_output_are_all_there_is_and_have_nothing_in_common() -> None:
    """Also what is beside the layers, adapters, and outputs that a module declares."""
    for name in CASES.keys() - {"linear"}:
        body, output = chosen(name, "body"), chosen(name, "output")
        assert not set(body) & set(output)
        data, options = CASES[name]
        assert set(body) | set(output) == set(make_net(Network(name=name, **options), data).shapes)
    net, split = make_net_and_split(SharedNetwork(personal="body"), FEATURES, Own())
    assert split is not None
    assert {name for name in net.shapes if not split.is_personal(name)} == {"last.weight", "last.bias"}


def test_next_tokens_have_no_personal_output_by_default() -> None:
    """It has a row per token, of which a client with a few lines learns few; without norms there is no other part."""
    text = default_model(CHARACTERS.shape)
    for options, part in ((text.options, "norm"), ({}, "output")):
        for method in ("fedalt", "fedsim"):
            personal = METHODS[method].build(Training()).personal
            net, split = make_net_and_split(SharedNetwork(name=text.name, personal=personal, **options), CHARACTERS)
            assert split is not None
            assert {name.split(".")[0].split("_")[0] for name in net.shapes if split.is_personal(name)} == {part}


def test_norms() -> None:
    names = chosen("resnet20", "norms")
    assert len(names) == 2 * (1 + 2 * 9 + 2)  # stem, two per block, two skips that change the width
    assert all("norm" in name or "skip.1" in name for name in names)
    assert len(chosen("transformer", "norms")) == 2 * 5


def test_adapters_are_put_in_where_they_are_personal() -> None:
    """With the norms in a transformer, alone elsewhere; the kind is the default one."""
    for name in CASES:
        names = chosen(name, "adapter")
        rest = [n for n in names if not is_adapter(n)]
        assert len(rest) < len(names)
        assert len(rest) == {"transformer": 10, "speech": 10}.get(name, 0)
        assert all("norm" in n for n in rest)
    assert all("stem.adapter" in n or "conv" in n for n in chosen("resnet18", "adapter"))
    _, split = make_net_and_split(SharedNetwork(name="cnn", personal="adapter", adapter="lora", adapter_size=2), IMAGES)
    assert split == Split(("*.adapter.*",))
    net, none = make_net_and_split(SharedNetwork(name="cnn", adapter="residual"), IMAGES)
    assert none is None
    assert any(map(is_adapter, net.shapes))


class Own(nn.Module):
    """A user's module: parameters beside its layers, frozen ones, an adapter of its own, and a declared part."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 3)
        self.adapter = nn.Linear(4, 4)
        self.parts = {"ends": ("first.*", "last.*")}

    def forward(self, x: Tensor) -> Tensor:
        features = self.first(self.frozen(x)) * self.gain
        result: Tensor = self.last(features + self.adapter(features))
        return result


def test_a_module_of_the_users() -> None:
    for part, patterns in {
        "input": ("first.weight", "first.bias"),
        "output": ("last.weight", "last.bias"),
        "ends": ("first.*", "last.*"),
        "adapter": ("adapter.*",),
        "gain": ("gain",),
    }.items():
        net, split = make_net_and_split(SharedNetwork(personal=part), FEATURES, Own())
        assert split == Split(patterns)
        assert not any(name.startswith("frozen") for name in net.shapes)
    alone, split = make_net_and_split(SharedNetwork(personal="adapter", adapter_size=1), FEATURES, nn.Linear(6, 3))
    assert split == Split(("adapter.*",))
    assert list(alone.shapes) == ["weight", "bias", "adapter.a.weight", "adapter.b.weight"]


def test_a_shared_matrix_belongs_to_the_layer_that_has_it_first() -> None:
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    module[2].weight = module[0].weight
    assert personal_split(module, "output") == Split(("1.weight", "1.bias"))


@pytest.mark.parametrize(
    ("name", "personal", "message"),
    [
        (
            "mlp",
            "ouput",
            r"input, lora, lora_A, lora_B, lora_local, norms, output; parameters: .*1\.weight",
        ),
        ("mlp", "norms", r"'norms' matches no parameter of this model \(it has no normalisation layers"),
        ("linear", "body", r"'body' matches no parameter of this model \(it is all output\)"),
        ("mlp", ["body", "output"], "'body' and 'output' makes every parameter personal"),
        ("mlp", "re:(", r"'re:\(' is no regular expression"),
        ("mlp", ["input", "nothing.*"], r"'nothing\.\*' matches no parameter"),
        ("mlp", [], "names no part; parts: adapter"),
        ("mlp", "*", r"'\*' makes every parameter personal; parts: "),
        ("mlp", ["input", "output"], "'input' and 'output' makes every parameter personal"),
        ("linear", "output", "makes every parameter personal"),
        (
            "additive",
            "persnal",
            "parts: adapter, auto, base, body, input, lora, lora_A, lora_B, lora_local, norms, output, personal; ",
        ),
        ("resnet18", "head", r"stem\.weight, .*, …, .*output\.bias \(\d+ in all\)"),
    ],
)
def test_nothing_and_everything_are_refused(name: str, personal: str | list[str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        chosen(name, personal)


def test_adapters_must_be_there_for_a_split_of_a_module() -> None:
    module = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    with pytest.raises(BadInput, match="'adapter' matches no parameter"):
        personal_split(module, "adapter")


def test_looking_at_a_model_leaves_torchs_generator_alone() -> None:
    before = torch.random.get_rng_state()
    make_net_and_split(SharedNetwork(name="transformer", personal="adapter", **TRANSFORMER), CHARACTERS)
    make_net_and_split(SharedNetwork(name="mlp", adapter="lora"), FEATURES)
    assert torch.equal(torch.random.get_rng_state(), before)
