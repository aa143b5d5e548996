"""Text as numbers: hashed words for classification, characters or frequent words for the next token."""

import re
import zlib
from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from personafl.core.reading import Reading
from personafl.errors import BadInput

Ints = NDArray[np.int64]
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?")


def hashed_words(texts: Iterable[str], reading: Reading) -> Ints:
    """Number the first `length` words of each text, [texts, length].

    A word's number is 1 + crc32(word) mod (vocabulary - 1): no vocabulary to build, so devices agree without talking.
    0 pads short texts.
    """
    numbers: dict[str, int] = {}
    rows: list[list[int]] = []
    for text in texts:
        row = _WORD.findall(text.lower())[: reading.length]
        for word in row:
            if word not in numbers:
                numbers[word] = 1 + zlib.crc32(word.encode()) % (reading.vocabulary - 1)
        rows.append([numbers[word] for word in row])
    table = np.zeros((len(rows), reading.length), dtype=np.int64)
    used = np.array([len(row) for row in rows], dtype=np.int64)
    table[np.arange(reading.length) < used[:, None]] = [number for row in rows for number in row]
    return table


def check_unicode(where: str, texts: Iterable[str]) -> None:
    """Fail where a text has half a character, as a JSON escape such as \\ud83d alone is."""
    for number, text in enumerate(texts, start=1):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start].encode("unicode_escape").decode()
            raise BadInput(f"{where}: text {number} has half a character, {half}; correct or remove it") from None


def characters(text: NDArray[np.uint8]) -> tuple[Ints, list[str]]:
    """Number the bytes of a text by their place in its alphabet: (codes, names)."""
    alphabet, code = np.unique(text, return_inverse=True)
    return code.astype(np.int64), [character_name(int(byte)) for byte in alphabet]


def frequent_words(texts: Iterable[str], vocabulary: int) -> tuple[Ints, Ints, list[str]]:
    """Number words by how frequent they are, from 1: (codes, offset of each text in them, names).

    Beyond the vocabulary - 1 most frequent (ties by alphabet) a word is rare: 0.
    """
    words = [_WORD.findall(text.lower()) for text in texts]
    counts = Counter(word for row in words for word in row)
    known = sorted(counts, key=lambda word: (-counts[word], word))[: vocabulary - 1]
    number = {word: place for place, word in enumerate(known, start=1)}
    codes = np.array([number.get(word, 0) for row in words for word in row], dtype=np.int64)
    offset = np.cumsum([0, *(len(row) for row in words)])
    return codes, offset, ["(rare)", *known]


def windows(code: Ints, offset: Ints, length: int) -> tuple[Ints, Ints, Ints]:
    """Cut each item into windows of `length` tokens: (x, y, item of each window).

    x[w] are tokens s … s + length - 1 of the item and y[w] the ones that follow them; where the item has ended, y is
    -1. An item of n tokens gives ⌈(n - 1) / length⌉ windows.
    """
    predicted = np.maximum(np.diff(offset) - 1, 0)
    count = -(-predicted // length)
    item = np.repeat(np.arange(len(count)), count)
    number = np.arange(len(item)) - np.repeat(np.cumsum(count) - count, count)  # window number inside its item
    place = number[:, None] * length + np.arange(length)
    inside = place < predicted[item][:, None]
    at = np.where(inside, offset[item][:, None] + place, 0)
    x = np.where(inside, code[at], 0).astype(np.int64)
    y = np.where(inside, code[np.minimum(at + 1, len(code) - 1)], -1).astype(np.int64)
    return x, y, item


def character_name(byte: int) -> str:
    """Return a visible name of a byte."""
    return "space" if byte == 32 else chr(byte) if 32 < byte < 127 else f"0x{byte:02x}"
