"""Runs with [secure]: nearly those without it, and what is refused before anything runs."""

from pathlib import Path
from typing import Any

import pytest

from personafl.core import tree
from personafl.errors import BadInput
from personafl.recipe.recipe import Recipe
from personafl.runs.build import prepare
from personafl.simulate.simulator import Simulation
from personafl.storage.store import Store
from personafl.uploads.secure import FixedPointServer

SMALL: dict[str, Any] = {
    "rounds": 2,
    "data": {"normalize": "none", "partition": {"kind": "classes", "clients": 12, "per_client": 4}},
    "model": {"name": "mlp", "hidden": [12], "personal": "output"},
    "training": {"epochs": 1, "batch": 16, "lr": 0.1},
    "federation": {"cohort": 6},
    "method": {"name": "fedalt"},
    "engine": {"threads": 1, "strategy": "stacked"},
    "evaluation": {"every": 0},
    "secure": {},
}


def recipe(**sections: Any) -> Recipe:
    return Recipe.parse({key: value for key, value in {**SMALL, **sections}.items() if value is not None})


def after(given: Recipe, path: Path, rounds: int = 2) -> Simulation:
    simulation = Simulation(prepare(given).federation, Store(path, 2**20))
    for number in range(rounds):
        simulation.step(number)
    return simulation


@pytest.mark.parametrize("weights", ["uniform", "examples"])
def test_a_run_is_that_without_it_but_for_the_grid(tmp_path: Path, weights: str) -> None:
    """Cohorts of 6 with entries up to 1: a mean of changes is 6·W·2^-(s+1)/Σw off at most, here below 10⁻⁷."""
    federation = {"cohort": 6, "weights": weights}
    one = after(recipe(federation=federation), tmp_path / "one", 1)
    other = after(recipe(federation=federation, secure=None), tmp_path / "other", 1)
    differences = [
        float((a.double() - b.double()).abs().max())
        for a, b in zip(tree.leaves(one.server.shared.model), tree.leaves(other.server.shared.model), strict=True)
    ]
    assert 0 < max(differences) < 1e-7


def test_the_grid_is_that_of_cohort_and_weights() -> None:
    server: Any = prepare(recipe(federation={"cohort": 6, "weights": "uniform"})).federation.algorithm.server
    assert isinstance(server, FixedPointServer)
    assert (server.grid.clients, server.grid.weight, server.grid.range) == (6, 1.0, 1.0)
    federation = prepare(recipe(federation={"cohort": 6, "sampling": "bernoulli"}, secure={"range": 2.5})).federation
    server = federation.algorithm.server
    assert (server.grid.clients, server.grid.range) == (12, 2.5)
    assert server.grid.weight == federation.data.train.sizes.max()


@pytest.mark.parametrize(
    ("sections", "match"),
    [
        ({"buffer": {"size": 2}, "federation": {}}, r"with \[buffer\] an upload is discounted"),
        ({"cloud": {"servers": 2}, "federation": {}}, r"with \[cloud\] several servers"),
        ({"privacy": {"noise": 1.0}, "federation": {}}, "privacy.mechanism: .gaussian. noise is a server"),
        ({"uplink": {"form": "low-rank"}}, "which .secure. hides"),
        ({"uplink": {"form": "sparse"}}, "which .secure. hides"),
        ({"secure": {"range": 0}}, "secure.range"),
        ({"secure": {"least": 1}}, "secure.least"),
        ({"secure": {"dropouts": 1.0}}, "secure.dropouts"),
    ],
)
def test_what_needs_single_uploads_is_refused(sections: dict[str, Any], match: str) -> None:
    with pytest.raises(BadInput, match=match):
        recipe(**sections)


@pytest.mark.parametrize(
    ("sections", "match"),
    [
        ({"method": {"name": "scaffold"}}, "secure: what scaffold's clients send"),
        ({"federation": {"cohort": 2}}, "secure.least: no sum of fewer than 3 clients is seen, and 2 take part"),
        ({"secure": {"dropouts": 0.6}}, "secure.dropouts: 6 clients of which 3 may drop out"),
    ],
)
def test_what_cannot_be_summed_is_refused_before_it_runs(sections: dict[str, Any], match: str) -> None:
    with pytest.raises(BadInput, match=match):
        prepare(recipe(**sections))
