"""What a language model writes: token by token, the most probable or drawn, by hand for a network that counts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from torch import Tensor, nn

import personafl
from personafl.data.sources.tokens import tokens_in
from personafl.errors import BadInput
from personafl.models.generating import continuation
from tokenizers_of import word_tokenizer

SPELLED = "a b c d e"  # 1 … 5, and 0 is the end


class Counting(nn.Module):
    """After token t comes t + 1 with logit `sure`, all else has 0; after the last one the end. It notes what it saw."""

    def __init__(self, sure: float) -> None:
        super().__init__()
        self.sure, self.seen = sure, list[list[int]]()

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen.append(tokens[0].tolist())
        return self.sure * nn.functional.one_hot((tokens + 1) % 6, 6).float()


def test_the_most_probable_tokens_until_the_end(tmp_path: Path) -> None:
    tokens, network = tokens_in(word_tokenizer(tmp_path, SPELLED)), Counting(1.0)
    assert continuation(network, tokens, "a b", length=2).split() == ["c", "d", "e"]
    assert network.seen == [[1, 2], [2, 3], [3, 4], [4, 5]]  # no more than the length
    assert continuation(network, tokens, "a b", length=2, most=2).split() == ["c", "d"]
    network.seen.clear()
    assert continuation(network, tokens, "", length=4, most=1).split() == ["a"]
    assert network.seen == [[0]]  # as if another text had ended


def test_with_a_temperature_tokens_are_drawn(tmp_path: Path) -> None:
    """Near 0 it is the most probable one again; at T each follows with probability softmax(scores / T)."""
    tokens, network = tokens_in(word_tokenizer(tmp_path, SPELLED)), Counting(2.0)
    assert continuation(network, tokens, "a", length=4, temperature=0.01).split() == ["b", "c", "d", "e"]
    drawn = [continuation(network, tokens, "a", length=4, most=1, temperature=2.0, seed=seed) for seed in range(400)]
    assert drawn == [
        continuation(network, tokens, "a", length=4, most=1, temperature=2.0, seed=seed) for seed in range(400)
    ]
    share = sum(text.strip() == "b" for text in drawn) / 400
    expected = math.e / (math.e + 5)  # the logit 2 at temperature 2, beside five of 0
    assert abs(share - expected) < 0.08  # more than three standard deviations


def test_what_a_network_cannot_go_on_with_is_said(tmp_path: Path) -> None:
    """Also a temperature by which scores overflow, and a seed of any size."""
    tokens = tokens_in(word_tokenizer(tmp_path, SPELLED))
    sharp = continuation(Counting(1.0), tokens, "a", length=4, temperature=1e-320, seed=2**70)
    assert sharp.split() == ["b", "c", "d", "e"]
    with pytest.raises(BadInput, match="has tokens that the model does not know; put back the tokenizer"):
        continuation(nn.Embedding(3, 6), tokens, "a e", length=4)
    for sure in (float("nan"), float("inf")):
        with pytest.raises(BadInput, match="model: its scores are not finite"):
            continuation(Counting(sure), tokens, "a", length=4)


ROWS = pd.DataFrame({"author": ["ann", "bob"] * 8, "text": ["a b c d e", "e d c b a"] * 8})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> personafl.Result:
    """Ann's texts count up, and bob's down; each has a model of its own."""
    folder = tmp_path_factory.mktemp("letters")
    settings: dict[str, Any] = {
        "data.text": "text",
        "data.tokenizer": word_tokenizer(folder / "words", SPELLED),
        "data.length": 5,
        "training.optimizer": "adam",
        "training.lr": 0.05,
        "training.epochs": 20,
    }
    return personafl.run(
        ROWS, "local", user="author", model="window", rounds=1, settings=settings, out=folder / "run", progress=False
    )


def test_each_client_continues_in_its_own_way(
    trained: personafl.Result, tmp_path: Path, called: Callable[..., tuple[int, str, str]]
) -> None:
    """In Python, from an exported file, and at the command line: the same text."""
    assert trained.generate("ann", "b", tokens=3).split() == ["c", "d", "e"]
    assert trained.generate("bob", "d", tokens=3).split() == ["c", "b", "a"]
    trained.export(tmp_path, ["bob"])
    (file,) = tmp_path.glob("*bob*.safetensors")
    assert personafl.generate(file, "d", tokens=3).split() == ["c", "b", "a"]
    assert f'print(personafl.generate("{file.name}", "…"))' in file.with_suffix(".md").read_text()
    code, out, _ = called("predict", str(file), "--prompt", "d", "--tokens", "3")
    assert (code, out.split()) == (0, ["c", "b", "a"])
    code, out, _ = called("predict", str(file), "--prompt", "d", "--temperature", "1", "--seed", "2", "--json")
    assert code == 0
    assert json.loads(out) == {"prompt": "d", "continuation": personafl.generate(file, "d", temperature=1.0, seed=2)}


def test_perplexity_is_in_rows_and_columns(trained: personafl.Result) -> None:
    row = next(row for row in trained.rows if row["split"] == "test")
    assert 1 <= row["perplexity"] < 3  # of the tokens that follow, almost all are certain
    assert "perplexity_weighted" in row
    columns = trained.to_pandas()
    assert columns["personal_test_perplexity"].tolist() == pytest.approx(
        columns["personal_test_loss"].map(math.exp).tolist()
    )


def test_what_is_wrong_in_one_line(
    trained: personafl.Result, tmp_path: Path, called: Callable[..., tuple[int, str, str]]
) -> None:
    trained.export(tmp_path, ["ann"])
    (file,) = tmp_path.glob("*ann*.safetensors")
    with pytest.raises(BadInput, match="temperature = -1, tokens = 100: give 0 or more"):
        personafl.generate(file, "a", temperature=-1)
    for words, message in {
        (): "--data and --prompt: give one of them",
        ("--prompt", "a", "--data", "t.csv"): "--data and --prompt: give one of them",
        ("--prompt", "a", "--probabilities"): "--prompt: prints text; leave out",
        ("--data", "t.csv"): "is for the task next-token; continue a text with --prompt",
    }.items():
        code, _, err = called("predict", str(file), *words)
        assert code == 2, words
        assert message in err.replace("\n", " ")
    words = trained.path.parent / "words" / "tokenizer.json"
    words.rename(words.with_suffix(".old"))
    try:
        with pytest.raises(BadInput, match="has no tokenizer"):
            trained.generate("ann", "a")
    finally:
        words.with_suffix(".old").rename(words)
