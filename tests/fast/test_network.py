"""A network's layers are put in an order that gives the same values sooner."""

import pytest
import torch
from torch import nn

from personafl.core.net import Net
from personafl.core.seam import using
from personafl.fast.table import enabled


class Taps(nn.Module):
    """Looks at what is between the layers of a Sequential: at each output, or at that of some."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.seen = how, list[torch.Tensor]()
        self.body = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 2, 2))
        if how == "hook":
            self.body[1].register_forward_hook(lambda layer, x, output: self.seen.append(output))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = []
        if self.how == "slices":
            self.seen.append(self.body[:2](x))
            x = self.body[2:](self.seen[0])
        elif self.how == "each":
            for layer in self.body:
                self.seen.append(x := layer(x))
        else:
            x = self.body(x)
        return torch.cat([part.flatten(2).mean(-1) for part in (*self.seen, x)], 1)


@pytest.mark.parametrize("how", ["slices", "each", "hook"])
def test_what_is_between_the_layers_is_what_it_was(how: str) -> None:
    net, x = Net(lambda: Taps(how)), torch.randn(4, 1, 8, 8)
    params = net.init(torch.Generator().manual_seed(0))
    with using({}):
        expected = net.apply(params, x)
    with enabled():
        torch.testing.assert_close(net.apply(params, x), expected)


def test_pooling_comes_before_relu_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2, padding=1), nn.Flatten(), nn.Linear(48, 5))
    net = Net(plain)
    sizes, forward = list[int](), nn.ReLU.forward
    monkeypatch.setattr(nn.ReLU, "forward", lambda layer, x: (sizes.append(x.shape[-1]), forward(layer, x))[1])
    x = torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(0)).round(decimals=1)  # so that there are ties
    params = {name: value.detach() for name, value in plain.named_parameters()}
    found, output = torch.func.grad_and_value(lambda p: net.apply(p, x).square().sum())(params)
    assert sizes == [4]  # of what is pooled
    assert [type(layer) for layer in net.module().children()] == [type(layer) for layer in plain]
    total = plain(x).square().sum()
    total.backward()
    assert torch.equal(output, total)
    for name, value in plain.named_parameters():
        assert value.grad is not None
        torch.testing.assert_close(found[name], value.grad)
