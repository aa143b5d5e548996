"""sweep, plan and --track as a user meets them."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

Main = Callable[..., str]
QUICK = ["--partition", "classes:clients=6,per_client=3", "--rounds", "2", "model.name=linear", "data.validation=0.2"]


@pytest.fixture
def main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, called: Callable[..., tuple[int, str, str]]) -> Main:
    """Call the command line in this process in an empty folder; return its standard output, or error if it failed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def call(*words: str, code: int = 0) -> str:
        ended, out, err = called(*words)
        assert ended == code, err
        return err if code else out

    return call


@pytest.mark.system
def test_sweep_show_and_resume(main: Main) -> None:
    pytest.importorskip("optuna", reason="sweeps need the extra: pip install personafl[sweep]")
    sweep = ["sweep", *QUICK, "sweep.keys.training.lr=[0.1]", "--trials", "1", "--jobs", "1", "--seeds", "2"]
    sweep += ["engine.workers=2"]  # a trial may have processes of its own
    found = json.loads(main(*sweep, "--out", "s", "--json"))
    assert [(trial["number"], trial["state"], trial["values"]) for trial in found["trials"]] == [
        (0, "done", {"training.lr": 0.1})
    ]
    assert found["best"] == found["trials"][0]
    assert found["command"] == "personafl run s/best.toml"
    assert json.loads(main("show", "s", "--json")) == found
    assert json.loads(main("resume", "s", "--json")) == found
    text = main("show", "s")
    assert "1 of 1 trials (1 done)" in text
    assert "on test data: personafl run s/best.toml" in text
    assert json.loads(main("run", "s/best.toml", "--json"))["rows"][0]["seed"] == 2
    assert "exists already" in main(*sweep, "--out", "s", code=2)


def test_a_run_on_validation_data_is_shown_as_such(main: Main) -> None:
    assert "validation data" in main("run", *QUICK, "evaluation.split=validation", "--quiet")
    assert main("run", *QUICK, "evaluation.split=validation", "data.validation=0", code=2) == (
        "error: evaluation.split: there are no validation data to score on; set data.validation=0.2\n"
    )


def test_plan_prints_json_or_a_table(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("personafl.plan.estimate.ProcessPoolExecutor", lambda count, **_: ThreadPoolExecutor(count))
    found = json.loads(main("plan", *QUICK, "--method", "ditto", "--json"))
    assert [method["method"] for method in found["methods"]] == ["ditto"]
    assert found["total"].keys() == {"seconds", "memory", "disk", "bytes_up", "bytes_down"}
    assert "one run" in main("plan", "--method", "ditto", "--methods", "local", code=2)


def test_track_names_sinks(main: Main, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install personafl[tensorboard]")
    main("run", *QUICK, "--track", "tensorboard", "--out", "run", "--quiet")
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))
    assert "tracking" in main("run", *QUICK, "--track", "tensorbord", code=2)
