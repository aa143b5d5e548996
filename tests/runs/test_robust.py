"""Runs with [robust]: those without it where nothing is asked, and what is refused before anything runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from personafl.core import tree, wire
from personafl.errors import BadInput
from personafl.recipe.recipe import Recipe
from personafl.recipe.robust import RobustSection, RuleName
from personafl.robust.table import RULES
from personafl.robust.weighing import capped
from personafl.runs.build import prepare
from personafl.runs.robust import ON_DEVICES, section_of
from personafl.simulate.cloud import make_simulation
from personafl.simulate.simulator import Simulation
from personafl.storage.store import Store

SMALL: dict[str, Any] = {
    "rounds": 2,
    "data": {"normalize": "none", "partition": {"kind": "classes", "clients": 12, "per_client": 4}},
    "model": {"name": "mlp", "hidden": [12], "personal": "output"},
    "training": {"epochs": 1, "batch": 16, "lr": 0.1},
    "federation": {"cohort": 7},
    "method": {"name": "fedalt"},
    "engine": {"threads": 1, "strategy": "stacked"},
    "evaluation": {"every": 0},
    "robust": {"rule": "trimmed-mean", "f": 2},
}


DEPLOY = {"input_shape": [1, 8, 8], "classes": 10}
GOSSIP = {"servers": 2, "protocol": "gossip", "mixing": "full"}


def recipe(**sections: Any) -> Recipe:
    return Recipe.parse({key: value for key, value in {**SMALL, **sections}.items() if value is not None})


def after(given: Recipe, path: Path) -> tuple[Simulation, Any]:
    simulation = Simulation(prepare(given).federation, Store(path, 2**20))
    return simulation, [simulation.step(number) for number in range(2)][-1]


def model(simulation: Simulation) -> torch.Tensor:
    return vector(simulation.server)


def vector(state: Any) -> torch.Tensor:
    """Return the model of a server's state."""
    shared = state.own.shared if hasattr(state, "own") else state.shared
    return torch.cat([leaf.flatten() for leaf in tree.leaves(shared.model)])


def test_the_names_are_those_of_the_table() -> None:
    assert set(RuleName.__args__) == set(RULES)  # type: ignore[attr-defined]


def test_fedslr_has_a_rule_where_its_server_takes_the_mean_alone(tmp_path: Path) -> None:
    """As in LPGD (eqs. 18, 19): low rank is the clients' work, and the server averages."""
    method = {"name": "fedslr", "solver": "lpgd"}
    simulation, last = after(recipe(method=method), tmp_path)
    assert last.told == {"left_out": 0.0}
    assert type(simulation.server).__name__ == "Robust"
    for solver in ("dual", "gpgd"):
        with pytest.raises(BadInput, match="robust: what fedslr's clients send is more than changes"):
            prepare(recipe(method={**method, "solver": solver}))


def test_a_mean_with_nothing_more_is_the_run_without_it(tmp_path: Path) -> None:
    one, _ = after(recipe(robust={}), tmp_path / "one")
    other, _ = after(recipe(robust=None), tmp_path / "other")
    torch.testing.assert_close(model(one), model(other), rtol=0, atol=1e-6)


def test_a_run_has_its_rule_and_tells_of_it(tmp_path: Path) -> None:
    """Centered clipping keeps what it gave the round before; a checkpoint brings all of the state back."""
    robust = {"rule": "centered-clipping", "f": 0.3, "pre": ["arc", "nnm"], "clip": {"times": 1.5}}
    simulation, last = after(recipe(robust=robust), tmp_path / "one")
    assert set(last.told) == {"clip", "clipped", "left_out"}
    assert last.told["clip"] > 0
    assert any(bool((leaf != 0).any()) for leaf in tree.leaves(simulation.server.centre))
    again = Simulation(simulation.federation, Store(tmp_path / "two", 2**20), wire.encode(simulation.saved()))
    assert torch.equal(model(again), model(simulation))
    kept = zip(tree.leaves(again.server), tree.leaves(simulation.server), strict=True)
    assert all(torch.equal(a, b) for a, b in kept)


@pytest.mark.parametrize(
    ("sections", "default"),
    [
        ({}, True),
        ({"robust": {"rule": "mean"}}, False),
        ({"deploy": None}, False),
        ({"method": {"name": "scaffold"}}, False),
        ({"secure": {}, "method": {"name": "fedavg"}}, False),
        ({"privacy": {"noise": 1.0}, "method": {"name": "fedavg"}}, False),
        ({"cloud": {"servers": 2}, "federation": {}}, True),
        ({"cloud": GOSSIP, "federation": {}}, True),
    ],
)
def test_servers_of_real_devices_clip_unless_they_are_told_not_to(sections: dict[str, Any], default: bool) -> None:
    given = recipe(**{"robust": None, "deploy": DEPLOY, **sections})
    found = section_of(given, given.algorithm())
    assert found == (ON_DEVICES if default else None)
    assert ON_DEVICES.weighs


def test_a_buffer_that_waits_for_all_is_the_run_without_it(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"federation": {}, "engine": {"threads": 1, "strategy": "sequential"}}
    for number, robust in enumerate(({"clip": {"times": 1.0}, "most": 0.2}, SMALL["robust"])):
        one, _ = after(recipe(**sections, robust=robust), tmp_path / f"one{number}")
        given = recipe(**sections, robust=robust, buffer={"size": 12})
        store = Store(tmp_path / f"other{number}", 2**20)
        other = make_simulation(prepare(given).federation, store)
        last = [other.step(round_) for round_ in range(2)][-1]
        assert wire.encode(other.server) == wire.encode(one.server)
        assert last.told is not None


def test_late_uploads_are_discounted_before_the_rule(tmp_path: Path) -> None:
    """By hand: of one upload in the buffer the mean is that upload, over the root of 1 and its staleness."""
    buffer = {"size": 1, "concurrency": 2, "arrival": {"kind": "exponential", "mean": 1.0}}
    moved = {}
    for name, robust in (("plain", None), ("clipped", {"clip": 1e9})):
        given = recipe(federation={}, robust=robust, buffer=buffer, rounds=4)
        simulation = make_simulation(prepare(given).federation, Store(tmp_path / name, 2**20))
        late = [simulation.step(round_).most_stale for round_ in range(4)]
        assert max(late) > 0  # type: ignore[type-var]
        moved[name] = model(simulation)
    torch.testing.assert_close(moved["clipped"], moved["plain"], rtol=0, atol=1e-6)


def test_each_server_of_a_cloud_has_a_rule_and_medians_of_its_own(tmp_path: Path) -> None:
    robust = {"rule": "centered-clipping", "f": 1, "clip": {"times": 1.0}}
    given = recipe(federation={}, robust=robust, cloud=GOSSIP)
    simulation = make_simulation(prepare(given).federation, Store(tmp_path, 2**20))
    for round_ in range(2):
        assert simulation.step(round_).loss > 0
    one, other = simulation.server
    assert not torch.equal(one.medians, other.medians)
    assert len(one.fates) == len(other.fates) == 6
    shared = [tree.leaves(each.own.shared.model)[0] for each in (one, other)]
    assert not torch.equal(*shared)  # each has taken its own uploads since they were mixed


@pytest.mark.parametrize(
    ("robust", "weights"),
    [
        ({"rule": "median", "f": 2}, lambda samples: np.ones_like(samples)),
        ({"clip": {"times": 1.0}, "most": 0.19}, lambda samples: capped(torch.from_numpy(samples), 0.19).numpy()),
    ],
)
def test_servers_with_one_model_hand_in_what_their_rules_make(
    robust: dict[str, Any], weights: Callable[[Any], Any], tmp_path: Path
) -> None:
    """By hand: from one start s the models of gossip are s + R_n after a round, that of sync s + Σ W_n R_n / Σ W_n.

    R_n is what the rule of server n makes of its uploads, and W_n what these weigh, cut to their share.
    """
    sides: dict[str, dict[str, Any]] = {"gossip": GOSSIP, "sync": {"servers": 2}}
    made = {
        name: make_simulation(
            prepare(recipe(federation={}, robust=robust, cloud=cloud)).federation, Store(tmp_path / name, 2**20)
        )
        for name, cloud in sides.items()
    }
    federation = made["sync"].federation
    assert federation.cloud is not None
    for simulation in made.values():
        simulation.step(0)
    heavy = [
        weights(federation.data.train.sizes_of(own).astype(float)).sum() for own in federation.cloud.topology.devices
    ]
    own, other = (vector(state) for state in made["gossip"].server)
    first, second = made["sync"].server
    mean = (heavy[0] * own + heavy[1] * other) / sum(heavy)
    torch.testing.assert_close(vector(first), mean, rtol=0, atol=1e-6)
    assert torch.equal(vector(first), vector(second))
    assert not torch.equal(own, other)
    assert [len(state.fates) for state in (first, second)] == [6, 6]


def test_a_sync_cloud_with_rules_goes_on_from_a_checkpoint_to_the_same_bits(tmp_path: Path) -> None:
    """With the medians and the guess of each server."""
    robust = {"rule": "centered-clipping", "f": 1, "clip": {"times": 1.0}}
    federation = prepare(recipe(federation={}, robust=robust, cloud={"servers": 2}, method=None)).federation
    whole = make_simulation(federation, Store(tmp_path / "whole", 2**20))
    whole.step(0)
    again = make_simulation(federation, Store(tmp_path / "again", 2**20), wire.encode(whole.saved()))
    for simulation in (whole, again):
        simulation.step(1)
    assert wire.encode(again.saved()) == wire.encode(whole.saved())
    one, other = whole.server
    assert not torch.equal(one.medians, other.medians)


def test_uploads_count_alike_unless_they_are_averaged() -> None:
    assert recipe().federation.weights == "uniform"
    assert recipe(robust={}).federation.weights == "examples"
    assert recipe(robust={"pre": ["nnm"]}).federation.weights == "uniform"


@pytest.mark.parametrize(("f", "cohort", "hostile"), [(2, 7, 2), (0.3, 10, 3), (0.29, 10, 2), (0.0, 10, 0)])
def test_hostile_clients_are_a_count_or_a_share(f: int | float, cohort: int, hostile: int) -> None:
    assert RobustSection(f=f).hostile(cohort) == hostile


@pytest.mark.parametrize(
    ("sections", "match"),
    [
        ({"secure": {}}, r"robust: with \[secure\] single uploads are not seen"),
        ({"privacy": {"noise": 1.0}, "federation": {}}, r"robust: with \[privacy\] noise is for the mean"),
        (
            {
                "cloud": {"servers": 2, "protocol": "async", "first": 1},
                "federation": {},
                "robust": {"rule": "median", "f": 0.2},
            },
            "robust.f: servers of a cloud differ in size",
        ),
        ({"federation": {"cohort": 7, "weights": "examples"}}, "robust rules count uploads alike"),
        ({"federation": {"cohort": 7, "sampling": "bernoulli"}}, "cohorts by coins may be too small"),
        ({"robust": {"rule": "median", "most": 0.2}}, "robust.most: is for"),
        ({"robust": {"rule": "medain"}}, "robust.rule"),
        ({"robust": {"f": 0.5}}, "robust.f"),
        ({"robust": {"pre": ["clip"]}}, "robust.pre"),
    ],
)
def test_what_does_not_go_together_is_refused(sections: dict[str, Any], match: str) -> None:
    with pytest.raises(BadInput, match=match):
        recipe(**sections)


@pytest.mark.parametrize(
    ("sections", "match"),
    [
        ({"method": {"name": "scaffold"}}, "robust: what scaffold's clients send"),
        ({"robust": {"rule": "median", "f": 4}}, "Median holds against 4 hostile uploads among at least 9, and here"),
        ({"robust": {"rule": "bulyan", "f": 2}}, "Bulyan holds against 2 hostile uploads among at least 11"),
        ({"robust": {"rule": "median", "f": 2, "pre": ["bucketing"]}}, "among at least 5, and here are 4"),
        ({"buffer": {"size": 4}, "federation": {}}, "among at least 5, and here are 4"),
        (
            {"cloud": {"servers": 3, "protocol": "gossip", "mixing": "full"}, "federation": {}},
            "among at least 5, and here are 4",
        ),
        (
            {"deploy": DEPLOY, "federation": {}, "robust": {"rule": "median", "f": 0.2}},
            "robust.f: a share 0.2 of the 1 updates",
        ),
    ],
)
def test_what_cannot_hold_is_refused_before_it_runs(sections: dict[str, Any], match: str) -> None:
    with pytest.raises(BadInput, match=match):
        prepare(recipe(**sections))
