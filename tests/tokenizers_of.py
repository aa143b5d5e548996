"""Small tokenizers as folders, for tests of text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

END = "<end>"


def word_tokenizer(folder: Path, words: str = "a b c d", end: str | None = END, pad: str | None = END) -> str:
    """Write a tokenizer of whole words, numbered from 1; 0 is the end."""
    tokenizers = pytest.importorskip("tokenizers", reason="the hf extra is not installed")
    vocabulary = {END: 0} | {word: place for place, word in enumerate(words.split(), start=1)}
    whole = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=words.split()[0]))
    whole.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    whole.add_special_tokens([END])
    folder.mkdir(parents=True, exist_ok=True)
    whole.save(str(folder / "tokenizer.json"))
    special = {"eos_token": end, "pad_token": {"content": pad} if pad else None}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    return str(folder)
