"""Many runs in processes at a time, with what they found in one JSON file, from which a later call goes on."""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Found = dict[str, Any]
One = Callable[[str, dict[str, Any]], Found]  # (name of a run, options) -> what it found


def ran(one: One, names: Sequence[str], options: dict[str, Any], out: Path, jobs: int, minutes: float) -> Found:
    """Return what runs found, by name: those that `out` has, and those that are done until the time is over."""
    found: Found = json.loads(out.read_text()) if out.exists() else {}
    wanted = [name for name in names if name not in found]
    context = multiprocessing.get_context("spawn")
    tasks, results = context.Queue(), context.Queue()
    jobs = min(jobs, len(wanted))
    for name in [*wanted, *[None] * jobs]:
        tasks.put(name)
    os.environ["OMP_NUM_THREADS"] = "1"
    workers = [context.Process(target=_work, args=(one, options, tasks, results), daemon=True) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    until, left = time.monotonic() + 60 * minutes, len(wanted)
    while left and time.monotonic() < until and any(worker.is_alive() for worker in workers):
        try:
            name, values = results.get(timeout=1)
        except queue.Empty:
            continue
        left -= 1
        if "error" not in values:
            found[name] = values
            out.write_text(json.dumps(found))
        print(
            f"{name:50s}",
            *(f"{key} {value:.4g}" for key, value in _numbers(values)),
            values.get("error", ""),
            flush=True,
        )
    for worker in workers:
        worker.terminate()
    if wanted:
        print(f"{out} has {len(found)} runs, {left} are left")
    return found


def _work(one: One, options: dict[str, Any], tasks: Any, results: Any) -> None:
    """Do runs until there are none."""
    while (name := tasks.get()) is not None:
        try:
            results.put((name, one(name, options)))
        except Exception as error:  # one that fails should not end the others
            results.put((name, {"error": f"{type(error).__name__}: {error}"}))


def _numbers(values: Found) -> list[tuple[str, float]]:
    return [(key, value) for key, value in values.items() if isinstance(value, float)]
