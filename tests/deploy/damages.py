"""Every file that is read back, damaged in every way: the process says which, or comes to the same result.

    python tests/deploy/damages.py [N]      N places per file at which a bit is flipped, 8 if not given

Prints one JSON line per directory: how many files were damaged, how often that was named, and what was silent.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from clouds import cloud_recipe
from offline import Offline, quick_recipe
from processes import MEMORY

from crash_driver import FAILPOINTS, outcome
from personafl import api
from personafl.core import tree, wire
from personafl.deploy.device.serving import keep_best, predict
from personafl.deploy.net.messages import Announce, Join, Refused
from personafl.deploy.server.agreement import fingerprint, sum_like
from personafl.deploy.server.coordination import Coordination
from personafl.errors import PersonaError
from personafl.recipe.values import apply_overrides
from personafl.runs.listener import Progress

Go = Callable[[Path], tuple[object, list[str]]]  # what came out of going on in a folder, and what was said


class Place(NamedTuple):
    """A folder with files of a process that was stopped, where they are in it, and how to go on there."""

    folder: Path
    files: str
    go_on: Go


def stopped(folder: Path) -> Path:
    """Make a server and two devices, and stop them in the middle of the third round of four."""
    with Offline(quick_recipe(), folder) as run:
        run.go_on(2).open()
        run.train(0)
        run.settle(0)
        run.train(1)
    return folder


def finished(folder: Path) -> tuple[object, list[str]]:
    with Offline(quick_recipe(), folder) as run:
        return run.go_on().outcome(), run.said


def with_model(folder: Path) -> Path:
    """Make a device that has its model."""
    with Offline(quick_recipe(), folder) as run:
        run.go_on()
        client = run.clients[0]
        client.receive(run.rounds.final().whole)
        (folder / "kept").mkdir()
        keep_best(client, folder / "kept")
    return folder


def predicted(folder: Path) -> tuple[object, list[str]]:
    return predict(folder / "kept", str(folder / "dealt" / "device-0.safetensors")).outputs.tolist(), []


def started(folder: Path) -> tuple[object, list[str]]:
    """Start another run from the model that came out of the first."""
    recipe = quick_recipe(rounds=1).model_copy(update={"start": str(folder / "run")})
    with Offline(recipe, folder / "next") as run:
        return run.go_on().outcome(), []


CLOUD = cloud_recipe("fedbcd", 4, cloud={"servers": 2}, rounds=3, model={"name": "linear"})


def coordinated(folder: Path) -> Path:
    """Make a coordinator of two servers, with one mix done, and one server that has handed in the next round."""
    with Coordination(CLOUD, folder / "run") as made:
        for server in range(2):
            made.join(server, Join(weight=10, recipe=fingerprint(CLOUD)))
        for server, round_ in ((0, 0), (1, 0), (0, 1)):
            made.announce(server, Announce(round=round_, clients=2), handed(made, server + round_))
    return folder


def handed(made: Coordination, value: int) -> bytes:
    total, weight = sum_like(made._base)[0]
    return wire.encode(type(sum_like(made._base)[0])(tree.map(lambda leaf: leaf + 0.1 * value, total), weight + 2.0))


def mixed(folder: Path) -> tuple[object, list[str]]:
    with Coordination(CLOUD, folder / "run") as made:
        for server, round_ in ((0, 1), (1, 1), (0, 2), (1, 2)):
            if not made.follows(server, round_):
                made.announce(server, Announce(round=round_, clients=2), handed(made, server + round_))
        assert made.finished
        return [made.following(server, 2) for server in range(2)], []


def simulated(folder: Path) -> Path:
    """Make a simulator's run that was stopped after two rounds of four."""

    def listener(progress: Any) -> None:
        if isinstance(progress, Progress) and progress.done == 2:
            shutil.copytree(folder / "whole", folder / "run")

    api.run(apply_overrides({}, FAILPOINTS), out=folder / "whole", listener=listener)
    shutil.rmtree(folder / "whole")
    return folder


def resumed(folder: Path) -> tuple[object, list[str]]:
    with warnings.catch_warnings(record=True, action="always") as said:
        api.resume(folder / "run")
    found = {} if said else outcome(folder / "run")
    found.pop("files", None)  # one that is lost and not needed may stay so
    return found, [str(one.message) for one in said]


PLACES: dict[str, Callable[[Path], Place]] = {
    "server": lambda folder: Place(stopped(folder), "run", finished),
    "device": lambda folder: Place(stopped(folder), "devices", finished),
    "data": lambda folder: Place(stopped(folder), "dealt", finished),
    "model": lambda folder: Place(with_model(folder), "kept/model.safetensors", predicted),
    "start": lambda folder: Place(with_model(folder), "run/global.safetensors", started),
    "coordinator": lambda folder: Place(coordinated(folder), "run", mixed),
    "simulator": lambda folder: Place(simulated(folder), "run", resumed),
}


def damaged(data: bytes, how: str, dice: random.Random) -> bytes:
    if how == "cut":
        return data[: dice.randrange(len(data))]
    if how == "emptied":
        return b""
    at = dice.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << dice.randrange(8))]) + data[at + 1 :]


def files_of(place: Place) -> list[Path]:
    found = place.folder / place.files
    inside = [found] if found.is_file() else sorted(path for path in found.rglob("*") if path.is_file())
    return [path.relative_to(place.folder) for path in inside if path.name != "lock" and path.stat().st_size]


def cases(place: Place, flips: int) -> Iterator[tuple[Path, str, random.Random]]:
    """Yield each file and each way to damage it."""
    for file in files_of(place):
        for how in (*("flipped",) * flips, "cut", "emptied", "lost", "swapped"):
            yield file, how, random.Random(f"{file} {how} {flips}")


def tried(place: Place, file: Path, how: str, dice: random.Random, folder: Path) -> tuple[str, str]:
    """Damage one file of a copy and go on; return named, said, same or SILENT, and what was said."""
    target, others = folder / file, [path for path in files_of(place) if path.suffix == file.suffix and path != file]
    if how == "swapped" and not others:
        return "same", ""
    shutil.copytree(place.folder, folder)
    if how == "lost":
        target.unlink()
    elif how == "swapped":
        target.write_bytes((place.folder / dice.choice(others)).read_bytes())
    else:
        target.write_bytes(damaged(target.read_bytes(), how, dice))
    try:
        found, said = place.go_on(folder)
    except (PersonaError, Refused) as error:
        return ("named" if "\n" not in str(error) else "SILENT"), str(error)
    finally:
        shutil.rmtree(folder)
    if found == _wanted(place):
        return "same", " ".join(said)
    return ("said" if said else "SILENT"), " ".join(said)


_WANTED: dict[Path, object] = {}


def _wanted(place: Place) -> object:
    if place.folder not in _WANTED:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "copy"
            shutil.copytree(place.folder, copy)
            _WANTED[place.folder], _ = place.go_on(copy)
    return _WANTED[place.folder]


def main(flips: int = 8, *names: str) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as root:
        for name in names or PLACES:
            place = PLACES[name](Path(root) / name)
            found: Counter[str] = Counter()
            silent = []
            for number, (file, how, _) in enumerate(cases(place, flips)):
                dice = random.Random(f"{file} {how} {number}")
                what, text = tried(place, file, how, dice, Path(root) / "tried")
                found[what] += 1
                silent += [f"{file} {how} {number}: {text}"] if what == "SILENT" else []
            total = sum(found.values())
            print(json.dumps({"directory": name, "damaged": total, **found, "silent": silent}), flush=True)


if __name__ == "__main__":
    words = sys.argv[1:]
    main(*map(int, words[:1]), *words[1:])
    os._exit(0)
