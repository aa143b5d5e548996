"""The server's rounds: who is enrolled, who is selected, what was taken; in a directory that survives a crash.

    recipe.toml                      what is run
    journal.jsonl                    what happened; see `journal`
    checkpoint.json, server-N.safetensors   the server's state after N rounds; see `storage.rundir`
    updates/ROUND-NUMBER.safetensors        the updates that were taken in the round that is open

An update is durable before its device hears that it was accepted. A round is closed by its checkpoint; until then a
server that starts again takes up the round where it was. Nothing here waits: `server` has the clock.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from personafl.algorithms.uplink import untrained_upload
from personafl.core import rng, tree, wire
from personafl.core.algorithm import Problem, Reduced, for_returning, upload_type
from personafl.core.tree import Tree
from personafl.data.federated import FederatedData, blank
from personafl.deploy.net.codes import Code, Refused
from personafl.deploy.net.identity import Identity
from personafl.deploy.net.messages import Hello, Update, digest_of
from personafl.deploy.net.payload import most_bytes, opened_update
from personafl.errors import BadInput
from personafl.recipe.deploy import DeploySection
from personafl.recipe.devices import device_names
from personafl.recipe.recipe import Recipe
from personafl.runs.build import prepare
from personafl.runs.problems import START_FILE
from personafl.simulate.cohort import draw_cohort
from personafl.simulate.federation import Federation
from personafl.simulate.simulator import Simulation
from personafl.storage.files import atomic_write, storage, write_json
from personafl.storage.journal import Journal, Journaled
from personafl.storage.rundir import Checkpoint, RunDirectory
from personafl.storage.store import Store

Clients = NDArray[np.int64]


@dataclass(frozen=True)
class Member:
    """An enrolled device."""

    number: int
    name: str
    samples: int
    profile: int  # of the recipe's devices
    left: bool = False


@dataclass(frozen=True)
class Closed:
    """What a round did."""

    number: int
    taken: tuple[int, ...]
    selected: int
    loss: float | None


@dataclass
class _Open:
    """The round that is going on."""

    number: int
    cohort: tuple[int, ...]
    wanted: int  # updates that close it before its deadline
    model: str  # digest of the broadcast
    whole: bytes  # the broadcast for newcomers
    again: bytes  # and for those that have a state
    taken: dict[int, str] = field(default_factory=dict)  # number -> digest of its update
    sealed: bool = False  # nothing more is taken


def deployable(recipe: Recipe) -> DeploySection:
    """Return the recipe's `[deploy]`; fail if it asks for what only the simulator does."""
    if recipe.deploy is None:
        raise BadInput("deploy: missing; say what the data look like: deploy.input_shape=[1,8,8] deploy.classes=10")
    if recipe.cloud is not None:
        raise BadInput("cloud: its servers have a coordinator; say where it is: --coordinator HOST:PORT")
    for key, given in (("buffer", recipe.buffer), ("pretrain", recipe.pretrain.rounds)):
        if given:
            raise BadInput(f"{key}: a server and its devices do not have it; remove it, or use personafl run")
    if recipe.federation.offline:
        raise BadInput("federation.offline: devices are in contact with their server; remove it, or use personafl run")
    if recipe.data.normalize == "channel":
        raise BadInput(
            "data.normalize: a server has no data to take moments from; give them, data.normalize.mean=[…] "
            "data.normalize.std=[…], or have personafl data deal write the recipe, which does"
        )
    return recipe.deploy


class Rounds(Journaled):
    """A run on the server's side."""

    def __init__(self, recipe: Recipe, path: Path) -> None:
        self.section = deployable(recipe)
        self.recipe = recipe
        self.members: dict[int, Member] = {}
        self.done = 0  # rounds
        self.last: Closed | None = None
        self.open: _Open | None = None
        self.run = ""
        self._latest: dict[int, tuple[int, str]] = {}  # number -> round and digest of the update that was last accepted
        self._simulation: _Served | None = None
        self._base = open_federation(recipe, {0: 1})
        self._declared = upload_type(self._base.algorithm.client)
        self._likes = [upload_like(self._base, problem) for problem in self._base.problems]  # by profile
        self.payload_bytes = max(map(most_bytes, self._likes))  # of an update, at most
        self._final: bytes | None = None
        super().__init__(open_directory(recipe, path))
        self._replay()

    @property
    def begun(self) -> bool:
        """Whether there is a server state."""
        return self._simulation is not None

    @property
    def finished(self) -> bool:
        """Whether all rounds are done."""
        return self.begun and self.done >= self.recipe.rounds

    # Enrolment

    def enrol(self, identity: Identity, hello: Hello) -> None:
        """Take a device in, or note that it is back."""
        number = identity.number
        assert number is not None
        section, names = self.section, device_names(self.recipe.devices)
        if (tuple(hello.input_shape), hello.classes) != (section.input_shape, section.classes):
            text = f"the recipe is for inputs {list(section.input_shape)} and {section.classes} classes"
            raise Refused(Code.OTHER_DATA, text)
        if not 1 <= hello.samples <= section.max_samples:
            raise Refused(Code.BAD_SAMPLES, f"a device has 1 to {section.max_samples} training samples")
        if names and hello.profile not in names:
            raise Refused(Code.BAD_PROFILE, f"say which kind of device it is: --profile {' or '.join(names)}")
        profile = names.index(hello.profile) if names and hello.profile else 0
        member = Member(number, identity.name, hello.samples, profile)
        known = self.members.get(number)
        if known is not None and known.name != identity.name:
            raise Refused(Code.NUMBER_TAKEN, f"number {number} is {known.name}'s")
        if known is not None and (known.samples, known.profile) != (member.samples, member.profile):
            raise Refused(Code.OTHER_DATA, f"{known.name} enrolled with {known.samples} samples and another profile")
        if known is None or known.left:
            self.journal.write("enrolled", **dataclasses.asdict(member))
            self.members[number] = member
            self._refresh()

    def leave(self, number: int) -> None:
        """Stop selecting a device."""
        if number in self.members and not self.members[number].left:
            self.journal.write("left", number=number)
            self.members[number] = dataclasses.replace(self.members[number], left=True)
            self._refresh()

    # Rounds

    def begin(self, server: bytes | None = None) -> None:
        """Make the server's state, or take it from elsewhere; the population is who is enrolled now."""
        simulation = self._serving(server)
        write = wire.encode(simulation.saved())
        self.directory.commit(Checkpoint(), write)
        self.journal.write("began", members=sorted(self.members))
        self._simulation = simulation

    def open_next(self) -> None:
        """Select devices for the next round."""
        simulation = self._simulated
        fed = simulation.federation
        size = fed.cohort
        everyone = fed.data.seen
        selected = min(self.section.wanted(size), len(everyone))
        cohort = draw_cohort(everyone, selected, fed.sampling, fed.seed, self.done)
        wanted = min(size, len(cohort)) if fed.sampling == "exact" else len(cohort)
        self.journal.write("opened", round=self.done, cohort=cohort.tolist(), wanted=wanted)
        self._start_round(tuple(cohort.tolist()), wanted)

    def widen(self, alive: set[int]) -> list[int]:
        """Select more devices for a round that too few have finished: as many as of its cohort are not alive."""
        going = self._open
        silent = [number for number in going.cohort if number not in going.taken and number not in alive]
        here = {number for number, member in self.members.items() if not member.left}
        others = np.array(sorted((alive & here) - set(going.cohort)), dtype=np.int64)
        order = np.argsort(rng.mix(self.recipe.seed, "widen", going.number, others))
        added = sorted(others[order[: len(silent)]].tolist())
        if added:
            going.cohort = tuple(sorted({*going.cohort, *added}))
            self.journal.write("widened", round=going.number, cohort=list(going.cohort))
        return added

    def wants(self, number: int) -> bool:
        """Say whether a device has something to do."""
        going = self.open
        return going is not None and number in going.cohort and number not in going.taken and not going.sealed

    def task(self, number: int, returning: bool) -> tuple[int, str, bytes] | None:
        """Return what a device has to do now: the round, the broadcast's digest and its bytes."""
        going = self.open
        if going is None or not self.wants(number):
            return None
        return going.number, going.model, going.again if returning else going.whole

    def accept(self, identity: Identity, update: Update, payload: bytes) -> bool:
        """Keep an update; return whether it was kept before. Refuse it if anything about it is not right."""
        number = identity.number
        if number is None or number not in self.members:
            raise Refused(Code.NOT_ENROLLED, f"{identity.name} did not say hello")
        digest = digest_of(payload)
        if self._latest.get(number) == (update.round, digest):
            return True
        member, going = self.members[number], self.open
        over = going is not None and (update.round < going.number or (update.round == going.number and going.sealed))
        if update.round < self.done or over or self.finished:
            raise Refused(Code.ROUND_CLOSED, f"round {update.round + 1} is over")
        if going is None or update.round != going.number:
            raise Refused(Code.WRONG_ROUND, f"round {update.round + 1} is not open")
        if number in going.taken:
            raise Refused(Code.DUPLICATE, f"another update of {member.name} was accepted in this round")
        if number not in going.cohort:
            raise Refused(Code.NOT_SELECTED, f"{member.name} is not selected in round {update.round + 1}")
        if update.model != going.model:
            raise Refused(Code.WRONG_MODEL, "it was trained from another broadcast")
        if update.samples != member.samples:
            raise Refused(Code.BAD_SAMPLES, f"{member.name} enrolled with {member.samples} samples")
        self._decoded(member, payload)
        atomic_write(self._update_file(going.number, number), payload)
        self.journal.write("accepted", round=going.number, number=number, digest=digest)
        going.taken[number] = digest
        self._latest[number] = (going.number, digest)
        return False

    def last_taken(self, number: int) -> int | None:
        """Return the last round in which an update of a device was accepted."""
        return self._latest[number][0] if number in self._latest else None

    @property
    def complete(self) -> bool:
        """Whether the open round has all updates that it waits for."""
        going = self._open
        if going.sealed:
            return True
        awaited = [n for n in going.cohort if n not in going.taken and not self.members[n].left]
        return len(going.taken) >= going.wanted or (not awaited and self.enough)

    @property
    def enough(self) -> bool:
        """Whether the open round may close at its deadline."""
        wanted = self._open.wanted
        return len(self._open.taken) >= min(wanted, self.section.least(wanted))

    def close(self) -> Closed:
        """Step the server with the updates that were taken, in the simulator's order."""
        simulation, going = self._simulated, self._open
        uploads = self._joined()
        if uploads is not None:
            simulation.server = simulation.updated(simulation.server, uploads, going.number)
        return self._closed(uploads, going.number + 1)

    def _joined(self) -> Reduced | None:
        return self._simulated.joined(self._uploads(np.array(sorted(self._open.taken), dtype=np.int64)))

    def _closed(self, uploads: Reduced | None, following: int) -> Closed:
        """Keep the server's state after the open round; `following` is the number of the next one."""
        going = self._open
        taken = () if uploads is None else tuple(sorted(going.taken))
        loss = None if uploads is None else uploads.loss()
        self.done = following
        self.directory.commit(Checkpoint(rounds=self.done), wire.encode(self._simulated.saved()))
        self.last = Closed(going.number, taken, len(going.cohort), loss)
        self.journal.write("closed", round=going.number, taken=taken, selected=len(going.cohort), loss=loss)
        self.open = None
        self._clear_updates()
        self._refresh()
        return self.last

    def final(self) -> bytes:
        """Return the broadcast after the last round, whole; the run's results are written with it."""
        if self._final is None:
            simulation = self._simulated
            self._final = wire.encode(simulation.broadcast())
            fed, down = simulation.federation, simulation.down()
            models = fed.algorithm.client.models(fed.problems[0], down, simulation.shape(0, down))
            atomic_write(self.directory.path / START_FILE, wire.encode(models.get("global", {})))
            facts = {"rounds": self.done, "devices": len(self.members), "model": digest_of(self._final)}
            write_json(self.directory.path / "deployed.json", facts)
        return self._final

    # What is kept

    @property
    def _simulated(self) -> _Served:
        assert self._simulation is not None
        return self._simulation

    @property
    def _open(self) -> _Open:
        assert self.open is not None
        return self.open

    def _replay(self) -> None:
        """Bring back what the journal and the checkpoint say."""
        entries = self.journal.entries
        if not entries:
            self.journal.write("created", run=uuid.uuid4().hex)
            entries = Journal(self.directory.path / "journal.jsonl").entries
        self.run = str(entries[0]["run"])
        with storage(self.directory.path):
            (self.directory.path / "updates").mkdir(exist_ok=True)
        opened: Mapping[str, Any] | None = None
        taken: dict[tuple[int, int], str] = {}
        sealed: int | None = None
        for entry in entries:
            match entry["event"]:
                case "enrolled":
                    facts = {key: entry[key] for key in ("number", "name", "samples", "profile")}
                    self.members[facts["number"]] = Member(**facts)
                case "left":
                    self.members[entry["number"]] = dataclasses.replace(self.members[entry["number"]], left=True)
                case "opened":
                    opened = entry
                case "widened":
                    opened = {**(opened or {}), "cohort": entry["cohort"]}
                case "sealed":
                    sealed = entry["round"]
                case "accepted":
                    taken[entry["round"], entry["number"]] = entry["digest"]
                    self._latest[entry["number"]] = (entry["round"], entry["digest"])
                case "closed":
                    facts = {key: entry[key] for key in ("taken", "selected", "loss")}
                    self.last = Closed(entry["round"], tuple(facts["taken"]), facts["selected"], facts["loss"])
        if not any(entry["event"] == "began" for entry in entries):
            return
        checkpoint = self.directory.checkpoint()
        self.done = checkpoint.rounds
        self._simulation = self._serving(self.directory.server_bytes(checkpoint))
        if opened is not None and opened["round"] == self.done:
            self._start_round(tuple(opened["cohort"]), opened["wanted"])
            self._open.taken = {number: digest for (round_, number), digest in taken.items() if round_ == self.done}
            self._open.sealed = sealed == self.done
        else:
            self._clear_updates()

    def _start_round(self, cohort: tuple[int, ...], wanted: int) -> None:
        message = self._simulated.broadcast()
        whole = wire.encode(message)
        again = wire.encode(for_returning(message))
        self.open = _Open(self.done, cohort, wanted, digest_of(whole), whole, again)

    def _uploads(self, taken: Clients) -> Iterator[tuple[Clients, Tree]]:
        for _, _, clients in self._simulated.groups(taken):
            files = [self._update_file(self._open.number, int(client)) for client in clients]
            members = [self.members[int(client)] for client in clients]
            yield (
                clients,
                tree.stack(
                    [self._decoded(member, file.read_bytes()) for member, file in zip(members, files, strict=True)]
                ),
            )

    def _decoded(self, member: Member, payload: bytes) -> Tree:
        like = self._likes[member.profile]
        return opened_update(payload, like, self._declared, self.section.norm_bound)

    def _update_file(self, round_: int, number: int) -> Path:
        return self.directory.path / "updates" / f"{round_:06d}-{number:06d}.safetensors"

    def _clear_updates(self) -> None:
        with storage(self.directory.path):
            for path in (self.directory.path / "updates").iterdir():
                path.unlink()

    # The federation

    def _present(self) -> Federation:
        """Return the federation of the devices that are enrolled, whose data are elsewhere."""
        members = self.members.values()
        data = _blank(self.section, {member.number: member.samples for member in members})
        kinds = np.zeros(data.clients, dtype=np.int64)
        for member in members:
            kinds[member.number] = member.profile
        staying = np.array(sorted(member.number for member in members if not member.left), dtype=np.int64)
        wanted = self.recipe.federation.cohort
        size = min(wanted, len(staying)) if isinstance(wanted, int) else self.recipe.federation.size(len(staying))
        data = dataclasses.replace(data, seen=staying)
        return dataclasses.replace(self._base, data=data, problem_of=kinds, cohort=size)

    def _serving(self, server: bytes | None = None, federation: Federation | None = None) -> _Served:
        with storage(self.directory.path):
            store = Store(self.directory.path / "states", 2**20)  # none is ever here
        return _Served(federation or self._present(), store, server)

    def _refresh(self) -> None:
        """Let the next round know who is there; the one that is open keeps its cohort."""
        if self._simulation is not None:
            self._simulation.admit(self._present())


class _Served(Simulation):
    """The server's part of a simulation: clients are elsewhere, and more may come."""

    def admit(self, federation: Federation) -> None:
        """Go on with other clients."""
        self.federation = federation
        self.homes = np.zeros(federation.data.clients, dtype=np.int64)


def open_directory(recipe: Recipe, path: Path) -> RunDirectory:
    """Return the directory of a run of a recipe, a new one or one that is continued."""
    text = recipe.to_toml()
    if not path.exists():
        return RunDirectory.create(path, {"recipe.toml": text})
    kept = path / "recipe.toml"
    if not kept.is_file() or kept.read_text() != text:
        raise BadInput(f"{path}: is not a server's run of this recipe; choose another --out")
    return RunDirectory(path)


def open_federation(recipe: Recipe, sizes: dict[int, int]) -> Federation:
    """Return what a recipe alone decides, for clients of these sizes by number, whose data are elsewhere."""
    assert recipe.deploy is not None
    data = _blank(recipe.deploy, sizes)
    engine = recipe.engine.model_copy(update={"device": "cpu"})
    everyone = recipe.federation.model_copy(update={"cohort": 1.0})
    recipe = recipe.model_copy(update={"engine": engine, "federation": everyone})
    return prepare(recipe, data, profiles=np.zeros(data.clients, dtype=np.int64)).federation


def _blank(section: DeploySection, sizes: dict[int, int]) -> FederatedData:
    return blank(
        input_shape=section.input_shape,
        target_shape=section.target_shape,
        classes=section.classes,
        task=section.task,
        vocabulary=section.vocabulary,
        sizes=sizes,
    )


def upload_like(fed: Federation, problem: Problem) -> Tree:
    """Return what a client that has trained no steps sends, for its structure."""
    assert fed.start is not None
    start = {name: value.to(fed.dtype) for name, value in fed.start.items()}
    down = wire.dense(fed.algorithm.server.broadcast(fed.algorithm.server.init(problem, start, fed.population)))
    state = fed.algorithm.client.init(problem, down, rng.generator("shape"))
    upload = untrained_upload(fed.algorithm.client, problem, down, state)
    return tree.map(lambda leaf: leaf.to(fed.dtype) if leaf.is_floating_point() else leaf, upload)
