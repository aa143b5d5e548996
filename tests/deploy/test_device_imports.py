"""What a device is made of: its own half, its own method, and nothing of a server or of a simulation.

On commit f1ff10a a device that had trained once had imported 155 modules of personafl with 20,587 lines, all methods
among them, and had made a server's state to know what a broadcast looks like.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from processes import recipe_of

from personafl.core import wire
from personafl.deploy.device.dealing import deal
from personafl.deploy.device.state import DeviceState
from personafl.deploy.server.opening import open_federation

# And what names of classes, moments of inputs and default networks took since; then checksums, states to go back to,
# policies and renewed certificates; then logs that programs read, how a device is, training without contact, privacy;
# then several servers of which one has it, sums that are all a server sees, and gradients of single samples (450);
# then the sections on hostile clients, which a device reads to find none (110); then noise from secrets (150),
# and what is faster on a GPU (130); then weights by losses and backdoors, of which it has none (20). Compression is
# imported where a recipe compresses (-150); then what a task is, for scoring and fine-tuning by whoever trains (80);
# then which sums of a round it was in, and patches of convolutions (130);
# then frozen parts and LoRA of networks (240); then ranks of devices, what looks between layers (90), and that messages
# may differ by client (130). Gradients of single samples are imported where these are protected (-290); then how to
# leave out what no client needs (40).
HALF = 20_587 // 2 + 3_040
# A server's rooms, what only a simulation needs, what people look at, and where data come from that were not dealt.
ABSENT = (
    *("deploy.server", "deploy.device.dealing", "deploy.pki", "flower", "cluster", "runs.build", "runs.job", "api"),
    *(f"simulate.{name}" for name in ("serverside", "simulator", "federation", "cohort", "buffer", "buffered")),
    *(f"simulate.{name}" for name in ("cloud", "servers", "calibrate", "pipeline", "workers")),
    *("report", "sweep", "papers", "plan", "cli", "exports", "evaluate.score", "data.build", "data.sources"),
)
DEVICE = """
import gc, json, sys, tomllib
from pathlib import Path

import personafl.deploy.device.device
from personafl.core.algorithm import ServerRule
from personafl.deploy.device.datafile import load_own
from personafl.deploy.device.state import DeviceState
from personafl.deploy.device.training import LocalClient
from personafl.recipe.recipe import Recipe


def refuse(*_):
    raise AssertionError("a device made a server's state")


folder, number = Path(sys.argv[1]), int(sys.argv[2])
recipe = Recipe.parse(tomllib.loads((folder / "recipe.toml").read_text()))
recipe.algorithm()
for rule in [kind for kind in gc.get_objects() if isinstance(kind, type) and issubclass(kind, ServerRule)]:
    rule.init = rule.broadcast = rule.update = refuse
own = load_own(str(folder / f"device-{number}.safetensors"), number, recipe)
client = LocalClient(recipe, own, number, None, DeviceState(folder / "state", "0" * 32, number))
client.train(0, "0" * 64, (folder / "broadcast").read_bytes())
gc.collect()
names = [name for name in sys.modules if name.partition(".")[0] == "personafl"]
rules = [type(thing).__name__ for thing in gc.get_objects() if isinstance(thing, ServerRule)]
print(json.dumps({"files": {name: sys.modules[name].__file__ for name in names}, "rules": rules}))
"""


@pytest.mark.parametrize(
    ("method", "own"),
    [("quped", {"quantize", "quped"}), pytest.param("fedalt", {"fedalt"}, marks=pytest.mark.system)],
)
def test_a_device_imports_its_own_half_and_its_own_method(method: str, own: set[str], tmp_path: Path) -> None:
    served, _ = deal(recipe_of(method, model={"name": "mlp", "hidden": [8, 8], "personal": "output"}), tmp_path)
    (tmp_path / "broadcast").write_bytes(wire.encode(open_federation(served).serving().broadcast()))
    process = subprocess.run(
        [sys.executable, "-c", DEVICE, str(tmp_path), "1"], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    names = {name.removeprefix("personafl."): Path(file) for name, file in found["files"].items()}
    assert DeviceState(tmp_path / "state", "0" * 32, 1).pending is not None  # it has trained
    assert not [name for name in names if any(f"{name}.".startswith(f"{room}.") for room in ABSENT)]
    methods = {name.removeprefix("algorithms.") for name in names if name.startswith("algorithms.")}
    assert methods - {"personal", "training", "uplink"} == own | {"averaging"}
    assert not found["rules"]
    assert sum(len(file.read_text().splitlines()) for file in names.values()) <= HALF
