"""The server's rounds: who is enrolled, who is selected, what was taken; in a directory that survives a crash.

    recipe.toml                      what is run
    journal.jsonl                    what happened; see `journal`
    checkpoint.json, server-N.safetensors   the server's state after N rounds; see `storage.rundir`
    updates/ROUND-NUMBER.safetensors        the updates that were taken in the round that is open

An update is durable before its device hears that it was accepted. A round is closed by its checkpoint; until then a
server that starts again takes up the round where it was. Nothing here waits: `server` has the clock.
"""

import dataclasses
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from personafl.core import rng, tree, wire
from personafl.core.algorithm import Reduced, for_returning
from personafl.data.config import Moments
from personafl.data.moments import Sums, agreed
from personafl.deploy.net.identity import Identity
from personafl.deploy.net.messages import Code, Hello, Payload, Refused, Update, digest_of
from personafl.deploy.net.payload import most_bytes, opened_update
from personafl.deploy.server.history import Closed, History, Member, Open, enrolling, opened_sums, roster_of
from personafl.deploy.server.opening import adds_sums, deployable, open_directory, open_federation, upload_like
from personafl.errors import BadInput
from personafl.recipe.recipe import Recipe
from personafl.runs.start import START_FILE
from personafl.simulate.cohort import draw_cohort
from personafl.simulate.serverside import Roster, ServerSide
from personafl.storage.files import atomic_write, storage, write_json
from personafl.storage.journal import Journal, Journaled
from personafl.storage.rundir import Checkpoint


class Rounds(Journaled):
    """A run on the server's side."""

    def __init__(self, recipe: Recipe, path: Path) -> None:
        self.section = deployable(recipe)
        self.recipe = self.served = recipe  # served: with the moments that devices' sums make, once they are known
        self.members: dict[int, Member] = {}
        self.done = 0  # rounds
        self.last: Closed | None = None
        self.open: Open | None = None
        self.run = ""
        self._latest: dict[int, tuple[int, str]] = {}  # number -> round and digest of the update that was last accepted
        self._side: ServerSide | None = None
        self._stale = False  # whether others are enrolled than the server's half knows
        self._base = open_federation(recipe)
        self._like = Sums.like(self.section.input_shape[0]) if adds_sums(recipe) else None
        self.sums_bytes = 0 if self._like is None else most_bytes(self._like)  # of a device's sums, at most
        self._declared = self._base.algorithm.client.uploads
        self._likes = [upload_like(self._base, problem) for problem in self._base.problems]  # by profile
        self.payload_bytes = max(map(most_bytes, self._likes))  # of an update, at most
        self._final: bytes | None = None
        super().__init__(open_directory(recipe, path))
        self._replay()

    @property
    def begun(self) -> bool:
        """Whether there is a server state."""
        return self._side is not None

    @property
    def finished(self) -> bool:
        """Whether all rounds are done."""
        return self.begun and self.done >= self.recipe.rounds

    # Enrolment

    def enrol(self, identity: Identity, hello: Hello, sums: bytes = b"") -> None:
        """Take a device in, or note that it is back; before the first round it may have to send sums of its inputs."""
        number, member = identity.number, self.candidate(identity, hello)
        assert number is not None
        known = self.members.get(number)
        if known is None or known.left:
            if self._like is not None and not self.begun:
                member = dataclasses.replace(member, sums=opened_sums(sums, self._like, hello))
            self.journal.write("enrolled", **dataclasses.asdict(member))
            self.members = {**self.members, number: member}  # whoever goes through the old ones is not disturbed
            self._refresh()

    def candidate(self, identity: Identity, hello: Hello) -> Member:
        """Return the member that a device would be, or refuse it."""
        known = None if identity.number is None else self.members.get(identity.number)
        return enrolling(self.recipe, identity, hello, known)

    def leave(self, number: int) -> None:
        """Stop selecting a device."""
        if number in self.members and not self.members[number].left:
            self.journal.write("left", number=number)
            self.members = {**self.members, number: dataclasses.replace(self.members[number], left=True)}
            self._refresh()

    # Rounds

    def begin(self, server: bytes | None = None) -> None:
        """Make the server's state, or take it from elsewhere; the population is who is enrolled now."""
        side = self._serving(server)
        self.directory.commit(Checkpoint(), wire.encode(side.state))
        added = [
            Sums.read(member.sums) for _, member in sorted(self.members.items()) if member.sums and not member.left
        ]
        moments = agreed(added).model_dump() if added else None
        self.journal.write("began", members=sorted(self.members), moments=moments)
        self._standardise(moments)
        self._side = side

    def open_next(self) -> None:
        """Select devices for the next round."""
        everyone, federation = self._server.roster.seen, self.recipe.federation
        given = federation.cohort
        size = min(given, len(everyone)) if isinstance(given, int) else federation.size(len(everyone))
        selected = min(self.section.wanted(size), len(everyone))
        cohort = draw_cohort(everyone, selected, federation.sampling, self.recipe.seed, self.done)
        wanted = min(size, len(cohort)) if federation.sampling == "exact" else len(cohort)
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
        return going is not None and going.selected(number) and number not in going.taken and not going.sealed

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
        opened_update(payload, self._likes[member.profile], self._declared, self.section.norm_bound)
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
        if going.sealed or len(going.taken) >= going.wanted:
            return True
        return self.enough and all(n in going.taken or self.members[n].left for n in going.cohort)

    @property
    def enough(self) -> bool:
        """Whether the open round may close at its deadline."""
        wanted = self._open.wanted
        return len(self._open.taken) >= min(wanted, self.section.least(wanted))

    @property
    def any_taken(self) -> bool:
        """Whether the open round has an update."""
        return bool(self._open.taken)

    def close(self) -> Closed:
        """Step the server with the updates that were taken, in the simulator's order."""
        server, going = self._server, self._open
        uploads = self._joined()
        if uploads is not None:
            server.state = server.updated(server.state, uploads, going.number)
        return self._closed(uploads, going.number + 1)

    def _joined(self) -> Reduced | None:
        """Join the updates that were taken, one by one, in the order of a simulator that trains so."""
        joined: Reduced | None = None
        taken = np.array(sorted(self._open.taken), dtype=np.int64)
        kinds = self._server.roster.problem_of[taken]
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

    def _closed(self, uploads: Reduced | None, following: int) -> Closed:
        """Keep the server's state after the open round; `following` is the number of the next one."""
        going = self._open
        taken = () if uploads is None else tuple(sorted(going.taken))
        loss = None if uploads is None else uploads.loss()
        self.done = following
        self.directory.commit(Checkpoint(rounds=self.done), wire.encode(self._server.state))
        self.last = Closed(going.number, taken, len(going.cohort), loss)
        self.journal.write("closed", round=going.number, taken=taken, selected=len(going.cohort), loss=loss)
        self.open = None
        self._clear_updates()
        self._refresh()
        return self.last

    def final(self) -> bytes:
        """Return the broadcast after the last round, whole; the run's results are written with it."""
        if self._final is None:
            message, rule, problem = self._server.broadcast(), self._base.algorithm.client, self._base.problems[0]
            self._final, down = Payload(wire.encode(message)), wire.dense(message)
            models = rule.models(problem, down, rule.init(problem, down, rng.generator("shape")))
            atomic_write(self.directory.path / START_FILE, wire.encode(models.get("global", {})))
            facts = {"rounds": self.done, "devices": len(self.members), "model": digest_of(self._final)}
            write_json(self.directory.path / "deployed.json", facts)
        return self._final

    # What is kept

    @property
    def _server(self) -> ServerSide:
        assert self._side is not None
        if self._stale:
            self._side.roster, self._stale = self._roster(), False
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
            (self.directory.path / "updates").mkdir(exist_ok=True)
        before = History.of(entries)
        self.members, self._latest, self.last = before.members, before.latest, before.last
        checkpoint = self.directory.checkpoint()
        if checkpoint.rounds and not (before.begun and before.opened):
            raise BadInput(
                f"{self.directory.path / 'journal.jsonl'}: does not speak of the {checkpoint.rounds} rounds that are "
                "done, so it was lost or cut; put a copy back, or choose another --out (the model is kept here)"
            )
        if not before.begun:
            return
        self._standardise(before.moments)
        self.done = checkpoint.rounds
        self._side = self._serving(self.directory.server_bytes(checkpoint))
        if before.opened.get("round") == self.done:
            self._start_round(tuple(before.opened["cohort"]), before.opened["wanted"])
            self._open.taken = before.taken.get(self.done, {})
            self._open.sealed = before.sealed == self.done
        else:
            self._clear_updates()

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
        return roster_of(self.members, self._base.roster)

    def _serving(self, server: bytes | None = None) -> ServerSide:
        side = self._base.serving(self._roster())
        if server is not None:
            side.state = side.decoded(server, side.state)
        return side

    def _refresh(self) -> None:
        """Let the next round know who is there; the one that is open keeps its cohort."""
        self._stale = True
