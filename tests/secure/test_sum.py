"""Sums of the whole protocol, against sums of plain integers."""

import itertools
from collections.abc import Collection

import numpy as np
import pytest
from people import Round, session_of, total

from personafl.secure.faults import Breach, Fault
from personafl.secure.graph import Degree
from personafl.secure.messages import Inbox, Keys, Masked, Roster, Sealed, decoded
from personafl.secure.server import Aggregation, Stage


@pytest.mark.parametrize("clients", [2, 3, 5, 8])
def test_the_sum_is_that_of_the_vectors(clients: int) -> None:
    done = Round(session_of(clients, least=clients), range(clients)).run()
    np.testing.assert_array_equal(done.server.total(), total(done.vectors, range(clients)))
    assert done.server.survivors == tuple(range(clients))


@pytest.mark.parametrize("stage", list(Stage)[:5])
def test_whoever_drops_out_at_a_stage_is_left_out_as_a_whole(stage: Stage) -> None:
    """Of ten, three may go, at any stage; numbers are not places. From the fourth stage on the vector is in the sum."""
    numbers = [number * 7 + 3 for number in range(10)]
    done = Round(session_of(10), numbers).run(gone={stage: numbers[2:8:2]})
    left = [number for number in numbers if stage > Stage.VECTORS or number not in numbers[2:8:2]]
    assert done.server.survivors == tuple(left)
    np.testing.assert_array_equal(done.server.total(), total(done.vectors, left))


def test_one_may_go_while_seeds_are_opened_where_no_vector_may_be_missing() -> None:
    done = Round(session_of(4, least=4), range(4)).run(gone={Stage.OPENINGS: [1]})
    np.testing.assert_array_equal(done.server.total(), total(done.vectors, range(4)))


def test_dropouts_at_several_stages() -> None:
    gone = {Stage.KEYS: [0], Stage.SHARES: [4], Stage.VECTORS: [5], Stage.CONSENTS: [2], Stage.OPENINGS: [9]}
    done = Round(session_of(16, least=11), range(16)).run(gone=gone)
    left = [number for number in range(16) if number not in (0, 4, 5)]
    np.testing.assert_array_equal(done.server.total(), total(done.vectors, left))


@pytest.mark.parametrize("stage", list(Stage)[:5])
def test_one_more_than_may_go_ends_it(stage: Stage) -> None:
    with pytest.raises(Breach) as raised:
        Round(session_of(10), range(10)).run(gone={stage: range(4)})
    assert raised.value.fault is Fault.TOO_FEW


def test_a_sparse_graph_sums_too() -> None:
    """A few may go and none is corrupt: k is well below n − 1, and one that dropped out is not everyone's neighbour."""
    session = session_of(12, least=10, length=9)
    assert session.degree(12) == Degree(6, 4)
    done = Round(session, range(12)).run(gone={Stage.VECTORS: [7], Stage.OPENINGS: [11]})
    left = [number for number in range(12) if number != 7]
    np.testing.assert_array_equal(done.server.total(), total(done.vectors, left))


def sent(done: Round, numbers: Collection[int]) -> list[Masked]:
    return [done.step(number) for number in numbers]


def test_what_is_sent_tells_nothing_without_the_last_stage() -> None:
    """Neither a vector, nor the sum of any group of clients, is in what the server has before seeds are opened."""
    going = Round(session_of(4, least=3, length=64), range(4)).at(Stage.VECTORS)
    masked = sent(going, range(4))
    for group in itertools.chain.from_iterable(itertools.combinations(range(4), size) for size in range(1, 5)):
        seen = sum((masked[number].vector.astype(np.uint64) for number in group), np.zeros(64, np.uint64)) % 2**32
        assert (seen.astype(np.uint32) == total(going.vectors, group)).mean() < 0.5


def test_a_repeated_message_changes_nothing() -> None:
    going = Round(session_of(4, least=3), range(4)).at(Stage.VECTORS)
    for masked in sent(going, range(4)):
        going.server.hear(masked)
        going.server.hear(Masked.decoded(masked.number, masked.encoded()))
    going.server.close()
    done = going.run()
    np.testing.assert_array_equal(done.server.total(), total(done.vectors, range(4)))


def test_graphs_and_secrets_are_new_in_every_session() -> None:
    rounds = [Round(session_of(12, least=10, attempt=attempt), range(12)).at(Stage.VECTORS) for attempt in "ab"]
    first, second = ({n: r.server._near[n] for n in range(12)} for r in rounds)
    assert first != second
    keys = [{(keys.sealing, keys.masking) for keys in r.server._roster.keys} for r in rounds]
    assert not keys[0] & keys[1]


def test_messages_survive_the_wire() -> None:
    going = Round(session_of(3, least=3), range(3)).at(Stage.SHARES)
    roster = decoded(Roster, going.server._roster.encoded())
    assert roster == going.server._roster
    assert decoded(Keys, roster.keys[0].encoded()) == roster.keys[0]
    sealed = going.step(1, roster)
    assert decoded(Sealed, sealed.encoded()) == sealed


@pytest.mark.parametrize("data", [b"", b"[]", b'{"shares": 1}', b'{"shares": [], "more": 1}', b'{"shares":[["1",""]]}'])
def test_what_is_not_a_message_is_refused(data: bytes) -> None:
    with pytest.raises(Breach) as raised:
        decoded(Inbox, data)
    assert raised.value.fault is Fault.MALFORMED


@pytest.mark.parametrize("heard", [0, 2, 4])
def test_a_server_that_is_killed_while_seeds_are_opened_goes_on(heard: int) -> None:
    """What it has kept, and what was opened until then, gives the same sum."""
    r = Round(session_of(5, least=4), range(5)).at(Stage.OPENINGS, gone={Stage.VECTORS: [3]})
    kept, opened = r.server.saved(), {number: r.step(number) for number in sorted(r.server.awaited)}
    restored = Aggregation.restored(kept, r.ca)
    assert restored.answer(0) == r.server.answer(0)
    for number in sorted(opened)[:heard]:
        restored.hear(opened[number])
    assert restored.awaited == set(sorted(opened)[heard:])
    for message in opened.values():
        restored.hear(message)
    restored.close()
    np.testing.assert_array_equal(restored.total(), total(r.vectors, [0, 1, 2, 4]))
