"""Runs with [privacy]: what is private, what it spends, and what is refused before anything runs."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from personafl import api
from personafl.core import tree
from personafl.errors import BadInput
from personafl.privacy.accounting import epsilon
from personafl.recipe.recipe import Recipe
from personafl.report.table import legend, lines, titles
from personafl.runs.build import prepare
from personafl.simulate.simulator import Simulation
from personafl.storage.files import read_json
from personafl.storage.store import Store
from personafl.uploads.private import PrivateServer

pytest.importorskip("dp_accounting", reason="differential privacy is accounted for by dp-accounting")

SMALL: dict[str, Any] = {
    "rounds": 3,
    "data": {"normalize": "none", "partition": {"kind": "classes", "clients": 12, "per_client": 4}},
    "model": {"name": "mlp", "hidden": [12], "personal": "output"},
    "training": {"epochs": 1, "batch": 16, "lr": 0.1},
    "federation": {"cohort": 6, "sampling": "bernoulli"},
    "method": {"name": "fedalt"},
    "engine": {"threads": 1, "strategy": "stacked"},
    "evaluation": {"every": 0},
    "privacy": {"noise": 0.5},
}


DEPLOY = {"input_shape": [1, 8, 8], "classes": 10}


def recipe(**sections: Any) -> Recipe:
    values = {**SMALL, **{k: {**SMALL.get(k, {}), **v} if isinstance(v, dict) else v for k, v in sections.items()}}
    return Recipe.parse({key: value for key, value in values.items() if value is not None})


def found(path: Path) -> dict[str, Any]:
    result = read_json(path / "result.json")
    rows = [{key: value for key, value in row.items() if key != "seconds"} for row in result["rows"]]
    return {"rows": rows, "clients": result["clients"]}


def test_what_a_client_keeps_has_no_noise(tmp_path: Path) -> None:
    """After the first round, which all begin alike, states are to the bit those of a run without privacy."""
    states = []
    for privacy in ({"clip": 1e-3, "noise": 5.0}, None):
        job = prepare(recipe(privacy=privacy, federation={"cohort": 6, "sampling": "bernoulli", "weights": "uniform"}))
        simulation = Simulation(job.federation, Store(tmp_path / str(privacy is None), 2**20))
        simulation.step(0)
        chosen = job.federation.data.seen[simulation.store.has(job.federation.data.seen)]
        states.append((chosen.tolist(), simulation.store.take(chosen), simulation.server))
    assert states[0][0] == states[1][0]
    assert len(states[0][0])
    assert all(leaf.equal(states[1][1][path]) for path, leaf in states[0][1].items())
    private, plain = (tree.leaves(state[2]) for state in states)
    assert not all(one.equal(other) for one, other in zip(private, plain, strict=False))


def test_a_cohort_of_nobody_takes_a_step_of_noise(tmp_path: Path) -> None:
    job = prepare(recipe(federation={"cohort": 1, "sampling": "bernoulli"}, privacy={"clip": 1.0, "noise": 1.0}))
    simulation, empty = Simulation(job.federation, Store(tmp_path, 2**20)), 0
    for number in range(12):
        before = simulation.server.own.shared.model
        done = simulation.step(number)
        empty += not done.clients
        after = simulation.server.own.shared.model
        assert not any(leaf.equal(after[name]) for name, leaf in before.items())
    assert 0 < empty < 12


@pytest.mark.parametrize(
    "mechanism", ["gaussian", "discrete", "tree", "banded", "gaussian-adaptive", "discrete-adaptive"]
)
def test_a_run_that_was_stopped_draws_the_same_noise(mechanism: str, tmp_path: Path) -> None:
    mechanism, _, adaptive = mechanism.partition("-")
    clip: Any = {"start": 0.1, "noise": 0.3} if adaptive else 0.5
    correlated = mechanism in ("tree", "banded")
    sampling = {"cohort": 2, "sampling": "cyclic"} if correlated else {}
    given = recipe(privacy={"clip": clip, "noise": 0.5, "mechanism": mechanism}, federation=sampling)
    api.run(given, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        api.run(given, out=tmp_path / "cut", callback=_stop)
    api.resume(tmp_path / "cut")
    assert found(tmp_path / "cut") == found(tmp_path / "whole")
    told = [json.loads(line) for line in (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()]
    clips = [entry["told"]["clip"] for entry in told if entry["event"] == "round"]
    assert len(clips) == 3
    charges = [entry["privacy"] for entry in told if entry["event"] == "round"]
    apart, rate = ({"apart": 6}, 1.0) if correlated else ({}, 0.5)
    facts = {"mechanism": mechanism, "noise": 0.5, "rate": rate, **apart, "attempt": 0}
    start = clip if clip == 0.5 else clip["start"]
    assert charges == [{**facts, "clip": before} for before in [start, *clips[:2]]]
    assert (len(set(clips)) == 1) == (clip == 0.5)


def _stop(progress: Any) -> None:
    raise KeyboardInterrupt


def test_workers_give_the_same_bits(tmp_path: Path) -> None:
    alone, two = (recipe(engine={"threads": 1, "strategy": "sequential", "workers": n}) for n in (1, 2))
    api.run(alone, out=tmp_path / "alone")
    api.run(two, out=tmp_path / "two")
    assert found(tmp_path / "alone") == found(tmp_path / "two")


def test_what_is_spent_is_in_the_table_and_the_budget_holds(tmp_path: Path) -> None:
    """The noise is computed for the budget, so nearly all of it is spent; local training sends nothing."""
    given = recipe(privacy={"clip": 0.5, "noise": None, "epsilon": 6.0, "delta": 1e-3})
    compared = api.compare(given, methods=["fedavg", "local"], out=tmp_path / "compared")
    rows = [row for result in compared.results for row in result.rows]
    spent = {row["method"]: row["epsilon"] for row in rows}
    assert spent["local"] == 0
    assert 5.9 < spent["fedavg"] <= 6.0
    assert {row["delta"] for row in rows} == {1e-3}
    test = [row for row in rows if row["split"] == "test"]
    assert "ε" in titles(test)
    at = titles(test).index("ε")
    assert {line.cells[0]: line.cells[at] for line in lines(test)} == {
        "fedavg": f"{spent['fedavg']:.2f}",
        "local": "0.00",
    }
    assert any(name == "ε" and "0.001" in words and "Poisson" in words for name, words in legend(test))


def test_sampling_by_coins_spends_less() -> None:
    server = {}
    for sampling in ("exact", "bernoulli"):
        given = recipe(
            federation={"cohort": 2, "sampling": sampling}, privacy={"clip": 1.0, "noise": None, "epsilon": 4.0}
        )
        rule = prepare(given).federation.algorithm.server
        assert isinstance(rule, PrivateServer)
        server[sampling] = rule
    assert server["bernoulli"].noise < server["exact"].noise
    assert server["exact"].cohort == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"privacy": {"noise": None}}, "give privacy.noise, such as 1.0, or privacy.epsilon"),
        ({"privacy": {"clip": 0.0}}, "privacy.clip"),
        ({"privacy": {"clip": {"begin": 1.0}}}, "privacy.clip"),
        ({"privacy": {"noise": -1.0}}, "privacy.noise"),
        ({"privacy": {"delta": 1.0}}, "privacy.delta"),
        ({"privacy": {"noise": 0.5, "epsilon": 0.1}}, "privacy.epsilon: one round with noise 0.5 spends more"),
        ({"privacy": {"noise": 1.3}}, "privacy.clip.noise"),  # too little of it for a cohort of 6
        ({"federation": {"weights": "examples"}}, 'set it to "uniform"'),
        ({"data": {"normalize": "auto"}}, "data.normalize: 'auto' adds up what clients have"),
        ({"method": {"name": "scaffold"}}, "privacy: what scaffold's clients send"),
        ({"method": {"name": "fedslr"}}, "privacy: what fedslr's clients send"),
        ({"pretrain": {"rounds": 1}}, "pretrain.rounds"),
        ({"buffer": {"size": 2}, "federation": {"cohort": 1.0, "sampling": "exact"}}, "remove [buffer]"),
        ({"privacy": {"mechanism": "tree", "clip": 1.0}}, 'set federation.sampling="cyclic"'),
        ({"privacy": {"mechanism": "banded"}, "federation": {"sampling": "cyclic"}}, "privacy.clip: banded noise"),
        (
            {"privacy": {"mechanism": "tree", "clip": 1.0}, "federation": {"sampling": "cyclic", "apart": 3}},
            "federation.apart: 12 clients in cohorts of 6 come back after 2 rounds; set it to 2",
        ),
        ({"privacy": {"mechanism": "exact"}}, "privacy.mechanism"),
        ({"federation": {"apart": 3}}, 'set federation.sampling="cyclic"'),
        ({"federation": {"apart": 4, "sampling": "cyclic"}}, "federation.apart: 12 clients in cohorts of 6"),
        ({"deploy": DEPLOY}, "federation.sampling: devices come when they can"),
        ({"deploy": DEPLOY, "federation": {"sampling": "exact", "cohort": 0.5}}, "federation.cohort: with [privacy]"),
        ({"deploy": DEPLOY, "federation": {"sampling": "cyclic", "cohort": 2}}, "federation.apart: say after"),
    ],
    ids=lambda given: str(given)[:40],
)
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput) as error:
        prepare(recipe(**changes))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_uploads_count_alike_where_a_recipe_does_not_say() -> None:
    assert recipe().federation.weights == "uniform"
    assert recipe(privacy=None).federation.weights == "examples"


def test_a_run_stops_at_its_budget(tmp_path: Path) -> None:
    """Of 6 rounds as many are done as keep to it, and more rounds later are not; one more would have been over it."""
    given = recipe(rounds=6, privacy={"clip": 0.5, "noise": 2.0, "epsilon": 3.0}, federation={"sampling": "exact"})
    result = api.run(given, out=tmp_path / "run")
    afford = next(rounds for rounds in range(1, 7) if epsilon(2.0, rounds + 1, 1e-5) > 3.0)
    assert 1 < afford < 6
    assert {row["epsilon"] for row in result.rows} == {epsilon(2.0, afford, 1e-5)}
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(entry["event"] == "round" for entry in lines) == afford
    warned = [entry["text"] for entry in lines if entry["event"] == "warning" and entry["kind"] == "privacy"]
    assert warned == [f"the budget is spent after round {afford} of 6"]
    before = (tmp_path / "run" / "global.safetensors").read_bytes()
    longer = api.resume(tmp_path / "run", changes={"rounds": 9})
    assert (tmp_path / "run" / "global.safetensors").read_bytes() == before
    assert {row["epsilon"] for row in longer.rows} == {row["epsilon"] for row in result.rows}


def test_a_run_whose_noise_was_computed_gets_no_more_rounds(tmp_path: Path) -> None:
    """For then it would be said that its first rounds had more noise than they had."""
    api.run(recipe(privacy={"noise": None, "epsilon": 50.0, "clip": 0.5}), out=tmp_path / "run")
    with pytest.raises(BadInput, match="its noise was computed for 3 rounds"):
        api.resume(tmp_path / "run", changes={"rounds": 4})


def test_whole_numbers_are_close_to_real_ones(tmp_path: Path) -> None:
    """With next to no noise, a run of the discrete mechanism is one of the Gaussian, up to its grid of clip/2²⁴."""
    models = []
    for mechanism in ("gaussian", "discrete"):
        job = prepare(recipe(privacy={"clip": 0.5, "noise": 1e-3, "mechanism": mechanism}))
        rule = dataclasses.replace(job.federation.algorithm.server, noise=1e-7)
        algorithm = dataclasses.replace(job.federation.algorithm, server=rule)
        simulation = Simulation(
            dataclasses.replace(job.federation, algorithm=algorithm), Store(tmp_path / mechanism, 2**20)
        )
        simulation.step(0)
        models.append(tree.flatten(simulation.server.own))
    assert all(leaf.dtype == models[1][name].dtype for name, leaf in models[0].items())
    assert any(not leaf.equal(models[1][name]) for name, leaf in models[0].items())
    for name, leaf in models[0].items():
        torch.testing.assert_close(leaf, models[1][name], rtol=0, atol=1e-6)
