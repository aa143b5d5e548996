"""How long a server takes to show its metrics, while devices that train nothing send it updates over TLS.

    python benchmarks/scrape.py --devices 200

The server and the devices are those of deploy_load.py. It is asked all the time while rounds go on, and again with as
many connections that say nothing as it has room for. Milliseconds of whole requests, connection and all.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

from deploy_load import COMMAND, be_devices, certify, free_port, prepare


def asked(port: int) -> tuple[float, str]:
    began = time.perf_counter()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    return 1000 * (time.perf_counter() - began), text


def value(text: str, name: str) -> float:
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"personafl_{name} "))


def told(name: str, times: list[float]) -> None:
    times.sort()
    p50, p99 = times[len(times) // 2], times[len(times) * 99 // 100]
    print(f"{name:<28} {len(times):>6} {p50:>8.1f} {p99:>8.1f} {times[-1]:>8.1f}", flush=True)


def look(server: subprocess.Popen[bytes], port: int, rounds: int, name: str, held: int) -> None:
    """Ask until so many rounds more are done; meanwhile some others hold connections and say nothing."""
    times: list[float] = []
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(held)]
    _, text = asked(port)
    until, done = value(text, "rounds_done") + rounds, -1.0
    while done < until and server.poll() is None:
        taken, text = asked(port)
        times.append(taken)
        done = value(text, "rounds_done")
        time.sleep(0.02)
    for one in silent:
        one.close()
    told(name, times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=200)
    parser.add_argument("--size", type=float, default=1.1, help="megabytes of an update")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    options.cohort, options.heartbeat = 1.0, 20.0
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="personafl-") as name:
        folder, port, address = Path(name), free_port(), f"localhost:{free_port()}"
        certify(folder, options.devices)
        prepare(folder, options, options.devices)
        words = ["server", f"{folder}/recipe.toml", "--identity", f"{folder}/server.pem", "--listen", address]
        words += ["--out", f"{folder}/run", "--metrics", str(port)]
        with open(folder / "server.log", "wb") as log:
            server = subprocess.Popen([*COMMAND, *words], stdout=log, stderr=log)
        _, its = spawn.Pipe(duplex=False)
        numbers = range(options.devices)
        child = spawn.Process(target=be_devices, args=(numbers, address, folder, folder, False, its))
        try:
            while b"listening" not in (folder / "server.log").read_bytes():
                assert server.poll() is None, (folder / "server.log").read_text()
                time.sleep(0.1)
            print(f"{'ms of a scrape':<28} {'asked':>6} {'p50':>8} {'p99':>8} {'most':>8}")
            told("nobody there", [asked(port)[0] for _ in range(100)])
            child.start()
            while value(asked(port)[1], "devices_enrolled") < options.devices:
                time.sleep(0.1)
            look(server, port, options.rounds // 2, f"{options.devices} devices send", 0)
            look(server, port, options.rounds // 2 - 1, "and 16 say nothing", 16)
        finally:
            server.kill()
            child.kill()


if __name__ == "__main__":
    main()
