"""Data in memory: every form gives the clients and the numbers that it stands for, and is checked as files are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from personafl import BadInput, api
from personafl.core.reading import Reading
from personafl.data.build import federate
from personafl.data.config import DataConfig
from personafl.data.sources.memory import in_memory

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 4)).astype(np.float32)
Y = np.arange(60) % 3
USER = np.array([["anna", "ben", "cleo"][row // 20] for row in range(60)])
CLIENTS = {
    name: (X[start : start + 20], Y[start : start + 20]) for name, start in (("anna", 0), ("ben", 20), ("cleo", 40))
}
FRAME = pd.DataFrame(X, columns=list("abcd")).assign(kind=Y, who=USER)


class Pairs(Dataset[Any]):
    """A data set of the user's own, of pairs."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, place: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(self.x[place]), int(self.y[place])


class Stream(IterableDataset[Any]):
    """Samples without places."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Any:
        return iter(zip(self.x, self.y, strict=True))


def of_torch(wrap: Any) -> dict[str, Any]:
    return {name: wrap(x, y) for name, (x, y) in CLIENTS.items()}


FORMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "arrays": ((X, Y), {"user": USER}),
    "tensors": ((torch.from_numpy(X), torch.from_numpy(Y)), {"user": USER.tolist()}),
    "clients": (CLIENTS, {}),
    "data sets": (of_torch(Pairs), {}),
    "tensor data sets": (of_torch(lambda x, y: TensorDataset(torch.from_numpy(x), torch.from_numpy(y))), {}),
    "loaders": (of_torch(lambda x, y: DataLoader(Pairs(x, y), batch_size=7, shuffle=True, drop_last=True)), {}),
    "streams": (of_torch(Stream), {}),
    "one data set": (Pairs(X, Y), {"user": USER}),
    "columns of labels": ((X, Y[:, None]), {"user": USER}),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_data(form: str) -> None:
    data, given = FORMS[form]
    found = in_memory(data, Reading(), **given)
    assert torch.equal(found.x, torch.from_numpy(X))
    assert torch.equal(found.y, torch.from_numpy(Y))
    assert found.user_names == ("anna", "ben", "cleo")
    assert found.user is not None
    assert [found.user_names[user] for user in found.user] == USER.tolist()
    dealt = federate(found, DataConfig(), 0)
    assert dealt.fingerprint == federate(in_memory(CLIENTS, Reading()), DataConfig(), 0).fingerprint


def test_a_table_is_read_as_a_file_of_it_is(tmp_path: Path) -> None:
    mixed = FRAME.assign(colour=["red", "blue", "green"] * 20).set_index(np.arange(60)[::-1])
    mixed.to_csv(tmp_path / "table.csv", index=False)
    told = {"label": "kind", "user": "who"}
    shown = api.describe_data(mixed, **told)
    assert shown.data.fingerprint == api.describe_data(str(tmp_path / "table.csv"), **told).data.fingerprint
    assert list(shown.data.client_names) == ["anna", "ben", "cleo"]


def test_halves_that_are_given_are_kept() -> None:
    halves = {name: {"train": (x[:15], y[:15]), "test": (x[15:], y[15:])} for name, (x, y) in CLIENTS.items()}
    dealt = federate(in_memory(halves, Reading()), DataConfig(), 0)
    assert dealt.train.sizes.tolist() == [15, 15, 15]
    assert torch.equal(dealt.x[dealt.test[1]], torch.from_numpy(CLIENTS["ben"][0][15:]))


def test_hugging_face_data_are_read() -> None:
    datasets = pytest.importorskip("datasets")
    half = datasets.Dataset.from_dict({"text": ["good day", "bad day"] * 6, "label": [1, 0] * 6, "user": [0, 1, 2] * 4})
    found = in_memory(half, Reading())
    assert found.user_names == ("0", "1", "2")
    assert in_memory(datasets.DatasetDict(train=half, test=half), Reading()).split is not None


def test_clients_keep_their_order_and_pixels_become_numbers() -> None:
    pixels = RNG.integers(0, 256, size=(6, 5, 5, 3), dtype=np.uint8)
    found = in_memory({10: (pixels, ["a", "b"] * 3), 9: (pixels, ["a", "b"] * 3)}, Reading())
    assert found.user_names == ("10", "9")
    assert tuple(found.x.shape) == (12, 3, 5, 5)
    assert float(found.x.max()) <= 1.0
    assert found.label_names == ("a", "b")


def test_a_run_on_objects_says_so_and_goes_on_with_them(tmp_path: Path) -> None:
    told: dict[str, Any] = {"label": "kind", "user": "who", "out": tmp_path / "run"}

    def crash(event: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        api.run(FRAME, "fedavg", rounds=2, **told, callback=crash)
    with pytest.raises(
        BadInput, match=r"was begun in Python with objects \(data=…\); continue it there: personafl.res"
    ):
        api.resume(tmp_path / "run")
    with pytest.raises(BadInput, match="the data changed since the run began"):
        api.resume(tmp_path / "run", data=FRAME.assign(a=0.0))
    again = api.resume(tmp_path / "run", data=FRAME)
    assert again.rows[0]["count"] == 3
    with pytest.raises(BadInput, match="'python:DataFrame': was an object in Python"):
        api.run(tmp_path / "run" / "recipe.toml", out=tmp_path / "other")
    assert api.load(tmp_path / "run").rows == again.rows
