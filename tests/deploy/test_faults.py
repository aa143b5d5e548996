"""Damaged files, signals and full disks of real processes: nothing is lost without a word. All of it: `slow`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = Path(__file__).with_name("faults.py")


def driven(*words: str) -> None:
    """Run the driver in a process of its own: it forks, which a process that has used gRPC must not."""
    done = subprocess.run([sys.executable, str(DRIVER), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.system
@pytest.mark.parametrize("words", [("damage", "40"), ("kills", "12"), ("full", "25")], ids=lambda words: words[0])
def test_some_faults(words: tuple[str, ...]) -> None:
    driven(*words)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["damage", "kills", "full"])
def test_all_faults(what: str) -> None:
    driven(what)
