"""Evidence for `resume`: crash real processes at every write, or at random times, and compare every bit that comes out.

    python tests/crash_driver.py failpoints [N] | private [N] | double | random N

Prints one JSON object. Each crash is a SIGKILL of a forked child, which has torch and the data already, so that it
costs a fraction of a second; what the child runs is the real command line, in its own process.
"""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import personafl.data.build
import personafl.report.page  # for the children, which are forked
from personafl import api, cli
from personafl.recipe.values import apply_overrides
from personafl.runs import checkpoints
from personafl.storage.rundir import RunDirectory
from personafl.storage.slab import Slab
from personafl.storage.store import Store

COMMON = [
    "data.partition.kind=iid",
    "data.partition.clients=8",
    "data.unseen=1",
    "data.validation=0.2",
    "model.name=linear",
    "training.steps=1",
    "training.batch=all",
    "training.momentum=0.5",
    "federation.cohort=5",
    "engine.threads=1",
]
DITTO = [*COMMON, "method.name=ditto", "method.tune_epochs=1"]
FAILPOINTS = [*DITTO, "rounds=4", "evaluation.every=3", "engine.checkpoint_seconds=0"]
PRIVATE = [
    *FAILPOINTS,
    "data.normalize=none",
    "federation.cohort=2",
    "federation.sampling=cyclic",
    "privacy.mechanism=banded",
    "privacy.clip=0.5",
    "privacy.noise=2.0",
    "privacy.epsilon=1.2",  # which lasts for three of the four rounds
    "privacy.delta=0.01",
]
RANDOM = [*DITTO, "rounds=30", "evaluation.every=10", "engine.checkpoint_seconds=0.02"]
COMPARISON = [*COMMON, "rounds=6", "evaluation.every=3", "engine.checkpoint_seconds=0", "--methods=fedadam,local,ditto"]
BUDGET = 6000  # bytes of client states in memory, two of them
MEMORY = Path("/dev/shm")  # a kill is the same there, and fsync is quick


def outcome(path: Path) -> dict[str, Any]:
    """Return everything a run leaves, without times and memory."""
    directory = RunDirectory(path)
    checkpoint = directory.checkpoint()
    result = json.loads((path / "result.json").read_text())
    store = Store(path / "states", 2**30, checkpoint.states)
    return {
        "files": sorted(entry.name for entry in path.iterdir()),
        "recipe": (path / "recipe.toml").read_text(),
        "split": (path / "split.json").read_text(),
        "rows": [{key: value for key, value in row.items() if key != "seconds"} for row in result["rows"]],
        "clients": result["clients"],
        "clients.csv": (path / "clients.csv").read_text(),
        "metrics": [{key: value for key, value in entry.items() if key != "seconds"} for entry in directory.metrics()],
        "rounds": checkpoint.rounds,
        "bytes": (checkpoint.bytes_down, checkpoint.bytes_up),
        "server": {entry.name: entry.read_bytes() for entry in path.glob("server-*.safetensors")},
        "states": {
            client: {
                name: (str(leaf.dtype), leaf.numpy().tobytes()) for name, leaf in sorted(store.get(client).items())
            }
            for client in store.clients.tolist()
        },
    }


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Return the names of what differs."""
    return sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))


class Failpoints:
    """Kills the process at the n-th point of the writes under a folder.

    Points: before every open for writing, rename, removal, truncation, mkdir and chmod (all that Python reports to
    audit hooks); before every os.write and half-way through it, and so for the states that are written to a mapped
    file; before every fsync and growth of a mapped file.
    """

    EVENTS = ("os.rename", "os.remove", "os.truncate", "os.mkdir", "os.rmdir", "os.chmod", "os.link", "os.symlink")

    def __init__(self, folder: Path, at: int) -> None:
        self.folder = str(folder.resolve()) + os.sep
        self.at = at
        self.count = 0
        self._write, self._fsync, self._reserve, self._put = os.write, os.fsync, os.posix_fallocate, Slab.put
        os.write, os.fsync, os.posix_fallocate = self.write, self.fsync, self.reserve  # type: ignore[assignment]
        Slab.put = lambda slab, *states: self.put(slab, *states)  # type: ignore[method-assign]
        sys.addaudithook(self.audit)

    def point(self) -> bool:
        self.count += 1
        return self.count - 1 == self.at

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if (writes or event in self.EVENTS) and self._inside(arguments[0]) and self.point():
            os.kill(os.getpid(), signal.SIGKILL)

    def write(self, descriptor: int, data: Any) -> int:
        if self._inside(descriptor):
            if self.point():
                os.kill(os.getpid(), signal.SIGKILL)
            if self.point():
                self._write(descriptor, bytes(data)[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
        return self._write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        if self._inside(descriptor) and self.point():
            os.kill(os.getpid(), signal.SIGKILL)
        self._fsync(descriptor)

    def reserve(self, descriptor: int, offset: int, length: int) -> None:
        if self._inside(descriptor) and self.point():
            os.kill(os.getpid(), signal.SIGKILL)
        self._reserve(descriptor, offset, length)

    def put(self, slab: Slab, rows: Any, clients: Any, stacked: dict[str, torch.Tensor]) -> None:
        half = slice(len(rows) // 2)
        if self.point():
            os.kill(os.getpid(), signal.SIGKILL)
        if self.point():
            self._put(slab, rows[half], clients[half], {path: leaf[half] for path, leaf in stacked.items()})
            os.kill(os.getpid(), signal.SIGKILL)
        self._put(slab, rows, clients, stacked)

    def _inside(self, place: Any) -> bool:
        if isinstance(place, int):
            place = os.readlink(f"/proc/self/fd/{place}")
        path = os.path.abspath(os.fsdecode(place)) + os.sep
        return path.startswith(self.folder)


def forked(work: Callable[[], Any]) -> int:
    """Start work in a child process and return its id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        work()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


def ended(child: int) -> int:
    """Wait for a child: its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def command(*words: str) -> None:
    """Run the command line in this process."""
    sys.argv = ["personafl", *words, "--quiet"]
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the process ends with it
    cli.out.file = sys.stdout
    cli.main()


def start_or_resume(path: Path, verb: str, recipe: list[str]) -> list[str]:
    """Return what a user would type: resume what exists, else start it again. A crash may leave nothing else there."""
    beside = [entry.name for entry in path.parent.iterdir() if not entry.name.startswith(f".{path.name}-")]
    assert beside in ([], [path.name]), f"unexpected {beside}"
    return ["resume", str(path)] if beside else [verb, *recipe, "--out", str(path)]


def crash_at(path: Path, words: list[str], at: int) -> bool:
    """Run a command that is killed at a failpoint; False if it ended before it got there."""

    def work() -> None:
        Failpoints(path.parent, at)
        command(*words)

    code = ended(forked(work))
    assert code in (0, -signal.SIGKILL), f"{words} ended with {code}"
    return code != 0


def finish(path: Path, verb: str, recipe: list[str]) -> None:
    code = ended(forked(lambda: command(*start_or_resume(path, verb, recipe))))
    assert code == 0, f"resume ended with {code}"


class Tally:
    """How many crashes, and what was not the same afterwards."""

    def __init__(self, verb: str, recipe: list[str], root: Path) -> None:
        self.verb, self.recipe, self.root = verb, recipe, root
        self.tried = self.kills = 0
        self.different: list[str] = []
        began = time.monotonic()
        path = self.fresh("straight")
        finish(path, verb, recipe)
        self.seconds = time.monotonic() - began
        self.expected = self.outcomes(path)

    def fresh(self, name: str) -> Path:
        folder = self.root / name
        folder.mkdir()
        return folder / "run"

    def outcomes(self, path: Path) -> dict[str, Any]:
        if (path / "result.json").exists():
            return outcome(path)
        runs = sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
        return {f"{run.name}/{key}": value for run in runs for key, value in outcome(run).items()}

    def check(self, path: Path, label: str) -> None:
        self.tried += 1
        finish(path, self.verb, self.recipe)
        if wrong := differences(self.outcomes(path), self.expected):
            self.different.append(f"{label}: {', '.join(wrong)}")
        shutil.rmtree(path.parent)

    def report(self) -> dict[str, Any]:
        identical = self.tried - len(self.different)
        return {"tried": self.tried, "identical": identical, "kills": self.kills, "different": self.different}


def failpoints(root: Path, every: int, recipe: list[str] = FAILPOINTS) -> dict[str, Any]:
    """Crash a run at every point of every write, or at every n-th, once each."""
    tally = Tally("run", recipe, root)
    at = 0
    while crash_at(path := tally.fresh(f"at-{at}"), start_or_resume(path, "run", recipe), at):
        tally.kills += 1
        tally.check(path, f"point {at}")
        at += every
    return tally.report()


def double(root: Path, first: int = 75) -> dict[str, Any]:
    """Crash a run in the middle, and its resume at every point of every write; and that one's resume once more."""
    tally = Tally("run", FAILPOINTS, root)
    origin = tally.fresh("origin")
    assert crash_at(origin, start_or_resume(origin, "run", FAILPOINTS), first)
    at = 0
    while True:
        path = tally.fresh(f"at-{at}")
        shutil.copytree(origin, path)
        if not crash_at(path, start_or_resume(path, "run", FAILPOINTS), at):
            return tally.report()
        tally.kills += 1
        tally.kills += crash_at(path, start_or_resume(path, "run", FAILPOINTS), at * 7 % 60)
        tally.check(path, f"points {first}, {at}, {at * 7 % 60}")
        at += 1


def at_random(root: Path, count: int, verb: str, recipe: list[str]) -> dict[str, Any]:
    """Kill runs at random times, and their resumes too, until `count` kills hit a living process."""
    root.mkdir()
    tally = Tally(verb, recipe, root)
    chance = random.Random(2021)
    while tally.kills < count:
        path = tally.fresh(f"run-{tally.tried}")
        for _ in range(chance.choice([1, 1, 2, 3])):
            child = forked(lambda: command(*start_or_resume(path, verb, recipe)))  # noqa: B023 - runs at once
            time.sleep(chance.uniform(0, tally.seconds))
            os.kill(child, signal.SIGKILL)
            tally.kills += ended(child) == -signal.SIGKILL
        tally.check(path, f"run {tally.tried}")
    return tally.report()


def both(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Add two reports."""
    return {key: value + b[key] for key, value in a.items()}


def main(what: str, count: int = 1) -> None:
    torch.set_num_threads(1)
    checkpoints.Store = lambda directory, _, index: Store(directory, BUDGET, index)  # type: ignore[assignment,misc]
    personafl.data.build.load = functools.cache(personafl.data.build.load)
    with tempfile.TemporaryDirectory() as folder:  # children inherit the data and every import
        api.compare(apply_overrides({}, COMPARISON[:-1]), methods=["ditto", "fedadam"], out=Path(folder) / "run")
        if what == "private":
            api.run(apply_overrides({}, PRIVATE), out=Path(folder) / "private")
    if (threads := threading.active_count()) > 1:
        raise SystemExit(f"{threads} threads; forks would not be safe")
    works: dict[str, Callable[[Path], dict[str, Any]]] = {
        "failpoints": lambda root: failpoints(root, count),
        "private": lambda root: failpoints(root, count, PRIVATE),
        "double": double,
        "random": lambda root: both(
            at_random(root / "runs", count, "run", RANDOM),
            at_random(root / "comparisons", count, "compare", COMPARISON),
        ),
    }
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        began = time.monotonic()
        report = works[what](Path(folder))
    print(json.dumps({**report, "seconds": round(time.monotonic() - began, 1)}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
