"""Text through Hugging Face models: what they write, how perplexed they are, and classes, as transformers has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import personafl
from models.folders import folder
from personafl.core.algorithm import Problem
from personafl.core.losses import cross_entropy
from personafl.data.build import federate
from personafl.data.config import DataConfig
from personafl.data.sources import load_dataset
from personafl.data.sources.tokens import tokens_in
from personafl.errors import BadInput
from personafl.evaluate.score import try_shared
from personafl.models import make_net
from personafl.models.generating import continuation
from personafl.models.network import SharedNetwork
from tokenizers_of import word_tokenizer

pytestmark = pytest.mark.system  # transformers takes seconds to import
WORDS = " ".join("abcdefghijklmnopqrstuv")  # 22 and the end, as many as the models know


def texts(path: Path) -> str:
    """Write texts of three authors, of 3 to 14 words."""
    rows = [
        {"author": name, "kind": "xyz"[place % 3], "text": " ".join(WORDS.split()[place : 2 * place + 3])}
        for name in ("ann", "bob", "eve")
        for place in range(10)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config(tmp_path: Path, **more: Any) -> DataConfig:
    given = {"text": "text", "user": "author", "length": 8, "tokenizer": word_tokenizer(tmp_path / "words", WORDS)}
    return DataConfig(source=texts(tmp_path / "t.jsonl"), **{**given, **more})


def test_scores_and_texts_are_those_of_transformers(tmp_path: Path) -> None:
    """Perplexity of all tokens of a client, and the greedy continuation of a prompt."""
    import transformers

    own, place = config(tmp_path), folder("gpt2", tmp_path)
    data = federate(load_dataset(own.source, own.reading()), own, 0)
    net = make_net(SharedNetwork(source=place), data)
    module = net.module().eval()
    params = {name: value.detach() for name, value in module.named_parameters()}
    problem = Problem(net, cross_entropy, data=data.shape)
    found = try_shared(problem, params, data, data.test, np.arange(3)).scores()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(place).eval()
    for client in range(3):
        x, y = data.samples(data.test[client])
        with torch.no_grad():
            scores = theirs(input_ids=x, attention_mask=torch.ones_like(x)).logits.double()
        loss = functional.cross_entropy(scores.flatten(0, 1), y.flatten(), ignore_index=-1)
        assert found.metrics["perplexity"][client] == pytest.approx(float(loss.exp()), rel=1e-5)
    tokens = tokens_in(str(own.tokenizer))
    prompt = torch.tensor(tokens.encode(["c d"]))
    whole = theirs.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=5,
        do_sample=False,
        eos_token_id=0,
        pad_token_id=0,
    )
    assert (
        continuation(module, tokens, "c d", length=10, most=5).split() == tokens.decode(whole[0, 2:].tolist()).split()
    )


@pytest.mark.parametrize(("kind", "more"), [("gpt2", {}), ("bert", {"data.label": "kind"}), ("llama", {})])
def test_a_run_from_texts_to_models(kind: Any, more: dict[str, Any], tmp_path: Path) -> None:
    own = config(tmp_path)
    settings = {f"data.{key}": getattr(own, key) for key in ("text", "user", "length", "tokenizer")}
    settings |= {"model.source": folder(kind, tmp_path), "model.adapter": "lora", "model.rank": 2, **more}
    result = personafl.run(
        own.source, "fedalt", rounds=2, settings={**settings, "model.personal": "lora_B"}, out=tmp_path / "run",
        progress=False,
    )  # fmt: skip
    row = next(row for row in result.rows if (row["model"], row["split"]) == ("personal", "test"))
    assert 0 <= row["accuracy"] <= 1
    assert ("perplexity" in row) == (kind != "bert")
    if kind == "bert":
        with pytest.raises(BadInput, match="is for the task classification, and only"):
            result.generate("ann", "a")
    else:
        written = result.generate("ann", "a b", tokens=4, temperature=1.0, seed=1)
        assert written == result.generate("ann", "a b", tokens=4, temperature=1.0, seed=1)
        assert len(written.split()) <= 4


def test_texts_longer_than_a_model_s_positions_are_refused(tmp_path: Path) -> None:
    own = config(tmp_path, length=11)
    data = federate(load_dataset(own.source, own.reading()), own, 0)
    with pytest.raises(BadInput, match="has 10 positions, and texts of this data have 11 tokens"):
        make_net(SharedNetwork(source=folder("gpt2", tmp_path)), data)
