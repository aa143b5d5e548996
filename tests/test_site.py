"""The documentation's site: it builds without a warning, offline, and nothing in it leads nowhere."""

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from personafl.algorithms import METHODS
from personafl.recipe.recipe import Recipe

pytestmark = pytest.mark.system
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build it, the tutorial's notebook included; warnings are errors there."""
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(folder),
    ]  # --quiet undoes --strict
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stderr
    return folder


class Page(HTMLParser):
    """What a page has: ids, links, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in ("script", "img", "iframe", "source") and "src" in values:
            self.loads.append(values["src"])
        if tag == "link" and values.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.loads.append(values["href"])


def test_every_link_leads_somewhere_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > 30
    for path, page in pages.items():
        for load in page.loads:
            parts = urlsplit(load)
            assert not parts.scheme or parts.scheme == "data", f"{path.name} loads {load}"
            assert (path.parent / unquote(parts.path)).exists(), f"{path.name} loads {load}"
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path not in ("", ".") else path
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{path.name} links {link}"
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].ids | {"__skip"}, f"{path.name} links {link}"
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.findall(r"(?:url\(|@import\s)[\"']?https?:", styles)


def test_pages_are_made_from_the_code(site: Path) -> None:
    methods = "".join(path.read_text() for path in (site / "methods").glob("*.html"))
    assert all(f"<code>{name}</code>" in methods for name in METHODS)
    recipe = (site / "reference" / "recipe.html").read_text()
    assert all(
        f"<code>{key}</code>" in recipe or f"<code>[{key}]</code>" in recipe
        for key in Recipe.model_fields
        if key != "devices"
    )
    assert "<code>[[devices]]</code>" in recipe
    rows = re.findall(r"<tr>\s*<td><code>clip</code></td>.*?</tr>", recipe, flags=re.DOTALL)
    assert any("gradient norm per step" in row for row in rows)
    commands = (site / "reference" / "cli.html").read_text()
    assert all(
        f"<code>personafl {name}</code>" in commands for name in ("run", "compare", "reproduce", "data describe")
    )


def test_the_tutorial_has_the_outputs_of_its_run(site: Path) -> None:
    page = (site / "tutorial.html").read_text()
    assert "27 clients train, 3 join later" in page
    assert "worst_decile" in page
    assert "Sequential" in page or "Linear" in page


def test_the_search_finds_a_word_from_disk(site: Path) -> None:
    """Browsers let a page from disk neither start a worker nor fetch: docs/iframe-worker.js stands in."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium on this machine (Debian: apt install chromium)")
    with sync_api.sync_playwright() as playwright:
        page = playwright.chromium.launch(executable_path=found).new_page()
        page.set_default_timeout(0)  # a busy machine is slow
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto((site / "methods" / "ditto.html").as_uri())  # one folder down: addresses are relative
        page.locator("[data-md-component=search-query]").click()
        page.keyboard.type("BinaryRelax")
        result = page.locator(".md-search-result__link[href$='methods/binaryrelax.html']").first
        result.click()
        page.wait_for_url((site / "methods" / "binaryrelax.html").as_uri() + "*")
        assert page.locator("h1").inner_text().startswith("BinaryRelax")
        assert said == []
