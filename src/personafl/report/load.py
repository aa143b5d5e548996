"""Reads what runs left in their directories, finished or not, and checks that they belong on one page.

A recipe is read as plain values: its methods and models may be of packages that are not here.
"""

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from personafl import __version__
from personafl.errors import BadInput
from personafl.runs.result import Result
from personafl.runs.whole import CHANGES_FILE
from personafl.storage.failure import Failure
from personafl.storage.files import read_json
from personafl.storage.rundir import COMPARISON_FILE, RunDirectory, run_path

Values = dict[str, Any]
# Of a row of a result, what the page shows.
NEEDED = ("method", "seed", "model", "clients", "split", "count", "accuracy", "worst_decile", "share_hurt", "quantiles")
NEEDED_COSTS = ("bytes_up", "bytes_down", "bytes_stored", "parameters", "seconds")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run, as far as it got; `begun` is False for one of a comparison that has no directory yet."""

    path: Path
    label: str
    seed: int
    recipe: Values
    environment: Values
    split: Values
    metrics: tuple[Values, ...] = ()
    result: Result | None = None
    failure: Failure | None = None
    begun: bool = True
    beside: str = ""  # the name of its source, where that is part of its label

    @property
    def plain(self) -> str:
        """Its label without the name of its source."""
        return self.label.removesuffix(f" ({self.beside})")

    @property
    def rounds(self) -> int:
        """How many rounds the recipe asks for."""
        return int(self.recipe["rounds"])

    @cached_property
    def trained(self) -> tuple[Values, ...]:
        """The metrics of its rounds, in order."""
        return self.events("round")

    def events(self, kind: str) -> tuple[Values, ...]:
        """Return the metrics of a kind."""
        return tuple(entry for entry in self.metrics if entry["event"] == kind)

    @property
    def rows(self) -> list[Values]:
        """The rows of its result under the label that the page gives it."""
        return [] if self.result is None else [{**row, "method": self.label} for row in self.result.rows]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A directory that was asked for: a run, or a comparison with its runs."""

    path: Path
    recipe_file: str
    recipe: Values
    runs: tuple[Run, ...]
    name: str  # of the directory; of several with one name, with the directories that they are in


def load(paths: Sequence[Path]) -> tuple[Source, ...]:
    """Read runs and comparisons; fail if one is broken, or if they are not of one split."""
    twice = [path for place, path in enumerate(paths) if path.resolve() in [p.resolve() for p in paths[:place]]]
    if twice:
        raise BadInput(f"{twice[0]}: is given twice")
    sources = _named_apart([_source(path, name) for path, name in zip(paths, _names(paths), strict=True)])
    _check_one_split([run for source in sources for run in source.runs if run.begun])
    return sources


def read_text(path: Path) -> str:
    """Return the text of a file of a run directory."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise BadInput(f"{path}: is missing; {path.parent} is not a whole run directory") from error
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read ({error})") from error


def _names(paths: Sequence[Path]) -> list[str]:
    """Return a name for each path: as many of its last parts as tell them apart."""
    parts = [path.resolve().parts for path in paths]
    longest = max(map(len, parts))
    size = next(n for n in range(1, longest + 1) if len({part[-n:] for part in parts}) == len(parts))
    return [Path(*part[-size:]).as_posix() for part in parts]


def _source(path: Path, name: str) -> Source:
    if (path / COMPARISON_FILE).exists():
        recipe = _recipe(path / COMPARISON_FILE)
        pairs = [(method, seed) for method in recipe["compare"]["methods"] for seed in recipe["compare"]["seeds"]]
        runs = tuple(_child(path, recipe, method, seed) for method, seed in pairs)
        return Source(path=path, recipe_file=COMPARISON_FILE, recipe=recipe, runs=runs, name=name)
    if not (path / "recipe.toml").exists():
        raise BadInput(f"{path}: not a run directory (it has neither recipe.toml nor {COMPARISON_FILE})")
    run = _run(path)
    return Source(path=path, recipe_file="recipe.toml", recipe=run.recipe, runs=(run,), name=name)


def _child(path: Path, recipe: Values, method: str, seed: int) -> Run:
    child = run_path(path, method, seed)
    if (child / "recipe.toml").exists():
        run = _run(child)
        return run if (child / CHANGES_FILE).exists() else replace(run, label=method)
    why = Failure.of(child)
    return Run(path=child, label=method, seed=seed, recipe=recipe, environment={}, split={}, failure=why, begun=False)


def _run(path: Path) -> Run:
    environment = read_json(path / "environment.json")
    _check_version(path / "environment.json", environment)
    recipe = _recipe(path / "recipe.toml")
    split = read_json(path / "split.json")
    for key in ("fingerprint", "name", "clients", "seen", "unseen", "samples"):
        if not isinstance(split, dict) or key not in split:
            raise BadInput(f"{path / 'split.json'}: {key} is missing; the file was changed or damaged")
    result = _result(path, split) if (path / "result.json").exists() else None
    label = recipe.get("label") or recipe["method"]["name"]
    if result is not None and result.rows:
        label = result.rows[0]["method"]
    return Run(
        path=path,
        label=label,
        seed=recipe["seed"],
        recipe=recipe,
        environment=environment,
        split=split,
        metrics=tuple(RunDirectory(path).metrics()),
        result=result,
        failure=Failure.of(path),
    )


def _recipe(path: Path) -> Values:
    try:
        recipe = tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{path}: not valid TOML: {error}") from error
    for key in ("method", "data", "compare"):
        if not isinstance(recipe.get(key), dict):
            raise BadInput(f"{path}: section [{key}] is missing; the file was changed or damaged")
    for key in ("seed", "rounds"):
        if not isinstance(recipe.get(key), int):
            raise BadInput(f"{path}: {key} is missing; the file was changed or damaged")
    return recipe


def _check_version(path: Path, environment: Any) -> None:
    try:
        written = environment["packages"]["personafl"]
        newer = _release(written) > _release(__version__)
    except (TypeError, KeyError) as error:
        raise BadInput(f"{path}: does not name the version that wrote it; the file was changed or damaged") from error
    if newer:
        raise BadInput(f"{path.parent}: was written by personafl {written}, and this is {__version__}; update it")


def _release(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _result(path: Path, split: Values) -> Result:
    where = path / "result.json"
    try:
        result = Result.load(path)
        missing = next((key for row in result.rows for key in (*NEEDED, *NEEDED_COSTS) if key not in row), None)
        lengths = {len(column) for column in result.columns.values()}
        sizes = [split["samples"]["train"][client] for client in result.columns["client"]]
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise BadInput(f"{where}: not a result of this version ({error}); the file was changed or damaged") from error
    clients = len(split["seen"]) + len(split["unseen"])
    if missing is not None or lengths != {clients}:
        what = f"{missing} is missing" if missing else f"it does not have the {clients} clients of split.json"
        raise BadInput(f"{where}: {what}; the file was changed or damaged")
    if sizes != result.columns["train"]:
        raise BadInput(f"{where}: has clients with other samples than {path / 'split.json'}; it is of another split")
    return result


def _named_apart(sources: Sequence[Source]) -> tuple[Source, ...]:
    """Give runs of one method and seed in several directories the directory's name too."""
    names = [{(run.label, run.seed) for run in source.runs} for source in sources]
    return tuple(
        replace(
            source, runs=tuple(_with_names(source, {pair for other in names if other is not own for pair in other}))
        )
        for source, own in zip(sources, names, strict=True)
    )


def _with_names(source: Source, taken: set[tuple[str, int]]) -> Iterator[Run]:
    ambiguous = {run.label for run in source.runs if (run.label, run.seed) in taken}
    for run in source.runs:
        named = replace(run, label=f"{run.label} ({source.name})", beside=source.name)
        yield named if run.label in ambiguous else run


def _check_one_split(runs: Sequence[Run]) -> None:
    """Fail unless all runs of a seed have one split, and all seeds one data set divided in one way."""
    first: dict[int, Run] = {}
    for run in runs:
        other = first.setdefault(run.seed, run)
        ours, theirs = run.split["fingerprint"], other.split["fingerprint"]
        if ours != theirs:
            raise BadInput(
                f"{other.path} and {run.path}: not one comparison: under seed {run.seed} their clients have other data "
                f"({other.split['name']}, split {theirs[:12]}; {run.split['name']}, split {ours[:12]}); "
                "nothing can be paired, so make a page of each"
            )
    seeds = list(first.values())
    for run in seeds[1:]:
        for key, ours, theirs in _differences(seeds[0], run):
            raise BadInput(
                f"{seeds[0].path} and {run.path}: not one comparison: {key} is {ours!r} in one, {theirs!r} in the other"
            )


def _differences(one: Run, other: Run) -> Iterator[tuple[str, Any, Any]]:
    """Yield what differs in how two runs of different seeds got their data; a file may have moved."""
    if one.split["name"] != other.split["name"]:
        yield "the data set", one.split["name"], other.split["name"]
    for key in sorted((one.recipe["data"].keys() | other.recipe["data"].keys()) - {"source"}):
        ours, theirs = one.recipe["data"].get(key), other.recipe["data"].get(key)
        if ours != theirs:
            yield f"data.{key}", ours, theirs
