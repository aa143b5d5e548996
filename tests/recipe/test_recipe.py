"""Recipes: overrides, round trips, what they build."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from personafl import BadInput, Recipe
from personafl.algorithms import METHODS
from personafl.core.batches import Steps
from personafl.core.optim import Adaptive, Sgd
from personafl.core.schedule import Exponential, Linear
from personafl.recipe.values import apply_overrides, from_words, read_toml
from personafl.uploads.codecs import LowRank, TopEntries, Whole
from personafl.uploads.uplink import CompressedClient, compressed

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("0.5", 0.5),
        ("1e-3", 0.001),
        ("true", True),
        ('"3"', "3"),
        ("[1, 2]", [1, 2]),
        ('["a", "b"]', ["a", "b"]),
        ("{a = 1}", {"a": 1}),
        ("ditto", "ditto"),
        ("data/my file.npz", "data/my file.npz"),
        ("hf:name", "hf:name"),
        ("a=b", "a=b"),
        ("", ""),
    ],
)
def test_override_values_are_toml_or_plain_text(text: str, value: Any) -> None:
    assert apply_overrides({}, [f"one.two.three={text}"]) == {"one": {"two": {"three": value}}}


def test_overrides_leave_the_rest_and_the_original_alone() -> None:
    values = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert apply_overrides(values, ["a.c.d=5", "a.x=6", "e=7", "a.b = 8"]) == {
        "a": {"b": 8, "c": {"d": 5}, "x": 6},
        "e": 7,
    }
    assert values == {"a": {"b": 1, "c": {"d": 2}}, "e": 3}


@pytest.mark.parametrize("text", ["a", "=1", ".a=1", "a.=1", "a..b=1", "e.f=1"])
def test_overrides_that_cannot_be_applied(text: str) -> None:
    with pytest.raises(BadInput, match=r"write key\.sub=value|is a value here"):
        apply_overrides({"e": 3}, [text])


FULL = {
    "name": "mine",
    "seed": 3,
    "rounds": 7,
    "data": {"source": "x.npz", "partition": {"kind": "dirichlet", "alpha": 0.1}, "unseen": 0.25, "test": 0.3},
    "model": {"name": "mlp", "hidden": (3, 4)},
    "training": {"optimizer": "adam", "lr": 1e-3, "steps": 4, "batch": "all", "schedule": {"kind": "step", "every": 2}},
    "federation": {"cohort": 5, "sampling": "bernoulli", "weights": "uniform"},
    "method": {"name": "ditto", "pull": 0.5, "server": {"optimizer": "yogi", "lr": 0.1}},
    "uplink": {"form": "low-rank", "rank": 2, "error_feedback": False},
    "devices": [
        {"name": "phone", "max_samples": 9, "bits": 2, "model": {"name": "mlp", "hidden": (3,)}},
        {"clients": ("7", "x y")},
        {"min_samples": 10, "model": {"buffers": "dropped"}},
    ],
    "evaluation": {"every": 2},
    "engine": {"device": "cpu", "dtype": "float64", "threads": 2},
    "compare": {"methods": ("fedavg", "ditto"), "seeds": (1, 2), "options": {"ditto": {"pull": 2.0}}},
}


@pytest.mark.parametrize("values", [{}, FULL, *({key: value} for key, value in FULL.items())])
def test_a_recipe_written_and_read_is_the_same(tmp_path: Path, values: dict[str, Any]) -> None:
    recipe = Recipe.parse(values)
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    again = Recipe.parse(read_toml(tmp_path / "recipe.toml"))
    assert again == recipe
    assert again.to_toml() == recipe.to_toml()
    for method in recipe.compare.methods:
        assert again.for_method(method, 0).algorithm() == recipe.for_method(method, 0).algorithm()


@given(
    lr=st.floats(1e-300, 1e38),
    rounds=st.integers(1, 10**9),
    cohort=st.one_of(st.integers(1, 10**9), st.floats(0, 1, exclude_min=True)),
    source=st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
)
def test_any_values_survive_the_round_trip(lr: float, rounds: int, cohort: float, source: str) -> None:
    import tomllib

    values = {"rounds": rounds, "training": {"lr": lr}, "federation": {"cohort": cohort}, "data": {"source": source}}
    recipe = Recipe.parse(values)
    again = Recipe.parse(tomllib.loads(recipe.to_toml()))
    assert again == recipe
    assert type(again.federation.cohort) is type(recipe.federation.cohort)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_recipes_that_come_with_the_project(path: Path) -> None:
    recipe = Recipe.parse(read_toml(path), str(path))
    for method in recipe.compare.methods:
        recipe.for_method(method, recipe.compare.seeds[0]).algorithm()


def test_training_builds_what_methods_take() -> None:
    plain = Recipe.parse({}).training.build()
    assert plain.work == Steps(epochs=1, batch=10)
    assert plain.optimizer == Sgd(lr=0.05)
    full = Recipe.parse(FULL).training.build()
    assert full.work == Steps(steps=4, batch=None)
    assert isinstance(full.optimizer, Adaptive)
    decay = Recipe.parse({"training": {"schedule": {"kind": "exponential", "rate": 0.9}, "epochs": 3}}).training.build()
    assert decay.optimizer.schedule == Exponential(rate=0.9)
    assert decay.work.epochs == 3


def test_a_linear_schedule_ends_with_the_run() -> None:
    recipe = Recipe.parse({"rounds": 7, "training": {"schedule": {"kind": "linear"}}})
    assert recipe.training.schedule == Linear(rounds=7)
    given = Recipe.parse({"rounds": 7, "training": {"schedule": {"kind": "linear", "rounds": 9}}})
    assert given.training.schedule == Linear(rounds=9)
    assert Recipe.parse({"training": {"schedule": {"kind": "linear"}}}).training.schedule == Linear(rounds=50)


@pytest.mark.parametrize(("cohort", "size"), [(3, 3), (10, 10), (1.0, 10), (0.5, 5), (0.01, 1), (1, 1)])
def test_cohort_is_a_count_or_a_share(cohort: float, size: int) -> None:
    assert Recipe.parse({"federation": {"cohort": cohort}}).federation.size(10) == size


@pytest.mark.parametrize(("rounds", "every", "expected"), [(50, "auto", 5), (5, "auto", 1), (50, 0, 0), (50, 7, 7)])
def test_how_often_models_are_scored(rounds: int, every: int | str, expected: int) -> None:
    assert Recipe.parse({"rounds": rounds, "evaluation": {"every": every}}).evaluate_every() == expected


def test_options_of_a_method_in_a_comparison() -> None:
    """Options under [method] go to the method they name, those under [compare.options] go before them."""
    recipe = Recipe.parse(
        {"method": {"name": "ditto", "pull": 3.0, "tune_epochs": 9}, "compare": {"options": {"ditto": {"pull": 5.0}}}}
    )
    assert recipe.for_method("ditto", 4).method.model_extra == {"pull": 5.0, "tune_epochs": 9}
    assert recipe.for_method("ditto", 4).seed == 4
    assert recipe.for_method("fedavg", 0).method.model_extra == {}


def test_an_uplink_wraps_the_client_of_the_method_and_nothing_else() -> None:
    plain = Recipe.parse({"method": {"name": "ditto"}})
    assert plain.uplink == Whole()
    small = Recipe.parse({"method": {"name": "ditto"}, "uplink": {"form": "sparse"}})
    client = compressed(small.algorithm(), small.uplink).client
    assert isinstance(client, CompressedClient)
    assert client.rule == plain.algorithm().client
    assert client.codec == TopEntries(keep=0.1, error_feedback=True)
    assert compressed(small.algorithm(), small.uplink).server == plain.algorithm().server
    assert Recipe.parse({"uplink": {"form": "low-rank"}}).uplink == LowRank(rank=4, error_feedback=True)


@pytest.mark.parametrize(
    ("uplink", "message"),
    [
        ({"form": "low-rank", "keep": 0.1}, r"^uplink\.keep: unknown key; valid: error_feedback, form, rank$"),
        ({"form": "sparse", "rank": 4}, r"^uplink\.rank: unknown key; valid: error_feedback, form, keep$"),
        ({"form": "dense", "error_feedback": False}, r"^uplink\.error_feedback: unknown key; valid: form$"),
        ({"keep": 0.1}, r"^uplink: 'form' is missing; valid: dense, low-rank, sparse$"),
        ({"form": "sparce"}, r"^uplink\.form: no 'sparce'; did you mean 'sparse'\?$"),
        ({"form": "sparse", "keep": 0}, r"^uplink\.keep: input should be greater than 0 \(given: 0\)$"),
        ({"form": "sparse", "keep": 10}, r"^uplink\.keep: input should be less than or equal to 1 \(given: 10\)$"),
        ({"form": "low-rank", "rank": 0}, r"^uplink\.rank: input should be greater than or equal to 1 \(given: 0\)$"),
        ("sparse", r"^uplink: is a section, not a value \(given: 'sparse'\); write uplink\.form=…$"),
    ],
)
def test_uplinks_that_cannot_be(uplink: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Recipe.parse({"uplink": uplink})


def test_uplinks_of_variants() -> None:
    """A variant's keys go before the recipe's; where it has another form, the recipe's are not its own."""
    variants = {
        "less": {"method": {"name": "ditto"}, "uplink": {"keep": 0.02}},
        "factors": {"uplink": {"form": "low-rank", "rank": 2}, "method": {"name": "ditto"}},
        "whole": {"uplink": {"form": "dense"}, "method": {"name": "ditto"}},
    }
    sparse = {"form": "sparse", "keep": 0.2, "error_feedback": False}
    recipe = Recipe.parse({"uplink": sparse, "compare": {"methods": ["ditto", *variants], "variants": variants}})
    found = {name: recipe.narrowed(None, None).for_method(name, 0).uplink for name in recipe.compare.methods}
    assert found == {
        "ditto": TopEntries(keep=0.2, error_feedback=False),
        "less": TopEntries(keep=0.02, error_feedback=False),
        "factors": LowRank(rank=2),
        "whole": Whole(),
    }


def test_pretraining_sends_whole_weights() -> None:
    """It is done once for all variants of a comparison, whatever their uplinks."""
    recipe = Recipe.parse({"pretrain": {"rounds": 2}, "uplink": {"form": "sparse"}})
    first = recipe.for_pretraining()
    assert first is not None
    assert first.uplink == Whole()
    assert recipe.started(Path("run")).uplink == TopEntries()


@pytest.mark.parametrize("name", METHODS)
def test_every_method_can_be_named(name: str) -> None:
    assert Recipe.parse({"method": {"name": name}}).algorithm().name == name


def test_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"^my\.toml: rounds: "):
        Recipe.parse({"rounds": 0}, "my.toml")
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(BadInput, match=r"latin\.toml: not valid TOML"):
        read_toml(tmp_path / "latin.toml")


def test_a_name_stands_for_its_section() -> None:
    short = Recipe.parse({"method": "ditto", "model": "mlp", "pretrain": {"method": "fedprox"}})
    whole = {"method": {"name": "ditto"}, "model": {"name": "mlp"}, "pretrain": {"method": {"name": "fedprox"}}}
    assert short == Recipe.parse(whole)
    words = from_words(["method=ditto", "method.pull=0.5"], {})
    assert Recipe.parse(*words).method.options == {"pull": 0.5}
