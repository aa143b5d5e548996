"""Plans: what follows from a probe is checked by hand, and sizes against a run; times only have to be there."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from personafl import BadInput, Recipe, api
from personafl.plan.describe import duration
from personafl.plan.estimate import Estimate, Plan, estimate, make_plan, stored
from personafl.plan.probe import Files, Page, Probe, Rounds, probe, size_of
from tiers import tiered

RECIPE: dict[str, Any] = {
    "rounds": 12,
    "data": {"partition": {"kind": "classes", "clients": 10, "per_client": 3}, "validation": 0.2, "unseen": 2},
    "model": {"name": "mlp", "hidden": [16]},
    "federation": {"cohort": 3},
    "evaluation": {"every": 4},
}
PROBE = Probe(
    seen=100,
    unseen=20,
    scale=2.0,
    load=1.0,
    prepare=0.5,
    imports=0.1,
    first_round=3.0,
    scoring=0.25,
    tuning=0.1,
    tunes=True,
    ending=2.0,
    rounds=Rounds(
        seconds=1.0, clients=50, bytes_up=5000, bytes_down=4000, newcomer=7, state=400.0, keeps=True, held=75
    ),
    files=Files(fixed=1000, clients=600, tuned=300.0, round=90.0, scoring=200),
    page=Page(seconds=0.2, bytes=5000),
    memory=1e6,
)


def test_a_run_is_the_sum_of_its_parts() -> None:
    """3 rounds of 50 of 100 clients: 87.5 took part; 12.5 and the 20 unseen have no model and are fine-tuned.

    Seconds: 3 + 2·1 of rounds, 2 scorings of 0.25·2, 32.5·0.1 of fine-tuning, 2·2 at the end. There is room
    for 50, then 75, then a quarter more states.
    """
    recipe = Recipe.parse({"rounds": 3, "evaluation": {"every": 1}, "engine": {"checkpoint_seconds": 1e6}})
    found = estimate("ditto", recipe, PROBE, 4)
    assert (found.method, found.runs) == ("ditto", 4)
    assert found.seconds == pytest.approx(5 + 1 + 3.25 + 4)
    assert found.bytes_up == 15_000
    assert found.bytes_down == pytest.approx(12_000 + 87.5 * 7)
    assert found.disk == pytest.approx(1000 + 1200 + 270 + 400 + 93.75 * 400 + 32.5 * 300)
    assert found.memory == pytest.approx(1e6 + 12.5 * 400 + 32.5 * 300)


def test_everyone_is_fine_tuned_if_the_recipe_says_so_or_states_have_no_model() -> None:
    everyone = Recipe.parse({"rounds": 3, "finetune": True})
    only_new = Recipe.parse({"rounds": 3})
    modelless = dataclasses.replace(PROBE, rounds=dataclasses.replace(PROBE.rounds, keeps=False))
    untuned = dataclasses.replace(PROBE, tunes=False)
    seconds = [
        estimate("x", recipe, probed, 1).seconds
        for recipe, probed in ((everyone, PROBE), (only_new, modelless), (only_new, PROBE), (everyone, untuned))
    ]
    assert seconds[0] == seconds[1] == pytest.approx(seconds[3] + 12.0)
    assert seconds[2] == pytest.approx(seconds[3] + 3.25)


@given(st.integers(1, 500), st.floats(0.01, 1), st.integers(1, 60), st.integers(1, 70))
def test_there_is_room_for_who_took_part_and_for_what_is_rewritten(
    clients: int, share: float, rounds: int, pace: int
) -> None:
    rows = stored(clients, share, rounds, pace)
    taken = clients * (1 - (1 - share) ** rounds)
    assert taken * (1 - 1e-9) <= rows <= 1.25 * 2 * taken * (1 + 1e-9)


def test_rows_of_states_are_those_of_the_store() -> None:
    assert stored(100, 1.0, 1, 5) == 100  # nothing is saved yet
    assert stored(100, 1.0, 9, 100) == 100  # nor rewritten after a save
    assert stored(100, 1.0, 9, 3) == 200  # all are saved and rewritten
    assert stored(100, 0.5, 2, 1) == 100  # 75 took part, of the first 50 half are rewritten


@pytest.mark.parametrize("method", tiered(["fedavg", "ditto", "finetune", "scaffold"], ["ditto"]))
def test_sizes_and_bytes_are_those_of_the_run(method: str, tmp_path: Path) -> None:
    recipe = Recipe.parse(RECIPE | {"method": {"name": method}, "engine": {"checkpoint_seconds": 1e6}})
    probed = probe(recipe)
    found = estimate(method, recipe, probed, 1)
    result = api.run(recipe, out=tmp_path / "run")
    assert found.bytes_up == pytest.approx(result.rows[0]["bytes_up"], rel=1e-9)
    assert found.bytes_down == pytest.approx(result.rows[0]["bytes_down"], rel=0.02)  # who is new is drawn
    assert found.disk == pytest.approx(size_of(tmp_path / "run") - size_of(tmp_path / "run/report.html"), rel=0.15)
    assert probed.page.bytes == pytest.approx(size_of(tmp_path / "run/report.html"), rel=0.25)
    assert found.seconds > 0
    assert found.memory > 2**27  # torch alone


@pytest.mark.system
def test_a_probe_of_many_clients_takes_some_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("personafl.plan.probe.CLIENTS", 5)
    recipe = Recipe.parse(RECIPE | {"method": {"name": "ditto"}, "federation": {"cohort": 0.5}})
    few = probe(recipe)
    assert (few.seen, few.unseen, few.scale) == (8, 2, 10 / 6)
    monkeypatch.setattr("personafl.plan.probe.CLIENTS", 1000)
    everyone = probe(recipe)
    assert everyone.scale == 1.0
    assert few.rounds.clients == everyone.rounds.clients == 4  # a share is of all clients
    assert few.rounds.bytes_up == everyone.rounds.bytes_up


def plan_of(**changes: float) -> Plan:
    one = Estimate(method="x", runs=2, seconds=1, bytes_up=3, bytes_down=4, disk=5, memory=1e9)
    values = {"seconds": 9.0, "disk": 10.0, "memory": 1e9, "free_disk": 1e9, "machine_memory": 2e9}
    return Plan(estimates=(one,), **(values | changes))


def test_what_is_too_much_is_a_warning() -> None:
    assert plan_of().warnings == []
    assert (plan_of().bytes_up, plan_of().bytes_down) == (6, 8)
    for changes, start in (
        ({"memory": 3e9}, "memory: about 3.0 GB, and this machine has 2.0 GB"),
        ({"free_disk": 9.0}, "disk: about 0.0 GB, and 0.0 GB are free"),
        ({"seconds": 3 * 86400.0}, "time: about 3.0 days"),
    ):
        (warning,) = plan_of(**changes).warnings
        assert warning.startswith(start)
        assert ";" in warning


def test_durations() -> None:
    assert [duration(seconds) for seconds in (3.14, 75, 3700, 86400 * 3)] == [
        "3.1 s",
        "1 min 15 s",
        "1 h 01 min",
        "3.0 days",
    ]


def test_a_plan_has_all_methods_seeds_and_the_pretraining(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("personafl.plan.estimate.ProcessPoolExecutor", lambda count, **_: ThreadPoolExecutor(count))
    recipe = Recipe.parse(RECIPE | {"pretrain": {"rounds": 3}, "compare": {"methods": ["fedavg"], "seeds": [0, 1]}})
    told: list[tuple[int, int]] = []
    found = make_plan(recipe, tmp_path / "not" / "there", lambda done, size: told.append((done, size)))
    assert [(each.method, each.runs) for each in found.estimates] == [("pretrain", 2), ("fedavg", 2)]
    assert told == [(0, 2), (1, 2)]
    assert found.seconds > 2 * sum(each.seconds for each in found.estimates)
    assert not list(tmp_path.iterdir())


@pytest.mark.system
def test_a_probe_has_a_process_of_its_own(tmp_path: Path) -> None:
    recipe = Recipe.parse(RECIPE | {"compare": {"methods": ["fedavg"]}})
    assert make_plan(recipe, tmp_path).estimates[0].memory > 2**27
    with pytest.raises(BadInput, match="cohort: 99 clients"):  # from there
        make_plan(Recipe.parse(RECIPE | {"federation": {"cohort": 99}}), tmp_path)
