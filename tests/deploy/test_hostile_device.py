"""One device of five is hostile: the honest ones keep their accuracy, and somebody is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import ASSAULTS, LONG, poisoned

from personafl.core import wire

DRIVER = Path(__file__).with_name("hostile.py")


def driven(*words: str) -> list[dict[str, Any]]:
    """Run the driver in a process of its own: it forks, which a process that has used gRPC must not."""
    done = subprocess.run([sys.executable, str(DRIVER), "run", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.system
def test_a_hostile_device_of_five_costs_the_others_two_points_at_most() -> None:
    """The worst of them: its sign flipped, as long as a server takes it, and a million samples; with the defaults."""
    honest, attacked = driven("default", "none", str(len(ASSAULTS) - 1))
    assert attacked["accuracy"] > honest["accuracy"] - 0.02
    assert honest["warned"] == []
    assert attacked["clipped"] == attacked["rounds"]
    assert ["device-4" in line for line in attacked["warned"]] == [True]


def test_what_it_sends_is_what_is_said() -> None:
    """No device would be hostile that sends its update as it is."""
    update = {"change": torch.tensor([3.0, -4.0]), "loss": torch.tensor(1.0)}
    for assault in ASSAULTS:
        sent = wire.decode_named(poisoned(wire.encode(update), assault, 0))
        assert torch.equal(sent["loss"], update["loss"])
        if "random" in assault.name:
            assert not torch.allclose(sent["change"], update["change"])
            continue
        factor = LONG / 5 if "norm" in assault.name else 1.0
        torch.testing.assert_close(sent["change"], -factor * update["change"])
