"""The client's part of the protocol: K. Bonawitz et al., *Practical Secure Aggregation for Privacy-Preserving Machine
Learning*, CCS 2017, with the check of consistency, over the graph of `graph`.

With b_u the seed of the client's own mask, s_uv the seed that it has with a neighbour v who shared keys, and x_u its
vector, it sends

    y_u = x_u + PRG(b_u) + Σ_{v > u} PRG(s_uv) − Σ_{v < u} PRG(s_uv)   mod 2³²

and, when enough neighbours have signed the same list of survivors, a share of b_v for each neighbour v in it, and a
share of v's masking key for each that dropped out: never both.

Each step is taken once, in this order; what is wrong raises a `Breach`, after which the machine does nothing more.

A vector is in one sum of its round and in no other, of which the difference would tell more. So a client that has
masked it in an earlier try goes on with another only where the sum of the first cannot be opened (`circle.Circle`).
"""

import hashlib
import secrets
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TypeVar

from personafl.secure import masks, shamir
from personafl.secure.circle import Circle
from personafl.secure.credentials import Authority, Credentials
from personafl.secure.faults import Breach, Fault
from personafl.secure.fixed import Vector
from personafl.secure.graph import Degree, neighbours
from personafl.secure.masks import SEED_BYTES
from personafl.secure.messages import (
    Consent,
    Consents,
    Inbox,
    Keys,
    Masked,
    Opened,
    Roster,
    Sealed,
    Session,
    Shares,
    Survivors,
)

T = TypeVar("T")


class Client:
    """A client in one session. Its secrets are drawn here, are nowhere else, and are never used for another."""

    def __init__(
        self,
        session: Session,
        number: int,
        credentials: Credentials,
        authority: Authority,
        before: Collection[Circle] = (),
    ) -> None:
        """Draw the secrets; `before` are the circles of earlier tries in which the vector of this round was masked."""
        self._session, self._number, self._before = session, number, tuple(before)
        self._credentials, self._authority = credentials, authority
        self._sealing, self._masking, self._own = (secrets.token_bytes(SEED_BYTES) for _ in range(3))
        self._stage: int | None = 0  # None: something was wrong
        self._roster = Roster(())
        self._degree = Degree(0, 0)
        self._near: dict[int, Keys] = {}  # neighbours
        self._held: dict[int, bytes] = {}  # neighbour -> the share of its own mask, and of its masking key
        self._survivors = Survivors((), ())

    @property
    def circle(self) -> Circle:
        """Who has shares of its seeds, once it has shared them."""
        return Circle(tuple(self._near), self._degree.threshold)

    def advertise(self) -> Keys:
        """Return the keys of this session."""
        return self._step(0, self._advertise)

    def share(self, roster: Roster) -> Sealed:
        """Return shares of both seeds for the neighbours that everyone's keys make."""
        return self._step(1, lambda: self._share(roster))

    def mask(self, inbox: Inbox, vector: Vector) -> Masked:
        """Return the vector under the masks of all neighbours that shared their keys; it is computed in its memory."""
        return self._step(2, lambda: self._mask(inbox, vector))

    def consent(self, survivors: Survivors) -> Consent:
        """Return the signature of a list of survivors, if it can be right."""
        return self._step(3, lambda: self._consent(survivors))

    def open(self, consents: Consents) -> Opened:
        """Return one share of each neighbour, if enough of them have signed the same list."""
        return self._step(4, lambda: self._open(consents))

    def _step(self, stage: int, step: Callable[[], T]) -> T:
        """Take a step, if it is the next one; whoever broke off stays so."""
        if self._stage != stage:
            raise Breach(Fault.OUT_OF_ORDER, f"client {self._number}: this step was taken, or is not the next one")
        self._stage = None
        done = step()
        self._stage = stage + 1
        return done

    def _advertise(self) -> Keys:
        public = masks.public_of(self._sealing), masks.public_of(self._masking)
        commitment = hashlib.sha256(self._own).digest()
        unsigned = Keys(self._number, self._credentials.certificate, *public, commitment, b"")
        self._keys = replace(unsigned, signature=self._credentials.sign(unsigned.content(self._session)))
        return self._keys

    def _share(self, roster: Roster) -> Sealed:
        mine = {self._keys.sealing, self._keys.masking}
        for keys in roster.keys:
            if keys.number != self._number and mine & {keys.sealing, keys.masking}:
                raise Breach(Fault.SELF_LOOP, f"client {keys.number} has a key of client {self._number}, who is asked")
        check_roster(roster)
        everyone = {keys.number: keys for keys in roster.keys}
        if everyone.get(self._number) != self._keys:
            raise Breach(Fault.CHANGED_KEY, f"client {self._number} advertised other keys than it is shown of itself")
        self._degree = self._session.degree(len(everyone))
        near = neighbours(roster.digest, sorted(everyone), self._degree.neighbours)[self._number]
        self._roster, self._near = roster, {number: everyone[number] for number in sorted(near)}
        for keys in self._near.values():
            self._check_signed(keys)
        for circle in self._before:
            self._check_closed(circle, everyone)
        holders = [holder_of(number) for number in self._near]
        own = shamir.split(self._own, holders, self._degree.threshold)
        masking = shamir.split(self._masking, holders, self._degree.threshold)
        sealed = []
        for number in self._near:
            content = own[holder_of(number)] + masking[holder_of(number)]
            nonce = secrets.token_bytes(masks.NONCE_BYTES)
            sealed.append((number, masks.seal(self._shared(self._number, number), nonce, content, b"shares")))
        return Sealed(self._number, tuple(sealed))

    def _check_signed(self, keys: Keys) -> None:
        self._authority.check(keys.number, keys.certificate, keys.content(self._session), keys.signature)

    def _check_closed(self, circle: Circle, everyone: dict[int, Keys]) -> None:
        """Refuse to mask the vector again while the sum of an earlier try may be opened."""
        here = [everyone[number] for number in circle.neighbours if number in everyone]
        if len(here) < circle.threshold:
            text = f"{len(here)} of {len(circle.neighbours)} neighbours of an earlier try take part in this one"
            raise Breach(Fault.SECOND_SUM, f"{text}, and {circle.threshold} must, or that one may be opened yet")
        for keys in here:
            self._check_signed(keys)

    def _shared(self, sender: int, receiver: int) -> bytes:
        """Return the key of what one neighbour seals for the other."""
        other = self._near[receiver if sender == self._number else sender]
        purpose = b"shares" + sender.to_bytes(8) + receiver.to_bytes(8)
        return masks.agreed(self._sealing, other.sealing, self._session.digest, purpose)

    def _mask(self, inbox: Inbox, vector: Vector) -> Masked:
        if vector.shape != (self._session.length,):
            raise Breach(Fault.BAD_LENGTH, f"{vector.shape} entries, and the session has {self._session.length}")
        for number, sealed in unique(inbox.shares):
            if number == self._number:
                raise Breach(Fault.SELF_LOOP, f"client {number} is sent a share of its own")
            if number not in self._near:
                raise Breach(Fault.STRANGER, f"client {number} is no neighbour, and sends a share")
            content = masks.unseal(self._shared(number, self._number), sealed, b"shares")
            if len(content) != 2 * shamir.SHARE_BYTES:
                raise Breach(Fault.BAD_SHARE, f"client {number} sends {len(content)} bytes as its shares")
            self._held[number] = content
        if len(self._held) < self._degree.threshold:
            raise Breach(
                Fault.MISSING_SHARES, f"{len(self._held)} neighbours sent shares, not {self._degree.threshold}"
            )
        above, below = [self._own], list[bytes]()
        for number in self._held:
            seed = pairwise(self._session, self._masking, self._near[number].masking, self._number, number)
            (above if number > self._number else below).append(seed)
        masks.add_streams(vector, above, below)
        return Masked(self._number, vector)

    def _consent(self, survivors: Survivors) -> Consent:
        active, dropped = set(survivors.active), set(survivors.dropped)
        check_survivors(survivors, {keys.number for keys in self._roster.keys}, self._session)
        if self._number not in active:
            raise Breach(Fault.LEFT_OUT, f"client {self._number} sent its vector, and is not among the survivors")
        near = set(self._near)
        if unknown := (active & near) - set(self._held):
            raise Breach(Fault.NOT_A_PART, f"client {min(unknown)} sent no shares, and is said to have survived")
        if unsaid := set(self._held) - active - dropped:
            raise Breach(Fault.NOT_A_PART, f"client {min(unsaid)} sent shares, and nothing is said of it")
        self._survivors = survivors
        return Consent(self._number, self._credentials.sign(survivors.content(self._session, self._roster)))

    def _open(self, consents: Consents) -> Opened:
        content, active = self._survivors.content(self._session, self._roster), set(self._survivors.active)
        signed = set()
        for number, signature in unique([(given.number, given.signature) for given in consents.consents]):
            if number in self._near:
                if number not in active:
                    raise Breach(Fault.STRANGER, f"client {number} has dropped out, and consents")
                try:
                    self._authority.check(number, self._near[number].certificate, content, signature)
                except Breach as breach:
                    text = f"client {number} was shown another list than client {self._number}"
                    raise Breach(Fault.OTHER_SURVIVORS, text) from breach
                signed.add(number)
        if len(signed) < self._degree.threshold:
            raise Breach(Fault.TOO_FEW, f"{len(signed)} neighbours have signed the list, not {self._degree.threshold}")
        size = shamir.SHARE_BYTES
        own = tuple((number, held[:size]) for number, held in sorted(self._held.items()) if number in active)
        keys = tuple((number, held[size:]) for number, held in sorted(self._held.items()) if number not in active)
        return Opened(self._number, own, keys)


def holder_of(number: int) -> int:
    """Return where the polynomials of seeds are looked at for a client: never at 0."""
    return number + 1


def pairwise(session: Session, private: bytes, public: bytes, one: int, other: int) -> bytes:
    """Return the seed of the mask that two clients have in common, from one's private and the other's public key."""
    low, high = sorted((one, other))
    return masks.agreed(private, public, session.digest, b"mask" + low.to_bytes(8) + high.to_bytes(8))


def unique(shares: Shares | list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """Return what is said of or by clients, of whom each may come once."""
    numbers = [number for number, _ in shares]
    if len(set(numbers)) != len(numbers):
        raise Breach(Fault.DUPLICATE, "a client comes twice in a list")
    return list(shares)


def check_roster(roster: Roster) -> None:
    """Refuse keys of which two clients have the same, or a client two."""
    numbers = [keys.number for keys in roster.keys]
    if numbers != sorted(set(numbers)) or min(numbers, default=0) < 0:
        raise Breach(Fault.DUPLICATE, "the clients of a roster are not in ascending order, each once")
    found = [key for keys in roster.keys for key in (keys.sealing, keys.masking)]
    if len(set(found)) != len(found):
        twice = {key for key in found if found.count(key) > 1}
        (*_, owner) = [keys.number for keys in roster.keys if twice & {keys.sealing, keys.masking}]
        raise Breach(Fault.REPEATED_KEY, f"client {owner} has the key of another")


def check_survivors(survivors: Survivors, everyone: set[int], session: Session) -> None:
    """Refuse lists of survivors and dropped clients that cannot be right, whoever looks at them."""
    active, dropped = set(survivors.active), set(survivors.dropped)
    if both := active & dropped:
        raise Breach(Fault.BOTH_LISTS, f"client {min(both)} is to be opened as survivor and as dropped")
    if len(active) != len(survivors.active) or len(dropped) != len(survivors.dropped):
        raise Breach(Fault.DUPLICATE, "a client comes twice in a list")
    if strangers := (active | dropped) - everyone:
        raise Breach(Fault.STRANGER, f"client {min(strangers)} advertised no keys, and is in a list")
    if len(active) < session.least:
        raise Breach(Fault.TOO_FEW, f"{len(active)} survivors, and a sum is of at least {session.least}")
