"""What there is in the directories of runs and comparisons, finished or not."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from personafl.errors import BadInput
from personafl.recipe.recipe import Recipe
from personafl.storage.failure import Failure
from personafl.storage.files import read_json
from personafl.storage.rundir import COMPARISON_FILE, RunDirectory, run_path


@dataclass(frozen=True)
class FailedRun:
    """A run without a result, and why."""

    method: str
    seed: int
    path: Path
    failure: Failure

    def __str__(self) -> str:
        return f"{self.path.name}: {self.failure.words}"


def recipe_of(path: Path) -> Recipe:
    """Return the recipe of a run (as a comparison of one) or of a comparison."""
    whole = (path / COMPARISON_FILE).exists()
    file = path / (COMPARISON_FILE if whole else "recipe.toml")
    if not file.exists():
        raise BadInput(f"{path}: not a run directory (it has no recipe.toml)")
    recipe = Recipe.kept(file)
    return recipe if whole else recipe.alone()


def runs_of(path: Path) -> list[tuple[str, int, Path]]:
    """Return method, seed and directory of a run (its own), or of those of a comparison."""
    recipe = recipe_of(path)
    if not (path / COMPARISON_FILE).exists():
        return [(recipe.label or recipe.method.name, recipe.seed, path)]
    pairs = [(method, seed) for seed in recipe.compare.seeds for method in recipe.compare.methods]
    return [(method, seed, run_path(path, method, seed)) for method, seed in pairs]


def wants_pick(path: Path) -> bool:
    """Say whether a comparison was asked which method validation data pick; a run, or one that is gone, was not."""
    return (path / COMPARISON_FILE).exists() and recipe_of(path).compare.pick


def failed_in(path: Path) -> list[FailedRun]:
    """Return the runs of a run or comparison that failed and were not begun anew since."""
    found = [(method, seed, child, Failure.of(child)) for method, seed, child in runs_of(path)]
    return [FailedRun(method, seed, child, why) for method, seed, child, why in found if why is not None]


def notes_of(path: Path) -> list[str]:
    """Return how a run, or the first run of a comparison, saw its data, what was left out of them, and such."""
    begun = (child / "split.json" for _, _, child in runs_of(path))
    split: dict[str, Any] = next((read_json(file) for file in begun if file.exists()), {})
    seen = [f"inputs: {split['inputs']}"] if "inputs" in split else []  # directories of version 0.1 do not say it
    return seen + [f"note: {note}" for note in split.get("notes", [])]


def warnings_of(path: Path) -> list[str]:
    """Return what looked wrong in a run or comparison while it was on, a line each."""
    lines = [(method, entry) for method, _, child in runs_of(path) for entry in RunDirectory(child).metrics()]
    return [f"{method}: {entry['text']}" for method, entry in lines if entry["event"] == "warning"]


def write_own_page(path: Path) -> None:
    """Write the page of what is done; whatever may be wrong with it, the results are there all the same."""
    from personafl.report.page import write_page

    try:
        write_page([path])
    except Exception as error:
        warnings.warn(f"{path}: the results are saved, but no report was written ({error})", stacklevel=3)
