"""The page: its numbers are the results', its sections those of which there are data, and nothing in it is markup."""

from __future__ import annotations

import io
import json
import re
import statistics
from collections.abc import Callable, Iterable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy.stats import gaussian_kde

import personafl
from personafl.cli.tables import result_tables
from personafl.data.federated import Ragged, make_federated
from personafl.errors import BadInput
from personafl.report.clients import client_table
from personafl.report.curves import by_label, curve_figures, joined, timelines
from personafl.report.gains import clients_of
from personafl.report.load import load
from personafl.report.page import page_of, write_page
from personafl.report.spread import density
from personafl.runs.result import Result
from personafl.storage.rundir import RunDirectory
from report.cases import CLOUD, SMALL

Single = Callable[..., Path]
Called = Callable[..., tuple[int, str, str]]


class Tables(HTMLParser):
    """Collects the cells of tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._inside = True

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.tables[-1][-1][-1] += data


def page(*paths: Path) -> str:
    return page_of(load(paths), paths[0])


def sections(text: str) -> list[str]:
    return re.findall(r'<section id="(\w+)">', text)


def figures(text: str) -> list[str]:
    return [unescape(title) for title in re.findall(r'<figure class="figure">\s*<h3>(.*?)</h3>', text)]


def printed(parts: Iterable[Any]) -> str:
    """Return what the terminal shows, spaces and lines joined."""
    console = Console(width=200, record=True, file=io.StringIO())
    for part in parts:
        console.print(part)
    return " ".join(console.export_text().split())


def embedded(text: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_table_has_the_numbers_of_the_results(comparison: Path) -> None:
    seen, unseen, *_ = Tables(page(comparison)).tables
    assert seen[0] == [
        "method",
        "global",
        "personal",
        "chosen",
        "worst\n10%",
        "hurt",
        "hurt\nafter",
        "MB\nup",
        "MB\ndown",
        "sec",
    ]
    assert len(seen) == len(unseen) == 4
    rows = [row for seed in (0, 1) for row in Result.load(comparison / f"ditto-seed{seed}").rows]
    wanted = {"model": "personal", "clients": "seen", "split": "test"}
    values = [100 * row["accuracy"] for row in rows if wanted.items() <= row.items()]
    line = next(line for line in seen if line[0] == "ditto")
    assert line[2] == f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"
    worst = [100 * row["worst_decile"] for row in rows if wanted.items() <= row.items()]
    assert line[4] == f"{statistics.mean(worst):.1f} ± {statistics.stdev(worst):.1f}"


def test_the_page_and_the_terminal_have_one_table_and_legend(comparison: Path) -> None:
    text = page(comparison)
    rows = [row for run in load([comparison])[0].runs for row in run.rows]
    shown = printed(result_tables(rows, 200))
    for line in Tables(text).tables[0][1:]:
        assert " ".join(line).replace(" ± ", "±") in shown
    for words in re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text.split('class="legend-list"')[1].split("</dl>")[0]):
        assert f"{unescape(words[0])}: {unescape(words[1])}" in shown


def test_clients_have_the_values_of_their_runs(comparison: Path) -> None:
    data = embedded(page(comparison))
    keys = [column["key"] for column in data["columns"]]
    assert len(data["lines"]) == data["all"] == 3 * 2 * 12
    columns = Result.load(comparison / "ditto-seed1").columns
    for line in (dict(zip(keys, line, strict=True)) for line in data["lines"]):
        if (line["method"], line["seed"]) == ("ditto", 1):
            at = columns["name"].index(line["name"])
            own, shared = columns["personal_test_accuracy"][at], columns["global_test_accuracy"][at]
            assert line["personal"] == pytest.approx(100 * own, abs=0.005)
            assert line["change"] == pytest.approx(100 * (own - shared), abs=0.005)
            assert (line["train"], line["clients"]) == (columns["train"][at], columns["clients"][at])
        if line["method"] in ("fedavg", "local"):
            assert line["change"] is None


def test_many_clients_are_thinned_evenly_by_accuracy(comparison: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("personafl.report.clients.LINES", 30)
    (source,) = load([comparison])
    table = client_table(source.runs)
    assert table is not None
    assert (len(table["lines"]), table["all"]) == (30, 72)
    own = [line[3] for line in table["lines"] if line[:3:2] == ["fedavg", 0]]
    everyone = [100 * value for value in Result.load(comparison / "fedavg-seed0").columns["global_test_accuracy"]]
    assert min(own) == pytest.approx(min(everyone), abs=0.01)
    assert max(own) == pytest.approx(max(everyone), abs=0.01)
    assert "The page has 30 of 72 lines" in page_of([source], comparison)


def test_curves_are_means_over_seeds_at_summed_bytes_and_seconds(comparison: Path) -> None:
    (source,) = load([comparison])
    runs = by_label(source.runs)["ditto"]
    metrics = [RunDirectory(run.path).metrics() for run in runs]
    rounds = [[entry for entry in lines if entry["event"] == "round"] for lines in metrics]
    for run, lines in zip(runs, rounds, strict=True):
        place = timelines(run)[2]
        assert place["bytes"] == pytest.approx(sum(e["bytes_up"] + e["bytes_down"] for e in lines[:3]) / 1e6)
        assert place["seconds"] == pytest.approx(sum(e["seconds"] for e in lines[:3]))
    losses = [{e["number"]: e["loss"] for e in lines} for lines in rounds]
    curve = joined(list(zip(runs, losses, strict=True)))
    assert curve.mean == pytest.approx(
        [statistics.mean(each) for each in zip(*(x.values() for x in losses), strict=True)]
    )
    assert [point["round"] for point in curve.at] == [1, 2, 3, 4]


def test_a_curve_ends_where_the_result_is(comparison: Path) -> None:
    (source,) = load([comparison])
    (figure,) = curve_figures([run for run in source.runs if run.label == "ditto"])
    view = next(view for view in figure.views if view.chosen == {"measure": "personal", "axis": "round"})
    ends = re.search(r"ditto ends at ([\d.]+)", view.picture)
    wanted = {"model": "personal", "clients": "seen", "split": "test"}
    rows = [row for run in source.runs if run.label == "ditto" for row in run.rows if wanted.items() <= row.items()]
    assert ends
    assert float(ends[1]) == pytest.approx(100 * statistics.mean(row["accuracy"] for row in rows), rel=1e-3)


def test_a_curve_has_the_model_that_the_table_has(single: Single) -> None:
    """Personal models of finetune are made at the end: the line is the global model's and ends at the other's."""
    (source,) = load([single("finetune")])
    (run,) = source.runs
    (figure,) = curve_figures(source.runs)
    assert figure.choices[0].options[0] == ("last", "personal model, global where there is none")
    ends = {
        view.chosen["measure"]: float(found[1])
        for view in figure.views
        if (found := re.search(r"test accuracy, % against round: finetune ends at ([\d.]+)", view.picture))
    }
    wanted = {"clients": "seen", "split": "test"}
    final = {row["model"]: 100 * row["accuracy"] for row in run.rows if wanted.items() <= row.items()}
    assert final["personal"] != final["global"]
    assert ends == {
        "last": pytest.approx(final["personal"], rel=1e-3),
        "global": pytest.approx(final["global"], rel=1e-3),
    }
    assert "the last point of its line" in figure.caption


def test_many_curves_have_no_bands(comparison: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = load([comparison])[0].runs
    assert 'class="band"' in curve_figures(runs)[0].views[0].picture
    assert "bands ±" in curve_figures(runs)[0].caption
    monkeypatch.setattr("personafl.report.curves.BANDS", 2)
    assert 'class="band"' not in curve_figures(runs)[0].views[0].picture
    assert "bands ±" not in curve_figures(runs)[0].caption


def test_who_is_behind_is_said_wherever_results_are_shown(
    comparison: Path, called: Called, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All runs are looked at; it is text in a page, a warning in JSON, and nothing is said where nobody is behind."""
    for module in ("findings", "page"):
        monkeypatch.setattr(f"personafl.report.{module}.behind", lambda runs: [f"{len(runs)} runs are <behind>"])
    found = personafl.load(comparison)
    line = f"{len(found.results)} runs are <behind>"
    assert called("show", str(comparison))[2] == f"warning: {line}\n"
    assert json.loads(called("show", str(comparison), "--json")[1])["warnings"] == [line]
    assert f"warning: {line}" in str(found)
    for text in (page(comparison), found._repr_html_()):
        assert line in unescape(text)
        assert "<behind>" not in text
    monkeypatch.undo()
    assert "behind" not in str(found)


def test_page_and_terminal_say_what_was_found(comparison: Path, called: Called) -> None:
    """The difference is that of the table, and the share that of the clients of both seeds."""
    text = page(comparison)
    (found,) = re.findall(r'<p class="found">(.*?)</p>', text)
    assert found in " ".join(called("show", str(comparison))[1].split())
    assert json.loads(called("show", str(comparison), "--json")[1])["found"] == found
    rows = {line[0]: line for line in Tables(text).tables[0][1:]}
    score = {"fedavg": rows["fedavg"][1], "ditto": rows["ditto"][2], "local": rows["local"][2]}
    mean = {label: float(cell.split()[0]) for label, cell in score.items()}
    best = max(mean, key=lambda label: mean[label])
    other = "local" if best == "fedavg" else "fedavg"
    named = re.match(rf"{best} \(\w+\) (?:beats|and) {other} \(\w+\).*? ([\d.]+) ± [\d.]+ points", found)
    assert named, found
    assert float(named[1]) == pytest.approx(mean[best] - mean[other], abs=0.11)


def test_who_is_hurt_agrees_with_the_result(comparison: Path) -> None:
    (source,) = load([comparison])
    for run in (run for run in source.runs if run.label == "ditto"):
        clients = clients_of(run, "personal")
        wanted = {"model": "personal", "clients": "seen", "split": "test"}
        (row,) = [row for row in run.rows if wanted.items() <= row.items()]
        assert row["share_hurt"] == pytest.approx(np.mean([client.change < 0 for client in clients]))


def test_change_is_shown_against_samples_where_they_differ(single: Single) -> None:
    uneven = single("ditto", data=SMALL["data"] | {"partition": {"kind": "quantity", "clients": 12, "alpha": 0.5}})
    assert "change against samples" in page(uneven)
    even = single("ditto", data=SMALL["data"] | {"partition": {"kind": "classes", "clients": 12, "per_client": 4}})
    text = page(even)
    assert "change against samples" not in text
    (size,) = {client.samples for client in clients_of(load([even])[0].runs[0], "personal")}
    assert f"All of them have {size} training samples." in text


def test_violins_are_gaussian_densities() -> None:
    values, places = np.random.default_rng(0).normal(3, 2, size=40), np.linspace(-2, 8, 9)
    ours, theirs = density(values, places), gaussian_kde(values)(places)
    np.testing.assert_allclose(ours / ours.max(), theirs / theirs.max(), rtol=1e-9)


def test_run_and_compare_write_it(comparison: Path, single: Single) -> None:
    for path in (comparison, single("ditto")):
        assert "<h2>Results</h2>" in (path / "report.html").read_text()
    assert not list(comparison.glob("*/report.html"))


def test_resume_of_a_finished_run_makes_up_for_a_missing_page(single: Single, copied: Callable[[Path], Path]) -> None:
    path = copied(single("ditto"))
    (path / "report.html").unlink()
    personafl.resume(path)
    assert "<h2>Results</h2>" in (path / "report.html").read_text()


def test_a_page_that_cannot_be_made_does_not_lose_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("bad chart")

    monkeypatch.setattr("personafl.report.page.page_of", fail)
    with pytest.warns(UserWarning, match=r"the results are saved, but no report was written \(bad chart\)"):
        result = personafl.run({**SMALL, "rounds": 1}, out=tmp_path / "run")
    assert result.rows == Result.load(tmp_path / "run").rows


def test_sections_are_there_only_with_their_data(comparison: Path, single: Single) -> None:
    assert sections(page(comparison)) == [
        "results",
        "differences",
        "run",
        "curves",
        "gains",
        "costs",
        "clients",
        "recipes",
    ]
    lone = page(single("fedavg"))
    assert sections(lone) == ["results", "run", "curves", "gains", "clients", "recipes"]
    assert figures(lone) == ["Who holds which classes", "Accuracy and loss", "The worst decile, and the others"]
    assert "per virtual time" not in lone


def test_fedslr_shows_ranks_and_sparsity(single: Single) -> None:
    path = single("fedslr", method={"name": "fedslr", "rank_penalty": 0.05, "sparsity": 0.02})
    text = page(path)
    assert {"Rank of the shared model", "Sparsity of the personal models"} <= set(figures(text))
    forms = [entry for entry in RunDirectory(path).metrics() if entry["event"] == "form"]
    assert [entry["number"] for entry in forms] == [0, 1, 2, 3]
    assert all(0 < entry["density"] < 1 for entry in forms)
    zeros = [100 * (1 - entry["density"]) for entry in forms]
    assert f"fedslr from {zeros[0]:.4g} to {zeros[-1]:.4g}" in text


def test_quped_shows_centers_of_each_kind_of_device(single: Single) -> None:
    devices = [{"name": "small", "share": 0.5, "bits": 1}, {"share": 0.5, "bits": 2}]
    model = {"name": "mlp", "hidden": [12, 12]}
    path = single("quped", method={"name": "quped", "center_lr": 0.01}, devices=devices, model=model)
    text = page(path)
    assert "Centers on the move" in figures(text)
    assert "Sparsity of the personal models" not in figures(text)
    assert re.findall(r"<h4>(quped, .*?)</h4>", text) == [
        "quped, small: 3.weight",
        "quped, devices 2: 3.weight",
    ]
    forms = [entry for entry in RunDirectory(path).metrics() if entry["event"] == "form"]
    assert "By device profile" in figures(text)
    assert {entry["device"]: len(entry["centers"]["3.weight"]) for entry in forms} == {0: 2, 1: 4}


def test_a_cloud_has_virtual_time(single: Single) -> None:
    text = page(single("fedbcd", **CLOUD))
    assert "per virtual time" in text
    assert Tables(text).tables[0][0][-2] == "virtual\ntime"
    assert "By server" in figures(text)
    assert "server" in [column["key"] for column in embedded(text)["columns"]]


def test_names_are_not_markup(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\"'&</title><!--"
    generator = np.random.default_rng(0)
    rows = Ragged.from_lists([range(10), range(10, 20)])
    data = make_federated(
        name=evil,
        x=torch.from_numpy(generator.normal(size=(20, 3)).astype("float32")),
        y=torch.arange(20) % 2,
        classes=2,
        train=rows,
        validation=Ragged.empty(2),
        test=rows,
        seen=np.arange(2),
        unseen=np.arange(0),
        client_names=(evil, "</script>"),
        label_names=(evil, "b"),
        notes=(evil,),
    )
    recipe = {"rounds": 2, "label": evil, "method": {"name": "ditto"}, "model": {"name": "mlp", "hidden": [4]}}
    personafl.run(recipe, data=data, out=tmp_path / "run")
    text = (tmp_path / "run" / "report.html").read_text()
    assert "<script>alert" not in text
    assert text.count("<script") == text.count("</script>") == 2
    assert "<!--" not in text
    assert {line[1] for line in embedded(text)["lines"]} == {evil, "</script>"}


def test_a_page_needs_nothing_from_elsewhere(comparison: Path) -> None:
    text = page(comparison)
    assert not re.findall(r'(?:src|href|action)="(?!#|data:|[\w./-]+\.toml")', text)
    assert "default-src 'none'" in text
    assert len(text) < 1_500_000


def test_recipes_and_links_are_exact(comparison: Path, tmp_path: Path) -> None:
    path = write_page([comparison], tmp_path / "deep.html")
    text = path.read_text()
    found = re.search(r"<pre><code>(.*?)</code></pre></details>", text, re.DOTALL)
    assert found
    assert unescape(found[1]) == (comparison / "comparison.toml").read_text()
    links = set(re.findall(r'href="([^"#]*\.toml)"', text))
    assert len(links) == 7
    assert all((tmp_path / link).is_file() for link in links)


def test_several_runs_of_one_split_share_a_page(comparison: Path, single: Single, tmp_path: Path) -> None:
    text = page(comparison, single("finetune"))
    assert [line[0] for line in Tables(text).tables[0][1:]] == ["fedavg", "ditto", "local", "finetune"]
    both = page(comparison, single("ditto"))
    named = [line[0] for line in Tables(both).tables[0][1:]]
    assert named == ["fedavg", "ditto (small)", "local", "ditto (ditto)"]


def test_two_comparisons_are_side_by_side(comparison: Path, tmp_path: Path) -> None:
    longer = tmp_path / "longer"
    personafl.compare({**SMALL, "rounds": 5}, methods=["ditto", "local", "apfl"], seeds=[1, 2], out=longer)
    text = page(comparison, longer)
    assert sections(text)[:3] == ["results", "sides", "differences"]
    side, changed = Tables(text).tables[2:4]
    assert side[0] == ["method", "small", "longer", "longer\n− small", "interval", "clients\nbetter", "clients\nworse"]
    assert {line[0] for line in side[1:]} == {"ditto", "local"}
    for line in side[1:]:  # of seed 1 alone
        wanted = {"model": "personal", "clients": "seen", "split": "test"}
        rows = [Result.load(path / f"{line[0]}-seed1").rows for path in (comparison, longer)]
        one, other = (100 * row["accuracy"] for part in rows for row in part if wanted.items() <= row.items())
        assert line[1:3] == [f"{one:.1f}", f"{other:.1f}"]
        assert float(line[3].split()[0].replace("−", "-")) == pytest.approx(other - one, abs=0.051)
    assert changed[1:] == [
        ["rounds", "4", "5"],
        ["compare.methods", "fedavg, ditto, local", "ditto, local, apfl"],
        ["compare.seeds", "0, 1", "1, 2"],
    ]
    (found,) = re.findall(r'<p class="found">(.*?)</p>', text)
    assert found.startswith("Of 2 methods in both, ")
    assert "in longer than in small" in found
    assert "sides" not in sections(page(comparison))


def test_two_runs_of_a_method_are_side_by_side(single: Single, tmp_path: Path) -> None:
    """One directory's name is as the other's, so that both are called with what they are in."""
    path = tmp_path / single("ditto").name
    personafl.run({**SMALL, "rounds": 3, "method": {"name": "ditto"}}, out=path)
    text = page(single("ditto"), path)
    first, second = (f"{where.parent.name}/ditto" for where in (single("ditto"), path))
    assert [line[0] for line in Tables(text).tables[0][1:]] == [f"ditto ({first})", f"ditto ({second})"]
    (found,) = re.findall(r'<p class="found">(.*?)</p>', text)
    assert {f"ditto in {first}", f"ditto in {second}"} <= set(re.findall(r"ditto in \S+/ditto", found))


def test_other_data_cannot_be_compared(comparison: Path, single: Single) -> None:
    other = single("ditto", data=SMALL["data"] | {"unseen": 3})
    with pytest.raises(BadInput, match="nothing can be paired, so make a page of each"):
        page(comparison, other)
