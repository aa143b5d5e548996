"""Attacks on a server: each is refused as it should be, and honest devices come to the simulator's bits."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from assault import Hostile
from assault_messages import framing, squeezed
from deploy_harness import answering

from personafl.deploy import pki

DRIVER = Path(__file__).with_name("attacks.py")


def test_headers_that_are_none_are_refused_and_the_server_goes_on(tmp_path: Path) -> None:
    """All of them on one connection, which must be as good afterwards as before."""
    pki.init(tmp_path / "pki")
    pki.issue(tmp_path / "pki", "device-3")
    wrong = {}

    async def all_of_them() -> None:
        async with answering(tmp_path / "pki") as port:
            hostile: Any = Hostile("device-3", port, tmp_path / "pki", None)  # type: ignore[arg-type]
            for attack in [*framing(), *squeezed()[:1]]:
                said = await attack.attempt(hostile)
                right = {*attack.expected.replace("welcome", "report").split("|"), "call ended"}
                if said not in right:
                    wrong[attack.name] = said
            await hostile.close()

    asyncio.run(all_of_them())
    assert wrong == {}


def driven(*words: str) -> dict[str, Any]:
    """Run the driver in a process of its own, and return what it counts at the end."""
    done = subprocess.run([sys.executable, str(DRIVER), *words], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(lines[-1])
    return found


@pytest.mark.system
def test_honest_devices_finish_with_the_same_bits_under_attack() -> None:
    """How quick calls are is no machine's to promise in a test; `attacks.py` measures it."""
    found = driven("cheap", "0.1")
    assert found["attacks"] > 20
    assert found["bits"]
    assert found["ends"] == []
    assert found["tracebacks"] == found["control_characters_in_log"] == 0
    speed = {"quick", "taken", "served"}
    assert {name: wrong for name, wrong in found["wrong"].items() if set(wrong) - speed} == {}


@pytest.mark.slow
@pytest.mark.parametrize("part", ["messages", "compact", "large", "cloud"])
def test_all_attacks(part: str) -> None:
    found = driven(part)
    assert found["bits"]
    assert found["wrong"] == {}
