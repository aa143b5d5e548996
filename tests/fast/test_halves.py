"""Networks in two halves: where the cut falls, that the halves make the whole, and what is not divided."""

import threading
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from personafl.core.net import Buffers, Net
from personafl.core.rng import generator
from personafl.core.tree import Params
from personafl.fast.halves import Halves, first_layer, halves_of
from personafl.models import convolutional, personal_split, transformer, with_adapters, zoo

IMAGES = torch.rand((5, 1, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TOKENS = torch.arange(35).reshape(5, 7) % 6


def net_of(make: Callable[[], nn.Module], buffers: Buffers = "refused") -> Net:
    return Net(make, buffers).to(torch.device("cpu"), torch.float64)


def params_of(net: Net) -> Params:
    return {name: value.double() for name, value in net.init(generator(3)).items()}


def divided(net: Net, trained: Iterable[str], x: Tensor = IMAGES) -> tuple[Halves, Tensor]:
    """Return the cut and the features of x, after checking that the halves make the whole with other weights."""
    found = halves_of(net, trained, x)
    assert found is not None
    params = params_of(net)
    features = found.features.apply({name: params[name] for name in found.features.shapes}, x)
    outputs = found.head.apply({name: params[name] for name in found.head.shapes}, features)
    torch.testing.assert_close(outputs, net.apply(params, x), rtol=0, atol=1e-12)
    assert set(trained) <= found.head.shapes.keys()
    assert not set(trained) & found.features.shapes.keys()
    assert found.size == features[0].numel()
    return found, features


OUTPUTS = {
    "mlp": (lambda: zoo.mlp((1, 16, 16), 3, hidden=(9, 7)), IMAGES, [5, 7]),
    "cnn": (lambda: zoo.cnn((1, 16, 16), 3, channels=(2, 3), hidden=6), IMAGES, [5, 6]),
    "lenet": (lambda: convolutional.lenet((1, 16, 16), 3), IMAGES, [5, 84]),
    "resnet20": (lambda: convolutional.resnet20((1, 16, 16), 3, width=4), IMAGES, [5, 16]),
    "window": (lambda: zoo.TextWindow(6, 6, context=3, width=4, hidden=8), TOKENS, [5, 7, 8]),
    "transformer": (
        lambda: transformer.LanguageModel((7,), 6, 6, width=8, heads=2, hidden=12, blocks=4),
        TOKENS,
        [5, 7, 8],
    ),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_features_of_an_output_part_are_its_inputs(name: str) -> None:
    make, x, shape = OUTPUTS[name]
    net = net_of(make)
    trained = [key for key in net.shapes if personal_split(make(), "output").is_personal(key)]
    found, features = divided(net, trained, x)
    assert list(features.shape) == shape
    if name != "transformer":  # its last block lies under the embedding, which is the first layer too
        assert found.head.shapes.keys() == set(trained)


def test_layers_under_adapters_are_features() -> None:
    """LoRA is beside linear layers: the convolutions before them stay as they are."""
    net = net_of(lambda: with_adapters(convolutional.lenet((1, 16, 16), 3), "lora", size=2))
    _, features = divided(net, [name for name in net.shapes if "adapter" in name])
    assert features.shape == (5, 64)


def test_a_value_that_two_heads_use_is_the_features() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.shared, self.own = nn.Linear(256, 4), nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            features = torch.relu(self.body(x.flatten(1)))
            result: Tensor = self.shared(features) + self.own(features)
            return result

    found, features = divided(net_of(Two), ["own.weight", "own.bias"])
    assert features.shape == (5, 4)
    assert found.head.shapes.keys() == {"shared.weight", "shared.bias", "own.weight", "own.bias"}


def test_dropout_and_batch_statistics_are_above_the_cut() -> None:
    """The features end where something differs from step to step; the head keeps its dropout, mask for mask."""
    net = net_of(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(256, 5), nn.Dropout(0.5), nn.BatchNorm1d(5), nn.Linear(5, 3)),
        "dropped",
    )
    found, features = divided(net, ["4.weight", "4.bias"])
    assert found.features.shapes.keys() == {"1.weight", "1.bias"}
    params, key = params_of(net), torch.tensor(11)
    real = torch.tensor([True, True, False, True, False])
    whole = net.apply(params, IMAGES, real, key)
    torch.testing.assert_close(
        found.head.apply({name: params[name] for name in found.head.shapes}, features, real, key), whole
    )
    assert not torch.allclose(whole, net.apply(params, IMAGES))


def early_dropout() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(256, 5), nn.Linear(5, 3))


def early_norm() -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(256, 5), nn.Linear(5, 3))


class Branching(nn.Module):
    """torch.fx cannot trace a branch on data."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(256, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x.flatten(1))
        result: Tensor = self.head(features) if features.sum() > 0 else self.head(-features)
        return result


class InPlace(Branching):
    """The features are changed after they were made, by a trained part whose result nobody names."""

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x.flatten(1))
        features.add_(self.head.bias.sum())
        result: Tensor = features[:, :3]
        return result


class Turned(Branching):
    """The features have the samples on another axis."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = (self.head.weight @ self.body(x.flatten(1)).t()).t()
        return result


class Skipping(Branching):
    """The input goes around the body."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(x.flatten(1)) + x.flatten(1)[:, :4])
        return self.head(result.new_zeros(1, 4)) * x.mean((1, 2, 3)).unsqueeze(1) + result


class Tied(Branching):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.head


UNDIVIDED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "first layer": (lambda: zoo.mlp((1, 16, 16), 3, hidden=(9,)), "1."),
    "linear": (lambda: zoo.linear((1, 16, 16), 3), "1."),
    "adapters in every layer": (lambda: with_adapters(zoo.mlp((1, 16, 16), 3), "lora", size=2), "adapter"),
    "norms, behind one layer of many": (lambda: convolutional.resnet20((1, 16, 16), 3, width=4), "norm"),
    "dropout before the body": (early_dropout, "3."),
    "batch statistics before the body": (early_norm, "3."),
    "branch on data": (Branching, "head."),
    "in-place change": (InPlace, "head."),
    "another axis": (Turned, "head."),
    "input needed later": (Skipping, "head."),
    "two names": (Tied, "head."),
}


@pytest.mark.parametrize("name", UNDIVIDED)
def test_what_cannot_be_divided_is_not(name: str) -> None:
    make, part = UNDIVIDED[name]
    net = net_of(make, "dropped")
    trained = [key for key in net.shapes if part in key]
    assert trained
    assert halves_of(net, trained, IMAGES) is None


def test_a_cut_is_found_once_and_under_vmap_too() -> None:
    net = net_of(lambda: zoo.mlp((1, 16, 16), 3))
    found: list[Halves | None] = []

    def look(value: Tensor) -> Tensor:
        found.append(halves_of(net, ["3.weight", "3.bias"], IMAGES))
        return value

    torch.func.vmap(look)(torch.zeros(2))
    assert found[0] is not None
    assert halves_of(net, ["3.bias", "3.weight"], IMAGES) is found[0]


@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_network_that_looks_at_its_neighbours_is_not_divided(which: int) -> None:
    """What one sample of a batch decides for all is another thing in every step."""

    class Scaled(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * x[which].mean().item())

    net = net_of(lambda: Scaled(nn.Flatten(), nn.Linear(256, 9), nn.Tanh(), nn.Linear(9, 3)))
    assert halves_of(net, ["3.weight", "3.bias"], IMAGES) is None
    assert first_layer(net, ["1.weight", "1.bias"], IMAGES) is None


OTHER = nn.Linear(4, 4)
SEEN: list[Tensor | Exception] = []


def call_other() -> None:
    try:
        SEEN.append(OTHER(torch.ones(1, 4)))
    except Exception as error:
        SEEN.append(error)


class Interrupted(nn.Module):
    """Has another thread call another network in the middle of its own forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        thread = threading.Thread(target=call_other)
        thread.start()
        thread.join()
        return self.head(torch.relu(self.body(x)))  # type: ignore[no-any-return]


def test_other_threads_call_their_networks_while_one_is_looked_into() -> None:
    """torch.fx has itself asked for each call of a module, in whatever thread: devices of one process failed by it."""
    SEEN.clear()
    assert halves_of(Net(Interrupted()), ["head.weight", "head.bias"], torch.zeros(1, 4)) is not None
    assert SEEN
    assert all(isinstance(seen, Tensor) for seen in SEEN)
