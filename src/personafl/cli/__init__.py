"""The command line: which commands there are, in the order of `personafl --help`, and how their errors end.

Exit codes: 0 done, 2 an error with its remedy, 3 a run failed after it began, 130 stopped by
the user; see `personafl.errors`.
"""

import sys
from collections.abc import Callable
from typing import Annotated, NoReturn

import typer
from rich.text import Text

from personafl import __version__
from personafl.cli import data, deploy, listings, models, operate, privacy, reports, reproduce, runs, sweep
from personafl.cli.console import err, out
from personafl.errors import BadInput, Interrupted, PersonaError, printable
from personafl.system import check_system

__all__ = ["app", "main"]

COMMANDS: dict[str, Callable[..., None]] = {
    "run": runs.run,
    "compare": runs.compare,
    "resume": runs.resume,
    "show": runs.show,
    "report": reports.report,
    "watch": reports.watch,
    "export": models.export,
    "fit": models.fit,
    "recipe": listings.recipe,
    "methods": listings.methods,
    "models": listings.models,
    "datasets": listings.datasets,
    "latency": reports.latency,
    "privacy": privacy.privacy,
    "server": deploy.server,
    "coordinator": deploy.coordinator,
    "device": deploy.device,
    "status": deploy.status,
    "drop": deploy.drop,
    "backup": operate.backup,
    "predict": deploy.predict,
    "flower": deploy.flower,
    "reproduce": reproduce.reproduce,
    "sweep": sweep.sweep,
    "plan": sweep.plan,
    "clients": reports.clients,
}
GROUPS: dict[str, tuple[str, dict[str, Callable[..., None]]]] = {
    "model": ("Look at a model before training it.", {"describe": models.describe}),
    "data": ("Look at data before training on them.", {"describe": data.describe, "deal": data.deal}),
    "audit": ("Is what a server wrote down as it was written.", {"verify": operate.audit_verify}),
    "pki": (
        "Certificates: who is who among servers and devices.",
        {"init": deploy.pki_init, "issue": deploy.pki_issue, "revoke": deploy.pki_revoke},
    ),
}

app: typer.Typer = typer.Typer(
    name="personafl",
    help="Personalized federated learning: compare methods, and give every client a model of its own.\n\n"
    "Start with:  personafl compare --methods fedavg,ditto,local",
    epilog="Exit codes: 0 done, 2 an error with its remedy, 3 a run failed, 130 stopped by you.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _command in COMMANDS.items():
    app.command(_name)(_command)
for _name, (_help, _commands) in GROUPS.items():
    _group = typer.Typer(help=_help, no_args_is_help=True)
    app.add_typer(_group, name=_name)
    for _name, _command in _commands.items():
        _group.command(_name)(_command)


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


def main() -> None:
    """Run the command line; errors that a user can act on are one line, and the exit code says which kind."""
    sys.path.append("")  # a model of the user's may be in a file of this folder
    try:
        check_system()
        code = app(_spelled_out(sys.argv[1:]), standalone_mode=False)
    except PersonaError as error:
        _fail(str(error), error.exit_code)
    except PermissionError as error:
        _fail(f"{error.filename}: no permission to read or write it; allow it, or use a copy", BadInput.exit_code)
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


def _spelled_out(words: list[str]) -> list[str]:
    """Return the command line with the number of trials after a --tune that has none, which Typer cannot leave out."""
    follows = [*words, ""][1:]
    bare = [word == "--tune" and not after.lstrip("-").isdigit() for word, after in zip(words, follows, strict=True)]
    return [part for word, alone in zip(words, bare, strict=True) for part in ([word, "12"] if alone else [word])]


def _fail(message: str, code: int) -> NoReturn:
    kind = "" if code == Interrupted.exit_code else "error: "
    err.print(Text.assemble((kind, "bold red"), printable(" ".join(message.split()))), soft_wrap=True)
    sys.exit(code)
