"""`personafl reproduce` as a user meets it: run, stop, resume, read again, and directories that cannot be compared."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

Main = Callable[..., tuple[int, str, str]]
TINY = ["rounds=2", "data.partition.clients=10", "model.name=mlp", "model.hidden=[8]", "--seeds", "0,1", "--quiet"]


@pytest.fixture
def main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, called: Main) -> Main:
    """Call the command line in an empty folder; return exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return called


@pytest.mark.system
def test_a_figure_is_run_stopped_resumed_and_read_again(main: Main) -> None:
    code, out, _ = main("reproduce", "fedslr/figure5", *TINY, "--out", "figure")
    assert code == 0
    assert "FedSLR ≤ FedAvg:" in out
    told = " ".join(out.split())  # lines break where the terminal ends
    assert "What differs from the paper" in told
    assert "its recipe was changed, see figure/comparison.toml" in told

    shutil.rmtree("figure/scaffold-seed1")
    code, out, err = main("reproduce", "--from", "figure", "--json")
    assert code == 0
    assert "figure: unfinished; continue with: personafl resume figure" in err
    (table,) = json.loads(out)
    by_claim = {claim["claim"]: claim for claim in table["claims"]}
    assert by_claim["FedAvg ≤ SCAFFOLD"]["seeds"] == 1
    assert by_claim["FedAvg ≤ SCAFFOLD"]["verdict"] == "not shown"

    assert main("resume", "figure", "--quiet")[0] == 0
    code, out, _ = main("reproduce", "--from", "figure", "--markdown")
    assert code == 0
    assert "| FedAvg ≤ SCAFFOLD | holds |" in out
    assert "    personafl reproduce fedslr/figure5\n" in out

    code, out, _ = main("reproduce", "fedslr/figure5", "--from", "figure", "--json")
    (named,) = json.loads(out)
    assert named["claims"] == json.loads(main("reproduce", "--from", "figure", "--json")[1])[0]["claims"]


def test_runs_of_two_splits_are_not_compared(main: Main) -> None:
    plain = ["--rounds", "1", "model.name=mlp", "model.hidden=[8]", "--quiet", "--methods"]
    assert main("compare", *plain, "fedavg", "--out", "a", "--partition", "iid:clients=5")[0] == 0
    assert main("compare", *plain, "scaffold", "--out", "b", "--partition", "iid:clients=6")[0] == 0
    code, _, err = main("reproduce", "fedslr/figure5", "--from", "a", "--from", "b")
    assert code == 2
    assert "b/scaffold-seed0: seed 0 has another split than in a/fedavg-seed0" in " ".join(err.split())
    assert main("reproduce", "fedslr/figure5", "--from", ".")[2] == err  # a folder of comparisons
    code, _, err = main("reproduce", "fedslr/figure5", "--from", "a", "--from", "a")
    assert code == 2
    assert "fedavg with seed 0 is also in a/fedavg-seed0; give one" in " ".join(err.split())
    code, _, err = main("reproduce", "--from", "a")
    assert code == 2
    assert "a: not made by reproduce; say which table it is" in " ".join(err.split())
    code, _, err = main("reproduce", "fedbcd/figure4ab", "--from", "b")
    assert code == 2
    assert "b: has no finished run of sync, async-3" in " ".join(err.split())
    Path("a/fedavg-seed0/result.json").write_text("{}")
    code, _, err = main("reproduce", "fedslr/figure5", "--from", "a")
    assert code == 2
    assert "a/fedavg-seed0/result.json: not a result of this version" in " ".join(err.split())


def test_the_list_names_every_table(main: Main) -> None:
    code, out, _ = main("reproduce")
    assert code == 0
    entries = json.loads(main("reproduce", "--json")[1])
    assert len(entries) > 50
    assert all(entry["name"] in out for entry in entries)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["fedslr/table3", "--size", "paper"], "needs the data set 'cifar100'"),
        (["fedslr/table3", "quped/table1"], "only one PAPER or PAPER/TABLE can be given"),
        (["fedslr/table3", "--seeds", "a"], "--seeds a: give numbers"),
        (["fedslr/table3", "--dataset", "cifar100"], "--dataset cifar100: write KEY=PATH"),
        (["fedslr/table3", "training.ls=1"], "training.ls: unknown key"),
        (["--from", "absent"], "absent: not a run directory"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(words: list[str], text: str, main: Main, tmp_path: Path) -> None:
    code, out, err = main("reproduce", *words)
    assert code == 2
    assert text in " ".join(err.split())
    assert not out
    assert not list(tmp_path.iterdir())


def test_what_is_not_made_by_runs_says_what_shows_it(main: Main) -> None:
    code, out, err = main("reproduce", "fedalt/table10")
    assert code == 0
    assert "fedalt/table10: not made by runs; instead: personafl model describe" in err
    assert not out.strip()
