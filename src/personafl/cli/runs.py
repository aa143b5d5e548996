"""The commands that train, and those that print what came out: run, compare, resume, show."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from personafl.cli.console import note, out, print_found, say
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
from personafl.cli.sweep import resume_sweep, show_sweep
from personafl.errors import BadInput, Failed
from personafl.storage.rundir import resume_command

if TYPE_CHECKING:
    from personafl.api import FailedRun
    from personafl.runs.result import Result

Start = Annotated[
    str | None, typer.Option("--from", metavar="RUN", help="Start from the global model of a finished run.")
]
Track = Annotated[
    str | None, typer.Option(metavar="NAMES", help="Also write metrics to tensorboard, mlflow, wandb (offline).")
]
EngineName = Annotated[
    str | None, typer.Option("--engine", metavar="local|ray", help="What trains: this machine, or a Ray cluster.")
]
Address = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Of the Ray cluster; if not given, one is started on this machine alone."),
]


def run(
    words: Words = None,
    method: Annotated[str | None, typer.Option(metavar="NAME", help="A name (see methods).")] = None,
    dataset: Dataset = None,
    label: Label = None,
    text: TextColumn = None,
    user: User = None,
    partition: PartitionText = None,
    model: Model = None,
    rounds: Rounds = None,
    start: Start = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Decides split, cohorts, batches, start.")] = None,
    out_path: Out = None,
    track: Track = None,
    engine: EngineName = None,
    address: Address = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run one method."""
    from personafl import api
    from personafl.cli.display import displayed
    from personafl.storage.rundir import claim_name

    also = {"method.name": method, "data.text": text, "seed": seed, "start": start, "tracking": listed(track)}
    recipe = parsed(words, dataset, label, user, partition, model, rounds, also=also)
    out_path = out_path or claim_name(Path("runs"), recipe.name)
    with _trained_by(engine, address):
        result = displayed(
            recipe.alone(),
            out_path,
            quiet or as_json,
            lambda listen: api.run(recipe, out=out_path, listener=listen(recipe.method.name, recipe.seed)),
        )
    _report(result.path, [result], as_json, warned=not quiet)


def compare(
    words: Words = None,
    methods: Annotated[
        str | None, typer.Option(metavar="NAMES", help="As in fedavg,ditto,local (see methods).")
    ] = None,
    dataset: Dataset = None,
    label: Label = None,
    text: TextColumn = None,
    user: User = None,
    partition: PartitionText = None,
    model: Model = None,
    rounds: Rounds = None,
    start: Start = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="NUMBERS", help="As in 0,1,2; the table then has mean ± std.")
    ] = None,
    tune: Annotated[
        int | None,
        typer.Option(metavar="[TRIALS]", help="First tune each method by so many trials (12), on validation data."),
    ] = None,
    pick: Annotated[
        bool, typer.Option("--pick", metavar="", help="Say which method validation data pick, and what it is worth.")
    ] = False,
    out_path: Out = None,
    track: Track = None,
    engine: EngineName = None,
    address: Address = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run several methods (and seeds) on the same splits and cohorts, and print a table."""
    from personafl import api
    from personafl.cli.display import displayed
    from personafl.storage.rundir import claim_name

    lists = {"compare.methods": listed(methods), "compare.seeds": listed(seeds), "tracking": listed(track)}
    also = {**lists, "data.text": text, "compare.tune": tune, "compare.pick": pick or None, "start": start}
    recipe = parsed(words, dataset, label, user, partition, model, rounds, also=also)
    out_path = out_path or claim_name(Path("runs"), recipe.name)
    with _trained_by(engine, address):
        result = displayed(
            recipe, out_path, quiet or as_json, lambda listen: api.compare(recipe, out=out_path, listener=listen)
        )
    _report_all(result, as_json, warned=not quiet)


def resume(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run or comparison.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY.SUB=VALUE]...",
            help="Changes, with which runs that failed begin anew; or rounds=N, for more in all.",
        ),
    ] = None,
    engine: EngineName = None,
    address: Address = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Continue a run, comparison or sweep that was stopped; the result is the same as without the stop."""
    from personafl import api
    from personafl.cli.display import displayed
    from personafl.recipe.sweep import SWEEP_FILE
    from personafl.recipe.values import changes_of

    changes = changes_of(words or [])
    if (path / SWEEP_FILE).exists():
        if engine == "ray":
            raise BadInput(f"--engine ray: the trials of a sweep ({path}) are trained on this machine")
        if changes:
            raise BadInput(f"{', '.join(changes)}: the trials of a sweep ({path}) cannot be changed; begin a new one")
        resume_sweep(path, quiet, as_json)
        return
    recipe = api.recipe_of(path)
    with _trained_by(engine, address):
        result = displayed(
            recipe, path, quiet or as_json, lambda listen: api.resume(path, changes=changes, listener=listen)
        )
    _report_all(result, as_json, warned=not quiet)


def show(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run or comparison.")],
    details: Annotated[
        bool, typer.Option("--details", metavar="", help="Weighted means, spread, intervals and sizes, for each model.")
    ] = False,
    pick: Annotated[
        bool, typer.Option("--pick", metavar="", help="Say which method validation data pick, and what it is worth.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print the result of a run, comparison or sweep, or how far it got."""
    from personafl import api
    from personafl.recipe.sweep import SWEEP_FILE

    if (path / SWEEP_FILE).exists():
        show_sweep(path, as_json)
        return
    rows, unfinished, failed = api.rows_of(path)
    for child, done, rounds in unfinished:
        if done:
            note(f"{child}: {done} of {rounds} rounds done")
    if unfinished:
        waiting = sum(not done for _, done, _ in unfinished)
        begun = f"{waiting} of its runs not begun; " if waiting else ""
        note(f"{path}: unfinished; {begun}continue with: {resume_command(path)}")
    if rows or failed or as_json:
        _report(path, api.finished_in(path), as_json, details, failed, pick=pick)


def _trained_by(engine: str | None, address: str | None) -> contextlib.AbstractContextManager[None]:
    """Return the context in which what is run is trained by an engine."""
    if engine not in (None, "local", "ray"):
        raise BadInput(f"--engine: no engine {engine!r}; valid: local, ray")
    if engine != "ray":
        if address is not None:
            raise BadInput("--address: is for --engine ray")
        return contextlib.nullcontext()
    from personafl.simulate.ray.cluster import connected

    return connected(address)


def _report_all(result: Any, as_json: bool, warned: bool) -> None:
    """Print what a run or comparison found; then fail if part of it did."""
    results, failed = getattr(result, "results", [result]), getattr(result, "failures", ())
    _report(result.path, results, as_json, failed=failed, warned=warned)
    if failed:
        diverged = any(run.failure.diverged for run in failed)
        remedy = "begin them anew with other values" if diverged else "mend what is wrong, and continue with"
        command = f"{resume_command(result.path)}{' KEY=VALUE' if diverged else ''}"
        raise Failed(f"{len(failed)} of {len(failed) + len(results)} runs failed; {remedy}: {command}")


def _report(
    path: Path,
    results: Sequence[Result],
    as_json: bool,
    details: bool = False,
    failed: Sequence[FailedRun] = (),
    warned: bool = False,
    pick: bool = False,
) -> None:
    """Print results, failures and, unless the user was warned as it went, what looked wrong.

    `pick` asks for what validation data pick, whether the recipe does or not.
    """
    from personafl import api
    from personafl.cli.tables import detail_tables, result_tables
    from personafl.recipe.compare import read_tuned
    from personafl.report.findings import behind, sentence
    from personafl.report.picking import pick as must_pick
    from personafl.report.picking import picked_in
    from personafl.storage.rundir import PAGE_FILE

    rows = [row for result in results for row in result.rows]
    labelled = [(result.rows[0]["method"], result) for result in results if result.rows]
    shown, worse = sentence(labelled), behind(labelled)
    picked = must_pick(labelled) if pick else picked_in(labelled) if api.wants_pick(path) else None
    several = len({row["seed"] for row in rows} | {run.seed for run in failed}) > 1
    told = [(f"{run.method} seed {run.seed}" if several else run.method, run.failure.words) for run in failed]
    tables = detail_tables(rows) if details else result_tables(rows, out.width, told, shown, picked)
    failures = [
        {"method": run.method, "seed": run.seed, "run": str(run.path), **dataclasses.asdict(run.failure)}
        for run in failed
    ]
    chosen, warnings = read_tuned(path), api.warnings_of(path)
    also = {"tuned": {label: settings.model_dump() for label, settings in chosen.items()}} if chosen else {}
    chose = {} if picked is None else {"picked": picked.facts()}
    found = {"run": str(path), "rows": rows, "failures": failures, "warnings": [*warnings, *worse], "found": shown}
    print_found(found | also | chose, tables, as_json)
    if as_json:
        return
    for label, settings in chosen.items():
        say(f"tuned {label}: {settings.words}")
    for line in api.notes_of(path):
        say(line)
    for line in [*([] if warned else warnings), *worse]:
        note(f"warning: {line}")
    say(f"run directory: {path}")
    if (path / PAGE_FILE).exists():
        say(f"report: {path / PAGE_FILE}")
