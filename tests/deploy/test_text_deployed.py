"""Devices with a language model of Hugging Face's and texts of their own: adapters alone travel."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from deploy_harness import loopback
from processes import recipe_of, simulated
from test_deployed import outcome

from models.folders import folder
from personafl.core import wire
from personafl.deploy.device.serving import generate
from tokenizers_of import word_tokenizer

WORDS = " ".join("abcdefghijklmnopqrstuv")  # 22 and the end, as many as the model knows


@pytest.mark.system
@pytest.mark.parametrize("method", ["fedavg", "fedsim"])
def test_adapters_alone_travel_and_give_the_simulators_bits(method: str, tmp_path: Path) -> None:
    """Of a base with thousands of parameters; FedSA-LoRA sends A alone. Kept models continue a prompt."""
    model = folder("gpt2", tmp_path)
    rows = [{"author": name, "text": " ".join(name * 9)} for name in "abc"] * 3
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"source": str(tmp_path / "t.jsonl"), "text": "text", "user": "author", "length": 6, "validation": 0.2}
    data["tokenizer"] = word_tokenizer(tmp_path / "words", WORDS)
    own = {"personal": "lora_B"} if method == "fedsim" else {}
    adapters = {"source": model, "adapter": "lora", "rank": 2, **own}
    data["partition"] = {"kind": "users"}
    shape = {"input_shape": [6], "target_shape": [6], "classes": 23, "vocabulary": 23, "task": "next-token"}
    recipe = recipe_of(method, deploy=shape, data=data, model=adapters)

    async def whole() -> tuple[bytes, object]:
        async with loopback(recipe, tmp_path) as (made, server):
            await asyncio.gather(*(made.device(name) for name in made.names))
            found, states = outcome(made, await server)
            assert (found, states) == simulated(recipe)
            for name in made.names:
                kept = made.folder / "devices" / name
                assert len(generate(kept, "a a", 3, 0.0, 0).split()) <= 3
            return found, states

    found, states = asyncio.run(whole())
    tensors = wire.decode_named(found)
    shared = {name for name, value in tensors.items() if "transformer" in name and value.any()}
    assert shared
    assert all(".adapter." in name for name in shared)
    assert any(".adapter.b." in name for name in shared) == (method == "fedavg")  # it starts from 0
    if method == "fedsim":
        assert all(any(".adapter.b." in name for name in state) for state in states.values())
