"""`personafl reproduce --check`: what it finds in presets that are wrong in one thing, and that ours are in order."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from personafl import cli
from personafl.papers import find, papers, presets
from personafl.papers.catalog import Differs, Paper, Printed
from personafl.papers.check import Checked, check, markdown
from personafl.papers.preset import SIZES
from personafl.papers.settings import Line, text_of
from personafl.papers.trial import lacking

PAPER = papers()["fedbcd"]
TEXTS = Path(__file__).resolve().parents[3] / "shared" / "papers"
FILES = {"fedalt": "fedalt-fedsim.txt", "fedslr": "fedslr.txt", "quped": "quped-arxiv.txt", "fedbcd": "fedbcd.txt"}
MARK = "<!-- checked -->\n"
DOCS = Path(__file__).resolve().parents[2] / "docs"
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


def small(
    differs: list[dict[str, Any]] | None = None, printed: list[dict[str, Any]] | None = None, *more: str
) -> Paper:
    """Return Figure 3(a) in small with this printed and this said to differ, and changes to its recipe."""
    setting = PAPER.settings["a"]
    changed = setting.small.model_copy(update={"changes": (*setting.small.changes, *more)})
    return PAPER.model_copy(
        update={
            "differs": tuple(Differs.model_validate(group) for group in differs or []),
            "printed": tuple(Printed.model_validate(group) for group in printed or []),
            "settings": {"a": setting.model_copy(update={"small": changed})},
            "tables": {"figure3a": PAPER.tables["figure3a"]},
        }
    )


def checked(*given: Any) -> Checked:
    (preset,) = presets(small(*given), ["figure3a"], "small")
    return check(preset)


def line(found: Checked, key: str, run: str = "") -> Line:
    return next(line for line in found.lines if line.key == key and (not run or not line.runs or run in line.runs))


def printed(values: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    return [{"where": "§5", "values": values, **more}]


def test_a_setting_that_the_paper_prints_is_the_same() -> None:
    found = checked(
        [], printed({"training.lr": 0.05, "rounds": {"value": 80, "text": "2 hours", "how": "of 40 rounds"}})
    )
    assert not found.problems
    assert line(found, "training.lr").where == "§5"
    assert line(found, "rounds").paper == "2 hours (of 40 rounds)"
    assert line(found, "training.batch").paper == "not printed"
    assert found.data == "digits: 1,797 samples, dealt to 50 clients"


def test_a_difference_is_found_until_the_preset_says_why() -> None:
    wrong = printed({"training.lr": 0.005})
    (problem,) = checked([], wrong).problems
    assert problem == "training.lr: 0.05 here, 0.005 in the paper (§5); change it, or say why in [[differs]]"
    found = checked([{"why": {"training": "few rounds"}}], wrong)  # a key stands for those below it
    assert not found.problems
    assert line(found, "training.lr").why == "few rounds"
    assert checked([{"why": {"training.lr": "few rounds"}, "sizes": ["paper"]}], wrong).problems
    assert checked([{"why": {"training.lr": "few rounds"}, "runs": ["fedavg"]}], wrong).problems


def test_what_is_said_to_differ_must() -> None:
    (problem,) = checked([{"why": {"training.lr": "few rounds"}}], printed({"training.lr": 0.05})).problems
    assert problem == "training.lr is said to differ from the paper, and does not: few rounds"
    assert not checked([{"why": {"training.lr": "the paper leaves it open"}}]).problems


def test_runs_have_values_of_their_own_and_defaults_count() -> None:
    own = [*printed({"method.penalty": 1.0}, runs=["fedbcd"]), *printed({"method.penalty": 0.2}, runs=["fedbcd?"])]
    found = checked([], own)
    assert not found.problems
    assert line(found, "method.penalty", "fedbcdi").ours == "0.2"
    assert line(found, "training.momentum", "fedprox").ours == "0.9"
    assert line(found, "training.momentum", "fedavg").ours == "0.0"


def test_what_recipes_have_no_key_for_must_be_said() -> None:
    unknown = printed({"model.statistics": {"text": "batch normalization"}})
    (problem,) = checked([], unknown).problems
    assert problem.startswith("model.statistics: – here, batch normalization in the paper")
    assert not checked([{"why": {"model": "it has none"}}], unknown).problems


def test_facts_of_the_deal_and_of_the_network() -> None:
    facts = {"data.client.train": 28, "data.client.labels": 3, "data.clients": 50}
    network = {"model.parameters": {"value": 4_800, "within": 10}}  # 64·64 + 64 + 64·10 + 10 = 4,810
    assert not checked([], printed({**facts, **network})).problems
    assert len(checked([], printed({"data.client.train": [20, 28], "data.clients": 51})).problems) == 2


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("cloud.active=11", "fedavg cannot start: BadInput: cloud.active"),
        ("data.partition.samples=36", "cannot be dealt"),
        ("model={name='lenet'}", "fedbcdi cannot start: BadInput: model"),
    ],
)
def test_a_preset_that_cannot_start(change: str, text: str) -> None:
    problems = checked([], [], change).problems
    assert any(text in problem for problem in problems), problems


def test_a_preset_that_scores_validation_data_starts_without_its_data(tmp_path: Path) -> None:
    (preset,) = presets(papers()["pfllib"], ["fmnist"], "paper")
    assert preset.recipe(tmp_path).evaluation.split == "both"
    assert check(preset, tmp_path).problems == ()


def test_data_that_are_not_here_or_not_whole(tmp_path: Path) -> None:
    (preset,) = presets(PAPER, ["figure3d"], "paper")
    absent = check(preset, tmp_path)
    assert absent.data == "data not here"
    assert line(absent, "data.client.train").ours == "data not here"
    samples = np.repeat(np.arange(10), 6)
    images = np.zeros((60, 32, 32, 3), np.uint8)
    np.savez(tmp_path / "cifar10.npz", images=images, labels=samples, split=np.tile([0, 0, 1], 20))
    part = check(preset, tmp_path)
    assert part.data.startswith("cifar10.npz: only 60 of 60,000 samples, cannot be dealt: data.partition.")
    assert part.problems == absent.problems
    assert [entry.ours for entry in part.lines] == [entry.ours for entry in absent.lines]
    said = "fedbcd-d-paper is for the whole data set; cifar10.npz: only 60 of 60,000 samples"
    assert lacking(preset, preset.recipe(tmp_path)) == said


@pytest.mark.system
def test_our_presets_can_start_and_are_the_papers(tmp_path: Path) -> None:
    """All in one test, so that each data set is read once; and docs/reproduce.md has what the command prints."""
    if not SHARED.is_dir():
        pytest.skip("the real data sets (../shared/data) are not beside this checkout")
    whole = {"cifar10": tmp_path / "cifar10.npz"}
    subprocess.run([sys.executable, SHARED / "unpack.py", "cifar10", whole["cifar10"]], check=True)
    found = [
        check(preset, SHARED, {key: path for key, path in whole.items() if key in paper.datasets})
        for paper in papers().values()
        for size in SIZES
        for preset in presets(paper, list(paper.tables), size)
    ]
    problems = {one.preset.name: one.problems for one in found if one.problems}
    assert not problems, json.dumps(problems, indent=1, ensure_ascii=False)
    dealt = {one.preset.setting.at(one.preset.size).dataset for one in found if "dealt to" in one.data}
    assert dealt >= {"digits", "mnist", "cifar10", "cifar100", "agnews", "shakespeare", "fsdd"}
    page = (DOCS / "reproduce.md").read_text().partition(MARK)[2].strip().splitlines()
    printed = markdown([one for one in found if one.preset.size == "paper"]).strip().splitlines()
    assert page == printed, (
        "docs/reproduce.md is not up to date: make checked > page.md && mv page.md docs/reproduce.md"
    )


@pytest.mark.parametrize("paper", papers().values(), ids=lambda paper: paper.key)
def test_groups_are_about_settings_and_runs_that_exist(paper: Paper) -> None:
    runs = {
        name: {run for p in presets(paper, list(paper.tables), "small") if p.setting_name == name for run in p.runs}
        for name in paper.settings
    }
    for group in [*paper.differs, *paper.printed]:
        assert set(group.settings) <= set(paper.settings), group
        within = set().union(*(runs[name] for name in paper.settings if group.of_setting(name)))
        for pattern in group.runs:
            assert any(Differs(runs=(pattern,), why={}).of_run(run) for run in within), f"{pattern} in {group}"


def spellings(number: str) -> set[str]:
    """Return how a paper may print a number: 1000 also as 1,000, 5e-4 also as 5 × 10^{-4}."""
    value = float(number)
    found = {number, f"{value:g}"} | ({f"{int(value)}", f"{int(value):,}"} if value.is_integer() else set())
    if 0 < value < 1:
        digits, _, power = f"{value:e}".partition("e")
        digits, power = f"{float(digits):g}", f"{int(power)}"
        found |= {
            f"{digits}e{power}",
            f"{digits}e^{{{power}}}",
            f"{digits} \\times 10^{{{power}}}",
            f"{digits}×10^{{{power}}}",
        }
        found |= {f"{value:.10f}".rstrip("0")} | ({f"10^{{{power}}}"} if digits == "1" else set())
    return found


@pytest.mark.parametrize("paper", [papers()[key] for key in FILES], ids=lambda paper: paper.key)
def test_the_settings_are_printed_in_the_papers(paper: Paper) -> None:
    """Every number of the table, as it is said to be printed, is in the paper's text."""
    if not TEXTS.is_dir():
        pytest.skip("the papers' texts are not beside this checkout (../shared/papers)")
    text = (TEXTS / FILES[paper.key]).read_text()
    for group in paper.printed:
        for key, value in group.values.items():
            said = text_of(value.value) if value.text is None else value.text
            for number in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?:e-?\d+)?(?!\w)", said.replace(",", "")):
                there = any(re.search(rf"(?<![\d.]){re.escape(form)}(?!\d)", text) for form in spellings(number))
                assert there, f"{key} of {group.settings}: {said}"


def test_the_page_of_small_runs_says_what_their_presets_say() -> None:
    sections = re.split(r"(?m)^## (?=\w+/)", (DOCS / "reproduced.md").read_text())[1:]
    for section in sections:
        (preset,) = presets(*find(section.partition(":")[0]), "small")
        assert f"What differs from the paper: {preset.differs}." in section, preset.name


def test_markdown_joins_presets_that_agree() -> None:
    found = [check(preset) for preset in presets(PAPER, ["figure3a", "figure3b"], "small")]
    text = markdown(found)
    assert text.startswith("### fedbcd, size small\n\n| setting | of | ours | paper | where | why it differs |\n|")
    assert (
        "| training.batch | all | 8 | R = 32 | §5 | rate 0.05, batches of 8, 1 to 5 steps in place of epochs |\n"
        in text
    )
    assert "| data.partition.labels | a | 3 | diversity 3 |" in text
    assert "| data.partition.labels | b | 6 | diversity 6 |" in text


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["personafl", "reproduce", "--check", *words])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("personafl.papers.catalog.papers", lambda: {"fedbcd": small([], printed({"rounds": 80}))})
    code, out, _ = call("--size", "small")
    assert code == 0
    assert "fedbcd-a-small · figure3a" in out
    assert "digits: 1,797 samples, dealt to 50 clients" in out
    code, out, _ = call("fedbcd/figure3a", "--json", "--size", "small")
    assert code == 0
    (one,) = json.loads(out)
    assert one["name"] == "fedbcd-a-small"
    assert not one["problems"]
    monkeypatch.setattr("personafl.papers.catalog.papers", lambda: {"fedbcd": small([], printed({"rounds": 81}))})
    code, _, err = call("fedbcd", "training.lr=1")
    assert code == 2
    assert "training.lr=1: --check looks at presets as they are" in err
    code, out, err = call("--size", "small")
    assert code == 2
    assert "problem: rounds: 80 here, 81 in the paper" in out
    assert "1 of 1 presets are not in order: fedbcd-a-small: rounds: 80 here" in " ".join(err.split())
