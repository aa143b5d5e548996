"""Runs with [attack]: who is hostile, on what they train, and that honest clients alone are scored."""

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

import personafl
from personafl.core import tree
from personafl.errors import BadInput
from personafl.recipe.attack import AttackKind
from personafl.recipe.recipe import Recipe
from personafl.runs.build import prepare
from personafl.simulate.attack import STRENGTHS
from personafl.simulate.simulator import Simulation
from personafl.storage.store import Store

SMALL: dict[str, Any] = {
    "rounds": 2,
    "data": {"normalize": "none", "partition": {"kind": "classes", "clients": 10, "per_client": 4}},
    "model": {"name": "mlp", "hidden": [12], "personal": "output"},
    "training": {"epochs": 1, "batch": 16, "lr": 0.1},
    "federation": {"cohort": 1.0},
    "method": {"name": "fedavg"},
    "engine": {"threads": 1, "strategy": "stacked", "workers": 1},
    "evaluation": {"every": 0},
    "attack": {"kind": "sign-flip", "share": 0.3},
}


def recipe(**sections: Any) -> Recipe:
    return Recipe.parse({key: value for key, value in {**SMALL, **sections}.items() if value is not None})


def stepped(given: Recipe, path: Path) -> torch.Tensor:
    simulation = Simulation(prepare(given).federation, Store(path, 2**20))
    simulation.step(0)
    state = getattr(simulation.server, "own", simulation.server)
    return torch.cat([leaf.flatten() for leaf in tree.leaves(state.model)])


def test_the_hostile_are_a_share_and_the_same_every_time() -> None:
    one, other = (prepare(recipe()).federation for _ in range(2))
    assert one.attack is not None
    assert other.attack is not None
    assert one.attack.hostile.sum() == 3
    assert (one.attack.hostile == other.attack.hostile).all()
    sizes = one.data.test.sizes
    assert (sizes[one.attack.hostile] == 0).all()
    assert (sizes[~one.attack.hostile] > 0).all()
    assert "3 of 10 clients are hostile (sign-flip), and are not scored" in one.data.notes


@pytest.mark.parametrize("kind", ["label-flip", "label-noise"])
def test_labels_of_the_hostile_are_others(kind: str) -> None:
    plain = prepare(recipe(attack=None)).federation.data
    fed = prepare(recipe(attack={"kind": kind, "share": 0.3})).federation
    assert fed.attack is not None
    for client in range(10):
        rows = fed.data.train[client]
        was, now = plain.y[rows], fed.data.y[rows]
        if not fed.attack.hostile[client]:
            assert torch.equal(was, now)
        elif kind == "label-flip":
            assert torch.equal(now, 9 - was)
        else:
            assert not torch.equal(was, now)
    assert fed.data.fingerprint == plain.fingerprint


@pytest.mark.system
def test_a_rule_keeps_out_what_moves_the_mean(tmp_path: Path) -> None:
    """Where the hostile send much, the mean goes far; clipped, or by a rule, it stays near that of an honest round."""
    honest = stepped(recipe(attack=None, federation={"weights": "uniform"}), tmp_path / "honest")
    far = {"kind": "random", "share": 0.3, "strength": 100.0}

    def moved(name: str, **sections: Any) -> float:
        return float((stepped(recipe(attack=far, **sections), tmp_path / name) - honest).norm())

    none = moved("none", robust=None)
    for rule in ("median", "multi-krum", "caf"):
        assert moved(rule, robust={"rule": rule, "f": 3}) < 0.01 * none
    assert moved("clipped", robust={"clip": {}}) < 0.01 * none


def test_infinity_ends_a_mean_and_not_a_rule(tmp_path: Path) -> None:
    with pytest.raises(personafl.PersonaError, match="non-finite"):
        stepped(recipe(attack={"kind": "infinity", "share": 0.3}), tmp_path / "mean")
    robust = {"rule": "trimmed-mean", "f": 3, "pre": ["nnm"]}
    assert stepped(recipe(attack={"kind": "infinity", "share": 0.3}, robust=robust), tmp_path / "rule").isfinite().all()


def test_claimed_samples_are_capped(tmp_path: Path) -> None:
    attack = {"kind": "inflate", "share": 0.1}
    honest = stepped(recipe(attack=None), tmp_path / "honest")
    mean, capped = (
        float((stepped(recipe(attack=attack, robust=robust), tmp_path / name) - honest).norm())
        for name, robust in (("mean", None), ("capped", {"most": 0.15}))
    )
    assert capped < 0.3 * mean


@pytest.mark.parametrize("kind", ["alie", "optimal-ipm", "optimal-alie"])
def test_attacks_that_know_the_others_and_the_server_run(tmp_path: Path, kind: str) -> None:
    robust = {"rule": "trimmed-mean", "f": 3}
    assert stepped(recipe(attack={"kind": kind, "share": 0.3}, robust=robust), tmp_path).isfinite().all()


@pytest.mark.system
def test_honest_clients_alone_are_in_the_rows(tmp_path: Path) -> None:
    given = recipe(method={"name": "ditto"}).model_dump(mode="json", exclude_none=True)
    result = personafl.run(given, out=tmp_path / "run")
    counts = {row["count"] for row in result.rows if "count" in row}
    assert counts <= {7}
    tests = np.array(result.columns["test"])
    assert (tests == 0).sum() == 3


def test_all_kinds_have_a_strength() -> None:
    assert set(STRENGTHS) <= set(get_args(AttackKind))


@pytest.mark.parametrize(
    ("sections", "match"),
    [
        ({"buffer": {"size": 2}, "federation": {}}, r"attack: is simulated for one server .* remove \[buffer\]"),
        ({"cloud": {"servers": 2}, "federation": {}}, r"remove \[cloud\]"),
        ({"deploy": {"input_shape": [1, 8, 8], "classes": 10}}, r"remove \[deploy\]"),
        ({"evaluation": {"train": True}}, "evaluation.train: training data of hostile clients"),
        ({"attack": {"kind": "none"}}, "attack.kind"),
        ({"attack": {"share": 1.0}}, "attack.share"),
    ],
)
def test_what_does_not_go_with_it_is_refused(sections: dict[str, Any], match: str) -> None:
    with pytest.raises(BadInput, match=match):
        recipe(**sections)


def test_there_must_be_some_hostile_and_some_honest() -> None:
    for share, many in ((0.01, 0), (0.99, 10)):
        with pytest.raises(BadInput, match=f"of 10 clients is {many}, and some must be hostile and some honest"):
            prepare(recipe(attack={"share": share}))
