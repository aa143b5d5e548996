"""Results per client, of one or many runs, as one table."""

import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from personafl import api, cli

RECIPE = {
    "rounds": 2,
    "data": {"partition": {"kind": "classes", "clients": 6, "per_client": 3}, "unseen": 2},
    "model": {"name": "linear"},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison `all` of two methods, and a run `one` on another split."""
    folder = tmp_path_factory.mktemp("runs")
    api.compare(RECIPE, methods=["fedavg", "local"], out=folder / "all")
    api.run(RECIPE | {"seed": 5}, out=folder / "one")
    return folder


@pytest.fixture
def main(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.chdir(runs)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["personafl", "clients", *words])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    return call


Main = Callable[..., tuple[int, str, str]]


def test_a_table_names_run_method_seed_and_split(runs: Path) -> None:
    table = api.joined(api.results_of(runs / "all"))
    assert list(table.columns[:8]) == ["run", "method", "seed", "data", "client", "name", "clients", "train"]
    assert table["method"].tolist() == ["fedavg"] * 6 + ["local"] * 6
    assert table["data"].nunique() == 1
    fedavg, local = (part for _, part in table.groupby("method"))
    assert fedavg["personal_test_accuracy"].isna().all()  # it has no such model
    assert local["personal_test_accuracy"].notna().all()
    alone = api.results_of(runs / "one")[0].to_pandas()
    assert alone["data"].iloc[0] != table["data"].iloc[0]
    assert (alone["seed"] == 5).all()


def test_csv_and_parquet_are_the_same_table(main: Main, runs: Path) -> None:
    pytest.importorskip("pyarrow", reason="pip install personafl[parquet]")
    code, printed, err = main("all", "one")
    assert (code, err) == (0, "")
    assert main("all", "one", "--out", "table.csv") == (0, "", "18 lines: table.csv\n")
    assert main("all", "one", "--out", "table.parquet")[0] == 0
    assert (runs / "table.csv").read_text() == printed
    written = pd.read_parquet(runs / "table.parquet")
    pd.testing.assert_frame_equal(written, api.joined([*api.results_of(Path("all")), *api.results_of(Path("one"))]))


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["all", "--out", "x.xlsx"], ["--out x.xlsx", ".csv or .parquet"]),
        (["all", "all"], ["all: is there twice"]),
        (["nowhere"], ["nowhere: not a run directory"]),
        (["half"], ["half: unfinished", "personafl resume half"]),
    ],
)
def test_what_cannot_be_written_is_named(main: Main, runs: Path, words: list[str], texts: list[str]) -> None:
    half = runs / "half"
    half.mkdir(exist_ok=True)
    (half / "recipe.toml").write_text((runs / "one" / "recipe.toml").read_text())
    code, out, err = main(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert all(text in err for text in texts), err


def test_parquet_without_its_package_is_named(main: Main, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = main("all", "--out", "new.parquet")
    assert code == 2
    assert "pip install 'personafl[parquet]'" in err
    assert not (runs / "new.parquet").exists()
