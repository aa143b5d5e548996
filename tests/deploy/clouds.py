"""Clouds of real processes on loopback, made by forking, and evidence gathered with them.

    python tests/deploy/clouds.py equal | kills | random | failpoints | down | paused | small | delays
                                   | cut | out | lost | elsewhere | restored

`delays` plays the paper's experiment (§5.2) with SIMULATED device delays, in real time times a factor: before it asks
for work a device sleeps for the recipe's arrival, before it trains for its steps. Prints one JSON line per result.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from processes import (
    HANGING,
    KILLED,
    Cluster,
    States,
    cluster,
    free_port,
    kill_at_writes,
    kill_some,
    plain,
    recipe_of,
)

from personafl.cloud.clock import Aggregation, Turn
from personafl.core import wire
from personafl.deploy import pki
from personafl.deploy.device import serving  # all that children need and that survives a fork
from personafl.deploy.server import coordination
from personafl.recipe.recipe import Recipe
from personafl.runs.build import prepare
from personafl.runs.scoring import score
from personafl.simulate.cloud import CloudSimulation, Moves
from personafl.simulate.simulator import Alone
from personafl.storage.backup import back_up
from personafl.storage.rundir import RunDirectory
from personafl.storage.store import Store

SHARED = (coordination, serving)
Outcome = tuple[list[bytes], States]  # the servers' states, and their devices'


def cloud_recipe(method: str, clients: int = 9, deploy: dict[str, Any] | None = None, **changes: Any) -> Recipe:
    """Return a small recipe with three servers, unless its changes say otherwise."""
    cloud = {"servers": 3, **changes.pop("cloud", {})}
    section = {"devices": 1, "server_timeout": 30.0, "heartbeat": 0.5, **(deploy or {})}
    recipe = recipe_of(method, clients, section, cloud=cloud, **changes)
    plain = recipe.data.model_copy(update={"normalize": "none"})  # a coordinator adds up no moments
    return recipe.model_copy(update={"data": plain})


@dataclass
class CloudCluster(Cluster):
    """A coordinator, its servers and their devices."""

    ports: list[int] = field(default_factory=list)  # of the servers
    homes: dict[str, int] = field(default_factory=dict)  # device -> the server that it was sent to
    coordinator: str = "coordinator"  # the folder of its run
    lines: dict[str, int] = field(default_factory=dict)  # device -> port of the line to its server, if it has its own
    cut_off: str = ""  # the device that cuts its own line
    finding: bool = False  # devices are given all servers, and find theirs
    spare: int = field(default_factory=free_port)  # where a server may go, as devices know that find theirs
    moved: dict[str, str] = field(default_factory=dict)  # server -> its folder, if it has another one

    def __post_init__(self) -> None:
        super().__post_init__()
        self._ends: dict[str, int] = {}
        assert self.recipe.cloud is not None
        self.ports = [free_port() for _ in range(self.recipe.cloud.servers)]
        for server in self.servers:
            pki.issue(self.folder / "pki", server)

    @property
    def servers(self) -> list[str]:
        return [f"cloud-{place}" for place in range(len(self.ports))]

    @property
    def names(self) -> list[str]:
        return ["coordinator", *self.servers, *self.devices]

    @property
    def members(self) -> list[list[int]]:
        assert self.recipe.cloud is not None
        assert self.recipe.cloud.members is not None
        return [[int(name) for name in names] for names in self.recipe.cloud.members]

    def port_of(self, device: str) -> int:
        number = int(device.removeprefix("device-"))
        port = next(port for port, own in zip(self.ports, self.members, strict=True) if number in own)
        port = self.ports[self.homes[device]] if device in self.homes else port
        return self.lines.get(device, port)

    def server_of(self, device: str) -> str:
        every = ",".join(f"localhost:{port}" for port in (*self.ports, self.spare))
        return every if self.finding else super().server_of(device)

    def start_line(self, device: str) -> None:
        """Start the line of a device: a process that carries bytes, and can be killed."""
        port = self.port_of(device) if device not in self.lines else 0
        if port:
            self.lines[device], self._ends[device] = free_port(), port
        self.start(f"line-{device}")

    async def role(self, name: str, tell: Callable[[Any], None]) -> None:
        if name.startswith("drop-"):
            from personafl.deploy.net.operating import ask_drop

            await ask_drop(f"localhost:{self.port}", self.files_of("coordinator"), name[5:], undo=False)
            return
        if name.startswith("line-"):
            device = name.removeprefix("line-")
            await carry(self.lines[device], self._ends[device])
            return
        if name.startswith("device-"):
            await super().role(name, self._cutting(name, tell) if name == self.cut_off else tell)
            return
        from personafl.deploy.server.cloudserver import CloudServerConfig, run_cloud_server
        from personafl.deploy.server.coordinator import run_coordinator
        from personafl.deploy.server.service import ServiceConfig

        port = self.port if name == "coordinator" else self.ports[self.servers.index(name)]
        given: dict[str, Any] = {
            "recipe": self.recipe,
            "out": self.folder / (self.coordinator if name == "coordinator" else self.moved.get(name, name)),
            "files": self.files_of(name),
            "revocations": self.folder / "pki" / "revoked.pem",
            "listen": f"localhost:{port}",
        }
        if name == "coordinator":
            await run_coordinator(ServiceConfig(**given), tell)
        else:
            config = CloudServerConfig(**given, coordinator=f"localhost:{self.port}")
            await run_cloud_server(config, tell)

    def _cutting(self, device: str, tell: Callable[[Any], None]) -> Callable[[Any], None]:
        """Cut a device's line when its first update was taken: not later, or the server may have given it work."""
        left = [self.living[f"line-{device}"]]

        def told(event: Any) -> None:
            if left and "update accepted" in str(event):
                os.kill(left.pop(), signal.SIGKILL)
            tell(event)

        return told

    def journal(self, of: str = "run") -> list[dict[str, Any]]:
        return super().journal(self.coordinator if of == "coordinator" else self.moved.get(of, of))

    def back_up(self, name: str) -> Path:
        """Copy the directory of a coordinator or a server that may be at work."""
        place = self.folder / (self.coordinator if name == "coordinator" else name)
        copy = self.folder / f"copy-{name}-{len(list(self.folder.glob('copy-*')))}"
        back_up(place, copy)
        return copy

    def restore(self, name: str, copy: Path) -> None:
        """Kill a coordinator or a server, lose its directory, and start it from a copy at another port."""
        self.kill(name)
        shutil.rmtree(self.folder / name)
        if name == "coordinator":
            self.coordinator, self.port = copy.name, free_port()
            for server in self.servers:
                self.kill(server)
                self.start(server)
        else:
            self.moved[name], self.ports[self.servers.index(name)] = copy.name, self.spare
        self.start(name)

    def drop(self, server: str) -> None:
        """Drop a server, and start its devices again where they belong then."""
        own = [f"device-{number}" for number in self.members[self.servers.index(server)]]
        for name in own:
            self.kill(name)
        self.ask_drop(server)
        (line,) = (entry for entry in self.journal("coordinator") if entry["event"] == "dropped")
        self.homes |= {f"device-{name}": home for name, home in line["homes"].items()}
        for home in set(line["homes"].values()):
            while not any(entry["event"] == "adopted" for entry in self.journal(self.servers[home])):
                time.sleep(0.02)
        for name in own:
            self.start(name)

    def ask_drop(self, server: str) -> None:
        """Tell the coordinator that a server is out."""
        self.start(f"drop-{server}")
        while f"drop-{server}" not in self.codes:
            self.reap()
            time.sleep(0.02)

    def start_all(self, before: Callable[[], None] | None = None) -> None:
        """Start everyone; `before` runs first in the devices."""
        for name in ("coordinator", *self.servers):
            self.start(name)
        # Whoever calls a server before it listens backs off.
        while not all("listening" in self.log(name) for name in ("coordinator", *self.servers)):
            self.reap()
            assert not self.codes, self.log(next(iter(self.codes)))
            time.sleep(0.02)
        for name in self.devices:
            self.start(name, before)

    def done(self) -> int:
        """Return how many mixes there were."""
        return sum(entry["event"] == "mixed" for entry in self.journal("coordinator"))

    def until(self, rounds: int, seconds: float = HANGING) -> None:
        end = time.monotonic() + seconds
        while self.done() < rounds:
            self.reap()
            assert time.monotonic() < end, self.log("coordinator")[-2000:]
            assert not any(code > 0 for code in self.codes.values()), self.codes
            time.sleep(0.02)

    def signal(self, sent: signal.Signals, *names: str) -> None:
        """Send a signal to processes."""
        for name in names:
            os.kill(self.living[name], sent)

    def until_handed_in(self, server: int) -> None:
        """Stop a server when the coordinator has all that its devices trained, and these have no other work yet."""
        name = self.servers[server]
        while True:
            self.signal(signal.SIGSTOP, name)
            *_, last = self.journal(name)
            handed_in = {"event": "ready", "server": server, "round": last.get("round")}
            if last["event"] == "sealed" and any(handed_in.items() <= it.items() for it in self.journal("coordinator")):
                return
            self.signal(signal.SIGCONT, name)
            time.sleep(0.05)

    def outcome(self) -> Outcome:
        """Return the servers' states, and their devices'."""
        return self.server_states(), self.device_states()

    def server_states(self) -> list[bytes]:
        """Return the servers' states."""
        found = [RunDirectory(self.folder / self.moved.get(server, server)) for server in self.servers]
        return [directory.server_bytes(directory.checkpoint()) for directory in found]

    def device_states(self) -> States:
        """Return the devices' states."""
        states: States = {}
        for server, own in zip(self.servers, self.members, strict=True):
            states |= self.states(own, server)
        return states

    def rounds_known(self) -> bool:
        """Say whether every device knows of the rounds in which its updates were taken, and of no others."""
        for server, own in zip(self.servers, self.members, strict=True):
            taken: dict[int, list[int]] = {number: [] for number in own}
            for entry in self.journal(server):
                if entry["event"] == "accepted":
                    taken[entry["number"]].append(entry["round"])
            if taken != {number: self.state(number, server).rounds for number in own}:
                return False
        return True

    def aggregations(self) -> list[Aggregation]:
        """Return what happened, from the journals: the simulator can play it again."""
        taken = {
            (entry["server"], entry["round"]): tuple(entry["taken"])
            for entry in self.journal("coordinator")
            if entry["event"] == "ready"
        }
        found: list[Aggregation] = []
        alone: list[Turn] = []
        began = 0.0
        for entry in self.journal("coordinator"):
            seconds = entry["time"] - began
            if entry["event"] == "began":
                began = entry["time"]
            elif entry["event"] == "alone":
                server, round_ = entry["server"], entry["round"]
                alone.append(Turn(server, round_, seconds, taken[server, round_]))
            elif entry["event"] == "mixed":
                rounds = [entry["round"] - stale for stale in entry["staleness"]]
                turns = (
                    Turn(server, round_, seconds, taken[server, round_])
                    for server, round_ in zip(entry["members"], rounds, strict=True)
                )
                found.append(Aggregation(entry["round"], seconds, tuple(turns), tuple(alone)))
                alone = []
        return found

    def alone(self) -> Alone:
        """Return who had trained without contact before which round; at the end, before the one after the last.

        What a server had taken that is out, and was not mixed, its devices undid.
        """
        dropped = (entry for entry in self.journal("coordinator") if entry["event"] == "dropped")
        counted = {self.servers[entry["server"]]: entry["counted"] for entry in dropped}
        return {
            (entry["number"], entry.get("round", self.recipe.rounds)): entry["alone"]
            for server in self.servers
            for entry in self.journal(server)
            if entry["event"] in ("accepted", "left") and "alone" in entry
            if server not in counted or entry.get("round", self.recipe.rounds) < counted[server]
        }

    def lost(self, events: list[Aggregation]) -> list[Turn]:
        """Return what servers had taken when the last round ended, and was not mixed any more."""
        turns = {(turn.server, turn.round) for event in events for turn in (*event.members, *event.isolated)}
        found: dict[tuple[int, int], list[int]] = {}
        out = {entry["server"] for entry in self.journal("coordinator") if entry["event"] == "dropped"}
        for server, name in enumerate(self.servers):
            if server in out:
                continue  # its devices went back
            for entry in self.journal(name):
                if entry["event"] == "accepted" and (server, entry["round"]) not in turns:
                    found.setdefault((server, entry["round"]), []).append(entry["number"])
        return [Turn(server, round_, 0.0, tuple(sorted(taken))) for (server, round_), taken in found.items()]

    def replayed(self) -> Outcome:
        """Return what the simulator comes to that plays again what happened."""
        events = self.aggregations()
        return played(self.recipe, events, self.alone(), self.lost(events), self.moves())

    def moves(self) -> Moves:
        """Return which devices of servers that were dropped counted elsewhere, from which round on."""
        return {
            (server, entry["round"]): entry["numbers"]
            for server, name in enumerate(self.servers)
            for entry in self.journal(name)
            if entry["event"] == "admitted"
        }


async def carry(port: int, to: int) -> None:
    """Carry bytes between two ports of this machine."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far = await asyncio.open_connection("localhost", to)
        await asyncio.gather(pump(reader, far[1]), pump(far[0], writer), return_exceptions=True)

    async with await asyncio.start_server(connected, "localhost", port) as server:
        await server.serve_forever()


def played(
    recipe: Recipe,
    events: list[Aggregation] | None = None,
    alone: Alone | None = None,
    lost: Iterable[Turn] = (),
    moves: Moves | None = None,
) -> Outcome:
    """Return what the simulator's cloud comes to: by its own clock, or by what happened."""
    job = prepare(recipe)
    with tempfile.TemporaryDirectory() as folder:
        simulation = CloudSimulation(job.federation, Store(Path(folder) / "states", 2**30), events=events)
        simulation.alone, simulation.moves = alone, moves or {}
        for number in range(recipe.rounds):
            simulation.step(number)
        for turn in lost:
            simulation._turns([turn])
        simulation.catch_up(job.federation.data.seen, recipe.rounds)
        assert recipe.cloud is not None
        clients = [int(client) for client in job.federation.data.seen if int(client) in simulation.store]
        states = {client: plain(simulation.store.get(client)) for client in clients}
        servers = simulation.server * (recipe.cloud.servers // len(simulation.server))
        return [wire.encode(state) for state in servers], states


def equal(methods: list[str]) -> Iterator[dict[str, Any]]:
    """Compare the simulator's synchronous cloud with 3 servers × 3 devices as processes, bit for bit."""
    for method in methods:
        recipe = cloud_recipe(method)
        began = time.monotonic()
        with cluster(recipe, CloudCluster) as made:
            made.start_all()
            made.wait()
            found = made.outcome()
        seconds = round(time.monotonic() - began, 1)
        yield {
            "what": "equal",
            "method": method,
            "servers": 3,
            "devices": 9,
            "equal": found == played(recipe),
            "seconds": seconds,
        }


def kills(protocols: list[str]) -> Iterator[dict[str, Any]]:
    """Kill a server, let the others go on, start it again; then kill the coordinator. The simulator plays it again."""
    for protocol in protocols:
        recipe = cloud_recipe("fedbcd", cloud=waiting(protocol, 2), rounds=24, training={"steps": 2, "batch": 16})
        with cluster(recipe, CloudCluster) as made:
            made.start_all(_slowly(0.15))
            made.until(2)
            made.kill("cloud-1")
            made.until(5)
            made.start("cloud-1")
            made.until(8)
            made.kill("coordinator")
            made.start("coordinator")
            made.until(11)
            made.kill("cloud-0")
            made.start("cloud-0")
            made.wait()
            found = made.server_states()
            events = made.aggregations()
        staleness = [event.number - turn.round for event in events for turn in event.members]
        yield {
            "what": "kills",
            "protocol": protocol,
            "equal": found == played(recipe, events)[0],
            "rounds": len(events),
            "mixes": [sum(turn.server == server for event in events for turn in event.members) for server in range(3)],
            "alone": sum(len(event.isolated) for event in events),
            "most_stale": max(staleness),
        }


def waiting(protocol: str, first: int) -> dict[str, Any]:
    """Return the keys of [cloud] that say how many are waited for."""
    return {"protocol": protocol, **({} if protocol == "sync" else {"first": first})}


def little(protocol: str, first: int, rounds: int = 12) -> Recipe:
    """Return a recipe with two servers and two devices each."""
    changes = {**KILLED, "rounds": rounds, "federation": {"cohort": 1.0}}
    return cloud_recipe("fedbcd", 4, cloud={"servers": 2, **waiting(protocol, first)}, **changes)


def at_random(seeds: range) -> Iterator[dict[str, Any]]:
    """Kill processes at random, start them again, and compare what comes out with the simulator.

    Where servers do not wait for all, it plays the journals again. Every device must know of the rounds in which its
    updates were taken, and of no others.
    """
    for seed in seeds:
        protocol = ("sync", "async", "rigorous")[seed % 3]
        recipe = little(protocol, first=1)
        began = time.monotonic()
        with cluster(recipe, CloudCluster) as made:
            count = kill_some(made, random.Random(seed))
            seconds = round(time.monotonic() - began, 1)
            servers, states = made.outcome()
            events = None if protocol == "sync" else made.aggregations()
            known = made.rounds_known()
        wanted = played(recipe, events)
        yield {
            "seed": seed,
            "protocol": protocol,
            "kills": count,
            "equal": servers == wanted[0] and (events is not None or states == wanted[1]),
            "rounds_known": known,
            "seconds": seconds,
        }


def failpoints(protocols: list[str], every: int = 1) -> Iterator[dict[str, Any]]:
    """Kill the coordinator, a server, and a device at each of its writes, one after another."""
    for protocol in protocols:
        recipe = little(protocol, first=2, rounds=2)
        places = dict.fromkeys(("coordinator", "cloud-0", "device-0"), ".")
        for result in kill_at_writes(recipe, CloudCluster, places, played(recipe), every):
            yield {"protocol": protocol, **result}


def down(protocols: list[str]) -> Iterator[dict[str, Any]]:
    """Kill a server for good: the others go on without it after the time-out, whatever they would wait for."""
    for protocol in protocols:
        recipe = cloud_recipe("fedbcd", deploy={"server_timeout": 2.0}, cloud=waiting(protocol, 3), rounds=6)
        with cluster(recipe, CloudCluster) as made:
            made.start_all()
            made.until(2)
            made.kill("cloud-2")
            lost = [f"device-{number}" for number in made.members[2]]
            for name in lost:
                made.kill(name)
            made.wait()
            journal = made.journal("coordinator")
            found = made.server_states()
            events = made.aggregations()
        mixed = [entry["members"] for entry in journal if entry["event"] == "mixed"]
        yield {
            "what": "down",
            "protocol": protocol,
            "gone": [entry["server"] for entry in journal if entry["event"] == "gone"],
            "rounds": len(mixed),
            "last": mixed[-1],
            "equal": found[:2] == played(recipe, events)[0][:2],
        }


def paused(seconds: float = 12.0) -> Iterator[dict[str, Any]]:
    """Stop the coordinator (SIGSTOP) for longer than its time-out, and then a server: nobody is gone for that."""
    recipe = cloud_recipe("fedbcd", 4, {"server_timeout": 5.0}, cloud={"servers": 2}, rounds=6)
    with cluster(recipe, CloudCluster) as made:
        made.start_all(_slowly(0.2))
        for place, name in enumerate(("coordinator", "cloud-0")):
            made.until(1 + place)
            os.kill(made.living[name], signal.SIGSTOP)
            time.sleep(seconds if name == "coordinator" else 2.0)
            os.kill(made.living[name], signal.SIGCONT)
        made.wait()
        journal = made.journal("coordinator")
        found = made.outcome()
    yield {
        "what": "paused",
        "seconds": seconds,
        "gone": [entry["server"] for entry in journal if entry["event"] == "gone"],
        "mixed": [entry["members"] for entry in journal if entry["event"] == "mixed"],
        "equal": found == played(recipe),
    }


def cut(protocol: str = "async", rounds: int = 6) -> Iterator[dict[str, Any]]:
    """Cut a device off for some rounds of its server: it trains on, waits, and hands in when the line is back."""
    recipe = cloud_recipe(
        "fedbcdi",
        6,
        {"offline_after": 0.25},
        cloud={"servers": 2, "active": 2, **waiting(protocol, 2)},
        rounds=40,
        model={"name": "linear"},
        training={"steps": 3, "least_steps": 1, "batch": 16},
    )
    with cluster(recipe, CloudCluster) as made:
        name = f"device-{made.members[0][0]}"
        made.cut_off, line = name, f"line-{name}"
        made.start_line(name)
        made.start_all(_slowly(0.1))
        while line not in made.codes:
            made.reap()
            time.sleep(0.02)
        del made.codes[line]
        made.until(made.done() + rounds)
        os.kill(made.living["coordinator"], signal.SIGSTOP)  # or the others might be done before it has waited
        while made.log(name).count("trained without contact") < 4:
            time.sleep(0.02)
        os.kill(made.living["coordinator"], signal.SIGCONT)
        made.start_line(name)
        made.wait(without=f"line-{name}")
        found, wanted = made.outcome(), made.replayed()
        alone = [own for (number, _), own in made.alone().items() if number == made.members[0][0]]
    yield {"what": "cut", "protocol": protocol, "alone": alone, "equal": found == wanted}


def out(protocol: str = "async") -> Iterator[dict[str, Any]]:
    """Kill a server for good, drop it, and start its devices again at the others."""
    recipe = cloud_recipe(
        "fedbcd", cloud=waiting(protocol, 2), rounds=16, model={"name": "linear"}, training={"steps": 2, "batch": 16}
    )
    with cluster(recipe, CloudCluster) as made:
        made.start_all(_slowly(0.3))
        made.until(3)
        made.kill("cloud-2")
        if protocol != "sync":
            made.until(5)
        made.drop("cloud-2")
        made.wait()
        (servers, states), (wanted, played_states) = made.outcome(), made.replayed()
        moved = [len(entry["names"]) for name in made.servers for entry in made.journal(name) if "names" in entry]
        taken = [
            entry["number"]
            for name in made.servers[:2]
            for entry in made.journal(name)
            if entry["event"] == "accepted" and entry["number"] in made.members[2]
        ]
    yield {
        "what": "out",
        "protocol": protocol,
        "moved": sum(moved),
        "taken": len(taken),
        "equal": servers[:2] == wanted[:2] and states == played_states,
    }


def lost(protocol: str = "async", rounds: int = 40) -> Iterator[dict[str, Any]]:
    """Kill a server for good while its devices train; they train on alone, find their new servers, and hand in there.

    They know all servers from the start, and are not started again. The server is, at the end: nobody wants it.
    """
    recipe = cloud_recipe(
        "fedbcdi",
        deploy={"offline_after": 0.25},
        cloud=waiting(protocol, 2),
        rounds=rounds,
        model={"name": "linear"},
        training={"steps": 3, "least_steps": 1, "batch": 16},
    )
    with cluster(recipe, CloudCluster) as made:
        made.finding = True
        own = [f"device-{number}" for number in made.members[2]]
        made.start_all(_slowly(0.1))
        made.until(3)
        others = [name for name in made.devices if name not in own]
        made.signal(signal.SIGSTOP, *others)
        made.until_handed_in(2)  # what a device trains after an update that is on its way is lost with that
        made.kill("cloud-2")
        made.signal(signal.SIGCONT, *others)
        made.until(made.done() + (1 if protocol == "sync" else 2))  # with it: what was handed in counts
        made.signal(signal.SIGSTOP, "coordinator", *others)  # or these might be done before the lost have come back
        while any(made.log(name).count("trained without contact") < 4 for name in own):
            time.sleep(0.02)
        made.signal(signal.SIGCONT, "coordinator")
        made.ask_drop("cloud-2")
        while not all("its server is out" in made.log(name) for name in own):
            made.until(0)
            time.sleep(0.02)
        made.signal(signal.SIGCONT, *others)
        made.start("cloud-2")
        while "cloud-2" not in made.codes:
            made.reap()
            time.sleep(0.02)
        code = made.codes.pop("cloud-2")
        made.wait()
        (servers, states), (wanted, played_states) = made.outcome(), made.replayed()
        alone = {key: value for key, value in made.alone().items() if key[0] in made.members[2]}
        again = made.log("cloud-2").strip().splitlines()[-1]
    yield {
        "what": "lost",
        "protocol": protocol,
        "alone": sorted(map(len, alone.values())),
        "came back": [code, again],
        "equal": servers[:2] == wanted[:2] and states == played_states,
    }


def elsewhere(protocol: str = "sync") -> Iterator[dict[str, Any]]:
    """Kill the coordinator, and go on with a copy of its folder at another port; servers are started again for that."""
    recipe = cloud_recipe("fedbcd", cloud=waiting(protocol, 2), rounds=12, model={"name": "linear"})
    with cluster(recipe, CloudCluster) as made:
        made.start_all(_slowly(0.2))
        made.until(3)
        made.kill("coordinator")
        before = made.done()
        shutil.copytree(made.folder / "coordinator", made.folder / "elsewhere")
        shutil.rmtree(made.folder / "coordinator")
        made.coordinator, made.port = "elsewhere", free_port()
        made.start("coordinator")
        for server in made.servers:
            made.kill(server)
            made.start(server)
        made.wait()
        found, wanted = made.outcome(), made.replayed()
        joined = [entry["server"] for entry in made.journal("coordinator") if entry["event"] == "joined"]
    yield {
        "what": "elsewhere",
        "protocol": protocol,
        "before": before,
        "rounds": recipe.rounds,
        "joined": joined,
        "equal": found == wanted and made.coordinator == "elsewhere",
    }


def restored(whose: str = "coordinator", age: str = "new", protocol: str = "async") -> Iterator[dict[str, Any]]:
    """Back up a coordinator or a server at work, lose it and its directory, and go on from the copy at another port.

    A new copy has all that others know: devices are stopped while it is made. An old one is of two mixes before.
    """
    work = {"model": {"name": "linear"}, "training": {"steps": 2, "batch": 16}}
    recipe = cloud_recipe("fedbcd", cloud=waiting(protocol, 2), rounds=14, **work)
    with cluster(recipe, CloudCluster) as made:
        made.finding = True
        made.start_all(_slowly(0.2))
        made.until(3)
        if age == "old":
            copy = made.back_up(whose)
            until = made.done() + 4
            while made.done() < until and made.done() < recipe.rounds - 3:
                time.sleep(0.02)
        else:
            for name in made.devices:
                os.kill(made.living[name], signal.SIGSTOP)
            copy, before = made.back_up(whose), Path()
            while not before.name or _said(copy) != _said(before):  # until what was under way is done
                time.sleep(1.0)
                copy, before = made.back_up(whose), copy
        made.restore(whose, copy)
        for name in made.devices if age == "new" else ():
            os.kill(made.living[name], signal.SIGCONT)
        if age == "new":
            made.wait()
            found, wanted = made.outcome(), made.replayed()
            yield {"what": "restored", "whose": whose, "age": age, "equal": found == wanted, "rounds": made.done()}
            return
        ending = made.servers if whose == "coordinator" else [whose]
        while not any(name in made.codes for name in ending):
            made.reap()
            time.sleep(0.02)
        first = next(name for name in ending if name in made.codes)
        line = made.log(first).strip().splitlines()[-1]
        if whose != "coordinator":
            made.codes.pop(first)
            made.ask_drop(first)
            made.wait()
            (servers, states), (wanted_servers, played_states) = made.outcome(), made.replayed()
            place = made.servers.index(first)
            del servers[place], wanted_servers[place]
            equal = (servers, states) == (wanted_servers, played_states)
        else:
            equal = None
        yield {"what": "restored", "whose": whose, "age": age, "ended": first, "line": line, "equal": equal}


def _said(copy: Path) -> bytes:
    return (copy / "journal.jsonl").read_bytes()


def small() -> Iterator[dict[str, Any]]:
    """Do a little of each."""
    yield from equal(["fedbcd", "fedavg"])
    yield from kills(["async"])
    yield from down(["sync"])


def _slowly(seconds: float) -> Callable[[], None]:
    """Make a device take so long for a round."""

    def before() -> None:
        from personafl.deploy.device.training import LocalClient

        train = LocalClient.train

        def slow(self: LocalClient, *task: Any) -> None:
            time.sleep(seconds)
            train(self, *task)

        LocalClient.train = slow  # type: ignore[method-assign]

    return before


def _delayed(recipe: Recipe, factor: float) -> Callable[[], None]:
    """Play a recipe's latencies in a device: SIMULATED delays, in real time times a factor."""
    from personafl.simulate.engine import local_steps

    steps = local_steps(recipe.training.build().work, recipe.seed)
    assert recipe.cloud is not None
    arrival, step = recipe.cloud.arrival, recipe.cloud.step

    def before() -> None:
        from personafl.deploy.device import device
        from personafl.deploy.device.training import LocalClient

        train, turn = LocalClient.train, device._Device._turn
        dice = random.Random()

        async def arriving(self: device._Device) -> bool:
            # An exponential arrival has no memory: a new one after each question in vain is as if it went on.
            await asyncio.sleep(factor * float(arrival.quantile(dice.random())))
            return await turn(self)

        def slow(self: LocalClient, round_: int, model: str, broadcast: bytes) -> None:
            count = int(steps(np.array([self.number]), round_)[0])
            time.sleep(factor * count * float(step.quantile(dice.random())))
            train(self, round_, model, broadcast)

        device._Device._turn = arriving  # type: ignore[method-assign]
        LocalClient.train = slow  # type: ignore[method-assign]

    return before


def delays(
    rounds: int = 12, per_second: int = 2, firsts: tuple[int, ...] = (), servers: int = 10
) -> Iterator[dict[str, Any]]:
    """Run 10 servers × 10 devices + 1 as 111 processes with the paper's delays: accuracy against time, sync and B.

    `rounds` are those of sync; with B of 10 there are 10/B times as many, so that servers have as many each.
    `per_second`: seconds of the paper's clock that pass in a second. Accuracies are of the same run played again by
    the simulator, with the times that it had; the last line of each run has them at every 20 seconds. Fewer servers
    are for trying it out: `python tests/deploy/clouds.py delays 2 20 3 2 servers=3`.
    """
    for first in firsts or (servers, 3, 5, 7):
        protocol = {"protocol": "sync"} if first == servers else {"protocol": "async", "first": first}
        recipe = _paper(round(rounds * servers / first), {"servers": servers, **protocol})
        with cluster(recipe, CloudCluster) as made:
            began = time.monotonic()
            made.start_all(_delayed(recipe, 1 / per_second))
            made.wait()
            seconds = time.monotonic() - began
            events, found = made.aggregations(), made.outcome()
            alone = sum(map(len, made.alone().values()))
            equal = found == made.replayed()
        scored = list(_scored(recipe, first, events, found[0]))
        yield from scored
        yield {
            "B": first,
            "processes": 1 + 11 * servers,
            "rounds": len(events),
            "wall_s": round(seconds, 1),
            "alone": alone,
            "states": len(found[1]),
            "equal": equal,
            "personal": _every(20, scored),
        }


def _every(seconds: int, scored: list[dict[str, Any]]) -> dict[str, float]:
    """Return the last personal accuracy, in percent, at every so many seconds and at the end."""
    ends = scored[-1]["seconds"]
    times = [*range(seconds, int(ends) + 1, seconds), ends]
    known = {f"{at:g}": [row["personal"] for row in scored if row["seconds"] <= at] for at in times}
    return {at: round(100 * found[-1], 1) for at, found in known.items() if found}


def _paper(rounds: int, cloud: dict[str, Any]) -> Recipe:
    """Return §5.2 of the paper, with a small network: 10 servers with 10 devices, of which the first 3 take part.

    Five others train without contact, so that eight of ten train in a round.
    """
    files = (folder / "shared" / "data" / "mnist" / "mnist.npz" for folder in Path(__file__).resolve().parents)
    source = next(file for file in files if file.exists())
    partition = {"kind": "diversity", "labels": 3, "samples": 120}
    return cloud_recipe(
        "fedbcdi",
        10 * cloud["servers"],
        {"heartbeat": 0.2, "min_completion": 1.0},
        rounds=rounds,
        data={"source": str(source), "partition": partition},
        federation={"weights": "uniform", "offline": 5},
        options={"penalty": 0.2, "server_step": 0.5},
        model={"name": "mlp", "hidden": [32]},
        training={"epochs": 5, "least_epochs": 1, "batch": 32, "lr": 0.005},
        cloud={"active": 3, **cloud},
    )


def _scored(recipe: Recipe, first: int, events: list[Aggregation], found: list[bytes]) -> Iterator[dict[str, Any]]:
    """Play what happened again, and score it now and then; who trains without contact is drawn, as servers drew it."""
    job = prepare(recipe)
    every = max(1, recipe.rounds // 20)
    with tempfile.TemporaryDirectory() as folder:
        simulation = CloudSimulation(job.federation, Store(Path(folder) / "states", 2**30), events=events)
        for event in events:
            simulation.step(event.number)
            if (event.number + 1) % every == 0 or event.number + 1 == len(events):
                stale = [event.number - turn.round for turn in event.members]
                yield {
                    "B": first,
                    "round": event.number + 1,
                    "seconds": round(event.time, 2),
                    "most_stale": max(stale),
                    **_accuracies(simulation),
                }
        assert recipe.cloud is not None
        servers = simulation.server * (recipe.cloud.servers // len(simulation.server))
        assert [wire.encode(state) for state in servers] == found


def _accuracies(simulation: CloudSimulation) -> dict[str, float]:
    """Return the mean test accuracy over devices; a device that never took part has its server's model."""
    data = simulation.federation.data
    scores = score(simulation, None, data.seen, {"test": data.test}, False).scores
    return {model: round(float(found.accuracy.mean()), 4) for (model, _), found in scores.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, rest = sys.argv[1], sys.argv[2:]
    numbers = [int(word) for word in rest if word.isdigit()]
    named = {key: int(value) for key, value in (word.split("=") for word in rest if "=" in word)}
    words = [word for word in rest if not word.isdigit() and "=" not in word]
    makers: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "equal": lambda: equal(words or ["fedbcd", "fedavg"]),
        "kills": lambda: kills(words or ["async", "rigorous"]),
        "random": lambda: at_random(range(*numbers or (100,))),
        "failpoints": lambda: failpoints(words or ["sync", "async"], *numbers),
        "down": lambda: down(words or ["sync", "async"]),
        "paused": lambda: paused(*numbers),
        "cut": lambda: cut(*words),
        "out": lambda: out(*words),
        "lost": lambda: lost(*words),
        "elsewhere": lambda: elsewhere(*words),
        "restored": lambda: restored(*words),
        "small": small,
        "delays": lambda: delays(*numbers[:2], *([tuple(numbers[2:])] if numbers[2:] else []), **named),
    }
    played(cloud_recipe("fedbcd", rounds=1))  # what torch imports when it first trains, children have then
    for result in makers[what]():
        print(json.dumps(result), flush=True)
