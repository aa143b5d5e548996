"""The command line as a user meets it: listings, JSON, tables, progress."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from personafl.api.display import Display, facts, finished
from personafl.cli.tables import detail_tables, result_tables
from personafl.report.table import lines
from personafl.runs.listener import Progress
from personafl.simulate.simulator import Round
from waiting import until

Main = Callable[..., str]
QUICK = ["--partition", "classes:clients=6,per_client=3", "--rounds", "2", "model.name=mlp", "model.hidden=[8]"]
QUICK += ["data.validation=0.2", "data.unseen=2"]
ROW = {
    "method": str,
    "seed": int,
    "model": str,
    "clients": str,
    "split": str,
    "accuracy": float,
    "accuracy_weighted": float,
    "accuracy_std": float,
    "worst_decile": float,
    "bytes_up": int,
    "bytes_down": int,
    "parameters": int,
    "seconds": float,
}


@pytest.fixture
def main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, called: Any) -> Main:
    """Call the command line in this process in an empty folder; return its standard output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def call(*words: str, code: int = 0) -> str:
        ended, out, call.err = called(*words)  # type: ignore[attr-defined]
        assert ended == code, call.err  # type: ignore[attr-defined]
        return out

    return call


def strictly(text: str) -> Any:
    """Parse JSON as the standard has it, without NaN."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)


def test_help_starts_without_torch() -> None:
    code = "import sys; sys.argv=['personafl','compare','--help']; from personafl.cli import main\n"
    code += (
        "try: main()\nexcept SystemExit: pass\nassert not {'torch', 'pandas', 'sklearn', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--methods" in done.stdout


def test_help_names_every_command_and_the_first_step(main: Main) -> None:
    text = main("--help")
    for word in ("run", "compare", "resume", "show", "recipe", "methods", "models", "datasets", "data", "Start with"):
        assert word in text
    assert main(code=2).strip() == text.strip()
    assert main("--version").strip().count(".") == 2


@pytest.mark.parametrize("listing", ["methods", "datasets", "models"])
def test_listings(main: Main, listing: str) -> None:
    entries = strictly(main(listing, "--json"))
    assert all(entry["name"] and entry["summary"] for entry in entries)
    if listing != "models":
        assert all(isinstance(entry["paper"], str) for entry in entries)
    text = main(listing)
    assert all(entry["name"] in text for entry in entries)
    assert "…," not in text
    assert max(map(len, text.splitlines())) <= 80
    if listing == "methods":
        assert "Constant(" not in text
        assert {"fedavg", "fedprox", "fedadam", "local", "finetune", "ditto"} <= {entry["name"] for entry in entries}
        assert "server={lr=1.0}" in text
    if listing == "models":
        assert "hidden=[64]" in text


def test_recipe_prints_what_can_be_run_again(main: Main, tmp_path: Path) -> None:
    text = main("recipe", "training.lr=0.5")
    (tmp_path / "own.toml").write_text(text)
    assert "lr = 0.5" in text
    assert main("recipe", "own.toml") == text


@pytest.mark.system
def test_json_of_run_compare_show_and_resume(main: Main) -> None:
    given = strictly(main("compare", *QUICK, "--methods", "fedavg,local,ditto", "--seeds", "0,3", "--json"))
    assert main.err == ""  # type: ignore[attr-defined]
    assert given.keys() == {"run", "rows", "failures", "warnings", "found"}
    assert given["run"] == "runs/run-001"
    for row in given["rows"]:
        for key, kind in ROW.items():
            assert type(row[key]) is kind, key
        assert row["model"] in ("global", "personal", "chosen")
        assert row["clients"] in ("seen", "unseen")
        assert row["split"] in ("test", "validation")
        assert 0 <= row["worst_decile"] <= row["accuracy"] <= 1
        assert (row["share_hurt"] is None) == (row["model"] == "global" or row["method"] == "local")
    groups = {(r["method"], r["seed"], r["model"], r["clients"]) for r in given["rows"] if r["split"] == "test"}
    models = {"fedavg": ["global"], "local": ["personal"], "ditto": ["global", "personal", "chosen"]}
    assert groups == {
        (name, seed, model, clients)
        for name, own in models.items()
        for seed in (0, 3)
        for model in own
        for clients in ("seen", "unseen")
    }
    assert strictly(main("show", "runs/run-001", "--json")) == given
    assert strictly(main("resume", "runs/run-001", "--json")) == given
    one = strictly(main("run", *QUICK, "--method", "ditto", "--seed", "3", "--json"))
    assert one["run"] == "runs/run-002"
    timeless = [{**row, "seconds": 0} for row in one["rows"]]
    assert timeless == [{**r, "seconds": 0} for r in given["rows"] if (r["method"], r["seed"]) == ("ditto", 3)]


def test_tables_of_run_and_show(main: Main) -> None:
    text = main("run", *QUICK, "--method", "ditto")
    assert "2 rounds, loss" in main.err  # type: ignore[attr-defined]
    for word in ("4 seen clients", "2 unseen clients", "test data", "seed 0", "global", "personal", "chosen", "hurt"):
        assert word in text
    assert text.endswith("run directory: runs/run-001\nreport: runs/run-001/report.html\n")
    assert main("show", "runs/run-001") == text
    assert "weigh-" in main("show", "runs/run-001", "--details")
    quiet = main("run", *QUICK, "--quiet")
    assert main.err == ""  # type: ignore[attr-defined]
    assert "hurt" not in quiet
    assert "personal" not in quiet


def test_overrides_win_over_options_and_options_over_the_file(main: Main, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('rounds = 5\n[data.partition]\nkind = "classes"\nclients = 9\n')
    words = ["run", "own.toml", "--rounds", "1", "--partition", "iid:clients=3", "data.partition.clients=4", "-q"]
    main(*words, "training.optimizer=adam")
    text = (tmp_path / "runs/own-001/recipe.toml").read_text()
    for line in ("rounds = 1", 'kind = "iid"', "clients = 4", 'optimizer = "adam"', 'name = "own"'):
        assert line in text


def test_methods_left_out_may_have_options_in_the_recipe(main: Main, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(
        '[compare]\nmethods = ["fedavg", "ditto"]\n[compare.options.ditto]\npull = 1.0\n'
    )
    rows = strictly(main("compare", "own.toml", *QUICK, "--methods", "fedavg", "--json"))["rows"]
    assert {row["method"] for row in rows} == {"fedavg"}


def test_data_describe(main: Main, tmp_path: Path) -> None:
    text = main("data", "describe", "--partition", "classes:clients=6,per_client=3", "--svg", "picture.svg")
    assert "6 (6 seen, 0 unseen)" in text
    assert max(map(len, text.splitlines())) <= 80
    assert (tmp_path / "picture.svg").read_text().startswith("<svg")


def row(method: str, seed: int, model: str = "personal", **values: Any) -> dict[str, Any]:
    basis = {"clients": "seen", "split": "test", "count": 1000, "accuracy": 0.8, "worst_decile": 0.5, "share_hurt": 0.1}
    more = {"bytes_up": 10**10, "bytes_down": 10**10, "bytes_stored": 36_312, "seconds": 3600.0}
    return {"method": method, "seed": seed, "model": model, **basis, **more, **values}


def printed(parts: Any, width: int) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return capture.get()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_number_is_ever_cut(width: int) -> None:
    """Two seeds 30 points apart have std 30·√2/2 = 21.2: the widest cells there are."""
    rows = [
        row(method, seed, model, accuracy=accuracy, worst_decile=accuracy - 0.2, share_hurt=accuracy)
        for method in ("fedadagrad", "finetune")
        for model in ("global", "personal", "chosen")
        for seed, accuracy in ((0, 0.65), (1, 0.95))
    ]
    text = printed(result_tables(rows, width), width)
    assert "…" not in text
    assert text.count("±21.2") == 2 * 6
    assert text.count("80.0") == 2 * 5
    assert "10,000" in text
    assert "3,600" in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width


def test_the_table_has_sizes_where_they_differ() -> None:
    """QuPeD's shared model takes 36.3 kB, its personal ones 21.1 and 21.3, so 21.2 on average; Ditto's all 36.3."""
    ditto, shared = row("ditto", 0), row("quped", 0, "global")
    small = [row("quped", seed, bytes_stored=size) for seed, size in ((0, 21_100), (1, 21_300))]
    text = printed(result_tables([ditto, shared, *small], 100), 100)
    assert [line.split()[-4] for line in text.splitlines() if line.startswith(("ditto", "quped"))] == ["36.3", "21.2"]
    assert "size: kB" in text
    assert "kB" not in printed(result_tables([ditto], 100), 100)


def test_the_table_says_mean_and_std_over_seeds() -> None:
    """Accuracies 0.7 and 0.9: mean 80.0, sample standard deviation 20/√2 = 14.1."""
    text = printed(result_tables([row("ditto", 0, accuracy=0.7), row("ditto", 1, accuracy=0.9)], 80), 80)
    assert "80.0±14.1" in text
    assert "mean ± std over 2 seeds" in text
    assert "1000 seen clients · test data" in text
    assert "global:" not in text


def test_a_lone_method_is_not_the_best() -> None:
    alone, *_ = lines([row("ditto", 0)])
    assert not alone.best
    first, second = lines([row("ditto", 0), row("fedalt", 0, accuracy=0.7)])
    assert (first.best, second.best) == ({1}, set())


def test_what_was_found_is_below_the_table() -> None:
    text = printed(result_tables([row("ditto", 0)], 80, found="ditto is good."), 80)
    assert text.index("ditto  ") < text.index("ditto is good.\n\n") < text.index("personal:")


def test_details_show_intervals_and_weighted_means() -> None:
    more = {"accuracy_weighted": 0.812, "accuracy_std": 0.123, "quantiles": {"0.50": 0.834}, "parameters": 4810}
    hurt = {"share_hurt_low": 0.052, "share_hurt_high": 0.187, "hurt_mean_loss": 0.031}
    text = printed(detail_tables([row("ditto", 0, **more, **hurt)]), 80)
    for number in ("80.0", "81.2", "12.3", "50.0", "83.4", "10.0", "5.2–18.7", "3.1", "4,810"):
        assert number in text


def progress(number: int, rounds: int, loss: float = 0.5, accuracy: float | None = 0.75) -> Progress:
    round_ = Round(number, loss, 20, 100, 100, {})
    return Progress(round_, rounds, accuracy, seconds=2.0 * (number + 1), done=number + 1)


def test_progress_shows_round_loss_accuracy_speed_and_what_is_left() -> None:
    """20 clients in 2 s a round: 10 clients/s; 99 − 9 = 90 rounds left: 3 minutes."""
    text = facts(progress(8, 99))
    assert text == "round  9/99 loss 0.500 acc 75.0% 10 clients/s ETA 3:00"
    assert "loss – acc   –  " in facts(progress(0, 9, math.nan, None))
    assert finished(progress(8, 9)) == "9 rounds, loss 0.500, 10 clients/s, 18.0 s"
    slow = dataclasses.replace(progress(8, 99), seconds=900.0)  # 20 clients in 100 s: 0 clients/s would say nothing
    assert "0.2 clients/s" in facts(slow)


def display_of(terminal: bool, quiet: bool = False) -> str:
    console = Console(width=80, force_terminal=terminal, color_system=None, legacy_windows=False)
    display = Display(console, quiet)
    with console.capture() as capture, display.open(["fedavg", "ditto"]):
        for name in ("fedavg", "ditto"):
            listener = display.listener(name)
            for number in range(3):
                if listener is not None:
                    listener(progress(number, 3))
    return capture.get()


def test_display_in_a_pipe_on_a_terminal_and_quiet() -> None:
    lines = "fedavg 3 rounds, loss 0.500, 10 clients/s, 6.00 s\nditto  3 rounds, loss 0.500, 10 clients/s, 6.00 s\n"
    assert display_of(terminal=False) == lines
    live = display_of(terminal=True)
    for line in lines.splitlines():
        assert line in live
    assert display_of(terminal=True, quiet=True) == ""


@pytest.mark.system
def test_ctrl_c_saves_says_how_to_go_on_and_exits_130(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [Path(sys.executable).with_name("personafl"), "compare", *QUICK, "rounds=100000", "--json"]
    process = subprocess.Popen(
        [*command, "--methods", "fedavg,local", "--out", "run", "engine.checkpoint_seconds=0"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until((tmp_path / "run/fedavg-seed0/checkpoint.json").exists, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out) == (130, "")
    assert err.startswith("stopped after round ")
    assert err.endswith("continue with: personafl resume run\n")
    assert err.count("\n") == 1
    shown = subprocess.run([command[0], "show", "run"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert shown.returncode == 0
    assert "rounds done" in shown.stderr
    assert "1 of its runs not begun; continue with: personafl resume run" in shown.stderr
