"""Runs with [attack]: who is hostile, on what they train, and that honest clients alone are scored."""

import dataclasses
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
from personafl.runs.attack import make_attack, under_attack
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


BACKDOOR = {"kind": "backdoor", "share": 0.3, "target": 2}


@pytest.mark.parametrize("normalize", ["none", "auto"])
def test_a_backdoor_is_in_half_of_the_hostile_clients_samples_and_in_copies_of_honest_test_samples(
    normalize: str,
) -> None:
    """The trigger is the last pixel of 8 × 8, white: 1, or (1 − mean) / std where images are standardised."""
    data = {**SMALL["data"], "normalize": normalize}
    plain = prepare(recipe(attack=None, data=data)).federation.data
    fed = prepare(recipe(attack=BACKDOOR, data=data)).federation
    assert fed.attack is not None
    assert fed.attack.triggered is not None
    mean, std = (0.0, 1.0) if plain.moments is None else (plain.moments.mean[0], plain.moments.std[0])
    white = torch.tensor((1 - mean) / std)
    for client in range(10):
        rows = fed.data.train[client]
        changed = (fed.data.x[rows] != plain.x[rows]).flatten(1).any(1) | (fed.data.y[rows] != plain.y[rows])
        there = fed.data.x[rows][:, 0, -1, -1].isclose(white) & (fed.data.y[rows] == 2)
        if fed.attack.hostile[client]:
            assert there.sum() >= -(-len(rows) // 2)
            assert changed.sum() <= -(-len(rows) // 2)
            assert there[changed].all()
        else:
            assert not changed.any()
        tried = fed.attack.triggered[client]
        wanted = [row for row in fed.data.test[client] if plain.y[row] != 2]
        assert (fed.data.y[tried] == 2).all()
        assert torch.allclose(fed.data.x[tried][:, 0, -1, -1], white)
        assert torch.equal(fed.data.x[tried].flatten(1)[:, :-1], plain.x[wanted].flatten(1)[:, :-1])
        assert bool(len(tried)) != fed.attack.hostile[client]
    assert fed.data.fingerprint == plain.fingerprint


def test_a_backdoor_that_cannot_be_is_refused() -> None:
    with pytest.raises(BadInput, match=r"attack\.target: 10 is none of the classes 0 to 9"):
        prepare(recipe(attack={**BACKDOOR, "target": 10}))
    given = recipe(attack=BACKDOOR)
    data = prepare(recipe(attack=None)).federation.data
    flat = dataclasses.replace(data, x=data.x.flatten(1))
    with pytest.raises(BadInput, match=r"attack\.kind: 'backdoor' puts a square on images .* of shape \[64\]; take"):
        under_attack(given, flat, make_attack(given, flat))


@pytest.mark.system
def test_a_backdoors_success_is_the_share_of_triggered_samples_that_are_taken_for_the_target(tmp_path: Path) -> None:
    """By hand: what each model says of a client's own images with a white last pixel, as they were in the data."""
    given = recipe(attack={**BACKDOOR, "strength": 4.0}, method={"name": "ditto"}, rounds=6)
    result = personafl.run(given.model_dump(mode="json", exclude_none=True), out=tmp_path / "run")
    plain = prepare(recipe(attack=None)).federation.data
    by_model = {row["model"]: row for row in result.rows if row["split"] == "test"}
    assert by_model["global"]["backdoor"] > 0.2
    for model in ("global", "personal"):
        column = result.columns[f"{model}_test_backdoor"]
        for place, client in enumerate(result.columns["client"]):
            if not result.columns["test"][place]:
                assert column[place] is None
                continue
            rows = [row for row in plain.test[client] if plain.y[row] != 2]
            x = plain.x[rows].clone()
            x[:, :, -1, -1] = 1.0
            said = result.predict(result.columns["name"][place], x, kind=model)
            assert column[place] == pytest.approx(np.mean(np.asarray(said).astype(str) == plain.label_names[2]))
        known = [value for value in column if value is not None]
        assert by_model[model]["backdoor"] == pytest.approx(np.mean(known))
