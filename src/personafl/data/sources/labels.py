"""Labels of any kind as numbers of classes that keep their names.

Whole numbers 0 … k - 1 are classes already. Everything else is a name: text, true and false, and numbers that start
elsewhere or have gaps, 5, 7 and 9, are numbered in their order. On a device, where other classes are missing than on
the next one, no order tells: there numbers stay what they are, and names are looked up in the recipe's `data.classes`.
"""

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from personafl.core.reading import Reading
from personafl.core.split import listed
from personafl.errors import BadInput

Ints = NDArray[np.int64]
Array = NDArray[np.generic]
_WHOLE = re.compile(r"0|-?[1-9][0-9]{0,15}")
IGNORED = -100  # of Hugging Face and torch, in a sequence of targets; here it is -1
_FEW = 20  # so many classes are no matter of doubt, however few the samples


def classes_of(where: str, y: Array, names: Sequence[str], reading: Reading) -> tuple[Ints, tuple[str, ...]]:
    """Return each sample's class and the names of all; `names` are those that the file gives to numbers."""
    if y.ndim == 2 and y.dtype.kind in "iu":  # a next-token task
        whole = np.ascontiguousarray(y, dtype=np.int64)
        labels = _in_range(where, np.where(whole == IGNORED, -1, whole), len(names), -1)
        return labels, tuple(names) or _digits(labels)
    if y.ndim != 1:
        raise BadInput(f"{where}: labels of dtype {y.dtype}, shape {list(y.shape)}; give one per sample")
    values = _plain(where, y)
    if not names and reading.classes is None and reading.who == "all":
        _check_few(where, values)
    if values.dtype.kind == "i" and (names or (reading.classes is None and _numbered(values, reading))):
        labels = _in_range(where, values.astype(np.int64), len(names), 0)
        if reading.classes is None:
            return labels, tuple(names) or _digits(labels)
        values = np.array(names)[labels]
    if reading.classes is not None:
        return _looked_up(where, values.astype(str), reading.classes)
    if reading.who == "device":
        raise BadInput(
            f"{where}: labels are names such as {str(values[0])!r}, and the server's recipe does not say which class "
            f"each is; add data.classes = [...] to it"
        )
    found, index = np.unique(values, return_inverse=True)
    if (
        values.dtype.kind == "i" and 0 in found and int(found[0]) < 0
    ):  # −1 and 1 are classes; beside 0, −1 may be a mark
        every = ", ".join(f'"{name}"' for name in found[:_FEW])
        raise BadInput(
            f"{where}: label {found[0]} is negative; remove these samples if they have no class, or else say that it "
            f"is one, data.classes = [{every}]"
        )
    return index.astype(np.int64), tuple(str(name) for name in found)


def _check_few(where: str, values: Array) -> None:
    found = np.unique(values)
    if len(found) > max(_FEW, len(values) // 2):
        raise BadInput(
            f"{where}: {len(found)} different labels in {len(values)} samples, such as {found[0]} and {found[1]}; "
            f"name the column of classes with data.label, or predict them as numbers with data.task=regression"
        )


def _digits(labels: Ints) -> tuple[str, ...]:
    return tuple(str(label) for label in range(int(labels.max()) + 1))


def _plain(where: str, y: Array) -> Array:
    """Return labels as whole numbers or text."""
    if y.dtype.kind in "iu":
        return y.astype(np.int64)
    if y.dtype.kind == "f":
        lost = int(np.isnan(y).sum())
        if lost:
            raise BadInput(f"{where}: {lost} of {len(y)} labels are missing; remove these samples or label them")
        whole = np.isfinite(y) & (np.abs(y) < 2**53)
        whole[whole] = y[whole] == np.floor(y[whole])
        if not whole.all():
            raise BadInput(
                f"{where}: labels are measurements such as {y[~whole][0]}, and data.task = 'classification' learns "
                f"classes; leave data.task out, or make few classes of the values"
            )
        return y.astype(np.int64)
    if y.dtype.kind == "S":
        y = np.char.decode(y.astype(bytes), "utf-8", "replace")
    if y.dtype.kind not in "Ub":
        raise BadInput(f"{where}: labels of dtype {y.dtype}; use whole numbers or text, one per sample")
    text = np.char.strip(y.astype(str))
    lost = int((text == "").sum())
    if lost:
        raise BadInput(f"{where}: {lost} of {len(y)} labels are empty; remove these samples or label them")
    numbers = all(_WHOLE.fullmatch(name) for name in np.unique(text))  # of folders, say, so that 10 comes after 9
    return text.astype(np.int64) if numbers else text


def _numbered(values: Array, reading: Reading) -> bool:
    """Whether whole numbers are class numbers already."""
    return reading.who != "all" or np.array_equal(found := np.unique(values), np.arange(len(found)))


def _looked_up(where: str, values: Array, classes: tuple[str, ...]) -> tuple[Ints, tuple[str, ...]]:
    number = {name: place for place, name in enumerate(classes)}
    found, index = np.unique(values, return_inverse=True)
    if unknown := [str(name) for name in found if str(name) not in number]:
        raise BadInput(
            f"{where}: label {unknown[0]!r} is none of data.classes, {listed(classes)}; add it there, or correct it"
        )
    return np.array([number[str(name)] for name in found], dtype=np.int64)[index], classes


def _in_range(where: str, labels: Ints, named: int, least: int) -> Ints:
    """Check labels that are class numbers; with `least` -1 they may say that nothing is scored there."""
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < least:
        raise BadInput(f"{where}: label {lowest} is negative; number classes from 0")
    if named and highest >= named:
        raise BadInput(
            f"{where}: label {highest} is out of range, there are {named} class names; number classes from 0"
        )
    if highest < 0:
        raise BadInput(f"{where}: every label is -1, nothing can be learned; check the labels")
    if not named and highest >= max(10_000, labels.size):
        raise BadInput(f"{where}: label {highest} is out of range for {labels.size} labels; number classes from 0")
    return labels
