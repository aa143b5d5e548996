"""Ditto's claim: personal models under 20, 50 and 80 % hostile clients and its three attacks, beside robust rules.

    python benchmarks/ditto_claim.py --out claim.json [--jobs 14] [--minutes 60] [--seeds 0,1,2]

T. Li et al., ICML 2021, section 4: hostile clients train on random labels (A1), send Gaussian noise (A2), or train on
random labels and send ten times that (A3). Handwritten digits and clients as in recipes/robust.toml. Rules are told how
many are hostile, as far as they take it: from half of the clients on none of them does, and they are told of the most
that they take. Bulyan, which needs 4f + 3 clients, is left out there. Prints the mean accuracy of honest clients in %.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import personafl
from jobs import ran

RECIPE = Path(__file__).parents[1] / "recipes" / "robust.toml"
ATTACKS = {"A1": "label-noise", "A2": "random", "A3": "replace"}
SHARES = (0.2, 0.5, 0.8)
MOST = 14  # of 30 clients that a rule with n ≥ 2f + 1 takes
RULES = ("median", "trimmed-mean", "meamed", "geometric-median", "krum", "multi-krum", "caf", "centered-clipping")
KINDS: dict[str, dict[str, Any]] = {
    "local": {},
    "fedavg": {},
    **{rule: {"rule": rule} for rule in RULES},
    "bulyan": {"rule": "bulyan"},
    "nnm + trimmed-mean": {"rule": "trimmed-mean", "pre": ["nnm"]},
    "clip to the median": {"clip": {"times": 1.0}},
    "ditto": {},
    "ditto, pull 0.1": {},
    "ditto, nnm + trimmed-mean": {"rule": "trimmed-mean", "pre": ["nnm"]},
}


def names(seeds: list[int]) -> Iterator[str]:
    """Yield the runs: kind/attack/share/seed."""
    for seed in seeds:
        yield from (f"{kind}/none/0/{seed}" for kind in ("local", "fedavg", "ditto", "ditto, pull 0.1"))
        for kind in list(KINDS)[1:]:
            shares = SHARES[:1] if kind == "bulyan" else SHARES
            yield from (f"{kind}/{attack}/{share}/{seed}" for attack in ATTACKS for share in shares)


def one(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Do one run; return the accuracy of honest clients, by model."""
    kind, attack, share, seed = name.split("/")
    settings = tomllib.loads(RECIPE.read_text())
    for section in ("compare", "attack"):
        del settings[section]
    robust = dict(KINDS[kind])
    if attack != "none":
        settings["attack"] = {"kind": ATTACKS[attack], "share": float(share)}
        if "rule" in robust:
            robust["f"] = min(round(30 * float(share)), MOST)
    if robust:
        settings["robust"] = robust
    method = kind.split(",")[0] if kind.startswith(("ditto", "local")) else "fedavg"
    settings |= {"method": {"name": method}, "seed": int(seed), "engine": {"device": "cpu", "workers": 1, "threads": 1}}
    if "pull" in kind:
        settings["method"]["pull"] = 0.1
    with tempfile.TemporaryDirectory() as folder:
        result = personafl.run(recipe=settings, out=Path(folder) / "run", progress=False)
    rows = [row for row in result.rows if (row["clients"], row["split"]) == ("seen", "test")]
    return {row["model"]: row["accuracy"] for row in rows if row["model"] in ("global", "personal")}


def table(found: dict[str, Any], seeds: list[int]) -> Iterator[str]:
    """Yield the lines of a table."""
    columns = [(attack, share) for share in SHARES for attack in ATTACKS]
    yield "| | none | " + " | ".join(f"{attack}, {share:.0%}" for attack, share in columns) + " |"
    yield "|---" * (len(columns) + 2) + "|"
    for kind in KINDS:
        model = "personal" if kind.startswith(("ditto", "local")) else "global"
        cells = []
        for attack, share in [("none", 0), *columns]:
            runs = [found.get(f"{kind}/{attack}/{share}/{seed}", {}).get(model) for seed in seeds]
            values = [100 * value for value in runs if value is not None]
            spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.1f}{spread}" if values else "")
        yield f"| {kind} | " + " | ".join(cells) + " |"


def main() -> None:
    """Run what is not there yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the results, as JSON")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no more is done")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--first", type=int, help="do only so many runs, to try it")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    found = ran(one, list(names(seeds))[: options.first], {}, options.out, options.jobs, options.minutes)
    print(*table(found, seeds), sep="\n")


if __name__ == "__main__":
    main()
