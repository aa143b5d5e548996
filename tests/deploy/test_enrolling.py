"""Devices that enrol all at once, while others pull, do not end a server: it went through its members as they grew."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "devices", [pytest.param(100, marks=pytest.mark.system), pytest.param(1000, marks=pytest.mark.slow)]
)
def test_all_get_in_and_the_server_goes_on(devices: int) -> None:
    driver = Path(__file__).with_name("enrolling.py")  # it forks, which a process that has used gRPC must not
    done = subprocess.run([sys.executable, str(driver), str(devices)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    assert result["server_goes_on"]
    assert [result[key] for key in ("enrolled", "with_work", "left")] == [devices] * 3
    assert result["tracebacks"] == result["refused"] == 0
    assert not result["ended_badly"]
