"""The results of runs at the papers' sizes, which are kept with the project, are those of the page."""

from __future__ import annotations

import re
import runpy
import sys
import tarfile
from pathlib import Path

import pytest

from personafl.papers.catalog import find
from personafl.papers.finished import tables_of
from personafl.papers.show import markdown

ROOT = Path(__file__).parents[2]
ARCHIVES = sorted((ROOT / "benchmarks" / "results").glob("*.tar.xz"))


@pytest.fixture(scope="module", params=ARCHIVES, ids=lambda path: path.name)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of comparisons that is kept; its name says of which table they are."""
    folder = tmp_path_factory.mktemp("runs")
    with tarfile.open(request.param) as file:
        file.extractall(folder, filter="data")
    made: Path = folder / request.param.name.removesuffix(".tar.xz")
    return made


def test_a_table_is_made_of_the_runs_that_are_kept(runs: Path) -> None:
    tables, unfinished = tables_of([runs], *find(runs.name.replace("-", "/", 1)))
    assert not unfinished
    lines = [line for line in markdown(tables).splitlines() if line.startswith(("|", "Ran:"))]
    assert len(lines) > 10
    page = (ROOT / "docs" / "results.md").read_text()
    part = page[page.index("## At the papers' sizes") :]
    assert "\n".join(lines[:5]) in part
    assert all(line in part for line in lines)


@pytest.mark.parametrize("against", ["size", "time"])
def test_a_picture_is_made_of_the_runs_that_are_kept(
    against: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `make results` makes it; every run or mean is a point with its numbers in words."""
    name, out = f"{runs.name}-{against}.svg", tmp_path / "picture.svg"
    words = [str(runs), "--table", runs.name.replace("-", "/", 1), "--against", against, "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["quped_curve.py", *words])
    runpy.run_path(str(ROOT / "benchmarks" / "quped_curve.py"), run_name="__main__")
    assert out.read_text() == (ROOT / "docs" / name).read_text()
    assert f"]({name})" in (ROOT / "docs" / "results.md").read_text()


def test_a_picture_has_what_the_table_has(runs: Path) -> None:
    """Each row's mean, to two digits, stands at a point of the picture against size."""
    picture = (ROOT / "docs" / f"{runs.name}-size.svg").read_text()
    (table,), _ = tables_of([runs], *find(runs.name.replace("-", "/", 1)))
    rows = [line for line in markdown([table]).splitlines() if re.match(r"\| [^≥≤]* \| \d", line)]
    means = [re.split(r" *\| *", line)[2].partition(" ")[0] for line in rows]
    assert len(means) == 12
    assert all(f"kB, {mean} ± " in picture for mean in means)
