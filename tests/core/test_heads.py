"""Other heads in place of a linear layer, against their formulas in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from personafl.core.heads import Policy, with_head
from personafl.core.net import Net
from personafl.core.split import Split
from personafl.core.tree import Params
from personafl.errors import BadInput

GENERATOR = torch.Generator().manual_seed(0)


def headed(kind: str, *, bias: bool = True) -> tuple[Net, Params]:
    layers = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5), nn.Linear(2, 4, bias=bias)).double()
    layers[0].bias.requires_grad_(False)  # a constant, and stays one
    net = with_head(Net(layers), Split(("2.*",)), kind)
    return net, {n: torch.randn(s, generator=GENERATOR, dtype=torch.float64) for n, s in net.shapes.items()}


@pytest.mark.parametrize("bias", [True, False])
def test_a_gated_head(bias: bool) -> None:
    net, w = headed("gated", bias=bias)
    extra = {"2.policy.weight", "2.policy.bias", "2.norm.weight", "2.norm.bias", "2.shared.weight"}
    own = {"0.weight", "2.weight"} | ({"2.bias", "2.shared.bias"} if bias else set())
    assert w.keys() == extra | own
    x = torch.randn(6, 3, generator=GENERATOR, dtype=torch.float64)
    z = x @ w["0.weight"].T + net.module()[0].bias  # type: ignore[index,union-attr,operator]
    pairs = z @ w["2.policy.weight"].T + w["2.policy.bias"]
    pairs = (pairs - pairs.mean(1, keepdim=True)) / (pairs.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    a, c = (pairs * w["2.norm.weight"] + w["2.norm.bias"]).relu().split(2, 1)
    r = a.exp() / (a.exp() + c.exp())
    expected = (r * z) @ w["2.weight"].T + ((1 - r) * z) @ w["2.shared.weight"].T
    expected = expected + w["2.bias"] + w["2.shared.bias"] if bias else expected
    torch.testing.assert_close(net.apply(w, x), expected, rtol=0, atol=1e-12)
    policy = Policy(*(w[f"2.{name}"] for name in ("policy.weight", "policy.bias", "norm.weight", "norm.bias")))
    torch.testing.assert_close(policy.share(z.reshape(2, 3, 2)), r.reshape(2, 3, 2), rtol=0, atol=1e-12)


def test_a_valved_head() -> None:
    net, w = headed("valved")
    assert w.keys() == {"0.weight", "2.weight", "2.bias", "2.scale", "2.shift"}
    x = torch.randn(6, 3, generator=GENERATOR, dtype=torch.float64)
    z = x @ w["0.weight"].T + net.module()[0].bias  # type: ignore[index,union-attr,operator]
    expected = (w["2.scale"] * z + w["2.shift"]).clamp(min=0) @ w["2.weight"].T + w["2.bias"]
    torch.testing.assert_close(net.apply(w, x), expected, rtol=0, atol=1e-12)


def test_the_shared_network_stays_as_it_was() -> None:
    net = Net(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4)))
    net.unstackable, net.sample_bytes = "a layer", 2**30
    other = with_head(net, Split(("1.*",)), "gated")
    assert (other.head, other.unstackable, other.sample_bytes, net.head) == ("gated", "a layer", 2**30, None)
    assert net.shapes.keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_running_statistics_stay_fixed() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 4))
    module[1].running_mean = torch.tensor([1.0, -2.0])
    net = with_head(Net(module, "shared"), Split(("2.*",)), "valved")
    w = net.init(torch.Generator())
    z = (torch.ones(2, 3) @ w["0.weight"].T + w["0.bias"] - torch.tensor([1.0, -2.0])) / (1 + 1e-5) ** 0.5
    torch.testing.assert_close(net.apply(w, torch.ones(2, 3)), z.relu() @ w["2.weight"].T + w["2.bias"])


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(3, 2), nn.Conv1d(2, 4, 1)),
        nn.Sequential(nn.Linear(3, 2), nn.Bilinear(2, 2, 4)),
        nn.Sequential(nn.Linear(3, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 4))),
    ],
)
def test_a_part_that_is_no_linear_layer_is_refused(module: nn.Module) -> None:
    with pytest.raises(BadInput, match=r"^model\.personal: this method gives a client's network another head"):
        with_head(Net(module), Split(("1.*",)), "gated")
