"""The trials of a sweep, kept by Optuna in the sweep's directory. One process writes them.

What is drawn for a trial depends on the recipe's seed, the trial's number and the trials that are done, so that a sweep
with one job that was stopped continues as if it had not been.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from personafl.core import rng
from personafl.errors import BadInput
from personafl.recipe.recipe import Recipe
from personafl.recipe.sweep import Choices, Range, SweepSection, space
from personafl.storage.files import cut, storage

if TYPE_CHECKING:
    import optuna

JOURNAL = "journal.log"
State = Literal["done", "pruned", "failed", "running"]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One set of values: what came out of it, or how far it got."""

    number: int
    values: dict[str, Any]  # recipe key -> value
    state: State
    accuracy: float | None = None  # on validation data: at the end, or when it was last scored
    rounds: int | None = None  # when a pruned one was stopped
    note: str = ""  # why it failed

    def to_json(self) -> dict[str, Any]:
        """Return it as `personafl sweep --json` prints it."""
        return vars(self)


def check_installed() -> None:
    """Fail if Optuna is not there."""
    if importlib.util.find_spec("optuna") is None:
        raise BadInput("sweep: optuna is not installed; run: pip install 'personafl[sweep]'")


class Study:
    """Proposes values, is told scores, and says whether a trial is worth going on with."""

    def __init__(self, path: Path, recipe: Recipe, *, only_read: bool = False) -> None:
        """Open the study of a sweep's directory, which the caller holds the lock of, unless it will only read."""
        import optuna
        from optuna.storages.journal import JournalFileBackend

        assert recipe.sweep is not None
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._seed, self._sweep, self._space = recipe.seed, recipe.sweep, space(recipe.sweep)
        self._path = path / JOURNAL
        if not only_read:
            _mend(self._path)
        with storage(self._path):
            journal = optuna.storages.JournalStorage(JournalFileBackend(str(self._path)))
            begun = journal.get_all_studies()
            self._study = (
                optuna.load_study(study_name=None, storage=journal)
                if begun
                else optuna.create_study(study_name=recipe.name, storage=journal, direction="maximize")
            )
            self._study.pruner = _pruner(recipe.sweep, recipe.evaluate_every(), recipe.rounds)
            if recipe.sweep.sampler == "grid" and not only_read and len(self._study.trials) < recipe.sweep.size:
                self._enqueue()

    def trials(self) -> list[Trial]:
        """Return all trials that were begun."""
        return [self._seen(one) for one in self._study.trials if one.state.name != "WAITING"]

    def begun(self) -> Iterator[Trial]:
        """Yield the trials that were under way when the sweep stopped, and then new ones as long as there are any."""
        import optuna

        for one in self._study.trials:
            if one.state.name == "RUNNING":
                yield self._drawn(optuna.trial.Trial(self._study, one._trial_id))
        while sum(one.state.name != "WAITING" for one in self._study.trials) < self._sweep.size:
            with storage(self._path):
                number = len(self.trials())
                self._study.sampler = _sampler(self._sweep, self._seed, number)
                yield self._drawn(self._study.ask())

    def score(self, number: int, rounds: int, accuracy: float) -> bool:
        """Take the accuracy of a trial after so many rounds; return whether to stop the trial."""
        import optuna

        trial = optuna.trial.Trial(self._study, self._study.trials[number]._trial_id)
        with storage(self._path):
            if rounds not in self._study.trials[number].intermediate_values:  # a trial that is done again
                trial.report(accuracy, rounds)
        return bool(trial.should_prune())

    def tell(self, number: int, accuracy: float | None, note: str = "") -> Trial:
        """Take the end of a trial: its accuracy, or None if it failed (with a note) or was stopped (without)."""
        from optuna.trial import TrialState

        state = TrialState.COMPLETE if accuracy is not None else TrialState.FAIL if note else TrialState.PRUNED
        with storage(self._path):
            if note:
                trial = self._study.trials[number]
                self._study._storage.set_trial_user_attr(trial._trial_id, "note", note)
            self._study.tell(number, accuracy, state)
        return self._seen(self._study.trials[number])

    def _enqueue(self) -> None:
        """Put every combination of a grid into the study, in the order of the recipe."""
        lists = [part.labels for part in self._space if isinstance(part, Choices)]
        there = len(self._study.trials)
        for labels in itertools.islice(itertools.product(*lists), there, None):
            self._study.enqueue_trial(dict(zip((part.key for part in self._space), labels, strict=True)))

    def _drawn(self, trial: optuna.trial.Trial) -> Trial:
        """Return a trial with its values; those that it has already stay."""
        values = {part.key: _suggested(trial, part) for part in self._space}
        return Trial(number=trial.number, values=values, state="running")

    def _seen(self, trial: optuna.trial.FrozenTrial) -> Trial:
        steps = trial.intermediate_values
        state: State = _STATES[trial.state.name]
        value = trial.value if state == "done" else steps[max(steps)] if steps else None
        return Trial(
            number=trial.number,
            values={p.key: _value(p, trial.params[p.key]) for p in self._space if p.key in trial.params},
            state=state,
            accuracy=value,
            rounds=max(steps) if steps and state == "pruned" else None,
            note=trial.user_attrs.get("note", ""),
        )


_STATES: dict[str, State] = {"COMPLETE": "done", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running"}


def _suggested(trial: optuna.trial.Trial, part: Choices | Range) -> Any:
    if isinstance(part, Choices):
        return _value(part, trial.suggest_categorical(part.key, part.labels))
    if part.whole:
        return trial.suggest_int(part.key, int(part.low), int(part.high), log=part.log)
    return trial.suggest_float(part.key, part.low, part.high, log=part.log)


def _value(part: Choices | Range, label: Any) -> Any:
    """Return what a study's label stands for."""
    if isinstance(part, Range):
        return label
    return part.values[[json.dumps(entry) for entry in part.labels].index(json.dumps(label))]  # 1 is not true


def _sampler(sweep: SweepSection, seed: int, number: int) -> optuna.samplers.BaseSampler:
    """Return what draws the values of a trial; of a grid it is never asked."""
    import optuna

    own = int(rng.mix(seed, "sweep", number)) % 2**32
    return optuna.samplers.TPESampler(seed=own) if sweep.sampler == "tpe" else optuna.samplers.RandomSampler(seed=own)


def _pruner(sweep: SweepSection, every: int, rounds: int) -> optuna.pruners.BasePruner:
    import optuna

    if sweep.pruner == "hyperband":
        return optuna.pruners.HyperbandPruner(min_resource=every, max_resource=rounds)
    return optuna.pruners.MedianPruner() if sweep.pruner == "median" else optuna.pruners.NopPruner()


def _mend(journal: Path) -> None:
    """Remove what a killed process may leave: half a line, and a lock that nobody holds."""
    with storage(journal):
        if journal.exists():
            cut(journal, journal.read_bytes().rfind(b"\n") + 1)
        journal.with_name(journal.name + ".lock").unlink(missing_ok=True)
