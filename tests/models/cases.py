"""A small dataset and small options for every model, shared by the tests of models, adapters and parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from personafl.data.federated import FederatedData, Ragged, TaskName, make_federated

F64 = torch.float64


def data_of(
    x: torch.Tensor, y: torch.Tensor, vocabulary: int | None = None, task: TaskName | None = None, *, clients: int = 1
) -> FederatedData:
    rows = Ragged.from_lists(np.array_split(np.arange(len(x)), clients))
    return make_federated(
        name="any",
        x=x,
        y=y,
        classes=3,
        train=rows,
        validation=rows,
        test=rows,
        seen=np.arange(clients),
        unseen=np.zeros(0, np.int64),
        client_names=tuple(map(str, range(clients))),
        label_names=tuple("012"),
        vocabulary=vocabulary,
        task=task,
    )


def uniform(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


IMAGES = data_of(uniform(5, 2, 9, 8), torch.arange(5) % 3)
SERIES = data_of(uniform(5, 2, 9), torch.arange(5) % 3)
FEATURES = data_of(uniform(5, 6), torch.arange(5) % 3)
WORDS = data_of(torch.arange(35).reshape(5, 7) % 11, torch.arange(5) % 3, vocabulary=100)
CHARACTERS = data_of(torch.arange(35).reshape(5, 7) % 3, torch.arange(35).reshape(5, 7) % 3, vocabulary=20)
DIGITS = data_of(uniform(5, 1, 16, 17), torch.arange(5) % 3)
SPEECH = data_of(uniform(5, 1, 4, 12), torch.tensor([[1, 1, 2]] * 4 + [[2, -1, -1]]), task="ctc")

TRANSFORMER = {"width": 8, "heads": 2, "hidden": 12, "blocks": 2}
# Every model: data, and options that make it small.
CASES: dict[str, tuple[FederatedData, dict[str, Any]]] = {
    "linear": (FEATURES, {}),
    "mlp": (FEATURES, {"hidden": [5]}),
    "cnn": (IMAGES, {"channels": [3, 4], "hidden": 6}),
    "cnn1d": (SERIES, {"channels": [3, 4], "hidden": 6, "norm": True}),
    "lenet": (DIGITS, {}),
    "cnn0": (DIGITS, {}),
    "cnn1": (DIGITS, {}),
    "cnn2": (DIGITS, {}),
    "resnet18": (IMAGES, {"width": 4}),
    "resnet20": (DIGITS, {"width": 4, "stem": "imagenet", "output_bias": False}),
    "resnet32": (IMAGES, {"width": 4, "groups": [1, 2, 4]}),
    "bag": (WORDS, {"width": 4, "hidden": [5], "norm": True}),
    "window": (CHARACTERS, {"context": 3, "norm": True}),
    "transformer": (CHARACTERS, TRANSFORMER),
    "speech": (SPEECH, TRANSFORMER),
    "additive": (FEATURES, {"hidden": [5]}),
    "split_input": (FEATURES, {"private": 2}),
}
