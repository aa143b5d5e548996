"""Adapters: the identity at 0, near it at the start, and no parameter renamed."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import nn

from models.cases import CASES, F64, FEATURES
from personafl.core.net import Net
from personafl.core.rng import generator
from personafl.errors import BadInput
from personafl.models import (
    MODELS,
    AdapterKind,
    Site,
    default_adapter,
    make_net,
    make_net_and_split,
    personal_split,
    with_adapters,
)
from personafl.models.adapters import is_adapter
from personafl.models.network import Network, SharedNetwork
from personafl.recipe.recipe import Recipe

KINDS = get_args(AdapterKind)
FITS = {
    "lora": list(CASES),
    "residual": ["cnn", "resnet18", "resnet20", "resnet32"],
    "bottleneck": ["transformer", "speech"],
}


def nets(name: str, kind: AdapterKind) -> tuple[Net, Net]:
    data, options = CASES[name]
    adapted = SharedNetwork(name=name, adapter=kind, adapter_size=2, **options)
    return make_net(Network(name=name, **options), data), make_net_and_split(adapted, data)[0]


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for kind in KINDS for name in FITS[kind]])
def test_zero_is_the_identity_to_the_bit_and_the_start_is_near_it(name: str, kind: AdapterKind) -> None:
    """And the plain model's parameters are there, under the same names, with the same start from the same seed."""
    plain, adapted = nets(name, kind)
    x = CASES[name][0].x
    start = adapted.init(generator(3))
    shared = {n: value for n, value in start.items() if not is_adapter(n)}
    expected = plain.init(generator(3))
    assert list(shared) == list(expected)
    assert all(torch.equal(shared[n], expected[n]) for n in shared)
    assert start.keys() != shared.keys()

    before = plain.apply(expected, x)
    zero = {n: torch.zeros_like(value) if is_adapter(n) else value for n, value in start.items()}
    assert torch.equal(adapted.apply(zero, x), before)
    now = adapted.apply(start, x)
    if kind == "lora":
        assert torch.equal(now, before)
    else:
        assert not torch.equal(now, before)
        torch.testing.assert_close(now, before, rtol=0, atol=0.05 * float(before.abs().max()))
    # Away from 0 they do something.
    moved = {n: value + 0.3 if is_adapter(n) else value for n, value in start.items()}
    assert not torch.allclose(adapted.apply(moved, x), before)


@pytest.mark.parametrize(("name", "kind"), [(n, kind) for kind in KINDS for n in CASES if n not in FITS[kind]])
def test_an_adapter_without_a_place_is_refused_with_what_would_do(name: str, kind: AdapterKind) -> None:
    with pytest.raises(BadInput, match=rf"'{kind}' adapters need .* there are none; use '"):
        nets(name, kind)


def test_names() -> None:
    resnet, block = nets("resnet18", "residual")[1].shapes, nets("transformer", "bottleneck")[1].shapes
    assert list(resnet)[:3] == ["stem.weight", "stem.adapter.0.weight", "stem.adapter.0.bias"]
    assert resnet["stem.adapter.1.weight"] == (4, 4, 1, 1)
    assert block["blocks.1.site2.adapter.down.weight"] == (2, 8)
    assert nets("mlp", "lora")[1].shapes["1.adapter.a.weight"] == (2, 6)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("transformer", "bottleneck"), ("speech", "bottleneck"), ("resnet20", "residual"), ("cnn", "residual")],
)
def test_the_default_suits_the_model(name: str, kind: str) -> None:
    data, options = CASES[name]
    assert default_adapter(nn.Sequential(nn.Linear(2, 2))) == "lora"
    facts: dict[str, Any] = {"input_shape": tuple(data.x.shape[1:]), "classes": 3}
    if name == "transformer":
        facts["vocabulary"] = 20
    assert default_adapter(MODELS[name](**facts, **options)) == kind


def test_the_values_by_hand() -> None:
    """LoRA: Wx + b + B(Ax). Residual: y + Conv1×1(GroupNorm(y)). Bottleneck: x + W₂·gelu(W₁x + b₁) + b₂."""
    torch.manual_seed(0)
    plain = nn.Linear(3, 2).double()
    adapted = with_adapters(plain, "lora", size=1)
    assert type(plain) is nn.Linear
    a, b = torch.tensor([[1.0, 2, 3]], dtype=F64), torch.tensor([[5.0], [7.0]], dtype=F64)
    state = {**plain.state_dict(), "adapter.a.weight": a, "adapter.b.weight": b}
    adapted.load_state_dict(state)
    x = torch.tensor([[1.0, 0, -1], [0, 1, 0]], dtype=F64)
    torch.testing.assert_close(adapted(x), plain(x) + torch.tensor([[-10.0, -14], [10, 14]], dtype=F64))

    module = with_adapters(nn.Sequential(nn.Conv2d(1, 2, 3, stride=2, padding=1, bias=True)), "residual").double()
    image = torch.rand(2, 1, 5, 5, dtype=F64)
    conv = module[0]
    y = nn.functional.conv2d(image, conv.weight, conv.bias, stride=2, padding=1)
    mean, variance = y.mean((1, 2, 3), keepdim=True), y.var((1, 2, 3), keepdim=True, unbiased=False)
    normed = (y - mean) / (variance + 1e-5).sqrt()
    expected = y + torch.einsum("oi,bihw->bohw", conv.adapter[1].weight[:, :, 0, 0], normed)
    torch.testing.assert_close(module(image), expected)

    site = with_adapters(nn.Sequential(Site(3)), "bottleneck", size=2).double()
    down, up = site[0].adapter.down, site[0].adapter.up
    hidden = nn.functional.gelu(x @ down.weight.T + down.bias)
    torch.testing.assert_close(site(x), x + hidden @ up.weight.T + up.bias)


def test_a_module_of_the_users_keeps_its_weights_and_draws_only_its_adapters() -> None:
    module = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    net = make_net_and_split(SharedNetwork(adapter="lora", adapter_size=2), FEATURES, module)[0]
    one, again, other = (net.init(generator(seed)) for seed in (0, 0, 1))
    assert torch.equal(one["0.weight"], module[0].weight)
    assert torch.equal(one["0.adapter.a.weight"], again["0.adapter.a.weight"])
    assert not torch.equal(one["0.adapter.a.weight"], other["0.adapter.a.weight"])
    assert [type(layer) for layer in module] == [nn.Linear, nn.ReLU, nn.Linear]


def test_a_layer_with_two_names_is_adapted_once_for_both() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(3, 3)
            self.two = self.one

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(x))

    adapted = with_adapters(Twice(), "lora", size=1)
    assert adapted.one is adapted.two
    assert [name for name, _ in adapted.named_parameters()] == [
        "one.weight",
        "one.bias",
        "one.adapter.a.weight",
        "one.adapter.b.weight",
    ]


def test_what_is_refused() -> None:
    once = with_adapters(nn.Sequential(nn.Linear(6, 3)), "lora")
    with pytest.raises(BadInput, match=r"has adapters already \(0\.adapter\.a\.weight\)"):
        with_adapters(once, "lora")
    with pytest.raises(BadInput, match="adapter_size: must be at least 1"):
        with_adapters(nn.Linear(6, 3), "bottleneck", size=0)
    with pytest.raises(BadInput, match="the model has only Flatten"):
        with_adapters(nn.Flatten(), "lora")
    # The weight of its out_proj, a subclass of nn.Linear, is used past its forward().
    with pytest.raises(BadInput, match="'lora' adapters need linear layers"):
        with_adapters(nn.MultiheadAttention(4, 2), "lora")


def test_two_lora_at_a_layer_are_added_up() -> None:
    """Wx + (α/r)(BAx + B′A′x), by hand; each is a part of its own, and one alone has no second."""
    layer = with_adapters(nn.Linear(4, 3), "lora", size=2, alpha=3.0, count=2).double()
    names = ["adapter.a.weight", "adapter.b.weight", "adapter.local.a.weight", "adapter.local.b.weight"]
    assert [name for name, _ in layer.named_parameters()][2:] == names
    x = torch.randn(5, 4, dtype=torch.float64)
    with torch.no_grad():
        for value in layer.parameters():
            value.normal_()
        p = dict(layer.named_parameters())
        low = x @ p[names[0]].T @ p[names[1]].T + x @ p[names[2]].T @ p[names[3]].T
        assert torch.allclose(layer(x), x @ p["weight"].T + p["bias"] + 1.5 * low, atol=1e-12)
    for part, personal in (("lora_local", names[2:]), ("lora", names), ("lora_B", [names[1], names[3]])):
        split = personal_split(layer, part)
        assert [name for name in p if split.is_personal(name)] == personal
    with pytest.raises(BadInput, match=r"it has no second adapter at a layer; set model.adapters = 2"):
        personal_split(with_adapters(nn.Linear(4, 3), "lora"), "lora_local")
    with pytest.raises(BadInput, match=r"adapters is of lora adapters; set model.adapter"):
        Recipe.parse({"model": {"adapters": 2}})
