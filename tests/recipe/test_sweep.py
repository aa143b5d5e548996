"""What a sweep may try: keys, lists, ranges; and what is refused before any work."""

from typing import Any

import pytest

from personafl import BadInput, Recipe
from personafl.recipe.sweep import Choices, Range, SweepSection, space


def test_keys_are_lists_or_ranges_with_or_without_sections() -> None:
    section = SweepSection(
        keys={
            "training.lr": {"low": 0.01, "high": 1.0, "log": True},
            "method": {"pull": [0.1, 1], "tune": {"epochs": {"low": 1, "high": 4}}},
            "model": {"hidden": [[8], [8, 8]]},
        }
    )
    assert space(section) == [
        Range(key="training.lr", low=0.01, high=1.0, log=True),
        Choices(key="method.pull", values=(0.1, 1)),
        Range(key="method.tune.epochs", low=1, high=4),
        Choices(key="model.hidden", values=([8], [8, 8])),
    ]
    assert [part.whole for part in space(section) if isinstance(part, Range)] == [False, True]
    assert space(section)[-1].labels == ["[8]", "[8, 8]"]  # type: ignore[union-attr]


def test_a_grid_has_as_many_trials_as_combinations() -> None:
    keys = {"training": {"lr": [0.1, 0.2, 0.3], "momentum": [0.0, 0.9]}}
    assert SweepSection(keys=keys, sampler="grid").size == 6
    assert SweepSection(keys=keys).size == 20
    assert SweepSection(keys=keys, trials=3).size == 3


@pytest.mark.parametrize(
    ("sweep", "texts"),
    [
        ({}, ["sweep.keys"]),
        ({"keys": {}}, ["sweep.keys", "names no key"]),
        ({"keys": {"training.lr": 0.1}}, ["sweep.keys.training.lr", "a list of values", "0.1"]),
        ({"keys": {"training.lr": []}}, ["sweep.keys.training.lr", "empty"]),
        ({"keys": {"training.lr": [1, 1]}}, ["sweep.keys.training.lr", "1 is there twice"]),
        ({"keys": {"training.lr": {"low": 1}}}, ["sweep.keys.training.lr", "numbers low and high"]),
        ({"keys": {"training.lr": {"low": 1, "high": float("inf")}}}, ["a finite number"]),
        ({"keys": {"training.lr": {"low": 2, "high": 1}}}, ["low must be below high"]),
        ({"keys": {"training.lr": {"low": 0, "high": 1, "log": True}}}, ["low must be above 0"]),
        ({"keys": {"training.lr": {"low": 1, "high": 2, "log": 3}}}, ["training.lr.log", "true or false"]),
        ({"keys": {"training.lr": {"low": 1, "high": 2, "step": 3}}}, ["training.lr.step", "unknown key"]),
        ({"keys": {"data.validation": [0.1]}}, ["sweep.keys.data.validation", "same in all trials"]),
        ({"keys": {"rounds": [1, 2]}}, ["sweep.keys.rounds", "same in all trials"]),
        ({"keys": {"seed": [1, 2]}}, ["sweep.keys.seed", "same in all trials"]),
        ({"keys": {"training.lr": {"low": 1, "high": 2}}, "sampler": "grid"}, ["training.lr", "a grid has no ranges"]),
        ({"keys": {"training.lr": [1, 2]}, "sampler": "grid", "trials": 3}, ["sweep.trials", "all its 2"]),
        ({"keys": {"training.lr": [1, 2]}, "sampler": "tpee"}, ["sweep.sampler", "tpee"]),
        ({"keys": {"training.lr": [1, 2]}, "seeds": [1, 1]}, ["sweep.seeds", "each once"]),
        ({"keys": {"training.lr": [1, 2]}, "trails": 3}, ["sweep.trails", "did you mean 'trials'"]),
    ],
)
def test_what_cannot_be_tried_is_named(sweep: dict[str, Any], texts: list[str]) -> None:
    with pytest.raises(BadInput) as caught:
        Recipe.parse({"sweep": sweep})
    assert all(text in str(caught.value) for text in texts), caught.value


def test_a_recipe_with_a_sweep_is_written_and_read_again() -> None:
    import tomllib

    recipe = Recipe.parse({"sweep": {"keys": {"training": {"lr": {"low": 0.1, "high": 1.0}}}}})
    assert Recipe.parse(tomllib.loads(recipe.to_toml())) == recipe
    assert recipe.for_method("ditto", 0).sweep is None
