"""When training is recorded, and that a recording is the training."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from personafl import api
from personafl.core import rng
from personafl.core.augment import Augment, augmented
from personafl.core.batches import Data, Steps, draw
from personafl.core.tree import Tree
from personafl.fast import cuda_graphs
from personafl.fast.cuda_graphs import Graphs
from personafl.fast.drawing import round_number

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
POOL = torch.arange(200.0).reshape(100, 2), torch.zeros(100)


def data_of(steps: int, clients: int = 3) -> Data:
    """Return batches of two samples."""
    everyone = np.arange(clients)
    sizes = np.full(clients, 5)
    batches = draw(
        POOL,
        np.arange(100),
        5 * everyone,
        sizes,
        Steps(steps=steps, batch=2),
        rng.mix(steps, everyone),
        rng.mix(everyone),
    )
    return Data({"local": batches}, torch.full((clients,), 5), torch.tensor(0.0))


class Faked:
    """Stands in for a recording: counts how often it is made, and runs the function."""

    def __init__(self) -> None:
        self.made: list[int] = []

    def record(self, function: Callable[..., Tree], down: Tree, states: Tree, data: Data) -> Any:
        self.made.append(data.phases["local"].rows.shape[1])

        class Recording:
            def replay(self, *inputs: Tree) -> Tree:
                return function(*inputs)

        return Recording()


def total(down: torch.Tensor, states: torch.Tensor, data: Data) -> torch.Tensor:
    """Return down + states + the sum of what is real."""
    batches = data.phases["local"]
    entries = torch.where(batches.real, batches.pool_x[batches.rows].sum(-1), 0.0)
    result: torch.Tensor = down + states + entries.sum((1, 2))
    return result


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> Faked:
    """Replace recording, which needs a GPU."""
    fake = Faked()
    monkeypatch.setattr(cuda_graphs, "_record", fake.record)
    return fake


def run(recordings: Graphs, steps: int, clients: int = 3) -> None:
    """Check that a call's result is the function's."""
    data = data_of(steps, clients)
    down, states = torch.tensor(1.0), torch.arange(float(clients))
    assert torch.equal(recordings.run(total, down, states, data), total(down, states, data))


def test_what_comes_twice_is_recorded_once(faked: Faked) -> None:
    """The first call is not recorded, all later ones are one recording."""
    recordings = Graphs()
    for _ in range(4):
        run(recordings, steps=11)
    assert faked.made == [11]


def test_other_shapes_are_other_recordings(faked: Faked) -> None:
    """Here of another number of clients."""
    recordings = Graphs()
    for clients in (3, 2, 3, 2, 3, 2):
        run(recordings, steps=4, clients=clients)
    assert faked.made == [4, 4]


def test_varying_steps_are_filled_up(faked: Faked) -> None:
    """Few recordings serve many numbers of steps, and filling changes nothing."""
    recordings = Graphs()
    for steps in (20, 19, 22, 24, 17, 30, 18, 23):
        run(recordings, steps)
    assert faked.made == [24, 32]


def test_old_recordings_are_given_up(faked: Faked) -> None:
    """Each holds memory."""
    recordings = Graphs()
    for _ in range(2):
        for clients in range(1, cuda_graphs._MOST + 3):
            for _ in range(2):
                run(recordings, steps=2, clients=clients)
    assert len(recordings._recordings) == cuda_graphs._MOST


def test_what_cannot_be_recorded_is_trained_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one line that says why."""

    def refuse(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(cuda_graphs, "_record", refuse)
    recordings = Graphs()
    run(recordings, steps=2)
    with pytest.warns(UserWarning, match="without CUDA graphs.*not permitted when stream is capturing$"):
        run(recordings, steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(recordings, steps=2)


@pytest.mark.parametrize(
    ("steps", "rounded"), [(0, 0), (1, 1), (8, 8), (9, 12), (12, 12), (13, 16), (16, 16), (17, 24)]
)
def test_round_numbers(steps: int, rounded: int) -> None:
    """At most half more."""
    assert round_number(steps) == rounded


@CUDA
@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedalt", "quped", "scaffold", "perfedavg"])
def test_a_recording_is_the_training(tmp_path: Path, method: str) -> None:
    """To the bit, with unequal clients."""
    recipe = {
        "method": {"name": method},
        "rounds": 6,
        "data": {"partition": {"kind": "dirichlet", "alpha": 0.5, "clients": 12}},
        "model": {"name": "cnn", "channels": [4, 8], **({"personal": "output"} if method == "fedalt" else {})},
    }
    rows = [
        api.run({**recipe, "engine": {"device": "cuda", "strategy": strategy}}, out=tmp_path / strategy).rows
        for strategy in ("graphs", "stacked")
    ]
    without_time = [[{k: v for k, v in row.items() if k != "seconds"} for row in side] for side in rows]
    assert without_time[0] == without_time[1]


@CUDA
@pytest.mark.parametrize("method", ["fedavg", "fedalt"])
def test_a_recording_augments_as_training_does(tmp_path: Path, method: str) -> None:
    """To the bit, without a warning that graphs are refused; the windows of a step are those of a CPU."""
    how = Augment(flip=True, crop=3, black=(-0.5, 0.25))
    images, key = torch.rand(9, 2, 7, 5), torch.tensor(12)
    assert torch.equal(augmented(images.cuda(), key.cuda(), how).cpu(), augmented(images, key, how))
    partition = {"kind": "dirichlet", "alpha": 0.5, "clients": 12}
    recipe = {
        "method": {"name": method},
        "rounds": 6,
        "data": {"partition": partition, "normalize": "channel", "augment": {"flip": True, "crop": 2}},
        "model": {"name": "cnn", "channels": [4, 8], "personal": "output"},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = [
            api.run({**recipe, "engine": {"device": "cuda", "strategy": strategy}}, out=tmp_path / strategy).rows
            for strategy in ("graphs", "stacked")
        ]
    without_time = [[{k: v for k, v in row.items() if k != "seconds"} for row in side] for side in rows]
    assert without_time[0] == without_time[1]


@CUDA
@pytest.mark.parametrize("method", ["fedavg", "fedalt", "fedrep"])
@pytest.mark.parametrize("dtype", ["tf32", "bfloat16"])
def test_rounded_products_train_about_as_well(tmp_path: Path, method: str, dtype: str) -> None:
    model = {"name": "cnn", "channels": [4, 8], "personal": "output"}
    recipe = {"method": {"name": method}, "rounds": 10, "model": model}
    rounded, plain = (
        api.run({**recipe, "engine": {"device": "cuda", "dtype": name}}, out=tmp_path / name).rows[-1]["accuracy"]
        for name in (dtype, "float32")
    )
    assert abs(rounded - plain) < 0.1
