"""What validation data pick, by results made up so that numbers can be worked by hand, and by a small comparison."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import personafl
from personafl import api
from personafl.errors import BadInput
from personafl.report.page import write_page
from personafl.report.picking import Picked, pick, picked_in
from personafl.runs.result import Result
from personafl.storage.rundir import COMPARISON_FILE, RunDirectory
from report.cases import SMALL

Called = Callable[..., tuple[int, str, str]]
Copied = Callable[[Path], Path]


def made(
    method: str,
    validation: Sequence[float | None] = (),
    test: Sequence[float] = (),
    seed: int = 0,
    model: str = "global",
) -> tuple[str, Result]:
    """Return the result of a run: accuracies of its seen clients on validation and on test data."""
    scores = {split: list(values) for split, values in (("validation", validation), ("test", test)) if values}
    count = len(next(iter(scores.values())))
    rows = [{"method": method, "seed": seed, "model": model, "clients": "seen", "split": split} for split in scores]
    columns: dict[str, list[Any]] = {"name": list("abcdefgh"[:count]), "clients": ["seen"] * count}
    columns |= {f"{model}_{split}_accuracy": values for split, values in scores.items()}
    return method, Result(Path(method), rows, columns, 0.0)


FEDAVG = made("fedavg", [0.7, 0.7], [0.70, 0.80])  # 70 on validation data, 75 on test data
DITTO = made("ditto", [0.8, 0.9], [0.60, 0.70], model="personal")  # 85 and 65
LOCAL = made("local", [0.5, 0.7], [0.80, 0.90], model="personal")  # 60 and 85


def test_the_pick_is_by_validation_data_and_judged_by_test_data() -> None:
    """Behind by 85 - 65 = 20 points for both clients, so the interval is 0; at random (10 + 20 + 0) / 3."""
    picked = pick([FEDAVG, DITTO, LOCAL])
    one = picked.whole
    assert (one.method, one.model, one.best, one.best_model) == ("ditto", "personal", "local", "personal")
    assert (one.validation, one.test, one.best_test) == pytest.approx((0.85, 0.65, 0.85))
    assert one.behind == pytest.approx(0.2)
    assert picked.at_random == pytest.approx(0.1)
    assert picked.pair is not None
    assert (picked.pair.mean, picked.pair.half) == pytest.approx((20.0, 0.0))
    assert str(picked) == (
        "Picked by validation data: ditto (personal), 85.0 % there and 65.0 % on test data, "
        "20.0 ± 0.0 points (95%) behind: "
        "the best of the 3 methods there, local (personal), has 85.0 %; a method drawn at random is 10.0 behind."
    )
    assert list(picked.lines()) == [("0", "ditto (personal)", "85.0", "65.0", "local (personal)", "85.0", "20.0")]


def test_a_pick_that_is_the_best_is_behind_nobody() -> None:
    picked = pick([FEDAVG, made("ditto", [0.9, 0.9], [0.9, 0.9], model="personal")])
    assert picked.whole.behind == 0
    assert picked.pair is None
    assert str(picked).endswith("90.0 % on test data, where none of the 2 methods is better.")
    assert picked.facts()["behind_half"] is None


def test_of_equals_the_first_is_picked_and_the_others_are_named() -> None:
    """The means are equal though the sums are taken in another order: 0.1 + 0.2 + 0.3 is not 0.3 + 0.2 + 0.1."""
    one = made("one", [0.1, 0.2, 0.3], [0.4, 0.4, 0.4])
    two = made("two", [0.3, 0.2, 0.1], [0.5, 0.5, 0.5])
    for first, second in ((one, two), (two, one)):
        picked = pick([first, second])
        assert (picked.whole.method, picked.whole.level) == (first[0], (second[0],))
        assert f"(level there with {second[0]})" in str(picked)


def test_a_pick_level_with_the_best_on_test_data_is_the_best_itself() -> None:
    picked = pick([made("one", [0.1, 0.1], [0.6, 0.4]), made("two", [0.9, 0.9], [0.4, 0.6])])
    assert (picked.whole.method, picked.whole.best, picked.pair) == ("two", "two", None)


def test_by_single_seeds_others_may_be_picked() -> None:
    """Seed 0 picks one (0.5 there, best 0.7: behind 0.2), seed 1 two (0.8, the best); all: 0.65 against 0.55, two."""
    runs = [
        *(made("one", [0.6, 0.6], [0.5, 0.5]), made("two", [0.5, 0.5], [0.7, 0.7])),
        *(made("one", [0.5, 0.5], [0.4, 0.4], seed=1), made("two", [0.8, 0.8], [0.8, 0.8], seed=1)),
    ]
    picked = pick(runs)
    assert [(p.seed, p.method, p.best) for p in picked.seeds] == [(0, "one", "two"), (1, "two", "two")]
    assert (picked.whole.method, picked.whole.validation) == ("two", pytest.approx(0.65))
    assert str(picked).endswith(
        "By single seeds, of 2: one by 1, two by 1; 10.0 points behind on average, 20.0 at most."
    )
    assert [line[0] for line in picked.lines()] == ["0", "1", "all"]


def test_clients_without_validation_data_do_not_count_there() -> None:
    picked = pick([made("one", [None, 0.6], [0.2, 0.4]), made("two", [0.4, 0.5], [0.2, 0.4])])
    assert (picked.whole.method, picked.whole.validation) == ("one", 0.6)


def test_who_lacks_a_seed_is_left_out_and_named() -> None:
    later = [made("fedavg", [0.7, 0.7], [0.7, 0.7], seed=1), made("local", [0.7, 0.7], [0.6, 0.6], 1, "personal")]
    picked = pick([FEDAVG, DITTO, LOCAL, *later])
    assert (picked.methods, picked.left_out) == (("fedavg", "local"), ("ditto",))
    assert "Not in it, without scores under every seed: ditto." in str(picked)


@pytest.mark.parametrize(
    ("runs", "why"),
    [
        (
            [made("a", test=[0.5]), made("b", test=[0.5])],
            "no scores on validation data; compare with data.val",
        ),
        ([made("a", [0.5]), made("b", [0.5])], "test data were left unread; compare with evaluation.split=test"),
        ([DITTO], "ditto alone has scores under every seed; two methods are needed"),
        ([DITTO, made("fedavg", [0.5], [0.5], seed=1)], "none of ditto, fedavg has scores under every seed"),
        ([], "no scores on validation data"),
    ],
)
def test_where_there_is_nothing_to_pick_one_line_says_why(runs: list[tuple[str, Result]], why: str) -> None:
    assert picked_in(runs) is None
    with pytest.raises(BadInput, match=why):
        pick(runs)


@pytest.fixture
def asked(comparison: Path, copied: Copied) -> Path:
    """A finished comparison of three methods and two seeds, as if it had been begun with --pick."""
    path = copied(comparison)
    recipe = api.recipe_of(path).narrowed(None, None, pick=True)
    RunDirectory(path).replace_recipe(recipe.to_toml(), COMPARISON_FILE)
    return path


def test_terminal_page_json_and_python_say_the_same(asked: Path, called: Called) -> None:
    compared = personafl.load(asked)
    assert isinstance(compared, personafl.Comparison)
    picked = compared.picked()
    assert isinstance(picked, Picked)
    own = {"fedavg": "global", "local": "personal", "ditto": "personal"}
    rows = [row for row in compared.rows if (row["model"], row["clients"]) == (own[row["method"]], "seen")]
    means = {
        on: {m: statistics.mean(r["accuracy"] for r in rows if (r["split"], r["method"]) == (on, m)) for m in own}
        for on in ("validation", "test")
    }
    one = picked.whole
    assert means["validation"][one.method] == pytest.approx(max(means["validation"].values()))
    assert one.test == pytest.approx(means["test"][one.method])
    assert one.behind == pytest.approx(max(means["test"].values()) - one.test)
    assert compared.best().method == one.method
    assert str(picked) in str(compared)
    assert json.loads(called("show", str(asked), "--json")[1])["picked"] == json.loads(json.dumps(picked.facts()))
    assert "Picked by validation data: " in " ".join(called("show", str(asked))[1].split())
    page = write_page([asked]).read_text()
    assert 'id="picked"' in page
    assert "The method that validation data pick" in page


def test_a_comparison_that_was_not_asked_says_nothing_but_can_be_asked_later(comparison: Path, called: Called) -> None:
    assert "Picked" not in str(personafl.load(comparison))
    assert 'id="picked"' not in (comparison / "report.html").read_text()
    assert "picked" not in json.loads(called("show", str(comparison), "--json")[1])
    found = json.loads(called("show", str(comparison), "--json", "--pick")[1])
    assert found["picked"]["methods"] == ["fedavg", "ditto", "local"]
    assert [one["seed"] for one in found["picked"]["seeds"]] == [0, 1]
    code, _, err = called("show", str(comparison / "fedavg-seed0"), "--pick")
    assert code == 2
    assert err.startswith("error: pick: fedavg alone has scores")


def test_python_asks_too(tmp_path: Path) -> None:
    recipe = {**SMALL, "rounds": 1, "evaluation": {"every": 0}}
    found = personafl.compare(recipe, methods=["fedavg", "local"], out=tmp_path / "run", pick=True)
    assert api.recipe_of(found.path).compare.pick
    assert str(found.picked()) in str(found)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--methods fedavg,local", "there are no validation data of clients that take part; set data.validation=0.2"),
        ("--methods ditto data.validation=0.2", "ditto is the only method; give several to pick from"),
        (
            "--methods fedavg,local data.validation=0.2 evaluation.split=validation",
            "what a pick is worth is said by test data; set evaluation.split=test",
        ),
    ],
)
def test_what_cannot_be_picked_is_refused_before_anything_is_written(
    words: str, why: str, tmp_path: Path, called: Called
) -> None:
    code, _, err = called("compare", *words.split(), "--pick", "--out", str(tmp_path / "run"))
    assert (code, err.count("\n")) == (2, 1)
    assert f"compare.pick: {why}" in err
    assert not (tmp_path / "run").exists()
