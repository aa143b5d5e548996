"""Runs that the tests of the page look at; tests that change one copy it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import personafl
from report.cases import SMALL


@pytest.fixture(scope="session")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three methods and two seeds."""
    path = tmp_path_factory.mktemp("runs") / "small"
    personafl.compare(SMALL, methods=["fedavg", "ditto", "local"], seeds=[0, 1], out=path)
    return path


@pytest.fixture(scope="session")
def single(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make a run of a method, once for the same values."""
    made: dict[str, Path] = {}

    def make(name: str, **values: Any) -> Path:
        key = f"{name} {values}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp("runs") / name
            personafl.run({**SMALL, "method": {"name": name}, **values}, out=made[key])
        return made[key]

    return make


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[Path], Path]:
    """Copy a run directory, to change it."""

    def copy(path: Path) -> Path:
        return shutil.copytree(path, tmp_path / path.name)

    return copy
