"""Rounds whose updates are summed unseen: a server has masked vectors, and of updates nothing but their sum.

    updates/ROUND.session            the session whose seeds are being opened: the masked sum, and whose it is
    updates/ROUND-NUMBER.opened      what a device has opened

A session that cannot go on is begun anew, with fresh keys and a fresh graph, as long as nothing of it was opened: until
then it is in memory alone. Then it goes on where it was, also after a kill; where too few are left to open it, the
round is closed without updates, for devices mask none of theirs a second time.
"""

import dataclasses
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from personafl.core import wire
from personafl.core.algorithm import Reduced, mean_dtypes
from personafl.core.tree import Tree
from personafl.deploy.net.identity import Identity
from personafl.deploy.net.messages import Accepted, Code, Message, Refused
from personafl.deploy.net.stages import Begin, Follow, Say, Try
from personafl.deploy.server.history import Closed, check_admitted
from personafl.deploy.server.rounds import Rounds
from personafl.privacy import distributed
from personafl.privacy.distributed import in_clips, lattice_for
from personafl.recipe.recipe import Recipe
from personafl.runs.private import check_sums
from personafl.secure.credentials import Authority
from personafl.secure.faults import Breach
from personafl.secure.fixed import Grid, unwrapped
from personafl.secure.messages import Consent, Keys, Masked, Opened, Sealed, Session, decoded
from personafl.secure.server import Aggregation, Stage
from personafl.secure.uploads import length_of, total_of
from personafl.storage.files import atomic_write

_SAID: dict[Stage, type[Any]] = {
    Stage.KEYS: Keys,
    Stage.SHARES: Sealed,
    Stage.CONSENTS: Consent,
    Stage.OPENINGS: Opened,
}
_SMALL = 2**12  # bytes that a device may say in a stage, and for each of the cohort


@dataclass(frozen=True)
class Ended:
    """How a try ended that gave no sum: why, and whether the round can be tried again."""

    why: str
    again: bool


class SummedRounds(Rounds):
    """A run of which the server sees sums."""

    def __init__(self, recipe: Recipe, path: Path, authority: Authority) -> None:
        self._authority = authority
        self._session: Aggregation | None = None
        assert recipe.secure is not None
        self._secure = recipe.secure
        super().__init__(recipe, path)
        self._upload = wire.dense(self._likes[0])  # for its structure
        self._length = length_of(self._upload)
        if recipe.privacy is not None:
            self._length = distributed.length_of(self._upload)
            check_sums(self._base.algorithm, self._upload)
        self.payload_bytes = max(self.payload_bytes, 4 * self._length)

    # A try

    def try_now(self) -> None:
        """Begin a try to sum the open round, or go on with the one that was being opened."""
        going, roster = self._open, self._server.roster
        if self._path.exists():
            self._session = Aggregation.restored(self._path.read_bytes(), self._authority)
            for path in sorted(self._path.parent.glob(f"{going.number:06d}-*.opened")):
                self._session.hear(decoded(Opened, path.read_bytes()))
            return
        clients = len(going.cohort)
        exact = self.recipe.federation.sampling == "exact"
        weights = roster.weights_of(roster.seen)
        grid = Grid(clients if exact else max(clients, len(roster.seen)), float(weights.max()), self._secure.range)
        session = Session(
            run=self.run,
            round=going.number,
            attempt=f"{self.journal.length:016x}{secrets.token_hex(8)}",  # devices go from one to a larger one
            model=going.letters.digest,
            least=self._secure.survivors(clients),
            corrupt=self._secure.corrupted(clients),
            length=self._length,
            grid=grid,
        )
        self._session = Aggregation(session, going.cohort, self._authority)
        self.journal.write("tried", round=going.number, attempt=session.attempt, clients=clients)

    @property
    def stage(self) -> Stage:
        """The stage that is open."""
        return self._try.stage

    @property
    def all_heard(self) -> bool:
        """Whether nobody is waited for in the open stage."""
        return not any(map(self.here, self._try.awaited))

    @property
    def enough_heard(self) -> bool:
        """Whether the open stage has as many as the sum must have."""
        return len(self._try.heard) >= self._try.session.least

    def close_stage(self) -> Ended | None:
        """Close the open stage; return why the try has ended, if it has."""
        session, opening = self._try, self._try.stage is Stage.OPENINGS
        try:
            session.close()
        except Breach as breach:
            self.journal.write(
                "broken", durable=False, round=self._open.number, stage=session.stage.name, why=str(breach)
            )
            return Ended(str(breach), again=not opening)
        if session.stage is Stage.OPENINGS:
            atomic_write(self._path, session.saved())
        return None

    # What devices say

    def offered(self, identity: Identity, begin: Begin) -> Try | Accepted | None:
        """Return what a device with an update that waits is told; None: to wait."""
        number = self._known(identity)
        latest = self._latest.get(number)
        if latest is not None and latest[0] == begin.round and begin.round < self.done:
            return Accepted(before=True)
        going, session = self.open, self._session
        if begin.round < self.done or self.finished:
            raise Refused(Code.ROUND_CLOSED, f"round {begin.round + 1} is over")
        if going is None or begin.round != going.number:
            raise Refused(Code.WRONG_ROUND, f"round {begin.round + 1} is not open")
        if not going.selected(number):
            raise Refused(Code.NOT_SELECTED, f"device {number} is not selected in round {begin.round + 1}")
        if begin.model != going.letters.digest:
            raise Refused(Code.WRONG_MODEL, "it was trained from another broadcast")
        if session is None or session.stage is not Stage.KEYS or number not in session.awaited:
            return None
        made = session.session
        return Try(attempt=made.attempt, clients=len(going.cohort), most=made.grid.clients, weight=made.grid.weight)

    def room(self, identity: Identity, say: Say) -> int:
        """Return how much a device may say now, or refuse it."""
        self._known(identity)
        session = self._of(say)
        if say.stage == Stage.VECTORS:
            return 4 * session.session.length
        return _SMALL * (2 + len(self._open.cohort))

    def say(self, identity: Identity, say: Say, payload: bytes) -> None:
        """Hear what a device says in a stage, or refuse it."""
        number, session = self._known(identity), self._of(say)
        try:
            stage = Stage(say.stage)
            masked = stage is Stage.VECTORS
            said = Masked.decoded(number, payload) if masked else decoded(_SAID[stage], payload)
            if said.number != number:
                raise Refused(Code.BREACH, f"{identity.name} speaks for client {said.number}")
            new = number not in session.heard
            session.hear(said)
            if stage is Stage.OPENINGS and new:
                atomic_write(self._path.with_name(f"{self._open.number:06d}-{number:06d}.opened"), payload)
        except Breach as breach:
            raise Refused(Code.BREACH, str(breach)) from breach

    def followed(self, identity: Identity, follow: Follow) -> bytes | None:
        """Return what a device is told after a stage; None: it is not over."""
        number, session = self._known(identity), self._of(follow)
        if session.stage <= follow.stage:
            return None
        try:
            if session.stage != follow.stage + 1:
                raise Refused(Code.OTHER_TRY, f"stage {session.stage.name} has begun without device {number}")
            return session.answer(number).encoded()
        except Breach as breach:
            raise Refused(Code.OTHER_TRY, str(breach)) from breach

    def is_ready(self, message: Message, number: int) -> bool:
        """Say whether there is something to answer a device that waits."""
        session = self._session
        if isinstance(message, Follow):
            return session is None or session.session.attempt != message.attempt or session.stage > message.stage
        if session is None or self.open is None or not isinstance(message, Begin) or message.round != self.open.number:
            return self.open is not None or self.finished
        return session.stage is Stage.KEYS and number in session.awaited

    def _of(self, message: Say | Follow) -> Aggregation:
        session = self._session
        if session is None or self.open is None or message.attempt != session.session.attempt:
            raise Refused(Code.OTHER_TRY, "that try is over")
        return session

    def _known(self, identity: Identity) -> int:
        number = identity.number
        if number is None or number not in self.members:
            raise Refused(Code.NOT_ENROLLED, f"{identity.name} did not say hello")
        check_admitted(self.members[number])
        return number

    # The end of a round

    def take_sum(self) -> None:
        """Note whose updates are in the sum that is open now."""
        session, going = self._try, self._open
        digest = session.session.digest.hex()
        if not going.taken:
            whose = [(number, self.members[number].name) for number in session.survivors]
            facts = [{"round": going.number, "number": n, "name": name, "digest": digest} for n, name in whose]
            self.journal.write_all("accepted", facts)
        for number in session.survivors:
            going.taken[number] = digest
            self._latest[number] = (going.number, digest)

    def _joined(self) -> Reduced | None:
        """Return the sum of the updates; None: it could not be opened."""
        session = self._session
        if session is None or session.stage is not Stage.DONE:
            return None
        total = self._total(session)
        weight = self._server.weighing(np.array(session.survivors, dtype=np.int64)).to(torch.float64).sum()
        return Reduced(total, weight, len(session.survivors), mean_dtypes(self._upload))

    def _total(self, session: Aggregation) -> Tree:
        """Return the sum of a session like an upload; with noise in it, in units of the clip and without a loss."""
        made, privacy = session.session, self.recipe.privacy
        if privacy is None:
            return total_of(session.total(), self._upload, made.grid)
        assert privacy.noise is not None  # as the recipe was checked
        lattice = lattice_for(privacy.noise, made.grid.clients, made.least - made.corrupt, made.length)
        whole, unknown = torch.from_numpy(unwrapped(session.total())), torch.tensor(float("nan"), dtype=torch.float64)
        return in_clips(whole, self._upload, unknown, lattice)

    def _commit(self, state: Tree, uploads: Reduced | None, following: int) -> None:
        super()._commit(state, uploads, following)
        if self.recipe.privacy is not None and self.last is not None:
            self.last = dataclasses.replace(self.last, loss=None)  # no device has told its own

    def _leave_out(self, number: int, **facts: Any) -> None:
        """Note that a device is dropped; what it has masked stays in a sum that is being opened."""
        self.journal.write("dropped", number=number, without=None, **facts)

    def _closed(self) -> Closed:
        self._session = None
        return super()._closed()

    @property
    def _try(self) -> Aggregation:
        assert self._session is not None
        return self._session

    @property
    def _path(self) -> Path:
        return self.directory.path / "updates" / f"{self._open.number:06d}.session"
