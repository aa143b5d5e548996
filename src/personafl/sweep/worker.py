"""A process that does trials. It has its share of the cores, and ends with the process that started it.

It is sent tasks, and answers with a Score after every scoring of the first seed, upon which it is told whether to stop,
and with a Done at the end of each.
"""

import fcntl
import hashlib
import os
import signal
import statistics
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from personafl.data.build import load
from personafl.data.federated import FederatedData
from personafl.errors import BadInput, Failed, Interrupted, PersonaError, StorageFailed
from personafl.options import reason
from personafl.recipe.recipe import Recipe
from personafl.runs.listener import Event, Listener, Progress
from personafl.runs.result import Result
from personafl.runs.whole import run_in
from personafl.simulate.workers.local import end_with_parent, share_cores
from personafl.storage.rundir import RunDirectory


@dataclass(frozen=True, kw_only=True)
class Task:
    """A trial: what makes the recipe of each seed (it fails if values do not go together), and where its runs are."""

    recipes: tuple[Callable[[], Recipe], ...]
    path: Path
    pretrained: Path  # where the runs of stage (a) are, for all trials
    until: int | None = None  # the rounds after which it pauses and is scored, to go on when it is sent again


@dataclass(frozen=True, kw_only=True)
class Score:
    """The validation accuracy after so many rounds."""

    rounds: int
    accuracy: float


@dataclass(frozen=True, kw_only=True)
class Done:
    """The end of a trial: its accuracy; or why it failed; or that it was pruned, or stopped to be continued."""

    accuracy: float | None = None
    note: str = ""
    stopped: bool = False
    broken: str = ""  # why no trial can go on


class _Pruned(Exception):
    """The trial is not worth going on with."""


def serve(pipe: Connection, jobs: int) -> None:
    """Do tasks until there are no more, as one of so many processes that do."""
    os.setsid()  # a Ctrl-C in the terminal is the other process's business; it stops this one politely
    end_with_parent()
    share_cores(jobs)
    splits: dict[int, FederatedData] = {}
    while (task := pipe.recv()) is not None:
        pipe.send(_done(task, pipe, splits))


def _done(task: Task, pipe: Connection, splits: dict[int, FederatedData]) -> Done:
    """Run all seeds of a trial."""
    try:
        values = []
        for place, recipe in enumerate([make() for make in task.recipes]):
            if recipe.seed not in splits:
                splits[recipe.seed] = load(recipe.data, recipe.seed)
            judged = place == 0 and task.until is None
            listener = _listener(pipe, recipe.evaluate_every()) if judged else None
            values.append(_run(task, recipe, splits[recipe.seed], listener))
        return Done(accuracy=statistics.mean(values))
    except _Pruned:
        return Done()
    except (Interrupted, KeyboardInterrupt):  # the latter where a trial had just stopped itself for its score
        return Done(stopped=True)
    except StorageFailed as error:
        return Done(broken=str(error))
    except (BadInput, Failed) as error:
        return Done(note=str(error))
    except Exception as error:  # a worker that died, or the user's own model: other values may do
        traceback.print_exc()
        return Done(note=reason(error))


def _run(task: Task, recipe: Recipe, data: FederatedData, listener: Listener | None) -> float:
    """Run one seed, or what is left of it."""
    if (first := recipe.for_pretraining()) is not None:
        recipe = recipe.started(_pretrained(task.pretrained, first, data))
    path = task.path / f"seed{recipe.seed}"
    if task.until is not None and task.until < recipe.rounds:
        return _scored_at(task.until, path, recipe, data)
    done = (path / "result.json").exists()
    result = Result.load(path) if done else run_in(path, recipe, data=data, listener=listener)
    return validation_accuracy(result)


def _scored_at(rounds: int, path: Path, recipe: Recipe, data: FederatedData) -> float:
    """Run up to so many rounds, which are scored, and return the accuracy of the personal model, else the global."""
    directory = RunDirectory(path)

    def pause(progress: Event) -> None:
        if isinstance(progress, Progress) and progress.round.number + 1 == rounds:
            signal.raise_signal(signal.SIGTERM)  # what stops a run with a checkpoint

    try:
        if directory.checkpoint().rounds < rounds:
            run_in(path, recipe, data=data, listener=pause)
    except Interrupted:
        if directory.checkpoint().rounds < rounds:
            raise
    scores = [entry for entry in directory.metrics() if entry["event"] == "score" and entry["number"] == rounds - 1]
    found = {entry["model"]: float(entry["accuracy"]) for entry in scores if entry["split"] == "validation"}
    return found["personal"] if "personal" in found else found["global"]


def _pretrained(folder: Path, recipe: Recipe, data: FederatedData) -> Path:
    """Do stage (a), once for all trials in which it is the same, and return its directory."""
    out = folder / hashlib.blake2b(recipe.to_toml().encode(), digest_size=8).hexdigest()
    folder.mkdir(exist_ok=True)
    with open(f"{out}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another trial may be at it
        if not (out / "result.json").exists():
            run_in(out, recipe, data=data)
    return out


def _listener(pipe: Connection, every: int) -> Listener:
    def listen(progress: Event) -> None:
        if not isinstance(progress, Progress) or progress.accuracy is None:
            return
        rounds = progress.round.number + 1
        if every and rounds % every == 0 and rounds < progress.rounds:
            pipe.send(Score(rounds=rounds, accuracy=progress.accuracy))
            if pipe.recv():
                raise _Pruned

    return listen


def validation_accuracy(result: Result) -> float:
    """Return the mean accuracy of seen clients on validation data: of the last personal model, else the global one."""
    found: dict[str, Any] = {
        row["model"]: row["accuracy"] for row in result.rows if (row["clients"], row["split"]) == ("seen", "validation")
    }
    for model in ("tuned", "personal", "global"):
        if model in found:
            return float(found[model])
    raise PersonaError(f"{result.path}: no client has validation data")
