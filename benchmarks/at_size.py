"""A paper's table at its size: each method's rate chosen by validation data, then all seeds, many runs at a time.

    python benchmarks/at_size.py quped/table8-4 --dataset-dir DIR --out RUNS [--rates 0.2,0.1,0.05] [--seeds 0,1,2]
                                 [--trial KEY=VALUE …] [--jobs 12] [--minutes 9] [--only tune|run] [KEY=VALUE …]

A trial is a run of seed 0, changed by --trial (to fewer rounds, say), without a fifth of each client's training data,
by which it is judged: the mean over clients of personal models' accuracy, of the global one's where there are none.
QuPeD's shared model has a rate of its own, which is tried as 1 and 5 times the personal one's. Variants of a method
(quped-2bit, quped-1bit) have the rates of the first of them. What was chosen, and every trial, is in RUNS/rates.json;
with `--only run`, methods that are not there have the preset's rates. The runs, on all training data, are in
RUNS/METHOD-SEED, one comparison each:

    personafl reproduce quped/table8-4 $(printf ' --from %s' RUNS/*-[0-9])

What is there is not run again. With --minutes what is not finished by then is ended, and goes on at the next call.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RATES = "0.2,0.15,0.125,0.1,0.075,0.05"  # of QuPeD's Appendix D.2.2
TEACHERS = (1.0, 5.0)


@dataclass(frozen=True)
class Task:
    """One method with one seed, in a comparison of its own."""

    table: str
    folder: Path
    changes: tuple[str, ...]
    method: str
    seed: int
    out: Path


def recipe_of(table: str, folder: Path, changes: list[str]) -> Any:
    """Return the recipe of a table at the paper's size."""
    from personafl.papers.catalog import find
    from personafl.papers.preset import presets

    paper, tables = find(table)
    (preset,) = presets(paper, tables, "paper")
    return preset.recipe(folder, {}, changes, None)


def run(task: Task) -> tuple[str, float]:
    """Run or go on with one; return a line about it and its seconds."""
    import torch

    import personafl

    torch.set_num_threads(1)
    began = time.perf_counter()
    try:
        if task.out.exists():
            personafl.resume(task.out, progress=False)
        else:
            recipe = recipe_of(task.table, task.folder, list(task.changes))
            personafl.compare(recipe, methods=[task.method], seeds=[task.seed], out=task.out, progress=False)
        line = "done"
    except Exception as error:  # a rate that diverges is a result
        line = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"{task.out.name}: {line}", time.perf_counter() - began


def score(out: Path, split: str) -> float | None:
    """Return a finished run's accuracy on seen clients, of personal models if there are any."""
    found = list(out.glob("*/result.json"))
    if not found:
        return None
    rows = [
        row for row in json.loads(found[0].read_text())["rows"] if (row["clients"], row["split"]) == ("seen", split)
    ]
    by_model = {row["model"]: row["accuracy"] for row in rows}
    return by_model.get("personal", by_model.get("global"))


def rate_key(recipe: Any, method: str) -> str:
    """Return the key that a method's rate is under: a variant may have its own."""
    variant = recipe.compare.variants.get(method, {})
    return f"compare.variants.{method}.training.lr" if "lr" in variant.get("training", {}) else "training.lr"


def teacher_key(recipe: Any, method: str) -> str | None:
    """Return the key of a shared model's own rate, of a method that has a teacher."""
    own = recipe.compare.variants.get(method, {}).get("method", {"name": method})
    return "compare.options.quped.shared_lr" if own["name"] == "quped" and own.get("distillation") != 0.0 else None


def trials(recipe: Any, method: str, rates: list[float]) -> Iterator[dict[str, float]]:
    """Yield the settings that are tried, by key."""
    key, teacher = rate_key(recipe, method), teacher_key(recipe, method)
    for rate in rates:
        for factor in TEACHERS if teacher else (None,):
            yield {key: rate} | ({teacher: round(factor * rate, 6)} if teacher and factor else {})


def tuned_as(method: str, methods: list[str]) -> str:
    """Return the first variant of a method: quped for quped-2bit."""
    return next(other for other in methods if other.split("-")[0] == method.split("-")[0])


def words(settings: dict[str, float]) -> tuple[str, ...]:
    """Return settings as changes of a recipe."""
    return tuple(f"{key}={value}" for key, value in settings.items())


def chosen(tried: list[dict[str, Any]]) -> dict[str, float]:
    """Return the settings of the best trial; none if there is no trial."""
    scored = [trial for trial in tried if trial["validation"] is not None]
    return max(scored, key=lambda trial: trial["validation"])["settings"] if scored else {}


def perform(tasks: list[Task], jobs: int, deadline: float) -> None:
    """Run what there is, so many at a time, until the deadline."""
    if not tasks:
        return
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))
    futures = [pool.submit(run, task) for task in tasks]
    try:
        for number, done in enumerate(as_completed(futures, timeout=max(0.0, deadline - time.monotonic())), 1):
            line, seconds = done.result()
            print(f"{number}/{len(tasks)} {line} ({seconds:.0f} s)", file=sys.stderr, flush=True)
        pool.shutdown()
    except TimeoutError:
        for process in list(pool._processes.values()):
            process.kill()
        pool.shutdown(wait=False, cancel_futures=True)


def main() -> None:
    """Choose rates, and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", metavar="PAPER/TABLE")
    parser.add_argument("--dataset-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rates", default=RATES)
    parser.add_argument("--methods", help="if not given, all of the table")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--trial", nargs="+", action="extend", default=[], metavar="KEY=VALUE")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--only", choices=["tune", "run"])
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE")
    given = parser.parse_intermixed_args()
    deadline = time.monotonic() + 60 * given.minutes if given.minutes < float("inf") else time.monotonic() + 10**7
    recipe = recipe_of(given.table, given.dataset_dir, given.changes)
    methods = given.methods.split(",") if given.methods else list(recipe.compare.methods)
    rates = [float(rate) for rate in given.rates.split(",")]

    def task(name: str, method: str, seed: int, *more: str) -> Task:
        return Task(given.table, given.dataset_dir, (*given.changes, *more), method, seed, given.out / name)

    tried = {}
    for method in dict.fromkeys(tuned_as(one, methods) for one in methods):
        for place, settings in enumerate(trials(recipe, method, rates)):
            name, changes = f"trials/{method}-{place}", (*words(settings), *given.trial, "data.validation=0.2")
            tried[method, place] = settings, task(name, method, 0, *changes)
    kept = given.out / "rates.json"
    kept.parent.mkdir(parents=True, exist_ok=True)
    if given.only != "run":
        order = sorted(tried, key=lambda key: key[1])
        perform(
            [tried[key][1] for key in order if score(tried[key][1].out, "validation") is None], given.jobs, deadline
        )
        found: dict[str, list[dict[str, Any]]] = {}
        for (method, _), (settings, one) in tried.items():
            found.setdefault(method, []).append({"settings": settings, "validation": score(one.out, "validation")})
        kept.write_text(json.dumps(found, indent=1))
    if given.only != "tune":
        known = json.loads(kept.read_text()) if kept.exists() else {}
        best = {method: chosen(known.get(tuned_as(method, list(recipe.compare.methods)), [])) for method in methods}
        runs = [
            task(f"{method}-{seed}", method, seed, *words(settings))
            for seed in map(int, given.seeds.split(","))
            for method, settings in best.items()
        ]
        perform([one for one in runs if score(one.out, "test") is None], given.jobs, deadline)
        for method in best:
            scores = [score(one.out, "test") for one in runs if one.method == method]
            print(method, best[method], [None if value is None else round(100 * value, 2) for value in scores])


if __name__ == "__main__":
    main()
