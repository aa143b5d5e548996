"""Recipes with clients that train without contact, with random numbers of steps, and with an accelerated optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from crash_driver import differences, outcome
from personafl import BadInput, Recipe, api
from personafl.core.batches import Steps
from personafl.core.optim import Accelerated
from personafl.core.schedule import Exponential
from personafl.runs.build import prepare
from personafl.runs.listener import Progress

RECIPE: dict[str, Any] = {
    "rounds": 6,
    "method": {"name": "fedbcdi"},
    "data": {"partition": {"kind": "iid", "clients": 6}, "unseen": 1},
    "model": {"name": "mlp", "hidden": [4]},
    "training": {"steps": 5, "least_steps": 1, "batch": 16},
    "federation": {"cohort": 2, "offline": 2},
    "engine": {"threads": 1, "checkpoint_seconds": 0.0},
}


class Crash(BaseException):
    """Ends a run from within."""


def changed(**sections: Any) -> dict[str, Any]:
    return {**RECIPE, **{k: {**RECIPE.get(k, {}), **v} if isinstance(v, dict) else v for k, v in sections.items()}}


@pytest.mark.system
def test_a_run_with_offline_training_resumes_to_the_same_bits(tmp_path: Path) -> None:
    def crash(progress: Progress) -> None:
        if isinstance(progress, Progress) and progress.done == 3:
            raise Crash

    api.run(RECIPE, out=tmp_path / "straight")
    with pytest.raises(Crash):
        api.run(RECIPE, out=tmp_path / "stopped", listener=crash)
    api.resume(tmp_path / "stopped")
    assert differences(outcome(tmp_path / "stopped"), outcome(tmp_path / "straight")) == []
    api.run(changed(federation={"offline": 0}), out=tmp_path / "online")
    assert {"states", "server"} <= set(differences(outcome(tmp_path / "online"), outcome(tmp_path / "straight")))


def test_offline_is_a_count_or_a_share() -> None:
    assert prepare(Recipe.parse(RECIPE)).federation.offline == 2
    assert prepare(Recipe.parse(changed(federation={"offline": 0.5}))).federation.offline == 0.5
    assert Recipe.parse({}).federation.offline == 0
    for wrong in (-1, -0.5, 1.5):
        with pytest.raises(BadInput, match=r"federation\.offline: give a count, a share up to 1\.0"):
            Recipe.parse(changed(federation={"offline": wrong}))
    with pytest.raises(BadInput, match=r"federation\.offline: 9 clients a round, but only 5"):
        prepare(Recipe.parse(changed(federation={"offline": 9})))


@pytest.mark.parametrize("uplink", [{"form": "dense"}, {"form": "sparse", "keep": 0.1}])
@pytest.mark.parametrize("method", ["fedavg", "fedbcd"])
def test_methods_without_offline_training_refuse_it(method: str, uplink: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=rf"federation\.offline: {method}'s clients train only in contact; remove it"):
        prepare(Recipe.parse(changed(method={"name": method}, uplink=uplink)))
    prepare(Recipe.parse(changed(uplink=uplink)))


def test_pretraining_is_not_offline() -> None:
    """Its own method has contact only; the main stage keeps the key."""
    recipe = Recipe.parse(changed(pretrain={"rounds": 1}))
    first = recipe.for_pretraining()
    assert first is not None
    assert (first.federation.offline, first.federation.cohort, recipe.federation.offline) == (0, 2, 2)
    prepare(first)


def test_random_steps_reach_the_method_and_come_back_from_a_file() -> None:
    recipe = Recipe.parse(RECIPE)
    assert recipe.training.build().work == Steps(steps=5, least=1, batch=16)
    assert "least_steps = 1" in recipe.to_toml()
    for wrong in ({"least_steps": 6}, {"steps": None}, {"steps": None, "epochs": 2}):
        with pytest.raises(BadInput, match="training: least_steps needs steps, and may be at most that"):
            Recipe.parse(changed(training=wrong))


def test_random_epochs_reach_the_method_and_come_back_from_a_file() -> None:
    epochs = {"steps": None, "least_steps": None, "epochs": 5, "least_epochs": 2}
    recipe = Recipe.parse(changed(training=epochs))
    assert recipe.training.build().work == Steps(epochs=5, least=2, batch=16)
    assert "least_epochs = 2" in recipe.to_toml()
    for wrong in ({"least_epochs": 6}, {"epochs": None}, {"epochs": None, "steps": 5}):
        with pytest.raises(BadInput, match="training: least_epochs needs epochs, and may be at most that"):
            Recipe.parse(changed(training=epochs | wrong))


def test_the_accelerated_optimizer_of_a_recipe() -> None:
    given = {"optimizer": "accelerated", "lr": 0.005, "momentum": 0.9, "box": 2.0, "weight_decay": 0.1, "clip": 3.0}
    training = Recipe.parse({"training": given | {"schedule": {"kind": "exponential", "rate": 0.9}}}).training
    assert training.build().optimizer == Accelerated(
        lr=0.005, momentum=0.9, box=2.0, weight_decay=0.1, clip=3.0, schedule=Exponential(rate=0.9)
    )


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"optimizer": "accelerated"}, "accelerated needs momentum"),
        ({"optimizer": "accelerated", "momentum": 0.9, "nesterov": True}, "accelerated needs momentum, such as 0.9"),
        ({"box": 2.0}, "box is for optimizer"),
        ({"optimizer": "adam", "box": 2.0}, "box is for optimizer"),
    ],
)
def test_optimizer_settings_that_do_not_go_together(training: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=f"training: {message}"):
        Recipe.parse({"training": training})


@pytest.mark.system
def test_a_comparison_of_the_paper_s_methods(tmp_path: Path) -> None:
    """FedAvg by SGD, FedProx accelerated, FedBCD-I with offline training: one recipe, with variants."""
    variants = {
        "fedprox-aspg": {
            "method": {"name": "fedprox", "proximal": 5.0},
            "training": {"optimizer": "accelerated", "momentum": 0.9, "box": 2.0},
        },
        "fedbcdi-offline": {"method": {"name": "fedbcdi", "box": "none"}, "federation": {"offline": 2}},
    }
    recipe = changed(
        method={"name": "fedavg"},
        rounds=2,
        federation={"offline": 0},
        compare={"methods": ["fedavg", "fedbcd", *variants], "variants": variants},
    )
    found = api.compare(recipe, out=tmp_path / "all")
    assert {row["method"] for row in found.rows} == {"fedavg", "fedbcd", *variants}
    personal = {row["method"] for row in found.rows if row["model"] == "personal"}
    assert personal == {"fedbcd", "fedbcdi-offline"}
