"""The commands that list what a recipe can have: recipe, methods, models, datasets."""

from typing import Any

from rich.table import Table
from rich.text import Text

from personafl.cli.console import print_found
from personafl.cli.options import Json, Words, parsed


def recipe(words: Words = None) -> None:
    """Print a recipe with all its keys and their values, to start your own from."""
    print(parsed(words).to_toml(), end="")


def methods(as_json: Json = False) -> None:
    """List the methods and their options."""
    from personafl.api.commands import list_methods

    _listing(list_methods(), as_json)


def models(as_json: Json = False) -> None:
    """List the models and their options."""
    from personafl.api.commands import list_models

    _listing(list_models(), as_json)


def datasets(as_json: Json = False) -> None:
    """List the kinds of data that can be read."""
    from personafl.api.commands import list_datasets

    _listing(list_datasets(), as_json)


def _listing(entries: list[dict[str, Any]], as_json: bool) -> None:
    """Print entries with their name on the left and all else, a line each, on the right."""
    table = Table.grid(padding=(0, 2))
    for entry in entries:
        text = Text(entry["summary"])
        for key, value in entry.items():
            if value and key not in ("name", "summary"):
                text.append(f"\n{key}: {value}", style="dim")
        table.add_row(Text(entry["name"], style="bold"), text)
    print_found(entries, [table], as_json)
