"""The commands that look at runs: report, watch, clients; and at waiting times: latency."""

import contextlib
import importlib.util
import threading
from pathlib import Path
from typing import Annotated

import typer

from personafl.cli.console import note, out, print_found, say
from personafl.cli.options import Json
from personafl.errors import BadInput


def report(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Directories of runs or comparisons.")],
    out_path: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE.html", help="Where to; if not given, RUN/report.html, of several report.html."
        ),
    ] = None,
) -> None:
    """Write one page with all that runs found; several must be of one split, and two comparisons are side by side."""
    from personafl.report.page import write_page
    from personafl.storage.rundir import PAGE_FILE

    out_path = out_path or (Path(PAGE_FILE) if len(paths) > 1 else None)
    say(f"report: {write_page(paths, out_path)}")


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
    from personafl.cli.tables import result_tables
    from personafl.report.findings import sentence
    from personafl.report.load import load
    from personafl.report.serve import served
    from personafl.report.watch import watch as follow

    load(paths)  # fail before anything is shown
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        if page:
            out.print(f"page: {stack.enter_context(served(paths, port))} (Ctrl-C ends it)", soft_wrap=True)
        follow(paths, out)
        runs = [run for source in load(paths) for run in source.runs]
        failed = [(f"{run.label} seed {run.seed}", run.failure.words) for run in runs if run.failure is not None]
        found = sentence([(run.label, run.result) for run in runs if run.result is not None])
        for part in result_tables([row for run in runs for row in run.rows], out.width, failed, found):
            out.print(part)
        if page:
            threading.Event().wait()


def clients(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Directories of finished runs or comparisons.")],
    out_path: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="FILE.csv or FILE.parquet; if not given, CSV is printed."),
    ] = None,
) -> None:
    """Write the results of every client, of one or many runs, as one table for other programs."""
    from personafl import api
    from personafl.storage.csvtext import cell
    from personafl.storage.files import atomic_write

    _check_table(out_path)
    if twice := [path for path in paths if paths.count(path) > 1]:
        raise BadInput(f"{twice[0]}: is there twice; give each run once")
    table = api.joined([result for path in paths for result in api.results_of(path)])
    for run in [run for path in paths for run in api.failed_in(path)]:
        note(f"left out: {run}")
    if out_path is None:
        print(table.map(cell).to_csv(index=False), end="")
        return
    parquet = out_path.suffix == ".parquet"
    atomic_write(out_path, table.to_parquet(index=False) if parquet else table.map(cell).to_csv(index=False).encode())
    note(f"{len(table)} lines: {out_path}")


def _check_table(path: Path | None) -> None:
    """Fail if a table cannot be written as asked."""
    if path is None:
        return
    if path.suffix not in (".csv", ".parquet"):
        raise BadInput(f"--out {path}: the name says what to write; end it in .csv or .parquet")
    if path.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise BadInput("--out: Parquet needs pyarrow; run: pip install 'personafl[parquet]', or write .csv")


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
    from personafl.latency.waiting import analyse, round_times
    from personafl.report import write_chart
    from personafl.report.latency import waiting_chart, waiting_tables

    times, about = round_times(
        law, trace, devices=devices, active=active, arrival=arrival, step=step, steps=steps, seed=seed
    )
    waiting = analyse(times, servers, first=first, seed=seed)
    chosen = waiting.only(first)
    print_found({"times": about, **chosen.to_json()}, waiting_tables(chosen, about), as_json)
    if svg is not None:
        write_chart(waiting_chart(waiting, about), svg)
        note(f"picture: {svg}")
