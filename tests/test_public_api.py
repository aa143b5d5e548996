"""The public interface is what tests/public_api.txt says, and all of it is on the page made from docstrings."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from pathlib import Path

import typer.main

import personafl
from personafl.cli import app

ROOT = Path(__file__).resolve().parents[1]
LISTED = ROOT / "tests" / "public_api.txt"
sys.path.insert(0, str(ROOT / "docs" / "_build"))
python_page = importlib.import_module("python_page")


def test_the_public_interface_is_the_listed_one() -> None:
    """What is here, users rely on: a change of it belongs into the list and, for them, into the changelog."""
    now, listed = list(python_page.signatures()), LISTED.read_text().splitlines()
    gone, new = [line for line in listed if line not in now], [line for line in now if line not in listed]
    assert now == listed, (
        f"the public interface changed: gone {gone}, new {new}. Say so in CHANGELOG.md under Unreleased (what is gone "
        "breaks users' code), then: python tests/test_public_api.py > tests/public_api.txt"
    )


def test_the_changelog_speaks_of_every_public_function() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    missing = [
        name for name in personafl.__all__ if name not in changelog and inspect.isfunction(getattr(personafl, name))
    ]
    assert missing == []


def test_every_public_name_is_on_the_page_once() -> None:
    sections = [name for names in python_page.SECTIONS.values() for name in names]
    assert sorted(sections) == sorted(personafl.__all__)
    text = python_page.page()
    for name in personafl.__all__:
        assert text.count(f"### `{name}`\n") == 1
    assert "Result.predict(\n    client: str,\n" in text or "Result.predict(client: str" in text


def test_every_command_has_its_function() -> None:
    commands = python_page.COMMANDS
    root = typer.main.get_command(app)
    found = [
        f"{name} {child}" if hasattr(command, "commands") else name
        for name, command in root.commands.items()  # type: ignore[attr-defined]
        for child in getattr(command, "commands", [""])
    ]
    assert sorted(commands) == sorted(found)
    for name in commands.values():
        assert callable(pkgutil.resolve_name(name)), name


if __name__ == "__main__":
    print("\n".join(python_page.signatures()))
