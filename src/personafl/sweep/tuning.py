"""Tunes the methods of a comparison alike, by validation data, before its runs: `compare --tune`.

    tuned.json                what was chosen for each method that is tuned
    tune/METHOD/trials.json   its trials: values, and the accuracy after so many rounds
    tune/METHOD/trials/       their runs; removed when the method is tuned

Trial 0 has the recipe's own values. The others are points of a scrambled Sobol sequence, which a dozen cover two or
three ranges with more evenly than random draws, and of which a model of the scores (TPE) could draw but the last two.
All trials train for a quarter of the rounds, the better half of them for as many again, and the better half of those to
the end; trial 0 is among them always. What is drawn depends on the seed alone, and what goes on on scores alone: no
number of processes, and no stop, changes what is chosen.
"""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from personafl.algorithms.training import LIKE_LR, Between
from personafl.core import rng
from personafl.errors import BadInput, Interrupted, StorageFailed
from personafl.options import defaults
from personafl.recipe.compare import Tuned, read_tuned, write_tuned
from personafl.recipe.method import find_method
from personafl.recipe.recipe import Recipe
from personafl.recipe.sweep import Range
from personafl.runs.interrupt import Stop, polite_stop
from personafl.runs.listener import Event, Note, Trials
from personafl.simulate.workers.local import on_other_machines
from personafl.storage.files import read_json, storage, write_json
from personafl.storage.rundir import RunDirectory, resume_command
from personafl.sweep.pool import Worker, cores, driven, workers
from personafl.sweep.search import trial_recipe
from personafl.sweep.study import Trial
from personafl.sweep.worker import Done, Task

_DIGITS = 3  # of drawn values, so that they can be read and written


def tuned(
    recipe: Recipe, path: Path, listener: Callable[[str, int], Callable[[Event], None] | None] | None = None
) -> dict[str, Tuned]:
    """Return what is chosen for each method of a comparison, once those that are not tuned yet are."""
    if recipe.compare.tune is None:
        return {}
    found, folder, seed = read_tuned(path), path / "tune", recipe.compare.seeds[0]
    left = [label for label in recipe.compare.methods if label not in found]
    if left:
        check_tuning(recipe)
        with storage(folder):
            folder.mkdir(exist_ok=True)
        if listener is not None and (tell := listener("tuning", seed)) is not None:
            tell(Note(budget(recipe)))
        jobs = min(cores(recipe), recipe.compare.tune)
        with RunDirectory(folder).locked(), polite_stop() as stop, workers(jobs) as ready:
            for label in left:
                tell = (listener and listener(label, seed)) or _unheard
                found[label] = _Method(recipe, label, folder).search(ready, stop, tell)
                write_tuned(path, found)
                tell(Note(f"tuned: {found[label].words}"))
                shutil.rmtree(folder / label / "trials", ignore_errors=True)
        shutil.rmtree(folder / "pretrained", ignore_errors=True)
    return found


def _unheard(event: Event) -> None:
    """Nobody listens."""


def check_tuning(recipe: Recipe) -> None:
    """Fail if a comparison cannot be tuned here."""
    if recipe.compare.tune is not None and on_other_machines():
        raise BadInput("compare.tune: its trials are trained on this machine, not on a Ray cluster; use --engine local")


def budget(recipe: Recipe) -> str:
    """Say what tuning will take, the same for every method."""
    compare, trials = recipe.compare, recipe.compare.tune or 0
    own = [recipe.for_method(label, compare.seeds[0]).rounds for label in compare.methods]
    each = [sum(size * more for size, more in _work(trials, rounds)) for rounds in own]
    runs = f", each method for as long as {each[0] / own[0]:.1f} of its runs" if own[0] else ""
    return (
        f"{len(own)} methods, {trials} trials each, halved twice: {sum(each):,} rounds{runs}; "
        f"chosen by validation data, {recipe.data.validation:.0%} of each client's training data; test data stay unread"
    )


def _rungs(rounds: int) -> list[int]:
    """Return after how many rounds trials are compared: a quarter, as many again, all."""
    quarter = max(1, rounds // 4)
    return sorted({min(step, rounds) for step in (quarter, 2 * quarter, rounds)})


def _size(trials: int, place: int) -> int:
    """Return how many trials go on after so many comparisons, of which trial 0 is one."""
    return max(min(2, trials), math.ceil(trials / (1 << place)))


def _work(trials: int, rounds: int) -> Iterator[tuple[int, int]]:
    """Yield how many trials go on for how many more rounds, rung by rung."""
    before = 0
    for place, rung in enumerate(_rungs(rounds)):
        yield _size(trials, place), rung - before
        before = rung


@dataclass
class _Trial:
    """Values of recipe keys, and what came of them."""

    values: dict[str, Any]
    scores: dict[int, float] = field(default_factory=dict)  # rounds -> accuracy on validation data
    note: str = ""  # why it failed


class _Method:
    """One method's trials."""

    def __init__(self, recipe: Recipe, label: str, folder: Path) -> None:
        """Draw them, or read those that were drawn."""
        self.seed, self.label = recipe.compare.seeds[0], label
        self.path, self.pretrained = folder / label, folder.resolve() / "pretrained"
        self.recipe, self.variant = (
            recipe.for_method(label, self.seed).anchored(),
            recipe.compare.variants.get(label, {}),
        )
        self.file = self.path / "trials.json"
        if self.file.exists():
            rows = sorted(read_json(self.file).items(), key=lambda item: int(item[0]))
            self.trials = [
                _Trial(row["values"], {int(at): score for at, score in row["scores"].items()}, row["note"])
                for _, row in rows
            ]
        else:
            self.trials = [_Trial(values) for values in draw(self.recipe, self.variant, recipe.compare.tune or 1)]

    def search(self, ready: list[Worker], stop: Stop, tell: Callable[[Event], None]) -> Tuned:
        """Do the trials that are left, and return the best; of equals the first."""
        going, rounds = list(range(len(self.trials))), 0
        for place, rounds in enumerate(_rungs(self.recipe.rounds), 1):
            self._train(going, rounds, ready, stop, tell)
            going = self._better(going, rounds, _size(len(self.trials), place))
        scores = {number: self.trials[number].scores[rounds] for number in going}
        best = max(sorted(scores), key=lambda number: scores[number], default=None)
        return Tuned(
            values=self.trials[best or 0].values,
            accuracy=None if best is None else scores[best],
            default=scores.get(0),
        )

    def _better(self, going: list[int], rounds: int, size: int) -> list[int]:
        """Return the best after so many rounds, and trial 0 in place of the worst of them if it is not one."""
        scores = {number: self.trials[number].scores.get(rounds) for number in sorted(going)}
        ranked = sorted((number for number in scores if scores[number] is not None), key=lambda n: -(scores[n] or 0.0))
        best = ranked[:size]
        return best if 0 not in ranked or 0 in best else [0, *best[:-1]]

    def _train(
        self, going: list[int], rounds: int, ready: list[Worker], stop: Stop, tell: Callable[[Event], None]
    ) -> None:
        """Have trials go on up to so many rounds."""
        left = [number for number in going if rounds not in self.trials[number].scores and not self.trials[number].note]
        waiting = (Trial(number=number, values=self.trials[number].values, state="running") for number in left)
        done = len(going) - len(left)
        tell(Trials(done, len(going), rounds))
        self._save()
        for _, trial, message in driven(ready, waiting, functools.partial(self._task, rounds), stop):
            if not isinstance(message, Done) or message.stopped or (stop.requested and message.note):
                continue
            if message.broken:
                raise StorageFailed(f"{message.broken}; then continue with: {resume_command(self.path.parent.parent)}")
            one = self.trials[trial.number]
            if message.accuracy is None:
                one.note = message.note.partition("; ")[0]  # not how to go on, for its directory will be gone
            else:
                one.scores[rounds] = message.accuracy
            self._save()
            done += 1
            tell(Trials(done, len(going), rounds))
        if stop.requested:
            where = resume_command(self.path.parent.parent)
            raise Interrupted(f"stopped while tuning {self.label}; continue with: {where}")

    def _task(self, rounds: int, trial: Trial) -> Task:
        folder = self.path.resolve() / "trials" / f"{trial.number:05d}"
        folder.mkdir(parents=True, exist_ok=True)
        values = {} if trial.number == 0 else trial.values
        make = functools.partial(_recipe, self.recipe, values)
        return Task(recipes=(make,), path=folder, pretrained=self.pretrained, until=rounds)

    def _save(self) -> None:
        with storage(self.path):
            self.path.mkdir(exist_ok=True)
        write_json(self.file, {f"{number:05d}": vars(trial) for number, trial in enumerate(self.trials)})


def _recipe(recipe: Recipe, values: dict[str, Any]) -> Recipe:
    """Return the recipe of a trial, which is scored where trials are compared."""
    scored = recipe.evaluation.model_copy(update={"every": _rungs(recipe.rounds)[0], "train": False})
    return trial_recipe(recipe.model_copy(update={"evaluation": scored}), values, recipe.seed)


def draw(recipe: Recipe, variant: dict[str, Any], trials: int) -> list[dict[str, Any]]:
    """Return the values of each trial: the recipe's own, and points of the ranges that its method declares."""
    parts = dict(sorted(_ranges(recipe, variant), key=lambda pair: pair[0].key))  # as they are read again from JSON
    first = {part.key: value for part, value in parts.items()}
    if not parts or trials == 1:
        return [first]
    own = int(rng.mix(recipe.seed, "tune")) % 2**32
    engine: Any = torch.quasirandom.SobolEngine(len(parts), scramble=True, seed=own)  # type: ignore[no-untyped-call]
    points = engine.draw(trials - 1, dtype=torch.float64).tolist()
    return [first, *({part.key: _at(part, x) for part, x in zip(parts, point, strict=True)} for point in points)]


def _ranges(recipe: Recipe, variant: dict[str, Any]) -> Iterator[tuple[Range, Any]]:
    """Yield what is tuned with the recipe's own value.

    Not what makes the variant, and not what the recipe has outside of its range: that was meant.
    """
    build, lr = find_method(recipe.method.name, "method.name"), recipe.training.lr
    own = {"training": {"lr": lr}, "method": defaults(build) | recipe.method.options}
    declared: dict[str, Between] = {"training.lr": LIKE_LR}
    declared |= {f"method.{name}": between for name, between in getattr(build, "tunes", {}).items()}
    for key, between in declared.items():
        section, _, name = key.partition(".")
        scale = lr if between.of_lr else 1
        value = scale * (between.of_lr or 1) if own[section][name] is None else own[section][name]
        part = Range(key=key, low=scale * between.low, high=scale * between.high, log=between.log)
        if name not in variant.get(section, {}) and part.low <= value <= part.high:
            yield part, value


def _at(part: Range, x: float) -> int | float:
    """Return the value at x in [0, 1] of a range."""
    low, high = part.low, part.high
    value = low * (high / low) ** x if part.log else low + (high - low) * x
    return round(value) if part.whole else min(max(float(f"{value:.{_DIGITS}g}"), low), high)
