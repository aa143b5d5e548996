"""What arrays may mean otherwise than they are read: a sentence for each doubt, and errors where no reading fits."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from personafl.core.reading import Reading
from personafl.core.shape import TaskName
from personafl.errors import BadInput

Array = NDArray[np.generic]
_COLOURS = 4  # of images: grey, RGB, RGBA
_MANY = 20  # so many classes are no matter of doubt


def check_targets(where: str, x: Array, y: Array, reading: Reading) -> None:
    """Refuse targets [samples, k] with one 1 in each row, and whole numbers where inputs are no tokens."""
    if reading.task != "auto" or y.ndim != 2 or y.dtype.kind not in "iuf" or x.dtype.kind in "iu":
        return
    marks = bool(np.isin(y, (0, 1)).all())
    if marks and y.shape[1] > 1 and bool((y.sum(axis=1) == 1).all()):
        raise BadInput(
            f"{where}: labels of shape {list(y.shape)} have one 1 in each row; give the number of the class, "
            f'y.argmax(1), or say what they are with data.task = "multilabel" or "regression"'
        )
    if y.dtype.kind != "f" and x.ndim == 2 and y.min() >= 0:
        raise BadInput(
            f"{where}: labels of shape {list(y.shape)} are whole numbers, which would be next tokens, and x has "
            f'fractions; say what they are with data.task = "multilabel" or "regression", or give one label per sample'
        )


def doubts(
    x: torch.Tensor, tokens: bool, task: TaskName, labels: Sequence[str], numbered: bool, reading: Reading
) -> Iterator[str]:
    """Yield what may be meant otherwise; `tokens`: inputs were made from text; `numbered`: labels are 0 … k − 1."""
    shape = tuple(x.shape[1:])
    told = "×".join(map(str, shape))
    if not x.is_floating_point() and not tokens and task != "next-token":
        yield (
            f"the whole numbers in x are read as tokens, places in a vocabulary of {int(x.max()) + 1:,}; measurements "
            f"must be floats, x.astype(float)"
        )
    if x.is_floating_point() and len(shape) == 2 and shape[0] >= shape[1] > 1:
        yield (
            f"samples of {told} are read as {shape[0]} channels at {shape[1]} points in time; series have channels "
            f"first (else x.transpose(0, 2, 1)), images an axis of channels (else x[:, None])"
        )
    if len(shape) == 3 and shape[-1] <= _COLOURS < min(shape[:2]):
        yield (
            f"images of {told} are read as {shape[0]} channels of {shape[1]}×{shape[2]}; channels come first, "
            f"x.transpose(0, 3, 1, 2)"
        )
    if task == "classification" and reading.task == "auto" and len(labels) > _MANY and not numbered and _whole(labels):
        yield (
            f"labels are {len(labels)} whole numbers from {labels[0]} to {labels[-1]}, read as classes; if they are "
            f"measurements, data.task=regression predicts them as numbers"
        )


def _whole(labels: Sequence[str]) -> bool:
    return all(label.removeprefix("-").isdecimal() for label in labels)
