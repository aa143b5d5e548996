"""The server's rounds: who is enrolled, who is selected, what was taken; in a directory that survives a crash.

    recipe.toml                      what is run
    journal.jsonl                    what happened; see `journal`
    checkpoint.json, server-N.safetensors   the server's state after N rounds, and some before; see `storage.rundir`
    updates/ROUND.updates            the updates that were taken in the round that is open; see `updates`

An update is durable before its device hears that it was accepted. A round is closed by its checkpoint; until then a
server that starts again takes up the round where it was. What a full disk interrupts can be called again, and is then
gone on with. Nothing here waits: `server` has the clock.
"""

import dataclasses
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from personafl.core import rng, wire
from personafl.core.algorithm import Reduced
from personafl.core.tree import Tree
from personafl.data.moments import Sums, agreed
from personafl.deploy.net.identity import Identity
from personafl.deploy.net.messages import Code, Refused, Update, digest_of
from personafl.deploy.net.payload import Checker, most_bytes
from personafl.deploy.server.away import Away
from personafl.deploy.server.ending import write_results
from personafl.deploy.server.going_back import complete_roll_back
from personafl.deploy.server.history import Closed, History, Open, check_admitted, roster_of
from personafl.deploy.server.joining import fates, joined
from personafl.deploy.server.letters import Letters
from personafl.deploy.server.members import Members
from personafl.deploy.server.noise import Noise
from personafl.deploy.server.opening import (
    adds_sums,
    deployable,
    kept_state,
    open_directory,
    open_federation,
    standardised,
    upload_like,
)
from personafl.deploy.server.selecting import select
from personafl.deploy.server.suspects import Suspects
from personafl.deploy.server.updates import Offer, Updates
from personafl.recipe.recipe import Recipe
from personafl.runs.robust import least_updates
from personafl.simulate.serverside import Roster, ServerSide
from personafl.storage.files import storage
from personafl.storage.journal import Journal


class Rounds(Members):
    """A run on the server's side."""

    def __init__(self, recipe: Recipe, path: Path) -> None:
        self.section = deployable(recipe)
        self.served = recipe  # with the moments that devices' sums make, once they are known
        self.done = 0  # rounds
        self.last: Closed | None = None
        self.open: Open | None = None
        self.run = ""
        self.noise: Noise | None = None  # of a recipe with [privacy]
        self._latest: dict[int, tuple[int, str]] = {}  # number -> round and digest of the update that was last accepted
        self._side: ServerSide | None = None
        self._base = open_federation(recipe)
        sums = Sums.like(self.section.input_shape[0]) if adds_sums(recipe) else None
        self.sums_bytes = 0 if sums is None else most_bytes(sums)  # of a device's sums, at most
        self._declared = self._base.algorithm.client.uploads
        self.least = least_updates(self._base.algorithm, recipe)  # of a round
        self._likes = [upload_like(self._base, problem) for problem in self._base.problems]  # by profile
        self._checkers = [Checker(like, self._declared, self.section.norm_bound) for like in self._likes]
        self.payload_bytes = max(map(most_bytes, self._likes))  # of an update, at most
        self._final: Letters | None = None
        super().__init__(recipe, open_directory(recipe, path), sums)
        self.suspects = Suspects()
        self.journal.follow(self.suspects.hear)
        self._replay()

    @property
    def begun(self) -> bool:
        """Whether there is a server state."""
        return self._side is not None

    @property
    def finished(self) -> bool:
        """Whether all rounds are done, or all that a budget of privacy allows."""
        if self.noise is not None and self.open is None and self.begun and self.noise.is_spent:
            return True
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
        self.served = standardised(self.recipe, moments)
        self._side = side

    def open_next(self) -> None:
        """Select devices for the next round."""
        self._refresh()
        cohort, wanted = select(self.recipe, self.section, self.noise, self._server.roster.seen, self.done)
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
        broadcast = going.letters.to(number, returning)
        if number not in going.handed:
            self.journal.write("handed", durable=False, round=going.number, number=number, size=len(broadcast))
            going.handed.add(number)
        return going.number, going.letters.digest_to(number), broadcast

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
        if update.model != going.letters.digest_to(number):
            raise Refused(Code.WRONG_MODEL, "it was trained from another broadcast")
        if update.samples != member.samples:
            raise Refused(Code.BAD_SAMPLES, f"{member.name} enrolled with {member.samples} samples")
        return False

    def accept(self, identity: Identity, update: Update, payload: bytes) -> bool:
        """Keep an update; return whether it was kept before. Refuse it if anything about it is not right."""
        (outcome,) = self.accept_all([Offer(identity, update, payload, digest_of(payload))])
        if isinstance(outcome, Refused):
            raise outcome
        return outcome

    def accept_all(self, offers: Sequence[Offer]) -> list[bool | Refused]:
        """Keep updates of different devices; return for each whether it was kept before, or why it is refused."""
        outcomes = [self._looked_at(offer) for offer in offers]
        new = [offer for offer, outcome in zip(offers, outcomes, strict=True) if outcome is False]
        if new:
            facts = self._updates.write(new)
            self.journal.write_all("accepted", facts)
            self._updates.keep(facts)
        for offer in new:
            self.away.back(offer.number)
            self._open.taken[offer.number] = offer.digest
            self._latest[offer.number] = (self._open.number, offer.digest)
        return outcomes

    def _looked_at(self, offer: Offer) -> bool | Refused:
        """Say whether an update was kept before, or why it is refused."""
        try:
            if self.check(offer.identity, offer.update, offer.digest):
                return True
            self._checkers[self.members[offer.number].profile].check(offer.payload)
        except Refused as refused:
            if refused.code in (Code.NORM_TOO_LARGE, Code.NOT_FINITE):
                self._open.hopeless.add(offer.number)
            return refused
        return False

    def _leave_out(self, number: int, **facts: Any) -> None:
        """Note that a device is dropped, with what it sent in the open round; one that is sealed keeps what it has."""
        going = self.open
        without = going is not None and not going.sealed and number in going.taken
        self.journal.write("dropped", number=number, without=self._open.number if without else None, **facts)
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
        full = going.sealed or (len(going.taken) >= going.wanted and not self.lacking)
        if full or self.lacking:
            return full
        if any(map(self._is_awaited, going.cohort)):  # asked after every update: most are not the last
            return False
        in_vain = self.noise is not None and self.noise.cyclic and not self._others(set(self.members))
        return len(going.taken) >= self._wanted or self.enough or in_vain

    @property
    def enough(self) -> bool:
        """Whether the open round may close at its deadline."""
        wanted = self._wanted
        return not self.lacking and len(self._open.taken) >= min(wanted, self.section.least(wanted))

    def stranded(self, alive: set[int]) -> bool:
        """Say whether the open round cannot close and waits for nobody, but others could be selected."""
        return not (self.may_close or self._open.sealed or self._awaited) and bool(self._others(alive))

    @property
    def _awaited(self) -> list[int]:
        """Who of the cohort may still send something; not who has left, was dropped, is revoked or sent bad numbers."""
        return list(filter(self._is_awaited, self._open.cohort))

    def _is_awaited(self, number: int) -> bool:
        return number not in self._open.taken and number not in self._open.hopeless and self.here(number)

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
        others = sorted(number for number in alive - set(self._open.cohort) if self.here(number))
        return others if self.noise is None else [one for one in others if self.noise.may(one, self._open.number)]

    @property
    def may_close(self) -> bool:
        """Whether the open round has an update, and as many as its rule holds with: with fewer it closes never."""
        return len(self._open.taken) >= self.least

    @property
    def lacking(self) -> str:
        """What is said of a rule that does not hold with the updates that there are; nothing, if it does."""
        return "" if self.may_close or self.least == 1 else f", and robust.rule holds with {self.least} or more"

    def close(self) -> Closed:
        """Step the server with the updates that were taken, in the simulator's order."""
        if not self._is_committed:
            if self.away.any or self.noise is not None:
                self._seal()
            server, number, uploads = self._server, self._open.number, self._joined()
            state = server.state if uploads is None else server.updated(server.state, uploads, number)
            self._commit(state, uploads, number + 1)
        return self._closed()

    def _seal(self) -> None:
        """Take nothing more in the open round, and note who trains in it without contact."""
        going = self._open
        if not going.sealed:
            offline = self.away.drawn(self._server.roster.seen, going.taken, self._latest, going.number)
            noted: dict[str, Any] = {"offline": offline} if offline else {}
            noted |= {} if self.noise is None else self.noise.charge(self._server.state)
            self.journal.write("sealed", round=going.number, taken=sorted(going.taken), **noted)
            self.away.note(offline, going.number)
            going.sealed = True

    def _joined(self) -> Reduced | None:
        return joined(self._server, self._updates, self._open.taken, self._likes, self._open.number)

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
        loss = uploads.loss() if uploads is not None and taken and not self.recipe.sample_privacy else None
        met = fates(state, taken, self._server.roster)
        self.last = Closed(going.number, taken, len(going.cohort), loss, met)

    def _closed(self) -> Closed:
        """Say that the open round is closed, and remove its updates."""
        closed = self.last
        assert closed is not None
        self._updates.clear()
        self.journal.write("closed", **closed.facts)
        self.open = None
        return closed

    def final(self) -> Letters:
        """Return what devices are sent after the last round, whole; the run's results are written with it."""
        if self._final is None:
            self._refresh()
            letters, private = Letters(self._server), {} if self.noise is None else {"privacy": self.noise.facts()}
            done: dict[str, Any] = {"rounds": self.done, "devices": len(self.members), **private}
            write_results(self.directory.path, self._base, letters, **done)
            self._final = letters
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
        folder = self.directory.path / "updates"
        with storage(folder):
            folder.mkdir(mode=0o700, exist_ok=True)
        self._updates, before = Updates(folder), History.of(entries)
        self.members, self._latest, self.last = before.members, before.latest, before.last
        self.away = Away(self.recipe, before.away, before.latest)
        if self.recipe.privacy is not None:
            self.noise = Noise(self.recipe, self.directory.path, entries)
            self._base = self.noise.private(self._base)
            self.journal.follow(self.noise.hear, past=False)
        complete_roll_back(self)
        checkpoint = self.checkpoint()
        if checkpoint.rounds and not (before.begun and before.opened):
            raise self.cut_off(checkpoint)
        if not before.begun:
            return
        self.served = standardised(self.recipe, before.moments)
        self.done = checkpoint.rounds
        self._side = self._serving(kept_state(self.directory, checkpoint))
        if before.opened.get("round") == self.done:
            self._start_round(tuple(before.opened["cohort"]), before.opened["wanted"])
            self._updates.begin(self.done, before.accepted)
            self._open.taken = before.taken.get(self.done, {})
            self._open.sealed = before.sealed == self.done
            self._open.handed = before.handed
        elif (unsaid := before.unsaid(self.done)) is not None:
            self.last = dataclasses.replace(unsaid, met=fates(self._server.state, unsaid.taken, self._server.roster))
            self._closed()
        else:
            self._updates.clear()

    def _start_round(self, cohort: tuple[int, ...], wanted: int) -> None:
        self._updates.begin(self.done)
        self.open = Open(self.done, cohort, wanted, Letters(self._server))

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
