"""Many devices enrol at one server, a real process, while those that are in pull: all get in, and it goes on.

    python tests/deploy/enrolling.py [DEVICES [PROCESSES]]

Devices are light: they speak the protocol over TLS, each with a certificate and a connection of its own, and train
nothing. Prints one JSON line.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

from processes import KILLED, SMALL, Cluster, cluster, recipe_of

from personafl.deploy import pki


async def _light(made: Cluster, name: str) -> None:
    """Enrol, ask for work until there is some, and leave."""
    from personafl.deploy.net.messages import Hello, Knock, Leave, Pull, Task
    from personafl.deploy.net.transport import Channel

    line = Channel(f"localhost:{made.port}", made.files_of(name), lambda kind: 2**20)
    await line.ask(Knock())
    await line.ask(Hello(samples=50, input_shape=[1, 8, 8], classes=10))
    while not isinstance((await line.ask(Pull(returning=False))).message, Task):
        pass
    print("has work", flush=True)
    await line.ask(Leave())
    await line.close()


class Crowd(Cluster):
    """A server, and light devices."""

    async def role(self, name: str, tell: Any) -> None:
        if name == "server":
            await super().role(name, tell)
        else:
            await asyncio.gather(*(_light(self, one) for one in name.split(",")))


def enrolling(devices: int = 1000, processes: int = 4) -> dict[str, Any]:
    """Let devices enrol all at once; the first round begins when the last of them is in."""
    section = {"devices": devices, "heartbeat": 2.0}
    changes = KILLED | {"data": SMALL["data"] | {"normalize": "none"}, "federation": {"cohort": 1.0}}
    recipe = recipe_of("fedavg", 3, section, **changes)
    names = [f"device-{number}" for number in range(devices)]
    with cluster(recipe, Crowd) as made:
        for name in names[3:]:
            pki.issue(made.folder / "pki", name)
        made.start("server")
        while "listening" not in made.log("server"):
            made.reap()
            assert not made.codes, made.log("server")
            time.sleep(0.02)
        began = time.monotonic()
        for place in range(processes):
            made.start(",".join(names[place::processes]))
        peak = 0
        while len(made.living) > ("server" in made.living):
            made.reap()
            peak = max(peak, made.peak_kb("server"))
            time.sleep(0.05)
        seconds = time.monotonic() - began
        alive = "server" in made.living
        journal = made.journal()
        log = "".join(path.read_text() for path in made.folder.glob("*.log"))
        return {
            "devices": devices,
            "processes": processes,
            "enrolled": sum(entry["event"] == "enrolled" for entry in journal),
            "with_work": log.count("has work"),
            "left": sum(entry["event"] == "left" for entry in journal),
            "server_goes_on": alive,
            "ended_badly": {name.partition(",")[0]: code for name, code in made.codes.items() if code},
            "tracebacks": log.count("Traceback"),
            "refused": sum(entry["event"] == "refused" for entry in journal),
            "server_peak_mb": peak // 1024,
            "seconds": round(seconds, 1),
        }


if __name__ == "__main__":
    result = enrolling(*map(int, sys.argv[1:]))
    print(json.dumps(result), flush=True)
    os._exit(0)
