"""Run directories that are broken, half-written, newer, or not of one split: named errors, never a wrong chart."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import personafl
from personafl.errors import BadInput
from personafl.report.load import load
from personafl.report.page import page_of
from personafl.storage.files import read_json
from report.cases import SMALL

Copied = Callable[[Path], Path]
Single = Callable[..., Path]


def change(path: Path, **values: Any) -> None:
    """Change keys of a JSON file."""
    path.write_text(json.dumps({**read_json(path), **values}))  # without a checksum, as version 0.1


def test_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"nothing: not a run directory \(it has neither recipe.toml nor comparison.toml"
    ):
        load([tmp_path / "nothing"])


@pytest.mark.parametrize("name", ["environment.json", "split.json"])
def test_a_missing_file_is_named(name: str, comparison: Path, copied: Copied) -> None:
    path = copied(comparison) / "ditto-seed0"
    (path / name).unlink()
    with pytest.raises(BadInput, match=f"ditto-seed0/{name}: not found"):
        load([path.parent])


@pytest.mark.parametrize("name", ["environment.json", "split.json", "result.json", "recipe.toml"])
def test_half_a_file_is_named(name: str, comparison: Path, copied: Copied) -> None:
    path = copied(comparison) / "ditto-seed0" / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(BadInput, match=f"ditto-seed0/{name}: "):
        load([path.parent.parent])


def test_a_damaged_line_of_metrics_is_named(single: Single, copied: Copied) -> None:
    path = copied(single("ditto")) / "metrics.jsonl"
    path.with_name("result.json").unlink()  # of a run in progress, whose metrics may be short
    lines = path.read_text().splitlines()
    for wrong in ('{"event": "rou', "[1]", '{"a": 1}'):
        path.write_text("\n".join([lines[0], wrong, *lines[2:]]) + "\n")
        with pytest.raises(BadInput, match=r"metrics.jsonl: line 2 is not a metric"):
            load([path.parent])


def test_a_line_that_is_being_written_waits(single: Single, copied: Copied) -> None:
    path = copied(single("ditto")) / "metrics.jsonl"
    whole = load([path.parent])[0].runs[0].metrics
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(BadInput, match=r"metrics.jsonl: was damaged or changed since the checkpoint"):
        load([path.parent])  # it is done, and nothing is being written
    path.with_name("result.json").unlink()
    assert load([path.parent])[0].runs[0].metrics == whole[:-1]


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"rows": [{"method": "a"}]}, "seed is missing"),
        ({"rows": 3}, "not a result of this version"),
        ({"clients": {"client": [0], "train": [1]}}, "does not have the 12 clients of split.json"),
    ],
)
def test_a_result_that_is_not_one(values: dict[str, Any], match: str, single: Single, copied: Copied) -> None:
    path = copied(single("ditto"))
    change(path / "result.json", **values)
    with pytest.raises(BadInput, match=rf"ditto/result.json: .*{match}"):
        load([path])


def test_a_result_of_another_split(comparison: Path, copied: Copied) -> None:
    path = copied(comparison)
    shutil.copy(path / "ditto-seed1" / "result.json", path / "ditto-seed0" / "result.json")
    with pytest.raises(BadInput, match=r"ditto-seed0/result.json: has clients with other samples than"):
        load([path])


def test_a_newer_version_is_named(single: Single, copied: Copied) -> None:
    path = copied(single("ditto"))
    change(path / "environment.json", packages={"personafl": "99.1.0"})
    with pytest.raises(BadInput, match=r"ditto: was written by personafl 99.1.0, and this is"):
        load([path])
    change(path / "environment.json", packages={"personafl": "0.0.9"})
    load([path])
    change(path / "environment.json", packages={})
    with pytest.raises(BadInput, match="does not name the version"):
        load([path])


def test_two_splits_of_one_seed_are_no_comparison(comparison: Path, single: Single) -> None:
    other = single("fedavg", data=SMALL["data"] | {"unseen": 3})
    with pytest.raises(BadInput, match=r"fedavg-seed0 and .*fedavg: not one comparison: under seed 0 .* digits, split"):
        load([comparison, other])


def test_two_ways_to_divide_under_two_seeds_are_no_comparison(single: Single) -> None:
    other = single("fedavg", seed=7, data=SMALL["data"] | {"validation": 0.1})
    with pytest.raises(BadInput, match=r"not one comparison: data.validation is 0.2 in one, 0.1 in the other"):
        load([single("fedavg"), other])
    load([single("fedavg"), single("fedavg", seed=7)])


def test_a_run_moved_into_a_comparison_of_another_split(comparison: Path, single: Single, copied: Copied) -> None:
    path = copied(comparison)
    shutil.rmtree(path / "local-seed0")
    shutil.copytree(single("local", data=SMALL["data"] | {"unseen": 3}), path / "local-seed0")
    with pytest.raises(BadInput, match=r"small/fedavg-seed0 and .*small/local-seed0: not one comparison"):
        load([path])


def test_one_directory_twice(single: Single) -> None:
    with pytest.raises(BadInput, match="ditto: is given twice"):
        load([single("ditto"), single("ditto") / "." / ""])


def test_a_run_in_progress_gets_a_page_that_says_so(single: Single, copied: Copied) -> None:
    path = copied(single("ditto"))
    (path / "result.json").unlink()
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join(lines[:6]))
    done = sum('"event": "round"' in line for line in lines[:6])
    text = page_of(load([path]), path)
    assert f"ditto, seed 0: {done} of 4 rounds" in text
    assert "Not finished." in text
    assert f"personafl resume {path}" in text
    assert 'id="results"' not in text
    assert 'id="curves"' in text


def test_a_run_that_has_done_nothing_gets_a_page(single: Single, copied: Copied) -> None:
    path = copied(single("ditto"))
    (path / "result.json").unlink()
    (path / "metrics.jsonl").unlink()
    text = page_of(load([path]), path)
    assert "ditto, seed 0: 0 of 4 rounds" in text
    assert 'id="curves"' not in text


def test_a_comparison_with_runs_that_have_not_begun(comparison: Path, copied: Copied) -> None:
    path = copied(comparison)
    for name in ("local-seed1", "ditto-seed1"):
        shutil.rmtree(path / name)
    text = page_of(load([path]), path)
    assert "4 of 6 runs finished" in text
    assert "local, seed 1: not begun" in text


def test_methods_of_packages_that_are_not_here(single: Single, copied: Copied) -> None:
    path = copied(single("ditto"))
    recipe = (path / "recipe.toml").read_text()
    (path / "recipe.toml").write_text(recipe.replace('name = "ditto"', 'name = "nowhere.at_all:Method"'))
    assert load([path])[0].runs[0].label == "ditto"


def test_a_diverged_comparison_has_a_page(tmp_path: Path) -> None:
    recipe = {**SMALL, "compare": {"variants": {"wild": {"method": {"name": "fedavg"}, "training": {"lr": 1e30}}}}}
    found = personafl.compare(recipe, methods=["fedavg", "wild"], seeds=[0], out=tmp_path / "out")
    assert len(found.failures) == 1
    assert "1 of 2 runs finished" in (tmp_path / "out" / "report.html").read_text()
