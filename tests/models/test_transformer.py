"""Transformers: what a place sees, sizes of the paper, and that the speech model learns spoken digits with CTC."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from models.cases import CHARACTERS, TRANSFORMER
from personafl.core.rng import generator
from personafl.core.tasks import task_named
from personafl.data.build import load
from personafl.data.config import DataConfig
from personafl.models import MODELS, make_net, personal_split, with_adapters
from personafl.models.network import Network


def count(module: nn.Module, personal: str | None = None) -> int:
    split = None if personal is None else personal_split(module, personal)
    return sum(p.numel() for n, p in module.named_parameters() if split is None or split.is_personal(n))


def test_a_place_sees_all_before_it_and_nothing_after() -> None:
    net = make_net(Network(name="transformer", **TRANSFORMER), CHARACTERS)
    params = net.init(generator(0))
    tokens = torch.arange(7).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 3] = 17
    same = (net.apply(params, tokens) == net.apply(params, changed)).all(-1)[0]
    assert same.tolist() == [True] * 3 + [False] * 4


def test_dropout_is_on_with_a_key_only() -> None:
    net = make_net(Network(name="transformer", **{**TRANSFORMER, "dropout": 0.5}), CHARACTERS)
    params, x = net.init(generator(0)), CHARACTERS.x
    assert torch.equal(net.apply(params, x), net.apply(params, x))
    one, two = (net.apply(params, x, key=torch.tensor(key)) for key in (1, 2))
    assert not torch.equal(one, two)


def test_the_language_model_has_the_sizes_of_table_5() -> None:
    """StackOverflow: 5.7M, a block 0.8M, adapters 0.07M. A block, d = 256 and h = 1024: 4d² + 2dh + 9d + h."""
    with torch.device("meta"):
        plain = MODELS["transformer"](
            input_shape=(20,), vocabulary=10_000, classes=10_000, width=256, hidden=1024, blocks=4
        )
        adapted = with_adapters(plain, "bottleneck", size=16)
    assert count(plain) == 10_000 * 256 + 20 * 256 + 4 * 789_760 + 2 * 256 + 10_000
    assert round(count(plain) / 1e6, 1) == 5.7
    assert count(plain, "input") == count(plain, "output") == 4 * 256**2 + 2 * 256 * 1024 + 9 * 256 + 1024 == 789_760
    assert count(adapted) - count(plain) == 8 * (2 * 256 * 16 + 16 + 256) == 67_712
    assert count(adapted, "adapter") == 67_712 + 9 * 512  # and the norms


def test_the_speech_model_has_the_sizes_of_table_8() -> None:
    """Librispeech: subsampling 0.8M, the last block's second linear layer 0.6M, adapters 0.15M, 13.4M in all."""
    options = {"width": 384, "heads": 6, "hidden": 1536, "blocks": 6, "strides": (2, 2)}
    with torch.device("meta"):
        plain = MODELS["speech"](input_shape=(1, 40, 1000), classes=5000, **options)
        adapted = with_adapters(plain, "bottleneck", size=16)
    assert count(plain, "input") == 814_848
    assert count(plain, "output") == 590_208
    assert count(adapted) - count(plain) == 152_256
    assert round(count(plain) / 1e6, 1) == 13.5


def test_the_transformer_learns_a_sentence() -> None:
    torch.manual_seed(0)
    text = torch.tensor([[ord(c) - 97 for c in "personalfederatedlearning"]])
    module = MODELS["transformer"](input_shape=(24,), vocabulary=26, classes=26, width=16, hidden=32)
    optimizer = torch.optim.Adam(module.parameters(), 1e-2)
    task = task_named("next-token")
    for _ in range(80):
        optimizer.zero_grad()
        task.loss(module(text[:, :-1]), text[:, 1:]).mean().backward()
        optimizer.step()
    assert float(task.correct(module(text[:, :-1]), text[:, 1:])) == 1


@pytest.mark.system
def test_spoken_digits_are_learned(shared_data: Path) -> None:
    """A few hundred steps of a tiny model: a third of the test words are exactly right, from none."""
    data = load(DataConfig(source=str(shared_data / "fsdd" / "fsdd_logmel.npz"), target="spelling"), seed=0)
    task = task_named(data.task)
    torch.manual_seed(0)
    module = MODELS["speech"](input_shape=tuple(data.x.shape[1:]), classes=data.classes, width=32, hidden=64, blocks=1)
    optimizer = torch.optim.Adam(module.parameters(), 3e-3)
    train, test = (torch.from_numpy(rows.flat) for rows in (data.train, data.test))
    for _ in range(400):
        rows = train[torch.randint(len(train), (32,))]
        optimizer.zero_grad()
        task.loss(module(data.x[rows]), data.y[rows]).mean().backward()
        optimizer.step()
    with torch.no_grad():
        output = module(data.x[test])
    assert float(task.correct(output, data.y[test]).mean()) > 0.33
