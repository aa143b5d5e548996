"""Signals and full disks: processes of the real command line that are killed, stopped, ended or out of space."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from clouds import CloudCluster, little, played
from processes import KILLED, Cluster, cluster, recipe_of, simulated

from personafl import cli
from personafl.errors import Interrupted, StorageFailed

SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT)
LONG = 300.0  # seconds without anything new after which processes hang


class Typed(Cluster):
    """Processes that are what a user types."""

    def words(self, name: str) -> list[str]:
        """Return the command that somebody is started with."""
        identity, recipe = f"{self.folder}/pki/{name}.pem", f"{self.folder}/dealt/recipe.toml"
        if name.startswith("device-"):
            data, state = f"{self.folder}/dealt/{name}.safetensors", f"{self.folder}/devices/{name}"
            server = f"localhost:{self.port_of(name)}"
            return ["device", "--server", server, "--data", data, "--state", state, "--identity", identity]
        where = f"{self.folder}/{'run' if name == 'server' else name}"
        return [name, recipe, "--identity", identity, "--listen", f"localhost:{self.port}", "--out", where]

    def start(self, name: str, before: Callable[[], None] | None = None) -> None:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until it is the command's to handle
        try:
            super().start(name, before)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def be(self, name: str) -> None:
        torch.set_num_threads(1)
        sys.argv = ["personafl", *self.words(name)]
        code = 0
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        except KeyboardInterrupt:  # it came before the command could
            os._exit(Interrupted.exit_code)
        try:
            cli.main()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def mend(self, begun: Counter[str]) -> None:
        """Start again who was ended; fail if somebody ended by itself, or if nothing happens any more."""
        quiet, seen = time.monotonic(), -1
        while self.living:
            self.reap()
            for name, code in list(self.codes.items()):
                del self.codes[name]
                if code and not self.may_end(name, code):
                    raise AssertionError(f"{name} ended with {code}: {self.log(name)[-600:]}")
                if code:
                    begun[name] += 1
                    self.start(name)
            size = sum(path.stat().st_size for path in self.folder.glob("*.log"))
            if size != seen:
                quiet, seen = time.monotonic(), size
            if time.monotonic() > quiet + LONG:
                raise AssertionError(f"hangs: {sorted(self.living)}: {self.log(self.names[0])[-300:]}")
            time.sleep(0.01)

    def may_end(self, name: str, code: int) -> bool:
        """Say whether somebody may have ended so."""
        return code == -signal.SIGKILL

    def tracebacks(self) -> list[str]:
        """Return the ends of tracebacks that somebody has printed."""
        found = []
        for path in sorted(self.folder.glob("*.log")):
            for part in path.read_text(errors="replace").split("Traceback (most recent call last)")[1:]:
                places = [line.strip() for line in part.splitlines() if line.strip().startswith("File ")]
                what = next((line for line in part.splitlines()[1:] if line and not line.startswith(" ")), "")
                found.append(f"{path.stem}: {what}: {places[0]} … {places[-1]}"[:500])
        return found


@dataclass
class TypedCloud(CloudCluster, Typed):
    """The same of a cloud."""

    def words(self, name: str) -> list[str]:
        words = Typed.words(self, name)
        if name.startswith("cloud-"):
            words[0] = "server"
            words[words.index("--listen") + 1] = f"localhost:{self.ports[self.servers.index(name)]}"
            words += ["--coordinator", f"localhost:{self.port}"]
        return words

    def be(self, name: str) -> None:
        Typed.be(self, name)


def signalled(made: Typed, dice: random.Random, count: int) -> Counter[str]:
    """Start everyone, signal some at random and start again who has ended; return what was sent."""
    for name in made.names:
        made.start(name)
    sent: Counter[str] = Counter()
    for _ in range(count):
        time.sleep(dice.uniform(0.02, 0.5))
        victim, what = dice.choice(made.names), dice.choice(SIGNALS)
        made.reap()
        if victim not in made.living:
            if victim == made.names[0]:
                break  # it is over
            continue
        process = made.living[victim]
        os.kill(process, what)
        sent[what.name] += 1
        if what is signal.SIGSTOP:
            time.sleep(dice.uniform(0.05, 1.0))
            os.kill(process, signal.SIGCONT)
            continue
        end = time.monotonic() + 30.0
        while victim in made.living and time.monotonic() < end:
            made.reap()
            time.sleep(0.005)
        if victim in made.living:
            raise AssertionError(f"{victim} does not end on {what.name}: {made.log(victim)[-500:]}")
        made.codes.pop(victim)
        made.start(victim)
    made.mend(Counter())
    return sent


def kills(count: int) -> Iterator[dict[str, Any]]:
    """Signal servers, devices, coordinators and cloud servers until `count` signals were sent."""
    methods = ["scaffold", "ditto", "feddyn"]
    changes = {**KILLED, "rounds": 12}
    wanted = {method: simulated(recipe_of(method, 4, **changes)) for method in methods}
    total, seed = 0, 0
    while total < count:
        dice, began = random.Random(seed), time.monotonic()
        protocol = ("sync", "async", "rigorous")[seed // 3 % 3] if seed % 3 == 2 else None
        method = methods[seed % 3] if protocol is None else "fedbcd"
        recipe = recipe_of(method, 4, **changes) if protocol is None else little(protocol, first=1)
        kind: type[Any] = Typed if protocol is None else TypedCloud
        sent: Counter[str] = Counter()
        try:
            with cluster(recipe, kind) as made:
                sent = signalled(made, dice, dice.randint(6, 16))
                found, traces = made.outcome(), made.tracebacks()
                if protocol is None:
                    equal = found == wanted[method]
                else:
                    events = None if protocol == "sync" else made.aggregations()
                    should = played(recipe, events)
                    equal = found[0] == should[0] and (events is not None or found[1] == should[1])
                    equal = equal and made.rounds_known()
        except AssertionError as error:
            equal, traces = str(error)[:500], []  # type: ignore[assignment]
        total += sum(sent.values())
        yield {
            "seed": seed,
            "of": protocol or method,
            "signals": dict(sent),
            "equal": equal,
            "tracebacks": traces,
            "seconds": round(time.monotonic() - began, 1),
        }
        seed += 1


class Full:
    """A disk that is full from the n-th write under a folder on, for some seconds; half of that write is done."""

    EVENTS = ("os.rename", "os.mkdir", "os.link", "os.symlink")

    def __init__(self, folder: Path, at: int, seconds: float, note: Path) -> None:
        self.folder = str(folder.resolve()) + os.sep
        self.at, self.seconds, self.note = at, seconds, note
        self.count, self.until = 0, 0.0
        self._write, self._fsync, self._reserve = os.write, os.fsync, os.posix_fallocate
        os.write, os.fsync, os.posix_fallocate = self.write, self.fsync, self.reserve  # type: ignore[assignment]
        sys.addaudithook(self.audit)

    def point(self, half: Callable[[], object] = lambda: None) -> None:
        """Fail if the disk is full; it is from here on if this is the point."""
        self.count += 1
        if self.count - 1 == self.at:
            self.until = time.monotonic() + self.seconds
            os.close(os.open(self.note, os.O_WRONLY | os.O_CREAT))
            half()
        if time.monotonic() < self.until:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        makes = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
        if (makes or event in self.EVENTS) and self._inside(arguments[0]):
            self.point()

    def write(self, descriptor: int, data: Any) -> int:
        if self._inside(descriptor):
            self.point(lambda: self._write(descriptor, bytes(data)[: len(data) // 2]))
        return self._write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        if self._inside(descriptor):
            self.point()
        self._fsync(descriptor)

    def reserve(self, descriptor: int, offset: int, length: int) -> None:
        if self._inside(descriptor):
            self.point()
        self._reserve(descriptor, offset, length)

    def _inside(self, place: Any) -> bool:
        if isinstance(place, int):
            with contextlib.suppress(OSError):
                place = os.readlink(f"/proc/self/fd/{place}")
        if isinstance(place, int):
            return False
        return (os.path.abspath(os.fsdecode(place)) + os.sep).startswith(self.folder)


class _Crowded(Typed):
    """Processes that may end because a disk is full, with a line that says so."""

    def may_end(self, name: str, code: int) -> bool:
        last = self.log(name).strip().splitlines()[-1:]
        return code == StorageFailed.exit_code and any("disk is full" in line for line in last)


@dataclass
class _CrowdedCloud(TypedCloud):
    def may_end(self, name: str, code: int) -> bool:
        return _Crowded.may_end(self, name, code)  # type: ignore[arg-type]


def full(every: int = 1, seconds: float = 0.4) -> Iterator[dict[str, Any]]:
    """Fill the disk of the server, a device, a coordinator and a cloud server at each of their writes."""
    few = {**KILLED, "rounds": 2, "federation": {"cohort": 1.0}}
    plain, cloud = recipe_of("scaffold", 2, **few), little("sync", first=2, rounds=2)
    cases: list[tuple[Any, type[Any], Any, dict[str, str]]] = [
        (plain, _Crowded, simulated(plain), {"server": "run", "device-0": "devices/device-0"}),
        (cloud, _CrowdedCloud, played(cloud), {"coordinator": "coordinator", "cloud-0": "cloud-0"}),
    ]
    for recipe, kind, wanted, places in cases:
        for victim, place in places.items():
            at = 0
            while (found := _full_at(recipe, kind, wanted, victim, place, at, seconds)) is not None:
                yield {"victim": victim, "at": at, **found}
                at += every


def _full_at(
    recipe: Any, kind: type[Any], wanted: Any, victim: str, place: str, at: int, seconds: float
) -> dict[str, Any] | None:
    begun: Counter[str] = Counter()
    began = time.monotonic()
    try:
        with cluster(recipe, kind) as made:
            target, note = made.folder / place, made.folder / "full"
            for name in made.names:
                made.start(name, (lambda: Full(target, at, seconds, note)) if name == victim else None)  # type: ignore[arg-type,return-value]
            made.mend(begun)
            if not note.exists():
                return None
            equal: Any = made.outcome() == wanted
            traces = made.tracebacks()
    except AssertionError as error:
        equal, traces = str(error)[:500], []
    ended = sum(begun.values())
    return {"equal": equal, "ended": ended, "tracebacks": traces, "seconds": round(time.monotonic() - began, 1)}


@dataclass
class Mounted(_Crowded):
    """Processes whose directories are on a small file system of their own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        disk = self.folder / "disk"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], check=True, capture_output=True)
        (disk / "devices").mkdir()
        (self.folder / "devices").symlink_to(disk / "devices")
        (self.folder / "run").symlink_to(disk / "run")

    def words(self, name: str) -> list[str]:
        return [word.replace(f"{self.folder}/run", f"{self.folder}/disk/run") for word in super().words(name)]

    def fill(self, seconds: float) -> None:
        """Leave no byte on the disk for a while."""
        ballast = self.folder / "disk" / "ballast"
        with contextlib.suppress(OSError), open(ballast, "wb", 0) as file:
            while file.write(bytes(4096)):
                pass
        time.sleep(seconds)
        ballast.unlink()

    def stop(self) -> None:
        super().stop()
        subprocess.run(["umount", "-l", self.folder / "disk"], check=False, capture_output=True)


def filled(runs: int) -> Iterator[dict[str, Any]]:
    """Fill a real, small disk of a server and its devices, three times a run; nothing where it cannot be mounted."""
    recipe = recipe_of("scaffold", 4, **{**KILLED, "rounds": 12})
    wanted = simulated(recipe)
    for seed in range(runs):
        dice, begun, traces = random.Random(seed), Counter[str](), list[str]()
        try:
            with cluster(recipe, Mounted) as made:
                for name in made.names:
                    made.start(name)
                for _ in range(3):
                    time.sleep(dice.uniform(0.3, 1.5))
                    made.fill(dice.uniform(0.2, 1.0))
                made.mend(begun)
                equal: Any = made.outcome() == wanted
                traces = made.tracebacks()
        except AssertionError as error:
            equal = str(error)[:500]
        except (subprocess.CalledProcessError, FileNotFoundError):
            return
        yield {
            "victim": "all, on a small disk",
            "at": seed,
            "equal": equal,
            "ended": sum(begun.values()),
            "tracebacks": traces,
        }
