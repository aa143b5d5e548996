"""The reference of the command line, from the commands themselves."""

from __future__ import annotations

import re
from typing import Any

import typer.main

from personafl.cli import app


def page() -> str:
    """Return the page: every command with its arguments and options."""
    root = typer.main.get_command(app)
    parts = ["# Command line", _plain(root.help), _plain(root.epilog)]
    parts += [_command(path, command) for path, command in _commands(root, "personafl")]
    return "\n\n".join(part for part in parts if part) + "\n"


def _commands(command: Any, path: str) -> list[tuple[str, Any]]:
    children = getattr(command, "commands", None)
    if children is None:
        return [(path, command)]
    return [pair for name, child in children.items() for pair in _commands(child, f"{path} {name}")]


def _command(path: str, command: Any) -> str:
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    options = [param for param in command.params if param.param_type_name == "option"]
    usage = " ".join([path, "[OPTIONS]", *(_metavar(param) for param in arguments)])
    lines = [f"## `{path}`", _plain(command.help), f"    {usage}"]
    rows = [(_metavar(param), param) for param in arguments] + [(_spelling(param), param) for param in options]
    cells = "\n".join(f"| `{name}` | {_help(param)} |" for name, param in rows)
    return "\n\n".join([*lines, f"| option | meaning |\n|---|---|\n{cells}"]) if rows else "\n\n".join(lines)


def _metavar(param: Any) -> str:
    return str(param.metavar or param.name.upper())


def _spelling(param: Any) -> str:
    value = "" if param.is_flag else f" {param.metavar or param.name.upper()}"
    return ", ".join(param.opts) + value


def _help(param: Any) -> str:
    text = _plain(getattr(param, "help", "") or "").replace("|", "\\|")
    known = param.default not in (None, False, (), []) and not callable(param.default)
    return f"{text} Default: `{param.default}`." if known else text


def _plain(text: str | None) -> str:
    return re.sub(r"\[/?[a-z ]+\]", "", text or "").strip()
