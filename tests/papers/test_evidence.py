"""The pages of results: what the Makefile runs is what they need and say, and each number stands on one of them."""

import argparse
import re
import shlex
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from personafl.data.config import parse_partition
from personafl.papers import find
from personafl.papers.catalog import Claim
from personafl.papers.finished import ran
from personafl.papers.verdict import named
from personafl.recipe.recipe import Recipe
from personafl.recipe.values import from_words

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


@dataclass(frozen=True)
class Section:
    """A table of a page as it is printed: cells by row and by claim."""

    title: str
    rows: dict[str, list[str]]  # name -> here, paper
    claims: dict[str, list[str]]  # text -> verdict, here, paper
    ran: str | None


def sections(page: str) -> dict[str, Section]:
    """Return a page's tables by their presets' names."""
    found = {}
    for name, title, body in re.findall(
        r"(?ms)^## (\w+/[\w-]+): (.*?)$(.*?)(?=^## |\Z)", (ROOT / "docs" / page).read_text()
    ):
        first, second = re.findall(r"(?m)(?:^\|.*\n)+", body)
        tables = [[re.split(r" \| ", line.strip("| ")) for line in part.splitlines()[2:]] for part in (first, second)]
        (rows, claims) = ({cells[0]: cells[1:] for cells in table} for table in tables)
        ran_line = re.search(r"(?m)^Ran: (.*?)\.(?: What differs.*)?$", body)
        found[name] = Section(title, rows, claims, ran_line[1] if ran_line else None)
    return found


def mean_of(cell: str) -> float:
    return float(cell.partition(" ")[0])


PRINTED = [(page, name) for page in ("results.md", "reproduced.md") for name in sections(page)]


@pytest.mark.parametrize(("page", "name"), PRINTED)
def test_a_printed_table_is_that_of_the_paper(page: str, name: str) -> None:
    paper, (key,) = find(name)
    table, printed = paper.tables[key], sections(page)[name]
    assert printed.title == table.title
    known = {named(row.name, at): row for row in table.rows for at in (None, *table.at)}
    for line, (_, theirs) in printed.rows.items():
        row = known[line]
        assert theirs.partition(" ")[0] == ("–" if row.paper is None else f"{row.paper:.2f}"), line
    assert {named(claim, at) for claim in table.claims for at in (None, *table.at)} >= printed.claims.keys()


@pytest.mark.parametrize(("page", "name"), PRINTED)
def test_differences_are_those_of_the_rows_and_verdicts_follow(page: str, name: str) -> None:
    """Paired or not, the mean difference is that of the means; 1.686 = t(0.95; 2)/√3, for 3 seeds. They are rounded."""
    printed = sections(page)[name]
    for text, (word, gap, _) in printed.claims.items():
        if " ± " not in gap:  # one seed, or no pair of runs
            assert word == "**not shown**", text
            continue
        plain, _, at = text.partition(", round ")
        claim = Claim.parse(plain)
        cells = [printed.rows[named(row, int(at) if at else None)][0] for row in (claim.more, claim.less)]
        mean, std = (float(part) for part in gap.split(" ± "))
        more, less = (mean_of(cell) for cell in cells)
        digits = min(len(cell.partition(" ")[0].partition(".")[2]) for cell in cells)
        assert claim.sign * mean == pytest.approx(more - less, abs=10**-digits + 0.006), text
        above, slack = claim.sign * mean + claim.margin, 0.02
        if word == "holds":
            assert above - 1.686 * std > -slack, text
        elif word == "**does not hold**":
            assert above + 1.686 * std < slack, text


@pytest.mark.parametrize("name", sections("results.md"))
def test_a_page_says_what_its_command_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert sections("results.md")[name].ran == "; ".join(dict.fromkeys(ran(recipe_of(f)) for f in results()[name]))


def test_only_one_page_has_a_number() -> None:
    """A mean with its std that results.md has stands nowhere in evidence.md, however it is spaced."""
    pages = ((ROOT / "docs" / page).read_text().replace("−", "-") for page in ("results.md", "evidence.md"))
    one, other = (set(re.findall(r"[+-]?\d+\.\d\d±\d+\.\d\d", page.replace(" ± ", "±"))) for page in pages)
    assert len(one) > 100
    assert not one & other
