"""A sweep from start to best recipe: this process draws and judges trials, workers run them.

    sweep.toml    the recipe with its section [sweep]
    journal.log   all trials with their values and scores, as Optuna keeps them
    trials/       the runs of trials that are on; removed when a trial ends
    best.toml     the best recipe so far
    trials.csv    all trials, when the sweep stops or ends

Trials are scored on validation data; their runs never read the test data.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import personafl.data.build as data_build
from personafl.errors import BadInput, Diverged, Interrupted, StorageFailed
from personafl.recipe.compare import CompareSection
from personafl.recipe.engine import EngineSection
from personafl.recipe.evaluation import EvaluationSection
from personafl.recipe.recipe import Recipe
from personafl.recipe.sweep import SWEEP_FILE, space
from personafl.recipe.values import merged, nested
from personafl.runs.build import prepare
from personafl.runs.interrupt import Stop, polite_stop
from personafl.runs.start import settled
from personafl.storage.csvtext import csv_text
from personafl.storage.files import atomic_write
from personafl.storage.rundir import RunDirectory, refuse_existing, resume_command
from personafl.sweep.pool import cores, driven, workers
from personafl.sweep.study import Study, Trial, check_installed
from personafl.sweep.worker import Done, Score, Task

Listener = Callable[[Trial, int, int], None]  # a trial that ended, how many have, of how many


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """All trials of a sweep so far, of how many, and the best of them."""

    path: Path
    trials: tuple[Trial, ...]
    size: int
    seeds: tuple[int, ...]

    @property
    def best(self) -> Trial | None:
        """The trial with the greatest accuracy, of equals the first."""
        done = [trial for trial in self.trials if trial.state == "done"]
        return max(done, key=lambda trial: trial.accuracy or 0.0, default=None)

    @property
    def ended(self) -> int:
        """How many trials are over."""
        return sum(trial.state != "running" for trial in self.trials)

    @property
    def command(self) -> str:
        """What runs the best recipe on test data."""
        verb = "run" if len(self.seeds) == 1 else "compare"
        return f"personafl {verb} {shlex.quote(str(self.path / 'best.toml'))}"

    def to_json(self) -> dict[str, Any]:
        """Return it as `personafl sweep --json` prints it."""
        best = self.best
        return {
            "sweep": str(self.path),
            "best": None if best is None else best.to_json(),
            "command": None if best is None else self.command,
            "trials": [trial.to_json() for trial in self.trials],
        }

    def to_csv(self) -> str:
        """Return a line per trial."""
        keys = list(dict.fromkeys(key for trial in self.trials for key in trial.values))
        rows: list[list[Any]] = [["trial", "state", "validation_accuracy", "rounds", *keys, "note"]]
        for trial in self.trials:
            own = [trial.values.get(key) for key in keys]
            rows.append([trial.number, trial.state, trial.accuracy, trial.rounds, *own, trial.note])
        return csv_text(rows)


def sweep(recipe: Recipe, path: Path, *, jobs: int | None = None, listener: Listener | None = None) -> Sweep:
    """Search in a new directory; `jobs` trials at a time, if not given as many as there are cores."""
    recipe = settled(recipe)
    refuse_existing(path)
    _check(recipe)
    RunDirectory.create(path, {SWEEP_FILE: recipe.to_toml()})
    return _search(recipe, path, jobs, listener)


def resume_sweep(path: Path, *, jobs: int | None = None, listener: Listener | None = None) -> Sweep:
    """Continue a sweep that was stopped; trials that were on go on from their checkpoints."""
    check_installed()
    return _search(_recipe_of(path), path, jobs, listener)


def load_sweep(path: Path) -> Sweep:
    """Return how far a sweep got."""
    check_installed()
    recipe = _recipe_of(path)
    return _summary(recipe, path, Study(path, recipe, only_read=True))


def _recipe_of(path: Path) -> Recipe:
    return Recipe.kept(path / SWEEP_FILE)


def _check(recipe: Recipe) -> None:
    """Fail if a trial cannot start: every value of every key is put in once, and of a grid every combination."""
    check_installed()
    if recipe.sweep is None:
        raise BadInput(
            "sweep: the recipe has no section [sweep]; add sweep.keys, as in sweep.keys.training.lr=[0.1,0.3]"
        )
    if recipe.sweep.pruner != "none" and not recipe.evaluate_every():
        raise BadInput(
            "sweep.pruner: evaluation.every = 0 scores only at the end, too late to stop a trial; "
            "set evaluation.every=5, or sweep.pruner=none"
        )
    parts = space(recipe.sweep)
    first = {part.key: part.examples[0] for part in parts}
    seeds = _seeds(recipe)
    data = data_build.load(recipe.data, seeds[0])
    if not len(data.validation.flat):
        raise BadInput(
            "data.validation: a sweep chooses by validation data, and there are none; set data.validation=0.2"
        )
    for values in (first | {part.key: value} for part in parts for value in part.examples):
        with _naming(values):
            prepare(trial_recipe(recipe, values, seeds[0]), data)
    if recipe.sweep.sampler == "grid":
        lists = [part.examples for part in parts]
        for combination in itertools.product(*lists):
            values = dict(zip(first, combination, strict=True))
            with _naming(values):
                trial_recipe(recipe, values, seeds[0]).algorithm()


@contextlib.contextmanager
def _naming(values: Mapping[str, Any]) -> Iterator[None]:
    """Say with which values a trial could not start."""
    try:
        yield
    except BadInput as error:
        raise BadInput(f"sweep.keys: {_said(values)} cannot be tried: {error}") from error


def _seeds(recipe: Recipe) -> tuple[int, ...]:
    assert recipe.sweep is not None
    return recipe.sweep.seeds or (recipe.seed,)


def _with_values(recipe: Recipe, values: Mapping[str, Any], **others: Any) -> Recipe:
    """Return the recipe with a trial's values and without its sweep."""
    base = recipe.model_dump(mode="json", exclude_none=True, exclude={"sweep", *others})
    return Recipe.parse(merged(base, nested(values))).model_copy(update=others)


def trial_recipe(recipe: Recipe, values: Mapping[str, Any], seed: int) -> Recipe:
    """Return the recipe of a trial's run: one thread, validation data alone, nothing tracked."""
    own: dict[str, Any] = {
        "seed": seed,
        "tracking": (),
        "compare": CompareSection(),
        "engine": EngineSection(**recipe.engine.model_dump() | {"threads": 1}),
        "evaluation": EvaluationSection(**recipe.evaluation.model_dump() | {"split": "validation"}),
    }
    return _with_values(recipe, values, **own)


def _search(recipe: Recipe, path: Path, jobs: int | None, listener: Listener | None) -> Sweep:
    """Do the trials that are left."""
    assert recipe.sweep is not None
    with RunDirectory(path).locked(), polite_stop() as stop:
        study = Study(path, recipe)
        left = recipe.sweep.size - _summary(recipe, path, study).ended
        with workers(min(jobs or cores(recipe), left)) as ready:
            try:
                task = functools.partial(_task, recipe, path)
                for worker, trial, message in driven(ready, study.begun(), task, stop):
                    if isinstance(message, Score):
                        worker.send(study.score(trial.number, message.rounds, message.accuracy))
                    else:
                        _end(recipe, path, study, trial, message, stop, listener)
            finally:
                found = _summary(recipe, path, study)
                atomic_write(path / "trials.csv", found.to_csv().encode())
    if stop.requested:
        raise Interrupted(f"stopped after {found.ended} of {found.size} trials; continue with: {resume_command(path)}")
    shutil.rmtree(path / "pretrained", ignore_errors=True)
    if found.best is None:
        notes = [trial.note for trial in found.trials if trial.note]
        raise Diverged(f"{path}: all {found.size} trials failed, the first with: {notes[0] if notes else 'pruning'}")
    return found


def _end(
    recipe: Recipe, path: Path, study: Study, trial: Trial, message: Done, stop: Stop, listener: Listener | None
) -> None:
    """Take the end of a trial."""
    if message.broken:
        raise StorageFailed(f"{message.broken}; then continue with: {resume_command(path)}")
    if message.stopped or (stop.requested and message.note):
        return  # it stays under way in the study
    ended = study.tell(trial.number, message.accuracy, message.note)
    shutil.rmtree(_folder(path, trial), ignore_errors=True)
    found = _summary(recipe, path, study)
    if found.best == ended:
        _write_best(recipe, found)
    if listener is not None:
        listener(ended, found.ended, found.size)


def _task(recipe: Recipe, path: Path, trial: Trial) -> Task:
    """Return a trial as a worker runs it."""
    folder = _folder(path, trial)
    folder.mkdir(parents=True, exist_ok=True)
    runs = [functools.partial(trial_recipe, recipe, trial.values, seed) for seed in _seeds(recipe)]
    return Task(recipes=tuple(runs), path=folder, pretrained=path.resolve() / "pretrained")


def _folder(path: Path, trial: Trial) -> Path:
    return path.resolve() / "trials" / f"{trial.number:05d}"


def _summary(recipe: Recipe, path: Path, study: Study) -> Sweep:
    assert recipe.sweep is not None
    return Sweep(path=path, trials=tuple(study.trials()), size=recipe.sweep.size, seeds=_seeds(recipe))


def _write_best(recipe: Recipe, found: Sweep) -> None:
    best = found.best
    assert best is not None
    method = best.values.get("method.name", recipe.method.name)
    alone = CompareSection(methods=(method,), seeds=found.seeds)  # without options, which would replace the method's
    text = _with_values(recipe, best.values, seed=found.seeds[0], compare=alone).to_toml()
    about = f"# Trial {best.number}, validation accuracy {100 * (best.accuracy or 0.0):.2f} %: {_said(best.values)}\n"
    atomic_write(found.path / "best.toml", f"{about}#   {found.command}\n{text}".encode())


def _said(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in values.items())
