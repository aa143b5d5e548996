"""The Python interface: the same runs as the command line, with objects where a recipe would have names."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

import personafl.data.build as data_build
from personafl.core.algorithm import Algorithm
from personafl.data.federated import FederatedData
from personafl.errors import BadInput, Diverged
from personafl.recipe.recipe import Recipe
from personafl.runs.build import prepare
from personafl.runs.job import check_split
from personafl.runs.listener import Listener
from personafl.runs.loop import run_job
from personafl.runs.result import Result
from personafl.storage.rundir import (
    COMPARISON_FILE,
    PAGE_FILE,
    RunDirectory,
    claim_name,
    refuse_existing,
    resume_command,
    run_path,
)

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "Comparison",
    "as_recipe",
    "compare",
    "joined",
    "recipe_of",
    "results_of",
    "resume",
    "rows_of",
    "run",
    "run_path",
]

RecipeLike = Recipe | Mapping[str, Any] | str | Path
Listeners = Callable[[str, int], Listener | None]  # (method, seed) -> the listener of that run


@dataclass(frozen=True)
class Comparison:
    """Several methods and seeds on the same splits."""

    path: Path
    results: tuple[Result, ...]
    failures: tuple[str, ...] = ()  # what diverged, one line each

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
    recipe = as_recipe(recipe).anchored()
    path = Path(out) if out is not None else claim_name(Path("runs"), recipe.name)
    result = _run(recipe, path, data=data, model=model, algorithm=algorithm, resume=resume, listener=listener)
    _write_page(path)
    return result


def _run(
    recipe: Recipe,
    path: Path,
    *,
    data: FederatedData | None,
    model: nn.Module | None = None,
    algorithm: Algorithm | None = None,
    resume: bool = True,
    listener: Listener | None,
) -> Result:
    again = resume and path.exists()
    if not again:
        refuse_existing(path)
    job = prepare(recipe, data, model, algorithm)
    if again:
        check_split(path, job.federation.data)
        directory = RunDirectory(path)
    else:
        directory = RunDirectory.create(path, job.files())
    if (first := recipe.for_pretraining()) is not None:
        data = data or data_build.load(recipe.data, recipe.seed)
        _run(first, path / "pretrain", data=data, model=model, listener=listener)
        job = dataclasses.replace(prepare(recipe.started(path / "pretrain"), data, model, algorithm), recipe=recipe)
    return run_job(job, directory, listener)


def compare(
    recipe: RecipeLike,
    *,
    methods: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    out: str | Path | None = None,
    listener: Listeners | None = None,
) -> Comparison:
    """Run several methods and seeds; under one seed they see the same split and the same cohorts.

    `methods` and `seeds` replace the recipe's. `listener(method, seed)` returns the listener of one run.
    """
    recipe = as_recipe(recipe).anchored().narrowed(methods, seeds)
    path = Path(out) if out is not None else claim_name(Path("runs"), recipe.name)
    refuse_existing(path)
    seed = recipe.compare.seeds[0]
    data = data_build.load(recipe.data, seed)
    for method in recipe.compare.methods:
        prepare(recipe.for_method(method, seed), data)  # fail before the first run if any of them cannot start
    RunDirectory.create(path, {COMPARISON_FILE: recipe.to_toml()})
    return _run_all(recipe, path, listener, {seed: data})


def resume(path: str | Path, *, listener: Listeners | None = None) -> Result | Comparison:
    """Continue a run or a comparison that was stopped, to the same result as if it had not been."""
    path = Path(path)
    recipe = recipe_of(path)
    if (path / COMPARISON_FILE).exists():
        return _run_all(recipe, path, listener, {})
    if (path / "result.json").exists():
        if not (path / PAGE_FILE).exists():
            _write_page(path)
        return Result.load(path)
    own = listener(recipe.method.name, recipe.seed) if listener else None
    return run(recipe, out=path, resume=True, listener=own)


def recipe_of(path: Path) -> Recipe:
    """Return the recipe of a run (as a comparison of one) or of a comparison."""
    if (path / COMPARISON_FILE).exists():
        return Recipe.read(path / COMPARISON_FILE)
    if not (path / "recipe.toml").exists():
        raise BadInput(f"{path}: not a run directory (it has no recipe.toml)")
    return Recipe.read(path / "recipe.toml").alone()


def rows_of(path: Path) -> tuple[list[dict[str, Any]], list[tuple[Path, int, int]]]:
    """Return the rows of what is finished in a run or comparison, and (path, rounds done, rounds) of what is not."""
    rows: list[dict[str, Any]] = []
    unfinished = []
    for child in _runs(path):
        if (child / "result.json").exists():
            rows += Result.load(child).rows
        else:
            unfinished.append((child, RunDirectory(child).checkpoint().rounds, recipe_of(path).rounds))
    return rows, unfinished


def results_of(path: Path) -> list[Result]:
    """Return the results of a finished run, or of all runs of a finished comparison."""
    runs = _runs(path)
    for child in runs:
        if not (child / "result.json").exists():
            raise BadInput(f"{path}: unfinished ({child.name}); continue with: {resume_command(path)}")
    return [Result.load(child) for child in runs]


def _runs(path: Path) -> list[Path]:
    """Return the directories of a run (its own) or comparison."""
    compare = recipe_of(path).compare
    if not (path / COMPARISON_FILE).exists():
        return [path]
    return [run_path(path, method, seed) for seed in compare.seeds for method in compare.methods]


def _run_all(recipe: Recipe, path: Path, listener: Listeners | None, splits: dict[int, FederatedData]) -> Comparison:
    """Run or finish all runs of a comparison; a run that diverges does not stop the others."""
    results, failures = [], []
    for seed in recipe.compare.seeds:
        for method in recipe.compare.methods:
            child = run_path(path, method, seed)
            if (child / "result.json").exists():
                results.append(Result.load(child))
                continue
            if seed not in splits:
                splits = {seed: data_build.load(recipe.data, seed)}  # one split in memory at a time
                for sibling in recipe.compare.methods:
                    check_split(run_path(path, sibling, seed), splits[seed])
            own = listener(method, seed) if listener else None
            try:
                one = recipe.for_method(method, seed)
                if (first := one.for_pretraining()) is not None:
                    one = one.started(_pretrained(first, path, seed, splits[seed], listener))
                results.append(_run(one.anchored(), child, data=splits[seed], listener=own))
            except Diverged as error:
                failures.append(f"{child.name}: {error}")
    _write_page(path)
    return Comparison(path, tuple(results), tuple(failures))


def _write_page(path: Path) -> None:
    """Write the page of what is done; whatever may be wrong with it, the results are there all the same."""
    from personafl.report.page import write_page

    try:
        write_page([path])
    except Exception as error:
        warnings.warn(f"{path}: the results are saved, but no report was written ({error})", stacklevel=3)


def _pretrained(recipe: Recipe, path: Path, seed: int, data: FederatedData, listener: Listeners | None) -> Path:
    """Do stage (a) of a comparison, once for all methods of a seed, and return its directory."""
    out = path / f"pretrain-seed{seed}"
    if not (out / "result.json").exists():
        _run(recipe.anchored(), out, data=data, listener=listener("pretrain", seed) if listener else None)
    return out
