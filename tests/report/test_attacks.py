"""The section on hostile clients: its numbers are those of rows and rounds, and only runs that have some have it."""

from pathlib import Path
from typing import Any

import pytest

import personafl
from personafl.report.attacks import attack_figures
from personafl.report.load import Run, load
from personafl.report.page import page_of
from personafl.runs.result import Result
from report.cases import SMALL
from report.test_page import Tables


def row(model: str, accuracy: float, **more: Any) -> dict[str, Any]:
    named = {"method": "ditto", "seed": 0, "model": model, "clients": "seen", "split": "test"}
    return {**named, "accuracy": accuracy, "worst_decile": accuracy - 0.1, **more}


def run(seed: int, rows: list[dict[str, Any]], told: list[dict[str, float]], **recipe: Any) -> Run:
    """Return a finished run; each round took a second."""
    round_ = {"event": "round", "seconds": 1.0, "bytes_up": 1, "bytes_down": 1}
    return Run(
        path=Path(f"run-{seed}"),
        label="ditto",
        seed=seed,
        recipe={"rounds": len(told), **recipe},
        environment={},
        split={},
        metrics=tuple({**round_, "number": number, "told": each} for number, each in enumerate(told)),
        result=Result(Path(f"run-{seed}"), rows, {"client": []}, 1.0),
    )


def test_the_table_has_accuracy_success_and_what_was_clipped() -> None:
    """Two seeds: 0.8 and 0.9 are 85 ± 7.07; 10, 0, 20 and 0 % of uploads are 7.5 %, in 1 of 2 rounds each."""
    attack = {"kind": "backdoor", "share": 0.25, "strength": 5.0}
    rounds = [[(0.1, 1.0), (0.0, 0.0)], [(0.2, 0.0), (0.0, 0.0)]]
    runs = [
        run(
            seed,
            [row("global", 0.8 + 0.1 * seed, backdoor=0.5), row("personal", 0.95, backdoor=0.1)],
            [{"clip": 1.0, "clipped": clipped, "left_out": lost} for clipped, lost in told],
            attack=attack,
        )
        for seed, told in enumerate(rounds)
    ]
    table, chart = attack_figures(runs)
    (head, line) = Tables(table.views[0].picture).tables[0]
    found = dict(zip((title.replace("\n", " ") for title in head), line, strict=True))
    assert found == {
        "method": "ditto",
        "attack": "backdoor, 5",
        "hostile": "25%",
        "global": "85.0 ± 7.1",
        "personal": "95.0 ± 0.0",
        "worst 10%": "85.0 ± 0.0",
        "backdoor, global": "50.0 ± 0.0",
        "backdoor, personal": "10.0 ± 0.0",
        "clipped": "7.5",
        "rounds clipped": "1 of 2",
        "left out": "0.5",
    }
    assert [view.chosen["told"] for view in chart.views] == ["clipped", "clip", "left_out"]
    assert "ditto: 7.5 on average" in chart.views[0].picture


def test_lines_are_by_attack_and_share_and_without_one_there_is_no_section() -> None:
    plain = run(0, [row("global", 0.9)], [{}])
    assert attack_figures([plain]) == []
    several = [run(0, [row("global", 0.5)], [{}], attack={"kind": "ipm", "share": share}) for share in (0.1, 0.3)]
    (table,) = attack_figures([plain, *several])
    lines = Tables(table.views[0].picture).tables[0][1:]
    assert [line[1:4] for line in lines] == [["none", "–", "90.0"], ["ipm", "10%", "50.0"], ["ipm", "30%", "50.0"]]


@pytest.mark.system
def test_a_page_of_an_attack_has_the_section(tmp_path: Path) -> None:
    given = {**SMALL, "rounds": 3, "method": {"name": "ditto"}, "federation": {"cohort": 1.0, "weights": "uniform"}}
    given |= {"attack": {"kind": "backdoor", "share": 0.3, "strength": 3.0}, "robust": {"clip": {"times": 0.5}}}
    result = personafl.run(given, out=tmp_path / "run")
    text = page_of(load([result.path]), tmp_path)
    line = next(table for table in Tables(text).tables if "hostile" in table[0])[1]
    shared = next(r for r in result.rows if (r["model"], r["clients"], r["split"]) == ("global", "seen", "test"))
    assert f"{100 * shared['accuracy']:.1f}" in line
    assert f"{100 * shared['backdoor']:.1f}" in line
    assert "3 of 3" in line
