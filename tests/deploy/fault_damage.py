"""Damaged files: every file that is read back, in every way a file is damaged, and what then comes of the run.

Right is an error of one line, the same result to the bit, or a line that says what was repaired.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fault_runs import Device, Stop, cloud_on, go_on, predicted, read_recipe, resumed, shaken, shown, walk, walk_cloud
from processes import MEMORY, SMALL, recipe_of, unscaled

from personafl.deploy import pki
from personafl.deploy.device.dealing import deal
from personafl.deploy.server.rounds import Rounds
from personafl.errors import PersonaError

TINY: dict[str, Any] = {
    "rounds": 3,
    "data": SMALL["data"],
    "model": {"name": "linear"},
    "training": {"steps": 2, "batch": 16},
}
LONGEST = 300.0  # seconds after which a case hangs


@dataclass(frozen=True)
class Snapshot:
    """A folder as it was at some moment, what is damaged in it, and how one goes on from there."""

    name: str
    folder: Path
    damaged: tuple[str, ...]  # patterns of the files
    goes_on: Callable[[Path], Any]
    elsewhere: Path | None = None  # the same folder at another moment: for files that are swapped


KINDS = (
    "flip",
    "flip low",
    "flip late",
    "cut",
    "half",
    "empty",
    "garbage",
    "zeros",
    "append",
    "gone",
    "other's",
    "older",
)


def damage(path: Path, kind: str, dice: random.Random, snapshot: Snapshot) -> bool:
    """Damage a file; return whether that was possible."""
    old = path.read_bytes()
    new: bytes | None = bytes(old)
    if not old and kind != "append":
        return False
    if kind.startswith("flip"):
        place = len(old) - 1 - dice.randrange(min(64, len(old))) if kind == "flip late" else dice.randrange(len(old))
        changed = bytearray(old)
        changed[place] ^= 1 if kind == "flip low" else 1 << dice.randrange(8)
        new = bytes(changed)
    elif kind == "cut":
        new = old[: dice.randrange(1, len(old))] if len(old) > 1 else b""
    elif kind == "half":
        new = old[: len(old) // 2]
    elif kind == "empty":
        new = b""
    elif kind == "garbage":
        new = dice.randbytes(len(old))
    elif kind == "zeros":
        start, length = dice.randrange(len(old)), max(1, min(512, len(old) // 4))
        new = old[:start] + bytes(len(old[start : start + length])) + old[start + length :]
    elif kind == "append":
        new = old + dice.randbytes(dice.randint(1, 200))
    elif kind == "gone":
        new = None
    else:
        other = _swapped(path, kind, snapshot)
        new = None if other is None else other.read_bytes()
        if new is None:
            return False
    if new == old:
        return False
    path.unlink() if new is None else path.write_bytes(new)
    return True


def _swapped(path: Path, kind: str, snapshot: Snapshot) -> Path | None:
    """Return a file that could be mistaken for this one: another's, or the same of another moment."""
    if kind == "older":
        root = next(parent for parent in path.parents if (parent / ".root").exists())
        there = None if snapshot.elsewhere is None else snapshot.elsewhere / path.relative_to(root)
        return there if there is not None and there.exists() else None
    same = [
        other
        for other in sorted(path.parent.glob(f"*{path.suffix}"))
        if other != path and other.stem[:3] == path.stem[:3]
    ]
    cousins = [
        folder / path.name for folder in sorted(path.parent.parent.iterdir()) if folder.name[:3] == path.parent.name[:3]
    ]
    found = [other for other in (*same, *cousins) if other != path and other.is_file()]
    return found[0] if found else None


def case(snapshot: Snapshot, file: str, kind: str, seed: int, wanted: Any) -> dict[str, Any] | None:
    """Damage one file and go on, in a process of its own; None: it cannot be damaged so."""
    dice = random.Random(f"{snapshot.name} {file} {kind} {seed}")

    def work(folder: Path) -> dict[str, Any] | None:
        (folder / ".root").touch()
        if not damage(folder / file, kind, dice, snapshot):
            return None
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                found = snapshot.goes_on(folder)
        except PersonaError as error:
            text = str(error)
            return {"came": "one line" if "\n" not in text else "many lines", "text": text, "named": _named(file, text)}
        except TimeoutError:
            lines = said.getvalue().strip().splitlines()
            return {"came": "hangs", "text": " / ".join(dict.fromkeys(line[:160] for line in lines[-6:]))}
        except BaseException as error:
            import traceback

            where = traceback.extract_tb(error.__traceback__)[-1]
            return {
                "came": "traceback",
                "text": f"{type(error).__name__}: {error} ({where.filename.rpartition('/')[2]}:{where.lineno})"[:300],
            }
        text = said.getvalue()
        if "Traceback" in text:
            return {"came": "traceback", "text": text.rpartition("Traceback")[2].strip().splitlines()[-1][:300]}
        if found == wanted:
            return {"came": "identical", "text": text[-300:]}
        spoken = [line for line in text.splitlines() if Path(file).name in line or "damaged" in line]
        return {"came": "repaired" if spoken else "SILENT", "text": (spoken or [""])[0][:300]}

    found = apart(snapshot.folder, work)
    if found is None:
        return None
    return {"snapshot": snapshot.name, "file": file, "kind": kind, **found}


def _named(file: str, text: str) -> bool:
    return any(part in text for part in (Path(file).name, Path(file).parent.name) if part)


def apart(origin: Path | None, work: Callable[[Path], Any]) -> Any:
    """Do some work on a copy of a folder in a forked process, and return what it found."""
    folder = Path(tempfile.mkdtemp(prefix="personafl-", dir=MEMORY if MEMORY.is_dir() else None))
    answer, end = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        code = 1
        try:
            if origin is not None:
                shutil.copytree(origin, folder, dirs_exist_ok=True)
            data = json.dumps(work(folder)).encode()
            while data:
                data = data[os.write(end, data) :]
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(end)
    received, deadline = b"", time.monotonic() + LONGEST
    try:
        while True:
            if not select.select([answer], [], [], max(0.0, deadline - time.monotonic()))[0]:
                os.kill(child, signal.SIGKILL)
                return {"came": "hangs", "text": ""}
            piece = os.read(answer, 2**16)
            if not piece:
                break
            received += piece
    finally:
        os.close(answer)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        shutil.rmtree(folder, ignore_errors=True)
    if status:
        return {"came": "traceback", "text": f"ended with {status}"}
    return json.loads(received)


def snapshots(root: Path) -> Iterator[Snapshot]:
    """Make runs of all kinds, and stop them where much is on the disk."""
    yield from _served(root / "served")
    yield from _clouded(root / "cloud")
    yield from _simulated(root / "simulated")


def _built(folder: Path, build: Callable[[Path], None]) -> Path:
    """Build something in a folder, in a process of its own."""
    folder.mkdir(parents=True)

    def work(_: Path) -> dict[str, Any]:
        with contextlib.redirect_stdout(io.StringIO()):
            build(folder)
        return {}

    found = apart(None, work)
    assert found == {}, (folder, found)
    return folder


def _until(what: str) -> Callable[[str], None]:
    def at(now: str) -> None:
        if now == what:
            raise Stop

    return at


def _prepared(folder: Path, recipe: Any, names: list[str]) -> None:
    pki.init(folder / "pki")
    for name in names:
        pki.issue(folder / "pki", name)
    deal(recipe, folder / "dealt")


SERVED = (
    "run/recipe.toml",
    "run/recipe.sha256",
    "run/journal.jsonl",
    "run/checkpoint.json",
    "run/server-*",
    "run/updates/*",
    "dealt/recipe.toml",
)
DEVICES = ("devices/*/state*.safetensors", "dealt/device-*")


def _served(root: Path) -> Iterator[Snapshot]:
    recipe = unscaled(recipe_of("ditto", 3, **TINY))
    names = ["server", *(f"device-{number}" for number in range(3))]

    def stopped(where: str) -> Callable[[Path], None]:
        def build(folder: Path) -> None:
            _prepared(folder, recipe, names)
            with contextlib.suppress(Stop):
                walk(folder, _until(where))

        return build

    one = _built(root / "one", stopped("accepted 1 in 1"))  # what device-1 sent is taken, and it does not know
    two = root / "two"
    shutil.copytree(one, two)
    _moved(two, lambda folder: walk(folder, _until("trained 1 in 2")))  # device-0 is done, device-1 has not sent
    between = root / "between"
    shutil.copytree(one, between)
    _moved(between, lambda folder: walk(folder, _until("closed 2")))
    done = root / "done"
    shutil.copytree(one, done)
    _moved(done, _finished)
    yield Snapshot("a server in round 2", one, SERVED, go_on, between)
    yield Snapshot("a server in round 3", two, SERVED, go_on, one)
    yield Snapshot("a server between rounds", between, SERVED, go_on, one)
    yield Snapshot("devices in round 2", one, DEVICES, go_on, two)
    yield Snapshot("devices in round 3", two, DEVICES, go_on, one)
    yield Snapshot("devices between rounds", between, DEVICES, go_on, one)
    yield Snapshot("a device's model", done, ("devices/device-0/model.safetensors",), predicted, None)
    yield Snapshot("certificates", between, ("pki/*.pem", "pki/*.key", "pki/issued.json"), shaken, None)


def _moved(folder: Path, work: Callable[[Path], Any]) -> None:
    """Let a run go on in its place, to where it stops."""

    def moving(_: Path) -> dict[str, Any]:
        with contextlib.suppress(Stop), contextlib.redirect_stdout(io.StringIO()):
            work(folder)
        return {}

    found = apart(None, moving)
    assert found == {}, (folder, found)


def _finished(folder: Path) -> None:
    from personafl.deploy.device.serving import keep_best

    walk(folder)
    with Rounds(read_recipe(folder), folder / "run") as rounds:
        device = Device.opened(folder, 0, rounds.served.to_toml().encode(), rounds.run)
        device.client.receive(rounds.final().whole)
        keep_best(device.client, folder / "devices" / "device-0")


def _clouded(root: Path) -> Iterator[Snapshot]:
    from clouds import little

    names = ["coordinator", "cloud-0", "cloud-1", *(f"device-{number}" for number in range(4))]
    patterns = (
        "coordinator/recipe.*",
        "coordinator/journal.jsonl",
        "coordinator/checkpoint.json",
        "coordinator/server-*",
        "coordinator/announced/*",
        *(f"cloud-0/{pattern.removeprefix('run/')}" for pattern in SERVED[:-1]),
    )
    for protocol in ("sync", "async"):
        recipe = little(protocol, 2, rounds=3)

        def build(folder: Path, where: str, recipe: Any = recipe) -> None:
            _prepared(folder, recipe, names)
            with contextlib.suppress(Stop):
                walk_cloud(folder, _until(where))

        one = _built(root / protocol / "one", lambda folder: build(folder, "announced 0 in 1"))
        two = root / protocol / "two"
        shutil.copytree(one, two)
        _moved(two, lambda folder: walk_cloud(folder, _until("proceeded 0 to 2")))
        yield Snapshot(f"a coordinator and a server that waits, {protocol}", one, patterns, cloud_on, two)
        yield Snapshot(f"a coordinator and a server that goes on, {protocol}", two, patterns, cloud_on, one)


def _simulated(root: Path) -> Iterator[Snapshot]:
    import crash_driver

    words = [word for word in crash_driver.FAILPOINTS if not word.startswith("rounds=")]

    def build(folder: Path) -> None:
        from personafl import api
        from personafl.recipe.values import apply_overrides

        api.run(apply_overrides({}, [*words, "rounds=4"]), out=folder / "run")

    def stopped(rounds: int) -> Callable[[Path], None]:
        def stop(folder: Path) -> None:
            from personafl import api
            from personafl.recipe.values import apply_overrides
            from personafl.simulate import simulator

            step = simulator.Simulation.step

            def until(self: Any, number: int) -> Any:
                if number == rounds:
                    raise Stop
                return step(self, number)

            simulator.Simulation.step = until  # type: ignore[method-assign]
            with contextlib.suppress(Stop):
                api.run(apply_overrides({}, [*words, "rounds=4"]), out=folder / "run")

        return stop

    three = _built(root / "three", stopped(3))
    two = _built(root / "two", stopped(2))
    yield Snapshot("a simulated run after round 3", three, ("run/*", "run/states/*", "run/tuned/*"), resumed, two)
    done = _built(root / "done", build)
    yield Snapshot("a simulated run that is done", done, ("run/*", "run/states/*", "run/tuned/*"), shown, None)


def warm() -> None:
    """Import and read what children need, which are forked."""
    import functools

    import clouds

    import crash_driver
    import personafl.data.build
    from personafl import api

    assert api.resume
    assert crash_driver.FAILPOINTS
    personafl.data.build.load = functools.cache(personafl.data.build.load)
    clouds.played(clouds.cloud_recipe("fedbcd", rounds=1))


def damaged(count: int) -> Iterator[dict[str, Any]]:
    """Damage files until there are `count` cases, each in turn, and say what came of it."""
    warm()
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as root:
        cases: list[tuple[Snapshot, str, str, int, Any]] = []
        for snapshot in snapshots(Path(root)):
            wanted = _wanted(snapshot, Path(root))
            files = sorted(
                {
                    str(path.relative_to(snapshot.folder))
                    for pattern in snapshot.damaged
                    for path in snapshot.folder.glob(pattern)
                }
            )
            cases += [
                (snapshot, file, kind, 0, wanted)
                for file in files
                if (snapshot.folder / file).is_file() and not file.endswith("lock")
                for kind in KINDS
            ]
        cases.sort(key=lambda case: random.Random(f"{case[0].name}{case[1]}{case[2]}").random())
        made = 0
        for snapshot, file, kind, seed, wanted in cases:
            if made >= count:
                return
            found = case(snapshot, file, kind, seed, _read(wanted))
            if found is not None:
                made += 1
                yield found


def _wanted(snapshot: Snapshot, root: Path) -> Path:
    """Go on from what is not damaged, and keep what comes of it in a file."""
    import pickle

    file = root / f"{snapshot.name.replace(' ', '-').replace(',', '')}.wanted"

    def work(folder: Path) -> dict[str, Any]:
        with contextlib.redirect_stdout(io.StringIO()):
            file.write_bytes(pickle.dumps(snapshot.goes_on(folder)))
        return {}

    found = apart(snapshot.folder, work)
    assert found == {}, (snapshot.name, found)
    return file


def _read(file: Path) -> Any:
    import pickle

    return pickle.loads(file.read_bytes())
