"""The command line."""

from personafl.cli.commands import app, main

__all__ = ["app", "main"]
