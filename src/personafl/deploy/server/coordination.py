"""What a coordinator keeps: who joined, what servers handed in, and what follows; in a directory that survives a crash.

    recipe.toml                      what is run
    journal.jsonl                    what was heard of servers, and what was mixed; see `journal`
    checkpoint.json, server-N.safetensors   the model of all, or of each what it was last sent, after N mixes
    announced/ROUND-SERVER.safetensors      what those servers handed in that wait

Who waits for whom is decided by `cloud.protocol`. What it hears is in the journal before anyone gets an answer, so that
a coordinator that starts again hears it again. A mix is done by its checkpoint. What a full disk interrupts is gone on
with before anything else is heard. Nothing here waits: `coordinator` has the clock.
"""

import functools
import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from personafl.cloud.protocol import Back, Dropped, Event, Gone, Isolate, Mix, News, Ready, Start
from personafl.core import wire
from personafl.core.tree import Tree
from personafl.deploy.net.messages import Announce, Code, Finished, Join, Proceed, Refused, Said, digest_of
from personafl.deploy.net.payload import most_bytes, opened_update
from personafl.deploy.server.agreement import Sum, Whole, at_the_coordinator, cloud_name, deployable_cloud, fingerprint
from personafl.deploy.server.combining import Combining
from personafl.deploy.server.limits import Limits
from personafl.deploy.server.moving import Moves, check_movable
from personafl.deploy.server.opening import deployable, open_directory, open_federation
from personafl.deploy.server.tally import Tallied
from personafl.errors import BadInput
from personafl.recipe.recipe import Recipe
from personafl.simulate.federation import coordinator_of
from personafl.storage.files import atomic_write, storage


@dataclass(frozen=True)
class Mixed:
    """What a mix did: whose models, and for each how many mixes were made since it began its round."""

    round: int
    members: tuple[int, ...]
    staleness: tuple[int, ...]

    def __str__(self) -> str:
        stale = f", stale by {max(self.staleness)} at most" if any(self.staleness) else ""
        return f"round {self.round + 1}: {', '.join(map(cloud_name, self.members))}{stale}"


@dataclass(frozen=True)
class _Step:
    """What follows a server's round `after`; None: nothing came before."""

    after: int | None
    proceed: Proceed


@dataclass(frozen=True)
class _Waiting:
    """What a server handed in for a round."""

    round: int
    digest: str
    clients: int
    taken: tuple[int, ...] = ()  # numbers of the devices, if they were said


@dataclass(frozen=True)
class _Due:
    """What follows from what was heard, and is not done yet; `mix` is the mix that it belongs to, if any."""

    event: Event
    mix: int | None


class Coordination(Tallied):
    """A run on the coordinator's side."""

    def __init__(self, recipe: Recipe, path: Path) -> None:
        self.cloud = deployable_cloud(recipe)
        self.section = deployable(at_the_coordinator(recipe))
        self.recipe = recipe
        self.weights: dict[int, int] = {}  # of the servers that joined: what their devices weigh
        self.gone: set[int] = set()
        self.mixes: Counter[int] = Counter()  # server -> mixes that it had part in
        self.isolated: Counter[int] = Counter()  # server -> rounds that it did alone
        self.moves = Moves(self.cloud)
        self.staleness: dict[int, int] = {}  # server -> in its last mix
        self.left: set[int] = set()  # servers that are done
        self.diverged: list[tuple[int, int]] = []  # (round, server) of what was left out of a mix since the start
        self.done = 0  # mixes
        self.last: Mixed | None = None
        self._protocol = coordinator_of(self.cloud)
        self._waiting: dict[int, _Waiting] = {}
        self._latest: dict[int, _Waiting] = {}
        self._steps: dict[int, _Step] = {}
        self._counted: dict[int, _Waiting] = {}  # server -> the last that it handed in and that counts
        self._heard: dict[int, Mixed] = {}  # server -> the last mix that it had part in
        self._sent: Counter[int] = Counter()  # server -> the round that it began with what it was last sent
        self._models: tuple[Tree, ...] = ()  # one for all, or of each server what it was last sent
        self._todo: deque[_Due] = deque()
        self.begun = False  # all servers have joined
        super().__init__(open_directory(recipe, path))
        with storage(path):
            (path / "announced").mkdir(mode=0o700, exist_ok=True)
        self._base = open_federation(at_the_coordinator(recipe))
        self._combining = Combining(self._base, self.cloud)
        self._like = self._combining.like
        self.payload_bytes = most_bytes(self._like)  # of what a server hands in, at most
        self._limits = Limits(self._base, self.cloud, self.section)
        self._replay()

    @property
    def finished(self) -> bool:
        """Whether all mixes are done."""
        return self.begun and not self._todo and self.done >= self.recipe.rounds

    @property
    def is_behind(self) -> bool:
        """Whether something is to be done that a full disk kept from being done."""
        return bool(self._todo) or (not self.begun and len(self.weights) == self.cloud.servers)

    def is_waiting(self, server: int) -> bool:
        """Say whether a server has handed in its round."""
        return server in self._waiting

    def round_of(self, server: int) -> int:
        """Return the round that a server is in: the number of mixes when it began it."""
        return self._protocol.at(server)

    # What servers say

    def join(self, server: int, message: Join) -> None:
        """Take a server in; with the last one everything begins."""
        if message.recipe != fingerprint(self.recipe):
            raise Refused(Code.OTHER_RECIPE, f"{cloud_name(server)} has another recipe than the coordinator")
        if server not in self.weights:
            self._limits.check_weight(server, message.weight)
            self.journal.write("joined", server=server, weight=message.weight, run=message.run)
            self.weights[server], self.moves.runs[server] = message.weight, message.run
        self.go_on()

    def announce(self, server: int, message: Announce, payload: bytes) -> bool:
        """Keep what a server hands in, and do what follows; return whether it was kept before."""
        self.go_on()
        waiting = _Waiting(message.round, digest_of(payload), message.clients, tuple(message.taken))
        if self._latest.get(server) == waiting:
            return True
        if self.finished:
            raise Refused(Code.ROUND_CLOSED, "all rounds are done")
        self._check_history(server, message)
        if server in self._waiting:
            raise Refused(Code.DUPLICATE, f"{cloud_name(server)} announced this round with something else")
        self._check(server, message, opened_update(payload, self._like, type(self._like), math.inf))
        atomic_write(self._file(server, message.round), payload)
        self.journal.write("ready", server=server, **asdict(waiting), size=len(payload))
        self._ready(server, waiting)
        return False

    def _check_history(self, server: int, message: Announce) -> None:
        """Refuse a server whose past is another one: it, or this, goes on from a copy that is too old."""
        name, at, said, had = cloud_name(server), self.round_of(server), message.heard, self._heard.get(server)
        known = None if had is None else (had.round, list(had.members))
        if not self.begun or message.round < at:
            text = f"{name} is not in round {message.round + 1}"
        elif message.round > at or (said is not None and (said.mixed, said.members) != known):
            text = f"{name} is in round {message.round + 1} and knows of mixes that this coordinator does not"
            text += "; start the coordinator from a newer copy of its directory, or begin a new run"
        else:
            return
        raise Refused(Code.WRONG_ROUND, text)

    def where(self, server: int) -> tuple[int, bool, int | None]:
        """Return the round that a server is in, whether it has announced that, and which one that follows."""
        step = self._steps.get(server)
        return max(0, self.round_of(server)), self.is_waiting(server), None if step is None else step.after

    def _check(self, server: int, message: Announce, handed: Tree) -> None:
        """Refuse what the devices of a server cannot have sent."""
        limits, clients = self._limits, message.clients
        limits.check_clients(server, clients)
        model, total = handed if isinstance(handed, Whole) else (handed, handed)
        if isinstance(total, Sum):
            moved = sum(self.weights[one] for one in self.moves.out) if self.moves.count(server) else 0
            limits.check_sum(server, total, clients, self.weights[server] + moved)
        if not self.cloud.shared:
            limits.check_model(server, model, self._models[server], 1 + message.round - self._sent[server])

    def leave(self, server: int) -> None:
        """Note that a server is done, and needs nothing any more."""
        if server not in self.left:
            self.journal.write("left", server=server)
            self.left.add(server)

    def lose(self, server: int) -> None:
        """Stop waiting for a server."""
        self.go_on()
        if server not in self.gone:
            self.journal.write("gone", server=server)
            self._hear(Gone(server))

    def drop(self, server: int, to: int | None = None) -> bool:
        """Go on without a server for good: others have its devices. Return whether it was so before."""
        self.go_on()
        if server in self.moves.out:
            return True
        if not self.begun:
            raise Refused(Code.NOT_ENROLLED, "not all servers have joined yet; nothing has begun")
        check_movable(self._base.algorithm, self.cloud, type(self._base.serving().state))
        homes = self.moves.planned(server, to, range(self.cloud.servers))
        last = self._counted.get(server)
        counted, had = (0, ()) if last is None else (last.round + 1, last.taken)
        self.journal.write("dropped", server=server, counted=counted, had=had, homes=homes)
        self._dropped({"server": server, "counted": counted, "had": had, "homes": homes})
        return False

    def _dropped(self, facts: Mapping[str, Any]) -> None:
        server = facts["server"]
        self.moves.drop(facts)
        self._limits.move(self.moves.homes)
        if server in self._waiting:
            self._remove(server)
            del self._waiting[server]
        self._hear(Dropped(server))

    def find(self, server: int) -> None:
        """Count on a server again."""
        self.go_on()
        if server in self.gone:
            self.journal.write("back", server=server)
            self._hear(Back(server))

    def follows(self, server: int, after: int | None) -> bool:
        """Say whether it is known what follows a server's round."""
        step = self._steps.get(server)
        return self.finished or (step is not None and step.after == after)

    def following(self, server: int, after: int | None) -> Said:
        """Return what follows a server's round."""
        step = self._steps.get(server)
        if step is not None and step.after == after:
            alone = step.proceed.mixed is None and not self.cloud.shared
            return Said(step.proceed, b"" if alone else self._model(server))
        return Said(Finished(rounds=self.done), self._model(server) if self.cloud.shared else b"")

    # What follows

    def _begin(self) -> None:
        """Make the models; a server weighs as much as its devices that are there now."""
        self._models = self._combining.first([self.weights[server] for server in range(self.cloud.servers)])
        for start in self._protocol.start():
            self._steps[start.server] = _Step(None, Proceed(start=start.round, mixed=None))

    def _ready(self, server: int, waiting: _Waiting) -> None:
        self._latest[server] = self._waiting[server] = waiting
        self._hear(Ready(server, waiting.round))

    def _hear(self, news: News) -> None:
        """Do what follows from what is heard of a server."""
        if isinstance(news, Gone):
            self.gone.add(news.server)
        else:
            self.gone.discard(news.server)
        if self.last is not None and self.last.round + 1 >= self.recipe.rounds:
            return
        mix: int | None = None
        for event in self._protocol.receive(news):
            mix = event.round if isinstance(event, Mix) else mix
            self._todo.append(_Due(event, mix))
        self.go_on()

    def go_on(self) -> None:
        """Do what follows from all that was heard."""
        if not self.begun and len(self.weights) == self.cloud.servers:
            self._begin()
            self.commit(0, wire.encode(self._models))
            self.journal.write("began")
            self.begun = True
        while self._todo:
            self._do(self._todo[0])
            self._todo.popleft()

    def _do(self, due: _Due) -> None:
        """Do one thing; if that fails, it can be done again."""
        match due.event:
            case Mix() as event:
                self._mix(event)
            case Isolate() as event:
                self._note("alone", server=event.server, round=event.round)
                self._remove(event.server)
                self.isolated[event.server] += 1
            case Start() as event:
                done = self._counted[event.server] = self._waiting.pop(event.server)
                members = [] if due.mix is None else list(self._heard[event.server].members)
                self._steps[event.server] = _Step(
                    done.round, Proceed(start=event.round, mixed=due.mix, members=members)
                )
                if due.mix is not None:
                    self._sent[event.server] = event.round

    def _mix(self, event: Mix) -> None:
        """Mix the models of servers, or update the model of all; nothing is computed that the checkpoint has."""
        stale = tuple(event.round - self._waiting[server].round for server in event.members)
        done = Mixed(event.round, event.members, stale)
        if event.round >= self.done:
            handed = [wire.decode(self._handed_in(server), self._like) for server in event.members]
            models = self._finite(event, handed)
            self.commit(event.round + 1, wire.encode(models))
            self._models, self.done = models, event.round + 1
        self._note("mixed", **asdict(done))
        for server, since in zip(event.members, stale, strict=True):
            self._remove(server)
            self.mixes[server] += 1
            self.staleness[server], self._heard[server] = since, done
        self.last = done

    def _handed_in(self, server: int) -> bytes:
        """Return what a server handed in, which was checked when it came, if it is still the same."""
        waiting = self._waiting[server]
        file = self._file(server, waiting.round)
        with storage(file):
            data = file.read_bytes() if file.exists() else b""
        if digest_of(data) != waiting.digest:
            raise BadInput(
                f"{file}: was lost or damaged since {cloud_name(server)} handed it in; put a copy back, or begin anew "
                "with another --out"
            )
        return data

    def _finite(self, event: Mix, handed: list[Tree]) -> tuple[Tree, ...]:
        """Return the models after a mix, without the part of whoever would make them infinite; its name is noted."""
        counts = [self._waiting[server].clients for server in event.members]
        parts = dict(zip(event.members, zip(handed, counts, strict=True), strict=True))
        combined = functools.partial(self._combining.combined, self._models, event.round)
        models = combined(parts)
        if models is not None:
            return models
        good = {server: part for server, part in parts.items() if combined({server: part})}
        models = combined(good) if good else None
        for server in parts if models is None else parts.keys() - good.keys():
            self._note("diverged", server=server, round=event.round)
            self.diverged.append((event.round, server))
        return models or self._models

    # What is kept

    def _replay(self) -> None:
        """Hear again what the journal says."""
        entries = self.journal.entries
        self._noted = {_line(entry["event"], entry) for entry in entries}
        heard = [entry for entry in entries if entry["event"] in ("ready", "gone", "back", "dropped")]
        self.left = {entry["server"] for entry in entries if entry["event"] == "left"}
        self.weights = {entry["server"]: entry["weight"] for entry in entries if entry["event"] == "joined"}
        self.moves.runs = {e["server"]: e.get("run", "") for e in entries if e["event"] == "joined"}
        checkpoint, self.begun = self.checkpoint(), any(entry["event"] == "began" for entry in entries)
        if checkpoint.rounds and not self.begun:
            raise self.cut_off(checkpoint)
        if self.begun:
            self._begin()
            self.done = checkpoint.rounds
            self._models = wire.decode(self.directory.server_bytes(checkpoint), self._models)
        self.go_on()
        for entry in heard:
            if entry["event"] == "ready":
                facts = {key: entry[key] for key in ("round", "digest", "clients")}
                self._ready(entry["server"], _Waiting(**facts, taken=tuple(entry.get("taken", ()))))
            elif entry["event"] == "dropped":
                self._dropped(entry)
            else:
                self._hear((Gone if entry["event"] == "gone" else Back)(entry["server"]))
        if self.done != (0 if self.last is None else self.last.round + 1):
            raise self.cut_off(checkpoint)
        kept = {self._file(server, waiting.round) for server, waiting in self._waiting.items()}
        with storage(self.directory.path):
            for path in set((self.directory.path / "announced").iterdir()) - kept:
                path.unlink()

    def _note(self, event: str, **facts: Any) -> None:
        """Add to the journal what followed, if it is not there."""
        if (line := _line(event, facts)) not in self._noted:
            self.journal.write(event, **facts)
            self._noted.add(line)

    def _model(self, server: int) -> bytes:
        return wire.encode(self._models[0 if self.cloud.shared else server])

    def _file(self, server: int, round_: int) -> Path:
        return self.directory.path / "announced" / f"{round_:06d}-{server:06d}.safetensors"

    def _remove(self, server: int) -> None:
        with storage(self.directory.path):
            self._file(server, self._waiting[server].round).unlink(missing_ok=True)


def _line(event: str, facts: Mapping[str, Any]) -> tuple[Any, ...]:
    return event, facts.get("server"), facts.get("round")
