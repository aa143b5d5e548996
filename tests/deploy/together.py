"""A coordinator, its servers and their devices in one process without a network: quick, and stopped wherever wanted."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import TracebackType
from typing import Any

from clouds import CloudCluster
from offline import identity

from personafl.deploy.device.training import LocalClient
from personafl.deploy.net.messages import Announce, Hello, Join, Update
from personafl.deploy.server.cloudserver import CloudRounds
from personafl.deploy.server.coordination import Coordination
from personafl.recipe.recipe import Recipe


class Together(CloudCluster):
    """A cloud in a folder. It keeps to the order of its servers, so that all are mixed when the last has announced."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        super().__init__(recipe, folder)
        self.open = contextlib.ExitStack()
        self.coordination = self.open.enter_context(Coordination(self.recipe, folder / "coordinator"))
        self.cloud = [
            self.open.enter_context(CloudRounds(self.recipe, folder / name, place))
            for place, name in enumerate(self.servers)
        ]
        self.clients: dict[int, LocalClient] = {}
        self.homes: dict[int, int] = {}
        for place, own in enumerate(self.members):
            for number in own:
                self.enrol(place, number)
        for place, rounds in enumerate(self.cloud):
            self.coordination.join(place, Join(weight=rounds.weight, recipe=rounds.fingerprint, run=rounds.run))
        for place, rounds in enumerate(self.cloud):
            rounds.begin(self.coordination.following(place, None).payload or None)

    def __enter__(self) -> Together:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.open.close()

    def enrol(self, place: int, number: int) -> None:
        """Let a device say hello to a server."""
        self.homes[number] = place
        data = str(self.folder / "dealt" / f"device-{number}.safetensors")
        rounds, state = self.cloud[place], self.folder / "devices" / f"device-{number}"
        text = rounds.served.to_toml().encode()
        welcome = rounds.welcome(identity(number))
        moved, given = welcome.moved, ("the recipe", data, number, None, state, welcome.run)
        client = self.clients[number] = LocalClient.opened(text, *given)
        introduction = b""
        if moved is not None:
            client.state.move(moved.counted, had=moved.had, home=welcome.home or welcome.run)
            client.state.write()
            introduction = client.introduction() if moved.introduce else b""
        rounds.enrol(identity(number), Hello(**client.hello), introduction)

    def drop(self, place: int, to: int | None = None) -> None:
        """Go on without a server: its devices go where the coordinator says."""
        self.coordination.drop(place, to)
        for other in self.live:
            self.cloud[other].adopt(self.coordination.moves.of(other))
        for number in [number for number, home in self.homes.items() if home == place]:
            home = next(other for other in self.live if f"device-{number}" in self.cloud[other].adopted)
            self.enrol(home, number)

    @property
    def live(self) -> list[int]:
        return [place for place in range(len(self.cloud)) if place not in self.coordination.moves.out]

    def collect(self, place: int) -> None:
        """Let the devices of a server do their part of its round."""
        rounds = self.cloud[place]
        if rounds.open is None:
            rounds.open_next()
        for number in sorted(rounds.members):
            client = self.clients[number]
            if rounds.wants(number):
                task: Any = rounds.task(number, client.state.known)
                client.train(*task)
                pending = client.state.pending
                assert pending is not None
                told: dict[str, Any] = {"round": pending.round, "model": pending.model, "samples": client.samples}
                rounds.accept(identity(number), Update(**told, alone=client.state.alone), pending.update)
                client.state.accepted()

    def hand_in(self, place: int) -> None:
        """Let a server announce its round."""
        announce, payload = self.cloud[place].seal()
        assert isinstance(announce, Announce)
        self.coordination.announce(place, announce, payload)

    def proceed(self, place: int) -> bool:
        """Let a server go on, if it may."""
        rounds = self.cloud[place]
        if rounds.open is None or not self.coordination.follows(place, rounds.open.number):
            return False
        rounds.proceed(self.coordination.following(place, rounds.open.number))
        return True

    def go_on(self, done: int | None = None) -> None:
        """Go on until so many mixes are done, or all."""
        while self.coordination.done < (self.recipe.rounds if done is None else done):
            for place in self.live:
                self.collect(place)
                if not (self.coordination.is_waiting(place) or self.coordination.finished):
                    self.hand_in(place)
            for place in self.live:
                self.proceed(place)
