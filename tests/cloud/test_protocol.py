"""The coordinator: by hand, and whatever order servers announce themselves in."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from personafl.cloud.protocol import Back, Coordinator, Gone, Isolate, Mix, Ready, Start


def test_sync_waits_for_all() -> None:
    coordinator = Coordinator(3, 3)
    assert coordinator.start() == (Start(0, 0), Start(1, 0), Start(2, 0))
    assert coordinator.receive(Ready(2, 0)) == ()
    assert coordinator.receive(Ready(0, 0)) == ()
    assert coordinator.receive(Ready(1, 0)) == (Mix((0, 1, 2), 0), Start(0, 1), Start(1, 1), Start(2, 1))
    assert coordinator.receive(Ready(1, 1)) == ()


def test_async_takes_a_straggler_of_an_earlier_round() -> None:
    """Of three servers the first two are mixed; server 0, still in round 0, is then mixed with whoever comes next."""
    coordinator = Coordinator(3, 2)
    coordinator.start()
    coordinator.receive(Ready(2, 0))
    assert coordinator.receive(Ready(1, 0)) == (Mix((1, 2), 0), Start(1, 1), Start(2, 1))
    assert coordinator.receive(Ready(0, 0)) == ()
    assert coordinator.receive(Ready(2, 1)) == (Mix((0, 2), 1), Start(0, 2), Start(2, 2))


def test_rigorous_isolates_who_is_late_until_it_has_caught_up() -> None:
    """Two are mixed in rounds 0 and 1 without server 0: it does both alone, and is heard again in round 2."""
    coordinator = Coordinator(3, 2, rigorous=True)
    coordinator.start()
    for number in (0, 1):
        coordinator.receive(Ready(1, number))
        assert coordinator.receive(Ready(2, number))[0] == Mix((1, 2), number)
    assert coordinator.receive(Ready(0, 0)) == (Isolate(0, 0), Start(0, 1))
    assert coordinator.receive(Ready(0, 1)) == (Isolate(0, 1), Start(0, 2))
    assert coordinator.receive(Ready(0, 2)) == ()
    assert coordinator.receive(Ready(2, 2)) == (Mix((0, 2), 2), Start(0, 3), Start(2, 3))


def test_who_is_gone_is_not_waited_for() -> None:
    """Of three servers all are waited for; the last one is gone, and once back it is waited for again."""
    coordinator = Coordinator(3, 3)
    coordinator.start()
    assert coordinator.receive(Ready(0, 0)) == ()
    assert coordinator.receive(Ready(1, 0)) == ()
    assert coordinator.receive(Gone(2)) == (Mix((0, 1), 0), Start(0, 1), Start(1, 1))
    assert coordinator.receive(Ready(1, 1)) == ()
    assert coordinator.receive(Back(2)) == ()
    assert coordinator.receive(Ready(0, 1)) == ()
    assert coordinator.receive(Ready(2, 0)) == (Mix((0, 1, 2), 1), Start(0, 2), Start(1, 2), Start(2, 2))
    assert coordinator.at(2) == 2


def test_who_is_gone_after_it_announced_itself_is_mixed() -> None:
    coordinator = Coordinator(3, 2)
    coordinator.start()
    assert coordinator.receive(Ready(0, 0)) == ()
    assert coordinator.receive(Gone(0)) == ()
    assert coordinator.receive(Gone(1)) == ()
    assert coordinator.receive(Ready(2, 0)) == (Mix((0, 2), 0), Start(0, 1), Start(2, 1))
    assert coordinator.receive(Ready(2, 1)) == (Mix((2,), 1), Start(2, 2))


def test_nothing_is_mixed_when_all_are_gone() -> None:
    coordinator = Coordinator(2, 2)
    coordinator.start()
    assert [coordinator.receive(Gone(server)) for server in (0, 1)] == [(), ()]


@pytest.mark.parametrize("event", [Ready(0, 1), Ready(3, 0), Ready(1, 0)])
def test_an_announcement_out_of_turn_is_refused(event: Ready) -> None:
    """Of a round that the server is not in, of a server that does not exist, and for the second time."""
    coordinator = Coordinator(3, 3)
    coordinator.start()
    coordinator.receive(Ready(1, 0))
    with pytest.raises(ValueError, match=f"server {event.server} is not in round {event.round}"):
        coordinator.receive(event)


@given(st.integers(1, 6), st.data(), st.booleans())
def test_whatever_the_order(servers: int, data: st.DataObject, rigorous: bool) -> None:
    """Rounds are mixed one after the other, each of B servers; nobody is lost, and nobody does a round twice.

    In rigorous mode every server does every round, alone or mixed.
    """
    first = data.draw(st.integers(1, servers))
    coordinator = Coordinator(servers, first, rigorous=rigorous)
    at = {start.server: start.round for start in coordinator.start()}
    busy = set(at)
    mixed: list[Mix] = []
    done: Counter[tuple[int, int]] = Counter()
    for _ in range(40):
        server = data.draw(st.sampled_from(sorted(busy)))
        busy.remove(server)
        for event in coordinator.receive(Ready(server, at[server])):
            if isinstance(event, Start):
                assert event.server not in busy
                assert event.round > at[event.server]
                assert not rigorous or event.round == at[event.server] + 1
                at[event.server] = event.round
                busy.add(event.server)
            else:
                members = event.members if isinstance(event, Mix) else (event.server,)
                done.update((member, at[member]) for member in members)
                assert not isinstance(event, Mix) or not rigorous or {at[m] for m in members} == {event.round}
                mixed += [event] if isinstance(event, Mix) else []
        assert busy, "all servers wait"
    assert [mix.round for mix in mixed] == list(range(len(mixed)))
    assert all(len(mix.members) == first and list(mix.members) == sorted(set(mix.members)) for mix in mixed)
    assert max(done.values(), default=1) == 1
