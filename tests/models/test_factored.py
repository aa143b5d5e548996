"""Low-rank layers as two smaller ones: the same numbers with less work."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from personafl.core import wire
from personafl.core.prox import as_matrix
from personafl.errors import BadInput
from personafl.models.convolutional import resnet20
from personafl.models.cost import latency, multiply_adds
from personafl.models.factored import FactoredConv2d, FactoredLinear, factorize

F64 = torch.float64


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def low_rank(shape: torch.Size | tuple[int, ...], rank: int) -> wire.Factored:
    rows, columns = as_matrix(torch.empty(shape)).shape
    return wire.Factored(drawn(rows, rank), drawn(rank, columns, seed=1), torch.tensor(shape, dtype=torch.int32))


def with_rank(module: nn.Module, rank: int) -> dict[str, Tensor | wire.Factored]:
    """Weights of a network, all that have a matrix form of the given rank."""
    return {
        name: low_rank(value.shape, rank) if value.ndim > 1 else drawn(*value.shape)
        for name, value in module.named_parameters()
    }


def dense_copy(module: nn.Module, weights: dict[str, Any], x: Tensor) -> nn.Module:
    return factorize(module, wire.dense(weights), x)


def halves_of(module: nn.Module) -> list[str]:
    return [name for name, m in module.named_modules() if isinstance(m, FactoredLinear | FactoredConv2d)]


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer(rank: int, bias: bool) -> None:
    layer, x = nn.Linear(11, 9, bias=bias).to(F64), drawn(2, 5, 11)
    weights = with_rank(layer, rank)
    halves, dense = factorize(layer, weights, x), dense_copy(layer, weights, x)
    assert isinstance(halves, FactoredLinear)
    assert isinstance(dense, nn.Linear)
    close(halves(x), dense(x))
    close(halves.weight, dense.weight)
    assert halves.bias is None if dense.bias is None else torch.equal(halves.bias, dense.bias)
    # 10 rows: 11·9 against max(rank, 1)·(11 + 9) each.
    assert multiply_adds(dense, x) == 10 * 99
    assert multiply_adds(halves, x) == 10 * 20 * max(rank, 1)


CONVOLUTIONS: list[dict[str, Any]] = [
    *(
        {"kernel_size": kernel, "stride": stride, "padding": padding, "dilation": dilation}
        for kernel, stride, padding, dilation in product(
            [(3, 5), (4, 2), (1, 1), (1, 3)], [1, (2, 1), (3, 2)], [0, (1, 2)], [1, (2, 1)]
        )
    ),
    {"kernel_size": (3, 4), "padding": "same"},
    {"kernel_size": (4, 3), "padding": "same", "dilation": (1, 2)},
    {"kernel_size": 1, "padding": "same"},
    {"kernel_size": 3, "padding": "valid"},
    {"kernel_size": 3, "padding": 1, "bias": False},
    *(
        {"kernel_size": kernel, "padding": (1, 2), "stride": stride, "padding_mode": mode}
        for mode in ("reflect", "replicate", "circular")
        for kernel in (3, (1, 3))
        for stride in (1, 2)
    ),
    {"kernel_size": (3, 4), "padding": "same", "padding_mode": "circular"},
]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("rank", [0, 2])
def test_a_convolution(options: dict[str, Any], rank: int) -> None:
    layer, x = nn.Conv2d(3, 7, **options).to(F64), drawn(2, 3, 11, 13)
    weights = with_rank(layer, rank)
    dense = dense_copy(layer, weights, x)
    assert isinstance(dense, nn.Conv2d)
    value = weights["weight"]
    assert isinstance(value, wire.Factored)
    u, v = (value.u, value.v) if rank else (value.u.new_zeros(len(value.u), 1), value.v.new_zeros(1, value.v.shape[1]))
    halves = FactoredConv2d(dense, u, v)  # also where it does not pay
    close(halves(x), dense(x))
    close(halves.weight, dense.weight)


def test_it_is_divided_exactly_where_that_takes_at_most_half_the_multiply_adds() -> None:
    """The rule is what is counted: for every geometry and rank the choice is two layers if they take at most half."""
    seen = set()
    for size, kernel, stride, rank in product((5, 8), (1, 3, 5), (1, 2), (1, 2, 4, 6)):
        layer, x = nn.Conv2d(4, 6, kernel, stride).to(F64), drawn(1, 4, size, size)
        weights = with_rank(layer, rank)
        dense = dense_copy(layer, weights, x)
        assert isinstance(dense, nn.Conv2d)
        value = weights["weight"]
        assert isinstance(value, wire.Factored)
        pays = 2 * multiply_adds(FactoredConv2d(dense, value.u, value.v), x) <= multiply_adds(dense, x)
        assert isinstance(factorize(layer, weights, x), FactoredConv2d) == pays, (size, kernel, stride, rank)
        seen.add(pays)
    assert seen == {True, False}


def test_multiply_adds_by_hand() -> None:
    """Input 8×8, 5×5 kernel, no padding: 4×4 places.

    Dense: 16 places · 6·4·25 = 9600. Rank 2: first 8 rows × 4 columns · 2·4·5 = 1280, then 16 · 6·2·5 = 960.
    """
    layer, x = nn.Conv2d(4, 6, 5).to(F64), drawn(1, 4, 8, 8)
    weights = with_rank(layer, 2)
    assert multiply_adds(dense_copy(layer, weights, x), x) == 9600
    assert multiply_adds(factorize(layer, weights, x), x) == 1280 + 960


def test_a_whole_network_keeps_its_function_and_takes_less_work() -> None:
    net, x = resnet20((3, 9, 8), 5, width=8).to(F64), drawn(2, 3, 9, 8)
    weights = with_rank(net, 2)
    whole = {name: value.detach().clone() for name, value in net.named_parameters()}
    halves, dense = factorize(net, weights, x), dense_copy(net, weights, x)
    close(halves(x), dense(x))
    divided = halves_of(halves)
    assert "blocks.4.conv1" in divided
    assert "output" in divided
    assert multiply_adds(halves, x) < multiply_adds(dense, x) / 2
    assert sum(p.numel() for p in halves.parameters()) < sum(p.numel() for p in dense.parameters()) / 2
    assert all(torch.equal(value, whole[name]) for name, value in net.named_parameters())  # it is a copy


class Odd(nn.Module):
    """All that must stay whole, and a layer under two names, called twice, whose weight is also used as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 6)
        self.tied = nn.Linear(6, 10)
        self.tied.weight = self.words.weight
        self.grouped = nn.Conv2d(2, 4, 3, groups=2)
        self.line = nn.Conv1d(6, 6, 3, padding=1)
        self.unused = nn.Linear(6, 6)
        self.once = nn.Linear(6, 6)
        self.again = self.once
        self.own = Own(6, 6)
        self.hooked = nn.Linear(6, 6)
        self.hooked.register_forward_hook(lambda module, inputs, output: 2 * output)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)  # [batch, 5, 6]
        x = self.hooked(self.own(self.line(x.transpose(1, 2)).transpose(1, 2)))
        x = self.again(torch.tanh(self.once(x)))
        x = x + functional.linear(x, self.once.weight, self.once.bias)
        y = self.grouped(x[:, None, :, :].expand(-1, 2, -1, -1)).mean()
        result: Tensor = self.tied(x) + y
        return result


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


def test_what_stays_whole_and_what_is_used_twice() -> None:
    net, tokens = Odd().to(F64), torch.arange(15).reshape(3, 5) % 10
    weights = with_rank(net, 1)
    halves, dense = factorize(net, weights, tokens), dense_copy(net, weights, tokens)
    close(halves(tokens), dense(tokens))
    assert halves_of(halves) == ["once"]
    assert halves.again is halves.once
    assert halves.tied.weight is halves.words.weight  # type: ignore[union-attr]


def test_parameters_that_are_not_given_stay() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)).to(F64)
    made = factorize(net, {"0.weight": low_rank((8, 8), 1)}, drawn(1, 8))
    assert torch.equal(made[1].weight, net[1].weight)  # type: ignore[index]
    assert torch.equal(made[0].bias, net[0].bias)  # type: ignore[index]


@pytest.mark.parametrize("weights", [{"0.weight": drawn(3, 8)}, {"7.weight": drawn(8, 8)}])
def test_weights_of_another_network_are_refused(weights: dict[str, Tensor]) -> None:
    with pytest.raises(BadInput, match=r"another network's: \d.weight"):
        factorize(nn.Sequential(nn.Linear(8, 8)), weights, drawn(1, 8))


def test_latency_is_positive_for_each() -> None:
    x = drawn(20, 4)
    found = latency({"one": nn.Linear(4, 4).to(F64), "other": nn.Linear(4, 2).to(F64)}, x)
    assert found.keys() == {"one", "other"}
    assert all(math.isfinite(value) and value > 0 for value in found.values())
