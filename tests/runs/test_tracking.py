"""Tracking: the metrics of a run arrive once each, also if it was stopped and continued; with the real packages."""

import struct
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from personafl import BadInput, Recipe, api
from personafl.runs import tracking
from personafl.runs.listener import Progress, Tuning
from personafl.runs.result import Result
from personafl.storage.rundir import RunDirectory

RECIPE: dict[str, Any] = {
    "name": "small",
    "rounds": 5,
    "data": {"partition": {"kind": "classes", "clients": 4, "per_client": 3}},
    "model": {"name": "mlp", "hidden": [8]},
    "method": {"name": "ditto"},
    "evaluation": {"every": 2},
    "engine": {"checkpoint_seconds": 1000.0},  # a run that dies begins again at round 1
}
SCORE = "test/seen/personal/accuracy"


class Death(Exception):
    """The process dies."""


def stopped_and_continued(name: str, out: Path) -> Result:
    """Run with a sink, die in round 4, and go on."""

    def die(progress: Progress | Tuning) -> None:
        if isinstance(progress, Progress) and progress.round.number == 3:
            raise Death

    recipe = RECIPE | {"tracking": [name]}
    with pytest.raises(Death):
        api.run(recipe, out=out, listener=die)
    return api.run(recipe, out=out, resume=True)


def expected(result: Result, out: Path) -> dict[str, list[tuple[int, float]]]:
    """Return (step, value) of two metrics, by the run directory."""
    lines = RunDirectory(out).metrics()
    scores = [line for line in lines if line["event"] == "score" and line["model"] == "personal"]
    last = next(r for r in result.rows if (r["model"], r["split"]) == ("personal", "test"))
    return {
        "round/loss": [(line["number"] + 1, line["loss"]) for line in lines if line["event"] == "round"],
        SCORE: [*((line["number"] + 1, line["accuracy"]) for line in scores), (5, last["accuracy"])],
    }


def close(found: dict[str, list[tuple[int, float]]], wanted: dict[str, list[tuple[int, float]]]) -> bool:
    return all(
        [step for step, _ in found[name]] == [step for step, _ in pairs]
        and [value for _, value in found[name]] == pytest.approx([value for _, value in pairs], rel=1e-6)
        for name, pairs in wanted.items()
    )


class Recorder:
    """A sink that keeps all it is sent, over all its lives."""

    sent: list[tuple[int, dict[str, float]]]
    ends: list[bool]
    known: int  # the last step that it says to have

    def start(self, run: Path, recipe: Recipe) -> int:
        return type(self).known

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self.sent.append((step, values))

    def finish(self, done: bool) -> None:
        self.ends.append(done)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    Recorder.sent, Recorder.ends, Recorder.known = [], [], -1
    monkeypatch.setitem(tracking._SINKS, "wandb", Recorder)
    monkeypatch.setattr(tracking, "check_tracking", lambda names: None)
    monkeypatch.setattr("personafl.runs.build.check_tracking", lambda names: None)
    return Recorder


def test_every_round_is_one_step_and_the_last_has_the_result(recorder: type[Recorder], tmp_path: Path) -> None:
    result = api.run(RECIPE | {"tracking": ["wandb"]}, out=tmp_path / "run")
    assert [step for step, _ in recorder.sent] == [1, 2, 3, 4, 5]
    assert recorder.ends == [True]
    found = {
        name: [(step, values[name]) for step, values in recorder.sent if name in values]
        for name in ("round/loss", SCORE)
    }
    assert close(found, expected(result, tmp_path / "run"))
    assert recorder.sent[0][1].keys() == {
        f"round/{key}" for key in ("loss", "clients", "bytes_down", "bytes_up", "seconds")
    }


def test_a_sink_that_has_steps_is_not_sent_them_again(recorder: type[Recorder], tmp_path: Path) -> None:
    recorder.known = 3
    api.run(RECIPE | {"tracking": ["wandb"]}, out=tmp_path / "run")
    assert [step for step, _ in recorder.sent] == [4, 5]


def test_a_run_survives_a_sink_that_fails(recorder: type[Recorder], tmp_path: Path) -> None:
    def fail(self: Recorder, step: int, values: dict[str, float]) -> None:
        raise ConnectionError("server gone\nat length")

    recorder.metrics = fail  # type: ignore[method-assign]
    try:
        with pytest.warns(UserWarning, match="wandb is left out from here on: server gone$"):
            result = api.run(RECIPE | {"tracking": ["wandb"]}, out=tmp_path / "run")
    finally:
        del recorder.metrics
    assert result.rows


def test_a_package_that_is_missing_is_named_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in ("tensorboard", "mlflow", "wandb"):
        with pytest.raises(BadInput, match=rf"tracking: {name} is not installed; .*personafl\[{name}\]"):
            api.run(RECIPE | {"tracking": [name]}, out=tmp_path / "run")
    with pytest.raises(BadInput, match=r"tracking.*'tensorboard', 'mlflow' or 'wandb'"):
        Recipe.parse({"tracking": ["tensorbord"]})
    assert not list(tmp_path.iterdir())


def test_tensorboard_has_each_step_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install personafl[tensorboard]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = stopped_and_continued("tensorboard", tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"), purge_orphaned_data=False).Reload()
    wanted = expected(result, tmp_path / "run")
    found = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in wanted}
    assert close(found, wanted)


@pytest.mark.system
@pytest.mark.filterwarnings("ignore")  # its own
def test_mlflow_has_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="pip install personafl[mlflow]")
    pytest.importorskip("sqlalchemy", reason="mlflow's local store needs sqlalchemy")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    result = stopped_and_continued("mlflow", tmp_path / "run")
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("small").experiment_id])
    assert (run.info.status, run.info.run_name, run.data.params["method.name"]) == ("FINISHED", "run", "ditto")
    wanted = expected(result, tmp_path / "run")
    history = {name: client.get_metric_history(run.info.run_id, name) for name in wanted}
    assert close({name: [(entry.step, entry.value) for entry in part] for name, part in history.items()}, wanted)


@pytest.mark.system
@pytest.mark.filterwarnings("ignore")  # its own
def test_wandb_has_one_offline_run_with_each_step_once(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="pip install personafl[wandb]")
    result = stopped_and_continued("wandb", tmp_path / "run")
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    rows = history_of(file)
    assert not [step for step, count in Counter(row["_step"] for row in rows).items() if count > 1]
    wanted = expected(result, tmp_path / "run")
    found = {name: [(int(row["_step"]), row[name]) for row in rows if name in row] for name in wanted}
    assert close(found, wanted)


def history_of(file: Path) -> list[dict[str, float]]:
    """Read the history of a .wandb file: a header of 7 bytes, then LevelDB's log of protobuf records."""
    import json

    from wandb.proto import wandb_internal_pb2

    data, place, whole, rows = file.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:  # the rest of a block that no header fits into
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # full, or the last piece
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows
