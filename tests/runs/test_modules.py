"""Any module runs, with every method and wherever runs go: those that torch.func cannot batch, one client at a time."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from crash_driver import outcome as left_by
from models.cases import data_of
from models.odd import ODD
from personafl import api, export, load_model
from personafl.algorithms import METHODS
from personafl.core import tree
from personafl.core.net import Net
from personafl.core.split import Split
from personafl.exports.fit import Limits, fit, parse_models
from personafl.exports.memory import training_memory
from personafl.models import make_net_and_split
from personafl.models.network import SharedNetwork
from personafl.recipe.recipe import Recipe
from personafl.report.about import facts
from personafl.report.load import load
from personafl.runs.build import prepare
from personafl.runs.listener import Progress
from personafl.runs.scoring import score, tune
from personafl.simulate.simulator import Simulation
from personafl.storage.store import Store
from tiers import tiered

X = torch.randn(24, 2, 5, generator=torch.Generator().manual_seed(0))
DATA = data_of(X, torch.arange(24) % 3, clients=2)
WHY = "clients are trained one by one: torch.func cannot batch nn.GRU (first)"
CASES = [(method, name) for name in ODD for method in METHODS]
QUICK = {(method, "Gru") for method in ("fedavg", "pfedme", "fedslr", "fedbcd", "quped", "fedrod", "apfl")} | {
    ("perfedavg", "Numpy"),
    ("fedspa", "Numpy"),
    ("fedalt", "Item"),
    ("scaffold", "Branch"),
}


def recipe(method: str = "ditto", model: str = "models.odd:Gru", **changes: Any) -> Recipe:
    values = {
        "rounds": 2,
        "model": {"name": model},
        "method": {"name": method, **({"variant": "hessian-free"} if method == "perfedavg" else {})},
        "training": {"batch": 6},
        "engine": {"workers": 1, "device": "cpu", "checkpoint_seconds": 0, **changes.pop("engine", {})},
    }
    return Recipe.parse(values | changes)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Data of two users as a file."""
    path = tmp_path_factory.mktemp("data") / "series.npz"
    np.savez(path, x=X.numpy(), y=np.arange(24) % 3, user=np.arange(24) // 12)
    return str(path)


@functools.cache
def _made(network: str) -> tuple[Net, Split | None]:
    return make_net_and_split(SharedNetwork.model_validate_json(network), DATA)


def _make(network: SharedNetwork, *_: object) -> tuple[Net, Split | None]:
    """Make each network once: the same for every method with the same personal part."""
    return _made(network.model_dump_json())


@pytest.mark.parametrize(("method", "name"), tiered(CASES, QUICK))
def test_every_method_takes_it(method: str, name: str, tmp_path: Path) -> None:
    fed = prepare(recipe(method, f"models.odd:{name}"), data=DATA, make=_make).federation
    simulation, tuned = Simulation(fed, Store(tmp_path / "states", 2**30)), Store(tmp_path / "tuned", 2**30)
    for number in range(2):
        simulation.step(number)
    if fed.algorithm.client.tuning:
        tune(simulation, tuned, DATA.seen, 2)
    scored = score(simulation, tuned, DATA.seen, {"test": DATA.test}, blends=False)
    known = [simulation.store.get(client).values() for client in range(2) if client in simulation.store]
    leaves = [*tree.leaves(simulation.server), *(leaf for entry in known for leaf in entry)]
    assert leaves
    assert all(leaf.isfinite().all() for leaf in leaves)
    assert all(np.isfinite(found.loss).all() for found in scored.scores.values())
    assert (fed.engines[0].strategy == "sequential") == (name not in ("Writes", "Keeps"))


@pytest.mark.parametrize(
    "name", tiered([name for name in ODD if name != "Item"], ["Gru", "Branch"])
)  # it sees the order
def test_it_is_trained_as_plain_torch_does(name: str, tmp_path: Path) -> None:
    """Local training, a step on all 12 samples a round: w ← w − 0.1 ∇ of the mean cross-entropy, in float64."""
    torch.manual_seed(0)
    module = ODD[name]()
    plain = copy.deepcopy(module).double()
    one = {"lr": 0.1, "batch": "all"}
    api.run(
        recipe("local", "auto", training=one, data={"normalize": "none"}, engine={"dtype": "float64"}),
        data=DATA,
        model=module,
        out=tmp_path / "run",
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(X[:12].double().clone()), torch.arange(12) % 3).backward()
        optimizer.step()
    exported = export(tmp_path / "run", clients=["0"], data=DATA, model=module)
    loaded = load_model(exported.models[-1].file, module=module)
    for parameter, expected in plain.named_parameters():
        torch.testing.assert_close(loaded.get_parameter(parameter).detach(), expected.detach(), rtol=0, atol=1e-12)


def test_the_user_is_told_once_and_the_report_knows(file: str, called: Any, tmp_path: Path) -> None:
    words = ("--dataset", file, "--methods", "fedavg,local", "--model", "models.odd:gru", "--rounds", "1")
    code, shown, error = called("compare", *words, "--out", str(tmp_path / "both"))
    assert code == 0, error
    assert (shown.count(WHY), error.count(WHY)) == (1, 1)
    assert ("note", WHY) in facts(load([tmp_path / "both"]))
    code, _, error = called("compare", *words, "--out", str(tmp_path / "none"), "engine.strategy=stacked")
    assert (code, error.count("\n")) == (2, 1)
    assert "engine.strategy: 'stacked' is not possible: torch.func cannot batch nn.GRU (first)" in error
    assert not (tmp_path / "none").exists()


def test_who_asked_for_it_is_not_told() -> None:
    assert prepare(recipe(engine={"strategy": "sequential"}), data=DATA).notes == []
    assert prepare(recipe(), data=DATA).notes == [WHY]


def test_its_memory_is_measured(file: str) -> None:
    """Where what is computed depends on numbers, shapes alone do not do."""
    one = recipe("quped", "models.odd:Numpy", data={"source": file})
    assert training_memory(prepare(one)).measured > 0
    found = fit(one, Limits(bytes=10**5, memory=10**7), parse_models("models.odd:Branch,models.odd:Gru"), [None])
    assert [candidate.memory is not None for candidate in found.candidates] == [True, True]


class Stopped(Exception):
    pass


def stop(event: object) -> None:
    if isinstance(event, Progress):
        raise Stopped


@pytest.mark.parametrize("name", tiered(["Gru", "Numpy", "Keeps"], ["Gru", "Keeps"]))
def test_it_is_resumed_exported_and_loaded(name: str, file: str, tmp_path: Path) -> None:
    one = recipe("ditto", f"models.odd:{name}", data={"source": file})
    api.run(one, out=tmp_path / "whole")
    with pytest.raises(Stopped):
        api.run(one, out=tmp_path / "stopped", listener=stop)
    api.resume(tmp_path / "stopped")
    assert left_by(tmp_path / "stopped") == left_by(tmp_path / "whole")
    exported = export(tmp_path / "whole", clients="all")
    assert all(load_model(each.file)(X).shape == (24, 3) for each in exported.models)


@pytest.mark.system
@pytest.mark.parametrize("name", ["Gru", "Branch", "Keeps"])
def test_workers_give_the_same_bits(name: str, file: str, tmp_path: Path) -> None:
    """By name, and as an object."""
    for label, given, module in (("name", f"models.odd:{name}", None), ("object", "auto", ODD[name]())):
        runs = [tmp_path / f"{label}{count}" for count in (1, 2)]
        for count, path in enumerate(runs, 1):
            one = recipe("quped", given, data={"source": file}, engine={"workers": count})
            api.run(one, model=module, out=path)
        first, second = ({**left_by(path), "recipe": None} for path in runs)
        assert first == second


@pytest.mark.system
def test_it_is_planned_and_written_as_onnx_or_refused_in_a_line(file: str, called: Any, tmp_path: Path) -> None:
    words = ("--dataset", file, "--rounds", "1", "--quiet")
    for name in ("Gru", "Branch"):
        model, out = ("--model", f"models.odd:{name}"), tmp_path / name
        assert called("plan", *words[:-1], *model, "--methods", "fedavg")[0] == 0
        assert called("run", *words, *model, "--out", str(out))[0] == 0
    code, _, error = called("export", str(tmp_path / "Gru"), "--onnx", "--quiet")
    assert (code, error) == (0, "")
    code, _, error = called("export", str(tmp_path / "Branch"), "--onnx", "--quiet")
    assert (code, error.count("\n")) == (2, 1)
    assert "torch cannot write this network as ONNX: Data-dependent branching; export without --onnx" in error
