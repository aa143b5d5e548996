"""The commands for those who operate servers: audit, backup."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from personafl.cli.console import say

Run = Annotated[Path, typer.Argument(metavar="DIR", help="Run directory of a server or a coordinator.")]


def audit_verify(
    directory: Run,
    head: Annotated[
        str | None, typer.Option(metavar="SHA256", help="One that was noted before: a line must have it.")
    ] = None,
) -> None:
    """Say whether the journal is as it was written: no line changed, removed, repeated or moved, and no end cut off."""
    from personafl.api.operating import verify_audit

    found = verify_audit(directory, head=head)
    say(f"{directory}: {found.lines} lines are as they were written; head {found.head}")


def backup(
    directory: Run, target: Annotated[Path, typer.Argument(metavar="COPY", help="New directory for the copy.")]
) -> None:
    """Copy a run directory while its server is at work; a server that is started with the copy goes on from there."""
    from personafl.api.operating import back_up

    found = back_up(directory, target)
    say(f"copy: {target}, after {found.rounds} rounds, {found.lines} lines; head {found.head}")
