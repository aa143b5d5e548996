"""Sums of clipped gradients in the fast way are those of the definition, and what is not known goes that way."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.func import vmap
from torch.utils._python_dispatch import TorchDispatchMode

from personafl.core.batches import Batch
from personafl.core.guard import Guard
from personafl.core.losses import MeanLoss, cross_entropy
from personafl.core.net import Net
from personafl.core.samples import clipped_sums, noisy_mean
from personafl.core.seam import definition
from personafl.core.tree import Params
from personafl.fast import samples

NETS: dict[str, Any] = {
    "perceptron": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.LayerNorm(5), nn.Linear(5, 3)),
    "without a bias": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 5, bias=False), nn.Tanh(), nn.Linear(5, 3)),
    "cnn": lambda: nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 2, (3, 2), stride=(1, 2), padding=(0, 1)),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(12, 3),
    ),
    "wide patches": lambda: nn.Sequential(
        nn.Conv2d(1, 2, 3, dilation=(2, 1), padding=(0, 1), stride=(1, 3)),
        nn.Tanh(),
        nn.Conv2d(2, 3, 2, dilation=2, bias=False),
        nn.Flatten(),
        nn.Linear(6, 3),
    ),
}
NETS["an activation used twice"] = lambda: nn.Sequential(
    nn.Flatten(), nn.Linear(64, 5), (act := nn.Tanh()), nn.Linear(5, 4), act, nn.Linear(4, 3)
)

SHAPES = {"second": (3,), "first": (4, 2), "third": ()}


def some(clients: int, samples_: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(clients, samples_, 1, 8, 8, generator=generator, dtype=torch.float64)
    real = torch.ones(clients, samples_, dtype=torch.bool)
    real[-1, -2:] = False
    x[-1, -1] = torch.nan  # padding, whatever it is
    x[0, 0] = torch.inf  # a sample without a gradient
    y = torch.randint(3, (clients, samples_), generator=generator)
    return Batch(x, y, real, torch.zeros(clients, dtype=torch.int64))


@pytest.mark.parametrize("name", NETS)
def test_it_is_the_definition(name: str) -> None:
    """For one client and for stacked ones; of all parameters, and of some with the others fixed."""
    net = Net(NETS[name]).to(torch.device("cpu"), torch.float64)
    params = [{n: v.double() for n, v in net.init(torch.Generator().manual_seed(s)).items()} for s in range(2)]
    batch, clip = some(2, 5), torch.tensor(0.4, dtype=torch.float64)
    first = next(iter(params[0]))
    for fixed in ((), (first,)):

        def of(way: Any, own: Any, *parts: Any, fixed: Any = fixed) -> Any:
            objective = MeanLoss(net, cross_entropy, {n: own[n] for n in fixed})
            assert samples._plain(objective)
            return way(objective, {n: v for n, v in own.items() if n not in fixed}, Batch(*parts), clip, None)[0]

        each = [of(definition(clipped_sums), params[row], *(part[row] for part in batch[:4])) for row in range(2)]
        alone = [of(samples.clipped_sums, params[row], *(part[row] for part in batch[:4])) for row in range(2)]
        torch.testing.assert_close(alone, each, rtol=0, atol=1e-12)
        stacked = {n: torch.stack([one[n] for one in params]) for n in params[0]}
        both = vmap(lambda own, *parts: of(samples.clipped_sums, own, *parts))(stacked, *batch[:4])
        together = {n: torch.stack([one[n] for one in each]) for n in each[0]}
        torch.testing.assert_close(both, together, rtol=0, atol=1e-12)


@pytest.mark.parametrize("frozen", ["bias", "weight", "0", "3"])
@pytest.mark.parametrize("name", ["perceptron", "cnn"])
def test_with_frozen_parameters_too(name: str, frozen: str) -> None:
    """Of all layers biases alone are trained, or weights, or a layer is not."""

    def make() -> nn.Module:
        module = NETS[name]()
        for path, value in module.named_parameters():
            value.requires_grad_(frozen not in path.split("."))
        return module  # type: ignore[no-any-return]

    net = Net(make).to(torch.device("cpu"), torch.float64)
    params = {n: v.double() for n, v in net.init(torch.Generator().manual_seed(1)).items()}
    batch, clip = Batch(*(part[1] for part in some(2, 5)[:4])), torch.tensor(0.4, dtype=torch.float64)
    objective = MeanLoss(net, cross_entropy)
    expected = definition(clipped_sums)(objective, params, batch, clip, None)[0]
    found = samples.clipped_sums(objective, params, batch, clip, None)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_patches_are_copied_at_once_and_nothing_large_is_turned() -> None:
    """`im2col` starts a kernel for each image on a GPU, and a copy of all patches takes as long as the products.

    The largest that is copied are the patches of the first layer, 9 · 64 numbers of each sample: once.
    """
    net = Net(lambda: nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3)))
    net, copied = net.to(torch.device("cpu"), torch.float64), []
    params = {name: value.double() for name, value in net.init(torch.Generator().manual_seed(0)).items()}
    batch = Batch(*(part[0] for part in some(2, 5)[:4]))

    class Looked(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            assert func is not torch.ops.aten.im2col.default
            if func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default) and found.numel() >= 5 * 9 * 64:
                copied.append(found.numel())
            return found

    with Looked():
        samples.clipped_sums(MeanLoss(net, cross_entropy), params, batch, torch.tensor(0.4), None)
    assert copied == [5 * 9 * 64]


@pytest.mark.parametrize("words", [1, 4])
def test_noise_is_the_definitions(words: int) -> None:
    """For one client and for stacked ones, by keys of the seed and by secret ones, whatever the order of the sums."""
    generator = torch.Generator().manual_seed(0)
    sums = {name: torch.randn(3, *shape, generator=generator).double() for name, shape in SHAPES.items()}
    key = torch.randint(-(2**62), 2**62, (3, words), generator=generator).squeeze(1 if words == 1 else 0)
    one = torch.ones(3, dtype=torch.float64)
    guards = Guard(0.5 * one, 0.7 * one, torch.tensor([4.0, 5.0, 6.0]).double(), key, one.bool())

    def of(row: int) -> tuple[Params, Guard]:
        return {name: value[row] for name, value in sums.items()}, Guard(*(part[row] for part in guards))

    each = [definition(noisy_mean)(*of(row)) for row in range(3)]
    torch.testing.assert_close([samples.noisy_mean(*of(row)) for row in range(3)], each, rtol=0, atol=1e-12)
    for way in (samples.noisy_mean, definition(noisy_mean)):
        both = vmap(lambda own, *parts, way=way: way(own, Guard(*parts)))(sums, *guards)
        together = {n: torch.stack([one[n] for one in each]) for n in each[0]}
        torch.testing.assert_close(both, together, rtol=0, atol=1e-12)
    drawn = [
        torch.cat([each[row][n].flatten() - sums[n][row].flatten() / guards.size[row] for n in each[0]])
        for row in range(3)
    ]
    assert torch.stack(drawn).unique().numel() == 3 * len(drawn[0])


class Mixing(nn.Module):
    """Lets samples see each other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


def test_what_is_not_known_is_not_taken() -> None:
    layers = (Mixing(), nn.Dropout(0.1), nn.GroupNorm(1, 64), nn.BatchNorm1d(64))
    for layer in layers:
        net = Net(lambda layer=layer: nn.Sequential(nn.Flatten(), layer, nn.Linear(64, 3)), buffers="dropped")
        assert not samples._plain(MeanLoss(net, cross_entropy))
    one, other = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    other.weight = one.weight
    for twice in (one, other):  # a layer, or a weight alone
        net = Net(nn.Sequential(nn.Flatten(), one, nn.Tanh(), twice, nn.Linear(64, 3)))
        assert not samples._plain(MeanLoss(net, cross_entropy))
    net = Net(NETS["perceptron"])
    assert not samples._plain(MeanLoss(net, lambda scores, y: cross_entropy(scores - scores.mean(0), y)))
