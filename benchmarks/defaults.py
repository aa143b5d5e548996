"""Every method with its defaults on every data set: accuracies, and what is worse than training alone or FedAvg.

    python benchmarks/defaults.py --data ../shared/data [--sets fsdd,digits] [--tune 12] [KEY=VALUE …]

Nothing is set but the data: the network, the normalisation, rates, rounds and each method's options are personafl's
own. A cell is the mean over seen clients of the test accuracy in %, of the personal models where a method has any, else
of the global one (g); the mean over seeds. `!` marks a personal model more than a point below the better of local
training and FedAvg, `?` a model no better than always answering the commonest class, `×` a run that failed, with its
reason below the table. With --tune every method is first tuned alike by so many trials, as `personafl compare --tune`
does. Runs are kept in --out: what is there is not run again, so a stopped table goes on. With --pick, and
data.validation set, a second table has for each data set which method validation data alone pick, what it has on test
data, and how far that is below the method that is best there.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

SETS = {
    "digits": "digits",
    "fsdd": "fsdd/fsdd_logmel.npz",
    "writers32": "mnist/mnist_writers32.npz",
    "chars74k": "chars74k_hnd/chars74k_hnd.npz",
    "mnist": "mnist/mnist.npz",
    "fmnist": "fmnist_pfllib/fmnist_pfllib.npz",
    "cifar10": "cifar10/cifar10_20k4k.npz",
    "cifar100": "cifar100/cifar100_5k1k.npz",
    "agnews": "agnews/agnews.npz",
    "shakespeare": "shakespeare/shakespeare_roles.npz",
}
BASELINES = ("local", "fedavg")
POINT = 0.01
_splits: dict[tuple[str, int], Any] = {}  # of a worker: the last data that it dealt

Task = tuple[str, str, int, dict[str, Any], str]  # set, method, seed, changes of the recipe, directory


def place(out: Path, name: str, method: str, seed: int, tune: int | None) -> Path:
    """Return where a run is; a tuned one is in a comparison of its own."""
    return out / name / (f"{method}-seed{seed}" if tune is None else f"{method}-tune{tune}/{method}-seed{seed}")


def one(task: Task) -> tuple[str, float]:
    """Run one method on one data set in a directory of its own; return a line about it and its seconds."""
    import torch

    import personafl
    from personafl.data.build import load
    from personafl.recipe.recipe import Recipe
    from personafl.recipe.values import merged

    name, method, seed, changes, out = task
    torch.set_num_threads(1)
    began = time.perf_counter()
    tune = changes.get("compare", {}).get("tune")
    path = place(Path(out), name, method, seed, tune)
    try:
        recipe = Recipe.parse(merged({"seed": seed, "method": {"name": method}}, changes))
        if (name, seed) not in _splits:
            _splits.clear()
            _splits[name, seed] = load(recipe.data, seed)
        data = _splits[name, seed]
        (Path(out) / name).mkdir(parents=True, exist_ok=True)
        commonest = float(data.y[data.y >= 0].bincount().max() / (data.y >= 0).sum())
        (Path(out) / name / "chance").write_text(str(commonest))
        if tune is None:
            personafl.run(recipe, data=data, out=path, resume=path.exists())
        elif path.parent.exists():
            personafl.resume(path.parent)
        else:
            personafl.compare(recipe, methods=[method], seeds=[seed], out=path.parent)
        line = "done"
    except Exception as error:  # a failure is a result of this table
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".failed").write_text(line)
    return f"{name} {method} seed {seed}: {line}", time.perf_counter() - began


def scores(path: Path) -> dict[str, float]:
    """Return the accuracies of a finished run on seen clients' test data, by model; none if it is not finished."""
    if not (path / "result.json").exists():
        return {}
    rows = json.loads((path / "result.json").read_text())["rows"]
    return {row["model"]: row["accuracy"] for row in rows if (row["clients"], row["split"]) == ("seen", "test")}


def judged(runs: list[Path]) -> tuple[str, float] | None:
    """Return which model a method is judged by, and its mean accuracy; None unless all runs are finished."""
    each = [scores(path) for path in runs]
    model = next((kind for kind in ("personal", "global") if all(kind in found for found in each)), None)
    return None if model is None else (model, sum(found[model] for found in each) / len(each))


def table(out: Path, sets: list[str], methods: list[str], seeds: list[int], tune: int | None) -> str:
    """Return the table as Markdown, and the reasons of what failed."""
    runs = {(name, how): [place(out, name, how, seed, tune) for seed in seeds] for name in sets for how in methods}
    found = {key: judged(paths) for key, paths in runs.items()}
    lines = ["| method | " + " | ".join(sets) + " |", "|---" * (len(sets) + 1) + "|"]
    reasons = []
    for method in methods:
        cells = []
        for name in sets:
            failed = [path.with_suffix(".failed") for path in runs[name, method]]
            reasons += [f"{name} {path.stem}: {path.read_text()}" for path in failed if path.exists()]
            if (mine := found[name, method]) is None:
                cells.append("×" if any(path.exists() for path in failed) else "")
                continue
            model, value = mine
            alone = [other[1] for base in BASELINES if (other := found.get((name, base))) is not None]
            chance = float((out / name / "chance").read_text())
            low = model == "personal" and value < max(alone, default=0) - POINT
            mark = "?" if value < chance + POINT else "!" if low else ""
            cells.append(f"{100 * value:.1f}{' g' if model == 'global' else ''}{mark}")
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *reasons])


def picks(out: Path, sets: list[str], methods: list[str], seeds: list[int], tune: int | None) -> str:
    """Return what validation data pick for each data set, as Markdown."""
    from personafl.errors import BadInput
    from personafl.report.picking import pick
    from personafl.runs.result import Result

    titles = [
        "data",
        "methods",
        "picked",
        "validation",
        "test",
        "best on test",
        "test",
        "behind",
        "at random",
        "by seed",
    ]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for name in sets:
        paths = [(how, place(out, name, how, seed, tune)) for how in methods for seed in seeds]
        found = [(how, Result.load(path)) for how, path in paths if (path / "result.json").exists()]
        try:
            picked = pick(found)
        except BadInput as error:
            lines.append(f"| {name} | {error} |")
            continue
        one = picked.whole
        numbers = [f"{100 * value:.1f}" for value in (one.validation, one.test, one.best_test)]
        behind = "0" if picked.pair is None else f"{picked.pair.mean:.1f} ± {picked.pair.half:.1f}"
        level = f" (level with {', '.join(one.level)})" if one.level else ""
        by_seed = ", ".join(f"{each.method} {100 * each.behind:.1f}" for each in picked.seeds)
        cells = [name, str(len(picked.methods)), one.method + level, *numbers[:2], one.best, numbers[2], behind]
        lines.append("| " + " | ".join([*cells, f"{100 * picked.at_random:.1f}", by_seed]) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing and print the table."""
    from personafl.algorithms import METHODS
    from personafl.recipe.values import from_words

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--tune", type=int, help="trials that each method is tuned by first")
    parser.add_argument("--out", type=Path, default=Path("runs/defaults"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--pick", action="store_true", help="also print what validation data pick")
    parser.add_argument("--show", action="store_true", help="run nothing, print what is there")
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    sets, methods = options.sets.split(","), options.methods.split(",")
    seeds = [int(seed) for seed in options.seeds.split(",")]
    tasks: list[Task] = []
    for name in [] if options.show else sets:
        source = SETS[name] if name == "digits" else str(options.data / SETS[name])
        changes, _ = from_words(options.changes, {"data.source": source, "compare.tune": options.tune})
        for seed in seeds:
            for method in methods:
                path = place(options.out, name, method, seed, options.tune)
                if not scores(path) and not path.with_suffix(".failed").exists():
                    tasks.append((name, method, seed, changes, str(options.out)))
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        for number, done in enumerate(as_completed([pool.submit(one, task) for task in tasks]), 1):
            line, seconds = done.result()
            print(f"{number}/{len(tasks)} {line} ({seconds:.0f} s)", file=sys.stderr, flush=True)
    print(table(options.out, sets, methods, seeds, options.tune))
    if options.pick:
        print(picks(options.out, sets, methods, seeds, options.tune))


if __name__ == "__main__":
    main()
