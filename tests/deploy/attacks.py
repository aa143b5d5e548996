"""Attacks on a server with real, honest devices, over real TLS; prints a Markdown table of what happened.

    python tests/deploy/attacks.py [all | messages | compact | large | cloud | cheap] [SECONDS]

Each attack goes on for SECONDS (1) while a round is under way. Right is: the server's process lives and answers as
expected, so do the devices, the round comes to the simulator's bits, and 95 of 100 small calls of an honest device take
at most 10 times as long as when all is quiet.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from clouds import CloudCluster, _slowly, little, played
from processes import KILLED, Cluster, cluster, plain, recipe_of

from personafl.core import wire
from personafl.deploy import pki
from personafl.deploy.net.messages import digest_of
from personafl.recipe.recipe import Recipe
from personafl.runs.build import prepare
from personafl.simulate import simulator
from personafl.simulate.simulator import Simulation
from personafl.storage.rundir import RunDirectory
from personafl.storage.store import Store

QUIET = 0.3  # seconds before each attack
HONEST, HOSTILE = ("device-0", "device-1", "device-2"), "device-3"
TAKEN = 10.0  # seconds in which all honest updates of a round are taken, also during an attack
SPARE = 40  # rounds more than attacks: some end without the attacker, and the next begins at once
FILES = 1024  # that a server may have open, as systems have it by default


@dataclass
class Besieged(Cluster):
    """A server with three honest devices, which ask all the time besides, and one that attacks."""

    part: str = "messages"
    seconds: float = 1.0
    only: Collection[str] = ()
    ends: list[dict[str, Any]] = field(default_factory=list)  # of processes that should not have ended

    def __post_init__(self) -> None:
        super().__post_init__()
        from assault_lines import prepare as issue_more

        issue_more(self.folder)

    def be(self, name: str) -> None:
        if name == "server":
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, hard))
        super().be(name)

    async def role(self, name: str, tell: Callable[[Any], None]) -> None:
        if name in HONEST:
            _probing(self.folder / f"{name}.calls")
        if name == HOSTILE:
            await self.attack(tell)
        await super().role(name, tell)  # also who has attacked goes on as it should

    async def attack(self, tell: Callable[[Any], None]) -> None:
        """Try one attack after another, each in a round of its own."""
        from assault import Hostile

        from personafl.deploy.device.training import LocalClient
        from personafl.deploy.net.messages import Hello, Knock
        from personafl.deploy.net.transport import Channel

        first = Channel(f"localhost:{self.port}", self.files_of(HOSTILE), lambda kind: 2**20)
        welcome, text = await first.ask(Knock())
        await first.close()
        data, state = self.folder / "dealt" / f"{HOSTILE}.safetensors", self.folder / "devices" / HOSTILE
        client = LocalClient.opened(text, "the server", str(data), 3, None, state, welcome.run)  # type: ignore[attr-defined]
        hostile = Hostile(HOSTILE, self.port, self.folder / "pki", client)
        await hostile.line.ask(Hello(**client.hello))
        await hostile.owe()
        await asyncio.sleep(10 * QUIET)
        with open(self.folder / "attacks.jsonl", "w") as file:
            for attack in attacks_of(self.part):
                if self.only and attack.name not in self.only:
                    continue
                await asyncio.sleep(QUIET)
                began = time.monotonic()
                got = await _besieged(hostile, attack, attack.seconds or self.seconds)
                ended = time.monotonic()
                await hostile.owe()
                directory = RunDirectory(self.folder / "run")
                checkpoint = directory.checkpoint()
                found = {
                    **{key: getattr(attack, key) for key in ("group", "name", "expected")},
                    "got": got,
                    "began": began,
                    "ended": ended,
                    "round": checkpoint.rounds,
                    "model": digest_of(directory.server_bytes(checkpoint)),
                }
                print(json.dumps(found), file=file, flush=True)
        client.state.refused()  # it was not sent: the device trains for it again
        await hostile.close()

    def watch(self) -> None:
        """Wait for the end, and start again whoever ends before."""
        while self.living:
            self.reap()
            for name, code in list(self.codes.items()):
                if code:
                    del self.codes[name]
                    last = self.log(name).strip().splitlines()[-1:]
                    self.ends.append({"who": name, "code": code, "time": time.monotonic(), "said": last})
                    assert name != HOSTILE, self.log(name)
                    assert len(self.ends) < 60, self.ends
                    self.start(name)
            time.sleep(0.02)


async def _besieged(hostile: Any, attack: Any, seconds: float) -> dict[str, int]:
    """Attack for so long, and meanwhile or afterwards send the update that is owed; return what was answered."""
    began, got = time.monotonic(), Counter[str]()

    async def attempts() -> None:
        while not got or time.monotonic() < began + seconds:
            try:
                async with asyncio.timeout(30.0):
                    said = await attack.attempt(hostile)
            except Exception as error:
                said = f"{type(error).__name__}: {error}"[:80].replace("|", "/")
            got.update(said.split("|"))
            await asyncio.sleep(0.002)

    going = asyncio.create_task(attempts())
    if attack.open:
        await going
    else:
        await asyncio.sleep(seconds / 2)
    await hostile.settle()
    await going
    return dict(got)


def _probing(path: Path) -> None:
    """Have a device make small calls all the time, on its own connection, and note how long each took."""
    from personafl.deploy.device import homes
    from personafl.deploy.net import messages
    from personafl.deploy.net.transport import Channel, Unreachable

    class Asking(Channel):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.hello: messages.Hello | None = None
            self._asking = asyncio.create_task(self._ask_on())

        async def ask(self, message: Any, *rest: Any, **options: Any) -> Any:
            if isinstance(message, messages.Hello):
                self.hello = message
            if isinstance(message, messages.Leave):  # a hello after it would enrol again
                self._asking.cancel()
                await asyncio.gather(self._asking, return_exceptions=True)
            return await super().ask(message, *rest, **options)

        async def close(self) -> None:
            self._asking.cancel()
            await super().close()

        async def _ask_on(self) -> None:
            with open(path, "a") as file:
                while True:
                    for message in (messages.Beat(round=0), self.hello):  # the latter needs the worker thread
                        if message is None:
                            continue
                        began, well = time.monotonic(), 1
                        try:
                            await super().ask(message, timeout=30.0, tries=1)
                        except (Unreachable, messages.Refused):
                            well = 0
                        print(began, time.monotonic() - began, well, file=file, flush=True)
                        await asyncio.sleep(0.1)  # half of what one device may ask in a second

    homes.Channel = Asking  # type: ignore[misc]


@dataclass
class BesiegedCloud(CloudCluster):
    """A coordinator with two servers, and somebody who has certificates of each kind."""

    seconds: float = 0.5
    ends: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("cloud-7", "device-90"):
            pki.issue(self.folder / "pki", name)

    @property
    def names(self) -> list[str]:
        return [*super().names, HOSTILE_CLOUD]

    async def role(self, name: str, tell: Callable[[Any], None]) -> None:
        if name == HOSTILE_CLOUD:
            await self.attack()
        else:
            await super().role(name, tell)

    async def attack(self) -> None:
        """Try one attack after another while the rounds go on, which servers cannot finish before."""
        from assault_cloud import Outsider, attacks

        from personafl.deploy.net.messages import Status
        from personafl.deploy.server.agreement import sum_like, without_cloud
        from personafl.deploy.server.opening import open_federation

        like, _ = sum_like(open_federation(without_cloud(self.recipe)))
        stray = f"device-{self.members[1][0]}"
        outsider = Outsider(self.port, self.ports, stray, like, self.folder / "pki")
        line = outsider.honest("coordinator")
        with open(self.folder / "attacks.jsonl", "w") as file:
            for attack in attacks():
                before, done, slowest = time.monotonic(), Counter[str](), []
                while not done or time.monotonic() < before + self.seconds:
                    done[await attack.attempt(outsider)] += 1
                    asked = time.monotonic()
                    await line.ask(Status(), timeout=30.0, tries=1)
                    slowest.append(time.monotonic() - asked)
                found = {key: getattr(attack, key) for key in ("group", "name", "expected")}
                found |= {"got": dict(done), "p95": float(np.percentile(slowest, 95))}
                print(json.dumps(found), file=file, flush=True)
        await outsider.close()
        await line.close()


HOSTILE_CLOUD = "outsider"


def siege_of_cloud(seconds: float) -> Iterator[dict[str, Any]]:
    """Attack a coordinator and its servers while they go through their rounds."""
    recipe = little("sync", 2, rounds=30)
    with cluster(recipe, BesiegedCloud) as made:
        made.seconds = seconds
        made.start_all(_slowly(seconds))
        made.start(HOSTILE_CLOUD)
        made.wait()
        rows = [json.loads(line) for line in (made.folder / "attacks.jsonl").read_text().splitlines()]
        equal = made.outcome() == played(recipe)
        logs = [(made.folder / f"{name}.log").read_bytes() for name in ("coordinator", *made.servers)]
    for row in rows:
        wrong = [said for said in row["got"] if said not in (*row["expected"].split("|"), "call ended")]
        yield {**row, "ratio": "", "wrong": ["answered"] if wrong else []}
    yield {
        "part": "cloud",
        "attacks": len(rows),
        "attempts": sum(sum(row["got"].values()) for row in rows),
        "bits": equal,
        "tracebacks": sum(log.count(b"Traceback") for log in logs),
    }


def attacks_of(part: str) -> list[Any]:
    """Return the attacks of a part."""
    import assault_lines as lines
    import assault_messages as said

    parts: dict[str, Callable[[], list[Any]]] = {
        "messages": lambda: [
            *said.framing(),
            *said.payloads(),
            *said.protocol(),
            *lines.identities(),
            *lines.connections(),
        ],
        "compact": said.compact,
        "large": lambda: [*said.large(), *lines.large()],
        "cheap": lambda: [
            *said.framing()[::9],
            *said.payloads()[::9],
            *said.protocol()[::12],
            *lines.identities()[::3],
        ],
    }
    return parts[part]()


RECIPES: dict[str, dict[str, Any]] = {
    "messages": {"model": {"name": "linear"}},
    "cheap": {"model": {"name": "linear"}},
    "compact": {"model": {"name": "mlp", "hidden": [48]}, "uplink": {"form": "sparse", "keep": 0.02}},
    "large": {"model": {"name": "mlp", "hidden": [40_000]}},
}


def recipe_for(part: str) -> Recipe:
    changes = {**KILLED, **RECIPES[part], "federation": {"cohort": 1.0}, "rounds": len(attacks_of(part)) + SPARE}
    deploy = {"deadline": 3600.0, "min_completion": 1.0, "norm_bound": 100.0, "heartbeat": 1.0}
    return recipe_of("fedavg" if part == "large" else "ditto", 4, deploy, **changes)


def models_of(recipe: Recipe, taken: list[list[int]]) -> tuple[list[str], dict[int, Any]]:
    """Return the digest of the server's state after each round in the simulator, and the clients' states at the end.

    In each round those take part whose updates were taken: all, but for one that sent bad numbers or left.
    """
    job, digests = prepare(recipe), []
    drawn = simulator.draw_cohort
    simulator.draw_cohort = lambda *given: np.array(taken[min(given[-1], len(taken) - 1)], dtype=np.int64)
    try:
        with tempfile.TemporaryDirectory() as folder:
            simulation = Simulation(job.federation, Store(Path(folder) / "states", 2**30))
            digests.append(digest_of(wire.encode(simulation.saved())))
            for number in range(recipe.rounds):
                simulation.step(number)
                digests.append(digest_of(wire.encode(simulation.saved())))
            clients = [int(c) for c in job.federation.data.seen if int(c) in simulation.store]
            return digests, {client: plain(simulation.store.get(client)) for client in clients}
    finally:
        simulator.draw_cohort = drawn


def siege(part: str, seconds: float, only: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """Go through the attacks of a part, or only through some."""
    recipe = recipe_for(part)
    with cluster(recipe, Besieged) as made:
        made.part, made.seconds, made.only = part, seconds, only
        made.start("server")
        while "listening" not in made.log("server"):
            made.reap()
            assert not made.codes, made.log("server")
            time.sleep(0.02)
        for name in made.devices:
            made.start(name)
        peak = _watched(made)
        rows = [json.loads(line) for line in (made.folder / "attacks.jsonl").read_text().splitlines()]
        calls = np.concatenate([np.loadtxt(made.folder / f"{name}.calls", ndmin=2) for name in HONEST])
        found, journal = made.outcome(), made.journal()
        log = (made.folder / "server.log").read_bytes()
    quiet = _quiet(calls, rows)
    taken = [entry["taken"] for entry in journal if entry["event"] == "closed"]
    models, states = models_of(recipe, taken)
    for row in rows:
        more = {"taken": _taken(journal, row["round"]), "honest": {0, 1, 2} <= set(taken[row["round"] - 1])}
        yield _judged({**row, **more}, calls, quiet, made.ends, models)
    yield {
        "part": part,
        "attacks": len(rows),
        "attempts": sum(sum(row["got"].values()) for row in rows),
        "quiet_p95_ms": round(1000 * quiet, 2),
        "bits": digest_of(found[0]) == models[-1] and found[1] == states,  # type: ignore[arg-type]
        "rounds": len(taken),
        "rounds_with_all_honest": sum({0, 1, 2} <= set(numbers) for numbers in taken),
        "ends": made.ends,
        "server_peak_mb": peak // 1024,
        "journal_lines": len(journal),
        "control_characters_in_log": sum(byte < 32 and byte != 10 for byte in log),
        "tracebacks": log.count(b"Traceback"),
    }


def tried(part: str, seconds: float) -> list[dict[str, Any]]:
    """Go through the attacks of a part; those in which honest calls were slow, twice more.

    Other work on the machine holds up calls too. An attack that does, does it each time: the best of three counts.
    """
    *rows, summary = siege(part, seconds)
    for _ in range(2):
        slow = [row["name"] for row in rows if "quick" in row["wrong"]]
        if not slow:
            break
        *again, other = siege(part, seconds, slow)
        better = {row["name"]: row for row in again if "quick" not in row["wrong"]}
        rows = [better.get(row["name"], row) for row in rows]
        summary["again"] = summary.get("again", 0) + len(slow)
        summary["bits"] = summary["bits"] and other["bits"]
        summary["ends"] += other["ends"]
    return [*rows, summary]


def _watched(made: Besieged) -> int:
    import threading

    peak, over = [0], threading.Event()

    def look() -> None:
        while not over.wait(0.1):
            peak[0] = max(peak[0], made.peak_kb("server"))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        made.watch()
    finally:
        over.set()
        looking.join()
    return peak[0]


def _quiet(calls: Any, rows: list[dict[str, Any]]) -> float:
    """Return the 95th percentile of calls that were begun and answered while nobody attacked."""
    ends = calls[:, 0] + calls[:, 1]
    calm = np.zeros(len(calls), dtype=bool)
    for row in rows:
        calm |= (calls[:, 0] > row["began"] - QUIET) & (ends < row["began"])
    first = rows[0]["began"]
    calm |= (calls[:, 0] > first - 8 * QUIET) & (ends < first)
    return float(np.percentile(calls[calm & (calls[:, 2] > 0), 1], 95))


def _taken(journal: list[dict[str, Any]], round_: int) -> float:
    """Return after how many seconds the updates of honest devices were taken in a round, which began in an attack."""
    times = [entry["time"] for entry in journal if entry["event"] == "opened" and entry["round"] == round_]
    numbers = (0, 1, 2)
    taken = [
        entry["time"]
        for entry in journal
        if entry["event"] == "accepted" and entry["round"] == round_ and entry["number"] in numbers
    ]
    return float(max(taken) - times[-1])


def _judged(
    row: dict[str, Any], calls: Any, quiet: float, ends: list[dict[str, Any]], models: list[str]
) -> dict[str, Any]:
    ended = row["ended"] + 0.2
    during = calls[(calls[:, 0] + calls[:, 1] > row["began"]) & (calls[:, 0] < row["ended"])]
    p95 = float(np.percentile(during[:, 1], 95)) if len(during) else 0.0
    lost = [end for end in ends if row["began"] < end["time"] < ended]
    wrong = {
        said: count for said, count in row["got"].items() if said not in (*row["expected"].split("|"), "call ended")
    }
    checks = {
        "lived": not lost,
        "answered": not wrong,
        "bits": row["model"] == models[row["round"]],
        "honest": row["honest"],
        "served": bool(len(during)) and bool(during[:, 2].all()),
        "quick": p95 <= 10 * quiet,
        "taken": row["taken"] < TAKEN,
    }
    return {
        **{key: row[key] for key in ("group", "name", "expected", "got")},
        "ratio": round(p95 / quiet, 1),
        "p95_ms": round(1000 * p95, 1),
        "calls": len(during),
        "taken_s": round(row["taken"], 2),
        "wrong": [name for name, right in checks.items() if not right]
        + [f"{end['who']} ended: {end['said']}" for end in lost],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table; attacks that should come to the same, and do, have one together."""
    together: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        together.setdefault((row["group"], row["expected"], *row["wrong"]), []).append(row)
    lines = ["| | Attacks | Expected | What happened, and how often | p95 × |", "|---|---|---|---|---|"]
    for (group, expected, *wrong), same in together.items():
        got = sum((Counter(row["got"]) for row in same), Counter[str]())
        happened = ", ".join(f"{said} {count:,}" for said, count in got.most_common(6))
        happened += f"; **not right: {', '.join(wrong)}**" if wrong else ""
        names = "; ".join(row["name"] for row in same)
        slowest = max((row["ratio"] for row in same), key=lambda ratio: ratio or 0.0)
        cells = [f"{group}, {len(same)}", names, expected.replace("|", ", "), happened, str(slowest)]
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text).replace("|", "/")


def main(part: str = "all", seconds: str = "1.0") -> None:
    torch.set_num_threads(1)
    failed = 0
    for one in ("messages", "compact", "large", "cloud") if part == "all" else (part,):
        *rows, summary = siege_of_cloud(float(seconds)) if one == "cloud" else tried(one, float(seconds))
        summary["wrong"] = {row["name"]: row["wrong"] for row in rows if row["wrong"]}
        failed += len(summary["wrong"]) + (not summary["bits"])
        print(table(rows))
        print(f"\n{json.dumps(summary)}\n", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(*sys.argv[1:])
    os._exit(130)
