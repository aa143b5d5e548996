"""Several tries to sum the same vectors: a server that cheats opens one sum, whatever it tells whom."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from people import Round, session_of, total

from personafl.secure.circle import Circle
from personafl.secure.faults import Breach, Fault
from personafl.secure.graph import degree
from personafl.secure.messages import Roster
from personafl.secure.server import Stage

NINE, LEFT = range(9), range(6, 9)


def masked_by_nine() -> Round:
    """Return a try in which all nine have masked their vectors, and everyone is everyone's neighbour."""
    return Round(session_of(9, least=6), NINE).at(Stage.OPENINGS)


def again(r: Round, numbers: range | list[int]) -> Round:
    """Return another try of some who remember the first, when all have made keys for it."""
    before = {number: [r.clients[number].circle] for number in numbers}
    second = session_of(len(numbers), least=len(numbers), attempt="b" * 32)
    return Round(second, numbers, before=before).at(Stage.SHARES)


def test_who_forgets_is_in_two_sums() -> None:
    """What is to be prevented: six open the sum of nine, and the other three that of their own."""
    first = masked_by_nine().run(gone={Stage.OPENINGS: LEFT})
    np.testing.assert_array_equal(first.server.total(), total(first.vectors, NINE))
    second = Round(session_of(3, least=3, attempt="b" * 32), LEFT).run()
    np.testing.assert_array_equal(second.server.total(), total(second.vectors, LEFT))


def test_who_has_masked_refuses_another_sum_while_the_first_may_be_opened() -> None:
    first = masked_by_nine().run(gone={Stage.OPENINGS: LEFT})
    second = again(first, LEFT)
    for number in LEFT:
        with pytest.raises(
            Breach, match="2 of 8 neighbours of an earlier try take part in this one, and 5 must"
        ) as how:
            second.step(number)
        assert how.value.fault is Fault.SECOND_SUM
        with pytest.raises(Breach):
            second.step(number)


@pytest.mark.parametrize(("here", "goes_on"), [(6, True), (5, False)])
def test_as_many_as_could_open_the_first_must_have_given_it_up(here: int, goes_on: bool) -> None:
    """Of eight others five open a seed: five must be here, and with the one that asks they are six."""
    first = masked_by_nine()
    assert first.clients[0].circle == Circle(tuple(range(1, 9)), 5)
    second = again(first, range(here))
    if not goes_on:
        with pytest.raises(Breach) as raised:
            second.step(0)
        assert raised.value.fault is Fault.SECOND_SUM
        return
    second.run()
    np.testing.assert_array_equal(second.server.total(), total(second.vectors, range(here)))


def test_nobody_gives_a_try_up_for_another() -> None:
    """In a sparse graph: keys of the first try are shown as those of the second, of a neighbour in the first alone."""
    sparse = session_of(12, least=10)
    first = Round(sparse, range(12)).at(Stage.CONSENTS)
    before = {0: [first.clients[0].circle]}
    second = Round(replace(sparse, attempt="b" * 32), range(12), before=before).at(Stage.SHARES)
    old = {keys.number: keys for keys in first.server._roster.keys}
    for number in first.clients[0].circle.neighbours:
        shown = tuple(old[number] if keys.number == number else keys for keys in second.server._roster.keys)
        r = Round(replace(sparse, attempt="b" * 32), range(12), before=before)
        own = r.clients[0].advertise()
        with pytest.raises(Breach) as raised:
            r.clients[0].share(Roster((own, *shown[1:])))
        assert raised.value.fault is Fault.BAD_SIGNATURE


def test_what_is_left_opens_nothing() -> None:
    """By brute force over who is corrupt and who signs: honest ones who sign open nothing, corrupt ones do both."""
    for clients, lost, corrupt in itertools.product(range(3, 8), range(3), range(3)):
        try:
            found = degree(clients, lost, corrupt)
        except Breach:
            continue
        others = set(range(found.neighbours))
        for signed in map(set, itertools.combinations(others, found.threshold)):
            for both in map(set, itertools.combinations(others, min(corrupt, len(others)))):
                assert len((others - signed) | both) < found.threshold
