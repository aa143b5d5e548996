"""The rounds of a server that may get devices of others, which are out for good.

Such a device keeps its state. Where servers have a model of their own with something of every device in it, it
introduces itself, and counts from the next round on: what it sent is in `moved/NUMBER.safetensors`, and is put into
the state again when a server starts again before that round is done.
"""

from dataclasses import asdict
from pathlib import Path

import numpy as np

from personafl.core import wire
from personafl.deploy.net.identity import Identity
from personafl.deploy.net.messages import Hello, Moved, Welcome, digest_of
from personafl.deploy.net.payload import opened_update
from personafl.deploy.server.moving import Group
from personafl.deploy.server.rounds import Rounds
from personafl.deploy.server.updates import still_there
from personafl.recipe.cloud import CloudSection
from personafl.recipe.recipe import Recipe
from personafl.simulate.serverside import ServerSide
from personafl.storage.files import atomic_write, storage


class Adopting(Rounds):
    """A run on the side of one server of a cloud, as far as devices of others are concerned."""

    def __init__(self, recipe: Recipe, path: Path, cloud: CloudSection) -> None:
        self._cloud = cloud
        self.adopted: dict[str, Group] = {}  # devices of servers that are out, by name
        self._introduced: dict[int, str | None] = {}  # number -> digest of what such a device has sent
        self._admitted: dict[int, int] = {}  # number -> the round from which on it counts
        super().__init__(recipe, path)

    def adopt(self, groups: list[Group]) -> None:
        """Let devices of another server come here."""
        for group in groups:
            if not self.adopted.keys() >= set(group.names):
                self.journal.write("adopted", **asdict(group))
                self.adopted |= dict.fromkeys(group.names, group)

    def welcome(self, identity: Identity) -> Welcome:
        """Return which run a device's state belongs to, and what counts of it if another server had it; or refuse."""
        group = self.adopted.get(identity.name)
        if group is None:
            return super().welcome(identity)
        if identity.number in self.members:
            return Welcome(run=group.run, home=self.run)
        had = identity.number in group.had
        moved = Moved(counted=group.counted, had=had, introduce=self._introduces)
        return Welcome(run=group.run, moved=moved, home=self.run)

    @property
    def _introduces(self) -> bool:
        """Whether a device that comes from another server must introduce itself."""
        return not self._cloud.shared and self._base.algorithm.server.admit is not None

    def hello_bytes(self, identity: Identity) -> int:
        """Return how much a device may send when it enrols."""
        return self.payload_bytes if identity.name in self.adopted else super().hello_bytes(identity)

    def enrol(self, identity: Identity, hello: Hello, sums: bytes = b"") -> None:
        """Take a device in; one of another server introduces itself, and counts from the next round on."""
        number, member = identity.number, self.candidate(identity, hello)
        assert number is not None
        if identity.name in self.adopted and self._introduces and number not in self._introduced:
            if sums:
                opened_update(sums, self._likes[member.profile], self._declared, self.section.norm_bound)
                with storage(self.directory.path):
                    self._introduction(number).parent.mkdir(mode=0o700, exist_ok=True)
                atomic_write(self._introduction(number), sums)
            digest = digest_of(sums) if sums else None
            self.journal.write("introduced", number=number, digest=digest)
            self._introduced[number] = digest
        super().enrol(identity, hello)

    def here(self, number: int) -> bool:
        """Say whether a device may take part; not before it counts, nor in a round that it had elsewhere."""
        if number in self._introduced and number not in self._admitted:
            return False
        return super().here(number) and self._follows(number)

    @property
    def expecting(self) -> bool:
        """Whether a device of another server did not come yet, or came and was not told yet that all is done."""
        came = {member.name: member for member in self.members.values()}
        return any(
            name not in came or (came[name].here and came[name].number not in self.revoked) for name in self.adopted
        )

    def _follows(self, number: int) -> bool:
        """Say whether the present round comes after all that a device had elsewhere: no batches are drawn again."""
        group = self.adopted.get(self.members[number].name)
        return group is None or group.counted <= self.done

    def counted(self, number: int) -> int:
        """Return the number of rounds after which no update of a device was accepted, here or where it was before."""
        group = self.adopted.get(self.members[number].name)
        return super().counted(number) if group is None or number in self._latest else group.counted

    def _admit(self) -> None:
        """Count the devices that have introduced themselves, from the round on that is opened now."""
        introduced = self._introduced.keys() & self.members.keys() - self._admitted.keys()
        new = sorted(filter(self._follows, introduced))
        if new:
            self.journal.write("admitted", round=self.done, numbers=new)
            self._admitted |= dict.fromkeys(new, self.done)
            self._refresh()
            self._take_in(self._server)

    def _take_in(self, side: ServerSide) -> None:
        """Put those into a server's state that count from the present round on."""
        for number in sorted(number for number, at in self._admitted.items() if at == self.done):
            digest, upload = self._introduced[number], None
            if digest is not None:
                data = still_there(self._introduction(number), digest)
                upload = wire.dense(wire.decode(data, wire.dense(self._likes[self.members[number].profile])))
            weight = float(side.roster.weights_of(np.array([number]))[0])
            assert side.rule.admit is not None
            side.state = side.checked(side.rule.admit(side.state, weight, upload), self.done)

    def _introduction(self, number: int) -> Path:
        return self.directory.path / "moved" / f"{number:06d}.safetensors"

    def _replay(self) -> None:
        for entry in self.journal.entries:
            match entry["event"]:
                case "adopted":
                    self.adopted |= dict.fromkeys(entry["names"], Group.read(entry))
                case "introduced":
                    self._introduced[entry["number"]] = entry["digest"]
                case "admitted":
                    self._admitted |= dict.fromkeys(entry["numbers"], entry["round"])
        super()._replay()

    def _serving(self, server: bytes | None = None) -> ServerSide:
        side = super()._serving(server)
        if server is not None:
            self._take_in(side)
        return side

    def open_next(self) -> None:
        """Begin a round, also with those that have introduced themselves."""
        self._admit()
        super().open_next()
