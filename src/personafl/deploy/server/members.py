"""Who takes part: devices that enrol, leave, are dropped by an operator, or whose certificates are revoked."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from personafl.data.moments import Sums
from personafl.deploy.net.identity import Identity
from personafl.deploy.net.messages import Code, Hello, Refused, Welcome
from personafl.deploy.server.history import Member, enrolling, opened_sums
from personafl.deploy.server.tally import Tallied
from personafl.recipe.recipe import Recipe
from personafl.storage.rundir import RunDirectory

_MOST_LEAVES = 1000  # of a device


class Members(Tallied):
    """The devices of a run, whose rounds a subclass has; `like` is what they send of their inputs, if anything."""

    run: str  # its name
    sums_bytes: int  # of what they send of their inputs, at most

    def __init__(self, recipe: Recipe, directory: RunDirectory, like: Sums | None) -> None:
        self.recipe = recipe
        self.members: dict[int, Member] = {}
        self.revoked: frozenset[int] = frozenset()  # numbers whose certificates are, by now
        self._like = like
        self._leaves: Counter[int] = Counter()  # how often each has left
        self._noted: set[int] = set()  # whose revocation the journal has
        super().__init__(directory)
        self._noted |= {entry["number"] for entry in self.journal.entries if entry["event"] == "revoked"}

    @property
    def begun(self) -> bool:
        """Whether there is a server state."""
        raise NotImplementedError

    def welcome(self, identity: Identity) -> Welcome:
        """Return which run a device's state belongs to, and what counts of it if another server had it; or refuse."""
        return Welcome(run=self.run)

    def hello_bytes(self, identity: Identity) -> int:
        """Return how much a device may send when it enrols."""
        return self.sums_bytes

    def here(self, number: int) -> bool:
        """Say whether a device may take part: it is enrolled, has not left, and is neither dropped nor revoked."""
        member = self.members.get(number)
        return member is not None and member.here and number not in self.revoked

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

    def candidate(self, identity: Identity, hello: Hello) -> Member:
        """Return the member that a device would be, or refuse it."""
        known = None if identity.number is None else self.members.get(identity.number)
        return enrolling(self.recipe, identity, hello, known)

    def leave(self, number: int, alone: Sequence[int] = ()) -> None:
        """Stop selecting a device; one that comes and goes all the time, and fills the journal, is not heard then.

        `alone` are the rounds that it has trained without contact at last.
        """
        if number in self.members and not self.members[number].left and self._leaves[number] < _MOST_LEAVES:
            self._leaves[number] += 1
            facts: dict[str, Any] = {"alone": list(alone)} if alone else {}
            self.journal.write("left", number=number, name=self.members[number].name, **facts)
            self._change(number, left=True)

    def drop(self, name: str, *, undo: bool = False, by: str = "") -> bool:
        """Leave a device out from now on, and what it sent in the open round; or let it in again.

        `by` is who wants that. Return whether it was so before.
        """
        member = next((member for member in self.members.values() if member.name == name), None)
        if member is None:
            raise Refused(Code.NOT_ENROLLED, f"{name} did not enrol here; personafl status says who did")
        if member.dropped is not undo:
            return True
        if undo:
            self.journal.write("readmitted", number=member.number, name=name, by=by)
        else:
            self._leave_out(member.number, name=name, by=by)
        self._change(member.number, dropped=not undo)
        return False

    def _leave_out(self, number: int, **facts: Any) -> None:
        """Note that a device is dropped, and what of it is left out."""
        raise NotImplementedError

    def note_revoked(self) -> None:
        """Write down whose certificates are revoked, each once."""
        for number in sorted(self.revoked):
            member = self.members.get(number)
            if member is not None and number not in self._noted:
                self.journal.write("revoked", number=number, name=member.name)
                self._noted.add(number)
        self._noted &= self.revoked  # who was let in again with another certificate may lose that too

    def _change(self, number: int, **facts: Any) -> None:
        self.members = {**self.members, number: dataclasses.replace(self.members[number], **facts)}
