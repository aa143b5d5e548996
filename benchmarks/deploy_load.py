"""A server under load: many devices that train nothing, over TLS on loopback; updates a second, memory, processor time.

    python benchmarks/deploy_load.py --devices 200 500 1000 --size 1.1
    python benchmarks/deploy_load.py --devices 50 --size 42
    python benchmarks/deploy_load.py --devices 10000 --size 1.1 --cohort 0.01 --rounds 5

The server is a process of its own, `personafl server`. The devices share a few processes; each has its certificate and
its connection, asks for work, and at once sends an update of so many megabytes. Everything is checked, written and
added up as ever. Each line is a run with as many devices. Seconds are those from the first round's begin to the last
one's end; a device's latency is the time from its first byte of an update to the answer that it was accepted.
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
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-c", "from personafl.cli import main; main()"]
SAMPLES = 10
HEAD = ("devices", "MB", "rounds", "updates/s", "MB/s", "server s/GB", "peak MB", "p50 ms", "p95 ms", "enrol s", "busy")


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
    for number in range(devices):
        if not (folder / f"device-{number}.pem").exists():
            pki.issue(folder, f"device-{number}")


def be_devices(numbers: range, address: str, folder: Path, certificates: Path, out: Any) -> None:
    """Be some devices until the server says that all is over; report latencies and how often it was busy."""
    out.send(asyncio.run(_devices(numbers, address, folder, certificates)))


async def _devices(numbers: range, address: str, folder: Path, certificates: Path) -> dict[str, Any]:
    from personafl.deploy.net import messages
    from personafl.deploy.net.identity import Files
    from personafl.deploy.net.transport import Channel

    update = (folder / "update").read_bytes()
    found: dict[str, Any] = {"latency": [], "busy": 0}
    arriving = asyncio.Semaphore(20)  # connections that begin at once

    def retried(text: str) -> None:
        found["busy"] += 1

    async def device(number: int) -> None:
        files = Files.beside(certificates / f"device-{number}.pem")
        line = Channel(address, files, lambda kind: 2**28, retried)
        async with arriving:
            await line.ask(messages.Hello(samples=SAMPLES, input_shape=[1, 8, 8], classes=10))
        returning = False
        while True:
            said, _ = await line.ask(messages.Pull(returning=returning))
            if isinstance(said, messages.Finished):
                break
            if not isinstance(said, messages.Task):
                continue
            began, returning = time.monotonic(), True
            await line.ask(messages.Update(round=said.round, model=said.model, samples=SAMPLES), update, timeout=600.0)
            found["latency"].append(time.monotonic() - began)
        await line.ask(messages.Leave())
        await line.close()

    await asyncio.gather(*map(device, numbers))
    return found


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_mb(process: int) -> int:
    return int(Path(f"/proc/{process}/status").read_text().partition("VmHWM:")[2].split()[0]) // 1024


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def measure(options: argparse.Namespace, devices: int, certificates: Path) -> dict[str, Any]:
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="personafl-", dir=options.folder) as name:
        folder, address = Path(name), f"localhost:{free_port()}"
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
                child = spawn.Process(target=be_devices, args=(numbers, address, folder, certificates, its))
                child.start()
                pipes.append(mine)
                children.append(child)
            cpu, peak, enrolled = 0.0, 0, 0.0
            while server.poll() is None:
                try:
                    cpu, peak = cpu_seconds(server.pid), peak_mb(server.pid)
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
        "peak MB": peak,
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
