"""Clients' own networks with another head: the files that devices keep are those networks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import nn

import personafl
from personafl.models.modelfile import card_of

DIGITS = {"partition": {"kind": "classes", "clients": 4, "per_client": 4}}
SMALL = {"rounds": 2, "data": DIGITS, "training": {"steps": 2}, "evaluation": {"every": 0}}
MLP = {"name": "mlp", "hidden": [24]}
ADDED = {"fedcp": {"shared.weight", "policy.weight", "norm.bias"}, "gpfl": {"scale", "shift"}}


@pytest.mark.parametrize("method", ["fedcp", "gpfl"])
def test_a_file_is_the_clients_own_network(method: str, tmp_path: Path) -> None:
    """In a file, as ONNX, and as the run itself gives it; what all share is a plain network."""
    result = personafl.run({**SMALL, "model": MLP, "method": {"name": method}}, out=tmp_path / "run")
    exported = personafl.export(tmp_path / "run", clients=["1"], onnx=True)
    plain, own = exported.models if method == "fedcp" else (None, *exported.models)
    x = torch.rand(3, 1, 8, 8)
    loaded = personafl.load_model(own.file)
    torch.testing.assert_close(loaded(x), result.model("1")(x))
    [scores] = onnxruntime.InferenceSession(str(own.file.with_suffix(".onnx"))).run(["scores"], {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(scores), loaded(x), rtol=1e-4, atol=1e-5)
    for name in ADDED[method]:
        assert any(each.endswith(f".{name}") for each in loaded.state_dict())
    if plain is not None:
        assert card_of(plain.file).head is None
        torch.testing.assert_close(personafl.load_model(plain.file)(x), result.model("1", "global")(x))
        assert not any("policy" in name for name in personafl.load_model(plain.file).state_dict())


def test_a_module_of_the_users_own_gets_one_too(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 10))
    result = personafl.run({**SMALL, "method": {"name": "gpfl"}}, model=module, out=tmp_path / "run")
    [own] = personafl.export(tmp_path / "run", clients=["1"], model=module).models
    x = torch.rand(3, 1, 8, 8)
    loaded = personafl.load_model(own.file, module=module)
    torch.testing.assert_close(loaded(x), result.model("1")(x))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {**MLP, "personal": "input"}}, "this must be that one"),
        ({"model": {"name": "mlp", "hidden": [24], "adapter": "lora"}}, "model.personal: "),
        ({"devices": [{"share": 1.0, "model": {"name": "mlp"}}]}, "model"),
    ],
)
def test_what_cannot_have_such_a_head_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(personafl.BadInput, match=said):
        personafl.run({**SMALL, "model": MLP, "method": {"name": "gpfl"}, **changes})
