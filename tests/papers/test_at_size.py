"""The results of runs at the papers' sizes, which are kept with the project, are those of the page."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from personafl.papers.catalog import find
from personafl.papers.finished import tables_of
from personafl.papers.show import markdown

ROOT = Path(__file__).parents[2]
ARCHIVES = sorted((ROOT / "benchmarks" / "results").glob("*.tar.xz"))


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name)
def test_a_table_is_made_of_the_runs_that_are_kept(archive: Path, tmp_path: Path) -> None:
    name = archive.name.removesuffix(".tar.xz")
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    tables, unfinished = tables_of([tmp_path / name], *find(name.replace("-", "/", 1)))
    assert not unfinished
    lines = [line for line in markdown(tables).splitlines() if line.startswith(("|", "Ran:"))]
    assert len(lines) > 10
    page = (ROOT / "docs" / "results.md").read_text()
    part = page[page.index("## At the papers' sizes") :]
    assert "\n".join(lines[:5]) in part
    assert all(line in part for line in lines)
