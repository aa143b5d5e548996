"""Text of users: blocks of tokens whose next ones are predicted, texts to classify, and all that can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import personafl
from personafl.core.reading import Reading
from personafl.data.build import federate
from personafl.data.config import DataConfig
from personafl.data.sources import load_dataset
from personafl.data.sources.memory import in_memory, inputs_of
from personafl.data.sources.tokens import tokens_in
from personafl.errors import BadInput
from tokenizers_of import END, word_tokenizer

ROWS = [
    {"author": "ann", "text": "a b", "kind": "x"},
    {"author": "bob", "text": "c", "kind": "y"},
    {"author": "ann", "text": "c d a", "kind": "y"},
    {"author": "bob", "text": "d d d", "kind": "x"},
]
TEXT = {"text": "text", "user": "author", "length": 3}


def lines(path: Path, rows: list[Any] = ROWS) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def reading(tmp_path: Path, **more: Any) -> Reading:
    return Reading(**{**TEXT, "tokenizer": word_tokenizer(tmp_path / "words"), **more})


def test_documents_of_a_user_are_packed_end_to_end(tmp_path: Path) -> None:
    """Ann has a b <end> c d a <end>, 1 2 0 3 4 1 0; the next of 1 2 0 are 2 0 3. Bob has 3 0 4 4 4 0."""
    data = load_dataset(lines(tmp_path / "t.jsonl"), reading(tmp_path))
    assert data.x.tolist() == [[1, 2, 0], [3, 4, 1], [3, 0, 4], [4, 4, 0]]
    assert data.y.tolist() == [[2, 0, 3], [4, 1, 0], [0, 4, 4], [4, 0, -1]]
    assert [data.user_names[user] for user in data.user] == ["ann", "ann", "bob", "bob"]
    assert (data.task, data.classes, data.vocabulary) == ("next-token", 5, 5)
    assert data.label_names == ("<end>", "a", "b", "c", "d")


def test_a_prompt_is_not_predicted(tmp_path: Path) -> None:
    """Of 'a b' then 'c <end>' the targets are c and <end>; of the next prompt nothing is, so a block falls away."""
    rows = [{"author": "ann", "asked": "a b", "text": "c"}, {"author": "ann", "asked": "a b a b a b a", "text": "d"}]
    data = load_dataset(lines(tmp_path / "t.jsonl", rows), reading(tmp_path, prompt="asked"))
    # 1 2 3 0 1 2 1 2 1 2 1 4 0, of which 3 0 and 4 0 count
    assert data.x.tolist() == [[1, 2, 3], [2, 1, 4]]
    assert data.y.tolist() == [[-1, 3, 0], [-1, 4, 0]]


@pytest.mark.parametrize("how", ["csv", "frame", "hf", "parquet", "npz"])
def test_every_source_gives_the_same_blocks(tmp_path: Path, how: str) -> None:
    wanted = load_dataset(lines(tmp_path / "t.jsonl"), reading(tmp_path))
    frame = pd.DataFrame(ROWS)
    if how == "frame":
        found = in_memory(frame, reading(tmp_path))
    elif how == "hf":
        datasets = pytest.importorskip("datasets", reason="the hf extra is not installed")
        datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
        found = load_dataset(f"hf:{tmp_path / 'saved'}", reading(tmp_path))
    elif how == "npz":
        texts = [row["text"].encode() for row in ROWS]
        user = np.array([row["author"] for row in ROWS])
        offset = np.cumsum([0, *map(len, texts)])
        np.savez(tmp_path / "t.npz", text=np.frombuffer(b"".join(texts), np.uint8), offset=offset, user=user)
        found = load_dataset(str(tmp_path / "t.npz"), reading(tmp_path, text=None, user=None))
    else:
        write = frame.to_csv if how == "csv" else frame.to_parquet
        write(tmp_path / f"t.{how}", index=False)
        found = load_dataset(str(tmp_path / f"t.{how}"), reading(tmp_path))
    assert torch.equal(found.x, wanted.x)
    assert torch.equal(found.y, wanted.y)
    assert np.array_equal(found.user, wanted.user)
    assert found.user_names == wanted.user_names


def test_halves_are_packed_apart(tmp_path: Path) -> None:
    """No block has text of both: the last texts of a user test it."""
    rows = [row | {"split": "test" if place > 1 else "train"} for place, row in enumerate(ROWS)]
    config = DataConfig(**TEXT, tokenizer=word_tokenizer(tmp_path / "words"), min_samples=1)
    data = federate(load_dataset(lines(tmp_path / "t.jsonl", rows), config.reading()), config, 0)
    assert data.x[data.train[0]].tolist() == [[1, 2, 0]]
    assert data.y[data.train[0]].tolist() == [[2, 0, -1]]
    assert data.x[data.test[0]].tolist() == [[3, 4, 1]]
    assert data.x[data.test[1]].tolist() == [[4, 4, 4]]


def test_texts_are_classified(tmp_path: Path) -> None:
    """Cut off at the length, or padded behind."""
    data = load_dataset(lines(tmp_path / "t.jsonl"), reading(tmp_path, label="kind", length=2))
    assert data.x.tolist() == [[1, 2], [3, 0], [3, 4], [4, 4]]
    assert data.y.tolist() == [0, 1, 1, 0]
    assert (data.task, data.vocabulary, data.label_names) == ("classification", 5, ("x", "y"))
    assert data.reading.text == "text"
    again = in_memory(pd.DataFrame({"text": ["b"]}), data.reading.model_copy(update={"who": "predict"}))
    assert again.x.tolist() == [[2, 0]]


@pytest.mark.parametrize("tokenizer", [True, False])
def test_texts_to_classify_without_labels_are_read_as_those_with_them(tokenizer: bool, tmp_path: Path) -> None:
    """One row of tokens for each text: not blocks of all of them, whose next tokens are predicted."""
    more = {} if tokenizer else {"tokenizer": None}
    data = load_dataset(lines(tmp_path / "t.jsonl"), reading(tmp_path, label="kind", **more))
    known = data.reading.model_copy(update={"who": "predict"})
    bare = [{"text": row["text"]} for row in ROWS]
    assert torch.equal(load_dataset(lines(tmp_path / "bare.jsonl", bare), known).x, data.x)
    assert torch.equal(inputs_of(pd.DataFrame(bare), known, tokens=True), data.x)


def test_without_a_tokenizer_characters_are_predicted(tmp_path: Path) -> None:
    """Ann's texts are 'a b', a new line, and 'c d a'."""
    data = load_dataset(lines(tmp_path / "t.jsonl"), Reading(**{**TEXT, "length": 8}))
    assert data.label_names == ("0x0a", "space", "a", "b", "c", "d")
    assert data.x[0].tolist() == [2, 1, 3, 0, 4, 1, 5, 1]
    assert data.y[0].tolist() == [1, 3, 0, 4, 1, 5, 1, 2]
    words = load_dataset(lines(tmp_path / "t.jsonl"), Reading(**TEXT, unit="word", vocabulary=3))
    assert words.label_names == ("(rare)", "d", "a")


@pytest.mark.parametrize("unit", ["character", "word"])
def test_devices_number_no_tokens_by_their_own_texts(unit: Any, tmp_path: Path) -> None:
    """'abc' and 'bcd' would be the same tokens at two devices, and the model of both be trained on neither."""
    source = lines(tmp_path / "t.jsonl")
    np.savez(tmp_path / "t.npz", text=np.frombuffer(b"abcd abcd abcd", dtype=np.uint8), offset=np.array([0, 7, 14]))
    own = {"unit": unit, "length": 3, "who": "device"}
    with pytest.raises(BadInput, match=r"devices have others; name a tokenizer in the server's recipe"):
        load_dataset(source, Reading(text="text", **own))
    with pytest.raises(BadInput, match=r"devices have others; name a tokenizer in the server's recipe"):
        load_dataset(str(tmp_path / "t.npz"), Reading(**own))
    tokens = load_dataset(source, Reading(text="text", tokenizer=word_tokenizer(tmp_path / "words"), **own))
    assert tokens.label_names == ("<end>", "a", "b", "c", "d")


def test_targets_that_the_field_ignores_are_ignored() -> None:
    y = np.array([[1, -100], [-1, 0]])
    data = in_memory((np.array([[0, 1], [1, 0]]), y), Reading())
    assert data.y.tolist() == [[1, -1], [-1, 0]]


def test_the_tokenizer_is_that_of_the_model(tmp_path: Path) -> None:
    given = {"model": {"source": "there"}, "data": {"source": "t.jsonl", "text": "text"}}
    assert personafl.make_recipe(given).data.tokenizer == "there"
    other = {**given, "data": {**given["data"], "tokenizer": "here"}}
    assert personafl.make_recipe(other).data.tokenizer == "here"


@pytest.mark.parametrize(
    ("rows", "more", "message"),
    [
        (ROWS, {"text": "txt"}, r"data.text = 'txt' is no column; did you mean 'text'"),
        (ROWS, {"prompt": "asked"}, r"data.prompt = 'asked' is no column"),
        (ROWS, {"user": "text"}, r"column 'text' cannot be two of .*data.user.*; name another"),
        ([*ROWS, {"author": "eve", "text": "  "}], {}, r"user 'eve' has no text \(1 such users\); leave out eve"),
        ([*ROWS, {"author": "eve"}], {}, r"column 'text': row 5 has no text, but float nan; correct or remove it"),
        ([*ROWS, {"author": "eve", "text": 7}], {}, r"column 'text': row 5 has no text, but int 7"),
        ([*ROWS, {"text": "a"}], {}, r"column 'author': 1 of 5 values are missing"),
        (
            [{"author": "eve", "text": "a \ud83d"}],
            {},
            r"object 1: text 2 has half a character, .ud83d; correct or remove it",
        ),
        ([*ROWS, {"author": "eve", "text": "a \ud83d"}], {"tokenizer": None}, r"object 5: text 2 has half a character"),
        (["a", *ROWS], {}, r"line 1 is a str, not an object"),
        ([], {}, r"t.jsonl: holds no lines"),
        (ROWS, {"tokenizer": None, "prompt": "kind"}, r"data.prompt needs the tokenizer of a model"),
        (ROWS, {"label": "kind", "drop": ("author",)}, r"data.drop says nothing of a text that is classified"),
    ],
)
def test_what_is_wrong_with_texts_in_one_line(
    tmp_path: Path, rows: list[Any], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message) as error:
        load_dataset(lines(tmp_path / "t.jsonl", rows), reading(tmp_path, **more))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [(b'{"text": "a",', r"line 2 is no JSON \(Expecting property name.*\); correct or remove it"),
     (b'{"text": "\xff"}', r"cannot be read as UTF-8"),
     (b"[" * 100_000, r"line 2 is no JSON \(too deep\)")],
)  # fmt: skip
def test_a_line_that_is_no_json(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + line + b"\n")
    with pytest.raises(BadInput, match=message):
        load_dataset(str(path), reading(tmp_path))


def test_what_is_wrong_with_a_tokenizer_in_one_line(tmp_path: Path) -> None:
    source = lines(tmp_path / "t.jsonl")

    def error_of(folder: str, **more: Any) -> str:
        with pytest.raises(BadInput) as error:
            load_dataset(source, Reading(**{**TEXT, "tokenizer": folder, **more}))
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "no such folder; give one with a tokenizer.json" in error_of(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    assert "has no tokenizer.json; write one with" in error_of(str(tmp_path / "empty"))
    endless = word_tokenizer(tmp_path / "endless", end=None)
    assert "has no end-of-text token, which separates documents; give it one in" in error_of(endless)
    bare = word_tokenizer(tmp_path / "bare", pad=None)
    assert load_dataset(source, Reading(**TEXT, tokenizer=bare)).task == "next-token"  # which needs no padding
    assert "has no token for padding, and texts to classify differ in length" in error_of(bare, label="kind")
    lost = word_tokenizer(tmp_path / "lost", pad="<pad>")
    assert "its pad_token '<pad>' is no token of tokenizer.json" in error_of(lost)
    whole = word_tokenizer(tmp_path / "whole")
    lines(Path(source), [*ROWS, {"author": "eve", "text": " ", "kind": "x"}])
    assert "makes no token of text 5; remove it" in error_of(whole, label="kind")
    (tmp_path / "whole" / "tokenizer.json").write_text("{")
    assert "tokenizer.json is damaged" in error_of(whole, label="kind")


def test_a_tokenizer_that_texts_do_not_suit_is_named(tmp_path: Path) -> None:
    """One that puts more around a text than there is room for, and one that does not know what to do with a word."""
    tokenizers = pytest.importorskip("tokenizers", reason="the hf extra is not installed")
    folder = Path(word_tokenizer(tmp_path / "words"))
    whole = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    whole.post_processor = tokenizers.processors.TemplateProcessing(single=f"{END} $A {END}", special_tokens=[(END, 0)])
    whole.save(str(folder / "tokenizer.json"))
    assert tokens_in(str(folder)).padded(["a b", "c"], 3).tolist() == [[0, 1, 0], [0, 3, 0]]
    with pytest.raises(BadInput, match=r"data.tokenizer = .* special tokens around a text; set data.length above that"):
        tokens_in(str(folder)).padded(["a b", "c"], 1)
    whole.model = tokenizers.models.WordLevel({"a": 1}, unk_token="nothing")
    whole.save(str(folder / "tokenizer.json"))
    with pytest.raises(BadInput, match=r"data.tokenizer = .*: cannot read texts \(.*\); save it again"):
        tokens_in(str(folder)).encode(["b"])


@pytest.mark.parametrize("number", [None, 2**31])
def test_a_tokenizer_with_a_token_of_any_number_takes_no_room(tmp_path: Path, number: int | None) -> None:
    folder = Path(word_tokenizer(tmp_path / "words"))
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"] = {} if number is None else {"a": number}
    content["added_tokens"] = []
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(BadInput, match=r"has no tokens, or one of the number|damaged"):
        load_dataset(lines(tmp_path / "t.jsonl"), Reading(**TEXT, tokenizer=str(folder)))


def test_texts_of_nobody_are_dealt_alike(tmp_path: Path) -> None:
    """Where nobody says how, and there is neither a user nor a label: at random, equally many blocks to each."""
    rows = [{"text": "a b c d"}] * 120  # five tokens each with the end: 600, in 200 blocks of 3
    config = DataConfig(text="text", length=3, tokenizer=word_tokenizer(tmp_path / "words"))
    data = federate(load_dataset(lines(tmp_path / "t.jsonl", rows), config.reading()), config, 0)
    assert (data.train.sizes + data.test.sizes).tolist() == [4] * 50
