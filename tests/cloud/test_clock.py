"""Virtual time, against traces worked by hand."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from personafl.cloud.clock import Aggregation, Delay, Phases, Turn, play
from personafl.cloud.protocol import Coordinator
from personafl.cloud.topology import Topology
from personafl.latency.laws import Constant, Exponential, Latency

LENGTHS = {0: (7.0, 1.0, 1.0, 1.0), 1: (2.0, 3.0, 2.0, 2.0), 2: (3.0, 2.0, 4.0, 3.0)}  # server -> its rounds, in order


def play_by_hand(first: int, rounds: int, *, rigorous: bool = False) -> list[Aggregation]:
    """Three servers whose k-th phase takes LENGTHS[server][k]; server n's device is 10 + n."""
    taken = dict.fromkeys(LENGTHS, 0)

    def phase(server: int, number: int) -> tuple[NDArray[np.int64], float]:
        taken[server] += 1
        return np.array([10 + server]), LENGTHS[server][taken[server] - 1]

    events = play(Coordinator(3, first, rigorous=rigorous), phase)
    return list(itertools.islice(events, rounds))


Short = list[tuple[int, int, float]]


def summary(events: list[Aggregation]) -> list[tuple[float, Short, Short]]:
    """(time, members, isolated), of each (server, round, when it was ready)."""

    def short(turns: tuple[Turn, ...]) -> Short:
        return [(turn.server, turn.round, turn.time) for turn in turns]

    return [(event.time, short(event.members), short(event.isolated)) for event in events]


def test_sync_by_hand() -> None:
    """Round 0 takes max(7, 2, 3) = 7; round 1 max(1, 3, 2) = 3, until 10; round 2 max(1, 2, 4) = 4, until 14."""
    events = play_by_hand(3, 3)
    assert [event.time for event in events] == [7.0, 10.0, 14.0]
    assert summary(events)[1] == (10.0, [(0, 1, 8.0), (1, 1, 10.0), (2, 1, 9.0)], [])
    assert events[0].members[2] == Turn(2, 0, 3.0, (12,))


def test_async_by_hand() -> None:
    """The first two of three; server 0 needs 7 for its first phase, and keeps the time that has passed.

    t = 3: 1 (ready at 2) and 2 (at 3) are mixed; they begin round 1 and need 3 and 2: ready at 6 and 5.
    t = 6: 2 (at 5) and 1 (at 6) are mixed; they begin round 2 and need 4 and 2: ready at 10 and 8.
    t = 8: 0 (at 7, of round 0) and 1 (at 8, of round 2) are mixed; they begin round 3 and need 1 and 2.
    t = 10: 0 is ready at 9, of round 3; 1 and 2 both at 10, where 1 goes first by its number.
    """
    assert summary(play_by_hand(2, 4)) == [
        (3.0, [(1, 0, 2.0), (2, 0, 3.0)], []),
        (6.0, [(1, 1, 6.0), (2, 1, 5.0)], []),
        (8.0, [(0, 0, 7.0), (1, 2, 8.0)], []),
        (10.0, [(0, 3, 9.0), (1, 3, 10.0)], []),
    ]


def test_rigorous_by_hand() -> None:
    """The same until t = 6, when the coordinator goes on to round 2; who is late catches up alone.

    0 is ready at 7 with round 0, at 8 with round 1: alone, both. At 9 it has round 2, but so has 1 since 8: they are
    mixed, and begin round 3. 2 has round 2 at 10: too late, alone; it is ready with round 3 at 13. 0 has round 3 at 10,
    1 at 11: they are mixed.
    """
    assert summary(play_by_hand(2, 4, rigorous=True)) == [
        (3.0, [(1, 0, 2.0), (2, 0, 3.0)], []),
        (6.0, [(1, 1, 6.0), (2, 1, 5.0)], []),
        (9.0, [(0, 2, 9.0), (1, 2, 8.0)], [(0, 0, 7.0), (0, 1, 8.0)]),
        (11.0, [(0, 3, 10.0), (1, 3, 11.0)], [(2, 2, 10.0)]),
    ]


def phases(arrival: Latency, step: Latency, active: int | None = None, seed: int = 0) -> Phases:
    """Two servers with devices 0 to 3 and 4 to 6; device i takes 1 + i steps in round 0, one more in each round."""
    topology = Topology(np.array([0, 0, 0, 0, 1, 1, 1]), (np.arange(4), np.arange(4, 7)))
    return Phases(
        topology=topology,
        active=active,
        arrival=arrival,
        step=step,
        steps=lambda devices, number: 1 + devices + number,
        seed=seed,
    )


def test_constant_latencies_by_hand() -> None:
    """Devices ask after 2 and take 0.5 a step. Device i takes 1 + i + t steps in round t.

    All active: server 0 takes 2 + 0.5·(4 + t), for its last device is 3; server 1, 2 + 0.5·(7 + t).
    Sync: round 0 ends at 5.5, round 1 takes 6, until 11.5. The first of two: 0 at 4; its round 1 takes 4.5, until 8.5,
    but 1 is ready at 5.5; its round 2 takes 6.5, until 12, and 0 is ready at 8.5.
    """
    constant = phases(Constant(seconds=2.0), Constant(seconds=0.5))
    assert constant(0, 0) == (pytest.approx(np.arange(4)), 4.0)
    sync = itertools.islice(play(Coordinator(2, 2), constant), 2)
    assert [event.time for event in sync] == [5.5, 11.5]
    first = itertools.islice(play(Coordinator(2, 1), constant), 3)
    assert summary(list(first)) == [(4.0, [(0, 0, 4.0)], []), (5.5, [(1, 0, 5.5)], []), (8.5, [(0, 1, 8.5)], [])]


def test_the_active_ones_are_the_earliest() -> None:
    """With steps that take next to nothing, the length of a phase is the second smallest arrival."""
    two = phases(Exponential(mean=2.0), Constant(seconds=1e-9), active=2)
    alone = phases(Exponential(mean=2.0), Constant(seconds=1e-9))
    for number in range(20):
        arrivals = {}
        for device in range(4):
            one = Phases(**{**vars(alone), "topology": Topology(np.zeros(7, dtype=np.int64), (np.array([device]),))})
            arrivals[device] = one(0, number)[1]
        earliest = sorted(arrivals, key=arrivals.__getitem__)[:2]
        devices, seconds = two(0, number)
        assert devices.tolist() == sorted(earliest)
        assert seconds == pytest.approx(arrivals[earliest[1]], abs=1e-7)


def test_equal_arrivals_are_a_fair_draw() -> None:
    """Two of four devices are active; each in about half of 400 rounds (5 standard deviations are 50)."""
    draw = phases(Constant(seconds=1.0), Constant(seconds=1.0), active=2)
    counts = np.zeros(4)
    for number in range(400):
        counts[draw(0, number)[0]] += 1
    assert (abs(counts - 200) < 50).all()


def test_latencies_follow_their_law_and_the_seed() -> None:
    """One device per server, K = 1 + number: means over 4000 rounds within 5 standard errors."""
    one = Topology(np.zeros(1, dtype=np.int64), (np.zeros(1, dtype=np.int64),))

    def times(seed: int) -> NDArray[np.float64]:
        draw = Phases(
            topology=one,
            active=1,
            arrival=Exponential(mean=2.0),
            step=Exponential(mean=1.0),
            steps=lambda devices, number: np.full(len(devices), 3),
            seed=seed,
        )
        return np.array([draw(0, number)[1] for number in range(4000)])

    drawn = times(0)
    np.testing.assert_array_equal(drawn, times(0))
    assert not (drawn == times(1)).any()
    # τ = Exp(2) + 3·Exp(1): mean 2 + 3, variance 4 + 9.
    assert drawn.mean() == pytest.approx(5.0, abs=5 * np.sqrt(13 / 4000))
    assert drawn.var() == pytest.approx(13.0, rel=0.2)


def test_some_devices_have_laws_of_their_own() -> None:
    """Devices 1 and 2 arrive later than all others, and 3 takes ten times as long for a step; the last law counts."""
    given: dict[str, Any] = {
        "topology": Topology(np.zeros(5, dtype=np.int64), (np.arange(5),)),
        "arrival": Exponential(mean=1.0),
        "step": Constant(seconds=1.0),
        "steps": lambda devices, number: np.full(len(devices), 2),
        "seed": 3,
    }
    late = Delay(devices=np.array([1, 2, 4]), arrival=Constant(seconds=1e6), step=None)
    slow = Delay(devices=np.array([3]), arrival=None, step=Constant(seconds=10.0))
    soon = Delay(devices=np.array([4]), arrival=Constant(seconds=0.0), step=None)
    plain, own = Phases(**given, active=3), Phases(**given, active=3, own=(late, slow, soon))
    for number in range(20):
        devices, seconds = own(0, number)
        assert devices.tolist() == [0, 3, 4]
        arrivals = plain.arrivals(np.arange(5), number)
        assert seconds == pytest.approx(max(arrivals[0] + 2.0, arrivals[3] + 20.0))
        np.testing.assert_allclose(own.arrivals(np.arange(5), number), [arrivals[0], 1e6, 1e6, arrivals[3], 0.0])
