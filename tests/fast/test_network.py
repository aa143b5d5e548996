"""A network's layers are put in an order that gives the same values sooner."""

import torch
from torch import nn

from personafl.core.net import Net


def kinds(net: Net) -> list[str]:
    return [type(layer).__name__ for layer in net.module().children()]


def test_pooling_comes_before_relu_and_changes_nothing() -> None:
    plain = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2, padding=1), nn.Flatten(), nn.Linear(48, 5))
    net = Net(plain)
    assert kinds(net) == [type(layer).__name__ for layer in plain]
    assert [type(layer).__name__ for layer in plain][1:3] == ["ReLU", "MaxPool2d"]
    x = torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(0)).round(decimals=1)  # so that there are ties
    params = {name: value.detach() for name, value in plain.named_parameters()}
    found, output = torch.func.grad_and_value(lambda p: net.apply(p, x).square().sum())(params)
    assert kinds(net) == ["Conv2d", "MaxPool2d", "ReLU", "Flatten", "Linear"]
    total = plain(x).square().sum()
    total.backward()
    assert torch.equal(output, total)
    for name, value in plain.named_parameters():
        assert value.grad is not None
        torch.testing.assert_close(found[name], value.grad)
