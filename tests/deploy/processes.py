"""Servers and devices as real processes on loopback, made by forking, and evidence gathered with them.

    python tests/deploy/processes.py equal | kills | failpoints | full | malformed | dropouts | load | canary | bare
    python tests/deploy/processes.py sums | shares | samples | unseen

Prints one JSON line per result. A forked child has torch and the data already, so it costs a fraction of a second; gRPC
is imported in children only, for it does not survive a fork.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from personafl.algorithms import METHODS
from personafl.core import wire
from personafl.deploy import pki
from personafl.deploy.device.dealing import deal
from personafl.deploy.device.state import DeviceState
from personafl.errors import StorageFailed
from personafl.recipe.recipe import Recipe
from personafl.runs.build import prepare
from personafl.simulate.federation import Federation
from personafl.simulate.simulator import Simulation
from personafl.storage.rundir import RunDirectory
from personafl.storage.store import Store

sys.path[:0] = [
    str(Path(__file__).resolve().parent),
    str(Path(__file__).resolve().parents[1]),
]

SMALL: dict[str, Any] = {
    "rounds": 3,
    "data": {"partition": {"kind": "dirichlet", "clients": 3, "alpha": 0.5}, "validation": 0.2},
    "model": {"name": "mlp", "hidden": [8], "personal": "output"},
    "training": {"epochs": 1, "batch": 16},
    "engine": {"threads": 1, "strategy": "sequential"},
}
MEMORY = Path("/dev/shm")  # a kill is the same there, and fsync is quick
States = dict[int, dict[str, bytes]]
FULL = 28  # what a process ends with that found the disk full
HANGING = 1800.0  # seconds after which a wait is in vain, on however busy a machine


def recipe_of(method: str, clients: int = 3, deploy: dict[str, Any] | None = None, **changes: Any) -> Recipe:
    """Return a small recipe; `deploy` are keys of its [deploy] besides the shape of the data."""
    values = {**SMALL, **changes, "method": {"name": method, **changes.get("options", {})}}
    values.pop("options", None)
    partition = {**values["data"]["partition"], "clients": clients}
    values["data"] = {**values["data"], "partition": partition}
    shape = {"input_shape": [1, 8, 8], "classes": 10, "devices": clients, "heartbeat": 0.5}
    return Recipe.parse({**values, "deploy": shape | (deploy or {})})


def unscaled(recipe: Recipe) -> Recipe:
    """Return it with inputs as they are: neither a coordinator nor a Flower app adds up moments."""
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"normalize": "none"})})


def simulated(recipe: Recipe) -> tuple[bytes, States]:
    """Return the server's state and the clients' after all rounds in the simulator."""
    federation = with_known_keys(prepare(recipe).federation)
    with tempfile.TemporaryDirectory() as folder:
        simulation = Simulation(federation, Store(Path(folder) / "states", 2**30))
        for number in range(recipe.rounds):
            simulation.step(number)
        clients = [int(c) for c in federation.data.seen if int(c) in simulation.store]
        states = {client: plain(simulation.store.get(client)) for client in clients}
        return wire.encode(simulation.saved()), states


def with_known_keys(federation: Federation) -> Federation:
    """Return it with samples protected as devices do it, from keys that tests know: `known_key`."""
    from personafl.deploy.device.protecting import drawn_from
    from personafl.privacy.distributed import client_key
    from personafl.privacy.noise import make_key

    def secret(client: int, phase: str, round_: int) -> bytes:
        return drawn_from(client_key(make_key(0), client), phase, round_, 0)

    if federation.protection is None:
        return federation
    return dataclasses.replace(federation, protection=dataclasses.replace(federation.protection, secret=secret))


def known_key(path: Path, *, known: bool = False) -> bytes:
    """Have a device make and keep a key as always, and return the one that tests know."""
    from personafl.deploy.device.keeping import kept_key
    from personafl.privacy.distributed import client_key
    from personafl.privacy.noise import make_key

    kept_key(path, known=known)
    return client_key(make_key(0), int(path.parent.name.removeprefix("device-")))


def plain(entry: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {path: leaf.numpy().tobytes() for path, leaf in sorted(entry.items())}


def free_port() -> int:
    """Return a port that nobody has, below those that connections are given: one of these could take it meanwhile."""
    while True:
        port = 15_000 + secrets.randbelow(15_000)
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port


def tell(text: object) -> None:
    """Say something in a child's log."""
    print(text, flush=True)


@dataclass
class Cluster:
    """A folder with certificates and dealt data, a server and devices; start and kill them by name."""

    recipe: Recipe
    folder: Path
    port: int = field(default_factory=free_port)
    numbers: list[int] = field(default_factory=list)
    living: dict[str, int] = field(default_factory=dict)  # name -> process
    codes: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        pki.init(self.folder / "pki")
        pki.issue(self.folder / "pki", "server")
        pki.issue(self.folder / "pki", "coordinator")
        self.recipe, files = deal(self.recipe, self.folder / "dealt")
        self.numbers = [int(file.stem.removeprefix("device-")) for file in files]
        for number in self.numbers:
            pki.issue(self.folder / "pki", f"device-{number}")

    @property
    def devices(self) -> list[str]:
        return [f"device-{number}" for number in self.numbers]

    @property
    def names(self) -> list[str]:
        """Return everyone; when the first has ended, all is over."""
        return ["server", *self.devices]

    def start(self, name: str, before: Callable[[], None] | None = None) -> None:
        """Fork a server or a device; `before` runs first in the child."""
        sys.stdout.flush()
        child = os.fork()
        if child:
            self.living[name] = child
            return
        code = 1
        try:
            log = os.open(self.folder / f"{name.partition(',')[0]}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            if before is not None:
                before()
            self.be(name)
            code = 0
        except StorageFailed as error:
            print(f"ended: {error}")
            code = FULL
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    def files_of(self, name: str) -> pki.Files:
        return pki.Files.beside(self.folder / "pki" / f"{name}.pem")

    def port_of(self, device: str) -> int:
        """Return where a device's server is."""
        return self.port

    def server_of(self, device: str) -> str:
        """Return what a device is given as its server."""
        return f"localhost:{self.port_of(device)}"

    def be(self, name: str) -> None:
        """Be a server, a device, or several devices, whose names are joined by a comma; to the end."""
        torch.set_num_threads(1)
        asyncio.run(self.role(name, tell))

    async def role(self, name: str, tell: Callable[[Any], None]) -> None:
        """Do what somebody does, to the end."""
        from personafl.deploy.device.device import DeviceConfig, run_device
        from personafl.deploy.server.server import ServerConfig, run_server
        from personafl.deploy.server.summingserver import run_summing_server

        async def device(one: str) -> None:
            data = str(self.folder / "dealt" / f"{one}.safetensors")
            state = self.folder / "devices" / one
            config = DeviceConfig(server=self.server_of(one), data=data, state=state, files=self.files_of(one))
            await run_device(config, tell)

        if name == "server":
            config = ServerConfig(
                recipe=self.recipe,
                out=self.folder / "run",
                files=self.files_of(name),
                revocations=self.folder / "pki" / "revoked.pem",
                listen=f"localhost:{self.port}",
            )
            await (run_server if self.recipe.secure is None else run_summing_server)(config, tell)
        else:
            await asyncio.gather(*map(device, name.split(",")))

    def reap(self) -> None:
        """Notice who has ended."""
        for name, process in list(self.living.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                del self.living[name]
                self.codes[name] = os.waitstatus_to_exitcode(status)

    def kill(self, name: str) -> None:
        """SIGKILL a process, if it is there."""
        self.reap()
        if name in self.living:
            os.kill(self.living[name], signal.SIGKILL)
            os.waitpid(self.living.pop(name), 0)

    def wait(self, seconds: float = HANGING, without: str = "") -> None:
        """Wait until all have ended well; a process that was killed, or found no space, is started again.

        `without`: who does not end by itself.
        """
        end = time.monotonic() + seconds
        while self.living.keys() - {without}:
            self.reap()
            for name, code in list(self.codes.items()):
                if code in (-signal.SIGKILL, FULL):
                    del self.codes[name]
                    self.start(name)
                elif code:
                    raise AssertionError(f"{name} ended with {code}: {self.log(name)[-2000:]}")
            if time.monotonic() > end:
                raise AssertionError(f"still running: {sorted(self.living)}: {self.log('server')[-2000:]}")
            time.sleep(0.01)

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def journal(self, of: str = "run") -> list[dict[str, Any]]:
        path = self.folder / of / "journal.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def peak_kb(self, name: str) -> int:
        """Return the most memory that a process has had so far; 0 if it has ended."""
        try:
            status = Path(f"/proc/{self.living[name]}/status").read_text()
            return int(status.partition("VmHWM:")[2].split()[0])
        except (KeyError, OSError, IndexError):
            return 0

    def stop(self) -> None:
        for name in list(self.living):
            self.kill(name)

    def outcome(self) -> tuple[bytes | list[bytes], States]:
        """Return the server's state, or the servers', and the devices'."""
        directory = RunDirectory(self.folder / "run")
        checkpoint = directory.checkpoint()
        assert checkpoint.rounds == self.recipe.rounds
        return directory.server_bytes(checkpoint), self.states(self.numbers, "run")

    def states(self, numbers: list[int], server: str) -> States:
        """Return the states of the devices of a server, whose run is in a folder."""
        states = {}
        for number in numbers:
            state = self.state(number, server)
            assert state.pending is None
            if state.entry:
                states[number] = plain(state.entry)
        return states

    def state(self, number: int, server: str) -> DeviceState:
        """Return what a device of a server, whose run is in a folder, has kept."""
        return DeviceState(self.folder / "devices" / f"device-{number}", self.journal(server)[0]["run"], number)


AnyCluster = TypeVar("AnyCluster", bound=Cluster)


@contextlib.contextmanager
def cluster(recipe: Recipe, kind: type[AnyCluster] = Cluster) -> Iterator[AnyCluster]:  # type: ignore[assignment]
    folder = Path(tempfile.mkdtemp(prefix="personafl-", dir=MEMORY if MEMORY.is_dir() else None))
    made = kind(recipe, folder)
    try:
        yield made
    except BaseException:
        for log in sorted(folder.glob("*.log")):
            print(f"{log.name}: {log.read_text()[-3000:]}", file=sys.stderr)
        raise
    finally:
        made.stop()
        shutil.rmtree(folder, ignore_errors=True)


def run_all(made: Cluster, seconds: float = HANGING) -> None:
    for name in made.names:
        made.start(name)
    made.wait(seconds)


def equal(methods: list[str], clients: int = 8) -> Iterator[dict[str, Any]]:
    """Compare the simulator with a server and devices as processes, bit for bit."""
    for method in methods:
        recipe = recipe_of(method, clients)
        server, states = simulated(recipe)
        began = time.monotonic()
        with cluster(recipe) as made:
            run_all(made)
            found = made.outcome()
        seconds = round(time.monotonic() - began, 1)
        yield {"method": method, "devices": clients, "equal": found == (server, states), "seconds": seconds}


KILLED = {
    "rounds": 6,
    "federation": {"cohort": 3},
    "model": {"name": "linear"},
    "training": {"steps": 2, "batch": 16},
}


def kills(seeds: range) -> Iterator[dict[str, Any]]:
    """Kill processes at random, start them again, and compare what comes out with the simulator."""
    methods = ["scaffold", "ditto", "feddyn"]
    wanted = {method: simulated(recipe_of(method, 4, **KILLED)) for method in methods}
    for seed in seeds:
        dice = random.Random(seed)
        method = methods[seed % len(methods)]
        with cluster(recipe_of(method, 4, **KILLED)) as made:
            count = kill_some(made, dice)
            found = made.outcome()
        yield {"seed": seed, "method": method, "kills": count, "equal": found == wanted[method]}


def kill_some(made: Cluster, dice: random.Random) -> int:
    """Start everyone, kill some at random and start them again, wait for the end, and return how many were killed."""
    for name in made.names:
        made.start(name)
    count = 0
    for _ in range(dice.randint(2, 8)):
        time.sleep(dice.uniform(0.02, 0.6))
        victim = dice.choice(made.names)
        made.reap()
        if victim in made.living:
            made.kill(victim)
            count += 1
            made.start(victim)
        elif victim == made.names[0]:
            break  # it is over
    made.wait()
    return count


FEW = {**KILLED, "rounds": 2, "federation": {"cohort": 1.0}}


def failpoints(every: int = 1) -> Iterator[dict[str, Any]]:
    """Kill the server, and a device, at each of its writes, one after another."""
    recipe = recipe_of("scaffold", 2, **FEW)
    places = {"server": "run", "device-0": "devices/device-0"}
    yield from kill_at_writes(recipe, Cluster, places, simulated(recipe), every)


def sums(every: int = 1) -> Iterator[dict[str, Any]]:
    """The same where updates are summed unseen. Nobody may be lost: tries are made until everyone is in the sum."""
    data, secure = {**SMALL["data"], "normalize": "none"}, {"dropouts": 0.0, "stage": 10.0}
    recipe = recipe_of("ditto", 4, **{**FEW, "rounds": 1}, data=data, secure=secure)
    places = {"server": "run", "device-0": "devices/device-0"}
    yield from kill_at_writes(recipe, Cluster, places, simulated(recipe), every)


def shares(every: int = 1) -> Iterator[dict[str, Any]]:
    """The same with noise that devices add, each from the key that a simulated client has."""
    from personafl.deploy.device import sharing
    from personafl.privacy.distributed import client_key
    from personafl.privacy.noise import make_key

    own_key = sharing.own_key

    def known(directory: Path) -> bytes:
        own_key(directory)  # made and kept as always
        return client_key(make_key(0), int(directory.name.removeprefix("device-")))

    sharing.own_key = known
    data, secure = {**SMALL["data"], "normalize": "none"}, {"dropouts": 0.0, "stage": 10.0}
    privacy = {"clip": 0.5, "noise": 1.0, "mechanism": "distributed"}
    few = {**FEW, "rounds": 1, "federation": {"cohort": 4}}
    recipe = recipe_of("ditto", 4, **few, data=data, secure=secure, privacy=privacy)
    places = {"server": "run", "device-0": "devices/device-0"}
    yield from kill_at_writes(recipe, Cluster, places, simulated(recipe), every)


def samples(every: int = 1) -> Iterator[dict[str, Any]]:
    """The same where samples are protected: a device has a key of their noise, and a ledger."""
    from personafl.deploy.device import protecting

    protecting.kept_key = known_key
    data = {**SMALL["data"], "normalize": "none"}
    recipe = recipe_of("ditto", 2, **FEW, data=data, sample_privacy={"noise": 1.5, "clip": 0.5})
    places = {"server": "run", "device-0": "devices/device-0"}
    yield from kill_at_writes(recipe, Cluster, places, simulated(recipe), every)


def kill_at_writes(
    recipe: Recipe, kind: type[Cluster], places: dict[str, str], wanted: object, every: int
) -> Iterator[dict[str, Any]]:
    """Kill a process at each of its writes to a place, or at every n-th, and start it again; so for all in `places`."""
    from crash_driver import Failpoints

    for victim, place in places.items():
        at, count = 0, 0
        while True:
            began = time.monotonic()
            with cluster(recipe, kind) as made:
                for name in made.names:
                    if name != victim:
                        made.start(name)
                target = made.folder / place
                made.start(victim, lambda: Failpoints(target, at))  # noqa: B023 - used at once, in the child
                hit = False
                while made.living and not hit:
                    made.reap()
                    hit = made.codes.get(victim) == -signal.SIGKILL
                    time.sleep(0.005)
                made.wait()
                found = made.outcome()
            if not hit:
                break
            count += 1
            seconds = round(time.monotonic() - began, 1)
            yield {"victim": victim, "at": at, "equal": found == wanted, "seconds": seconds}
            at += every
        yield {"victim": victim, "failpoints": count}


def full(every: int = 1) -> Iterator[dict[str, Any]]:
    """Let the disk of the server, and of a device, be full at each of its writes, one after another."""
    recipe = recipe_of("scaffold", 2, **FEW)
    places = {"server": "run", "device-0": "devices/device-0"}
    yield from full_at_writes(recipe, Cluster, places, simulated(recipe), every)


def full_at_writes(
    recipe: Recipe, kind: type[Cluster], places: dict[str, str], wanted: object, every: int, length: int = 3
) -> Iterator[dict[str, Any]]:
    """Let some writes of a process to a place fail, from each on, or from every n-th; so for all in `places`."""
    from full import Full

    for victim, place in places.items():
        at = count = 0
        hit = True
        while hit:
            with cluster(recipe, kind) as made:
                told = made.folder / "hit"
                disk = Full(made.folder / place, at, length, told)
                for name in made.names:
                    made.start(name, (lambda: disk.__enter__() and None) if name == victim else None)  # noqa: B023
                made.wait()
                hit, found, log = told.exists(), made.outcome(), made.log(victim)
            if hit:
                count += 1
                ended = log.count("ended: ")
                yield {
                    "victim": victim,
                    "at": at,
                    "equal": found == wanted,
                    "tracebacks": log.count("Traceback"),
                    "ended": ended,
                }
                at += every
        yield {"victim": victim, "full": count}


def dropouts(rounds: int = 30, clients: int = 10) -> Iterator[dict[str, Any]]:
    """Let a share of the devices be late in each round, and compare accuracy and the time of rounds."""
    learning = {"rounds": rounds, "model": {"name": "mlp", "hidden": [16]}, "training": {"epochs": 1, "batch": 16}}
    for share in (0.0, 0.1, 0.3):
        deadline = 1.5
        recipe = recipe_of("fedavg", clients, {"deadline": deadline, "min_completion": 0.5}, **learning)
        with cluster(recipe) as made:
            for name in ("server", *made.devices):
                made.start(name, _absent(share) if name != "server" else None)
            made.wait()
            journal = made.journal()
            accuracy = [_accuracy(made.log(name)) for name in made.devices]
        closed = [entry for entry in journal if entry["event"] == "closed"]
        opened = [entry for entry in journal if entry["event"] == "opened"]
        times = [end["time"] - begin["time"] for begin, end in zip(opened, closed, strict=True)]
        yield {
            "dropout": share,
            "rounds_closed": len(closed),
            "of": rounds,
            "updates": sum(len(entry["taken"]) for entry in closed) / rounds / clients,
            "slowest_round_s": round(max(times), 2),
            "deadline_s": deadline,
            "accuracy_global": round(sum(accuracy) / len(accuracy), 4),
        }


def _absent(share: float) -> Callable[[], None]:
    """Make a device sleep through a share of its rounds, by (number, round): it trains, and is too late."""

    def before() -> None:
        from personafl.deploy.device.training import LocalClient

        train = LocalClient.train

        def away(self: LocalClient, round_: int, model: str, broadcast: bytes) -> None:
            if random.Random(f"{self.number} {round_}").random() < share:
                time.sleep(2.0)
            train(self, round_, model, broadcast)

        LocalClient.train = away  # type: ignore[method-assign]

    return before


def _accuracy(log: str) -> float:
    return float(log.partition("test accuracy: ")[2].partition("global ")[2].split(",")[0].split(")")[0])


def load(clients: int = 200, rounds: int = 10, processes: int = 8) -> Iterator[dict[str, Any]]:
    """Let many devices, in a few processes, train with one server: rounds per second, memory, errors."""
    changes = {**KILLED, "rounds": rounds, "federation": {"cohort": 1.0}}
    data = {"partition": {"kind": "iid"}, "min_samples": 4}
    recipe = recipe_of("ditto", clients, {"heartbeat": 5.0}, data=data, **changes)
    began = time.monotonic()
    with cluster(recipe) as made:
        made.start("server")
        for place in range(processes):
            made.start(",".join(made.devices[place::processes]))
        peak = 0
        while made.living:
            made.reap()
            assert not any(made.codes.values()), made.codes
            peak = max(peak, made.peak_kb("server"))
            time.sleep(0.1)
        journal = made.journal()
        logs = "".join(path.read_text() for path in made.folder.glob("*.log"))
    closed = [entry for entry in journal if entry["event"] == "closed"]
    seconds = closed[-1]["time"] - next(entry["time"] for entry in journal if entry["event"] == "began")
    updates = sum(len(entry["taken"]) for entry in closed)
    yield {
        "devices": clients,
        "rounds": len(closed),
        "updates": updates,
        "rounds_per_s": round(len(closed) / seconds, 3),
        "updates_per_s": round(updates / seconds, 1),
        "server_peak_mb": peak // 1024,
        "tracebacks": logs.count("Traceback"),
        "refused": sum(entry["event"] == "refused" for entry in journal),
        "seconds": round(time.monotonic() - began, 1),
    }


def malformed(count: int = 10_000) -> Iterator[dict[str, Any]]:
    """Send malformed updates over TLS as a device that is selected; the model must not move, nor memory grow."""
    from collections import Counter

    from updates import CLASSES, generated

    recipe = recipe_of(
        "fedalt",
        2,
        {"norm_bound": 100.0, "deadline": 3600.0},
        model={"name": "mlp", "hidden": [48], "personal": "output"},
    )

    def unhurried() -> None:
        from personafl.deploy.net import callers

        callers.RATE = 1e6  # or this would take an hour

    with cluster(recipe) as made:
        made.start("server", unhurried)
        made.start("device-1")
        answer, end = os.pipe()
        child = os.fork()
        if not child:
            try:
                asyncio.run(_hostile(made, count, CLASSES, generated, end))
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(0)
        os.close(end)
        peaks = [0]
        while not os.waitpid(child, os.WNOHANG)[0]:
            made.reap()
            assert "server" not in made.codes, made.codes
            peaks.append(made.peak_kb("server"))
            time.sleep(0.2)
        found = json.loads(os.fdopen(answer).read())
        logged = Counter(entry["code"] for entry in made.journal() if entry["event"] == "refused")
        updates = len(list((made.folder / "run" / "updates").iterdir()))
    early = next(peak for peak in peaks if peak)
    yield {
        **found,
        "logged": sum(logged.values()),
        "updates_kept": updates,
        "server_mb_begin": early // 1024,
        "server_mb_peak": peaks[-1] // 1024,
    }


async def _hostile(made: Cluster, count: int, classes: Any, generated: Any, end: int) -> None:
    from collections import Counter

    from personafl.deploy.device.datafile import load_own
    from personafl.deploy.device.training import LocalClient
    from personafl.deploy.net.messages import Hello, Pull, Refused, Update
    from personafl.deploy.net.transport import Channel

    line = Channel(f"localhost:{made.port}", pki.Files.beside(made.folder / "pki" / "device-0.pem"), lambda kind: 2**24)
    from personafl.deploy.net.messages import Knock

    welcome, _ = await line.ask(Knock())
    state = DeviceState(made.folder / "hostile", welcome.run, 0)  # type: ignore[attr-defined]
    own = load_own(str(made.folder / "dealt" / "device-0.safetensors"), 0, made.recipe)
    client = LocalClient(made.recipe, own, 0, None, state)
    await line.ask(Hello(samples=client.samples, input_shape=[1, 8, 8], classes=10))
    said = await line.ask(Pull(returning=False))
    while said.message.kind != "task":
        said = await line.ask(Pull(returning=False))
    before = kept_model(made)
    client.train(said.message.round, said.message.model, said.payload)  # type: ignore[attr-defined]
    pending = client.state.pending
    assert pending is not None
    good = Update(round=pending.round, model=pending.model, samples=client.samples)
    codes: Counter[str] = Counter()
    tried = accepted = 0
    makers = [make for name, (_, make) in classes.items() if name != "an earlier round"]
    for seed in range(count + len(makers)):
        update, payload = (
            makers[seed](good, pending.update) if seed < len(makers) else generated(seed, good, pending.update)
        )
        if (update, payload) == (good, pending.update):
            continue
        tried += 1
        try:
            await line.ask(update, payload, tries=1)
            accepted += 1
        except Refused as refused:
            codes[refused.code] += 1
    unchanged = before == kept_model(made)
    result = {"sent": tried, "accepted": accepted, "codes": dict(codes), "model_unchanged": unchanged}
    os.write(end, json.dumps(result).encode())
    await line.close()


def bare(connections: int = 1100, files: int = 256) -> Iterator[dict[str, Any]]:
    """Open more connections that say nothing than the server may have files, and let a run begin and end meanwhile."""
    import resource

    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    began = time.monotonic()
    with cluster(recipe_of("fedavg", 3, **KILLED)) as made:
        made.start("server", few)
        while "listening" not in made.log("server"):
            made.reap()
            assert "server" not in made.codes, made.log("server")
            time.sleep(0.01)
        flood, opened = [socket.create_connection(("localhost", made.port)) for _ in range(connections)], connections
        for name in made.devices:
            made.start(name)
        most = 0
        while made.living:
            made.reap()
            assert not any(made.codes.values()), (made.codes, made.log("server"))
            if "server" in made.living:
                most = max(most, len(os.listdir(f"/proc/{made.living['server']}/fd")))
            with contextlib.suppress(OSError):  # whoever is hung up on comes again
                flood.append(socket.create_connection(("localhost", made.port)))
                flood.pop(0).close()
                opened += 1
            time.sleep(0.05)
        closed = sum(entry["event"] == "closed" for entry in made.journal())
    seconds = round(time.monotonic() - began, 1)
    yield {"connections": opened, "files": files, "most_files": most, "rounds": closed, "seconds": seconds}


def kept_model(made: Cluster) -> bytes:
    directory = RunDirectory(made.folder / "run")
    return directory.server_bytes(directory.checkpoint())


def unseen(method: str = "fedalt") -> Iterator[dict[str, Any]]:
    """The same for single updates, with [secure] and, to see that they would be found, without it."""
    data = {**SMALL["data"], "normalize": "none"}
    noisy = {"privacy": {"clip": 0.5, "noise": 1.0, "mechanism": "distributed"}, "federation": {"cohort": 4}}
    for sections in ({"secure": {}}, {}, {"secure": {}, **noisy}):
        yield from canary([method], recipe_of(method, 4, rounds=2, data=data, **sections))


def canary(methods: list[str], given: Recipe | None = None) -> Iterator[dict[str, Any]]:
    """Search the memory, the disk and the logs of a server, a process of its own, for data and personal parameters.

    With a recipe that is given, for single updates: as they are trained, and as integers before they are masked.
    """
    import subprocess

    for method in methods:
        recipe = given or recipe_of(method, 3, rounds=2)
        with cluster(recipe) as made:
            (made.folder / "dealt" / "recipe.toml").write_text(made.recipe.to_toml())
            words = ["server", f"{made.folder}/dealt/recipe.toml", "--identity", f"{made.folder}/pki/server.pem"]
            words += ["--listen", f"localhost:{made.port}", "--out", f"{made.folder}/run", "--stay"]
            command = [sys.executable, "-c", "from personafl.cli import main; main()", *words]
            with open(made.folder / "server.log", "w") as log:
                server = subprocess.Popen(command, stdout=log, stderr=log)
            for name in made.devices:
                made.start(name, lambda: _remember(made.folder))
            made.wait()
            rule = prepare(recipe).federation.algorithm.client
            declared = bool(getattr(rule, "uploads_of_state", ()))  # the method says that its state goes up
            states = [] if declared else [path.read_bytes() for path in made.folder.glob("secret-*")]
            secrets = {"states": states, "data": _samples_of(made)}
            if given is not None:
                secrets = {"updates": [path.read_bytes() for path in made.folder.glob("update-*")]}
            places = {"memory": _memory_of(server.pid)}
            server.terminate()
            server.wait()
            places["disk"] = [path.read_bytes() for path in (made.folder / "run").rglob("*") if path.is_file()]
            places["log"] = [(made.folder / "server.log").read_bytes()]
        hits = {
            f"{what} in {where}": sum(secret in chunk for chunk in chunks for secret in found)
            for what, found in secrets.items()
            for where, chunks in places.items()
        }
        searched = sum(map(len, places["memory"])) // 2**20
        secure = {} if given is None else {"secure": given.secure is not None}
        yield {
            "method": method,
            **secure,
            "hits": hits,
            "canaries": sum(map(len, secrets.values())),
            "memory_mb": searched,
        }


def _remember(folder: Path) -> None:
    """Write down the first numbers of every personal tensor that a device ever has: so many that nobody else has them.

    A mask of zeros and ones needs more of them than weights do.
    """
    from personafl.deploy.device import sharing, summing

    commit, vector_of, sent = DeviceState.commit, summing.vector_of, sharing.sent

    def shared(*given: Any) -> Any:
        whole = sent(*given)
        vector = whole.numpy().astype("<u4")
        (folder / f"update-{os.getpid()}-{time.monotonic_ns()}").write_bytes(vector[:64].tobytes())
        return whole

    def masked(*given: Any) -> Any:
        vector = vector_of(*given)
        (folder / f"update-{os.getpid()}-{time.monotonic_ns()}").write_bytes(vector[:64].tobytes())
        return vector

    def noted(self: DeviceState, pending: Any) -> None:
        for path, leaf in pending.state.items():
            first = leaf.flatten()[:64]
            data = first.numpy().tobytes()
            if leaf.numel() >= 8 and len(first.unique()) > 1:
                (folder / f"secret-{os.getpid()}-{pending.round}-{path.replace('/', '_')}").write_bytes(data)
        for path, leaf in wire.decode_named(pending.update).items():
            if leaf.numel() >= 8:
                name = f"update-{os.getpid()}-{pending.round}-{path.replace('/', '_')}"
                (folder / name).write_bytes(leaf.flatten()[:64].numpy().tobytes())
        commit(self, pending)

    DeviceState.commit = noted  # type: ignore[method-assign]
    summing.vector_of, sharing.sent = masked, shared


def _samples_of(made: Cluster) -> list[bytes]:
    from personafl.deploy.device.datafile import load_own

    found = []
    for number in made.numbers:
        data = load_own(str(made.folder / "dealt" / f"device-{number}.safetensors"), number, made.recipe).data
        found += [sample.numpy().tobytes()[40:100] for sample in data.x[:20]]
    return found


def _memory_of(process: int) -> list[bytes]:
    chunks = []
    with open(f"/proc/{process}/maps") as maps, open(f"/proc/{process}/mem", "rb", 0) as memory:
        for line in maps:
            place, rights, *_ = line.split()
            begin, end = (int(number, 16) for number in place.split("-"))
            if rights.startswith("rw"):
                with contextlib.suppress(OSError, OverflowError, ValueError):
                    memory.seek(begin)
                    chunks.append(memory.read(end - begin))
    return chunks


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, rest = sys.argv[1], sys.argv[2:]
    numbers = [int(word) for word in rest if word.isdigit()]
    makers: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "equal": lambda: equal(rest or list(METHODS)),
        "kills": lambda: kills(range(*numbers or (120,))),
        "failpoints": lambda: failpoints(*numbers),
        "full": lambda: full(*numbers),
        "malformed": lambda: malformed(*numbers),
        "dropouts": lambda: dropouts(*numbers),
        "load": lambda: load(*numbers),
        "bare": lambda: bare(*numbers),
        "canary": lambda: canary(rest or list(METHODS)),
        "unseen": lambda: unseen(*rest),
        "sums": lambda: sums(*numbers),
        "shares": lambda: shares(*numbers),
        "samples": lambda: samples(*numbers),
    }
    for result in makers[what]():
        print(json.dumps(result), flush=True)
