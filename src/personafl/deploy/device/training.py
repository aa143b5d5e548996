"""One device's part of a federation: its data, its state, and the rule that it runs. The simulator with one client."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from personafl.core import rng, tree, wire
from personafl.core.algorithm import Algorithm, for_returning, untrained_upload
from personafl.core.tree import Tree
from personafl.data.federated import Clients
from personafl.data.inputs import as_seen
from personafl.deploy.device.datafile import ME, OwnData, load_own
from personafl.deploy.device.limits import within_seconds
from personafl.deploy.device.policy import Guard, Policy
from personafl.deploy.device.state import DeviceState, Pending
from personafl.deploy.net.payload import check_declared, most_bytes, opened
from personafl.deploy.net.promise import Promise
from personafl.errors import BadInput, Diverged
from personafl.recipe.devices import device_names
from personafl.recipe.recipe import Recipe
from personafl.recipe.values import digests_of
from personafl.runs.learners import make_learners, make_method, use_hardware
from personafl.runs.problems import shared_network
from personafl.simulate.clientside import ClientSide
from personafl.simulate.trainer import Learners

if TYPE_CHECKING:
    from personafl.deploy.device.protecting import Samples


class DeviceSide(ClientSide):
    """One client, whose server is elsewhere: what that sent last is in `received`."""

    received: Tree  # until then an example of it, for its structure

    def broadcast(self, server: int | None = None) -> Tree:
        """Return what the server sent last."""
        return self.received

    def reached(self, clients: Clients) -> NDArray[np.bool_]:
        """Say that what the server sends is for this client, whether or not others are sent the same."""
        return np.ones(len(clients), dtype=np.bool_)


TRAINED = "local"  # what methods call the phase that their uploads come from
_READING = 30.0  # seconds after which a recipe is none that anyone would write
_DEFAULT = Policy()
_UNBOUNDED = Guard.of(_DEFAULT, Path())
# Sections of a recipe that say nothing to a device, and name methods: to check these, their code would be imported.
_UNREAD = ("compare", "sweep", "pretrain")


class LocalClient:
    """What a device does in a round, without any network."""

    def __init__(
        self,
        recipe: Recipe,
        own: OwnData,
        number: int,
        profile: str | None,
        state: DeviceState,
        guard: Guard = _UNBOUNDED,
    ) -> None:
        self.number, self.profile, self.state, self.run = number, profile, state, state.run
        self.recipe, self.guard = recipe, guard
        self.notes = [note for note in (state.note, own.note) if note]  # what is not as it should be, in a line each
        self.promise: Promise | None = None  # what the run's privacy comes to, as its server says at the end
        self.digest = ""  # of the recipe as it was sent, whatever moments of inputs it has by now
        algorithm, learners = _built(recipe, own, profile)
        self.protected: Samples | None = None
        if recipe.sample_privacy is not None:
            from personafl.deploy.device.protecting import Samples  # here, for most runs have none

            self.protected = Samples(recipe, algorithm.name, learners, state)
            learners = self.protected.learners(learners)
        self.method, self.network = algorithm.name, shared_network(recipe, algorithm, learners.data)
        self.side = DeviceSide(learners, state)
        start = learners.cast(learners.problems[0].net.init(rng.generator("shape")))
        self._example = learners.rule.expects(learners.problems[0], start)
        self.side.received = self._example
        self._declared = learners.rule.uploads
        self.side.shape(int(learners.problem_of[ME]), self._example)  # later messages may lack what it needs
        self.samples = int(learners.data.train.sizes[ME])
        self.sums = b""  # that it sends of its inputs, where the recipe does not say how they are standardised
        if recipe.data.normalize == "auto" and learners.data.moments is not None:
            from personafl.data.moments import sums_of  # here, for a device that is told its moments adds up nothing

            self.sums = wire.encode(sums_of(own.data))

    @classmethod
    def opened(
        cls,
        text: bytes,
        whose: str,
        data: str,
        number: int,
        profile: str | None,
        folder: Path,
        run: str,
        policy: Policy = _DEFAULT,
    ) -> LocalClient:
        """Return the client that a recipe, sent as text, and data of its own make in a run, if it is agreed to."""
        guard = Guard.of(policy, folder)
        values, recipe = within_seconds(_READING, lambda: _read(text, whose), f"{whose}: takes too long to read")
        digests = digests_of(values)
        policy.check_recipe(recipe, digests, whose)

        def made() -> LocalClient:
            own = load_own(data, number, recipe)
            assert recipe.deploy is not None
            state = DeviceState(folder, run, number, recipe.deploy.checkpoints)
            client = cls(recipe, own, number, profile or own.profile, state, guard)
            client.digest = digests[-1]
            client.check(whose)
            return client

        return guard.run(made, f"getting ready for {whose}")

    def check(self, whose: str) -> None:
        """Fail if the device's policy does not agree to its part in the recipe."""
        policy, who = self.guard.policy, self.side.learners
        problem = who.problems[int(who.problem_of[ME])]
        state = who.cast(who.rule.init(problem, self._example, rng.generator("shape")))
        self._upload = untrained_upload(who.rule, problem, self._example, state)  # for its structure
        self._upload_bytes = wire.size(self._upload)
        policy.check_work(self.recipe, who.rule.phases[TRAINED], self.samples, whose)
        going = {"up": self._upload_bytes, "down": wire.size(wire.dense(self._example))}
        policy.check_sent(going, bool(self.sums), who.rule.uploads_of_state, self.recipe, whose)

    @property
    def broadcast_bytes(self) -> int:
        """The most that a broadcast may have."""
        return self.guard.policy.within(most_bytes(self._example), "down")

    def check_traffic(self) -> None:
        """Fail if the device's policy agrees to no further round, for what has gone up and down before."""
        self.guard.traffic.check("up", self._upload_bytes)
        self.guard.traffic.check("down", wire.size(wire.dense(self._example)))

    @property
    def hello(self) -> dict[str, Any]:
        """What it says of itself: the fields of a `Hello`."""
        data = self.side.learners.data
        shape = list(data.x.shape[1:])
        return {"samples": self.samples, "input_shape": shape, "classes": data.classes, "profile": self.profile}

    def train(self, round_: int, model: str, broadcast: bytes) -> None:
        """Train for a round, and keep the new state and the update, which is not sent yet."""
        like = for_returning(self._example) if self.state.known else self._example
        message = self._taken(broadcast, like, f"round {round_ + 1}")
        if self.protected is not None:
            self.protected.begin(round_, self.side.learners.rule.phases, broadcast, self.state.newest)
        done = self.guard.run(lambda: self.side.train(ME, message, round_), f"training in round {round_ + 1}")
        self.side.check_finite(f"round {round_ + 1}: training", np.array([ME]), done.finite)
        update: Any = tree.take(done.uploads, 0)
        state = tree.flatten(tree.take(done.states, 0))
        if self.protected is not None:  # noise does not cover it
            update = update._replace(loss=torch.zeros_like(update.loss))
        check_declared(update, self._declared)
        kept = {path: leaf.cpu().contiguous() for path, leaf in state.items()}
        sent = wire.encode(update)
        self.guard.sends(len(sent), f"the update of round {round_ + 1}")
        self.state.commit(Pending(round_, model, sent, kept))

    def pending_upload(self) -> Tree:
        """Return the update that waits for its fate."""
        assert self.state.pending is not None
        return wire.dense(wire.decode(self.state.pending.update, wire.dense(self._upload)))

    def introduction(self) -> bytes:
        """Return what another server than it had before must know of it; nothing if it has not taken part."""
        who, which = self.side.learners, int(self.side.learners.problem_of[ME])
        if who.rule.introduce is None or not self.state.known:
            return b""
        state = tree.take(self.side.states(which, self._example, np.array([ME])), 0)
        sent = wire.encode(who.rule.introduce(who.problems[which], state))
        self.guard.sends(len(sent), "what introduces it to another server")
        return sent

    def tunes(self) -> None:
        """Note that the device's model is fine-tuned, before it is."""
        if self.protected is not None:
            last, rule = wire.encode(wire.dense(self.side.received)), self.side.learners.rule
            self.protected.begin(self.recipe.rounds, rule.tuning, last, self.state.newest)

    def receive(self, broadcast: bytes) -> None:
        """Take the last broadcast, whole: what the device's models are made from."""
        self.side.received = self._taken(broadcast, self._example, "the end")

    def _taken(self, broadcast: bytes, like: Tree, when: str) -> Tree:
        """Return a broadcast in bytes, if it is one that can be trained from."""
        self.guard.traffic.count("down", len(broadcast))
        message = opened(broadcast, like, type(like))
        if not bool(tree.finite(tree.map(lambda leaf: leaf[None], wire.dense(message)), 1)):
            raise Diverged(f"{when}: the broadcast has numbers that are not finite; the server's model has diverged")
        return message


def _read(text: bytes, whose: str) -> tuple[dict[str, Any], Recipe]:
    """Return what a recipe says, and what of it a device reads."""
    try:
        values = tomllib.loads(text.decode())
        recipe = Recipe.parse({key: part for key, part in values.items() if key not in _UNREAD}, whose)
    except ValueError as error:
        raise BadInput(f"{whose}: is no TOML ({error}); is it a personafl server?") from error
    except RecursionError as error:
        raise BadInput(f"{whose}: is nested too deeply; is it a personafl server?") from error
    if recipe.deploy is None:
        raise BadInput(f"{whose}: has no deploy section; is it a personafl server?")
    return values, recipe


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
