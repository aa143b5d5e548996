"""The page in a real browser, headless: it renders, sorts, filters and switches, with no word on the console."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import personafl
from personafl.report.load import load
from personafl.report.page import write_page
from personafl.report.serve import served
from personafl.runs.result import Result
from report.cases import CLOUD, SMALL

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install -e '.[dev]')")

pytestmark = pytest.mark.system
Single = Callable[..., Path]
Opened = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The system's Chromium; tests are skipped where there is none."""
    found = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )
    if found is None:
        pytest.skip("no Chromium on this machine (Debian: apt install chromium)")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found)
        yield chromium
        chromium.close()


def failed(request: Any) -> list[str]:
    """Return what failed, but for what the window's end cut off."""
    return [] if "ERR_ABORTED" in request.failure else [f"{request.url}: {request.failure}"]


@pytest.fixture
def opened(browser: Any) -> Iterator[Opened]:
    """Open an address in a fresh window; at the end there must have been no error."""
    contexts, said = [], []

    def open_(address: str, width: int = 1280, scheme: str = "light") -> Any:
        contexts.append(browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme))
        contexts[-1].set_default_timeout(0)  # a busy machine is slow
        page = contexts[-1].new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("requestfailed", lambda request: said.extend(failed(request)))
        page.goto(address)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert said == []


@pytest.fixture(scope="module")
def small(comparison: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_page([comparison], tmp_path_factory.mktemp("page") / "report.html").as_uri()


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two comparisons, whose tables have virtual times, sizes, choices and tuned models."""
    folder = tmp_path_factory.mktemp("wide")
    recipe = {**SMALL, **CLOUD, "devices": [{"name": "phone", "share": 0.5}, {"name": "watch", "share": 0.5}]}
    names = ["fedavg", "fedalt", "fedadagrad", "ditto"]
    for name, rounds in (("first", 2), ("second", 3)):
        values = {
            **recipe,
            "rounds": rounds,
            "finetune": True,
            "model": {"name": "mlp", "hidden": [12], "personal": "output"},
        }
        personafl.compare(values, methods=names, seeds=[0, 1], out=folder / name)
    return write_page([folder / "first", folder / "second"], folder / "report.html").as_uri()


def column(page: Any, title: str) -> list[str]:
    """Return what the table of clients shows under a title."""
    titles = [text.strip() for text in page.locator("#client-table thead button").all_inner_texts()]
    return page.locator(f"#client-table tbody td:nth-child({titles.index(title) + 1})").all_inner_texts()


def test_it_renders(opened: Opened, small: str, comparison: Path) -> None:
    page = opened(small)
    assert page.title() == "small · personafl"
    assert page.locator("#results tbody tr").count() == 6
    for figure in page.locator("figure").all():
        shown = [view for view in figure.locator(".view").all() if view.is_visible()]
        assert len(shown) == 1
        box = shown[0].locator("svg, table").first.bounding_box()
        assert box["width"] > 100
        assert box["height"] > 100
    assert all(page.locator("svg.chart").evaluate_all("all => all.map(svg => svg.getAttribute('aria-label'))"))


def test_a_choice_shows_another_view(opened: Opened, small: str) -> None:
    figure = opened(small).locator("#curves figure")
    titles = []
    for words in ("per round", "per second", "per byte sent"):
        figure.locator("label", has_text=words).click()
        view = figure.locator(".view:visible")
        assert view.count() == 1
        titles.append(view.get_attribute("data-axis"))
    assert titles == ["round", "seconds", "bytes"]
    figure.locator("label", has_text="training loss").click()
    assert figure.locator(".view:visible").get_attribute("data-measure") == "loss"


def test_clients_sort_both_ways_with_unknown_ones_last(opened: Opened, small: str) -> None:
    page = opened(small)
    page.locator("#more").click()
    assert page.locator("#client-table tbody tr").count() == 72
    for title in ("change", "train"):
        head = page.locator("#client-table thead th", has_text=title)
        head.get_by_role("button").click()
        up = column(page, title)
        assert head.get_attribute("aria-sort") == "ascending"
        head.get_by_role("button").click()
        down = column(page, title)
        assert head.get_attribute("aria-sort") == "descending"
        for values, backwards in ((up, False), (down, True)):
            known = [float(value) for value in values if value != "–"]
            assert known == sorted(known, reverse=backwards)
            assert values[len(known) :] == ["–"] * (len(values) - len(known))
    page.locator("#client-table thead th", has_text="client").get_by_role("button").click()
    assert column(page, "client") == [str(client) for client in range(12) for _ in range(6)]


def test_clients_are_filtered(opened: Opened, small: str, comparison: Path) -> None:
    page = opened(small)
    page.locator("#method").select_option("ditto")
    assert set(column(page, "method")) == {"ditto"}
    assert page.locator("#count").inner_text() == "24 of 72 lines"
    page.locator("#group").select_option("unseen")
    assert page.locator("#count").inner_text() == "4 of 72 lines"
    page.locator("#group").select_option("")
    page.locator("#hurt").check()
    results = [Result.load(comparison / f"ditto-seed{seed}").columns for seed in (0, 1)]
    pairs = [pair for c in results for pair in zip(c["personal_test_accuracy"], c["global_test_accuracy"], strict=True)]
    hurt = sum(own < shared for own, shared in pairs if own is not None and shared is not None)
    assert page.locator("#count").inner_text() == f"{hurt} of 72 lines"
    page.locator("#hurt").uncheck()
    page.locator("#method").select_option("")
    page.locator("#find").fill("LOCAL")
    assert set(column(page, "method")) == {"local"}
    page.locator("#find").fill("nobody at all")
    assert page.locator("#client-table tbody tr").count() == 0


def test_a_point_says_whose_it_is(opened: Opened, small: str) -> None:
    page = opened(small)
    page.locator("#gains .view:visible .series .marker[data-tip]").last.hover()  # on top of others there
    assert "global" in page.locator("#tip").inner_text()


@pytest.mark.parametrize("width", [320, 390, 768])
def test_a_phone_needs_no_sideways_scrolling(width: int, opened: Opened, small: str) -> None:
    page = opened(small, width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    shown = page.locator("#curves .view:visible svg:visible")
    assert shown.count() == 1
    assert shown.evaluate("svg => svg.viewBox.baseVal.width") == (350 if width < 620 else 800)


def test_dark_mode_is_dark_and_readable(opened: Opened, small: str) -> None:
    def light(page: Any, selector: str, name: str) -> float:
        colour = page.locator(selector).first.evaluate(f"e => getComputedStyle(e).{name}")
        return sum(map(float, colour[colour.index("(") + 1 : -1].split(",")[:3])) / 3

    for scheme, dark in (("light", False), ("dark", True)):
        page = opened(small, scheme=scheme)
        ground = light(page, "section", "backgroundColor")
        assert (ground < 80) == dark
        for selector, name in (("h2", "color"), ("#curves svg:visible text", "fill"), ("#results td", "color")):
            assert abs(light(page, selector, name) - ground) > 120


def test_print_is_on_white_without_controls(opened: Opened, small: str) -> None:
    page = opened(small, scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.locator("section").first.evaluate("e => getComputedStyle(e).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator("nav").is_visible()
    assert not page.locator(".filters").is_visible()


def test_without_script_all_views_are_there(browser: Any, small: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    context.set_default_timeout(0)
    page = context.new_page()
    page.goto(small)
    views = page.locator("#curves .view")
    assert views.count() > 1
    assert all(view.is_visible() for view in views.all())
    context.close()


@pytest.mark.parametrize("method", ["fedslr", "quped", "fedbcd"])
def test_pages_of_other_methods(method: str, opened: Opened, single: Single, tmp_path: Path) -> None:
    values: dict[str, Any] = CLOUD if method == "fedbcd" else {}
    options = {"name": method} | ({"bits": 2} if method == "quped" else {})
    model = {"name": "mlp", "hidden": [12, 12]}
    path = single(method, method=options, model=model, **values)
    page = opened(write_page([path], tmp_path / "page.html").as_uri(), width=390, scheme="dark")
    assert page.locator("figure").count() >= 4
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_no_name_becomes_a_script(opened: Opened, single: Single, tmp_path: Path) -> None:
    path = shutil.copytree(single("ditto"), tmp_path / "<img src=x onerror=alert(1)>")
    page = opened(write_page([path], tmp_path / "page.html").as_uri())
    assert page.locator("h1").inner_text() == "<img src=x onerror=alert(1)>"
    assert page.locator("img").count() == 0


def test_a_watched_page_loads_itself_anew(opened: Opened, comparison: Path, tmp_path: Path) -> None:
    path = shutil.copytree(comparison, tmp_path / "copy")
    result = (path / "ditto-seed1/result.json").read_bytes()
    (path / "ditto-seed1/result.json").unlink()
    with served([path]) as address:
        page = opened(address)
        assert page.locator(".banner").is_visible()
        with page.expect_response("**/version"):
            pass
        (path / "ditto-seed1/result.json").write_bytes(result)
        page.wait_for_selector(".banner", state="detached")
        page.close()
    assert all(run.result is not None for run in load([path])[0].runs)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 760, 920, 1280])
def test_no_column_is_cut(width: int, scheme: str, opened: Opened, wide: str) -> None:
    """Tables of two comparisons with all columns that there are: nothing is wider than the room it has."""
    page = opened(wide, width=width, scheme=scheme)
    assert page.locator(".scroll").count() > 5
    cut = "all => all.filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.getAttribute('aria-label'))"
    assert page.locator(".scroll").evaluate_all(cut) == []
    titles = page.locator("#results td >> nth=0").evaluate("e => getComputedStyle(e, '::before').content")
    assert titles == ('"global"' if width < 900 else "none")


def test_methods_are_compared_with_the_one_that_is_chosen(opened: Opened, small: str) -> None:
    figure = opened(small).locator("#differences figure")
    for method, others in (("fedavg", ["ditto", "local"]), ("local", ["ditto", "fedavg"])):
        figure.locator(".choices label", has_text=method).click()
        names = figure.locator(".view:visible tbody th").all_inner_texts()
        assert sorted(name.split()[0] for name in names) == others
