"""The Python interface: the same runs as the command line, with objects where a recipe would have names."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

import personafl.data.build as data_build
from personafl.core.algorithm import Algorithm
from personafl.data.federated import FederatedData
from personafl.errors import BadInput, Busy, Failed, Interrupted, PersonaError, StorageFailed
from personafl.recipe.recipe import Recipe
from personafl.runs.build import prepare
from personafl.runs.failing import failure_of
from personafl.runs.job import check_split
from personafl.runs.listener import Listener, Note
from personafl.runs.result import Result
from personafl.runs.start import settled
from personafl.runs.whole import CHANGES_FILE, begin_or_continue, pretraining, run_in
from personafl.storage.failure import Failure
from personafl.storage.files import read_json
from personafl.storage.rundir import (
    COMPARISON_FILE,
    PAGE_FILE,
    RunDirectory,
    claim_name,
    refuse_existing,
    resume_command,
    run_path,
    set_aside,
)
from personafl.sweep.tuning import check_tuning, tuned

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "Comparison",
    "FailedRun",
    "as_recipe",
    "compare",
    "failed_in",
    "finished_in",
    "joined",
    "notes_of",
    "recipe_of",
    "results_of",
    "resume",
    "rows_of",
    "run",
    "run_path",
    "warnings_of",
]

RecipeLike = Recipe | Mapping[str, Any] | str | Path
Listeners = Callable[[str, int], Listener | None]  # (method, seed) -> the listener of that run


@dataclass(frozen=True)
class FailedRun:
    """A run without a result, and why."""

    method: str
    seed: int
    path: Path
    failure: Failure

    def __str__(self) -> str:
        return f"{self.path.name}: {self.failure.words}"


@dataclass(frozen=True)
class Comparison:
    """Several methods and seeds on the same splits; runs that failed are among the failures, with their reasons."""

    path: Path
    results: tuple[Result, ...]
    failures: tuple[FailedRun, ...] = ()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All rows of all runs."""
        return [row for result in self.results for row in result.rows]

    def table(self) -> pd.DataFrame:
        """Return all rows as one table."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    def to_pandas(self) -> pd.DataFrame:
        """Return a line per client and run; see `Result.to_pandas`."""
        return joined(self.results)


def joined(results: Sequence[Result]) -> pd.DataFrame:
    """Return the clients of several runs as one table; what a run does not have is empty."""
    import pandas as pd

    return pd.concat([result.to_pandas() for result in results], ignore_index=True)


def as_recipe(recipe: RecipeLike) -> Recipe:
    """Return a recipe given as itself, as nested dicts, or as a TOML file's path."""
    if isinstance(recipe, Recipe):
        return recipe
    return Recipe.parse(recipe) if isinstance(recipe, Mapping) else Recipe.read(Path(recipe))


def run(
    recipe: RecipeLike,
    *,
    data: FederatedData | None = None,
    model: nn.Module | None = None,
    algorithm: Algorithm | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    listener: Listener | None = None,
) -> Result:
    """Run one method and return its result; its directory then has a page of it, report.html.

    `data`, `model` and `algorithm` replace what the recipe names. The run directory is `out`, or a new one under runs/.
    With resume=True an existing `out` is continued; give the same objects again, for they are not in the directory.
    """
    recipe = settled(as_recipe(recipe))
    path = Path(out) if out is not None else claim_name(Path("runs"), recipe.name)
    result = run_in(path, recipe, data=data, model=model, algorithm=algorithm, resume=resume, listener=listener)
    _write_page(path)
    return result


def compare(
    recipe: RecipeLike,
    *,
    methods: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    tune: int | None = None,
    out: str | Path | None = None,
    listener: Listeners | None = None,
) -> Comparison:
    """Run several methods and seeds; under one seed they see the same split and the same cohorts.

    `methods` and `seeds` replace the recipe's. With `tune` every method is first tuned by so many trials, on validation
    data. `listener(method, seed)` returns the listener of one run.
    """
    recipe = settled(as_recipe(recipe)).narrowed(methods, seeds, tune)
    path = Path(out) if out is not None else claim_name(Path("runs"), recipe.name)
    refuse_existing(path)
    first, *others = recipe.compare.seeds
    data = data_build.load(recipe.data, first)
    _check_can_start(recipe, [(method, first) for method in recipe.compare.methods], {}, data)
    for seed in others:  # whose splits may have fewer clients
        prepare(recipe.for_method(recipe.compare.methods[0], seed), data_build.load(recipe.data, seed))
    check_tuning(recipe)
    RunDirectory.create(path, {COMPARISON_FILE: recipe.to_toml()})
    return _run_all(recipe, path, listener, {first: data})


def resume(
    path: str | Path, *, changes: Mapping[str, Any] | None = None, listener: Listeners | None = None
) -> Result | Comparison:
    """Continue a run or a comparison that was stopped, to the same result as if it had not been.

    What diverged is not tried again as it was: `changes`, as in {"training.lr": 0.01}, begins the runs that failed
    anew, with these keys of their recipes changed; the others keep theirs.
    """
    path = Path(path)
    recipe = recipe_of(path)
    if changes:
        _check_changes(path, recipe, changes)
    if (path / COMPARISON_FILE).exists():
        for _, _, child in _runs(path):
            if (child / "recipe.toml").exists():
                Recipe.kept(child / "recipe.toml")
        return _run_all(recipe, path, listener, {}, changes or {})
    if (path / "result.json").exists():
        if not (path / PAGE_FILE).exists():
            _write_page(path)
        return Result.load(path)
    own = listener(recipe.method.name, recipe.seed) if listener else None
    if not changes:
        return run(recipe, out=path, resume=True, listener=own)
    result = begin_or_continue(path, _unchanged(path, recipe), changes, listener=own)
    _write_page(path)
    return result


def recipe_of(path: Path) -> Recipe:
    """Return the recipe of a run (as a comparison of one) or of a comparison."""
    whole = (path / COMPARISON_FILE).exists()
    file = path / (COMPARISON_FILE if whole else "recipe.toml")
    if not file.exists():
        raise BadInput(f"{path}: not a run directory (it has no recipe.toml)")
    recipe = Recipe.kept(file)
    return recipe if whole else recipe.alone()


def rows_of(path: Path) -> tuple[list[dict[str, Any]], list[tuple[Path, int, int]], list[FailedRun]]:
    """Return what there is of a run or comparison: rows, (path, rounds done, rounds) of the unfinished, failures."""
    rows: list[dict[str, Any]] = []
    unfinished, failed = [], failed_in(path)
    for method, seed, child in _runs(path):
        if (child / "result.json").exists():
            rows += Result.load(child).rows
        elif (method, seed) not in [(run.method, run.seed) for run in failed]:
            unfinished.append((child, RunDirectory(child).checkpoint().rounds, recipe_of(path).rounds))
    return rows, unfinished, failed


def failed_in(path: Path) -> list[FailedRun]:
    """Return the runs of a run or comparison that failed and were not begun anew since."""
    found = [(method, seed, child, Failure.of(child)) for method, seed, child in _runs(path)]
    return [FailedRun(method, seed, child, why) for method, seed, child, why in found if why is not None]


def notes_of(path: Path) -> list[str]:
    """Return how a run, or the first run of a comparison, saw its data, what was left out of them, and such."""
    begun = (child / "split.json" for _, _, child in _runs(path))
    split: dict[str, Any] = next((read_json(file) for file in begun if file.exists()), {})
    seen = [f"inputs: {split['inputs']}"] if "inputs" in split else []  # directories of version 0.1 do not say it
    return seen + [f"note: {note}" for note in split.get("notes", [])]


def warnings_of(path: Path) -> list[str]:
    """Return what looked wrong in a run or comparison while it was on, a line each."""
    lines = [(method, entry) for method, _, child in _runs(path) for entry in RunDirectory(child).metrics()]
    return [f"{method}: {entry['text']}" for method, entry in lines if entry["event"] == "warning"]


def finished_in(path: Path) -> list[Result]:
    """Return the results that there are of a run or comparison, which may be unfinished."""
    return [Result.load(child) for _, _, child in _runs(path) if (child / "result.json").exists()]


def results_of(path: Path) -> list[Result]:
    """Return the result of a finished run, or of all runs of a finished comparison that did not fail."""
    failed = failed_in(path)
    runs = [child for _, _, child in _runs(path) if child not in [run.path for run in failed]]
    for child in runs:
        if not (child / "result.json").exists():
            raise BadInput(f"{path}: unfinished ({child.name}); continue with: {resume_command(path)}")
    if not runs:
        raise BadInput(f"{path}: has no result; {'; '.join(map(str, failed))}")
    return [Result.load(child) for child in runs]


def _runs(path: Path) -> list[tuple[str, int, Path]]:
    """Return method, seed and directory of a run (its own), or of those of a comparison."""
    recipe = recipe_of(path)
    if not (path / COMPARISON_FILE).exists():
        return [(recipe.label or recipe.method.name, recipe.seed, path)]
    pairs = [(method, seed) for seed in recipe.compare.seeds for method in recipe.compare.methods]
    return [(method, seed, run_path(path, method, seed)) for method, seed in pairs]


def _check_can_start(
    recipe: Recipe, runs: Sequence[tuple[str, int]], changes: Mapping[str, Any], data: FederatedData
) -> None:
    """Fail if any method cannot start, with all that cannot and why."""
    why: dict[str, list[str]] = {}  # reason -> methods
    for method, seed in runs:
        try:
            one = recipe.for_method(method, seed)
            one = one.changed(changes) if changes else one
            prepare(one, data)
            if (first := one.for_pretraining()) is not None:
                prepare(first, data)
        except BadInput as error:
            why.setdefault(str(error), []).append(method)
    able = [method for method, _ in runs if not any(method in methods for methods in why.values())]
    if why and not able and len(why) == 1:
        raise BadInput(next(iter(why)))
    if why:
        told = "; ".join(f"{', '.join(methods)}: {reason}" for reason, methods in why.items())
        without = f"; or leave out what cannot start: --methods {','.join(able)}" if able and not changes else ""
        raise BadInput(f"{told}{without}")


def _check_changes(path: Path, recipe: Recipe, changes: Mapping[str, Any]) -> None:
    """Fail if there is nothing to change, or if what failed cannot start with the changes."""
    failed = failed_in(path)
    if not failed:
        raise BadInput(
            f"{path}: none of its runs failed, and only those can be changed; begin a new run for {', '.join(changes)}"
        )
    if (path / COMPARISON_FILE).exists():
        for seed in dict.fromkeys(run.seed for run in failed):
            runs = [(run.method, seed) for run in failed if run.seed == seed]
            _check_can_start(recipe, runs, changes, data_build.load(recipe.data, seed))
        return
    if objects := read_json(path / "environment.json")["objects"]:
        raise BadInput(f"{path}: was begun in Python with {', '.join(objects)}; begin a new run there")
    prepare(recipe.changed(changes))


def _run_all(
    recipe: Recipe,
    path: Path,
    listener: Listeners | None,
    splits: dict[int, FederatedData],
    changes: Mapping[str, Any] | None = None,
) -> Comparison:
    """Run or finish all runs of a comparison; the others go on without one that fails, which is kept for later."""
    results, failures = [], []
    chosen = {method: found.values for method, found in tuned(recipe, path, listener).items()}
    for method, seed, child in _runs(path):
        if (child / "result.json").exists():
            results.append(Result.load(child))
            continue
        before = Failure.of(child)
        if before is not None and before.diverged and not changes:
            failures.append(FailedRun(method, seed, child, before))
            continue
        if seed not in splits:
            splits = {seed: data_build.load(recipe.data, seed)}  # one split in memory at a time
            for sibling in recipe.compare.methods:
                check_split(run_path(path, sibling, seed), splits[seed])
        out = path / f"pretrain-seed{seed}"
        try:
            one = recipe.for_method(method, seed, chosen.get(method))
            if one.pretrain.rounds:
                own = listener("pretrain", seed) if listener else None
                _pretrain(out, one, changes, splits[seed], own)
                one = one.started(out)
            own = listener(method, seed) if listener else None
            results.append(begin_or_continue(child, one, changes or {}, data=splits[seed], listener=own))
        except (Interrupted, StorageFailed, Busy):
            raise
        except PersonaError as error:
            failures.append(FailedRun(method, seed, child, _why(error, child, out)))
            if listener and (told := listener(method, seed)) is not None:
                told(Note(failures[-1].failure.words))
    _write_page(path)
    return Comparison(path, tuple(results), tuple(failures))


def _pretrain(
    out: Path, recipe: Recipe, changes: Mapping[str, Any] | None, data: FederatedData, listener: Listener | None
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
    run_in(out, Recipe.kept(out / "recipe.toml") if begun else first.anchored(), data=data, listener=listener)


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


def _write_page(path: Path) -> None:
    """Write the page of what is done; whatever may be wrong with it, the results are there all the same."""
    from personafl.report.page import write_page

    try:
        write_page([path])
    except Exception as error:
        warnings.warn(f"{path}: the results are saved, but no report was written ({error})", stacklevel=3)
