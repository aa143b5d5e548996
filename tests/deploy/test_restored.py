"""A coordinator or a server of a cloud that goes on from a copy: as if nothing was, or if it is an old one never."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_cloud_deployed import driven
from test_moving import three
from together import Together

from personafl.deploy.net.messages import Accepted, Alive, Announce, Code, Message, Proceed, Refused, Said, Wait
from personafl.deploy.server.cloudserver import _CloudServer, whose_copy_is_old
from personafl.deploy.server.coordination import Coordination


def test_a_server_whose_mix_an_old_coordinator_would_make_with_another_is_refused(tmp_path: Path) -> None:
    """0 and 1 were mixed after the copy; from it 0 would be mixed with 2, and has the same round number afterwards."""
    with Together(three("async"), tmp_path) as made:
        for place in range(3):
            made.collect(place)
        made.hand_in(0)
        shutil.copytree(tmp_path / "coordinator", tmp_path / "copy", ignore=shutil.ignore_patterns("lock"))
        made.hand_in(1)
        for place in (0, 1):
            assert made.proceed(place)
            made.collect(place)
        late, behind = made.cloud[2].seal(), made.cloud[0].seal()
    assert isinstance(late.message, Announce)
    assert isinstance(behind.message, Announce)
    assert behind.message.heard is not None
    assert (behind.message.heard.mixed, behind.message.heard.members) == (0, [0, 1])
    with Coordination(made.recipe, tmp_path / "copy") as old:
        with pytest.raises(Refused, match="cloud-0 is in round 2 and knows of mixes that this coordinator does not"):
            old.announce(0, behind.message, behind.payload)  # it is ahead
        old.announce(2, late.message, late.payload)
        assert old.round_of(0) == behind.message.round  # and now it does not seem so
        with pytest.raises(Refused, match="knows of mixes that this coordinator does not") as caught:
            old.announce(0, behind.message, behind.payload)
        assert caught.value.code is Code.WRONG_ROUND


@pytest.mark.parametrize(
    ("number", "sealed", "at", "ready", "after", "whose"),
    [
        (5, False, 5, False, 4, None),  # both are in the sixth round
        (5, True, 5, True, 4, None),  # it is announced
        (5, True, 5, False, 4, None),  # and the answer or the announcement was lost
        (4, True, 5, False, 4, None),  # mixed, which the server has not heard
        (4, True, 6, False, 4, None),  # a mix may skip rounds
        (5, False, 5, True, 4, "own"),  # the server lost what it announced
        (4, False, 5, False, 4, "own"),
        (3, True, 5, False, 4, "own"),
        (5, False, 4, False, 3, "coordinator"),
        (5, False, 4, True, 3, "coordinator"),  # copied after this server's announcement
        (5, True, 4, True, 3, "coordinator"),
    ],
)
def test_who_is_behind_is_told_from_what_both_say(
    number: int, sealed: bool, at: int, ready: bool, after: int, whose: str | None
) -> None:
    assert whose_copy_is_old(number, sealed, Alive(open=True, at=at, ready=ready, after=after)) == whose


def test_what_a_coordinator_lost_is_handed_in_again() -> None:
    """Its journal lost the last line: it waited for what the server had announced, and the server for what follows."""
    asked: list[str] = []
    lost = [Wait(), Alive(open=True, at=5, ready=False, after=4), Accepted(before=False)]
    had = [Wait(), Alive(open=True, at=5, ready=True, after=4)]
    mixed = [Wait(), Alive(open=True, at=6, ready=False, after=5), Proceed(start=6, mixed=5)]
    answers = iter([*had, *lost, *mixed])

    async def ask(message: Message, payload: bytes = b"") -> Said:
        asked.append(message.kind)
        return Said(next(answers))

    server = _CloudServer.__new__(_CloudServer)
    server._coordinator = SimpleNamespace(ask=ask)  # type: ignore[assignment]
    server._own = SimpleNamespace(done=5)  # type: ignore[assignment]
    handed = Said(Announce(round=5, clients=1), b"what was sealed")
    said = asyncio.run(server._following(5, handed))
    assert said.message == Proceed(start=6, mixed=5)
    assert asked == ["await", "beat", "await", "beat", "announce", "await", "beat", "await"]


def test_a_coordinator_without_its_last_line_knows_so_and_takes_it_again(tmp_path: Path) -> None:
    with Together(three("async"), tmp_path) as made:
        for place in range(3):
            made.collect(place)
        made.hand_in(0)
        sealed = made.cloud[0].seal()
    journal = tmp_path / "coordinator" / "journal.jsonl"
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:-1]))
    assert isinstance(sealed.message, Announce)
    with Coordination(made.recipe, tmp_path / "coordinator") as again:
        at, ready, after = again.where(0)
        assert (at, ready) == (sealed.message.round, False)
        assert after != sealed.message.round
        assert not again.announce(0, sealed.message, sealed.payload)
        assert again.where(0)[1]


@pytest.mark.system
@pytest.mark.parametrize("whose", ["coordinator", "cloud-1"])
def test_what_goes_on_from_a_copy_made_at_work_comes_to_the_simulators_bits(whose: str) -> None:
    """At another port, from another folder; the first one is removed."""
    (result,) = driven("restored", whose, "new")
    assert result["equal"]
    assert result["rounds"] == 14


@pytest.mark.system
def test_servers_end_that_are_ahead_of_their_coordinator() -> None:
    (result,) = driven("restored", "coordinator", "old")
    assert "goes on from an old copy: there this server is in round" in result["line"]


@pytest.mark.system
def test_an_old_copy_of_a_server_sends_no_device_back() -> None:
    """It ends, and is dropped: its devices go on elsewhere with all that counted."""
    (result,) = driven("restored", "cloud-1", "old")
    assert "is an old copy: it is in round" in result["line"]
    assert result["equal"]
