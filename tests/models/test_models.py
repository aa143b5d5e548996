"""Models by name, and what they are given of the data."""

import dataclasses
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from models.cases import CASES, CHARACTERS, F64, FEATURES, IMAGES, SPEECH, WORDS, data_of, uniform
from personafl.core.net import Net
from personafl.core.rng import generator
from personafl.core.tasks import task_named
from personafl.core.tree import Params
from personafl.data.federated import FederatedData
from personafl.errors import BadInput
from personafl.models import MODELS, make_net
from personafl.models.network import Network, SharedNetwork


def test_every_model_has_a_case() -> None:
    assert CASES.keys() == MODELS.keys() - {"pretrained"}  # which needs a folder: test_pretrained.py


@pytest.mark.parametrize("name", CASES)
def test_every_model_stacks(name: str) -> None:
    """Built, probed and trained with its task's loss: outputs and gradients stacked over clients = one by one."""
    data, options = CASES[name]
    if "dropout" in inspect.signature(MODELS[name]).parameters:
        options = {**options, "dropout": 0.3}
    net = make_net(Network(name=name, **options), data)
    start = net.init(generator(1))
    assert all(value.dtype == torch.float32 and bool(value.isfinite().all()) for value in start.values())
    x = data.x.to(F64) if data.x.is_floating_point() else data.x
    output = net.apply({n: value.to(F64) for n, value in start.items()}, x)
    assert output.shape[0] == 5
    assert output.shape[-1] == 3
    assert output.shape[1:-1] == (data.y.shape[1:] if data.task != "ctc" else (6,))

    def objective(params: Params, own: Tensor, targets: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        result = net.apply(params, own, torch.ones(len(own), dtype=torch.bool), key)
        return task_named(data.task).loss(result, targets).mean(), result

    clients = [{n: value.to(F64) for n, value in net.init(generator(seed)).items()} for seed in (1, 2)]
    batches = [(x[part], data.y[part], torch.tensor(part.start)) for part in (slice(0, 2), slice(3, 5))]
    alone = [grad(objective, has_aux=True)(params, *batch) for params, batch in zip(clients, batches, strict=True)]
    stacked = {n: torch.stack([params[n] for params in clients]) for n in start}
    many = (torch.stack(parts) for parts in zip(*batches, strict=True))
    gradients, outputs = vmap(grad(objective, has_aux=True))(stacked, *many)
    for client, (gradient, result) in enumerate(alone):
        torch.testing.assert_close(outputs[client], result, rtol=1e-10, atol=1e-10)
        for n in start:
            torch.testing.assert_close(gradients[n][client], gradient[n], rtol=1e-9, atol=1e-9)
    # A gradient that is 0 for all samples would be a parameter without use.
    unused = [n for n, value in gradients.items() if not bool(value.any())]
    assert not unused, unused


@pytest.mark.parametrize("name", CASES)
def test_no_model_keeps_running_statistics(name: str) -> None:
    data, options = CASES[name]
    net = make_net(Network(name=name, **options), data)
    assert not net.batch_dependent


@pytest.mark.parametrize(
    ("name", "data", "options", "parameters"),
    [
        ("linear", FEATURES, {}, 6 * 3 + 3),
        ("linear", IMAGES, {}, 144 * 3 + 3),
        ("mlp", FEATURES, {"hidden": [4, 5]}, 6 * 4 + 4 + 4 * 5 + 5 + 5 * 3 + 3),
        ("mlp", FEATURES, {"hidden": []}, 6 * 3 + 3),
        ("mlp", IMAGES, {"hidden": [4], "dropout": 0.5}, 144 * 4 + 4 + 4 * 3 + 3),
        (
            "cnn",
            IMAGES,
            {"channels": [4, 5], "hidden": 6},
            2 * 4 * 9 + 4 + 4 * 5 * 9 + 5 + 5 * 2 * 2 * 6 + 6 + 6 * 3 + 3,
        ),
        ("mlp", FEATURES, {"hidden": [4], "norm": True}, 6 * 4 + 4 + 2 * 4 + 4 * 3 + 3),
        ("bag", WORDS, {"width": 4}, 100 * 4 + 4 * 3 + 3),
        ("window", CHARACTERS, {"context": 2, "width": 4, "hidden": 5}, 20 * 4 + 2 * 4 * 5 + 5 + 5 * 3 + 3),
    ],
)
def test_shapes_and_sizes(name: str, data: FederatedData, options: dict[str, object], parameters: int) -> None:
    net = make_net(Network(name=name, **options), data)
    assert net.parameters == parameters
    output = net.apply(net.init(generator(0)), data.x)
    assert output.shape == (*data.y.shape, 3)


@pytest.mark.parametrize(
    ("shape", "network"),
    [
        ((1, 8, 8), {"name": "cnn", "channels": (16, 32), "norm": True}),
        ((1, 32, 32), {"name": "cnn", "channels": (16, 32), "norm": True}),
        ((3, 64, 64), {"name": "cnn", "channels": (16, 32, 64), "norm": True}),
        ((3, 224, 200), {"name": "cnn", "channels": (16, 32, 64, 64, 64), "norm": True}),
        ((1, 4, 300), {"name": "cnn", "channels": (16, 32), "norm": True}),  # no lower than one row
        ((1, 3, 8), {"name": "mlp", "hidden": (64, 64), "norm": True}),
        ((6, 50), {"name": "cnn1d", "channels": (32, 64), "norm": True}),
        ((6, 4), {"name": "cnn1d", "channels": (32, 64), "norm": True}),
        ((1, 1000), {"name": "cnn1d", "channels": (32, 64, 64, 64, 64, 64), "norm": True}),
        ((6, 3), {"name": "mlp", "hidden": (64, 64), "norm": True}),
        ((28,), {"name": "mlp", "hidden": (64, 64), "norm": True}),
        ((2, 4, 4, 4), {"name": "mlp", "hidden": (64, 64), "norm": True}),
    ],
)
def test_auto_goes_by_the_shape_of_a_sample(shape: tuple[int, ...], network: dict[str, object]) -> None:
    """However large images are, at most 8×8 places are left for the layer after the convolutions; of series, 16."""
    data = data_of(uniform(2, *shape), torch.arange(2))
    chosen = Network().resolved(data)
    assert chosen == Network(**network)
    assert make_net(chosen, data).parameters < 350_000


@pytest.mark.parametrize(
    ("data", "network"),
    [
        (WORDS, Network(name="bag", hidden=(64,), norm=True)),
        (CHARACTERS, Network(name="window", norm=True)),
        (SPEECH, Network(name="speech")),
    ],
)
def test_auto_goes_by_the_task_of_tokens_and_speech(data: FederatedData, network: Network) -> None:
    assert Network().resolved(data) == network
    make_net(network, data)


def test_options_beside_auto_are_those_of_the_network_it_stands_for() -> None:
    given = SharedNetwork(hidden=[9], personal="input").resolved(FEATURES)
    assert given == SharedNetwork(name="mlp", hidden=[9], norm=True, personal="input")


def test_every_name_is_documented() -> None:
    for build in MODELS.values():
        assert (build.__doc__ or "").splitlines()[0].endswith(".")


def test_the_start_depends_on_the_seed_alone_and_is_the_modules_own_if_one_is_given() -> None:
    net = make_net(Network(name="mlp"), FEATURES)
    first, again, other = (net.init(generator(seed)) for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["1.weight"], other["1.weight"])
    module = nn.Linear(6, 3)
    start = make_net(Network(), FEATURES, module).init(generator(0))
    assert torch.equal(start["weight"], module.weight)


def test_padding_tokens_do_not_count_in_a_bag() -> None:
    net = make_net(Network(name="bag"), WORDS)
    params = net.init(generator(0))
    short, padded = torch.tensor([[3, 5]]), torch.tensor([[3, 5, 0, 0]])
    torch.testing.assert_close(net.apply(params, short), net.apply(params, padded))


def test_a_window_does_not_see_what_comes_next() -> None:
    net = make_net(Network(name="window", context=3), CHARACTERS)
    params = net.init(generator(0))
    tokens = torch.arange(10).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 5] = 17
    same = (net.apply(params, tokens) == net.apply(params, changed)).all(-1)[0]
    assert same.tolist() == [True] * 5 + [False] * 3 + [True] * 2


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("cnn", FEATURES, "for images"),
        ("cnn", data_of(torch.rand(5, 1, 3, 8), torch.arange(5) % 3), "at least 4×4"),
        ("bag", FEATURES, "is for text"),
        ("bag", CHARACTERS, r"needs \[2, 7, 3\]"),
        ("mlp", CHARACTERS, "does not accept|needs"),
        ("lenet", IMAGES, "at least 12×12"),
        ("cnn1", IMAGES, "at least 16×16"),
        ("cnn2", FEATURES, "for images"),
        ("resnet18", FEATURES, "for images"),
        ("transformer", FEATURES, "is for text"),
        ("transformer", WORDS, r"needs \[2, 3\]"),
        ("speech", FEATURES, "for log-mel spectra"),
        ("speech", IMAGES, "for log-mel spectra"),
        ("mlp", SPEECH, r"needs \[2, frames, 3\] \(3 classes, at least 4 frames\)"),
    ],
)
def test_models_that_do_not_fit_the_data(name: str, data: FederatedData, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        make_net(Network(name=name), data)


@pytest.mark.parametrize(
    ("name", "data", "options", "message"),
    [
        ("transformer", CHARACTERS, {"width": 10, "heads": 4}, "width = 10 is not a multiple of heads = 4"),
        ("transformer", CHARACTERS, {"dropout": 1.0}, "model.dropout: "),
        ("transformer", dataclasses.replace(CHARACTERS, vocabulary=2), {}, "3 classes for 2 tokens"),
        ("resnet18", IMAGES, {"width": 3}, "cannot be built"),
        ("resnet18", IMAGES, {"groups": [2, 2]}, "groups = .2, 2.: give one number, or one for each of 4 stages"),
        ("resnet20", IMAGES, {"stem": "large"}, "model.stem: "),
        ("speech", SPEECH, {"strides": [2, 2]}, r"has shape \[2, 3, 3\].*at least 4 frames"),
        ("split_input", FEATURES, {"private": 6}, "private = 6 leaves nothing shared of 6 features"),
        ("additive", FEATURES, {"form": "product"}, "model.form: "),
        ("mlp", FEATURES, {"adaptor": "lora"}, "did you mean 'adapter'"),
    ],
)
def test_options_that_do_not_work(name: str, data: FederatedData, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        make_net(SharedNetwork(name=name, **options), data)


def test_ctc_counts_the_blanks_between_equal_labels() -> None:
    """[1, 1, 2] has three labels but no alignment with three frames."""

    class Frames(nn.Module):
        def __init__(self, frames: int) -> None:
            super().__init__()
            self.line = nn.Linear(48, frames * 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.line(x.flatten(1)).reshape(len(x), -1, 3)

    assert isinstance(make_net(Network(), SPEECH, Frames(4)), Net)
    with pytest.raises(BadInput, match="at least 4 frames"):
        make_net(Network(), SPEECH, Frames(3))
