"""Labels that are spelled, for CTC."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from personafl.core.ctc import ctc_frames
from personafl.data.build import federate, load
from personafl.data.config import DataConfig, Iid
from personafl.data.federated import FederatedData
from personafl.data.sources.dataset import Dataset, checked
from personafl.data.spelling import DIGITS
from personafl.errors import BadInput


def dataset(names: list[str], labels: Any = None) -> Dataset:
    y = np.arange(60) % max(len(names), 1) if labels is None else np.asarray(labels)
    x = np.zeros((len(y), 2), np.float32 if y.ndim == 1 else np.int64)
    return checked("test", name="toy", x=x, y=y, label_names=names)


def dealt(source: Dataset, **values: Any) -> FederatedData:
    return federate(source, DataConfig(partition=Iid(clients=3), **values), seed=0)


def test_names_become_numbers_of_their_letters() -> None:
    """cab, a b, a: the alphabet is space, a, b, c with numbers 1 … 4 and the blank 0; −1 pads."""
    data = dealt(dataset(["cab", " a  b", "a"]), target="spelling")
    assert (data.task, data.classes) == ("ctc", 5)
    assert data.label_names == ("blank", "space", "a", "b", "c")
    assert data.y[:3].tolist() == [[4, 2, 3], [2, 1, 3], [2, -1, -1]]
    assert data.y.dtype == torch.int64
    assert data.counts().shape == (3, 5)
    assert data.counts()[:, 0].tolist() == [0, 0, 0]


def test_digits_without_names_are_spelled_out() -> None:
    data = load(DataConfig(target="spelling", partition=Iid(clients=3)), seed=0)
    letters = [data.label_names[c] for c in data.y[3].tolist() if c >= 0]
    assert "".join(letters) == "three"
    assert data.label_names[1:] == tuple(sorted(set("".join(DIGITS))))
    assert data.y.shape == (1797, 5)
    assert int(ctc_frames(data.y).max()) == 6  # thre-e


def test_rows_are_dealt_by_label_whatever_the_target() -> None:
    """Label partitions and stratified test rows are those of the labels; only y and the fingerprint differ."""
    for partition in ({"kind": "dirichlet", "clients": 5}, {"kind": "classes", "clients": 5, "per_client": 2}):
        config = DataConfig.model_validate({"partition": partition})
        plain, spelt = (load(config.model_copy(update={"target": target}), 0) for target in ("label", "spelling"))
        assert np.array_equal(plain.train.flat, spelt.train.flat)
        assert np.array_equal(plain.test.flat, spelt.test.flat)
        assert plain.fingerprint != spelt.fingerprint


def test_the_task_follows_from_the_targets() -> None:
    assert dealt(dataset(["a", "b"])).task == "classification"
    tokens = dataset([], labels=np.arange(60).reshape(20, 3) % 4)
    assert dealt(tokens).task == "next-token"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (dataset([], labels=np.arange(60) % 12), "toy names its labels by numbers only; add label_name"),
        (dataset(["a", " "]), "toy has a label without a name"),
        (dataset([], labels=np.arange(60).reshape(20, 3) % 4), "toy predicts tokens and has no labels"),
    ],
)
def test_what_cannot_be_spelled(source: Dataset, message: str) -> None:
    with pytest.raises(BadInput, match=f"data.target = 'spelling': {message}"):
        dealt(source, target="spelling")
