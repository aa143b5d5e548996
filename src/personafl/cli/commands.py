"""The command line. Results go to standard output, everything else to standard error.

Exit codes: 0 done, 2 an error with its remedy, 130 stopped by the user; see `personafl.errors`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from personafl import __version__
from personafl.cli.deploy import add_commands
from personafl.errors import BadInput, Diverged, Interrupted, PersonaError
from personafl.recipe.values import from_words

__all__ = ["app", "main"]

app: typer.Typer = typer.Typer(
    name="personafl",
    help="Personalized federated learning: compare methods, and give every client a model of its own.\n\n"
    "Start with:  personafl compare --methods fedavg,ditto,local",
    epilog="Exit codes: 0 done, 2 an error with its remedy, 130 stopped by you.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
model_app = typer.Typer(help="Look at a model before training it.", no_args_is_help=True)
app.add_typer(model_app, name="model")
data_app = typer.Typer(help="Look at data before training on them.", no_args_is_help=True)
app.add_typer(data_app, name="data")

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RECIPE.toml] [KEY.SUB=VALUE]...",
        help="A recipe file, and changes to it, as in training.lr=0.05. All keys: personafl recipe.",
    ),
]
Dataset = Annotated[
    str | None, typer.Option(metavar="NAME|PATH", help="digits, your file or folder, or hf:NAME (see datasets).")
]
PartitionText = Annotated[
    str | None,
    typer.Option(metavar="KIND", help="How clients share the data, as in dirichlet:alpha=0.1,clients=100, or users."),
]
Model = Annotated[str | None, typer.Option(metavar="NAME", help="A name (see models) or package.module:Name.")]
Rounds = Annotated[int | None, typer.Option(metavar="N", help="Rounds of training.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="New run directory; if not given, runs/NAME-001 and up."),
]
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
Quiet = Annotated[bool, typer.Option("--quiet", "-q", metavar="", help="No progress.")]
Json = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON and nothing else on standard output.")]


def _show_version(value: bool) -> None:
    if value:
        out.print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", metavar="", callback=_show_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    words: Words = None,
    method: Annotated[str | None, typer.Option(metavar="NAME", help="A name (see methods).")] = None,
    dataset: Dataset = None,
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
    from personafl import Recipe, api
    from personafl.storage.rundir import claim_name

    options = _data_options(dataset, partition, model, rounds)
    options |= {"method.name": method, "seed": seed, "start": start, "tracking": _listed(track)}
    recipe = Recipe.parse(*from_words(words, options))
    alone = recipe.compare.model_copy(update={"methods": (recipe.method.name,), "seeds": (recipe.seed,)})
    out_path = out_path or claim_name(Path("runs"), recipe.name)
    with _trained_by(engine, address):
        result = _displayed(
            recipe.model_copy(update={"compare": alone}),
            out_path,
            quiet or as_json,
            lambda listen: api.run(recipe, out=out_path, listener=listen(recipe.method.name, recipe.seed)),
        )
    _report(result.path, result.rows, as_json)


@app.command()
def compare(
    words: Words = None,
    methods: Annotated[
        str | None, typer.Option(metavar="NAMES", help="As in fedavg,ditto,local (see methods).")
    ] = None,
    dataset: Dataset = None,
    partition: PartitionText = None,
    model: Model = None,
    rounds: Rounds = None,
    start: Start = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="NUMBERS", help="As in 0,1,2; the table then has mean ± std.")
    ] = None,
    out_path: Out = None,
    track: Track = None,
    engine: EngineName = None,
    address: Address = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run several methods (and seeds) on the same splits and cohorts, and print a table."""
    from personafl import Recipe, api
    from personafl.storage.rundir import claim_name

    options = _data_options(dataset, partition, model, rounds)
    options |= {"compare.methods": _listed(methods), "compare.seeds": _listed(seeds)}
    recipe = Recipe.parse(*from_words(words, options | {"start": start, "tracking": _listed(track)}))
    out_path = out_path or claim_name(Path("runs"), recipe.name)
    with _trained_by(engine, address):
        result = _displayed(
            recipe, out_path, quiet or as_json, lambda listen: api.compare(recipe, out=out_path, listener=listen)
        )
    _report_all(result, as_json)


@app.command()
def resume(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run or comparison.")],
    engine: EngineName = None,
    address: Address = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Continue a run, comparison or sweep that was stopped; the result is the same as without the stop."""
    from personafl import api
    from personafl.cli import sweep as cli_sweep
    from personafl.recipe.sweep import SWEEP_FILE

    if (path / SWEEP_FILE).exists():
        if engine == "ray":
            raise BadInput(f"--engine ray: the trials of a sweep ({path}) are trained on this machine")
        cli_sweep.resume_sweep(path, quiet, as_json)
        return
    recipe = api.recipe_of(path)
    with _trained_by(engine, address):
        result = _displayed(recipe, path, quiet or as_json, lambda listen: api.resume(path, listener=listen))
    _report_all(result, as_json)


@app.command()
def show(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run or comparison.")],
    details: Annotated[
        bool, typer.Option("--details", metavar="", help="Weighted means, spread, intervals and sizes, for each model.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print the result of a run, comparison or sweep, or how far it got."""
    from personafl import api
    from personafl.cli import sweep as cli_sweep
    from personafl.recipe.sweep import SWEEP_FILE
    from personafl.storage.rundir import resume_command

    if (path / SWEEP_FILE).exists():
        cli_sweep.show_sweep(path, as_json)
        return
    rows, unfinished = api.rows_of(path)
    for child, done, rounds in unfinished:
        if done:
            err.print(f"{child}: {done} of {rounds} rounds done", soft_wrap=True, markup=False)
    if unfinished:
        waiting = sum(not done for _, done, _ in unfinished)
        begun = f"{waiting} of its runs not begun; " if waiting else ""
        err.print(f"{path}: unfinished; {begun}continue with: {resume_command(path)}", soft_wrap=True, markup=False)
    if rows or as_json:
        _report(path, rows, as_json, details)


@app.command("report")
def write_report(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Directories of runs or comparisons.")],
    out_path: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE.html", help="Where to; if not given, RUN/report.html, of several report.html."
        ),
    ] = None,
) -> None:
    """Write one page with all that runs found; several must be of one split."""
    from personafl.report.page import write_page
    from personafl.storage.rundir import PAGE_FILE

    out_path = out_path or (Path(PAGE_FILE) if len(paths) > 1 else None)
    out.print(f"report: {write_page(paths, out_path)}", soft_wrap=True, markup=False)


@app.command()
def watch(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Directories of runs or comparisons.")],
    page: Annotated[
        bool, typer.Option("--page", metavar="", help="Also as a page on this machine (127.0.0.1), until Ctrl-C.")
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="N", help="Port of the page; if not given, a free one.")
    ] = 0,
) -> None:
    """Show runs in progress, from another terminal: round, accuracy, speed and time left; then the result."""
    from personafl.cli.display import result_tables
    from personafl.report.load import load
    from personafl.report.serve import served
    from personafl.report.watch import watch as follow

    load(paths)  # fail before anything is shown
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        if page:
            out.print(f"page: {stack.enter_context(served(paths, port))} (Ctrl-C ends it)", soft_wrap=True)
        follow(paths, out)
        rows = [row for source in load(paths) for run in source.runs for row in run.rows]
        for part in result_tables(rows, out.width):
            out.print(part)
        if page:
            threading.Event().wait()


@app.command()
def export(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a finished run.")],
    clients: Annotated[
        list[str] | None,
        typer.Option("--client", metavar="NAME", help="Also this client's last personal model; may be repeated."),
    ] = None,
    all_clients: Annotated[bool, typer.Option("--all-clients", metavar="", help="Also those of all clients.")] = False,
    out_path: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where to; if not given, RUN/export.")
    ] = None,
    onnx: Annotated[
        bool, typer.Option("--onnx", metavar="", help="Also as .onnx, which onnxruntime runs on its own.")
    ] = False,
    latency: Annotated[
        bool, typer.Option("--latency", metavar="", help="Measure how fast the models are on this machine.")
    ] = False,
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Samples at a time for --latency.")] = 20,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Write the global model of a run for devices, in its most compact form; personafl.load_model(FILE) reads it."""
    from personafl.cli.display import Display, export_tables
    from personafl.exports.export import export as write

    if clients and all_clients:
        raise BadInput("--client and --all-clients: give one of them")
    with Display(err, quiet or as_json).count("models written") as listener:
        exported = write(
            path,
            out_path,
            "all" if all_clients else clients or None,
            onnx=onnx,
            batch=batch if latency else None,
            listener=listener,
        )
    if as_json:
        print(json.dumps(exported.to_json(), allow_nan=False))
        return
    for part in export_tables(exported):
        out.print(part)
    out.print(f"models: {exported.path}", soft_wrap=True, markup=False)


@app.command()
def fit(
    max_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Room for a client's own model: 100k, 1.5M, 64Ki, or bytes.")
    ],
    words: Words = None,
    dataset: Dataset = None,
    partition: PartitionText = None,
    max_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Also: memory to train it in, with the recipe's batch.")
    ] = None,
    names: Annotated[
        str | None,
        typer.Option("--models", metavar="NAMES", help="As in cnn1,mlp:hidden=[16]; if not given, all that suit."),
    ] = None,
    widths: Annotated[
        str | None,
        typer.Option(
            "--bits",
            metavar="NUMBERS",
            help="As in full,4,1; if not given, full,8,4,3,2. 1 bit costs accuracy: it is chosen only if named here.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Find the largest network and its bits per weight that fit on a device, for the devices of a recipe."""
    from personafl import Recipe
    from personafl.cli.display import fit_tables
    from personafl.exports.fit import Limits, parse_bits, parse_models, parse_size
    from personafl.exports.fit import fit as find

    limits = Limits(
        bytes=parse_size(max_bytes, "--max-bytes"),
        memory=None if max_memory is None else parse_size(max_memory, "--max-memory"),
    )
    models = None if names is None else parse_models(names)
    bits = None if widths is None else parse_bits(widths)
    recipe = Recipe.parse(*from_words(words, _data_options(dataset, partition, None, None)))
    found = find(recipe, limits, models, bits)
    if as_json:
        print(json.dumps(found.to_json(), allow_nan=False))
        return
    for part in fit_tables(found):
        out.print(part)


@app.command("recipe")
def print_recipe(words: Words = None) -> None:
    """Print a recipe with all its keys and their values, to start your own from."""
    from personafl import Recipe

    print(Recipe.parse(*from_words(words, {})).to_toml(), end="")


@app.command()
def methods(as_json: Json = False) -> None:
    """List the methods and their options."""
    from personafl.algorithms import METHODS

    entries = [
        {"name": name, "summary": method.summary, "paper": method.paper, "options": method.options}
        for name, method in METHODS.items()
    ]
    _listing(entries, as_json)


@app.command()
def models(as_json: Json = False) -> None:
    """List the models and their options."""
    from personafl.models import MODELS
    from personafl.options import describe

    entries = [
        {"name": name, "summary": (build.__doc__ or "").splitlines()[0], "options": describe(build)}
        for name, build in MODELS.items()
    ]
    _listing(entries, as_json)


@app.command()
def datasets(as_json: Json = False) -> None:
    """List the kinds of data that can be read."""
    from personafl.data.sources import SOURCES

    entries = [{"name": s.name, "summary": s.summary, "write": s.usage, "paper": s.paper} for s in SOURCES]
    _listing(entries, as_json)


@app.command()
def latency(
    servers: Annotated[int, typer.Option(metavar="N", help="Servers of the cloud.")] = 10,
    law: Annotated[
        str | None,
        typer.Option("--latency", metavar="KIND", help="Time of a server's round, as in weibull:shape=2,scale=1."),
    ] = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Measured times of server rounds.")] = None,
    devices: Annotated[int | None, typer.Option(metavar="N", help="Devices of a server; if not given, 10.")] = None,
    active: Annotated[int | None, typer.Option(metavar="N", help="The earliest that take part; 3.")] = None,
    arrival: Annotated[
        str | None, typer.Option(metavar="KIND", help="Time until a device asks; exponential:mean=2.")
    ] = None,
    step: Annotated[str | None, typer.Option(metavar="KIND", help="Time of a local step; exponential:mean=1.")] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", help="Local steps, 1 to N at random; 5.")] = None,
    first: Annotated[int | None, typer.Option(metavar="B", help="Print this B alone.")] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Also draw r against β here.")] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the simulations.")] = 0,
    as_json: Json = False,
) -> None:
    """Print how long it takes until the first B of N servers are ready, and propose how many to wait for."""
    from personafl.latency.times import round_times
    from personafl.latency.waiting import analyse
    from personafl.report import write_chart
    from personafl.report.latency import waiting_chart, waiting_tables

    times, about = round_times(
        law, trace, devices=devices, active=active, arrival=arrival, step=step, steps=steps, seed=seed
    )
    waiting = analyse(times, servers, first=first, seed=seed)
    if as_json:
        print(json.dumps({"times": about, **waiting.only(first).to_json()}, allow_nan=False))
    else:
        for part in waiting_tables(waiting.only(first), about):
            out.print(part)
    if svg is not None:
        write_chart(waiting_chart(waiting, about), svg)
        err.print(f"picture: {svg}", soft_wrap=True, markup=False)


@data_app.command("describe")
def data_describe(
    words: Words = None,
    dataset: Dataset = None,
    partition: PartitionText = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Seed of the split.")] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Also draw clients × classes here.")] = None,
) -> None:
    """Print and draw how clients share a dataset."""
    from personafl import Recipe
    from personafl.data.build import load
    from personafl.data.describe import describe, picture

    recipe = Recipe.parse(*from_words(words, _data_options(dataset, partition, None, None) | {"seed": seed}))
    data = load(recipe.data, recipe.seed)
    describe(data, out)
    if svg is not None:
        picture(data, svg)
        err.print(f"picture: {svg}")


@model_app.command("describe")
def model_describe(
    words: Words = None, dataset: Dataset = None, partition: PartitionText = None, model: Model = None
) -> None:
    """Print which tensors are personal, and what memory a client's training needs; set model.personal=output, …"""
    from personafl import Recipe
    from personafl.cli.display import model_tables
    from personafl.exports.memory import training_memory
    from personafl.runs.runner import prepare

    recipe = Recipe.parse(*from_words(words, _data_options(dataset, partition, model, None)))
    job = prepare(recipe)
    for part in model_tables(job.federation.problems[0], training_memory(job)):
        out.print(part)


@data_app.command("deal")
def data_deal(
    words: Words = None,
    dataset: Dataset = None,
    partition: PartitionText = None,
    out_path: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where to.")] = Path("dealt"),
) -> None:
    """Write each client's data to a file of its own, for devices, and the recipe that their server needs."""
    from personafl import Recipe
    from personafl.deploy.device.datafile import deal

    recipe = Recipe.parse(*from_words(words, _data_options(dataset, partition, None, None)))
    _, files = deal(recipe, out_path)
    out.print(f"{len(files)} files and recipe.toml in {out_path}", soft_wrap=True, markup=False)


add_commands(app)


def main() -> None:
    """Run the command line; errors that a user can act on are one line, and the exit code says which kind."""
    sys.path.append("")  # a model of the user's may be in a file of this folder
    try:
        code = app(standalone_mode=False)
    except PersonaError as error:
        _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        code = Interrupted.exit_code
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        if message := error.format_message():  # the command line's own; empty: its help was printed
            _fail(message, BadInput.exit_code)
        code = BadInput.exit_code
    if code == Interrupted.exit_code:
        _fail("stopped at once; what was saved before is intact", code)
    sys.exit(code if isinstance(code, int) else 0)


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    err.print(Text.assemble(("warning: ", "bold yellow"), str(message)), soft_wrap=True)


def _fail(message: str, code: int) -> NoReturn:
    kind = "" if code == Interrupted.exit_code else "error: "
    err.print(Text.assemble((kind, "bold red"), " ".join(message.split())), soft_wrap=True)
    sys.exit(code)


def _data_options(dataset: str | None, partition: str | None, model: str | None, rounds: int | None) -> dict[str, Any]:
    from personafl.data.config import parse_partition

    return {
        "data.source": dataset,
        "data.partition": None if partition is None else parse_partition(partition),
        "model.name": model,
        "rounds": rounds,
    }


def _trained_by(engine: str | None, address: str | None) -> contextlib.AbstractContextManager[None]:
    """Return the context in which what is run is trained by an engine."""
    if engine not in (None, "local", "ray"):
        raise BadInput(f"--engine: no engine {engine!r}; valid: local, ray")
    if engine != "ray":
        if address is not None:
            raise BadInput("--address: is for --engine ray")
        return contextlib.nullcontext()
    from personafl.simulate.workers.cluster import connected

    return connected(address)


def _listed(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _displayed(recipe: Any, path: Path, quiet: bool, work: Callable[[Any], Any]) -> Any:
    """Run `work(listener of (method, seed))` with a display for the runs of a recipe."""
    from personafl.cli.display import Display
    from personafl.storage.rundir import resume_command

    several = len(recipe.compare.seeds) > 1
    label = (lambda method, seed: f"{method} seed {seed}") if several else (lambda method, seed: method)
    names = [label(method, seed) for method in recipe.compare.methods for seed in recipe.compare.seeds]
    display = Display(err, quiet)
    try:
        with display.open(names), warnings.catch_warnings():
            warnings.showwarning = _warn
            return work(lambda method, seed: display.listener(label(method, seed)))
    except Interrupted as error:  # it names the run that was on; what to continue is the whole
        when = str(error).partition(";")[0]
        raise Interrupted(f"{when}; continue with: {resume_command(path)}") from error


def _report_all(result: Any, as_json: bool) -> None:
    """Print what a run or comparison found; then fail if part of it diverged."""
    _report(result.path, result.rows, as_json)
    if failures := getattr(result, "failures", ()):
        raise Diverged(f"{len(failures)} of its runs diverged: {'; '.join(failures)}")


def _report(path: Path, rows: list[dict[str, Any]], as_json: bool, details: bool = False) -> None:
    from personafl.cli.display import detail_tables, result_tables
    from personafl.storage.rundir import PAGE_FILE

    if as_json:
        print(json.dumps({"run": str(path), "rows": rows}, allow_nan=False))
        return
    for part in detail_tables(rows) if details else result_tables(rows, out.width):
        out.print(part)
    out.print(f"run directory: {path}", soft_wrap=True, markup=False)
    if (path / PAGE_FILE).exists():
        out.print(f"report: {path / PAGE_FILE}", soft_wrap=True, markup=False)


def _listing(entries: list[dict[str, Any]], as_json: bool) -> None:
    """Print entries with their name on the left and all else, a line each, on the right."""
    if as_json:
        print(json.dumps(entries))
        return
    table = Table.grid(padding=(0, 2))
    for entry in entries:
        text = Text(entry["summary"])
        for key, value in entry.items():
            if value and key not in ("name", "summary"):
                text.append(f"\n{key}: {value}", style="dim")
        table.add_row(Text(entry["name"], style="bold"), text)
    out.print(table)


import personafl.cli.reproduce  # noqa: E402  it adds its command to `app`
import personafl.cli.sweep  # noqa: E402, F401  it adds its commands to `app`
