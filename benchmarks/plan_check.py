"""Compare what `personafl plan` says with what the runs then take, for three recipes.

    python benchmarks/plan_check.py --data ../shared/data

A machine that is busy with something else gives other times to the probe than to the runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
MNIST = "mnist/mnist.npz"
CASES = {
    "demo": ["demo.toml", "--seeds", "0"],
    "fedalt small": [
        "fedalt-mnist.toml", "--dataset", MNIST, "--methods", "fedavg,alt-output", "--seeds", "0",
        "rounds=20", "pretrain.rounds=10", "data.partition.clients=40",
    ],
    "quped small": [
        "quped.toml", "--dataset", MNIST, "--methods", "quped-2bit", "--seeds", "0",
        "rounds=30", "training.steps=3", "compare.options.quped.freeze_after=24", "data.partition.clients=10",
        "model.filters=8",
    ],
}  # fmt: skip
KEYS = ("seconds", "memory", "disk", "bytes_up", "bytes_down")
CLI = [sys.executable, "-c", "from personafl.cli import main; main()"]


def words_of(case: str, data: Path) -> list[str]:
    recipe, *words = CASES[case]
    return [str(RECIPES / recipe), *(str(data / word) if word == MNIST else word for word in words)]


def planned(words: list[str]) -> dict[str, float]:
    done = subprocess.run([*CLI, "plan", *words, "--json"], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["total"]


def measured(words: list[str]) -> dict[str, float]:
    """Run the comparison in a process of its own."""
    command = [sys.executable, __file__, "--measure", json.dumps(words)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def measure(words: list[str]) -> None:
    """Do what `personafl compare` does after its imports, and print what it took."""
    from personafl import Recipe, api
    from personafl.cli.options import listed
    from personafl.plan.probe import size_of
    from personafl.recipe.values import from_words
    from personafl.system import peak_memory

    at = next((place for place, word in enumerate(words) if "=" in word), len(words))
    options = dict(zip(words[1:at:2], words[2:at:2], strict=True))
    given = {"data.source": options.get("--dataset"), "compare.methods": listed(options.get("--methods"))}
    values = from_words([words[0], *words[at:]], given | {"compare.seeds": listed(options.get("--seeds"))})
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        done = api.compare(Recipe.parse(*values), out=Path(folder) / "runs")
        seconds = time.monotonic() - began
        runs = [json.loads(path.read_text()) for path in (Path(folder) / "runs").rglob("checkpoint.json")]
        assert not done.failures
        took = {
            "seconds": seconds,
            "memory": peak_memory() * 2**20,
            "disk": size_of(Path(folder) / "runs"),
            "bytes_up": sum(run["bytes_up"] for run in runs),
            "bytes_down": sum(run["bytes_down"] for run in runs),
        }
    print(json.dumps(took))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--case", choices=CASES, action="append")
    options = parser.parse_args()
    if options.measure:
        measure(json.loads(options.measure))
        return
    worst = 0.0
    print(f"{'recipe':<14}{'':<12}{'planned':>12}{'measured':>12}{'ratio':>8}")
    for case in options.case or CASES:
        words = words_of(case, options.data)
        plan, run = planned(words), measured(words)
        for key in KEYS:
            scale, unit = (1, "s") if key == "seconds" else (1e6, "MB")
            ratio = plan[key] / run[key]
            worst = max(worst, abs(ratio - 1))
            label = f"{key} {unit}"
            print(f"{case:<14}{label:<12}{plan[key] / scale:>12.2f}{run[key] / scale:>12.2f}{ratio:>8.2f}", flush=True)
    print(f"worst: {100 * worst:.0f} % off")
    sys.exit(worst > 0.25)


if __name__ == "__main__":
    main()
