"""More rounds for a run than it was begun with, to the same bits as if it had had them all from the start."""

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from personafl.core.schedule import Linear
from personafl.errors import BadInput
from personafl.recipe.recipe import Recipe
from personafl.storage.failure import Failure
from personafl.storage.files import storage
from personafl.storage.rundir import COMPARISON_FILE, PAGE_FILE, RunDirectory, refuse_existing

_OF_THE_END = ("result.json", PAGE_FILE, "clients.csv", "global.safetensors", "export", "lock")


def longer(recipe: Recipe, rounds: int, where: Path) -> Recipe:
    """Return a recipe with more rounds in all; fail where what is done already depends on how many there are."""
    if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < recipe.rounds:
        raise BadInput(f"{where}: rounds = {rounds!r}: it has {recipe.rounds} already; give more, or begin a new run")
    schedule = recipe.training.schedule
    if isinstance(schedule, Linear) and schedule.rounds < rounds:
        raise BadInput(
            f"{where}: its learning rate comes down to 0 with round {schedule.rounds} (training.schedule is linear), "
            f"so that earlier rounds would have been others; begin a new run with rounds = {rounds}"
        )
    if recipe.privacy is not None and recipe.privacy.noise is None and rounds > recipe.rounds:
        raise BadInput(
            f"{where}: its noise was computed for {recipe.rounds} rounds (privacy.epsilon), and they spend all of it; "
            f"begin a new run with rounds = {rounds}"
        )
    return recipe.model_copy(update={"rounds": rounds})


def prolong(path: Path, rounds: int) -> Recipe:
    """Give the run in a directory more rounds in all, and return its recipe; what is left is then to be run."""
    directory = RunDirectory(path)
    with directory.locked():
        recipe = longer(Recipe.kept(path / "recipe.toml"), rounds, path)
        if (failure := Failure.of(path)) is not None and failure.diverged:
            raise failure.error(path)
        with storage(path):  # the order matters: a crash leaves a run that goes on, with as many rounds or with more
            (path / "result.json").unlink(missing_ok=True)
        directory.forget_tuned()
        directory.replace_recipe(recipe.to_toml())
    return recipe


def check_alone(path: Path) -> None:
    """Fail if a run belongs to a comparison, in which all runs have their rounds in common."""
    whole = path.resolve().parent
    if (whole / COMPARISON_FILE).exists():
        raise BadInput(
            f"{path}: belongs to the comparison {whole}; give out=… for a copy with more rounds, or all of it more "
            f"rounds: personafl.resume({str(whole)!r}, changes={{'rounds': …}})"
        )


def copied(path: Path, out: Path) -> None:
    """Copy a run to a new directory, all of it or nothing, without what it found at the end."""
    refuse_existing(out)
    with storage(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        try:
            shutil.copytree(path, temporary / "run", ignore=lambda folder, names: _left_out(path, Path(folder), names))
            (temporary / "run").rename(out)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _left_out(path: Path, folder: Path, names: Iterable[str]) -> set[str]:
    """Return what is not copied: what came at the end, but not that of a first stage, which is over."""
    return {name for name in names if name in _OF_THE_END} if folder == path else set()
