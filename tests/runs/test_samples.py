"""Runs with [sample_privacy]: what each client spends, when it stops, and what is refused before anything runs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import personafl
from personafl import api
from personafl.errors import BadInput
from personafl.privacy.accounting import compose, noise_for_all
from personafl.recipe.recipe import Recipe
from personafl.report.table import legend, lines, titles
from personafl.runs.build import prepare
from personafl.runs.samples import ledger
from personafl.simulate.protection import ALWAYS
from personafl.simulate.simulator import Simulation
from personafl.storage.files import read_json
from personafl.storage.store import Store

pytest.importorskip("dp_accounting", reason="differential privacy is accounted for by dp-accounting")

SMALL: dict[str, Any] = {
    "rounds": 3,
    "data": {"normalize": "none", "partition": {"kind": "dirichlet", "clients": 6, "alpha": 0.5}},
    "model": {"name": "mlp", "hidden": [8], "personal": "output"},
    "training": {"epochs": 1, "batch": 64, "lr": 0.1},
    "method": {"name": "ditto"},
    "engine": {"threads": 1, "strategy": "stacked"},
    "evaluation": {"every": 0},
    "sample_privacy": {"noise": 2.0, "sampling": "epochs"},
}


def recipe(**sections: Any) -> Recipe:
    values = {**SMALL, **{k: {**SMALL.get(k, {}), **v} if isinstance(v, dict) else v for k, v in sections.items()}}
    return Recipe.parse({key: value for key, value in values.items() if value is not None})


def test_a_shuffled_epoch_costs_one_look_and_poisson_samples_are_amplified() -> None:
    """Ditto has two phases: in 3 rounds of an epoch each a sample is looked at 6 times, in however many steps."""
    job = prepare(recipe())
    spent = ledger(job.recipe, job.federation, 3)
    assert spent is not None
    np.testing.assert_allclose(spent.epsilon, compose([(2.0, 1.0, 6)], 1e-5), rtol=1e-12)
    job = prepare(recipe(sample_privacy={"sampling": "poisson"}))
    spent, sizes = ledger(job.recipe, job.federation, 2), job.federation.data.train.sizes
    assert spent is not None
    client = int(np.argmax(sizes))
    steps = 2 * 2 * -(-int(sizes[client]) // 64)
    assert spent.epsilon[client] == compose([(2.0, 64 / sizes[client], steps)], 1e-5)
    assert len(set(spent.epsilon.tolist())) > 1  # each client has its own


def test_only_what_is_sent_can_be_covered() -> None:
    """Then Ditto's own models are trained as they are, and Local costs nothing."""
    job = prepare(recipe(sample_privacy={"personal": False}))
    spent = ledger(job.recipe, job.federation, 3)
    assert spent is not None
    np.testing.assert_allclose(spent.epsilon, compose([(2.0, 1.0, 3)], 1e-5), rtol=1e-12)
    assert job.federation.protection is not None
    assert job.federation.protection.open == {"personal", "tune"}
    job = prepare(recipe(sample_privacy={"personal": False}, method={"name": "local"}))
    assert ledger(job.recipe, job.federation, 3).epsilon.tolist() == [0.0] * 6  # type: ignore[union-attr]


def test_noise_for_a_budget_is_each_clients_own() -> None:
    given = recipe(sample_privacy={"noise": None, "epsilon": 4.0, "sampling": "epochs"}, method={"name": "finetune"})
    job = prepare(given)
    spent = ledger(job.recipe, job.federation, 3)
    assert spent is not None
    assert 0.998 * 4 <= spent.epsilon.min() <= spent.epsilon.max() <= 4
    # 3 epochs, and 5 of fine-tuning, without which nobody has a model of its own
    assert spent.noise[0] == noise_for_all(4.0, 1e-5, ((1.0, 8),))


def test_noise_of_several_rates_keeps_to_its_budget() -> None:
    steps = ((0.05, 300), (0.2, 40))
    noise = noise_for_all(3.0, 1e-5, steps)
    assert 0.998 * 3 <= compose([(noise, *each) for each in steps], 1e-5) <= 3


def test_who_has_spent_its_budget_trains_no_more(tmp_path: Path) -> None:
    """With noise 2 two rounds of Ditto come to 4.4 and three to 5.5: with a budget of 5 models stay as after two."""
    job = prepare(recipe(sample_privacy={"noise": 2.0, "epsilon": 5.0}))
    protection = job.federation.protection
    assert protection is not None
    assert protection.until.tolist() == [2] * 6
    simulation = Simulation(job.federation, Store(tmp_path, 2**20))
    states = []
    for number in range(3):
        simulation.step(number)
        states.append((simulation.store.take(np.arange(6)), simulation.server.model))
    assert all(leaf.equal(states[2][0][path]) for path, leaf in states[1][0].items())
    assert all(leaf.equal(states[2][1][name]) for name, leaf in states[1][1].items())
    assert not any(leaf.equal(states[1][1][name]) for name, leaf in states[0][1].items())
    spent = ledger(job.recipe, job.federation, 3)
    assert spent is not None
    assert spent.epsilon.max() == compose([(2.0, 1.0, 4)], 1e-5) <= 5
    enough = prepare(recipe(sample_privacy={"noise": 2.0, "epsilon": 7.0})).federation.protection
    assert enough is not None
    assert (enough.until == ALWAYS).all()


def test_a_cohort_of_some_is_counted_by_who_came() -> None:
    job = prepare(recipe(federation={"cohort": 2}, rounds=4))
    spent = ledger(job.recipe, job.federation, 4)
    assert spent is not None
    costs = {0: compose([(2.0, 1.0, 5)], 1e-5)}  # nobody's: it fine-tunes 5 epochs, as a newcomer
    costs |= {rounds: compose([(2.0, 1.0, 2 * rounds)], 1e-5) for rounds in range(1, 5)}
    assert set(spent.epsilon.tolist()) <= set(costs.values())
    assert len(set(spent.epsilon.tolist())) > 1


def test_a_run_tells_what_was_spent_and_a_stopped_one_repeats(tmp_path: Path) -> None:
    given = recipe(sample_privacy={"sampling": "poisson"}, rounds=2, training={"batch": 256}, method={"name": "mrmtl"})
    result = api.run(given, out=tmp_path / "whole")
    spent = result.clients["sample_epsilon"]
    assert (spent > 0).all()
    assert {row["sample_epsilon"] for row in result.rows} == {spent.max()}
    rows = [row for row in result.rows if row["split"] == "test"]
    assert "sample\nε" in titles(rows)
    assert f"{spent.max():.2f}"[:3] in " ".join(next(iter(lines(rows))).cells)
    assert any(word == "sample ε" for word, _ in legend(rows))
    with pytest.raises(KeyboardInterrupt):
        api.run(given, out=tmp_path / "cut", callback=_stop)
    api.resume(tmp_path / "cut")
    whole, cut = (read_json(tmp_path / name / "result.json")["clients"] for name in ("whole", "cut"))
    assert whole == cut
    exported = personafl.load(tmp_path / "whole").export(tmp_path / "out")
    card = next(path for path in Path(exported).rglob("*.md")) if isinstance(exported, str | Path) else None
    text = (card or next((tmp_path / "out").rglob("*.md"))).read_text()
    assert "Privacy of samples" in text


def _stop(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"method": {"name": "fedrod"}}, "sample_privacy: fedrod looks at samples otherwise"),
        ({"method": {"name": "pfedme"}}, "pfedme"),
        (
            {"data": {"normalize": "auto"}},
            "data.normalize: 'auto' adds up .* which \\[sample_privacy\\] does not cover",
        ),
        ({"buffer": {"size": 2}}, r"remove \[buffer\]"),
        ({"cloud": {"servers": 2}}, r"remove \[cloud\]"),
        ({"federation": {"offline": 1}, "method": {"name": "fedbcdi"}}, "federation.offline"),
        ({"pretrain": {"rounds": 1}}, "pretrain.rounds"),
        ({"training": {"class_weights": "balanced"}}, "training.class_weights"),
        ({"sample_privacy": {"noise": None}}, "give sample_privacy.noise, such as 1.0, or sample_privacy.epsilon"),
        ({"sample_privacy": {"clip": 0.0}}, "sample_privacy.clip"),
        ({"sample_privacy": {"sampling": "shuffle"}}, "sample_privacy.sampling"),
    ],
)
def test_what_would_break_it_is_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        prepare(recipe(**changed))


def test_networks_that_mix_samples_are_refused_by_name() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    given = recipe(model={"name": "auto", "hidden": None, "personal": None, "buffers": "dropped"}).model_dump(
        mode="json", exclude_none=True
    )
    given["model"] = {"buffers": "dropped"}
    with pytest.raises(BadInput, match="mixes the samples of a batch"):
        personafl.run(given, model=module)
