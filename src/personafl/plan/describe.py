"""Show a plan: a table of methods, the sum, and warnings."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from personafl.plan.estimate import Plan
from personafl.report.table import grid


def plan_tables(plan: Plan) -> Iterator[RenderableType]:
    """Yield what each method takes, what all take together, and what to look out for."""
    titles = ("method", "runs", "time\na run", "MB up\na run", "MB down\na run", "disk MB\na run", "memory\nMB")
    table = grid(*titles, texts=["method"])
    for each in plan.estimates:
        sizes = (each.bytes_up, each.bytes_down, each.disk, each.memory)
        table.add_row(each.method, str(each.runs), duration(each.seconds), *(_megabytes(size) for size in sizes))
    yield table
    yield ""
    yield Text(f"time:   {duration(plan.seconds)} on this machine, one run after the other", style="bold")
    yield Text(f"memory: {_megabytes(plan.memory)} MB of {_megabytes(plan.machine_memory)} MB")
    yield Text(f"disk:   {_megabytes(plan.disk)} MB of {_megabytes(plan.free_disk)} MB that are free")
    yield Text(f"bytes:  {_megabytes(plan.bytes_up)} MB up, {_megabytes(plan.bytes_down)} MB down, by all clients")
    for warning in plan.warnings:
        yield Text(f"warning: {warning}", style="yellow")


def duration(seconds: float) -> str:
    """Return seconds in a form to read at a glance."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
    return f"{hours / 24:.1f} days"


def _megabytes(size: float) -> str:
    value = size / 1e6
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}"
