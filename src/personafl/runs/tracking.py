"""Metrics also where people already look: TensorBoard, MLflow, Weights & Biases (offline).

The run directory stays the truth. A sink is sent the metrics of a round as one step, when the next round begins or the
run ends. After a stop the run goes back to its checkpoint, and so do the sinks: what lies in the run directory is
written anew from metrics.jsonl, and MLflow is sent only what it does not have.
"""

from __future__ import annotations

import importlib.util
import math
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from personafl.errors import BadInput
from personafl.recipe.values import flat
from personafl.storage.files import read_json, write_json

if TYPE_CHECKING:
    from personafl.recipe.recipe import Recipe

Values = dict[str, float]


class Sink(Protocol):
    """Where metrics go besides the run directory."""

    def start(self, run: Path, recipe: Recipe) -> int:
        """Begin, or begin again after a stop; return the last step (rounds done) that is there already, −1 for none."""
        ...

    def metrics(self, step: int, values: Values) -> None:
        """Write the values of one step; steps rise."""
        ...

    def finish(self, done: bool) -> None:
        """Close; `done` says whether the run came to its end."""
        ...


def check_tracking(names: Iterable[str]) -> None:
    """Fail if a sink's package is not installed; a sink's name is that of its package and of our extra."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise BadInput(f"tracking: {name} is not installed; run: pip install 'personafl[{name}]'")


class Tracker:
    """Sends the metrics of a run to the sinks of its recipe; one that fails is left out, and the run goes on."""

    def __init__(self, recipe: Recipe, run: Path, past: Iterable[Mapping[str, Any]]) -> None:
        """Begin; `past` are the metrics that the run directory has."""
        self._rounds = recipe.rounds
        self._sinks: dict[str, Sink] = {name: _SINKS[name]() for name in recipe.tracking}
        self._last: dict[str, int] = {}  # sink -> the last step that it has
        self._step, self._values = 0, Values()
        for name, sink in self._sinks.items():
            try:
                self._last[name] = sink.start(run, recipe)
            except Exception as error:  # of the sink's package
                raise BadInput(f"tracking: {name} cannot be written to: {_first_line(error)}") from error
        for entry in past if self._sinks else ():
            self.metrics(entry)

    def metrics(self, entry: Mapping[str, Any]) -> None:
        """Take a line of metrics.jsonl."""
        if not self._sinks:
            return
        step = entry["number"] + 1
        if step != self._step:
            self._send()
            self._step, self._values = step, Values()
        self._values |= _scored(entry) if entry["event"] == "score" else _trained(entry)

    def finish(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add the result to the last step and close."""
        self._step = self._rounds
        for row in rows:
            self._values |= _scored(row)
        self._send()
        self.close(done=True)

    def close(self, done: bool = False) -> None:
        """Close the sinks; what was not sent is sent when the run goes on."""
        self._each(lambda sink: sink.finish(done))
        self._sinks = {}

    def _send(self) -> None:
        if self._values:
            step, values = self._step, self._values
            late = [name for name in self._sinks if self._last[name] < step]
            self._each(lambda sink: sink.metrics(step, values), late)

    def _each(self, call: Callable[[Sink], None], names: Iterable[str] | None = None) -> None:
        for name in list(self._sinks if names is None else names):
            try:
                call(self._sinks[name])
            except Exception as error:  # of the sink's package, a server that is gone: no reason to lose the run
                del self._sinks[name]
                warnings.warn(f"tracking: {name} is left out from here on: {_first_line(error)}", stacklevel=2)


def _trained(entry: Mapping[str, Any]) -> Values:
    """Return the numbers of a round."""
    numbers = {key: value for key, value in entry.items() if isinstance(value, int | float) and key != "number"}
    return {f"round/{key}": float(value) for key, value in numbers.items()}


def _scored(entry: Mapping[str, Any]) -> Values:
    """Return the numbers of a scoring, or of a row of the result."""
    place = f"{entry['split']}/{entry['clients']}/{entry['model']}"
    found = {key: entry[key] for key in ("accuracy", "worst_decile", "loss")}
    return {
        f"{place}/{key}": float(value) for key, value in found.items() if value is not None and math.isfinite(value)
    }


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _settings(recipe: Recipe) -> dict[str, Any]:
    """Return what decides the run."""
    return dict(flat(recipe.model_dump(mode="json", exclude_none=True, exclude={"compare", "sweep", "tracking"})))


class _TensorBoard:
    """Event files in RUN/tensorboard."""

    def start(self, run: Path, recipe: Recipe) -> int:
        from torch.utils.tensorboard import SummaryWriter

        shutil.rmtree(run / "tensorboard", ignore_errors=True)
        self._writer: Any = SummaryWriter(str(run / "tensorboard"))
        self._writer.add_text("recipe", "".join(f"    {line}\n" for line in recipe.to_toml().splitlines()))
        return -1

    def metrics(self, step: int, values: Values) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, done: bool) -> None:
        self._writer.close()


class _Wandb:
    """An offline run in RUN/wandb, which `wandb sync` uploads."""

    def start(self, run: Path, recipe: Recipe) -> int:
        import wandb

        shutil.rmtree(run / "wandb", ignore_errors=True)
        quiet = wandb.Settings(silent=True, console="off")
        self._run: Any = wandb.init(
            mode="offline", dir=str(run), project=recipe.name, name=run.name, config=_settings(recipe), settings=quiet
        )
        return -1

    def metrics(self, step: int, values: Values) -> None:
        self._run.log(values, step=step)

    def finish(self, done: bool) -> None:
        self._run.finish(exit_code=0 if done else 1)


class _Mlflow:
    """A run on MLflow's server or in its local store: MLFLOW_TRACKING_URI, or what MLflow takes without it."""

    def start(self, run: Path, recipe: Recipe) -> int:
        import mlflow

        note = run / "mlflow.json"
        known = read_json(note) if note.exists() else None
        uri = known["uri"] if known else mlflow.get_tracking_uri()
        self._client: Any = mlflow.MlflowClient(uri)
        if known:
            self._id = known["run"]
            self._client.update_run(self._id, status="RUNNING")
            steps = [entry.step for entry in self._client.get_metric_history(self._id, _ALWAYS)]
            return max(steps, default=-1)
        found = self._client.get_experiment_by_name(recipe.name)
        experiment = found.experiment_id if found else self._client.create_experiment(recipe.name)
        self._id = self._client.create_run(experiment, run_name=run.name).info.run_id
        for key, value in _settings(recipe).items():
            self._client.log_param(self._id, key, str(value)[:500])
        write_json(note, {"run": self._id, "uri": uri})
        return -1

    def metrics(self, step: int, values: Values) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._id, [Metric(name, value, now, step) for name, value in values.items()])

    def finish(self, done: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if done else "KILLED")


_ALWAYS = "round/bytes_up"  # a metric that every round has
_SINKS: dict[str, Callable[[], Sink]] = {"tensorboard": _TensorBoard, "mlflow": _Mlflow, "wandb": _Wandb}
