"""Runs with [privacy] and [secure]: what they spend, that they stop and resume, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from personafl import api
from personafl.errors import BadInput
from personafl.privacy.mechanisms import Accounted
from personafl.recipe.recipe import Recipe
from personafl.runs.build import prepare
from personafl.storage.files import read_json
from personafl.uploads.distributed import SharedNoiseServer

pytest.importorskip("dp_accounting", reason="differential privacy is accounted for by dp-accounting")

SMALL: dict[str, Any] = {
    "rounds": 3,
    "data": {"normalize": "none", "partition": {"kind": "classes", "clients": 12, "per_client": 4}},
    "model": {"name": "linear"},
    "training": {"steps": 2, "batch": 16, "lr": 0.1},
    "federation": {"cohort": 6},
    "method": {"name": "fedavg"},
    "engine": {"threads": 1, "strategy": "stacked"},
    "evaluation": {"every": 0},
    "privacy": {"clip": 0.5, "noise": 2.0, "mechanism": "distributed"},
    "secure": {},
}
DEPLOY = {"input_shape": [1, 8, 8], "classes": 10}


def recipe(**sections: Any) -> Recipe:
    values = {**SMALL, **{k: {**SMALL.get(k, {}), **v} if isinstance(v, dict) else v for k, v in sections.items()}}
    return Recipe.parse({key: value for key, value in values.items() if value is not None})


def spent(rounds: int, noise: float = 2.0, delta: float = 1e-5) -> float:
    return Accounted(mechanism="distributed", delta=delta).epsilon(noise, [rounds])


def rows(path: Path) -> list[dict[str, Any]]:
    found = read_json(path / "result.json")["rows"]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in found]


def test_the_least_honest_survivors_have_all_the_noise() -> None:
    """Of 6 one may be lost (0.3 of 6) and none is corrupt (0.1 of 6); of 20 six and two."""
    server = prepare(recipe()).federation.algorithm.server
    assert isinstance(server, SharedNoiseServer)
    assert (server.clients, server.honest, server.noise, server.clip) == (6, 5, 2.0, 0.5)
    section = recipe(secure={"dropouts": 0.3, "corrupt": 0.1}).secure
    assert section is not None
    assert section.honest(20) == 12


@pytest.mark.system
def test_a_run_says_what_it_spent_and_resumes_to_the_same(tmp_path: Path) -> None:
    given = recipe()
    api.run(given, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        api.run(given, out=tmp_path / "cut", callback=_stop)
    api.resume(tmp_path / "cut")
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")
    assert {(row["epsilon"], row["delta"]) for row in rows(tmp_path / "whole")} == {(spent(3), 1e-5)}
    assert all("devices that [secure] allows" in row["assumption"] for row in rows(tmp_path / "whole"))
    lines = [json.loads(line) for line in (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()]
    charges = [line["privacy"] for line in lines if line["event"] == "round"]
    facts = {"mechanism": "distributed", "noise": 2.0, "rate": 1.0, "clip": 0.5, "attempt": 0}
    assert charges == [facts] * 3


def _stop(progress: Any) -> None:
    raise KeyboardInterrupt


def test_a_run_stops_at_its_budget(tmp_path: Path) -> None:
    """Noise 2 spends 2.4 in one round and 3.6 in two, of 3."""
    assert spent(1) < 3 < spent(2)
    api.run(recipe(privacy={"epsilon": 3.0}), out=tmp_path / "run")
    assert {row["epsilon"] for row in rows(tmp_path / "run")} == {spent(1)}


def test_the_noise_is_computed_for_a_budget() -> None:
    server: Any = prepare(recipe(privacy={"noise": None, "epsilon": 4.0})).federation.algorithm.server
    assert 3.9 < spent(3, server.noise) <= 4.0


@pytest.mark.parametrize(
    ("sections", "match"),
    [
        *(
            ({"privacy": {"mechanism": name}}, f'^privacy.mechanism: "{name}" noise is a server')
            for name in ("gaussian", "discrete", "tree", "banded")
        ),
        ({"secure": None}, r"^privacy.mechanism: .* add \[secure\]"),
        ({"privacy": {"clip": {"start": 0.1}}}, "privacy.clip: devices clip their updates themselves"),
        ({"federation": {"sampling": "bernoulli"}}, "^federation.sampling: .* who takes part is seen"),
        ({"federation": {"sampling": "cyclic"}}, "^federation.sampling: .* who takes part is seen"),
        ({"federation": {"weights": "examples"}}, "^federation.weights: "),
        (
            {"deploy": DEPLOY, "privacy": {"noise": None, "epsilon": 2.0}},
            "^privacy.noise: devices draw it, .* --mechanism distributed --epsilon 2 --delta 1e-05 --rounds 3$",
        ),
        ({"deploy": DEPLOY, "federation": {"cohort": 0.5}}, "^federation.cohort: "),
    ],
)
def test_what_does_not_go_together_is_refused(sections: dict[str, Any], match: str) -> None:
    with pytest.raises(BadInput, match=match):
        recipe(**sections)


def test_a_noise_that_wraps_is_refused_before_anything_runs() -> None:
    with pytest.raises(BadInput, match=r"^privacy\.noise: a sum of 6 clients with noise 900000 would wrap"):
        prepare(recipe(privacy={"noise": 9e5}))
