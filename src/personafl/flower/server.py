"""A ServerApp: the rounds of `deploy.server.rounds`, with Flower's Grid between them and the nodes.

Nodes are invited when they appear and again when they have restarted; each says which client it is. The ServerApp looks
for answers itself, five times a second: `Grid.send_and_receive` does so every 3 s and waits for all. The run directory
is that of `personafl server`, so a run that was stopped goes on where it was when the app is run again.
"""

import hashlib
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from flwr.app import Context, RecordDict
from flwr.app import Message as Envelope
from flwr.serverapp import Grid, ServerApp

from personafl.deploy.net.identity import Identity
from personafl.deploy.net.messages import Code, Finished, Left, Refused, Said, Task
from personafl.deploy.server.rounds import Rounds
from personafl.deploy.server.service import MOST_REFUSALS, Event
from personafl.errors import BadInput, printable
from personafl.flower.messages import Call, Fate, Present, Trained, pack, unpack
from personafl.recipe.recipe import Recipe

_POLL = 0.2  # seconds between two looks for answers
_LOOK = 1.0  # seconds between two looks for nodes
_PAUSE = 30.0  # seconds that a node is left alone after something went wrong there


def server_app(recipe: Path) -> ServerApp:
    """Return the app that serves a recipe. Its run config: `out`, the run directory, and `authenticated`.

    `authenticated` says that the SuperLink lets in only nodes with registered keys: then a client's number belongs to
    the key that it first came with.
    """
    app = ServerApp()

    def main(grid: Grid, context: Context) -> None:
        out = context.run_config.get("out")
        if not isinstance(out, str) or not out:
            raise BadInput("""out: missing in the run config; say where the run is kept: --run-config 'out="runs/x"'""")
        with Rounds(Recipe.read(Path(recipe)), Path(out).expanduser()) as rounds:
            _Server(grid, rounds, bool(context.run_config.get("authenticated"))).run()

    app.main()(main)
    return app


@dataclass(frozen=True)
class _Asked:
    """What a node was asked and has not answered: to join (no number), to train, or to finish (no round)."""

    node: int
    number: int | None = None
    round: int | None = None


class _Server:
    """A run that is being served."""

    def __init__(self, grid: Grid, rounds: Rounds, authenticated: bool) -> None:
        self._grid, self._rounds, self._authenticated = grid, rounds, authenticated
        self._call = Said(Call(run=rounds.run), rounds.recipe.to_toml().encode())
        self._met: dict[int, str] = {}  # node -> when it was activated, of those that were invited
        self._keys: dict[int, bytes] = {}  # node -> its public key
        self._nodes: dict[int, int] = {}  # number -> node, of those that have joined and are there
        self._returning: set[int] = set()  # numbers of those that have a state
        self._asked: dict[str, _Asked] = {}  # message -> what it asks
        self._paused: dict[int, float] = {}  # node -> until when
        self._final: Said | None = None
        self._told: set[int] = set()  # numbers of those that have their final model
        self._looked = -math.inf
        self._refused = 0  # answers

    def run(self) -> None:
        """Go through the rounds, and let every node keep its model."""
        rounds = self._rounds
        self._tell(Event("serving", f"{rounds.done} of {rounds.recipe.rounds} rounds done, in {rounds.directory.path}"))
        if not rounds.begun:
            self._until(lambda: len(rounds.members) >= rounds.section.devices)
            rounds.begin()
        while not rounds.finished:
            if rounds.open is None:
                rounds.open_next()
            self._collect()
            closed = rounds.close()
            self._tell(Event("closed", "", closed=closed))
            for name, text in rounds.suspects.alerts(closed):
                self._tell(Event("suspect", text, name))
        self._part()

    def _collect(self) -> None:
        """Wait until the open round can close; what comes later is not looked for."""
        rounds = self._rounds
        for waited in itertools.count(1):
            self._until(lambda: rounds.complete, rounds.section.deadline)
            self._asked = {id_: asked for id_, asked in self._asked.items() if asked.round is None}
            if rounds.complete or rounds.enough or (waited >= rounds.section.patience and rounds.may_close):
                return
            added = rounds.widen(set(self._nodes))
            self._tell(Event("extended", f"too few updates{rounds.lacking}; {len(added)} more nodes selected"))

    def _part(self) -> None:
        """Give every node the last broadcast; stay until all that are there have their model."""
        rounds = self._rounds
        self._final = Said(Finished(rounds=rounds.done), rounds.final().whole)
        soon = time.monotonic() + _PAUSE

        def done() -> bool:
            idle = not self._asked and self._nodes.keys() <= self._told
            return self._told >= rounds.members.keys() or (idle and time.monotonic() > soon)

        self._until(done, rounds.section.deadline)
        self._tell(Event("finished", f"{rounds.done} rounds; {len(self._told)} nodes have their model"))

    def _until(self, holds: Callable[[], bool], seconds: float = math.inf) -> None:
        """Ask and listen until something holds, or the time is over."""
        end = time.monotonic() + seconds
        while not holds() and time.monotonic() < end:
            self._look()
            self._assign()
            if not self._listen():
                time.sleep(_POLL)

    # Nodes

    def _look(self) -> None:
        """Invite nodes that are new or have restarted; forget those that are gone."""
        now = time.monotonic()
        if now < self._looked + _LOOK:
            return
        self._looked = now
        there = {node.node_id: node for node in self._grid.get_nodes()}
        for gone in self._met.keys() - there.keys():
            self._forget(gone)
        new = [id_ for id_, node in there.items() if self._met.get(id_) != node.last_activated_at]
        new = [id_ for id_ in new if self._paused.get(id_, 0.0) <= now]
        for id_ in new:
            self._forget(id_)
            self._met[id_], self._keys[id_] = there[id_].last_activated_at, there[id_].public_key
        self._push("query", [(_Asked(id_), pack(self._call)) for id_ in new])

    def _forget(self, node: int) -> None:
        """Forget a node, and what it was asked: a node that restarts has lost that."""
        self._met.pop(node, None)
        self._nodes = {number: id_ for number, id_ in self._nodes.items() if id_ != node}
        self._asked = {id_: asked for id_, asked in self._asked.items() if asked.node != node}

    def _joined(self, node: int, content: RecordDict) -> None:
        join, _ = unpack(content, Present)
        self._rounds.enrol(self._identity(node, join.number), join)
        self._nodes[join.number] = node
        # A node that was killed comes back as another one, long before Flower notices that the first is gone.
        self._asked = {id_: asked for id_, asked in self._asked.items() if asked.number != join.number}
        self._returning.discard(join.number)
        if join.returning or (join.pending is not None and join.pending == self._rounds.last_taken(join.number)):
            self._returning.add(join.number)
        self._tell(Event("joined", f"client {join.number}, {join.samples} samples"))

    def _identity(self, node: int, number: int) -> Identity:
        key = hashlib.sha256(self._keys[node]).hexdigest()[:32]
        name = f"key-{key}" if self._authenticated else f"client-{number}"
        return Identity(name, "device", number, 0, datetime.max.replace(tzinfo=UTC))

    # Work

    def _assign(self) -> None:
        """Send their work to those that have some and have not been asked."""
        busy = {asked.number for asked in self._asked.values()}
        free = [number for number in sorted(self._nodes) if number not in busy]
        for number in free:
            task = self._rounds.task(number, number in self._returning)
            if task is not None:
                round_, model, broadcast = task
                work = Said(Task(round=round_, model=model), broadcast)
                self._push("train", [(_Asked(self._nodes[number], number, round_), self._work(number, work))])
            elif self._final is not None and number not in self._told:
                self._push("query.finish", [(_Asked(self._nodes[number], number), self._work(number, self._final))])

    def _work(self, number: int, work: Said) -> RecordDict:
        fate = Fate(rounds=self._rounds.done, taken=self._rounds.last_taken(number))
        return pack(self._call, Said(fate), work)

    def _push(self, kind: str, asked: list[tuple[_Asked, RecordDict]]) -> None:
        ttl, group = self._rounds.section.deadline, str(self._rounds.done + 1)
        messages = [Envelope(content, one.node, kind, ttl=ttl, group_id=group) for one, content in asked]
        if messages:
            ids = self._grid.push_messages(messages)
            self._asked |= {id_: one for id_, (one, _) in zip(ids, asked, strict=True) if id_}

    def _listen(self) -> bool:
        """Take the answers that there are; return whether there was one."""
        answers = list(self._grid.pull_messages(list(self._asked))) if self._asked else []
        for answer in answers:
            asked = self._asked.pop(answer.metadata.reply_to_message_id, None)
            if asked is not None:
                self._heard(asked, answer)
        return bool(answers)

    def _heard(self, asked: _Asked, answer: Envelope) -> None:
        if answer.has_error():
            self._put_aside(asked, "NODE_FAILED", answer.error.reason or "it does not say why")
            return
        try:
            if asked.number is None:
                self._joined(asked.node, answer.content)
            elif asked.round is None:
                unpack(answer.content, Left)
                self._told.add(asked.number)
            else:
                self._trained(asked.node, asked.number, answer.content)
        except Refused as refused:
            self._put_aside(asked, refused.code, refused.text)

    def _trained(self, node: int, number: int, content: RecordDict) -> None:
        update, payload = unpack(content, Trained)
        if len(payload) > self._rounds.payload_bytes:
            raise Refused(Code.TOO_LARGE, f"an update may have {self._rounds.payload_bytes} bytes")
        self._rounds.accept(self._identity(node, number), update, payload)
        if update.returning:
            self._returning.add(number)

    def _put_aside(self, asked: _Asked, code: str, text: str) -> None:
        """Note what went wrong with a node, and leave it alone for a while; then it is invited again."""
        who = f"node-{asked.node}" if asked.number is None else f"client-{asked.number}"
        self._refused += 1
        if self._refused <= MOST_REFUSALS:
            self._rounds.journal.write("refused", durable=False, who=who, code=code, text=text[:200])
            self._tell(Event("refused", f"{who}: {code}: {text[:200]}"))
        self._forget(asked.node)
        self._paused[asked.node] = time.monotonic() + _PAUSE

    def _tell(self, event: Event) -> None:
        print(printable(str(event)), flush=True)
