"""One side of `pfllib_time.py`, in a process of its own: `python pfllib_side.py personafl|pfllib SETTINGS.json`.

Both sides begin a whole run and stop before each of its rounds, where they read a command from stdin and answer with a
line of JSON: `round` trains one and says its seconds and processor seconds, `model FILE` writes the shared parameters,
`score` ends the run and says its accuracies on test data. PFLlib's program is run as it is, from its own folder: its
`Server.select_clients`, with which each round begins, is where it stops.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import resource
import runpy
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

TICKS = os.sysconf("SC_CLK_TCK")  # of the kernel, in a second
ABSENT = ("torchvision", "h5py", "matplotlib", "calmsize", "cvxpy", "ujson")  # imported by PFLlib, not used here


class Ended(Exception):
    """The run was scored; what PFLlib's program would do after its rounds is left out."""


class Turns:
    """Stops before each round for a command, and answers."""

    def __init__(self, answers: Any) -> None:
        self.answers, self.began = answers, None
        self.answer()

    def answer(self, **fields: Any) -> None:
        """Write a line of JSON."""
        print(json.dumps(fields), file=self.answers, flush=True)

    def stop(self, save: Any) -> bool:
        """Say how long the round took that has just ended; do what is asked; return whether to go on training."""
        if self.began is not None:
            wall, spent = (now - then for now, then in zip((time.perf_counter(), processor()), self.began, strict=True))
            self.answer(seconds=wall, processor=spent)
        while (words := sys.stdin.readline().split())[0] == "model":
            torch.save(save(), words[1])
            self.answer()
        self.began = time.perf_counter(), processor()
        return words[0] == "round"


def processor() -> float:
    """Return the processor seconds of this process and of all that it started, those that have ended too."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + sum(map(_ticks, _started(os.getpid()))) / TICKS


def _started(pid: int) -> Iterator[int]:
    """Yield the processes under one, however deep."""
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, file.read_text().split()):
            yield child
            yield from _started(child)


def _ticks(pid: int) -> int:
    """Return the ticks of a process, and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15]))


def personafl_side(settings: dict[str, Any], answers: Any) -> None:
    """Run ours; a callback after each round is where it stops."""
    import personafl
    from personafl.models.convolutional import cnn0

    torch.set_num_threads(1)
    model = cnn0((1, 28, 28), 10)
    if settings["start"]:
        for own, given in zip(model.parameters(), torch.load(settings["start"], weights_only=True), strict=True):
            own.data.copy_(given)
    turns: list[Turns] = []

    def after(done: Any) -> None:
        if done.round < done.rounds:
            turns[0].stop(dict)

    recipe = {
        "rounds": settings["rounds"],
        "data": {
            "source": settings["data"],
            "test": "official",
            "normalize": {"mean": [0.5], "std": [0.5]},
            "partition": {"kind": "users"},
        },
        "method": {"name": settings["method"], **settings["options"]},
        "training": {"lr": settings["lr"], "batch": settings["batch"], "epochs": settings["epochs"]},
        "evaluation": {"every": 0},
        "engine": {"workers": settings["workers"], "dtype": settings.get("dtype", "float32")},
    }
    turns.append(Turns(answers))
    turns[0].stop(dict)  # the first round, with what a run prepares, is not counted
    found = personafl.run(recipe, model=model, callback=after, progress=False, out=settings["out"])
    turns[0].stop(lambda: [value.detach() for value in found.model("0", "global").parameters()])
    rows = [row for row in found.rows if row["split"] == "test"]
    turns[0].answer(**{row["model"]: row["accuracy_weighted"] for row in rows})


def pfllib_side(settings: dict[str, Any], answers: Any) -> None:
    """Run PFLlib's main program with its own defaults, but for the words of the settings."""
    _stand_in()
    torch.set_num_threads(settings["threads"])
    sys.path.insert(0, settings["pfllib"])
    from flcore.servers.serverbase import Server

    select, turns, scored = Server.select_clients, [], []

    def selected(server: Any) -> Any:
        chosen = select(server)  # draws as ever
        if not turns:
            server.eval_gap = 10**9
            turns.append(Turns(answers))
        if turns[0].stop(lambda: [value.detach() for value in server.global_model.parameters()]):
            return chosen
        server.eval_gap = 1
        scored.append(server)
        return []  # it is scored after the models are sent, and then stops for want of clients

    Server.select_clients = selected
    words = ["-data", "FashionMNIST", "-ncl", "10", "-m", "CNN", "-dev", "cpu", "-did", "", *settings["words"]]
    sys.argv = ["main.py", *words]
    try:
        runpy.run_path(str(Path(settings["pfllib"]) / "main.py"), run_name="__main__")
    except Exception:
        if not scored or not scored[0].rs_test_acc:
            raise
    turns[0].answer(accuracy=scored[0].rs_test_acc[-1], all=scored[0].rs_test_acc)


def _stand_in() -> None:
    """Put empty modules in the place of packages that are not here: PFLlib imports them for what is not run."""

    class Empty(types.ModuleType):
        __path__ = ()

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

    class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            return importlib.machinery.ModuleSpec(name, self) if name.partition(".")[0] in ABSENT else None

        def create_module(self, spec: Any) -> Any:
            return Empty(spec.name)

        def exec_module(self, module: Any) -> None:
            pass

    sys.meta_path.append(Finder())  # last: what is installed is found before


def main(side: str, file: str) -> None:
    """Serve commands until the run is scored."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what a side prints is no answer
    settings = json.loads(Path(file).read_text())
    torch.manual_seed(0)
    np.random.seed(0)
    {"personafl": personafl_side, "pfllib": pfllib_side}[side](settings, answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
