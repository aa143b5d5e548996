"""One device's part of a federation: its data, its state, and the rule that it runs. The simulator with one client."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np

from personafl.core import rng, tree, wire
from personafl.core.algorithm import Algorithm, for_returning
from personafl.core.tree import Tree
from personafl.data.inputs import as_seen
from personafl.deploy.device.datafile import ME, OwnData, load_own
from personafl.deploy.device.state import DeviceState, Pending
from personafl.deploy.net.payload import check_declared, most_bytes, opened
from personafl.errors import BadInput
from personafl.recipe.devices import device_names
from personafl.recipe.recipe import Recipe
from personafl.runs.learners import make_learners, make_method, use_hardware
from personafl.runs.problems import shared_network
from personafl.simulate.clientside import ClientSide
from personafl.simulate.trainer import Learners


class DeviceSide(ClientSide):
    """One client, whose server is elsewhere: what that sent last is in `received`."""

    received: Tree | None = None

    def broadcast(self, server: int | None = None) -> Tree:
        """Return what the server sent last."""
        assert self.received is not None
        return self.received


# Sections of a recipe that say nothing to a device, and name methods: to check these, their code would be imported.
_UNREAD = ("compare", "sweep", "pretrain")


class LocalClient:
    """What a device does in a round, without any network."""

    def __init__(self, recipe: Recipe, own: OwnData, number: int, profile: str | None, state: DeviceState) -> None:
        self.number, self.profile, self.state, self.run = number, profile, state, state.run
        self.recipe = recipe
        algorithm, learners = _built(recipe, own, profile)
        self.method, self.network = algorithm.name, shared_network(recipe, algorithm, learners.data)
        self.side = DeviceSide(learners, state)
        start = learners.cast(learners.problems[0].net.init(rng.generator("shape")))
        self._example = learners.rule.expects(learners.problems[0], start)
        self._declared = learners.rule.uploads
        self.side.shape(int(learners.problem_of[ME]), self._example)  # later messages may lack what it needs
        self.samples = int(learners.data.train.sizes[ME])
        self.sums = b""  # that it sends of its inputs, where the recipe does not say how they are standardised
        if recipe.data.normalize == "auto" and learners.data.moments is not None:
            from personafl.data.moments import sums_of  # here, for a device that is told its moments adds up nothing

            self.sums = wire.encode(sums_of(own.data))

    @classmethod
    def opened(
        cls, text: bytes, whose: str, data: str, number: int, profile: str | None, folder: Path, run: str
    ) -> LocalClient:
        """Return the client that a recipe, sent as text, and data of its own make in a run."""
        try:
            values = tomllib.loads(text.decode())
        except ValueError as error:
            raise BadInput(f"{whose}: is no TOML ({error}); is it a personafl server?") from error
        recipe = Recipe.parse({key: part for key, part in values.items() if key not in _UNREAD}, whose)
        if recipe.deploy is None:
            raise BadInput(f"{whose}: has no [deploy]; is it a personafl server?")
        own = load_own(data, number, recipe)
        return cls(
            recipe, own, number, profile or own.profile, DeviceState(folder, run, number, recipe.deploy.checkpoints)
        )

    @property
    def broadcast_bytes(self) -> int:
        """The most that a broadcast may have."""
        return most_bytes(self._example)

    @property
    def hello(self) -> dict[str, Any]:
        """What it says of itself: the fields of a `Hello`."""
        data = self.side.learners.data
        shape = list(data.x.shape[1:])
        return {"samples": self.samples, "input_shape": shape, "classes": data.classes, "profile": self.profile}

    def train(self, round_: int, model: str, broadcast: bytes) -> None:
        """Train for a round, and keep the new state and the update, which is not sent yet."""
        like = for_returning(self._example) if self.state.known else self._example
        message = opened(broadcast, like, type(like))
        done = self.side.train(ME, message, round_)
        update, state = tree.take(done.uploads, 0), tree.flatten(tree.take(done.states, 0))
        check_declared(update, self._declared)
        kept = {path: leaf.cpu().contiguous() for path, leaf in state.items()}
        self.state.commit(Pending(round_, model, wire.encode(update), kept))

    def receive(self, broadcast: bytes) -> None:
        """Take the last broadcast, whole: what the device's models are made from."""
        self.side.received = opened(broadcast, self._example, type(self._example))


def _built(recipe: Recipe, own: OwnData, profile: str | None) -> tuple[Algorithm, Learners]:
    """Build a server's recipe for one device: clients one by one, and only with code that is installed here."""
    recipe.check_installed()
    names = device_names(recipe.devices)
    kinds = np.zeros(own.data.clients, dtype=np.int64)
    if names:
        if profile not in names:
            raise BadInput(f"--profile {profile}: the server's recipe has {', '.join(names)}")
        kinds[ME] = names.index(profile)
    engine = recipe.engine.model_copy(update={"strategy": "sequential", "device": "cpu"})
    recipe, algorithm = recipe.model_copy(update={"engine": engine}), make_method(recipe)
    where, dtype = use_hardware(engine)
    data = as_seen(own.data, recipe.data, dtype)
    return algorithm, make_learners(recipe, algorithm, data, kinds, where, dtype)
