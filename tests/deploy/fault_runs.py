"""Runs that are gone through to some moment, and that go on from what is then on the disk.

Until the moment, servers and devices are called one after another, without a network. From there on they are the real
ones, all in one process but over real sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processes import plain

from personafl.deploy import pki
from personafl.deploy.device.state import DeviceState
from personafl.deploy.device.training import LocalClient
from personafl.deploy.net.identity import Identity, Revocations, identify
from personafl.deploy.net.messages import Code, Hello, Join, Refused, Update
from personafl.deploy.server.coordination import Coordination
from personafl.deploy.server.rounds import Rounds
from personafl.errors import BadInput
from personafl.storage.rundir import RunDirectory

TOO_LATE = {Code.ROUND_CLOSED, Code.WRONG_ROUND, Code.WRONG_MODEL, Code.NOT_SELECTED, Code.DUPLICATE}
PATIENCE = 30.0  # seconds in which nobody says anything, after which they hang


class Stop(BaseException):
    """A run is where a snapshot is taken."""


def read_recipe(folder: Path) -> Any:
    from personafl.cli.options import parsed
    from personafl.recipe.recipe import Recipe

    read: Any = parsed([str(folder / "dealt" / "recipe.toml")])
    return read if isinstance(read, Recipe) else Recipe.parse(read)


@dataclass
class Device:
    """A device without a network."""

    client: LocalClient
    identity: Identity

    @classmethod
    def opened(cls, folder: Path, number: int, text: bytes, run: str) -> Device:
        name = f"device-{number}"
        data, state = folder / "dealt" / f"{name}.safetensors", folder / "devices" / name
        client = LocalClient.opened(text, "the recipe of a server", str(data), number, None, state, run)
        return cls(client, identify((folder / "pki" / f"{name}.pem").read_bytes()))

    def hello(self) -> Hello:
        return Hello(**self.client.hello)

    def turn(self, rounds: Rounds, at: Callable[[str], None]) -> None:
        """Settle what is pending, and train if there is a round."""
        self.settle(rounds, at)
        task = rounds.task(self.client.number, self.client.state.known)
        if task is not None:
            self.client.train(*task)
            at(f"trained {self.client.number}")
            self.settle(rounds, at)

    def settle(self, rounds: Rounds, at: Callable[[str], None]) -> None:
        pending = self.client.state.pending
        if pending is None:
            return
        update = Update(round=pending.round, model=pending.model, samples=self.client.samples)
        try:
            rounds.accept(self.identity, update, pending.update)
        except Refused as refused:
            if refused.code not in TOO_LATE:
                raise BadInput(f"refused this device: {refused}") from refused
            self.client.state.refused()
            return
        at(f"accepted {self.client.number}")
        self.client.state.accepted()


def walk(folder: Path, at: Callable[[str], None] = lambda _: None) -> None:
    """Go through a run without a network, until `at` stops it."""
    recipe = read_recipe(folder)
    with Rounds(recipe, folder / "run") as rounds:
        text = rounds.served.to_toml().encode()
        devices = [Device.opened(folder, number, text, rounds.run) for number in range(3)]
        for device in devices:
            rounds.enrol(device.identity, device.hello())
        if not rounds.begun:
            rounds.begin()
        while not rounds.finished:
            if rounds.open is None:
                rounds.open_next()
            at(f"opened {rounds.done}")
            for device in devices:
                device.turn(rounds, lambda what: at(f"{what} in {rounds.done}"))
            assert rounds.complete
            rounds.close()
            at(f"closed {rounds.done}")
        for device in devices:
            device.settle(rounds, at)
        rounds.final()


def walk_cloud(folder: Path, at: Callable[[str], None] = lambda _: None) -> None:
    """Do the same with a coordinator, two servers and two devices each."""
    from personafl.deploy.server.cloudserver import CloudRounds

    recipe = read_recipe(folder)
    with contextlib.ExitStack() as stack:
        all_ = stack.enter_context(Coordination(recipe, folder / "coordinator"))
        servers = [stack.enter_context(CloudRounds(recipe, folder / f"cloud-{place}", place)) for place in range(2)]
        text = servers[0].served.to_toml().encode()
        homes = [[int(name) for name in names] for names in recipe.cloud.members]
        devices = [[Device.opened(folder, n, text, s.run) for n in own] for s, own in zip(servers, homes, strict=True)]
        for place, server in enumerate(servers):
            for device in devices[place]:
                server.enrol(device.identity, device.hello())
            all_.join(place, Join(weight=server.weight, recipe=server.fingerprint))
        for place, server in enumerate(servers):
            if not server.begun:
                server.begin(all_.following(place, None).payload or None)
        while not all(server.finished for server in servers):
            for place, server in enumerate(servers):
                if server.finished:
                    continue
                if server.open is None:
                    server.open_next()
                for device in devices[place]:
                    device.turn(server, lambda what: at(f"{what} in {server.done}"))  # noqa: B023 - used at once
                assert server.complete
                announce, payload = server.seal()
                at(f"sealed {place} in {server.done}")
                with contextlib.suppress(Refused):
                    all_.announce(place, announce, payload)  # type: ignore[arg-type]
                at(f"announced {place} in {server.done}")
            moved = 0
            for place, server in enumerate(servers):
                if server.open is not None and all_.follows(place, server.open.number):
                    server.proceed(all_.following(place, server.open.number))
                    moved += 1
                    at(f"proceeded {place} to {server.done}")
            assert moved, "nobody is told what follows"
        for place, server in enumerate(servers):
            for device in devices[place]:
                device.settle(server, at)


def go_on(folder: Path) -> Any:
    """Serve a run to its end, from wherever its files are; return the server's state and the devices'."""
    asyncio.run(_together(folder, ["server"], range(3)))
    return _state(folder / "run"), {number: _kept(folder, "run", number) for number in range(3)}


def cloud_on(folder: Path) -> Any:
    """Do the same with a coordinator, two servers and two devices each."""
    asyncio.run(_together(folder, ["coordinator", "cloud-0", "cloud-1"], range(4)))
    homes = read_recipe(folder).cloud.members
    kept = {int(n): _kept(folder, f"cloud-{place}", int(n)) for place, names in enumerate(homes) for n in names}
    return [_state(folder / f"cloud-{place}") for place in range(2)], kept


def _state(run: Path) -> bytes:
    directory = RunDirectory(run)
    return directory.server_bytes(directory.checkpoint())


def _kept(folder: Path, run: str, number: int) -> dict[str, bytes]:
    name = json.loads((folder / run / "journal.jsonl").read_text().partition("\n")[0])["run"]
    state = DeviceState(folder / "devices" / f"device-{number}", name, number)
    assert state.pending is None
    return plain(state.entry or {})


async def _together(folder: Path, servers: list[str], numbers: range) -> None:
    """Run servers and their devices, each as its command does, until all are done or one fails."""
    from personafl.deploy.device.device import DeviceConfig, run_device
    from personafl.deploy.server.cloudserver import CloudServerConfig, run_cloud_server
    from personafl.deploy.server.coordinator import run_coordinator
    from personafl.deploy.server.server import ServerConfig, run_server
    from personafl.deploy.server.service import ServiceConfig

    recipe, ports, heard_last = read_recipe(folder), dict[str, int](), [time.monotonic()]

    def files(name: str) -> pki.Files:
        return pki.Files.beside(folder / "pki" / f"{name}.pem")

    def heard(name: str) -> Callable[[Any], None]:
        def hear(event: Any) -> None:
            print(f"{name}: {event}")
            heard_last[0] = time.monotonic()
            if str(event).startswith("listening"):
                ports[name] = int(str(event).split()[2].strip(","))

        return hear

    async def serve(name: str) -> None:
        given: dict[str, Any] = {
            "recipe": recipe,
            "out": folder / ("run" if name == "server" else name),
            "files": files(name),
            "revocations": folder / "pki" / "revoked.pem",
            "listen": "localhost:0",
        }
        if name == "server":
            await run_server(ServerConfig(**given), heard(name))
        elif name == "coordinator":
            await run_coordinator(ServiceConfig(**given), heard(name))
        else:
            where = f"localhost:{await port_of('coordinator')}"
            await run_cloud_server(CloudServerConfig(**given, coordinator=where), heard(name))

    async def port_of(name: str) -> int:
        while name not in ports:
            await asyncio.sleep(0.005)
        return ports[name]

    async def take_part(number: int) -> None:
        name, home = f"device-{number}", "server"
        if recipe.cloud is not None:
            home = next(f"cloud-{place}" for place, own in enumerate(recipe.cloud.members) if str(number) in own)
        config = DeviceConfig(
            server=f"localhost:{await port_of(home)}",
            data=str(folder / "dealt" / f"{name}.safetensors"),
            state=folder / "devices" / name,
            files=files(name),
        )
        await run_device(config, heard(name))

    tasks = [*map(asyncio.create_task, map(serve, servers)), *map(asyncio.create_task, map(take_part, numbers))]
    left = set(tasks)
    while left and time.monotonic() < heard_last[0] + PATIENCE:
        done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION, timeout=1.0)
        if any(task.exception() for task in done):
            break
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    for task in done:
        task.result()
    if left:
        raise TimeoutError


def predicted(folder: Path) -> Any:
    """Use the model that a device keeps."""
    from personafl.deploy.device.serving import predict

    found = predict(folder / "devices" / "device-0", str(folder / "dealt" / "device-0.safetensors"))
    return json.dumps(found.__dict__, default=lambda value: value.tolist() if hasattr(value, "tolist") else str(value))


def shaken(folder: Path) -> Any:
    """Go on with the certificates that are there, issue one more and revoke it."""
    found = go_on(folder)
    made = pki.issue(folder / "pki", "device-9")
    number = identify(made.certificate.read_bytes()).number
    pki.revoke(folder / "pki", "device-9")
    revoked = Revocations(folder / "pki" / "revoked.pem", folder / "pki" / "ca.pem")
    try:
        revoked.check(identify(made.certificate.read_bytes()))
    except Refused as refused:
        return found, number, str(refused.code)
    return found, number, "not revoked"


def resumed(folder: Path) -> Any:
    """Continue a simulated run as a user would, and return all that it leaves."""
    import crash_driver
    from personafl import api

    api.resume(folder / "run")
    found = crash_driver.outcome(folder / "run")
    return {key: value for key, value in found.items() if key != "files"}


def shown(folder: Path) -> Any:
    """Return what a user gets of a finished run: its results, its history, and models of clients."""
    from personafl import api

    result: Any = api.load(folder / "run")
    models = {
        client: [leaf.detach().numpy().tobytes() for leaf in result.model(client).state_dict().values()]
        for client in ("0", "1", "2")
    }
    rows = [{key: value for key, value in row.items() if key != "seconds"} for row in result.rows]
    return json.dumps(rows, default=str), result.history().drop(columns="seconds", errors="ignore").to_csv(), models
