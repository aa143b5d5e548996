"""The commands that find settings and costs: sweep, which `resume` and `show` know as well, and plan."""

from pathlib import Path
from typing import Annotated, Any

import typer

from personafl.cli.console import err, note, print_found
from personafl.cli.options import (
    Dataset,
    Json,
    Label,
    Model,
    Out,
    PartitionText,
    Quiet,
    Rounds,
    TextColumn,
    User,
    Words,
    listed,
    parsed,
)
from personafl.errors import BadInput


def sweep(
    words: Words = None,
    method: Annotated[str | None, typer.Option(metavar="NAME", help="A name (see methods).")] = None,
    dataset: Dataset = None,
    label: Label = None,
    text: TextColumn = None,
    user: User = None,
    partition: PartitionText = None,
    model: Model = None,
    rounds: Rounds = None,
    trials: Annotated[int | None, typer.Option(metavar="N", help="How many; not for a grid.")] = None,
    seeds: Annotated[str | None, typer.Option(metavar="NUMBERS", help="A trial is the mean over them; 0,1,2.")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Trials at a time; if not given, one per core.")
    ] = None,
    out_path: Out = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Try values for keys of a recipe, as its section sweep says, and write the best recipe by validation data."""
    from personafl.storage.rundir import claim_name
    from personafl.sweep.search import sweep as search

    also = {"method.name": method, "data.text": text, "sweep.trials": trials, "sweep.seeds": listed(seeds)}
    recipe = parsed(words, dataset, label, user, partition, model, rounds, also=also)
    path = out_path or claim_name(Path("runs"), f"{recipe.name}-sweep")
    _shown(lambda listener: search(recipe, path, jobs=jobs, listener=listener), quiet, as_json)


def plan(
    words: Words = None,
    method: Annotated[str | None, typer.Option(metavar="NAME", help="Of one run, as personafl run would do.")] = None,
    methods: Annotated[str | None, typer.Option(metavar="NAMES", help="As in fedavg,ditto,local.")] = None,
    dataset: Dataset = None,
    label: Label = None,
    text: TextColumn = None,
    user: User = None,
    partition: PartitionText = None,
    model: Model = None,
    rounds: Rounds = None,
    seeds: Annotated[str | None, typer.Option(metavar="NUMBERS", help="As in 0,1,2.")] = None,
    out_path: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where the runs would be, for the room on that disk.")
    ] = Path("runs"),
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Estimate time, memory, disk and bytes of a comparison or run, by a few rounds on this machine; warn."""
    from personafl.api.display import Display
    from personafl.plan.describe import plan_tables
    from personafl.plan.estimate import make_plan

    if method is not None and (methods is not None or seeds is not None):
        raise BadInput("--method is one run; remove it, or --methods and --seeds")
    also = {
        "method.name": method,
        "data.text": text,
        "compare.methods": listed(methods),
        "compare.seeds": listed(seeds),
    }
    recipe = parsed(words, dataset, label, user, partition, model, rounds, also=also)
    if method is not None:
        recipe = recipe.alone()
    with Display(err, quiet or as_json).count("methods probed") as listener:
        found = make_plan(recipe, out_path, listener)
    print_found(found.to_json(), plan_tables(found), as_json)


def resume_sweep(path: Path, quiet: bool, as_json: bool) -> None:
    """Continue a sweep, as `personafl resume` does."""
    from personafl.sweep.search import resume_sweep as go_on

    _shown(lambda listener: go_on(path, listener=listener), quiet, as_json)


def show_sweep(path: Path, as_json: bool) -> None:
    """Print how far a sweep got, as `personafl show` does."""
    from personafl.sweep.describe import sweep_tables
    from personafl.sweep.search import load_sweep

    found = load_sweep(path)
    print_found(found.to_json(), sweep_tables(found), as_json)


def _shown(work: Any, quiet: bool, as_json: bool) -> None:
    """Run `work(listener)` with progress, and print the sweep that it returns."""
    from personafl.api.display import Display
    from personafl.sweep.describe import sweep_tables, trial_line

    silent = quiet or as_json
    with Display(err, silent or not err.is_terminal).count("trials") as count:

        def listen(trial: Any, done: int, size: int) -> None:
            count(done, size)
            if not silent:
                note(f"{done}/{size} {trial_line(trial)}")

        found = work(listen)
    print_found(found.to_json(), sweep_tables(found), as_json)
