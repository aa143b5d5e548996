"""Attacks on a coordinator and its servers, by each other's and their devices' certificates."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from assault import Hostile
from updates import saved

from personafl.core import tree, wire
from personafl.deploy.net import messages
from personafl.deploy.net.messages import Message, Update
from personafl.deploy.server.agreement import Sum

DIGEST = "a" * 64


class Outsider(Hostile):
    """Somebody who has certificates, and no part in the run."""

    def __init__(self, port: int, ports: list[int], stray: str, like: Sum, pki: Path) -> None:
        self.name, self.port, self.ports, self.pki = "device-90", port, ports, pki
        self.stray, self.like = stray, like  # a device that is not the first server's; what servers hand in
        self.lines: dict[str, Any] = {}

    async def close(self) -> None:
        for line in self.lines.values():
            await line.close()

    async def at(self, port: int, message: Message, payload: bytes, who: str, **part: Any) -> str:
        """Say something to one of the processes."""
        before, self.port = self.port, port
        key = f"{who}@{port}"
        if key not in self.lines:
            self.lines[key] = self.channel(who)
        self.lines[who] = self.lines[key]
        try:
            return await self.say(message, payload, who, **part)
        finally:
            self.port = before
            del self.lines[who]


class Tried(NamedTuple):
    """An attempt; `expected` are the outcomes that are right, joined by |."""

    group: str
    name: str
    expected: str
    attempt: Callable[[Outsider], Awaitable[str]]


def attacks() -> list[Tried]:
    """Return them all."""

    def coordinator(
        who: str, message: Message, payload: bytes = b"", **part: Any
    ) -> Callable[[Outsider], Awaitable[str]]:
        return lambda outsider: outsider.at(outsider.port, message, payload, who, **part)

    def server(who: str, message: Message, payload: bytes = b"") -> Callable[[Outsider], Awaitable[str]]:
        return lambda outsider: outsider.at(outsider.ports[0], message, payload, who)

    junk = saved({"total/change/1.weight": torch.full((10, 64), 1e30)})
    update, announce = Update(round=0, model=DIGEST, samples=5), messages.Announce(round=10**6, clients=1)
    hello = messages.Hello(samples=5, input_shape=[1, 8, 8], classes=10)
    late = "DUPLICATE|WRONG_ROUND|ROUND_CLOSED"  # the server whose certificate this is was sooner
    listed = [
        ("a knock by a device, at the coordinator", "WRONG_ROLE", coordinator("device-90", messages.Knock())),
        ("a join by a device", "WRONG_ROLE", coordinator("device-90", messages.Join(weight=1, recipe=DIGEST))),
        ("an announcement by a device", "WRONG_ROLE", coordinator("device-90", announce, junk)),
        ("a status by a device, at the coordinator", "WRONG_ROLE", coordinator("device-90", messages.Status())),
        (
            "a join by a server of another cloud",
            "UNKNOWN_SERVER",
            coordinator("cloud-7", messages.Join(weight=1, recipe=DIGEST)),
        ),
        ("a join with another recipe", "OTHER_RECIPE", coordinator("cloud-1", messages.Join(weight=1, recipe=DIGEST))),
        ("an announcement of a later round", "WRONG_ROUND|ROUND_CLOSED", coordinator("cloud-1", announce, junk)),
        (
            "an announcement without a payload",
            "WRONG_ROUND|BAD_NAMES|ROUND_CLOSED|BAD_PAYLOAD|DUPLICATE",
            coordinator("cloud-1", messages.Announce(round=0, clients=1)),
        ),
        ("an announcement of terabytes", "TOO_LARGE", coordinator("cloud-1", announce, junk, size=2**50)),
        ("an update, at the coordinator", "UNKNOWN_KIND|TOO_LARGE", coordinator("cloud-1", update)),
        ("a hello by a cloud server, at the coordinator", "UNKNOWN_KIND", coordinator("cloud-1", hello)),
        (
            "what follows a round that never was",
            "wait|proceed|finished",
            coordinator("cloud-1", messages.Await(round=10**9)),
        ),
        ("a knock by the coordinator, at a server", "WRONG_ROLE", server("coordinator", messages.Knock())),
        ("a knock by another server, at a server", "WRONG_ROLE", server("cloud-1", messages.Knock())),
        ("an update by another server", "WRONG_ROLE", server("cloud-1", update, junk)),
        ("a hello of a device that is no server's", "WRONG_SERVER", server("device-90", hello)),
        ("an update of a device that is no server's", "NOT_ENROLLED|BUSY", server("device-90", update, junk)),
        ("an announcement, at a server", "UNKNOWN_KIND|TOO_LARGE|NOT_ENROLLED", server("device-90", announce)),
        ("a hello of a device of another server", "WRONG_SERVER", lambda o: o.at(o.ports[0], hello, b"", o.stray)),
        ("a sum of 1e30", f"NORM_TOO_LARGE|{late}", _handed(1e30)),
        ("a sum of 1e300", f"NORM_TOO_LARGE|{late}", _handed(1e300)),
        ("a sum of infinities", f"NOT_FINITE|{late}", _handed(float("inf"))),
    ]
    return [Tried("cloud", *one) for one in listed]


def _handed(value: float) -> Callable[[Outsider], Awaitable[str]]:
    """Hand in, as a server of the cloud, a sum with such numbers for the round that it is in."""

    async def attempt(outsider: Outsider) -> str:
        line = outsider.honest("coordinator")
        report = json.loads((await line.ask(messages.Status())).payload)
        await line.close()
        total = tree.map(lambda leaf: torch.full_like(leaf, value), outsider.like.total)
        payload = wire.encode(Sum(total, torch.tensor(100.0, dtype=torch.float64)))
        announce = messages.Announce(round=report["servers"][1]["version"], clients=2)
        return await outsider.at(outsider.port, announce, payload, "cloud-1")

    return attempt
