"""Waiting for what other processes and threads do, however busy the machine is."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any


def until(holds: Callable[[], object], process: subprocess.Popen[Any] | None = None) -> None:
    """Wait until something holds, for as long as it takes: what never does ends with the timeout of the test.

    A process that was to bring it about must not end before.
    """
    while not holds():
        if process is not None and process.poll() is not None and not holds():
            raise AssertionError(f"it ended with {process.returncode}: {process.communicate()}")
        time.sleep(0.01)
