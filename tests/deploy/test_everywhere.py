"""A method that keeps the laws runs everywhere, and gives the simulator's numbers: also one that is not ours."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import SMALL, recipe_of, simulated
from test_deployed import deployed, outcome
from torch import Tensor, nn

from crash_driver import outcome as left_by
from models.odd import ODD
from personafl import api, export, load_model, models
from personafl.algorithms import METHODS, Method
from personafl.core import wire
from personafl.recipe.recipe import Recipe
from personafl.runs.build import prepare
from personafl.runs.listener import Progress
from tiers import tiered

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "add-an-algorithm.md"
APART = ("recipe", "metrics", "files")  # these say how it was run


@pytest.fixture(autouse=True)
def contributed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guide's method as its last section has it: a file beside ours, and a line in METHODS."""
    text = GUIDE.read_text().partition("## 5.")[0].replace("\ncheck_algorithm(", "\n# check_algorithm(")
    module = types.ModuleType("personafl.algorithms.my_ditto")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec("\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)), vars(module))
    monkeypatch.setitem(METHODS, "my_ditto", Method("my_ditto", "my_ditto", "the guide"))


class Stopped(Exception):
    pass


def run(method: str, path: Path, options: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Run it in the simulator and return all that it leaves but how it was run."""
    named = {"name": method, **(options or {})}
    values = {**SMALL, "rounds": 2, "method": named, "evaluation": {"every": 0}, **changes}
    api.run(Recipe.parse(values), out=path)
    return {key: value for key, value in left_by(path).items() if key not in APART}


@pytest.mark.parametrize("method", tiered(["my_ditto", "fedrod", "fedcp", "gpfl"], ["my_ditto"]))
def test_a_method_that_keeps_the_laws_runs_everywhere(method: str, tmp_path: Path) -> None:
    plain = run(method, tmp_path / "plain")
    engine = SMALL["engine"]
    assert run(method, tmp_path / "workers", engine=engine | {"workers": 2}) == plain
    everyone = run(method, tmp_path / "buffer", buffer={"size": 3})  # it waits for all: the synchronous method
    assert {key: everyone[key] for key in ("clients", "states")} == {key: plain[key] for key in ("clients", "states")}
    run(method, tmp_path / "late", buffer={"size": 1, "arrival": {"kind": "exponential", "mean": 1.0}})
    one = run(method, tmp_path / "one server", cloud={"servers": 1})
    assert one["states"] == plain["states"]
    run(method, tmp_path / "cloud", cloud={"servers": 2, "active": 1, "protocol": "async", "first": 1})

    stacked = run(method, tmp_path / "stacked", engine=engine | {"strategy": "stacked"})
    for client, entry in plain["states"].items():
        for name, (_, leaf) in entry.items():
            other = np.frombuffer(stacked["states"][client][name][1], np.float32)
            np.testing.assert_allclose(np.frombuffer(leaf, np.float32), other, atol=1e-5)


@pytest.mark.parametrize("method", tiered(["my_ditto", "fedrod"], []))
def test_it_is_deployed_resumed_and_exported(method: str, tmp_path: Path) -> None:
    for number, changes in enumerate(({}, {"uplink": {"form": "sparse", "keep": 0.2}})):
        recipe, folder = recipe_of(method, rounds=2, **changes), tmp_path / f"deployed{number}"
        folder.mkdir()
        assert outcome(*deployed(recipe, folder)) == simulated(recipe)

    whole = run(method, tmp_path / "run", engine=SMALL["engine"] | {"checkpoint_seconds": 0})

    def stop(progress: Any) -> None:
        if isinstance(progress, Progress) and progress.done == 1:
            raise Stopped

    with pytest.raises(Stopped):
        api.run(api.recipe_of(tmp_path / "run"), out=tmp_path / "stopped", listener=stop)
    api.resume(tmp_path / "stopped")
    assert left_by(tmp_path / "stopped")["states"] == whole["states"]

    exported = export(tmp_path / "run", clients=["0"], onnx=True)
    assert len(exported.models) == 2  # the global one, and the client's
    loaded = load_model(exported.models[1].file)
    named = wire.decode_named((tmp_path / "run" / "global.safetensors").read_bytes())
    inside = loaded.network.state_dict()  # of the module that standardises its inputs
    assert {name: value.shape for name, value in inside.items()} == {n: v.shape for n, v in named.items()}


@pytest.mark.system
@pytest.mark.parametrize("method", ["fedcp", "gpfl"])
def test_devices_have_networks_with_another_head(method: str, tmp_path: Path) -> None:
    recipe = recipe_of(method, rounds=2)
    assert outcome(*deployed(recipe, tmp_path)) == simulated(recipe)


@pytest.mark.system
@pytest.mark.parametrize("name", ["Gru", "Branch"])
def test_a_network_that_cannot_be_stacked_gives_the_same_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that personafl comes with on both sides: devices run no other code."""
    module = types.ModuleType("personafl.models.odd")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    vars(module)["made"] = lambda classes: nn.Sequential(nn.Flatten(1, 2), Chosen(), ODD[name](classes))
    monkeypatch.setitem(models._HOMES, "odd", "odd.made")
    recipe = recipe_of("ditto", rounds=2, model={"name": "odd"})
    assert prepare(recipe).federation.problems[0].unstackable
    assert outcome(*deployed(recipe, tmp_path)) == simulated(recipe)


class Chosen(nn.Module):
    """2 × 5 of the pixels of a digit."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 3:5, 2:7]
