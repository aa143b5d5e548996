"""The server's rounds: who is enrolled, who is selected, what was taken; in a directory that survives a crash.

    recipe.toml                      what is run
    journal.jsonl                    what happened; see `journal`
    checkpoint.json, server-N.safetensors   the server's state after N rounds, and some before; see `storage.rundir`
    updates/ROUND-NUMBER.safetensors        the updates that were taken in the round that is open

An update is durable before its device hears that it was accepted. A round is closed by its checkpoint; until then a
server that starts again takes up the round where it was. What a full disk interrupts can be called again, and is then
gone on with. Nothing here waits: `server` has the clock.
"""

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from personafl.core import rng, tree, wire
from personafl.core.algorithm import Reduced, for_returning
from personafl.core.tree import Tree
from personafl.data.config import Moments
from personafl.data.moments import Sums, agreed
from personafl.deploy.net.identity import Identity
from personafl.deploy.net.messages import Code, Payload, Refused, Update, digest_of
from personafl.deploy.net.payload import most_bytes, opened_update
from personafl.deploy.server.going_back import complete_roll_back
from personafl.deploy.server.history import Closed, History, Open, check_admitted, roster_of
from personafl.deploy.server.members import Members
from personafl.deploy.server.opening import adds_sums, deployable, open_directory, open_federation, upload_like
from personafl.errors import BadInput
from personafl.recipe.recipe import Recipe
from personafl.runs.start import START_FILE
from personafl.simulate.cohort import draw_cohort
from personafl.simulate.serverside import Roster, ServerSide
from personafl.storage.files import atomic_write, storage, write_json
from personafl.storage.journal import Journal
from personafl.storage.rundir import Checkpoint
from personafl.storage.seals import sealed


class Rounds(Members):
    """A run on the server's side."""

    def __init__(self, recipe: Recipe, path: Path) -> None:
        self.section = deployable(recipe)
        self.served = recipe  # with the moments that devices' sums make, once they are known
        self.done = 0  # rounds
        self.last: Closed | None = None
        self.open: Open | None = None
        self.run = ""
        self._latest: dict[int, tuple[int, str]] = {}  # number -> round and digest of the update that was last accepted
        self._side: ServerSide | None = None
        self._base = open_federation(recipe)
        sums = Sums.like(self.section.input_shape[0]) if adds_sums(recipe) else None
        self.sums_bytes = 0 if sums is None else most_bytes(sums)  # of a device's sums, at most
        self._declared = self._base.algorithm.client.uploads
        self._likes = [upload_like(self._base, problem) for problem in self._base.problems]  # by profile
        self.payload_bytes = max(map(most_bytes, self._likes))  # of an update, at most
        self._final: bytes | None = None
        super().__init__(recipe, open_directory(recipe, path), sums)
        self._replay()

    @property
    def begun(self) -> bool:
        """Whether there is a server state."""
        return self._side is not None

    @property
    def finished(self) -> bool:
        """Whether all rounds are done."""
        return self.begun and self.done >= self.recipe.rounds

    # Rounds

    def begin(self, server: bytes | None = None) -> None:
        """Make the server's state, or take it from elsewhere; the population is who is enrolled now."""
        side = self._serving(server)
        self.commit(0, wire.encode(side.state), self.section.checkpoints)
        present = [self.members[number] for number in sorted(self.members) if self.here(number)]
        added = [Sums.read(member.sums) for member in present if member.sums]
        moments = agreed(added).model_dump() if added else None
        self.journal.write("began", members=sorted(self.members), moments=moments)
        self._standardise(moments)
        self._side = side

    def open_next(self) -> None:
        """Select devices for the next round."""
        self._refresh()
        everyone, federation = self._server.roster.seen, self.recipe.federation
        given = federation.cohort
        size = min(given, len(everyone)) if isinstance(given, int) else federation.size(len(everyone))
        selected = min(self.section.wanted(size), len(everyone))
        if len(everyone):
            cohort = draw_cohort(everyone, selected, federation.sampling, self.recipe.seed, self.done)
            wanted = min(size, len(cohort)) if federation.sampling == "exact" else len(cohort)
        else:  # whoever comes next is selected then
            cohort, wanted = everyone, 1
        self.journal.write("opened", round=self.done, cohort=cohort.tolist(), wanted=wanted)
        self._start_round(tuple(cohort.tolist()), wanted)

    def widen(self, alive: set[int]) -> list[int]:
        """Select more devices for a round that too few have finished: as many as of its cohort are not alive."""
        going = self._open
        silent = len(going.cohort) - len(going.taken) - sum(number in alive for number in self._awaited)
        others = np.array(self._others(alive), dtype=np.int64)
        order = np.argsort(rng.mix(self.recipe.seed, "widen", going.number, others))
        added = sorted(others[order[: silent if going.cohort else going.wanted]].tolist())
        if added:
            self._refresh()
            cohort = tuple(sorted({*going.cohort, *added}))
            self.journal.write("widened", round=going.number, cohort=cohort)
            going.cohort = cohort
        return added

    def wants(self, number: int) -> bool:
        """Say whether a device has something to do."""
        going = self.open
        if going is None or going.sealed or number in going.hopeless or not self.here(number):
            return False
        return going.selected(number) and number not in going.taken

    def task(self, number: int, returning: bool) -> tuple[int, str, bytes] | None:
        """Return what a device has to do now: the round, the broadcast's digest and its bytes."""
        going = self.open
        if going is None or not self.wants(number):
            return None
        return going.number, going.model, going.again if returning else going.whole

    def check(self, identity: Identity, update: Update, digest: str) -> bool:
        """Refuse an update if anything that is said of it is not right; return whether it was accepted before."""
        number = identity.number
        if number is None or number not in self.members:
            raise Refused(Code.NOT_ENROLLED, f"{identity.name} did not say hello")
        check_admitted(self.members[number])
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
        if not going.selected(number):
            raise Refused(Code.NOT_SELECTED, f"{member.name} is not selected in round {update.round + 1}")
        if update.model != going.model:
            raise Refused(Code.WRONG_MODEL, "it was trained from another broadcast")
        if update.samples != member.samples:
            raise Refused(Code.BAD_SAMPLES, f"{member.name} enrolled with {member.samples} samples")
        return False

    def accept(self, identity: Identity, update: Update, payload: bytes) -> bool:
        """Keep an update; return whether it was kept before. Refuse it if anything about it is not right."""
        digest = digest_of(payload)
        if self.check(identity, update, digest):
            return True
        number, going = identity.number, self._open
        assert number is not None
        member = self.members[number]
        try:
            opened_update(payload, self._likes[member.profile], self._declared, self.section.norm_bound)
        except Refused as refused:
            if refused.code in (Code.NORM_TOO_LARGE, Code.NOT_FINITE):
                going.hopeless.add(number)
            raise
        atomic_write(self._update_file(going.number, number), payload)
        self.journal.write("accepted", round=going.number, number=number, digest=digest)
        going.taken[number] = digest
        self._latest[number] = (going.number, digest)
        return False

    def _leave_out(self, number: int) -> None:
        """Note that a device is dropped, with what it sent in the open round; one that is sealed keeps what it has."""
        going = self.open
        without = going is not None and not going.sealed and number in going.taken
        self.journal.write("dropped", number=number, without=self._open.number if without else None)
        if without:
            del self._open.taken[number], self._latest[number]

    def last_taken(self, number: int) -> int | None:
        """Return the last round in which an update of a device was accepted."""
        return self._latest[number][0] if number in self._latest else None

    def counted(self, number: int) -> int:
        """Return the number of rounds after which no update of a device was accepted."""
        last = self.last_taken(number)
        return 0 if last is None else last + 1

    @property
    def complete(self) -> bool:
        """Whether the open round has all updates that it waits for."""
        going = self._open
        if going.sealed or len(going.taken) >= going.wanted:
            return True
        return len(going.taken) >= self._wanted or (not self._awaited and self.enough)

    @property
    def enough(self) -> bool:
        """Whether the open round may close at its deadline."""
        wanted = self._wanted
        return len(self._open.taken) >= min(wanted, self.section.least(wanted))

    def stranded(self, alive: set[int]) -> bool:
        """Say whether the open round has nothing and waits for nobody, but others could be selected."""
        return not (self._open.taken or self._open.sealed or self._awaited) and bool(self._others(alive))

    @property
    def _awaited(self) -> list[int]:
        """Who of the cohort may still send something; not who has left, was dropped, is revoked or sent bad numbers."""
        gone = self._open.hopeless.union(self._open.taken)
        return [number for number in self._open.cohort if number not in gone and self.here(number)]

    @property
    def _wanted(self) -> int:
        """The updates that close the open round: no more than it can still get."""
        return min(self._open.wanted, max(1, len(self._open.taken) + self._coming))

    @property
    def _coming(self) -> int:
        """How many may still send something."""
        return len(self._awaited)

    def _others(self, alive: set[int]) -> list[int]:
        """Return who could be selected besides the cohort."""
        return sorted(number for number in alive - set(self._open.cohort) if self.here(number))

    @property
    def any_taken(self) -> bool:
        """Whether the open round has an update."""
        return bool(self._open.taken)

    def close(self) -> Closed:
        """Step the server with the updates that were taken, in the simulator's order."""
        if not self._is_committed:
            server, number, uploads = self._server, self._open.number, self._joined()
            state = server.state if uploads is None else server.updated(server.state, uploads, number)
            self._commit(state, uploads, number + 1)
        return self._closed()

    def _joined(self) -> Reduced | None:
        """Join the updates that were taken, one by one, in the order of a simulator that trains so."""
        joined: Reduced | None = None
        taken = np.array(sorted(self._open.taken), dtype=np.int64)
        kinds = self._server.roster.problem_of(taken)
        for which in np.unique(kinds).tolist():
            like = wire.dense(self._likes[which])
            for client in taken[kinds == which].reshape(-1, 1):
                data = self._kept(self._update_file(self._open.number, int(client[0])), int(client[0]))
                upload = tree.map(lambda leaf: leaf.unsqueeze(0), wire.dense(wire.decode(data, like)))
                joined = self._server.join(joined, upload, client)
        return joined

    def _kept(self, file: Path, client: int) -> bytes:
        """Return an update that was checked when it came, if it is still the same."""
        with storage(file):
            data = file.read_bytes() if file.exists() else b""
        if digest_of(data) != self._open.taken[int(client)]:
            raise BadInput(
                f"{file}: was lost or damaged since it was accepted; put a copy back, or begin anew with another --out"
            )
        return data

    @property
    def _is_committed(self) -> bool:
        """Whether there is a checkpoint after the open round: what is left of closing it is to say so."""
        return self.done > self._open.number

    def _commit(self, state: Tree, uploads: Reduced | None, following: int) -> None:
        """Keep the server's state after the open round; `following` is the number of the next one."""
        going = self._open
        self.commit(following, wire.encode(state), self.section.checkpoints)
        self._server.state, self.done, going.sealed = state, following, True
        taken = () if uploads is None else tuple(sorted(going.taken))
        self.last = Closed(going.number, taken, len(going.cohort), None if uploads is None else uploads.loss())

    def _closed(self) -> Closed:
        """Say that the open round is closed, and remove its updates."""
        closed = self.last
        assert closed is not None
        self._clear_updates()
        taken, selected = closed.taken, closed.selected
        self.journal.write("closed", round=closed.number, taken=taken, selected=selected, loss=closed.loss)
        self.open = None
        return closed

    def final(self) -> bytes:
        """Return the broadcast after the last round, whole; the run's results are written with it."""
        if self._final is None:
            message, rule, problem = self._server.broadcast(), self._base.algorithm.client, self._base.problems[0]
            final, down = Payload(wire.encode(message)), wire.dense(message)
            models = rule.models(problem, down, rule.init(problem, down, rng.generator("shape")))
            atomic_write(self.directory.path / START_FILE, *sealed(wire.encode(models.get("global", {}))))
            facts = {"rounds": self.done, "devices": len(self.members), "model": digest_of(final)}
            write_json(self.directory.path / "deployed.json", facts)
            self._final = final
        return self._final

    # What is kept

    @property
    def _server(self) -> ServerSide:
        assert self._side is not None
        return self._side

    @property
    def _open(self) -> Open:
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
            (self.directory.path / "updates").mkdir(mode=0o700, exist_ok=True)
        before = History.of(entries)
        self.members, self._latest, self.last = before.members, before.latest, before.last
        complete_roll_back(self)
        checkpoint = self.checkpoint()
        if checkpoint.rounds and not (before.begun and before.opened):
            raise self.cut_off(checkpoint)
        if not before.begun:
            return
        self._standardise(before.moments)
        self.done = checkpoint.rounds
        self._side = self._serving(self._kept_state(checkpoint))
        if before.opened.get("round") == self.done:
            self._start_round(tuple(before.opened["cohort"]), before.opened["wanted"])
            self._open.taken = before.taken.get(self.done, {})
            self._open.sealed = before.sealed == self.done
        else:
            self._clear_updates()

    def _kept_state(self, checkpoint: Checkpoint) -> bytes:
        try:
            return self.directory.server_bytes(checkpoint)
        except BadInput as error:
            earlier = ", ".join(str(one.rounds) for one in checkpoint.before)
            raise BadInput(f"{error}; put a copy back{f', or --roll-back to {earlier}' if earlier else ''}") from error

    def _standardise(self, moments: Mapping[str, Any] | None) -> None:
        if moments is not None:
            data = self.recipe.data.model_copy(update={"normalize": Moments.model_validate(moments)})
            self.served = self.recipe.model_copy(update={"data": data})

    def _start_round(self, cohort: tuple[int, ...], wanted: int) -> None:
        message = self._server.broadcast()
        whole, again = Payload(wire.encode(message)), Payload(wire.encode(for_returning(message)))
        self.open = Open(self.done, cohort, wanted, digest_of(whole), whole, again)

    def _update_file(self, round_: int, number: int) -> Path:
        return self.directory.path / "updates" / f"{round_:06d}-{number:06d}.safetensors"

    def _clear_updates(self) -> None:
        with storage(self.directory.path):
            for path in (self.directory.path / "updates").iterdir():
                path.unlink()

    # Who is there

    def _roster(self) -> Roster:
        return roster_of(self.members, self.here, self._base.roster)

    def _serving(self, server: bytes | None = None) -> ServerSide:
        side = self._base.serving(self._roster())
        if server is not None:
            side.state = side.decoded(server, side.state)
        return side

    def _refresh(self) -> None:
        """Let the rounds know who is there now."""
        self._server.roster = self._roster()
