"""Text as the tokens of a model's own tokenizer: `tokenizer.json` of a folder, as Hugging Face models have it.

Only that file and the names of special tokens beside it are read; no code of the folder is run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from personafl.data.sources.text import check_unicode
from personafl.errors import BadInput

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Ints = NDArray[np.int64]
Document = tuple[Ints, Ints]  # its tokens, and for each 1 if it is to be predicted, else 0
_FILE = "tokenizer.json"
_BATCH = 1024  # texts
_MOST = 2**24  # tokens that a tokenizer may have: there is a name for each
_BESIDE = ("special_tokens_map.json", "tokenizer_config.json")  # of two that name a token, the last one counts


@dataclass(frozen=True, eq=False)
class Tokens:
    """A tokenizer, what errors call it, and its special tokens, where it has them."""

    where: str
    tokenizer: Tokenizer
    end: int | None  # after each document
    pad: int | None  # after texts that are short

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tokens, by their numbers."""
        return tuple(self.tokenizer.id_to_token(token) or f"({token})" for token in range(self.count))

    @property
    def count(self) -> int:
        """One more than the largest number of a token."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text as it is, without special ones."""
        return self._numbers(texts, special=False)

    def _numbers(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        check_unicode(self.where, texts)
        found: list[list[int]] = []
        for start in range(0, len(texts), _BATCH):  # what it knows of a token besides its number takes room
            try:
                part = self.tokenizer.encode_batch(list(texts[start : start + _BATCH]), add_special_tokens=special)
            except Exception as error:  # it raises nothing more precise
                raise BadInput(f"{self.where}: cannot read texts ({error}); save it again") from None
            found += [each.ids for each in part]
        return found

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens; special ones have none."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def documents(self, texts: Sequence[str], prompts: Sequence[str] | None = None) -> list[Document]:
        """Return each text with its end; the prompt that stands before it is not to be predicted."""
        if self.end is None:
            raise BadInput(
                f"{self.where}: has no end-of-text token, which separates documents; give it one in "
                f"tokenizer_config.json, eos_token"
            )
        before: Sequence[Sequence[int]] = [()] * len(texts) if prompts is None else self.encode(prompts)
        found = []
        for prompt, own in zip(before, self.encode(texts), strict=True):
            tokens = np.array([*prompt, *own, self.end], dtype=np.int64)
            found.append((tokens, (np.arange(len(tokens)) >= len(prompt)).astype(np.int64)))
        return found

    def padded(self, texts: Sequence[str], length: int) -> Ints:
        """Return [texts, length] tokens with the special ones of the model, cut off or padded behind."""
        if self.pad is None:
            raise BadInput(
                f"{self.where}: has no token for padding, and texts to classify differ in length; give it one in "
                f"tokenizer_config.json, pad_token, and the model the same in config.json, pad_token_id"
            )
        self.tokenizer.enable_truncation(length)
        try:
            rows = self._numbers(texts, special=True)
        finally:
            self.tokenizer.no_truncation()
        if (most := max(map(len, rows), default=0)) > length:
            raise BadInput(f"{self.where}: puts {most} special tokens around a text; set data.length above that")
        if blank := next((place for place, row in enumerate(rows, start=1) if not row), None):
            raise BadInput(f"{self.where}: makes no token of text {blank}; remove it")
        table = np.full((len(rows), length), self.pad, dtype=np.int64)
        for place, row in enumerate(rows):
            table[place, : len(row)] = row
        return table


def tokens_in(folder: str) -> Tokens:
    """Return the tokenizer of a folder, or fail with what is wrong with it."""
    path, where = Path(folder).expanduser(), f"data.tokenizer = {folder!r}"
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise BadInput(f"{where}: needs the package tokenizers, pip install 'personafl[hf]'") from None
    if not path.is_dir():
        raise BadInput(f"{where}: no such folder; give one with a {_FILE}")
    if not (path / _FILE).is_file():
        raise BadInput(
            f"{where}: has no {_FILE}; write one with transformers.AutoTokenizer.from_pretrained(…).save_pretrained(…)"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path / _FILE))
    except Exception as error:  # it raises nothing more precise
        reason = " ".join(str(error).split())[:120]
        raise BadInput(f"{where}: {_FILE} is damaged ({reason}); save it again") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if (last := max(tokenizer.get_vocab(with_added_tokens=True).values(), default=_MOST)) >= _MOST:
        raise BadInput(f"{where}: {_FILE} has no tokens, or one of the number {last}; save it again")
    special: dict[str, Any] = {}
    for name in _BESIDE:
        special |= _read(where, path / name)
    return Tokens(where, tokenizer, *(_number(where, tokenizer, special, key) for key in ("eos_token", "pad_token")))


def _read(where: str, path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{where}: {path.name} cannot be read ({error}); save it again") from None
    return found if isinstance(found, dict) else {}


def _number(where: str, tokenizer: Tokenizer, special: dict[str, Any], key: str) -> int | None:
    name = special.get(key)
    name = name.get("content") if isinstance(name, dict) else name
    if name is None:
        return None
    number: int | None = tokenizer.token_to_id(str(name))
    if number is None:
        raise BadInput(f"{where}: its {key} {name!r} is no token of {_FILE}; save the tokenizer again")
    return number
