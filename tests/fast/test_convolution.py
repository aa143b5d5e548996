"""Convolutions of stacked clients as products of matrices: torch's numbers, and whole training through them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.nn import functional

from personafl.core.batches import Batch
from personafl.core.net import Net
from personafl.core.tree import Params
from personafl.fast import convolution, layers
from personafl.fast.gradient import gradient_and_value
from personafl.fast.table import enabled


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Have them on a CPU too, and count them."""
    seen: list[torch.Size] = []

    def pay(x: Tensor, weight: Tensor, padding: tuple[int, int]) -> bool:
        seen.append(weight.shape)
        return True

    monkeypatch.setattr(layers, "on_gpu", lambda x: True)
    monkeypatch.setattr(convolution, "products_pay", pay)
    return seen


@pytest.mark.parametrize("kernel", [(3, 3), (5, 5), (1, 1), (2, 3)])
@pytest.mark.parametrize("padding", [(0, 0), (1, 0), (1, 2)])
def test_it_is_torchs_convolution_with_groups(kernel: tuple[int, int], padding: tuple[int, int]) -> None:
    if any(p >= k for p, k in zip(padding, kernel, strict=True)):
        padding = (0, 0)
    torch.manual_seed(0)
    x = torch.randn(3, 4, 2, 7, 9, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 5, 2, *kernel, dtype=torch.float64, requires_grad=True)
    found = convolution.Convolution.apply(x, weight, padding)  # type: ignore[no-untyped-call]
    each = [functional.conv2d(own, filters, padding=padding) for own, filters in zip(x, weight, strict=True)]
    wanted = torch.stack(each)
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)
    slope = torch.randn_like(wanted)
    for ours, theirs in zip(
        torch.autograd.grad(found, (x, weight), slope), torch.autograd.grad(wanted, (x, weight), slope), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


def _network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, bias=False),
        nn.Conv2d(6, 6, 3, stride=2, padding=1),
        nn.Conv2d(6, 6, 3, padding="same", groups=2),
        nn.Conv2d(6, 3, 1),
        nn.Flatten(),
        nn.LazyLinear(4),
    )


def _objective(net: Net) -> Callable[[Params, Batch], Tensor]:
    def loss(params: Params, batch: Batch) -> Tensor:
        return functional.cross_entropy(net.apply(params, batch.x, batch.real, batch.key), batch.y)

    return loss


@pytest.mark.parametrize("common", [False, True], ids=["weights of their own", "one model"])
def test_gradients_of_stacked_clients_are_those_of_plain_training(calls: list[torch.Size], common: bool) -> None:
    torch.manual_seed(0)
    module = _network().double()
    module(torch.zeros(1, 1, 12, 12, dtype=torch.float64))
    net = Net(module)
    params = {name: value.detach().expand(3, *value.shape) for name, value in module.named_parameters()}
    if not common:
        params = {name: value + 0.1 * torch.randn_like(value) for name, value in params.items()}
    x, y = torch.randn(3, 5, 1, 12, 12, dtype=torch.float64), torch.randint(4, (3, 5))
    real, key = torch.ones(3, 5, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)

    def one(own: Params, *data: Tensor) -> tuple[Params, Tensor]:
        return gradient_and_value(_objective(net), own, Batch(*data))

    with enabled():
        found, value = vmap(one)(params, x, y, real, key)
    assert [len(shape) for shape in calls] == [5, 5, 5]  # not those with strides, words or groups
    for place in range(3):
        own = {name: each[place] for name, each in params.items()}
        batch = Batch(x[place], y[place], real[place], key[place])
        wanted, loss = grad_and_value(_objective(net))(own, batch)
        torch.testing.assert_close(value[place], loss, atol=1e-12, rtol=0)
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name][place], gradient, atol=1e-12, rtol=0)


def test_it_is_not_for_a_cpu_nor_for_columns_that_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.zeros(2, 3, 1, 8, 8), torch.zeros(2, 4, 1, 3, 3)
    assert not layers.on_gpu(x)
    assert convolution.products_pay(x, weight, (0, 0))
    monkeypatch.setattr(convolution, "_MOST", 2 * 3 * 8 * 8 * 9 - 1)
    assert not convolution.products_pay(x, weight, (0, 0))
