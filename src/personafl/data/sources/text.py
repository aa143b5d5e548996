"""Text as numbers: hashed words for classification, characters for next-character prediction."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from personafl.data.sources.dataset import TextOptions

__all__ = ["character_name", "character_windows", "hashed_words"]

Ints = NDArray[np.int64]
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?")


def hashed_words(texts: Iterable[str], options: TextOptions) -> Ints:
    """Number the first `length` words of each text, [texts, length].

    A word's number is 1 + crc32(word) mod (vocabulary - 1): no vocabulary to build, so devices agree without talking.
    0 pads short texts.
    """
    numbers: dict[str, int] = {}
    rows: list[list[int]] = []
    for text in texts:
        row = _WORD.findall(text.lower())[: options.length]
        for word in row:
            if word not in numbers:
                numbers[word] = 1 + zlib.crc32(word.encode()) % (options.vocabulary - 1)
        rows.append([numbers[word] for word in row])
    table = np.zeros((len(rows), options.length), dtype=np.int64)
    used = np.array([len(row) for row in rows], dtype=np.int64)
    table[np.arange(options.length) < used[:, None]] = [number for row in rows for number in row]
    return table


def character_windows(text: NDArray[np.uint8], offset: Ints, length: int) -> tuple[Ints, Ints, Ints, NDArray[np.uint8]]:
    """Cut each item into windows of `length` characters: (x, y, item of each window, alphabet).

    x[w] are characters s … s + length - 1 of the item and y[w] the ones that follow them, both as alphabet positions;
    where the item has ended, y is -1. An item of n characters gives ⌈(n - 1) / length⌉ windows.
    """
    alphabet, code = np.unique(text, return_inverse=True)
    predicted = np.maximum(np.diff(offset) - 1, 0)
    windows = -(-predicted // length)
    item = np.repeat(np.arange(len(windows)), windows)
    number = np.arange(len(item)) - np.repeat(np.cumsum(windows) - windows, windows)  # window number inside its item
    place = number[:, None] * length + np.arange(length)
    inside = place < predicted[item][:, None]
    at = np.where(inside, offset[item][:, None] + place, 0)
    x = np.where(inside, code[at], 0).astype(np.int64)
    y = np.where(inside, code[np.minimum(at + 1, len(code) - 1)], -1).astype(np.int64)
    return x, y, item, alphabet


def character_name(byte: int) -> str:
    """Return a visible name of a byte."""
    return "space" if byte == 32 else chr(byte) if 32 < byte < 127 else f"0x{byte:02x}"
