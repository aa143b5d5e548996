"""A server and its devices in one process without a network between them: quick, and stopped wherever a test wants."""

from __future__ import annotations

import weakref
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from processes import States, plain, recipe_of

from personafl.core import wire
from personafl.deploy.device.alone import Alone
from personafl.deploy.device.dealing import deal
from personafl.deploy.device.device import _DROPPED
from personafl.deploy.device.training import LocalClient
from personafl.deploy.net.identity import Identity
from personafl.deploy.net.messages import Hello, Refused, Update
from personafl.deploy.server import updates
from personafl.deploy.server.rounds import Rounds
from personafl.recipe.recipe import Recipe

FOREVER = datetime.max.replace(tzinfo=UTC)
QUICK: dict[str, Any] = {"model": {"name": "linear"}, "training": {"steps": 2, "batch": 16}}


def quick_recipe(clients: int = 2, rounds: int = 4, deploy: dict[str, Any] | None = None, **changes: Any) -> Recipe:
    """Return a recipe of a method with states that must fit the server's."""
    return recipe_of("scaffold", clients, deploy, rounds=rounds, **{**QUICK, **changes})


def identity(number: int) -> Identity:
    return Identity(f"device-{number}", "device", number, 0, FOREVER)


class Maps:
    """Counts pieces of files of updates that are memory: how many were, and the most at the same time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = self.most = 0
        self._alive: list[Any] = []
        self._map = updates._map
        monkeypatch.setattr(updates, "_map", self)

    def __call__(self, path: Path, begin: int, size: int) -> memoryview:
        found = self._map(path, begin, size)
        self._alive.append(weakref.ref(found.obj))
        self.made, self.most = self.made + 1, max(self.most, sum(one() is not None for one in self._alive))
        return found


class Offline:
    """A run in a folder: what is there is gone on with."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        dealt = folder / "dealt"
        self.recipe = Recipe.read(dealt / "recipe.toml") if dealt.exists() else deal(recipe, dealt)[0]
        self.folder, self.said = folder, list[str]()
        self.rounds = Rounds(self.recipe, folder / "run")
        try:
            self.clients = [self._client(number) for number in range(self.recipe.deploy.devices)]  # type: ignore[union-attr]
        except BaseException:
            self.rounds.__exit__()
            raise
        if not self.rounds.begun:
            self.rounds.begin()

    def __enter__(self) -> Offline:
        return self

    def __exit__(self, *_: object) -> None:
        self.rounds.__exit__()

    def _client(self, number: int) -> LocalClient:
        data = str(self.folder / "dealt" / f"device-{number}.safetensors")
        state = self.folder / "devices" / f"device-{number}"
        text = self.recipe.to_toml().encode()
        client = LocalClient.opened(text, "the recipe of a server", data, number, None, state, self.rounds.run)
        self.said += [client.state.note] if client.state.note else []
        self.rounds.enrol(identity(number), Hello(**client.hello), client.sums)
        return client

    def train(self, number: int) -> None:
        """Let a device do what it has to do, but send nothing."""
        client, state = self.clients[number], self.clients[number].state
        task = self.rounds.task(number, state.known)
        if task is not None and state.pending is None:
            if done := state.go_back(self.rounds.counted(number)):
                state.write()
                self.said.append(done)
                task = self.rounds.task(number, state.known)
                assert task is not None
            self.catch_up(number)
            client.train(*task)

    def catch_up(self, number: int) -> None:
        """Let a device train the rounds without contact that the recipe has for it."""
        alone = Alone(self.clients[number])
        for round_ in self.rounds.away.of(number):
            if (first := alone.next) is not None and first <= round_:
                alone.train(round_)

    def settle(self, number: int) -> None:
        """Let a device send what it has, and learn what becomes of it."""
        client, pending = self.clients[number], self.clients[number].state.pending
        if pending is None:
            return
        try:
            told: dict[str, Any] = {"round": pending.round, "model": pending.model, "samples": client.samples}
            update = Update(**told, alone=client.state.alone)
            self.rounds.accept(identity(number), update, pending.update)
        except Refused as refused:
            if refused.code not in _DROPPED:
                raise
            self.said.append(str(refused))
            client.state.refused()
        else:
            client.state.accepted()

    def open(self) -> None:
        if self.rounds.open is None:
            self.rounds.open_next()

    def go_on(self, done: int | None = None) -> Offline:
        """Go on until so many rounds are done, or all."""
        while self.rounds.done < (self.recipe.rounds if done is None else done):
            self.open()
            for number in range(len(self.clients)):
                self.settle(number)
                self.train(number)
                self.settle(number)
            assert self.rounds.complete
            self.rounds.close()
        return self

    def outcome(self) -> tuple[bytes, States]:
        """Return what came out: the server's state, and the devices'."""
        for number, client in enumerate(self.clients):
            self.said += filter(None, [client.state.go_back(self.rounds.counted(number))])
            self.catch_up(number)
        states = {client.number: plain(client.state.entry or {}) for client in self.clients}
        return wire.encode(self.rounds._server.state), states
