"""Models by name, and what they are given of the data."""

import numpy as np
import pytest
import torch
from torch import nn

from personafl.core.rng import generator
from personafl.data.federated import FederatedData, Ragged, make_federated
from personafl.errors import BadInput
from personafl.models import MODELS, default_model, make_net


def data_of(x: torch.Tensor, y: torch.Tensor, vocabulary: int | None = None) -> FederatedData:
    rows = Ragged.from_lists([np.arange(len(x))])
    return make_federated(
        name="any",
        x=x,
        y=y,
        classes=3,
        train=rows,
        validation=rows,
        test=rows,
        seen=np.arange(1),
        unseen=np.zeros(0, np.int64),
        client_names=("0",),
        label_names=tuple("012"),
        vocabulary=vocabulary,
    )


IMAGES = data_of(torch.rand(5, 2, 9, 8), torch.arange(5) % 3)
FEATURES = data_of(torch.rand(5, 6), torch.arange(5) % 3)
WORDS = data_of(torch.arange(35).reshape(5, 7) % 11, torch.arange(5) % 3, vocabulary=100)
CHARACTERS = data_of(torch.arange(35).reshape(5, 7) % 3, torch.arange(35).reshape(5, 7) % 3, vocabulary=20)


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
        ("bag", WORDS, {"width": 4}, 100 * 4 + 4 * 3 + 3),
        ("window", CHARACTERS, {"context": 2, "width": 4, "hidden": 5}, 20 * 4 + 2 * 4 * 5 + 5 + 5 * 3 + 3),
    ],
)
def test_shapes_and_sizes(name: str, data: FederatedData, options: dict[str, object], parameters: int) -> None:
    net = make_net(name, options, data)
    assert net.parameters == parameters
    output = net.apply(net.init(generator(0)), data.x)
    assert output.shape == (*data.y.shape, 3)


@pytest.mark.parametrize(("data", "name"), [(IMAGES, "mlp"), (FEATURES, "mlp"), (WORDS, "bag"), (CHARACTERS, "window")])
def test_a_default_for_every_kind_of_data(data: FederatedData, name: str) -> None:
    assert default_model(data) == name
    make_net(name, {}, data)


def test_every_name_is_documented() -> None:
    for build in MODELS.values():
        assert (build.__doc__ or "").splitlines()[0].endswith(".")


def test_the_start_depends_on_the_seed_alone_and_is_the_modules_own_if_one_is_given() -> None:
    net = make_net("mlp", {}, FEATURES)
    first, again, other = (net.init(generator(seed)) for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["1.weight"], other["1.weight"])
    module = nn.Linear(6, 3)
    start = make_net(module, {}, FEATURES).init(generator(0))
    assert torch.equal(start["weight"], module.weight)


def test_padding_tokens_do_not_count_in_a_bag() -> None:
    net = make_net("bag", {}, WORDS)
    params = net.init(generator(0))
    short, padded = torch.tensor([[3, 5]]), torch.tensor([[3, 5, 0, 0]])
    torch.testing.assert_close(net.apply(params, short), net.apply(params, padded))


def test_a_window_does_not_see_what_comes_next() -> None:
    net = make_net("window", {"context": 3}, CHARACTERS)
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
    ],
)
def test_models_that_do_not_fit_the_data(name: str, data: FederatedData, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        make_net(name, {}, data)
