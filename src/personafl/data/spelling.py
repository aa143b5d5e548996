"""Labels as words: the letters of a label's name are the target, to be learned with CTC from speech, say."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from personafl.data.federated import SPACE_NAME
from personafl.errors import BadInput

if TYPE_CHECKING:
    from personafl.data.sources.dataset import Dataset

BLANK_NAME = "blank"  # of CTC's class 0
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def spelled(dataset: Dataset) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Return targets [samples, longest] of character numbers from 1, padded with -1, and the names of all classes.

    The alphabet is that of the label names, sorted; class 0 is the blank. The numbers 0 … 9 are spelled zero … nine.
    """
    if dataset.y.ndim == 2:
        raise BadInput(f"data.target = 'spelling': {dataset.name} predicts tokens and has no labels; use 'label'")
    names = _words(dataset)
    alphabet = sorted(set("".join(names)))
    number = {character: place for place, character in enumerate(alphabet, start=1)}
    table = np.full((len(names), max(map(len, names))), -1, dtype=np.int64)
    for row, name in zip(table, names, strict=True):
        row[: len(name)] = [number[character] for character in name]
    return torch.from_numpy(table)[dataset.y], (BLANK_NAME, *(SPACE_NAME if c == " " else c for c in alphabet))


def _words(dataset: Dataset) -> tuple[str, ...]:
    names = tuple(" ".join(name.split()) for name in dataset.label_names)
    numbered = names == tuple(str(label) for label in range(len(names)))
    if numbered and len(names) <= len(DIGITS):
        return DIGITS[: len(names)]
    if numbered or not all(names):
        which = "names its labels by numbers only" if numbered else "has a label without a name"
        raise BadInput(f"data.target = 'spelling': {dataset.name} {which}; add label_name to the file or use 'label'")
    return names
