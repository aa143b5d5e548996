"""The documentation's Python runs as it stands."""

import re
from pathlib import Path

import pytest

from tiers import tiered

DOCS = Path(__file__).resolve().parents[1]
PAGES = ["README.md", *(str(path.relative_to(DOCS)) for path in sorted((DOCS / "docs").glob("*.md")))]


def python_of(page: str) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL))


CODED = [page for page in PAGES if python_of(page)]
LONG = ("docs/fedslr.md", "docs/quped.md")  # seconds


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
