"""The tables of finished run directories; runs that cannot be compared are refused."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from personafl import api
from personafl.errors import BadInput
from personafl.papers.catalog import Paper
from personafl.papers.preset import Preset, named_by
from personafl.papers.show import Shown
from personafl.papers.verdict import Runs
from personafl.recipe.recipe import Recipe
from personafl.runs.result import Result
from personafl.storage.files import read_json


def tables_of(paths: Sequence[Path], paper: Paper, names: Sequence[str]) -> tuple[list[Shown], list[Path]]:
    """Return tables of a paper, from whatever comparisons have their runs, and the comparisons that are unfinished."""
    every = comparisons(paths)
    runs, unfinished = finished(every)
    have = {run for run, _ in runs}
    known = [name for name in names if have.intersection(paper.tables[name].runs)]
    if not known:
        needed = dict.fromkeys(run for name in names for run in paper.tables[name].runs)
        raise BadInput(f"{paths[0]}: has no finished run of {', '.join(needed) or 'them: they are not made by runs'}")
    sources = " ".join(f"--from {shlex.quote(str(path))}" for path in paths)
    sizes: dict[str, set[int]] = {}
    for recipe in map(api.recipe_of, every):
        sizes.setdefault(size_of(recipe), set()).update(recipe.compare.seeds)
    made = "; ".join(_with_seeds(size, sorted(seeds)) for size, seeds in sizes.items())
    return [
        Shown.of(paper, name, runs, made, None, f"personafl reproduce {paper.key}/{name} {sources}") for name in known
    ], unfinished


def tables_of_preset(path: Path, preset: Preset | None = None) -> tuple[list[Shown], list[Path]]:
    """Return the tables of one comparison that `personafl reproduce` made; None: all that it has the runs for."""
    recipe = api.recipe_of(path)
    made = named_by(recipe)
    if made is None:
        raise BadInput(
            f"{path}: not made by reproduce; say which table it is: personafl reproduce PAPER/TABLE --from …"
        )
    runs, unfinished = finished([path])
    asked = set(recipe.compare.methods)
    names = [name for name, table in (preset or made).tables.items() if asked.issuperset(table.runs)]
    differs = made.differs + _changed(made, recipe, path)
    size = "" if made.size == "small" else f" --size {made.size} --dataset-dir DIR"
    return [
        Shown.of(made.paper, name, runs, ran(recipe), differs, f"personafl reproduce {made.paper.key}/{name}{size}")
        for name in names
    ], unfinished


def comparisons(paths: Sequence[Path]) -> list[Path]:
    """Return comparisons: a folder that is none stands for those in it."""
    found = []
    for path in paths:
        inside = [] if (path / "comparison.toml").exists() else sorted(path.glob("*/comparison.toml"))
        found += [file.parent for file in inside] or [path]
    return found


def finished(paths: Sequence[Path]) -> tuple[Runs, list[Path]]:
    """Return the finished runs of comparisons by (method or variant, seed), and the comparisons that are not finished.

    Runs of one seed must have one split, for their differences are taken.
    """
    runs: dict[tuple[str, int], Result] = {}
    splits: dict[int, tuple[str, Path]] = {}
    unfinished = []
    for path in paths:
        recipe = api.recipe_of(path)
        for seed in recipe.compare.seeds:
            for method in recipe.compare.methods:
                child = api.run_path(path, method, seed)
                if not (child / "result.json").exists():
                    unfinished.append(path)
                    continue
                if (method, seed) in runs:
                    raise BadInput(f"{child}: {method} with seed {seed} is also in {runs[method, seed].path}; give one")
                _check_split(child, seed, splits)
                runs[method, seed] = _loaded(child)
    return runs, list(dict.fromkeys(unfinished))


def ran(recipe: Recipe) -> str:
    """Say what was run: what decides the size of a comparison, and its seeds."""
    return _with_seeds(size_of(recipe), recipe.compare.seeds)


def _with_seeds(size: str, seeds: Sequence[int]) -> str:
    return f"{size}; seeds {', '.join(map(str, seeds))}"


def size_of(recipe: Recipe) -> str:
    """Say what decides the size of a comparison: data and clients, who takes part, how long, the network."""
    partition, training = recipe.data.partition, recipe.training
    dealt = {} if partition is None else partition.model_dump(exclude={"kind"}, exclude_none=True)
    kind = "" if partition is None else f" {partition.kind}:{_pairs(dealt)}"
    if recipe.cloud is not None:
        part = f"{recipe.cloud.servers} servers with {recipe.cloud.active or 'all'} active devices"
    elif "clients" in dealt:
        part = f"{recipe.federation.size(dealt['clients'])} of {dealt['clients']} clients a round"
    else:
        part = f"cohort {recipe.federation.cohort}"
    rounds = {recipe.for_method(name, 0).rounds or recipe.rounds for name in recipe.compare.methods}  # 0: tuning alone
    long = f"{min(rounds)} rounds" if len(rounds) == 1 else f"{min(rounds)} to {max(rounds)} rounds"
    before = f"{recipe.pretrain.rounds} + " if recipe.pretrain.rounds else ""
    fewest = training.least_steps or training.least_epochs
    least = f"{fewest} to " if fewest else ""
    epochs = f"{least}{training.epochs} epochs" if (training.epochs or 1) > 1 else "1 epoch"
    work = f"{least}{training.steps} steps" if training.steps else epochs
    network = f"{recipe.model.name} {_pairs(recipe.model.options)}".strip()
    return f"{Path(recipe.data.source).name}{kind}; {part}; {before}{long} of {work}, batch {training.batch}; {network}"


def _pairs(values: Mapping[str, Any]) -> str:
    return ",".join(f"{key}={value}" for key, value in values.items())


def _changed(preset: Preset, used: Recipe, path: Path) -> str:
    """Say so if a run's recipe is not the preset's; which data, methods and seeds it had is said elsewhere."""
    meant = preset.recipe(given=dict.fromkeys(preset.paper.datasets, path))
    parts = [
        recipe.model_dump(exclude={"data": {"source"}, "compare": {"methods", "seeds", "options", "variants"}})
        for recipe in (meant, used)
    ]
    entries = [(recipe.compare.options, recipe.compare.variants) for recipe in (meant, used)]
    same = parts[0] == parts[1] and all(
        entries[0][kind].get(name) == entry for kind in (0, 1) for name, entry in entries[1][kind].items()
    )
    return "" if same else f"; its recipe was changed, see {path}/comparison.toml"


def _loaded(path: Path) -> Result:
    try:
        return Result.load(path)
    except (KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path}/result.json: not a result of this version ({error}); run it again") from error


def _check_split(path: Path, seed: int, splits: dict[int, tuple[str, Path]]) -> None:
    own = read_json(path / "split.json").get("fingerprint", "")
    known, where = splits.setdefault(seed, (own, path))
    if own != known:
        raise BadInput(
            f"{path}: seed {seed} has another split than in {where} ({own[:12]}, {known[:12]}): they cannot be compared"
        )
