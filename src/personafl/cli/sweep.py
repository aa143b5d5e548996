"""The commands before and around runs: sweep, plan, and the per-client results of many runs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Annotated, Any

import typer

import personafl.cli.commands as cli
from personafl.errors import BadInput
from personafl.recipe.values import from_words

__all__ = ["resume_sweep", "show_sweep"]


@cli.app.command()
def sweep(
    words: cli.Words = None,
    method: Annotated[str | None, typer.Option(metavar="NAME", help="A name (see methods).")] = None,
    dataset: cli.Dataset = None,
    partition: cli.PartitionText = None,
    model: cli.Model = None,
    rounds: cli.Rounds = None,
    trials: Annotated[int | None, typer.Option(metavar="N", help="How many; not for a grid.")] = None,
    seeds: Annotated[str | None, typer.Option(metavar="NUMBERS", help="A trial is the mean over them; 0,1,2.")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Trials at a time; if not given, one per core.")
    ] = None,
    out_path: cli.Out = None,
    quiet: cli.Quiet = False,
    as_json: cli.Json = False,
) -> None:
    """Try values for keys of a recipe, as its section sweep says, and write the best recipe by validation data."""
    from personafl import Recipe
    from personafl.storage.rundir import claim_name
    from personafl.sweep.search import sweep as search

    options = cli._data_options(dataset, partition, model, rounds)
    options |= {"method.name": method, "sweep.trials": trials, "sweep.seeds": cli._listed(seeds)}
    recipe = Recipe.parse(*from_words(words, options))
    path = out_path or claim_name(Path("runs"), f"{recipe.name}-sweep")
    _shown(lambda listener: search(recipe, path, jobs=jobs, listener=listener), quiet, as_json)


@cli.app.command()
def plan(
    words: cli.Words = None,
    method: Annotated[str | None, typer.Option(metavar="NAME", help="Of one run, as personafl run would do.")] = None,
    methods: Annotated[str | None, typer.Option(metavar="NAMES", help="As in fedavg,ditto,local.")] = None,
    dataset: cli.Dataset = None,
    partition: cli.PartitionText = None,
    model: cli.Model = None,
    rounds: cli.Rounds = None,
    seeds: Annotated[str | None, typer.Option(metavar="NUMBERS", help="As in 0,1,2.")] = None,
    out_path: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where the runs would be, for the room on that disk.")
    ] = Path("runs"),
    quiet: cli.Quiet = False,
    as_json: cli.Json = False,
) -> None:
    """Estimate time, memory, disk and bytes of a comparison or run, by a few rounds on this machine; warn."""
    from personafl import Recipe
    from personafl.cli.display import Display
    from personafl.plan.describe import plan_tables
    from personafl.plan.estimate import make_plan

    if method is not None and (methods is not None or seeds is not None):
        raise BadInput("--method is one run; remove it, or --methods and --seeds")
    options = cli._data_options(dataset, partition, model, rounds) | {"method.name": method}
    options |= {"compare.methods": cli._listed(methods), "compare.seeds": cli._listed(seeds)}
    recipe = Recipe.parse(*from_words(words, options))
    if method is not None:
        recipe = recipe.alone()
    with Display(cli.err, quiet or as_json).count("methods probed") as listener:
        found = make_plan(recipe, out_path, listener)
    if as_json:
        print(json.dumps(found.to_json(), allow_nan=False))
        return
    for part in plan_tables(found):
        cli.out.print(part)


@cli.app.command()
def clients(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Directories of finished runs or comparisons.")],
    out_path: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="FILE.csv or FILE.parquet; if not given, CSV is printed."),
    ] = None,
) -> None:
    """Write the results of every client, of one or many runs, as one table for other programs."""
    from personafl import api
    from personafl.storage.files import atomic_write

    _check_table(out_path)
    if twice := [path for path in paths if paths.count(path) > 1]:
        raise BadInput(f"{twice[0]}: is there twice; give each run once")
    table = api.joined([result for path in paths for result in api.results_of(path)])
    if out_path is None:
        print(table.to_csv(index=False), end="")
        return
    parquet = out_path.suffix == ".parquet"
    atomic_write(out_path, table.to_parquet(index=False) if parquet else table.to_csv(index=False).encode())
    cli.err.print(f"{len(table)} lines: {out_path}", soft_wrap=True, markup=False)


def _check_table(path: Path | None) -> None:
    """Fail if a table cannot be written as asked."""
    if path is None:
        return
    if path.suffix not in (".csv", ".parquet"):
        raise BadInput(f"--out {path}: the name says what to write; end it in .csv or .parquet")
    if path.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise BadInput("--out: Parquet needs pyarrow; run: pip install 'personafl[parquet]', or write .csv")


def resume_sweep(path: Path, quiet: bool, as_json: bool) -> None:
    """Continue a sweep, as `personafl resume` does."""
    from personafl.sweep.search import resume_sweep as go_on

    _shown(lambda listener: go_on(path, listener=listener), quiet, as_json)


def show_sweep(path: Path, as_json: bool) -> None:
    """Print how far a sweep got, as `personafl show` does."""
    from personafl.sweep.search import load_sweep

    _print(load_sweep(path), as_json)


def _shown(work: Any, quiet: bool, as_json: bool) -> None:
    """Run `work(listener)` with progress, and print the sweep that it returns."""
    from personafl.cli.display import Display
    from personafl.sweep.describe import trial_line

    silent = quiet or as_json
    with Display(cli.err, silent or not cli.err.is_terminal).count("trials") as count:

        def listen(trial: Any, done: int, size: int) -> None:
            count(done, size)
            if not silent:
                cli.err.print(f"{done}/{size} {trial_line(trial)}", soft_wrap=True, markup=False)

        found = work(listen)
    _print(found, as_json)


def _print(found: Any, as_json: bool) -> None:
    from personafl.sweep.describe import sweep_tables

    if as_json:
        print(json.dumps(found.to_json(), allow_nan=False))
        return
    for part in sweep_tables(found):
        cli.out.print(part)
