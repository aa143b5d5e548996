"""A data set before it is dealt to clients, and the checks that every source passes through."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from personafl.core.reading import AS_FOUND, Reading
from personafl.core.shape import TaskName
from personafl.data.sources.doubts import check_targets, doubts
from personafl.data.sources.labels import classes_of
from personafl.data.sources.targets import marked, measured, task_of
from personafl.errors import BadInput

Ints = NDArray[np.int64]
Array = NDArray[np.generic]
_TARGETS: dict[TaskName, Callable[..., tuple[Array, tuple[str, ...]]]] = {"regression": measured, "multilabel": marked}


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples with labels and, where the source knows them, users and an official test half."""

    name: str
    x: torch.Tensor  # [samples, …] float32, or int64 tokens
    y: torch.Tensor  # [samples] int64, or [samples, length] int64 with -1 where nothing is scored, or float32
    classes: int  # or numbers of a target, or labels
    user: Ints | None  # [samples] index into user_names
    user_names: tuple[str, ...]
    split: Ints | None  # [samples] 0 train, 1 test
    label_names: tuple[str, ...]
    vocabulary: int | None = None  # tokens lie in [0, vocabulary)
    reading: Reading = AS_FOUND  # how another file is read alike, with what was found out in this one
    task: TaskName = "classification"
    notes: tuple[str, ...] = ()  # what may be meant otherwise, one sentence each


def checked(
    where: str,
    *,
    name: str,
    x: Array,
    y: Array | None,
    user: Array | None = None,
    user_names: Sequence[str] = (),
    split: Array | None = None,
    label_names: Sequence[str] = (),
    target_names: Sequence[str] = (),
    vocabulary: int | None = None,
    reading: Reading = AS_FOUND,
) -> Dataset:
    """Check the arrays of a source and build the data set; `where` (file or source) begins every message.

    `label_names` are those of classes or labels, `target_names` those of the columns of y.
    """
    _check_shapes(where, x, y, reading)
    inputs, text = _inputs(where, x), vocabulary is not None
    if inputs.dtype == torch.int64 and vocabulary is None:
        vocabulary = int(inputs.max()) + 1
    labels: Array = np.full(len(x), -1)
    names: tuple[str, ...] = reading.classes or tuple(label_names)
    task: TaskName = "classification"
    if y is not None:
        check_targets(where, x, y, reading)
        task = task_of(y, reading)
        called = label_names or target_names if task in _TARGETS else label_names
        labels, names = _TARGETS.get(task, classes_of)(where, y, called, reading)
    if y is not None and task == "classification" and len(names) == 1 and reading.who == "all":
        raise BadInput(f"{where}: every label is {names[0]!r}, so that there is nothing to learn; check the labels")
    numbered = names == tuple(str(label) for label in range(len(names)))
    plain = task in ("next-token", "regression") or numbered
    unsure = doubts(inputs, text, task, names, numbered, reading) if reading.who == "all" else ()
    if task in _TARGETS:
        reading = reading.model_copy(update={"task": task})
    users, present = _users(where, user, user_names, len(x))
    return Dataset(
        name=name,
        x=inputs,
        y=torch.from_numpy(labels),
        classes=len(names),
        user=users,
        user_names=present,
        split=_split(where, split, len(x)),
        label_names=names,
        vocabulary=vocabulary,
        reading=reading if plain else reading.model_copy(update={"classes": names}),
        task=task,
        notes=tuple(unsure),
    )


def _check_shapes(where: str, x: Array, y: Array | None, reading: Reading) -> None:
    if x.size == 0:
        raise BadInput(f"{where}: holds no samples, or samples without numbers; check the file")
    if x.ndim < 2:
        raise BadInput(f"{where}: x has shape {list(x.shape)}; give one row of features per sample, [samples, …]")
    if y is None and reading.who != "predict":
        raise BadInput(f"{where}: has no labels; add one per sample")
    if y is not None and y.shape[:1] != x.shape[:1]:
        raise BadInput(
            f"{where}: {len(x)} samples but {len(y) if y.ndim else 'a scalar as'} labels; give one per sample"
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
    if x.dtype.kind in "iub" and (x.ndim > 2 or x.dtype.kind == "b"):
        return torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))  # tokens have no second axis: counts
    if x.dtype.kind in "iu":
        tokens = np.ascontiguousarray(x, dtype=np.int64)
        if tokens.min() < 0:
            raise BadInput(
                f"{where}: token {tokens.min()} in x is negative; number tokens from 0, or save numbers that "
                f"are no tokens as floats"
            )
        return torch.from_numpy(tokens)
    raise BadInput(f"{where}: x has dtype {x.dtype}; use uint8 images, floats or integer tokens")


def _users(where: str, user: Array | None, names: Sequence[str], samples: int) -> tuple[Ints | None, tuple[str, ...]]:
    if user is None:
        return None, ()
    if user.dtype.kind == "f" and np.isnan(user).any():
        raise BadInput(
            f"{where}: user is missing in {int(np.isnan(user).sum())} of {samples} samples; remove or name them"
        )
    if user.dtype.kind == "S":
        user = np.char.decode(user.astype(bytes), "utf-8", "replace")
    if user.dtype.kind == "f" and (user == np.floor(user)).all():
        user = user.astype(np.int64)
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
