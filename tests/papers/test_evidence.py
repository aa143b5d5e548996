"""What the Makefile runs is what the pages of results need."""

import argparse
import re
import shlex
import subprocess
from functools import cache
from pathlib import Path

import pytest

from personafl.data.config import parse_partition
from personafl.papers import find
from personafl.runs.recipe import Recipe
from personafl.runs.values import from_words

ROOT = Path(__file__).resolve().parents[2]


@cache
def commands() -> dict[str, list[str]]:
    """Return, by the folder of its runs, the words of each comparison that the evidence targets make."""
    targets = ("evidence-quped", "evidence-fedbcd")
    done = subprocess.run(["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [shlex.split(line) for line in done.stdout.splitlines() if "personafl compare" in line]
    return {words[words.index("--out") + 1]: words[2:] for words in lines}


def recipe_of(folder: str) -> Recipe:
    """Return the recipe of a comparison as `personafl compare` reads it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    for option in ("dataset", "partition", "methods", "seeds", "out"):
        parser.add_argument(f"--{option}")
    given = parser.parse_intermixed_args(commands()[folder])
    options = {
        "data.source": given.dataset,
        "data.partition": parse_partition(given.partition) if given.partition else None,
        "compare.methods": given.methods.split(",") if given.methods else None,
        "compare.seeds": given.seeds.split(",") if given.seeds else None,
    }
    return Recipe.parse(*from_words(given.words, options))


@cache
def results() -> dict[str, list[str]]:
    """Return, by table, the folders of runs that `make results` reads."""
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    (line,) = re.findall(r"^VERDICTS := (.*)$", text, flags=re.MULTILINE)
    pairs = [word.split(":") for word in line.split()]
    return {name: [f"runs/evidence-{name.partition('/')[0]}/{run}" for run in runs.split(",")] for name, runs in pairs}


@pytest.mark.parametrize("name", results())
def test_a_table_of_results_has_all_its_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    paper, (table,) = find(name)
    made = {method for folder in results()[name] for method in recipe_of(folder).compare.methods}
    assert made.issuperset(paper.tables[table].runs)
