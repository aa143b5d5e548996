"""Documents: texts of users, of which the next token is predicted, or texts to classify.

A text is numbered in one of three ways: by the tokenizer of a model (`data.tokenizer`), else by characters or frequent
words (next tokens) or hashed words (classes), which need no file.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from personafl.core.reading import Reading
from personafl.core.split import listed
from personafl.data.sources.dataset import Array, Dataset, checked
from personafl.data.sources.text import characters, check_unicode, frequent_words, hashed_words, windows
from personafl.data.sources.tokens import tokens_in
from personafl.errors import BadInput

Ints = NDArray[np.int64]


def numbered(texts: Sequence[str], reading: Reading) -> tuple[Ints, int]:
    """Return texts to classify as tokens [texts, length], and how many different ones there are."""
    if reading.tokenizer is None:
        return hashed_words(texts, reading), reading.vocabulary
    tokens = tokens_in(reading.tokenizer)
    return tokens.padded(texts, reading.length), tokens.count


def next_tokens(
    where: str,
    name: str,
    texts: Sequence[str],
    reading: Reading,
    *,
    prompts: Sequence[str] | None = None,
    user: Array | None = None,
    user_names: Sequence[str] = (),
    split: Array | None = None,
) -> Dataset:
    """Pack each user's texts, one after the other, into blocks of `length` tokens, of which the next ones are learned.

    Texts end with the tokenizer's end-of-text token, or else with a new line. The answers to a prompt follow it, and
    its own tokens are no targets: nor is what is beyond a user's last text. Blocks without a target are left out.
    """
    owner = np.zeros(len(texts), dtype=np.int64) if user is None else np.unique(user, return_inverse=True)[1]
    half = np.zeros(len(texts), dtype=np.int64) if split is None else split.astype(np.int64)
    kinds, group = np.unique(2 * owner + half, return_inverse=True)
    order = np.argsort(group, kind="stable")  # the texts of a user and half, in their order
    first = np.searchsorted(group[order], np.arange(len(kinds)))
    if user is not None:
        _check_written(where, texts, user)
    code, counts, offset, names = _codes(where, texts, prompts, order, first, reading)
    x, y, item = windows(code, offset, reading.length)
    if counts is not None:
        y = np.where(windows(counts, offset, reading.length)[1] > 0, y, -1)
    elif reading.unit == "word":
        y = np.where(y == 0, -1, y)  # a rare word is no answer
    used = (y >= 0).any(1)
    if not used.any():
        raise BadInput(f"{where}: has no text to predict a token of; check the texts")
    text = order[first][item[used]]  # of each block the first one of its user and half
    return checked(
        where,
        name=name,
        x=x[used],
        y=y[used],
        user=None if user is None else user[text],
        user_names=user_names,
        split=None if split is None else half[text],
        label_names=names,
        vocabulary=len(names),
        reading=reading,
    )


def _codes(
    where: str, texts: Sequence[str], prompts: Sequence[str] | None, order: Ints, first: Ints, reading: Reading
) -> tuple[Ints, Ints | None, Ints, Sequence[str]]:
    """Return all tokens, which count (None: all), where each group's begin, and tokens' names."""
    bounds = [*first.tolist(), len(order)]
    if reading.tokenizer is not None:
        tokens = tokens_in(reading.tokenizer)
        every = tokens.documents([texts[at] for at in order], prompts and [prompts[at] for at in order])
        ends = np.cumsum([0, *(len(own) for own, _ in every)])
        code, counts = (np.concatenate([pair[place] for pair in every]) for place in (0, 1))
        return code, counts, ends[bounds], tokens.names
    if prompts is not None:
        raise BadInput(f"{where}: data.prompt needs the tokenizer of a model; name its folder, data.tokenizer")
    check_alike(where, reading)
    check_unicode(where, texts)
    joined = ["\n".join(texts[at] for at in order[start:end]) for start, end in pairwise(bounds)]
    if reading.unit == "word":
        words, offset, names = frequent_words(joined, reading.vocabulary)
        return words, None, offset, names
    flat = [np.frombuffer(text.encode(), dtype=np.uint8) for text in joined]
    code, names = characters(np.concatenate(flat))
    return code, None, np.cumsum([0, *map(len, flat)]), names


def check_alike(where: str, reading: Reading) -> None:
    """Fail on a device where tokens would be numbered by its own texts: another's have the same numbers for others."""
    if reading.who == "device":
        raise BadInput(
            f"{where}: characters and words are numbered by the texts that are there, and devices have others; "
            "name a tokenizer in the server's recipe, data.tokenizer, or have personafl data deal write the files"
        )


def _check_written(where: str, texts: Sequence[str], user: Array) -> None:
    """Fail if all that a user has is blank."""
    written = np.array([bool(text.strip()) for text in texts])
    if empty := sorted(set(user[~written].tolist()) - set(user[written].tolist())):
        named = [str(name) for name in empty]
        raise BadInput(f"{where}: user {named[0]!r} has no text ({len(named)} such users); leave out {listed(named)}")
