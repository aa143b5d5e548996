"""Clouds of real processes on loopback, made by forking, and evidence gathered with them.

    python tests/deploy/clouds.py equal | kills | random | failpoints | down | paused | small | delays

`delays` plays the paper's experiment (§5.2) with SIMULATED device delays, in real time times a factor: before it asks
for work a device sleeps for the recipe's arrival, before it trains for its steps. Prints one JSON line per result.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
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
from personafl.simulate.cloud import CloudSimulation
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

    def __post_init__(self) -> None:
        super().__post_init__()
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
        return next(port for port, own in zip(self.ports, self.members, strict=True) if number in own)

    async def role(self, name: str, tell: Callable[[Any], None]) -> None:
        if name.startswith("device-"):
            await super().role(name, tell)
            return
        from personafl.deploy.server.cloudserver import CloudServerConfig, run_cloud_server
        from personafl.deploy.server.coordinator import run_coordinator
        from personafl.deploy.server.service import ServiceConfig

        port = self.port if name == "coordinator" else self.ports[self.servers.index(name)]
        given: dict[str, Any] = {
            "recipe": self.recipe,
            "out": self.folder / name,
            "files": self.files_of(name),
            "revocations": self.folder / "pki" / "revoked.pem",
            "listen": f"localhost:{port}",
        }
        if name == "coordinator":
            await run_coordinator(ServiceConfig(**given), tell)
        else:
            config = CloudServerConfig(**given, coordinator=f"localhost:{self.port}")
            await run_cloud_server(config, tell)

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

    def outcome(self) -> Outcome:
        """Return the servers' states, and their devices'."""
        return self.server_states(), self.device_states()

    def server_states(self) -> list[bytes]:
        """Return the servers' states."""
        found = [RunDirectory(self.folder / server) for server in self.servers]
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
            (server, entry["round"]): tuple(entry["taken"])
            for server, name in enumerate(self.servers)
            for entry in self.journal(name)
            if entry["event"] == "sealed"
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


def played(recipe: Recipe, events: list[Aggregation] | None = None) -> Outcome:
    """Return what the simulator's cloud comes to: by its own clock, or by what happened."""
    job = prepare(recipe)
    with tempfile.TemporaryDirectory() as folder:
        simulation = CloudSimulation(job.federation, Store(Path(folder) / "states", 2**30), events=events)
        for number in range(recipe.rounds):
            simulation.step(number)
        assert recipe.cloud is not None
        clients = [int(client) for client in job.federation.data.seen if int(client) in simulation.store]
        states = {client: plain(simulation.store.get(client)) for client in clients}
        servers = simulation.server * (recipe.cloud.servers if recipe.cloud.shared else 1)
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


def delays(rounds: int = 30, per_second: int = 4, firsts: tuple[int, ...] = (10, 3, 5, 7)) -> Iterator[dict[str, Any]]:
    """Run 10 servers × 10 devices + 1 as 111 processes with the paper's delays: accuracy against time, sync and B.

    `rounds` are those of sync; with B of 10 there are 10/B times as many. `per_second`: seconds of the paper's clock
    that pass in a second. Accuracies are of the same run played again by the simulator, with the times that it had.
    """
    for first in firsts:
        protocol = {"protocol": "sync"} if first == 10 else {"protocol": "async", "first": first}
        recipe = _paper(round(rounds * 10 / first), protocol)
        with cluster(recipe, CloudCluster) as made:
            began = time.monotonic()
            made.start_all(_delayed(recipe, 1 / per_second))
            made.wait()
            seconds = time.monotonic() - began
            events = made.aggregations()
            found = made.server_states()
        yield from _scored(recipe, first, events, found, seconds)


def _paper(rounds: int, protocol: dict[str, Any]) -> Recipe:
    """Return §5.2 of the paper, with a small network: 10 servers with 10 devices, of which the first 3 take part."""
    source = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "mnist" / "mnist.npz"
    partition = {"kind": "diversity", "labels": 3, "samples": 120}
    return cloud_recipe(
        "fedbcdi",
        100,
        {"heartbeat": 0.2, "min_completion": 1.0},
        rounds=rounds,
        data={"source": str(source), "partition": partition},
        federation={"weights": "uniform"},
        model={"name": "mlp", "hidden": [32]},
        training={"steps": 5, "least_steps": 1, "batch": 32, "lr": 0.05},
        cloud={"servers": 10, "active": 3, **protocol},
    )


def _scored(
    recipe: Recipe, first: int, events: list[Aggregation], found: list[bytes], seconds: float
) -> Iterator[dict[str, Any]]:
    """Play what happened again, and score it now and then."""
    job = prepare(recipe)
    every = max(1, recipe.rounds // 15)
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
        servers = simulation.server * (10 if first == 10 else 1)
        equal = [wire.encode(state) for state in servers] == found
    yield {"B": first, "processes": 111, "rounds": len(events), "equal": equal, "wall_s": round(seconds, 1)}


def _accuracies(simulation: CloudSimulation) -> dict[str, float]:
    """Return the mean test accuracy over devices; a device that never took part has its server's model."""
    data = simulation.federation.data
    scores = score(simulation, None, data.seen, {"test": data.test}, False).scores
    return {model: round(float(found.accuracy.mean()), 4) for (model, _), found in scores.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, rest = sys.argv[1], sys.argv[2:]
    numbers = [int(word) for word in rest if word.isdigit()]
    words = [word for word in rest if not word.isdigit()]
    makers: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "equal": lambda: equal(words or ["fedbcd", "fedavg"]),
        "kills": lambda: kills(words or ["async", "rigorous"]),
        "random": lambda: at_random(range(*numbers or (100,))),
        "failpoints": lambda: failpoints(words or ["sync", "async"], *numbers),
        "down": lambda: down(words or ["sync", "async"]),
        "paused": lambda: paused(*numbers),
        "small": small,
        "delays": lambda: delays(*numbers),
    }
    played(cloud_recipe("fedbcd", rounds=1))  # what torch imports when it first trains, children have then
    for result in makers[what]():
        print(json.dumps(result), flush=True)
