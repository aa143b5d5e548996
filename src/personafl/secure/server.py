"""The server's part of the protocol: it collects what clients say, stage by stage, and opens the sum.

It holds no vector but the sum so far: each that arrives is added to it. With U the survivors and D those who shared
keys and sent no vector,

    Σ_{u∈U} x_u = Σ_{u∈U} y_u − Σ_{u∈U} PRG(b_u) − Σ_{u∈U, v∈D neighbours} ±PRG(s_uv)   mod 2³².

Nothing here waits: whoever has a clock closes the stages. What one client says that is wrong is refused to it, and it
is as if it had said nothing; a stage that leaves too few ends the session.
"""

import hashlib
from collections.abc import Collection
from enum import IntEnum

import numpy as np

from personafl.secure import masks, shamir
from personafl.secure.client import check_roster, check_survivors, holder_of, pairwise, unique
from personafl.secure.credentials import Authority
from personafl.secure.faults import Breach, Fault
from personafl.secure.fixed import Vector
from personafl.secure.graph import Degree, neighbours
from personafl.secure.masks import KEY_BYTES
from personafl.secure.messages import (
    Consent,
    Consents,
    Inbox,
    Kept,
    Keys,
    Masked,
    Opened,
    Roster,
    Sealed,
    Session,
    Shares,
    Survivors,
    decoded,
)

Said = Keys | Sealed | Masked | Consent | Opened
Answer = Roster | Inbox | Survivors | Consents


class Stage(IntEnum):
    """What is being collected."""

    KEYS = 0
    SHARES = 1
    VECTORS = 2
    CONSENTS = 3
    OPENINGS = 4
    DONE = 5


_STAGE_OF: dict[type[Said], Stage] = {
    Keys: Stage.KEYS,
    Sealed: Stage.SHARES,
    Masked: Stage.VECTORS,
    Consent: Stage.CONSENTS,
    Opened: Stage.OPENINGS,
}


class Aggregation:
    """One session of the server with some clients."""

    def __init__(self, session: Session, clients: Collection[int], authority: Authority) -> None:
        self.session, self._authority = session, authority
        self.stage = Stage.KEYS
        self._expected = frozenset(clients)  # who may speak in this stage
        self._heard: dict[int, bytes] = {}  # who has spoken in it -> the digest of what it said
        self._roster = Roster(())
        self._degree = Degree(0, 0)
        self._keys: dict[int, Keys] = {}
        self._near: dict[int, frozenset[int]] = {}
        self._sealed: dict[int, dict[int, bytes]] = {}  # sender -> receiver -> share
        self._survivors = Survivors((), ())
        self._consents: dict[int, Consent] = {}
        self._opened: dict[int, Opened] = {}
        self._sum: Vector = np.zeros(session.length, dtype="<u4")

    @property
    def awaited(self) -> frozenset[int]:
        """Who may still say something in this stage."""
        return self._expected - self._heard.keys()

    @property
    def heard(self) -> frozenset[int]:
        """Who has said something in this stage."""
        return frozenset(self._heard)

    @property
    def survivors(self) -> tuple[int, ...]:
        """Whose vectors are in the sum."""
        return self._survivors.active

    def hear(self, said: Said) -> None:
        """Take what a client says, or refuse it; the same once more changes nothing."""
        stage, number = _STAGE_OF[type(said)], said.number
        if stage is not self.stage:
            raise Breach(Fault.OUT_OF_ORDER, f"client {number} speaks in stage {stage.name}, not {self.stage.name}")
        if number not in self._expected:
            raise Breach(Fault.STRANGER, f"client {number} does not take part in stage {stage.name}")
        digest = hashlib.sha256(said.encoded()).digest()
        if number in self._heard:
            if self._heard[number] != digest:
                raise Breach(Fault.DUPLICATE, f"client {number} said something else in stage {stage.name} before")
            return
        match said:
            case Keys():
                self._hear_keys(said)
            case Sealed():
                self._hear_shares(said)
            case Masked():
                self._hear_vector(said)
            case Consent():
                content = self._survivors.content(self.session, self._roster)
                self._authority.check(number, self._keys[number].certificate, content, said.signature)
                self._consents[number] = said
            case Opened():
                self._hear_opening(said)
        self._heard[number] = digest

    def close(self) -> Stage:
        """Close a stage with what was said in it; return the next one."""
        heard = sorted(self._heard)
        if len(heard) < self.session.least and self.stage < Stage.OPENINGS:
            least = self.session.least
            raise Breach(
                Fault.TOO_FEW, f"{len(heard)} clients in stage {self.stage.name}, and at least {least} must be"
            )
        match self.stage:
            case Stage.KEYS:
                self._roster = Roster(tuple(self._keys[number] for number in heard))
                check_roster(self._roster)
                self._degree = self.session.degree(len(heard))
                self._near = neighbours(self._roster.digest, heard, self._degree.neighbours)
            case Stage.VECTORS:
                self._survivors = Survivors(tuple(heard), tuple(sorted(self._expected - set(heard))))
                check_survivors(self._survivors, set(self._keys), self.session)
            case Stage.OPENINGS:
                self._unmask()
            case Stage.DONE:
                raise Breach(Fault.OUT_OF_ORDER, "the sum is open")
        self.stage = Stage(self.stage + 1)
        self._expected, self._heard = frozenset(heard), {}
        return self.stage

    def answer(self, number: int) -> Answer:
        """Return what a client that spoke in the stage before is told."""
        if number not in self._expected:
            raise Breach(Fault.STRANGER, f"client {number} has dropped out")
        match self.stage:
            case Stage.SHARES:
                return self._roster
            case Stage.VECTORS:
                senders = sorted(self._near[number] & self._expected)
                return Inbox(tuple((sender, self._sealed[sender][number]) for sender in senders))
            case Stage.CONSENTS:
                return self._survivors
            case Stage.OPENINGS:
                return Consents(tuple(self._consents[giver] for giver in sorted(self._consents)))
        raise Breach(Fault.OUT_OF_ORDER, f"nothing is told in stage {self.stage.name}")

    def total(self) -> Vector:
        """Return the sum of the survivors' vectors, modulo 2³²."""
        if self.stage is not Stage.DONE:
            raise Breach(Fault.OUT_OF_ORDER, "the sum is not open")
        return self._sum

    def saved(self) -> bytes:
        """Return the session at the beginning of its last stage: a server that is killed in it must go on with that.

        Clients that have opened seeds for a sum never mask the same vector again, for another one.
        """
        if self.stage is not Stage.OPENINGS:
            raise Breach(Fault.OUT_OF_ORDER, "a session is kept when seeds begin to be opened")
        consents = Consents(tuple(self._consents[giver] for giver in sorted(self._consents)))
        kept = Kept(self.session, self._roster, self._survivors, consents).encoded()
        return len(kept).to_bytes(8) + kept + self._sum.tobytes()

    @classmethod
    def restored(cls, data: bytes, authority: Authority) -> "Aggregation":
        """Return a session that was saved; what was opened is to be heard again."""
        size = 8 + int.from_bytes(data[:8])
        kept = decoded(Kept, data[8:size])
        made = cls(kept.session, (), authority)
        made._roster, made._keys = kept.roster, {keys.number: keys for keys in kept.roster.keys}
        made._degree = kept.session.degree(len(made._keys))
        made._near = neighbours(kept.roster.digest, sorted(made._keys), made._degree.neighbours)
        made._survivors = kept.survivors
        made._consents = {consent.number: consent for consent in kept.consents.consents}
        made._sum = Masked.decoded(0, data[size:]).vector.copy()
        made.stage, made._expected = Stage.OPENINGS, frozenset(made._consents)
        return made

    def _hear_keys(self, keys: Keys) -> None:
        if {len(keys.sealing), len(keys.masking), len(keys.commitment)} != {KEY_BYTES}:
            raise Breach(Fault.BAD_KEY, f"client {keys.number}: a key has {KEY_BYTES} bytes")
        self._authority.check(keys.number, keys.certificate, keys.content(self.session), keys.signature)
        check_roster(Roster(tuple(sorted([*self._keys.values(), keys], key=lambda one: one.number))))
        self._keys[keys.number] = keys

    def _hear_shares(self, sealed: Sealed) -> None:
        shares = dict(unique(sealed.shares))
        if sealed.number in shares:
            raise Breach(Fault.SELF_LOOP, f"client {sealed.number} sends a share to itself")
        if shares.keys() != self._near[sealed.number]:
            raise Breach(Fault.STRANGER, f"client {sealed.number} sends shares to others than its neighbours")
        self._sealed[sealed.number] = shares

    def _hear_vector(self, masked: Masked) -> None:
        if masked.vector.shape != (self.session.length,):
            raise Breach(Fault.BAD_LENGTH, f"{masked.vector.shape} entries, not {self.session.length}")
        np.add(self._sum, masked.vector, out=self._sum)

    def _hear_opening(self, opened: Opened) -> None:
        own, keys = dict(unique(opened.own)), dict(unique(opened.keys))
        near, active = self._near[opened.number], set(self._survivors.active)
        if both := own.keys() & keys.keys():
            raise Breach(Fault.BOTH_LISTS, f"client {opened.number} opens both seeds of client {min(both)}")
        if strangers := (own.keys() | keys.keys()) - near:
            text = f"client {opened.number} has no share of client {min(strangers)}, and sends one"
            raise Breach(Fault.STRANGER, text)
        if own.keys() != near & active or keys.keys() != near & set(self._survivors.dropped):
            raise Breach(Fault.BAD_SHARE, f"client {opened.number} opens others than the survivors' list says")
        self._opened[opened.number] = opened

    def _unmask(self) -> None:
        """Take all masks off the sum."""
        active, plus, minus = set(self._survivors.active), list[bytes](), list[bytes]()
        for number in self._survivors.active:
            seed = self._joined(number, [(giver.number, giver.own) for giver in self._opened.values()])
            if hashlib.sha256(seed).digest() != self._keys[number].commitment:
                raise Breach(Fault.BAD_SHARE, f"the shares of client {number} give another seed than its own")
            minus.append(seed)
        for number in self._survivors.dropped:
            if not (left := self._near[number] & active):
                continue
            private = self._joined(number, [(giver.number, giver.keys) for giver in self._opened.values()])
            if masks.public_of(private) != self._keys[number].masking:
                raise Breach(Fault.BAD_SHARE, f"the shares of client {number} give another key than its own")
            for other in left:
                seed = pairwise(self.session, private, self._keys[other].masking, number, other)
                (minus if number > other else plus).append(seed)  # what `other` added, or took off
        masks.add_streams(self._sum, plus, minus)

    def _joined(self, number: int, given: list[tuple[int, Shares]]) -> bytes:
        """Return a seed of a client from the shares that its neighbours gave."""
        shares = {holder_of(giver): share for giver, own in given for whose, share in own if whose == number}
        threshold = self._degree.threshold
        if len(shares) < threshold:
            raise Breach(Fault.TOO_FEW, f"{len(shares)} shares of client {number}, and {threshold} are needed")
        try:
            return shamir.join({holder: shares[holder] for holder in sorted(shares)[:threshold]}, threshold)
        except ValueError as error:
            raise Breach(Fault.BAD_SHARE, f"client {number}: {error}") from error
