"""A data set before it is dealt to clients, and the checks that every source passes through."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from personafl.errors import BadInput

Ints = NDArray[np.int64]
Array = NDArray[np.generic]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples with labels and, where the source knows them, users and an official test half."""

    name: str
    x: torch.Tensor  # [samples, …] float32, or int64 tokens
    y: torch.Tensor  # [samples] int64, or [samples, length] int64 with -1 where nothing is scored
    classes: int
    user: Ints | None  # [samples] index into user_names
    user_names: tuple[str, ...]
    split: Ints | None  # [samples] 0 train, 1 test
    label_names: tuple[str, ...]
    vocabulary: int | None = None  # tokens lie in [0, vocabulary)


@dataclass(frozen=True)
class TextOptions:
    """How text becomes numbers: tokens per sample, word numbers, and the unit of next-token tasks."""

    length: int = 80
    vocabulary: int = 10_000
    unit: Literal["character", "word"] = "character"


def checked(
    where: str,
    *,
    name: str,
    x: Array,
    y: Array,
    user: Array | None = None,
    user_names: Sequence[str] = (),
    split: Array | None = None,
    label_names: Sequence[str] = (),
    vocabulary: int | None = None,
) -> Dataset:
    """Check the arrays of a source and build the data set; `where` (file or source) begins every message."""
    if len(x) == 0:
        raise BadInput(f"{where}: holds no samples; check the file")
    if y.shape[:1] != x.shape[:1]:
        raise BadInput(
            f"{where}: {len(x)} samples but {len(y) if y.ndim else 'a scalar as'} labels; give one per sample"
        )
    inputs = _inputs(where, x)
    if inputs.dtype == torch.int64 and vocabulary is None:
        vocabulary = int(inputs.max()) + 1
    labels, classes = _labels(where, y, len(label_names))
    users, present = _users(where, user, user_names, len(x))
    return Dataset(
        name=name,
        x=inputs,
        y=torch.from_numpy(labels),
        classes=classes,
        user=users,
        user_names=present,
        split=_split(where, split, len(x)),
        label_names=tuple(label_names) or tuple(str(label) for label in range(classes)),
        vocabulary=vocabulary,
    )


def images_to_float(where: str, images: Array) -> NDArray[np.float32]:
    """Scale uint8 images [N,H,W], [N,H,W,C] or [N,C,H,W] to float32 [N,C,H,W] in [0, 1]."""
    if images.ndim == 3:
        images = images[:, None]
    elif images.ndim == 4 and images.shape[3] in (1, 3, 4):
        images = images.transpose(0, 3, 1, 2)
    elif images.ndim != 4 or images.shape[1] not in (1, 3, 4):
        raise BadInput(f"{where}: images of shape {list(images.shape)}; use [N,H,W], [N,H,W,C] or [N,C,H,W]")
    scaled = np.ascontiguousarray(images, dtype=np.float32)
    scaled /= np.float32(255)
    return scaled


def _inputs(where: str, x: Array) -> torch.Tensor:
    if x.ndim < 2:
        raise BadInput(f"{where}: x has shape {list(x.shape)}; give one row of features per sample, [samples, …]")
    if x.dtype.kind == "f":
        with np.errstate(over="ignore"):
            values = np.ascontiguousarray(x, dtype=np.float32)
        finite = np.isfinite(values.reshape(len(values), -1)).all(axis=1)
        if not finite.all():
            raise BadInput(
                f"{where}: sample {int(np.argmin(finite))} holds NaN or infinity ({int((~finite).sum())} samples do); "
                f"remove or fill them"
            )
        return torch.from_numpy(values)
    if x.dtype.kind in "iu":
        tokens = np.ascontiguousarray(x, dtype=np.int64)
        if tokens.min() < 0:
            raise BadInput(f"{where}: token {tokens.min()} in x is negative; number tokens from 0")
        return torch.from_numpy(tokens)
    raise BadInput(f"{where}: x has dtype {x.dtype}; use uint8 images, floats or integer tokens")


def _labels(where: str, y: Array, named: int) -> tuple[Ints, int]:
    if y.dtype.kind not in "iu" or y.ndim not in (1, 2):
        raise BadInput(f"{where}: labels of dtype {y.dtype}, shape {list(y.shape)}; use integers, one per sample")
    labels = np.ascontiguousarray(y, dtype=np.int64)
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < (0 if labels.ndim == 1 else -1):
        raise BadInput(f"{where}: label {lowest} is negative; number classes from 0")
    if named and highest >= named:
        raise BadInput(
            f"{where}: label {highest} is out of range, there are {named} class names; number classes from 0"
        )
    if highest < 0:
        raise BadInput(f"{where}: every label is -1, nothing can be learned; check the labels")
    if not named and highest >= max(10_000, labels.size):
        raise BadInput(f"{where}: label {highest} is out of range for {labels.size} labels; number classes from 0")
    return labels, named or highest + 1


def _users(where: str, user: Array | None, names: Sequence[str], samples: int) -> tuple[Ints | None, tuple[str, ...]]:
    if user is None:
        return None, ()
    if user.shape != (samples,) or user.dtype.kind not in "iuU":
        raise BadInput(
            f"{where}: user has dtype {user.dtype}, shape {list(user.shape)}; give an integer or a name for "
            f"each of the {samples} samples"
        )
    if user.dtype.kind == "U":
        found, index = np.unique(user, return_inverse=True)
        return index.astype(np.int64), tuple(str(name) for name in found)
    numbers = user.astype(np.int64)
    if numbers.min() < 0:
        raise BadInput(f"{where}: user {numbers.min()} is negative; number users from 0")
    present, index = np.unique(numbers, return_inverse=True)
    if len(names) and present[-1] >= len(names):
        raise BadInput(f"{where}: user {present[-1]} is out of range, there are {len(names)} user names")
    return index.astype(np.int64), tuple(names[number] if len(names) else str(number) for number in present)


def _split(where: str, split: Array | None, samples: int) -> Ints | None:
    if split is None:
        return None
    if split.shape != (samples,) or split.dtype.kind not in "iub" or not np.isin(split, (0, 1)).all():
        raise BadInput(f"{where}: split must hold 0 (train) or 1 (test) for each of the {samples} samples")
    half = split.astype(np.int64)
    if half.all():
        raise BadInput(f"{where}: split marks every sample as test; mark training samples with 0")
    return half if half.any() else None
