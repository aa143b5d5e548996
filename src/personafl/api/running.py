"""Run, compare, resume: the same runs as the command line, with objects where a recipe would have names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from personafl.api.calls import Objects, RecipeLike, given_of, method_key, methods_of, path_of, seeds_of, understood
from personafl.api.directories import FailedRun, failed_in, recipe_of, runs_of, write_own_page
from personafl.api.progress import Callback, Listeners, told
from personafl.api.result import Comparison, Result, results_of
from personafl.core.algorithm import Algorithm
from personafl.core.losses import Loss, Metric
from personafl.data.federated import FederatedData
from personafl.errors import BadInput, Busy, Failed, Interrupted, PersonaError, StorageFailed
from personafl.recipe.recipe import Recipe
from personafl.runs.build import prepare
from personafl.runs.extension import check_alone, longer, prolong
from personafl.runs.failing import failure_of
from personafl.runs.given import NOTHING, OBJECTS_FILE, Given, check_objects
from personafl.runs.job import check_split
from personafl.runs.listener import Listener, Note
from personafl.runs.start import settled
from personafl.runs.whole import CHANGES_FILE, CONTINUE, begin_or_continue, pretraining, run_in
from personafl.storage.failure import Failure
from personafl.storage.rundir import (
    COMPARISON_FILE,
    PAGE_FILE,
    RunDirectory,
    claim_name,
    refuse_existing,
    run_path,
    set_aside,
)
from personafl.sweep.tuning import check_tuning, tuned


def run(
    data_or_recipe: Any = None,
    /,
    method: str | Mapping[str, Any] | None = None,
    *,
    data: Any = None,
    recipe: RecipeLike | None = None,
    model: nn.Module | str | Mapping[str, Any] | None = None,
    algorithm: Algorithm | None = None,
    loss: Loss | None = None,
    metrics: Mapping[str, Metric] | None = None,
    user: Any = None,
    label: str | Sequence[str] | None = None,
    partition: str | Mapping[str, Any] | None = None,
    rounds: int | None = None,
    seed: int | None = None,
    settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    callback: Callback | None = None,
    progress: bool | None = None,
    listener: Listener | None = None,
) -> Result:
    """Run one method and return its result; its directory then has a page of it, report.html.

    The first argument is data or a recipe. Data are a pandas DataFrame (`label` and `user` name its columns),
    {client: (x, y)}, {client: torch Dataset or DataLoader}, {client: {"train": (x, y), "test": (x, y)}}, (x, y) with
    whose each sample is as `user`, a Hugging Face Dataset, a FederatedData, or a name or path as of `--dataset`. A
    recipe is nested dicts, a Recipe, or the path of a .toml file.

    `method`, `model` (a name or a torch.nn.Module), `partition`, `rounds` and `seed` replace what the recipe has, and
    so do `settings`, by key: {"training.lr": 0.1}. `algorithm` is a method of your own as an object. `loss(outputs,
    targets)` returns a loss for each sample, trained in place of the task's; each of `metrics`, {"macro_f1": function},
    is given all outputs and targets of a client's samples and returns one number, or one for each sample.

    The run directory is `out`, or a new one under runs/. With resume=True an existing `out` is continued; give the same
    objects again, for they are not in the directory. `callback` is called with a RoundDone after each round. `progress`
    says whether progress is shown: None in notebooks and terminals only. `listener` is told everything, as the displays
    are; it replaces them.
    """
    changes = {**method_key(method, algorithm), "rounds": rounds, "seed": seed}
    whole, given = understood(
        data_or_recipe,
        data=data,
        recipe=recipe,
        objects=Objects(model, algorithm, loss, metrics),
        user=user,
        label=label,
        partition=partition,
        settings=settings,
        changes=changes,
    )
    whole = settled(whole)
    path = path_of(out, "out") if out is not None else claim_name(Path("runs"), whole.name)
    own = None if listener is None else lambda method, seed: listener
    with told(whole.alone(), callback, progress, own) as listeners:
        heard = listeners(whole.label or whole.method.name, whole.seed)
        found = run_in(path, whole, given=given, resume=resume, listener=heard)
    write_own_page(path)
    return Result.of(found, given)


def compare(
    data_or_recipe: Any = None,
    /,
    methods: str | Sequence[str] | None = None,
    *,
    data: Any = None,
    recipe: RecipeLike | None = None,
    model: nn.Module | str | Mapping[str, Any] | None = None,
    loss: Loss | None = None,
    metrics: Mapping[str, Metric] | None = None,
    user: Any = None,
    label: str | Sequence[str] | None = None,
    partition: str | Mapping[str, Any] | None = None,
    rounds: int | None = None,
    seeds: int | Sequence[int] | None = None,
    tune: int | None = None,
    pick: bool | None = None,
    settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    callback: Callback | None = None,
    progress: bool | None = None,
    listener: Listeners | None = None,
) -> Comparison:
    """Run several methods and seeds; under one seed they see the same split and the same cohorts.

    Data, recipe and the other arguments are those of `run`. `methods` and `seeds` replace the recipe's; seeds=3 are the
    seeds 0, 1 and 2. With `tune` every method is first tuned by so many trials, on validation data.
    With pick=True it also says which method validation data pick (`Comparison.picked`), and fails if there are none.
    `listener(method, seed)` returns the listener of one run.
    """
    whole, given = understood(
        data_or_recipe,
        data=data,
        recipe=recipe,
        objects=Objects(model, None, loss, metrics),
        user=user,
        label=label,
        partition=partition,
        settings=settings,
        changes={"rounds": rounds},
    )
    whole = settled(whole).narrowed(methods_of(methods), seeds_of(seeds), tune, pick)
    if whole.compare.tune is not None and given.names:
        what = " and ".join(given.names)
        raise BadInput(f"tune: trials run in processes of their own, without your {what}; save it, and give its path")
    path = path_of(out, "out") if out is not None else claim_name(Path("runs"), whole.name)
    refuse_existing(path)
    first, *others = whole.compare.seeds
    dealt = _dealt(whole, given, first)
    if whole.compare.pick:
        _check_can_pick(whole, dealt)
    _check_can_start(whole, [(method, first) for method in whole.compare.methods], {}, dealt, given)
    for seed in others:  # whose splits may have fewer clients
        prepare(whole.for_method(whole.compare.methods[0], seed), _dealt(whole, given, seed), given)
    check_tuning(whole)
    kept = {OBJECTS_FILE: json.dumps(given.names)} if given.names else {}
    with told(whole, callback, progress, listener) as listeners:
        RunDirectory.create(path, {COMPARISON_FILE: whole.to_toml(), **kept})
        return _run_all(whole, path, listeners, {first: dealt}, given)


def resume(
    path: str | Path,
    *,
    changes: Mapping[str, Any] | None = None,
    data: Any = None,
    user: Any = None,
    model: nn.Module | None = None,
    algorithm: Algorithm | None = None,
    loss: Loss | None = None,
    metrics: Mapping[str, Metric] | None = None,
    callback: Callback | None = None,
    progress: bool | None = None,
    listener: Listeners | None = None,
) -> Result | Comparison:
    """Continue a run or a comparison that was stopped, to the same result as if it had not been.

    Objects that it was begun with are given again. What diverged is not tried again as it was: `changes`, as in
    {"training.lr": 0.01}, begins the runs that failed anew, with these keys of their recipes changed; the others keep
    theirs. {"rounds": 50} alone gives all runs more rounds, 50 in all.
    """
    path = path_of(path, "path")
    recipe, changes = recipe_of(path), dict(changes or {})
    given = given_of(recipe, data, user, Objects(model, algorithm, loss, metrics))
    if changes or not all((child / "result.json").exists() for _, _, child in runs_of(path)):
        check_objects(path, given, CONTINUE)
    if set(changes) == {"rounds"} and not failed_in(path):
        recipe, changes = _more_rounds(path, recipe, changes["rounds"], given), {}
    if changes:
        _check_changes(path, recipe, changes, given)
    with told(recipe, callback, progress, listener) as listeners:
        if (path / COMPARISON_FILE).exists():
            for _, _, child in runs_of(path):
                if (child / "recipe.toml").exists():
                    Recipe.kept(child / "recipe.toml")
            return _run_all(recipe, path, listeners, {}, given, changes)
        if (path / "result.json").exists():
            if not (path / PAGE_FILE).exists():
                write_own_page(path)
            return Result.of(Result.load(path), given)
        heard = listeners(recipe.method.name, recipe.seed)
        if changes:
            found = begin_or_continue(path, _unchanged(path, recipe), changes, given=given, listener=heard)
        else:
            found = run_in(path, settled(recipe), given=given, listener=heard)
    write_own_page(path)
    return Result.of(found, given)


def load(
    path: str | Path,
    *,
    data: Any = None,
    user: Any = None,
    model: nn.Module | None = None,
    algorithm: Algorithm | None = None,
    loss: Loss | None = None,
    metrics: Mapping[str, Metric] | None = None,
) -> Result | Comparison:
    """Return what a finished run or comparison found.

    Objects that it was begun with are needed for the models in it alone: `Result.model`, `predict`, `extend`, `export`.
    """
    path = path_of(path, "path")
    given = given_of(recipe_of(path), data, user, Objects(model, algorithm, loss, metrics))
    results = results_of(path, given)
    if (path / COMPARISON_FILE).exists():
        return Comparison(path, tuple(results), tuple(failed_in(path)))
    return results[0]


def _dealt(recipe: Recipe, given: Given, seed: int) -> FederatedData:
    return given.dealt(recipe.model_copy(update={"seed": seed}))


def _more_rounds(path: Path, recipe: Recipe, rounds: int, given: Given) -> Recipe:
    """Give a run, or all of a comparison, more rounds in all; return the recipe. What can fail does so before."""
    for seed in recipe.compare.seeds:
        dealt = _dealt(recipe, given, seed)
        for _, _, child in [one for one in runs_of(path) if one[1] == seed]:
            check_split(child, dealt)
    if not (path / COMPARISON_FILE).exists():
        if rounds != recipe.rounds:
            check_alone(path)
            prolong(path, rounds)
        return recipe_of(path)
    whole = longer(recipe, rounds, path)
    begun = [(child, whole.for_method(method, seed).rounds) for method, seed, child in runs_of(path)]
    begun = [(child, wanted) for child, wanted in begun if (child / "recipe.toml").exists()]
    for child, wanted in begun:
        longer(Recipe.kept(child / "recipe.toml"), wanted, child)
    RunDirectory(path).replace_recipe(whole.to_toml(), COMPARISON_FILE)
    for child, wanted in begun:
        if Recipe.kept(child / "recipe.toml").rounds < wanted:
            prolong(child, wanted)
    return recipe_of(path)


def _check_can_start(
    recipe: Recipe,
    runs: Sequence[tuple[str, int]],
    changes: Mapping[str, Any],
    data: FederatedData,
    given: Given,
) -> None:
    """Fail if any method cannot start, with all that cannot and why."""
    why: dict[str, list[str]] = {}  # reason -> methods
    for method, seed in runs:
        try:
            one = recipe.for_method(method, seed)
            one = one.changed(changes) if changes else one
            prepare(one, data, given)
            if (first := one.for_pretraining()) is not None:
                prepare(first, data, given)
        except BadInput as error:
            why.setdefault(str(error), []).append(method)
    able = [method for method, _ in runs if not any(method in methods for methods in why.values())]
    if why and not able and len(why) == 1:
        raise BadInput(next(iter(why)))
    if why:
        told = "; ".join(f"{', '.join(methods)}: {reason}" for reason, methods in why.items())
        without = f"; or leave out what cannot start: --methods {','.join(able)}" if able and not changes else ""
        raise BadInput(f"{told}{without}")


def _check_can_pick(recipe: Recipe, data: FederatedData) -> None:
    """Fail if no method can be picked by validation data, or not be judged by test data."""
    if len(recipe.compare.methods) == 1:
        only = recipe.compare.methods[0]
        raise BadInput(f"compare.pick: {only} is the only method; give several to pick from, as in fedavg,ditto,local")
    if recipe.evaluation.split == "validation":
        raise BadInput("compare.pick: what a pick is worth is said by test data; set evaluation.split=test")
    for what, rows in (("validation", data.validation), ("test", data.test)):
        if not len(rows.of(data.seen)):
            raise BadInput(f"compare.pick: there are no {what} data of clients that take part; set data.{what}=0.2")


def _check_changes(path: Path, recipe: Recipe, changes: Mapping[str, Any], given: Given) -> None:
    """Fail if there is nothing to change, or if what failed cannot start with the changes."""
    failed = failed_in(path)
    if not failed:
        raise BadInput(
            f"{path}: none of its runs failed, and only those can be changed; begin a new run for "
            f"{', '.join(changes)} (more rounds are possible, as the only change)"
        )
    if (path / COMPARISON_FILE).exists():
        for seed in dict.fromkeys(run.seed for run in failed):
            runs = [(run.method, seed) for run in failed if run.seed == seed]
            _check_can_start(recipe, runs, changes, _dealt(recipe, given, seed), given)
        return
    prepare(recipe.changed(changes), given=given)


def _run_all(
    recipe: Recipe,
    path: Path,
    listeners: Listeners,
    splits: dict[int, FederatedData],
    given: Given = NOTHING,
    changes: Mapping[str, Any] | None = None,
) -> Comparison:
    """Run or finish all runs of a comparison; the others go on without one that fails, which is kept for later."""
    results, failures = [], []
    chosen = {method: found.values for method, found in tuned(recipe, path, listeners).items()}
    for method, seed, child in runs_of(path):
        if (child / "result.json").exists():
            results.append(Result.of(Result.load(child), given))
            continue
        before = Failure.of(child)
        if before is not None and before.diverged and not changes:
            failures.append(FailedRun(method, seed, child, before))
            continue
        if seed not in splits:
            splits = {seed: _dealt(recipe, given, seed)}  # one split in memory at a time
            for sibling in recipe.compare.methods:
                check_split(run_path(path, sibling, seed), splits[seed])
        out, objects = path / f"pretrain-seed{seed}", {"data": splits[seed], "given": given}
        try:
            one = recipe.for_method(method, seed, chosen.get(method))
            if one.pretrain.rounds:
                _pretrain(out, one, changes, listeners("pretrain", seed), objects)
                one = one.started(out)
            found = begin_or_continue(child, one, changes or {}, **objects, listener=listeners(method, seed))
            results.append(Result.of(found, given))
        except (Interrupted, StorageFailed, Busy):
            raise
        except PersonaError as error:
            failures.append(FailedRun(method, seed, child, _why(error, child, out)))
            if (heard := listeners(method, seed)) is not None:
                heard(Note(failures[-1].failure.words))
    write_own_page(path)
    return Comparison(path, tuple(results), tuple(failures))


def _pretrain(
    out: Path,
    recipe: Recipe,
    changes: Mapping[str, Any] | None,
    listener: Listener | None,
    objects: Mapping[str, Any],
) -> None:
    """Do stage (a) of a comparison, once for all methods of a seed; with changes one that failed begins anew."""
    if (out / "result.json").exists():
        return
    if changes and Failure.of(out) is not None:
        recipe = recipe.changed(changes)
        set_aside(out)
    first = recipe.for_pretraining()
    assert first is not None  # else nobody asks for it
    begun = (out / "recipe.toml").exists()
    run_in(out, Recipe.kept(out / "recipe.toml") if begun else first.anchored(), **objects, listener=listener)


def _why(error: PersonaError, child: Path, pretrained: Path) -> Failure:
    """Return why a run of a comparison failed, and see that its directory says so."""
    if isinstance(error, Failed) and (kept := Failure.of(child)) is not None:
        return kept
    failure = pretraining(pretrained) if isinstance(error, Failed) else failure_of(error, "")
    if not child.exists():
        RunDirectory.create(child, {})
        failure.keep(child)
    return failure


def _unchanged(path: Path, recipe: Recipe) -> Recipe:
    """Return the recipe of a run without the label that changes gave it."""
    return recipe.model_copy(update={"label": None}) if (path / CHANGES_FILE).exists() else recipe
