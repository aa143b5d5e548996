"""Protocols that are wrong in one thing each: whoever notices first refuses it, by its name."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
from people import NOW, Round, authority, person, session_of, signed

from personafl.secure.client import Client
from personafl.secure.credentials import Credentials
from personafl.secure.faults import Breach, Fault
from personafl.secure.messages import Consents, Inbox, Keys, Masked, Opened, Roster, Survivors
from personafl.secure.server import Stage

FIVE = session_of(5, least=4)


def refused(fault: Fault, step: Callable[[], object]) -> None:
    with pytest.raises(Breach) as raised:
        step()
    assert raised.value.fault is fault


def going(stage: Stage, silent: int | None = None) -> Round:
    """Return five clients at the beginning of a stage, one of whom may have sent no vector."""
    return Round(FIVE, range(5)).at(stage, gone={} if silent is None else {Stage.VECTORS: [silent]})


# What a server may do to a client


def test_a_client_in_both_lists() -> None:
    r = going(Stage.CONSENTS, silent=2)
    refused(Fault.BOTH_LISTS, lambda: r.step(0, Survivors((0, 1, 2, 3, 4), (2,))))


def test_a_replayed_key_of_an_earlier_round() -> None:
    """Who has opened a key of an earlier round could take its masks off: its signature names that round."""
    before = Round(session_of(5, least=4, round=2), range(5)).at(Stage.SHARES).server._roster
    r = going(Stage.SHARES)
    shown = tuple(before.keys[3] if keys.number == 3 else keys for keys in r.server._roster.keys)
    refused(Fault.BAD_SIGNATURE, lambda: r.step(0, Roster(shown)))


def test_a_key_of_another_try_of_the_same_round() -> None:
    before = Round(session_of(5, least=4, attempt="b" * 32), range(5)).at(Stage.SHARES).server._roster
    r = going(Stage.SHARES)
    shown = tuple(before.keys[3] if keys.number == 3 else keys for keys in r.server._roster.keys)
    refused(Fault.BAD_SIGNATURE, lambda: r.step(0, Roster(shown)))


def test_a_key_that_the_server_made() -> None:
    """With a certificate that it issued itself; with somebody's, but another's key; and with one that has ended."""
    r = going(Stage.SHARES)
    key = person(3).key
    for forged, fault in [
        (Credentials(signed("client 3", key, by="server"), key), Fault.BAD_CERTIFICATE),
        (Credentials(b"no certificate", key), Fault.BAD_CERTIFICATE),
        (Credentials(signed("server", key), key), Fault.BAD_CERTIFICATE),
        (Credentials(signed("client 4", key), key), Fault.BAD_CERTIFICATE),
        (Credentials(signed("client 3", key, ends=NOW - timedelta(days=1)), key), Fault.BAD_CERTIFICATE),
        (Credentials(person(3).certificate, person(4).key), Fault.BAD_SIGNATURE),
    ]:
        made = Client(FIVE, 3, forged, authority()).advertise()
        shown = Roster(tuple(made if keys.number == 3 else keys for keys in r.server._roster.keys))
        client = Round(FIVE, range(5))
        own = client.clients[0].advertise()
        shown = Roster((own, *shown.keys[1:]))
        refused(fault, lambda client=client, shown=shown: client.clients[0].share(shown))  # type: ignore[misc]


def test_a_key_that_was_changed_on_the_way() -> None:
    r = going(Stage.SHARES)
    keys = r.server._roster.keys
    shown = Roster((*keys[:3], replace(keys[3], masking=bytes(31) + b"\x05"), keys[4]))
    refused(Fault.BAD_SIGNATURE, lambda: r.step(0, shown))


def test_a_client_is_shown_other_keys_of_its_own() -> None:
    r = going(Stage.SHARES)
    keys = r.server._roster.keys
    mine = Client(FIVE, 0, person(0), authority()).advertise()
    refused(Fault.CHANGED_KEY, lambda: r.step(0, Roster((mine, *keys[1:]))))
    refused(Fault.CHANGED_KEY, lambda: going(Stage.SHARES).step(0, Roster(keys[1:])))


def test_a_self_loop() -> None:
    """A client's own keys as another's: it would share its seeds with itself, or mask with nothing."""
    r = going(Stage.SHARES)
    keys = r.server._roster.keys
    mirrored = replace(keys[1], sealing=keys[0].sealing, masking=keys[0].masking)
    refused(Fault.SELF_LOOP, lambda: r.step(0, Roster((keys[0], mirrored, *keys[2:]))))
    other = going(Stage.VECTORS)
    inbox = other.server.answer(0)
    assert isinstance(inbox, Inbox)
    refused(Fault.SELF_LOOP, lambda: other.step(0, Inbox((*inbox.shares, (0, inbox.shares[0][1])))))


def test_two_clients_with_one_key() -> None:
    r = going(Stage.SHARES)
    keys = r.server._roster.keys
    twin = replace(keys[2], masking=keys[1].masking)
    refused(Fault.REPEATED_KEY, lambda: r.step(0, Roster((*keys[:2], twin, *keys[3:]))))


def test_a_key_with_which_every_secret_is_the_same() -> None:
    r = Round(FIVE, range(5))
    own = r.clients[0].advertise()
    null = Client(FIVE, 1, person(1), authority()).advertise()
    null = replace(null, sealing=bytes(32), signature=b"")
    null = replace(null, signature=person(1).sign(null.content(FIVE)))
    others = [Client(FIVE, number, person(number), authority()).advertise() for number in (2, 3, 4)]
    refused(Fault.BAD_KEY, lambda: r.clients[0].share(Roster((own, null, *others))))


def test_too_few_to_begin_with() -> None:
    r = going(Stage.SHARES)
    refused(Fault.TOO_FEW, lambda: r.step(0, Roster(r.server._roster.keys[:3])))


def test_a_share_of_a_stranger() -> None:
    """Of somebody who is not in the round, and of somebody who is, but no neighbour."""
    r = going(Stage.VECTORS)
    inbox = r.server.answer(0)
    assert isinstance(inbox, Inbox)
    refused(Fault.STRANGER, lambda: r.step(0, Inbox((*inbox.shares, (77, inbox.shares[0][1])))))
    many = Round(session_of(12, least=10), range(12)).at(Stage.VECTORS)
    other = min(set(range(12)) - many.server._near[0] - {0})
    taken = many.server.answer(0)
    assert isinstance(taken, Inbox)
    refused(Fault.STRANGER, lambda: many.step(0, Inbox((*taken.shares, (other, taken.shares[0][1])))))


def test_a_share_of_somebody_else() -> None:
    """A neighbour's share under another's name, one that was meant for another, and one that was damaged."""
    r = going(Stage.VECTORS)
    mine, others = r.server.answer(0), r.server.answer(1)
    assert isinstance(mine, Inbox)
    assert isinstance(others, Inbox)
    moved = Inbox(((1, mine.shares[1][1]), *mine.shares[1:]))
    refused(Fault.BAD_SHARE, lambda: r.step(0, moved))
    meant = dict(others.shares)[2]
    refused(Fault.BAD_SHARE, lambda: going(Stage.VECTORS).step(0, Inbox(((2, meant), *mine.shares[2:]))))
    hit = mine.shares[0][1][:-1] + bytes([mine.shares[0][1][-1] ^ 1])
    refused(Fault.BAD_SHARE, lambda: going(Stage.VECTORS).step(0, Inbox(((1, hit), *mine.shares[1:]))))


def test_too_few_neighbours_with_shares() -> None:
    """Then nobody could open what is sent; and with none, no mask but its own would be on it."""
    r = going(Stage.VECTORS)
    refused(Fault.MISSING_SHARES, lambda: r.step(0, Inbox(())))


def test_too_few_survivors() -> None:
    r = going(Stage.CONSENTS)
    refused(Fault.TOO_FEW, lambda: r.step(0, Survivors((0,), (1, 2, 3, 4))))


def test_a_survivor_that_never_shared_its_keys() -> None:
    r = Round(FIVE, range(5)).at(Stage.CONSENTS, gone={Stage.SHARES: [4]})
    refused(Fault.NOT_A_PART, lambda: r.step(0, Survivors((0, 1, 2, 3, 4), ())))


def test_a_neighbour_of_which_nothing_is_said() -> None:
    refused(Fault.NOT_A_PART, lambda: going(Stage.CONSENTS).step(0, Survivors((0, 1, 2, 3), ())))


def test_a_survivor_is_said_to_have_dropped_out() -> None:
    """Its masking key would be opened, and then its own mask, with a list that others are shown."""
    refused(Fault.LEFT_OUT, lambda: going(Stage.CONSENTS).step(0, Survivors((1, 2, 3, 4), (0,))))


def test_survivors_from_elsewhere_and_twice() -> None:
    refused(Fault.STRANGER, lambda: going(Stage.CONSENTS).step(0, Survivors((0, 1, 2, 3, 4, 9), ())))
    refused(Fault.DUPLICATE, lambda: going(Stage.CONSENTS).step(0, Survivors((0, 1, 2, 3, 4, 4), ())))


def test_different_lists_for_different_clients() -> None:
    """The server shows client 0 that 4 survived, and the others that it dropped out: then it would get both seeds of
    4, but for the signatures of the others, which are not of the list that client 0 was shown.
    """
    r = going(Stage.CONSENTS)
    everyone, without = Survivors((0, 1, 2, 3, 4), ()), Survivors((0, 1, 2, 3), (4,))
    r.step(0, everyone)
    given = [r.step(number, without) for number in (1, 2, 3)]
    refused(Fault.OTHER_SURVIVORS, lambda: r.clients[0].open(Consents(tuple(given))))


def test_too_few_consents() -> None:
    r = going(Stage.OPENINGS)
    consents = r.server.answer(0)
    assert isinstance(consents, Consents)
    refused(Fault.TOO_FEW, lambda: r.step(0, Consents(consents.consents[:1])))


def test_a_consent_counted_twice() -> None:
    r = going(Stage.OPENINGS)
    consents = r.server.answer(0)
    assert isinstance(consents, Consents)
    refused(Fault.DUPLICATE, lambda: r.step(0, Consents((consents.consents[1],) * 3)))


def test_shares_asked_for_twice_with_other_lists() -> None:
    r = going(Stage.OPENINGS)
    consents = r.server.answer(0)
    r.step(0, consents)
    refused(Fault.OUT_OF_ORDER, lambda: r.step(0, consents))
    refused(Fault.OUT_OF_ORDER, lambda: r.clients[0].consent(Survivors((0, 1, 2, 3), (4,))))
    other = going(Stage.CONSENTS)
    other.step(0)
    refused(Fault.OUT_OF_ORDER, lambda: other.step(0, Survivors((0, 1, 2, 3), (4,))))


def test_two_vectors_under_the_same_keys() -> None:
    """Their difference would be seen in the clear."""
    r = going(Stage.VECTORS)
    inbox = r.server.answer(0)
    r.step(0, inbox)
    refused(Fault.OUT_OF_ORDER, lambda: r.step(0, inbox))


def test_stages_that_are_left_out_or_come_again() -> None:
    client = Round(FIVE, range(5)).clients[0]
    refused(Fault.OUT_OF_ORDER, lambda: client.share(Roster(())))
    r = going(Stage.SHARES)
    refused(Fault.OUT_OF_ORDER, r.clients[0].advertise)
    refused(Fault.OUT_OF_ORDER, lambda: r.clients[0].open(Consents(())))


def test_nothing_follows_what_was_refused() -> None:
    r = going(Stage.CONSENTS)
    right = r.server.answer(0)
    refused(Fault.LEFT_OUT, lambda: r.step(0, Survivors((1, 2, 3, 4), (0,))))
    refused(Fault.OUT_OF_ORDER, lambda: r.step(0, right))


def test_a_vector_of_another_length() -> None:
    r = going(Stage.VECTORS)
    inbox = r.server.answer(0)
    assert isinstance(inbox, Inbox)
    refused(Fault.BAD_LENGTH, lambda: r.clients[0].mask(inbox, np.zeros(6, dtype="<u4")))


# What a client may do to the server


def test_the_server_refuses_clients_that_are_wrong() -> None:
    r = Round(FIVE, range(5))
    stranger = Client(FIVE, 9, person(9), authority()).advertise()
    refused(Fault.STRANGER, lambda: r.server.hear(stranger))
    refused(Fault.OUT_OF_ORDER, lambda: r.server.hear(Masked(0, np.zeros(5, dtype="<u4"))))
    first = r.clients[0].advertise()
    refused(Fault.BAD_SIGNATURE, lambda: r.server.hear(replace(first, commitment=bytes(32))))
    refused(Fault.BAD_KEY, lambda: r.server.hear(replace(first, masking=b"short")))
    replayed = Client(session_of(5, least=4, round=2), 1, person(1), authority()).advertise()
    refused(Fault.BAD_SIGNATURE, lambda: r.server.hear(replayed))
    r.server.hear(first)
    other = Client(FIVE, 0, person(0), authority()).advertise()
    refused(Fault.DUPLICATE, lambda: r.server.hear(other))
    taken: Keys = replace(r.clients[1].advertise(), sealing=first.sealing)
    taken = replace(taken, signature=person(1).sign(taken.content(FIVE)))
    refused(Fault.REPEATED_KEY, lambda: r.server.hear(taken))


def test_the_server_refuses_shares_and_vectors_that_do_not_fit() -> None:
    r = going(Stage.SHARES)
    sealed = r.step(0)
    refused(Fault.STRANGER, lambda: r.server.hear(replace(sealed, shares=sealed.shares[1:])))
    refused(Fault.SELF_LOOP, lambda: r.server.hear(replace(sealed, shares=(*sealed.shares, (0, b"")))))
    r = going(Stage.VECTORS)
    refused(Fault.BAD_LENGTH, lambda: r.server.hear(Masked(0, np.zeros(4, dtype="<u4"))))
    refused(Fault.BAD_LENGTH, lambda: Masked.decoded(0, b"12345"))


def test_the_server_refuses_both_seeds_and_strangers_shares() -> None:
    r = going(Stage.OPENINGS, silent=2)
    opened: Opened = r.step(0)
    both = replace(opened, own=(*opened.own, opened.keys[0]))
    refused(Fault.BOTH_LISTS, lambda: r.server.hear(both))
    refused(Fault.STRANGER, lambda: r.server.hear(replace(opened, own=(*opened.own, (77, b"")))))
    refused(Fault.BAD_SHARE, lambda: r.server.hear(replace(opened, own=opened.own[1:])))


def test_a_forged_consent_is_refused_to_its_client_alone() -> None:
    r = going(Stage.CONSENTS)
    consent = r.step(0)
    refused(Fault.BAD_SIGNATURE, lambda: r.server.hear(replace(consent, number=1)))
    r.server.hear(consent)


@pytest.mark.parametrize("field", ["own", "keys"])
def test_a_wrong_share_opens_no_wrong_sum(field: str) -> None:
    r = going(Stage.OPENINGS, silent=2)
    for number in sorted(r.server.awaited):
        opened = r.step(number)
        shares = tuple((whose, share[:-1] + bytes([share[-1] ^ 1])) for whose, share in getattr(opened, field))
        r.server.hear(replace(opened, **{field: shares}) if number == 0 else opened)
    refused(Fault.BAD_SHARE, r.server.close)
    refused(Fault.OUT_OF_ORDER, r.server.total)


def test_a_sum_is_opened_once() -> None:
    r = going(Stage.VECTORS).run()
    refused(Fault.OUT_OF_ORDER, r.server.close)
    refused(Fault.OUT_OF_ORDER, lambda: r.server.answer(0))
