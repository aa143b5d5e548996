"""A recipe run in a directory, from nothing or from where it stopped, with stage (a) first if there is one."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from personafl.data.federated import FederatedData
from personafl.errors import Failed
from personafl.recipe.recipe import Recipe
from personafl.runs.build import prepare
from personafl.runs.given import NOTHING, Given, check_objects
from personafl.runs.job import check_split
from personafl.runs.listener import Listener
from personafl.runs.loop import run_job
from personafl.runs.result import Result
from personafl.storage.failure import Failure
from personafl.storage.files import atomic_write, read_json
from personafl.storage.rundir import RunDirectory, refuse_existing, set_aside
from personafl.storage.seals import sealed_json

CHANGES_FILE = "changes.json"  # of a run that began anew after it failed: keys of its recipe and their new values
CONTINUE = "continue it there: personafl.resume({path}, {objects})"


def run_in(
    path: Path,
    recipe: Recipe,
    *,
    data: FederatedData | None = None,
    given: Given = NOTHING,
    resume: bool = True,
    listener: Listener | None = None,
    also: Mapping[str, str] | None = None,
) -> Result:
    """Run a recipe with whole paths; with `resume` a directory that is there is continued, unless it diverged.

    `given` are objects in place of what the recipe names, `data` the data where they are dealt already. `also` are
    further files of a new directory, by name.
    """
    again = resume and path.exists()
    if not again:
        refuse_existing(path)
    elif (failure := Failure.of(path)) is not None and failure.diverged:
        raise failure.error(path)
    if again and (path / "environment.json").exists():
        check_objects(path, given, CONTINUE)
    job = prepare(recipe, data, given)
    if again:
        check_split(path, job.federation.data)
        directory = RunDirectory(path)
        if not (path / "split.json").exists():  # it was lost
            atomic_write(path / "split.json", sealed_json(job.files()["split.json"], "split.json"))
    else:
        directory = RunDirectory.create(path, job.files() | dict(also or {}))
    if (first := recipe.for_pretraining()) is not None:
        data = data or given.dealt(recipe)
        try:
            run_in(path / "pretrain", first, data=data, given=replace(given, algorithm=None), listener=listener)
        except Failed as error:
            failure = pretraining(path / "pretrain")
            failure.keep(path)
            raise failure.error(path) from error
        job = replace(prepare(recipe.started(path / "pretrain"), data, given), recipe=recipe)
    return run_job(job, directory, listener)


def begin_or_continue(path: Path, recipe: Recipe, changes: Mapping[str, Any], **given: Any) -> Result:
    """Run a recipe in a directory, or finish it there; with changes to its recipe one that failed begins anew.

    Which changes a run was begun with is kept in its directory.
    """
    file = path / CHANGES_FILE
    kept = dict(read_json(file)) if file.exists() else {}
    if changes and Failure.of(path) is not None:
        kept |= changes
        set_aside(path)
    elif path.exists() and not (path / "recipe.toml").exists():  # it could not even be prepared
        set_aside(path)
    changed = recipe.changed(kept) if kept else recipe
    return run_in(path, changed.anchored(), also={CHANGES_FILE: json.dumps(kept)} if kept else None, **given)


def pretraining(path: Path) -> Failure:
    """Return why stage (a) in a directory failed, as the runs that were to start from it say it."""
    failure = Failure.of(path)
    assert failure is not None  # it was kept when it was raised
    return replace(failure, when="", reason=f"pre-training {failure.words}")
