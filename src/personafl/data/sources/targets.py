"""Targets that are no class: real numbers to predict, and sets of labels, each there or not."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from personafl.core.reading import Reading
from personafl.core.shape import TaskName
from personafl.errors import BadInput

Array = NDArray[np.generic]


def task_of(y: Array, reading: Reading) -> TaskName:
    """Return what targets [samples] or [samples, k] mean: what the recipe says, or else what their type tells.

    Fractions are to be predicted as numbers, true and false in several columns are labels; whole numbers are classes,
    and several of them in a row the next tokens of a text.
    """
    if reading.task != "auto":
        return "next-token" if reading.task == "classification" and y.ndim == 2 else reading.task
    if y.ndim == 2:
        return {"b": "multilabel", "f": "regression"}.get(y.dtype.kind, "next-token")  # type: ignore[return-value]
    if y.dtype.kind != "f":
        return "classification"
    finite = y[np.isfinite(y)].astype(np.float64)
    return "regression" if bool((finite != np.floor(finite)).any()) else "classification"


def measured(
    where: str, y: Array, names: Sequence[str], reading: Reading
) -> tuple[NDArray[np.float32], tuple[str, ...]]:
    """Return numbers to predict, [samples, targets], and what they are called."""
    values = _columns(where, y, "regression", "numbers")
    with np.errstate(over="ignore"):
        numbers = values.astype(np.float32)
    finite = np.isfinite(numbers).all(axis=1)
    if not finite.all():
        place = int(np.argmin(finite))
        raise BadInput(
            f"{where}: the target of sample {place} is {values[place].tolist()}, and {int((~finite).sum())} of "
            f"{len(values)} are no finite numbers; remove these samples or correct them"
        )
    called = tuple(names) if len(names) == numbers.shape[1] else _numbered(numbers.shape[1], "target")
    same = np.flatnonzero((numbers == numbers[0]).all(axis=0))
    if len(same) and reading.who == "all":
        raise BadInput(
            f"{where}: {called[same[0]]} is {numbers[0, same[0]]:g} everywhere, so that there is nothing to learn; "
            f"check the targets"
        )
    return numbers, called


def marked(where: str, y: Array, names: Sequence[str], reading: Reading) -> tuple[NDArray[np.float32], tuple[str, ...]]:
    """Return which labels each sample has, 0 or 1 [samples, labels], and their names."""
    values = _columns(where, y, "multilabel", "0 and 1, a column for each label")
    wrong = ~np.isin(values, (0, 1))
    if wrong.any():
        place, column = np.argwhere(wrong)[0].tolist()
        raise BadInput(
            f"{where}: sample {place} has {values[place, column]!r} for label {column}; each label is 0 (not there) or "
            f"1 (there)"
        )
    if reading.classes is not None and len(reading.classes) != values.shape[1]:
        raise BadInput(
            f"{where}: has {values.shape[1]} labels, and data.classes {len(reading.classes)} names; give one for each"
        )
    if reading.who == "all" and not values.any():
        raise BadInput(f"{where}: no sample has any label, so that there is nothing to learn; check the labels")
    given = reading.classes or tuple(names)
    return values.astype(np.float32), given if len(given) == values.shape[1] else _numbered(values.shape[1], "")


def _columns(where: str, y: Array, task: str, what: str) -> NDArray[np.float64]:
    if y.ndim not in (1, 2) or y.dtype.kind not in "fiub":
        raise BadInput(
            f"{where}: labels of dtype {y.dtype}, shape {list(y.shape)}; data.task = {task!r} takes {what}, "
            f"[samples] or [samples, k]"
        )
    return y.reshape(len(y), -1).astype(np.float64)


def _numbered(count: int, name: str) -> tuple[str, ...]:
    return (name,) if count == 1 and name else tuple(f"{name} {place}".strip() for place in range(count))
