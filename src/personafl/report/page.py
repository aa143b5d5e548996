"""The page: one HTML file with all in it that runs found, which opens from disk without a network.

Charts are SVG that is drawn here, so a page is small, prints, and shows without its script; the script only switches
views and sorts the table of clients. All texts come through a template that escapes them, and the page's own policy
lets no script run but that one.
"""

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from personafl import __version__
from personafl.report import about
from personafl.report.attacks import attack_figures
from personafl.report.clients import client_table
from personafl.report.compactness import form_figures
from personafl.report.costs import cost_figures
from personafl.report.curves import curve_figures
from personafl.report.differences import difference_figures
from personafl.report.findings import behind, scored, sentence
from personafl.report.gains import gain_figures, spread_figures
from personafl.report.groups import group_figures
from personafl.report.load import Source, load
from personafl.report.picking import pick_figures
from personafl.report.sides import side_figures, side_sentence
from personafl.report.split import split_figures
from personafl.report.svg import COLOURS
from personafl.report.table import legend, lines, titled, titles
from personafl.storage.files import atomic_write
from personafl.storage.rundir import PAGE_FILE


def write_page(paths: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page of runs and comparisons and return its path: `out`, or report.html in the one directory."""
    sources = load(paths)
    path = out or paths[0] / PAGE_FILE
    atomic_write(path, page_of(sources, path.parent).encode())
    return path


def page_of(sources: Sequence[Source], folder: Path, live: bool = False) -> str:
    """Return the page; `folder` is where it will be, for its links; a live one loads itself anew when there is more."""
    runs = [run for source in sources for run in source.runs]
    rows = [row for run in runs for row in run.rows]
    results = [(run.label, run.result) for run in runs if run.result is not None]
    methods = scored(results)
    standings = about.standings(sources, folder)
    styles, script = _asset("page.css"), _asset("page.js")
    asked = any(source.recipe.get("compare", {}).get("pick") for source in sources)
    findings = [
        ("picked", "Picked by validation data", pick_figures(results) if asked else []),
        ("sides", "Side by side", side_figures(sources)),
        ("differences", "Method against method", difference_figures(methods)),
        ("groups", "By device and server", group_figures(methods)),
        ("attacks", "Hostile clients", attack_figures(runs)),
    ]
    sections = [
        ("curves", "Learning curves", curve_figures(runs)),
        ("gains", "Who gained, who was hurt", [*gain_figures(runs), *spread_figures(runs)]),
        ("costs", "Trade-offs", cost_figures(runs)),
        ("models", "Inside the models", form_figures(runs)),
    ]
    table = client_table(runs)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(_asset("page.html")).render(
        title=", ".join(source.name for source in sources),
        found=side_sentence(sources) or sentence(results),
        commands=[command for source in sources if (command := about.command_of(source))],
        facts=list(about.facts(sources)),
        recipes=about.recipes(sources, folder),
        standings=standings,
        unfinished=[standing for standing in standings if not standing.finished and not standing.failed],
        failed=[standing for standing in standings if standing.failed],
        warnings=[
            *(f"{run.label}, seed {run.seed}: {entry['text']}" for run in runs for entry in run.events("warning")),
            *behind(results),
        ],
        resume=about.resume_commands(sources),
        anew=about.anew_commands(sources),
        split=split_figures(runs),
        tables=[(title, titles(part), list(lines(part, " ± "))) for title, part in titled(rows)],
        legend=legend(rows) if rows else [],
        findings=[section for section in findings if section[2]],
        sections=[section for section in sections if section[2]],
        table=table,
        data=_embedded(table),
        live=live,
        written=time.strftime("%Y-%m-%d %H:%M %Z"),
        version=__version__,
        styles=Markup(styles + _series_styles()),
        script=Markup(script),
        policy=f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}",
    )


def _asset(name: str) -> str:
    return (files("personafl.report") / name).read_text(encoding="utf-8")


def _embedded(values: Any) -> Markup:
    """Return values as JSON that cannot end the element it is in."""
    text = json.dumps(values, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace("&", "\\u0026"))


def _series_styles() -> str:
    """Return the colours of the series, by their number; shapes repeat after fewer."""
    rules = []
    for number in range(40):
        own = f"var(--c{number % len(COLOURS)})"
        at = f'[data-series="{number}"]'
        rules.append(f"{at} .line,{at} .error{{stroke:{own}}}{at} .marker,{at} .band{{fill:{own}}}")
        if number % 5 == 4:  # a ring
            rules.append(f"{at} .marker{{fill:var(--card);stroke:{own}}}")
    return "".join(rules)
