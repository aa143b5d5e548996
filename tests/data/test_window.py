"""Data that are brought to where they are computed with by parts: the same numbers as if all were there."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from personafl.core import tree
from personafl.data.federated import FederatedData, Ragged
from personafl.data.window import Window
from personafl.errors import BadInput
from personafl.recipe.recipe import Recipe
from personafl.runs.build import prepare
from personafl.runs.job import Job
from personafl.runs.scoring import score, tune
from personafl.simulate.cloud import make_simulation
from personafl.simulate.hardware import placed
from personafl.storage.store import Store
from personafl.testing import make_case

CPU, META = torch.device("cpu"), torch.device("meta")
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
RECIPE = {
    "rounds": 2,
    "data": {"partition": {"kind": "quantity", "clients": 9, "alpha": 1.0}, "unseen": 2, "validation": 0.2},
    "model": {"name": "mlp", "hidden": [8], "personal": "output"},
    "training": {"epochs": 2, "batch": 16},
    "federation": {"cohort": 4},
}
ENGINE = {"threads": 1, "dtype": "float64"}
CLOUD = {"method": {"name": "fedbcdi"}, "cloud": {"servers": 2}, "federation": {"offline": 1}}


def job_of(**changes: object) -> Job:
    return prepare(Recipe.parse({**RECIPE, **changes}))


def through_window(job: Job, samples: int) -> Job:
    """The same job with its samples brought to a window of so many."""
    data = job.federation.data
    x, y = data.x.cpu(), data.y.cpu()
    shown = dataclasses.replace(data, x=x, y=y, window=Window(x, y, samples, data.device))
    return dataclasses.replace(job, federation=dataclasses.replace(job.federation, data=shown))


def outcome(job: Job, folder: Path) -> dict[str, Tensor]:
    """Everything after four rounds, fine-tuning and scoring."""
    fed = job.federation
    folder.mkdir()
    simulation, tuned = make_simulation(fed, Store(folder / "states", 2**30)), Store(folder / "tuned", 2**30)
    losses = [simulation.step(number).loss for number in range(4)]
    if fed.algorithm.client.tuning:
        tune(simulation, tuned, fed.data.seen, 4)
    scored = score(simulation, tuned, fed.data.seen, {"test": fed.data.test}, blends=True).scores
    found = {f"server/{path}": leaf.cpu() for path, leaf in tree.flatten(simulation.saved()).items()}
    for name, store in (("states", simulation.store), ("tuned", tuned)):
        if len(store):
            found |= {f"{name}/{path}": leaf for path, leaf in store.take(store.clients).items()}
    found |= {f"{model} {split}": torch.from_numpy(scores.loss) for (model, split), scores in scored.items()}
    return found | {"losses": torch.tensor(losses)}


@pytest.mark.parametrize("strategy", ["stacked", pytest.param("graphs", marks=CUDA)])
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"method": {"name": "fedalt"}}, id="fedalt", marks=pytest.mark.system),
        pytest.param({"method": {"name": "finetune"}}, id="finetune"),
        pytest.param(CLOUD, id="cloud", marks=pytest.mark.system),
    ],
)
def test_a_window_changes_nothing(changes: dict[str, object], strategy: str, tmp_path: Path) -> None:
    device = "cuda" if strategy == "graphs" else "cpu"
    job = job_of(**changes, engine={**ENGINE, "strategy": strategy, "device": device})
    sizes = job.federation.data.train.sizes
    expected = outcome(job, tmp_path / "all")
    everyone = outcome(through_window(job, int(sizes.sum())), tmp_path / "everyone")
    largest = outcome(through_window(job, int(sizes.max())), tmp_path / "largest")  # few at a time
    assert expected.keys() == everyone.keys() == largest.keys()
    for name, value in expected.items():
        assert torch.equal(everyone[name], value), name
        torch.testing.assert_close(largest[name], value, rtol=0, atol=1e-12, equal_nan=True)


@pytest.fixture
def data() -> FederatedData:
    """Five clients with 3, 11, 6, 14 and 1 samples."""
    return make_case(job_of(method={"name": "fedavg"}).federation.algorithm).data


def test_clients_are_cut_so_that_they_fit(data: FederatedData) -> None:
    shown = dataclasses.replace(data, window=Window(data.x, data.y, 15, CPU))
    assert [part.tolist() for part in shown.fitting(np.arange(5))] == [[0, 1], [2], [3, 4]]
    assert [part.tolist() for part in data.fitting(np.arange(5))] == [[0, 1, 2, 3, 4]]
    pool = shown.pool(np.array([4, 0]))
    assert torch.equal(pool.x[:4], data.x[[34, 0, 1, 2]])
    assert pool.starts.tolist() == [0, 1]
    assert torch.equal(pool.there[:4], torch.from_numpy(pool.rows))


def test_samples_of_any_shape_of_rows(data: FederatedData) -> None:
    shown = dataclasses.replace(data, window=Window(data.x, data.y, 14, META))
    x, y = shown.samples(np.array([[5, 6, 7], [0, 1, 1]]))
    assert x.shape == (2, 3, 1, 8, 8)
    assert y.shape == (2, 3)
    assert x.device == META == shown.device


def test_data_are_there_if_they_fit(data: FederatedData) -> None:
    there = placed(data, META, torch.float64, 1)
    assert there.window is None
    assert there.x.device == META
    large = dataclasses.replace(data, x=data.x.repeat(100, 1, 1, 1), y=data.y.repeat(100))  # 2 MB
    window = placed(large, META, torch.float64, 1).window
    assert window is not None
    assert window.samples == 35  # all clients together
    many = Ragged.from_lists([np.arange(1990), np.arange(100)])
    window = placed(dataclasses.replace(large, train=many), META, torch.float64, 1).window
    assert window is not None
    assert window.samples == 2**20 // (64 * 8 + 8)


def test_a_client_that_does_not_fit_is_named(data: FederatedData) -> None:
    one = Ragged.from_lists([[], np.arange(2500)])
    large = dataclasses.replace(data, x=data.x.repeat(100, 1, 1, 1), y=data.y.repeat(100), train=one)
    with pytest.raises(BadInput, match=r"client 1: its 2,500 samples do not fit the 1 MiB .* raise engine.data_mb"):
        placed(large, META, torch.float64, 1)


def test_room_for_data_is_a_gpu_s() -> None:
    with pytest.raises(BadInput, match=r"engine.data_mb: on a CPU data are used where they are"):
        job_of(method={"name": "fedavg"}, engine={"device": "cpu", "data_mb": 10})
