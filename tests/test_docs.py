"""The documentation's Python runs as it stands."""

import re
from pathlib import Path

import pytest
import yaml
from markdown.extensions.toc import slugify, unique

import personafl
from tiers import tiered

DOCS = Path(__file__).resolve().parents[1]
PAGES = ["README.md", *(str(path.relative_to(DOCS)) for path in sorted((DOCS / "docs").glob("*.md")))]


def python_of(page: str) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL))


CODED = [page for page in PAGES if python_of(page)]
LONG = tuple(f"docs/{name}.md" for name in ("dataframe", "fedslr", "quickstart", "quped", "tasks", "tune"))  # seconds


@pytest.mark.parametrize("page", tiered(CODED, [page for page in CODED if page not in LONG]))
def test_python_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(python_of(page), page, "exec"), {"__name__": "__main__"})


def test_the_first_script_is_short() -> None:
    lines = [line for line in python_of("README.md").splitlines() if line.strip()]
    assert len(lines) <= 15
    assert any("user=" in line for line in lines)
    assert any("result.predict(" in line for line in lines)


def test_every_page_is_linked_and_every_link_leads_somewhere() -> None:
    known = (DOCS / "README.md").read_text() + (DOCS / "mkdocs.yml").read_text()
    for page in PAGES:
        assert page == "README.md" or Path(page).name in known, (
            f"neither README.md nor the site's navigation has {page}"
        )
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", (DOCS / page).read_text()):
            made = page != "README.md" and target in known  # when the site is built, see tests/test_site.py
            assert made or (DOCS / page).parent.joinpath(target).exists(), f"{page} links {target}"


def test_links_of_the_project_s_other_pages_lead_somewhere() -> None:
    readme = (DOCS / "README.md").read_text()
    for page in ("CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md"):
        assert f"]({page})" in readme
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", (DOCS / page).read_text()):
            assert (DOCS / target).exists(), f"{page} links {target}"


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((DOCS / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)  # what the format asks for
    assert citation["version"] == personafl.__version__


@pytest.mark.parametrize("name", ["bug", "feature", "method"])
def test_a_form_for_issues_asks_for_something(name: str) -> None:
    form = yaml.safe_load((DOCS / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
    assert form["name"]
    assert form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in fields} <= {"input", "textarea", "dropdown", "checkboxes"}
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)
    assert any(field.get("validations", {}).get("required") for field in fields)


def sections(page: str) -> dict[str, str]:
    """Return the text below each heading of a page, by the heading's anchor."""
    parts = re.split(r"^#{2,} (.+)$", (DOCS / "docs" / page).read_text(), flags=re.MULTILINE)[1:]
    taken: set[str] = set()
    return {unique(slugify(title, "-"), taken): text for title, text in zip(parts[::2], parts[1::2], strict=True)}


def test_numbers_of_the_advice_are_those_of_the_tables_that_it_links() -> None:
    pages = {page: sections(page) for page in ("evidence.md", "results.md")}
    checked = 0
    for line in re.split(r"\n(?=\s*[-|\d])|\)[;.] ", (DOCS / "docs" / "choose.md").read_text()):
        linked = re.findall(r"\((evidence|results)\.md#([\w-]+)", line)
        if not linked:
            continue
        text = "".join(pages[f"{page}.md"][anchor] for page, anchor in linked)
        there = {f"{float(number):.1f}" for number in re.findall(r"\d+\.\d+", text)} | set(
            re.findall(r"\d+\.\d+", text)
        )
        said = re.findall(r"\d+\.\d+", re.sub(r"\(\w+\.md#[^)]*|Dirichlet\([\d.]+\)", "", line))
        assert set(said) <= there, f"docs/choose.md has other numbers than {linked}: {sorted(set(said) - there)}"
        checked += len(said)
    assert checked > 30
