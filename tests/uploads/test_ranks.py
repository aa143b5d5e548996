"""Clients with smaller adapters in one shared LoRA: what a client of rank r computes, sends and keeps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import personafl
from personafl import api
from personafl.algorithms import METHODS, Training
from personafl.algorithms.fedavg import Change
from personafl.core import rng, tree, wire
from personafl.core.algorithm import Problem, for_returning
from personafl.core.batches import Steps
from personafl.core.losses import cross_entropy
from personafl.core.net import Net
from personafl.core.optim import Adaptive, OptimizerSpec, Sgd
from personafl.core.split import Split
from personafl.errors import BadInput
from personafl.models import with_adapters
from personafl.testing import check_algorithm, make_case
from personafl.uploads.ranks import ranked

SGD = Sgd(lr=0.1, momentum=0.9, weight_decay=1e-3, clip=1.0)
ADAM = Adaptive(lr=0.01)


def lora(rank: int, alpha: float) -> Net:
    """Return a network with LoRA of a rank beside both of its layers, which are frozen."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 10)).requires_grad_(False)
    net = Net(lambda: with_adapters(base, "lora", size=rank, alpha=alpha))
    return net.to(torch.device("cpu"), torch.float64)


def problem(rank: int | None, whole: int = 4) -> Problem:
    """Return a problem with adapters of rank 4, of which a client has a part; their scale is 2."""
    return Problem(lora(whole, 2.0 * whole), cross_entropy, split=Split(("*.adapter.b.weight",)), rank=rank)


def first(params: Any, rank: int) -> Any:
    """Return the first rows of A and columns of B."""
    return {
        name: value[:rank] if ".a." in name else value[:, :rank] if ".b." in name else value
        for name, value in params.items()
    }


@pytest.mark.parametrize("method", ["fedavg", "fedalt", "fedsim"])
def test_laws(method: str) -> None:
    training = Training(work=Steps(epochs=2, batch=4), optimizer=SGD)
    check_algorithm(ranked(METHODS[method].build(training)), problem(2))


@pytest.mark.parametrize(
    ("method", "optimizer"),
    [("fedavg", SGD), ("fedavg", ADAM), ("fedsim", ADAM), ("fedalt", SGD), ("scaffold", Sgd(lr=0.1)), ("ditto", ADAM)],
)
def test_it_trains_as_a_network_of_its_rank_does(method: str, optimizer: OptimizerSpec) -> None:
    """A client of rank 2 among those of 4, against a federation whose adapters have rank 2, at one scale."""
    rules = METHODS[method].build(Training(work=Steps(steps=3, batch=4), optimizer=optimizer))
    part, small = make_case(ranked(rules), problem(2)), make_case(rules, problem(None, whole=2))
    start = {name: value + 0.1 for name, value in part.problem.net.init(rng.generator(1, "start")).items()}
    start = {name: value.double() for name, value in start.items()}
    found = {}
    for case, begin in ((part, start), (small, first(start, 2))):
        down = wire.dense(case.algorithm.server.broadcast(case.algorithm.server.init(case.problem, begin, 10.0)))
        state = case.algorithm.client.init(case.problem, down, torch.Generator())
        state = tree.map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, state)
        data = case.drawn(1, case.algorithm.client.phases)
        state, upload = case.algorithm.client.update(case.problem, for_returning(down), state, data)
        found[case is part] = tree.flatten((state, wire.dense(upload)))
    assert found[True].keys() == found[False].keys()
    moved = 0.0
    for name, leaf in found[True].items():
        rank = 0 if ".a." in name else 1
        mine = leaf.narrow(rank, 0, 2) if "adapter" in name else leaf
        assert float((mine - found[False][name]).abs().max()) < 1e-12, name
        if "adapter" in name:
            assert not leaf.narrow(rank, 2, 2).any()
            moved = max(moved, float(mine.abs().max()))
    assert moved > 1e-3


def test_it_sends_the_first_rows_alone_and_what_others_have_is_left_as_it_is() -> None:
    """Rows beyond r, of a mean of changes of clients with r = 1 and 4 and equal weight, move half as far."""
    rules = ranked(METHODS["fedavg"].build(Training(work=Steps(steps=2, batch=8), optimizer=Sgd(lr=0.3))))
    few, whole = make_case(rules, problem(1)), make_case(rules, problem(None))
    start = {name: value.double() + 0.1 for name, value in few.problem.net.init(rng.generator(1, "start")).items()}
    server = rules.server.init(few.problem, start, 2.0)
    down = wire.dense(rules.server.broadcast(server))
    sent: list[Any] = []
    for case in (few, whole):
        state = rules.client.init(case.problem, down, torch.Generator())
        upload = rules.client.update(case.problem, down, state, case.drawn(1, rules.client.phases))[1]
        assert isinstance(upload, Change)
        again = wire.decode(wire.encode(upload), wire.dense(upload))  # as a server has it of a device
        assert tree.flatten(wire.dense(again)).keys() == tree.flatten(wire.dense(upload)).keys()
        sent.append(again)
    assert wire.parameters(sent[0].change) * 4 == wire.parameters(sent[1].change)
    assert wire.size(sent[0]) < 0.7 * wire.size(sent[1])  # with names and shapes, which are most of so few
    both = tree.stack([wire.dense(upload) for upload in sent])
    joined = rules.server.join(server, None, both, torch.ones(2))
    after = wire.dense(rules.server.broadcast(rules.server.update(server, joined, 0))).model
    for name, value in after.items():
        axis = 0 if ".a." in name else 1
        theirs = wire.dense(sent[1]).change[name].narrow(axis, 1, 3)
        assert float((value - start[name]).narrow(axis, 1, 3).sub(theirs / 2).abs().max()) < 1e-12
        assert theirs.abs().max() > 1e-4


RUN: dict[str, Any] = {
    "rounds": 2,
    "data": {"source": "digits", "partition": {"kind": "iid", "clients": 6}},
    "model": {"name": "mlp", "hidden": [64], "adapter": "lora", "rank": 4, "frozen": "base"},
    "training": {"steps": 2, "batch": 8, "lr": 0.1},
    "federation": {"cohort": 6},
    "devices": [{"share": 0.5}, {"share": 0.5, "rank": 1}],
}


@pytest.mark.parametrize("method", ["fedavg", "fedalt"])
def test_runs_have_smaller_uploads_stacked_as_one_by_one(method: str, tmp_path: Path) -> None:
    own = RUN | {"method": {"name": method}}
    if method == "fedalt":
        own["model"] = RUN["model"] | {"personal": "lora_B"}
    sent, scores = {}, {}
    for name, changes in {
        "stacked": {"engine": {"strategy": "stacked"}},
        "sequential": {"engine": {"strategy": "sequential"}},
        "whole": {"devices": []},
    }.items():
        run = personafl.run(own | changes, out=tmp_path / name)
        sent[name] = int(run.history()["bytes_up"].sum())
        scores[name] = run.to_pandas().filter(like="loss").to_numpy()
    assert sent["stacked"] == sent["sequential"] < 0.9 * sent["whole"]
    assert scores["stacked"] == pytest.approx(scores["sequential"], abs=1e-5)
    assert abs(scores["stacked"] - scores["whole"]).max() > 1e-4


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"devices": [{"share": 1.0, "rank": 5}]}, r"devices\[0\]\.rank: 5 is above 4, that of the shared adapters"),
        ({"devices": [{"share": 1.0, "rank": 0}]}, r"devices\[0\]\.rank: input should be greater than or equal to 1"),
        ({"devices": [{"share": 1.0, "rank": 1, "model": {"name": "mlp"}}]}, "remove it, or model"),
        ({"model": {"name": "mlp"}}, r"devices\[1\]\.rank: is of lora adapters, and the model has none"),
        (
            {"model": RUN["model"] | {"frozen": ["base", "lora_A"]}},
            r"devices\[1\]\.rank: is of lora adapters, and of the shared ones one matrix is frozen",
        ),
        ({"method": {"name": "fedbcd"}}, r"fedbcd uses more of uploads than a mean of changes and has no use for"),
        ({"secure": {}}, r"devices\[1\]\.rank: an upload is smaller because of what it has, which \[secure\] hides"),
        ({"sample_privacy": {"noise": 1.0}}, r"devices\[1\]\.rank: \[sample_privacy\] adds noise to the rows"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=says):
        api.run(RUN | changes, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_rank_is_part_of_a_problem() -> None:
    """Clients of one rank are trained together, and not with those of another."""
    assert dataclasses.replace(problem(2), rank=3) != problem(2)
