"""A server under load: many devices that train nothing, over TLS on loopback; updates a second, memory, processor time.

    python benchmarks/deploy_load.py --devices 200 500 1000 --size 1.1
    python benchmarks/deploy_load.py --devices 50 --size 42
    python benchmarks/deploy_load.py --devices 10000 --size 1.1 --cohort 0.01 --rounds 20 --visits

The server is a process of its own, `personafl server`. The devices share a few processes; each has its certificate and
its connection, asks for work, and at once sends an update of so many megabytes. With `--visits` they hang up after
everything and come back when they are selected, which they read in the journal, as devices do that are seldom
reached. Everything is checked, written and added up as ever. Each line is a run with as many devices. Seconds
are those from the first round's begin to the last one's end; a device's latency is the time from its first byte of an
update to the answer that it was accepted. Processor seconds are those of the server, and of all devices together, for
each gigabyte of updates: a broadcast as large goes the other way.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-c", "from personafl.cli import main; main()"]
SAMPLES = 10
HEAD = (
    *("devices", "MB", "rounds", "updates/s", "MB/s", "server s/GB", "devices s/GB"),
    *("peak MB", "own MB", "p50 ms", "p95 ms", "enrol s", "busy"),
)


def hello() -> Any:
    from personafl.deploy.net import messages

    return messages.Hello(samples=SAMPLES, input_shape=[1, 8, 8], classes=10)


def recipe_of(options: argparse.Namespace, devices: int) -> dict[str, Any]:
    # 64 h + h² + 10 h weights and 2 h + 10 biases
    width = round(math.sqrt(options.size * 1e6 / 4 + 38**2) - 38)
    return {
        "rounds": options.rounds,
        "method": {"name": "fedavg"},
        "data": {"normalize": "none"},
        "model": {"name": "mlp", "hidden": [width, width]},
        "federation": {"cohort": options.cohort},
        "engine": {"threads": 1},
        "deploy": {"input_shape": [1, 8, 8], "classes": 10, "devices": devices, "heartbeat": options.heartbeat},
    }


def prepare(folder: Path, options: argparse.Namespace, devices: int) -> None:
    """Write the recipe and an update; in a process of its own, for it takes memory."""
    from personafl.core import tree, wire
    from personafl.deploy.server.opening import open_federation, upload_like
    from personafl.recipe.recipe import Recipe

    recipe = Recipe.parse(recipe_of(options, devices))
    (folder / "recipe.toml").write_text(recipe.to_toml())
    federation = open_federation(recipe)
    upload = upload_like(federation, federation.problems[0])
    (folder / "update").write_bytes(wire.encode(tree.map(lambda leaf: (leaf + 1.0).normal_() * 1e-3, upload)))


def certify(folder: Path, devices: int) -> None:
    """Issue certificates that are not there yet."""
    from personafl.deploy import pki

    if not (folder / "ca.pem").exists():
        pki.init(folder)
        pki.issue(folder, "server")
    names = [f"device-{number}" for number in range(devices)]
    pki.issue_all(folder, [name for name in names if not (folder / f"{name}.pem").exists()])


def be_devices(numbers: range, address: str, folder: Path, certificates: Path, visits: bool, out: Connection) -> None:
    """Be some devices until the server says that all is over; report latencies and how often it was busy."""
    devices = Devices(address, folder, certificates)
    asyncio.run(devices.visit(numbers) if visits else devices.stay(numbers))
    out.send({**devices.found, "cpu": time.process_time() - devices.found["cpu"]})


class Devices:
    """Some devices, which have an update ready."""

    def __init__(self, address: str, folder: Path, certificates: Path) -> None:
        from personafl.deploy.net import messages
        from personafl.deploy.net.stream import frames

        self._address, self._journal, self._certificates = address, folder / "run" / "journal.jsonl", certificates
        update = (folder / "update").read_bytes()
        self._chunks = list(frames(messages.Said(messages.Leave(), update)))[1:]
        self._about = messages.Part(size=len(update), digest=messages.digest_of(update), offset=0)
        self._read = 0  # bytes of the journal
        self.found: dict[str, Any] = {"latency": [], "busy": 0, "cpu": 0.0}  # processor seconds before the first update

    async def stay(self, numbers: range) -> None:
        """Keep the connections from the first word to the last."""
        from personafl.deploy.net import messages

        arriving = asyncio.Semaphore(20)  # connections that begin at once

        async def device(number: int) -> None:
            line = self._line(number)
            async with arriving:
                await line.ask(hello())
            while not isinstance(await self._work(line), messages.Finished):
                pass
            await line.ask(messages.Leave())
            await line.channel.close()

        await asyncio.gather(*map(device, numbers))

    async def visit(self, numbers: range) -> None:
        """Connect, say one thing or do a round's work, and hang up; 20 at a time."""
        from personafl.deploy.net import messages

        at_once = asyncio.Semaphore(20)

        async def device(number: int, enrols: bool = False) -> None:
            async with at_once:
                line = self._line(number)
                if enrols:
                    await line.ask(hello())
                else:
                    while not isinstance(await self._work(line), messages.Task | messages.Finished):
                        pass
                await line.channel.close()

        await asyncio.gather(*(device(number, enrols=True) for number in numbers))
        working: list[asyncio.Task[None]] = []
        over = False
        while not over:
            for line in self._news():
                if line["event"] == "opened":
                    working += [asyncio.create_task(device(number)) for number in line["cohort"] if number in numbers]
            over = (self._journal.parent / "deployed.json").exists()
            await asyncio.sleep(0.05)
        await asyncio.gather(*working)

    async def _work(self, line: Line) -> Any:
        """Ask for work and do it; return what the answer was."""
        from personafl.deploy.net import messages

        said = await line.ask(messages.Pull(returning=line.returning))
        if isinstance(said, messages.Task):
            began, line.returning = time.monotonic(), True
            self.found["cpu"] = self.found["cpu"] or time.process_time()
            update = messages.Update(round=said.round, model=said.model, samples=SAMPLES)
            await line.ask(update, self._about, self._chunks)
            self.found["latency"].append(time.monotonic() - began)
        return said

    def _line(self, number: int) -> Line:
        return Line(self._address, self._certificates / f"device-{number}", self.found)

    def _news(self) -> list[dict[str, Any]]:
        """Return the lines of the server's journal that are new."""
        with self._journal.open("rb") as file:
            file.seek(self._read)
            lines = [line for line in file.read().splitlines(keepends=True) if line.endswith(b"\n")]
        self._read += sum(map(len, lines))
        return [json.loads(line) for line in lines]


class Line:
    """A device's connection, as cheap as can be: it hashes nothing, and looks at nothing but headers."""

    def __init__(self, address: str, certificate: Path, found: dict[str, Any]) -> None:
        import grpc.aio

        from personafl.deploy.net.transport import OPTIONS

        pems = [certificate.with_name("ca.pem"), Path(f"{certificate}.key"), Path(f"{certificate}.pem")]
        credentials = grpc.ssl_channel_credentials(*(path.read_bytes() for path in pems))
        self.channel, self._found = grpc.aio.secure_channel(address, credentials, options=OPTIONS), found
        self.returning = False  # it has had a broadcast

    async def ask(self, message: Any, about: Any = None, chunks: Sequence[bytes] = ()) -> Any:
        """Say something until it is heard; return the answer without its payload."""
        from grpc.aio import EOF, AioRpcError

        from personafl.deploy.net import messages

        while True:
            call = self.channel.stream_stream("/personafl.v1.Peer/Exchange")(timeout=600.0)
            try:
                for frame in (messages.header(message, about), *chunks):
                    await call.write(frame)
                await call.done_writing()
                said, _ = messages.parse(await call.read())
                while await call.read() is not EOF:
                    pass
                if not isinstance(said, messages.Refusal):
                    return said
                assert said.code == messages.Code.BUSY, said
            except (AioRpcError, asyncio.InvalidStateError):
                pass
            self._found["busy"] += 1
            await asyncio.sleep(1.0)


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(process: int, what: str) -> int:
    return int(Path(f"/proc/{process}/status").read_text().partition(f"{what}:")[2].split()[0]) // 1024


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def measure(options: argparse.Namespace, devices: int, certificates: Path) -> dict[str, Any]:
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="personafl-", dir=options.folder) as name:
        folder, address = Path(name), f"127.0.0.1:{free_port()}"
        for work, arguments in ((prepare, (folder, options, devices)), (certify, (certificates, devices))):
            child = spawn.Process(target=work, args=arguments)
            child.start()
            child.join()
            assert child.exitcode == 0
        words = ["server", f"{folder}/recipe.toml", "--identity", f"{certificates}/server.pem", "--listen", address]
        with open(folder / "server.log", "wb") as log:
            server = subprocess.Popen([*COMMAND, *words, "--out", f"{folder}/run"], stdout=log, stderr=log)
        try:
            while b"listening" not in (folder / "server.log").read_bytes():
                assert server.poll() is None, (folder / "server.log").read_text()
                time.sleep(0.1)
            began = time.time()
            pipes, children = [], []
            for place in range(options.processes):
                mine, its = spawn.Pipe(duplex=False)
                numbers = range(place, devices, options.processes)
                child = spawn.Process(
                    target=be_devices, args=(numbers, address, folder, certificates, options.visits, its)
                )
                child.start()
                pipes.append(mine)
                children.append(child)
            cpu, peak, own, enrolled = 0.0, 0, 0, 0.0
            while server.poll() is None:
                try:
                    peak, own = memory_mb(server.pid, "VmHWM"), max(own, memory_mb(server.pid, "RssAnon"))
                    if not (folder / "run" / "deployed.json").exists():  # after the last round
                        cpu = cpu_seconds(server.pid)
                    if not enrolled and (folder / "run" / "checkpoint.json").exists():
                        enrolled = cpu
                except (OSError, IndexError):
                    break
                time.sleep(0.05)
            assert server.wait() == 0, (folder / "server.log").read_text()[-2000:]
            found = [pipe.recv() for pipe in pipes]
            for child in children:
                child.join()
            if options.log:
                shutil.copy(folder / "server.log", options.log)
        finally:
            server.kill()
            for child in children:
                child.kill()
        lines = [json.loads(line) for line in (folder / "run" / "journal.jsonl").read_text().splitlines()]
        size = (folder / "update").stat().st_size / 1e6
    opened = [line["time"] for line in lines if line["event"] == "opened"]
    closed = [line for line in lines if line["event"] == "closed"]
    seconds, updates = closed[-1]["time"] - opened[0], sum(len(line["taken"]) for line in closed)
    latency = sorted(seconds for one in found for seconds in one["latency"])
    return {
        "devices": devices,
        "MB": round(size, 2),
        "rounds": len(closed),
        "updates/s": round(updates / seconds, 1),
        "MB/s": round(updates * size / seconds, 1),
        "server s/GB": round((cpu - enrolled) / (updates * size / 1000), 1),
        "devices s/GB": round(sum(one["cpu"] for one in found) / (updates * size / 1000), 1),
        "peak MB": peak,
        "own MB": own,
        "p50 ms": round(1000 * latency[len(latency) // 2]),
        "p95 ms": round(1000 * latency[len(latency) * 95 // 100]),
        "enrol s": round(opened[0] - began, 1),
        "busy": sum(one["busy"] for one in found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[200])
    parser.add_argument("--size", type=float, default=1.1, help="megabytes of an update")
    parser.add_argument("--cohort", type=float, default=1.0, help="share of the devices that a round takes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--heartbeat", type=float, default=20.0)
    parser.add_argument("--processes", type=int, default=2, help="that the devices share")
    parser.add_argument("--visits", action="store_true", help="devices hang up until they are selected")
    parser.add_argument("--certificates", type=Path, help="directory that keeps them for the next time")
    parser.add_argument("--folder", type=Path, help="where runs are kept meanwhile: on the disk that is measured")
    parser.add_argument("--log", type=Path, help="where to copy the server's log")
    options = parser.parse_args()
    print("  ".join(f"{word:>11}" for word in HEAD), flush=True)
    with tempfile.TemporaryDirectory(prefix="personafl-") as certificates:
        for devices in options.devices:
            found = measure(options, devices, options.certificates or Path(certificates))
            print("  ".join(f"{found[word]:>11}" for word in HEAD), flush=True)


if __name__ == "__main__":
    main()
