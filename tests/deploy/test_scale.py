"""Many devices and large updates: what a server holds, wakes and computes does not grow with how many there are."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from offline import Maps
from processes import SMALL, recipe_of
from test_updates import FOREVER

from personafl.core import tree, wire
from personafl.core.algorithm import Reduced
from personafl.deploy.net import payload
from personafl.deploy.net.identity import Identity
from personafl.deploy.net.messages import Code, Hello, Pull, Refused, Said, Update, digest_of
from personafl.deploy.net.payload import opened_update
from personafl.deploy.net.stream import Partials, frames, receive
from personafl.deploy.server import history, rounds, updates
from personafl.deploy.server.rounds import Rounds
from personafl.deploy.server.server import Server
from personafl.deploy.server.service import Bell
from personafl.deploy.server.updates import Offer
from personafl.storage.journal import Journal

HELLO = Hello(samples=50, input_shape=[1, 8, 8], classes=10)


def device(number: int) -> Identity:
    return Identity(f"device-{number}", "device", number, 0, FOREVER)


def enrolled(folder: Path, devices: int, **changes: Any) -> Rounds:
    """Return a run with devices that have no data, before its first round."""
    made = Rounds(recipe_of("fedavg", devices, data=SMALL["data"] | {"normalize": "none"}, **changes), folder)
    for number in range(devices):
        made.enrol(device(number), HELLO)
    return made


def upload(of: Rounds, seed: int) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    return wire.encode(tree.map(lambda leaf: torch.randn(leaf.shape, generator=generator), of._likes[0]))


def take_all(of: Rounds) -> None:
    """Open a round and take an update of everyone."""
    of.open_next()
    going = of._open
    for number in going.cohort:
        of.accept(
            device(number), Update(round=going.number, model=going.letters.digest, samples=50), upload(of, number)
        )


def test_a_round_closes_with_one_update_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the recipe trains in stacks; the sum is that of a simulator that trains one by one."""
    alive: list[Any] = []
    most = [0]
    decode = wire.decode

    def spy(data: bytes, like: Any) -> Any:
        made = decode(data, like)
        alive.append(weakref.ref(tree.leaves(made)[0]))
        most[0] = max(most[0], sum(one() is not None for one in alive))
        return made

    plain = {"engine": {"threads": 1, "strategy": "stacked"}, "robust": {"rule": "mean"}}
    with enrolled(tmp_path / "run", 20, **plain) as server:
        server.begin()
        take_all(server)
        expected: Reduced | None = None
        for number in range(20):
            one = tree.map(lambda leaf: leaf.unsqueeze(0), decode(upload(server, number), server._likes[0]))
            expected = server._server.join(expected, one, np.array([number]))
        monkeypatch.setattr(rounds.wire, "decode", spy)
        joined = server._joined()
    assert len(alive) == 20
    assert most[0] <= 2
    assert joined is not None
    assert expected is not None
    assert wire.encode(joined.total) == wire.encode(expected.total)


def test_enrolment_does_not_go_through_all_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A roster of everyone is made for a round, not for each newcomer."""
    made: list[int] = []
    roster_of = history.roster_of

    def spy(members: Any, *others: Any) -> Any:
        made.append(len(members))
        return roster_of(members, *others)

    monkeypatch.setattr(rounds, "roster_of", spy)
    with enrolled(tmp_path / "run", 3) as server:
        server.begin()
        take_all(server)
        server.close()
        made.clear()
        for number in range(3, 30):
            server.enrol(device(number), HELLO)
        assert made == []
        server.open_next()
        assert made == [30]
        assert server._open.cohort == tuple(range(30))


def test_who_waits_for_work_is_not_woken_by_anything_else() -> None:
    async def waiting() -> None:
        looked: list[int] = []
        offered, other = Bell(), Bell()

        async def idle(number: int) -> None:
            await offered.within(3600.0, lambda: looked.append(number) is not None or len(looked) > 3)

        tasks = [asyncio.create_task(idle(number)) for number in range(3)]
        await asyncio.sleep(0)
        assert looked == [0, 1, 2]
        other.ring()
        for _ in range(10):
            await asyncio.sleep(0)
        assert looked == [0, 1, 2]
        offered.ring()
        await asyncio.gather(*tasks)
        assert looked == [0, 1, 2, 0, 1, 2]

    asyncio.run(waiting())


def test_payloads_that_were_not_looked_at_yet_count_and_others_wait_their_turn() -> None:
    """However many devices send at once, so many of their updates are held; nobody is refused, and all get through."""

    async def sent() -> None:
        partials, held, order = Partials(300, patience=3600.0), [0, 0], list[str]()
        ends = [asyncio.Event() for _ in range(12)]

        async def one(number: int) -> None:
            pieces = list(frames(Said(Pull(returning=True), bytes([number]) * 100)))

            async def incoming() -> AsyncIterator[bytes]:
                for piece in pieces:
                    yield piece

            *_, payload = await receive(incoming(), f"device-{number}", partials, lambda *_: 100)
            with partials.handling(payload):
                held[0] += 1
                held[1] = max(held)
                order.append(f"device-{number}")
                await ends[number].wait()
                held[0] -= 1

        tasks = [asyncio.create_task(one(number)) for number in range(12)]
        for number, end in enumerate(ends):
            while len(order) <= number:
                await asyncio.sleep(0)
            end.set()
        await asyncio.gather(*tasks)
        assert held == [0, 3]
        assert order == [f"device-{number}" for number in range(12)]
        assert partials.held == 0

    asyncio.run(sent())


class Two(NamedTuple):
    """An upload."""

    many: torch.Tensor
    loss: torch.Tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_norm_of_an_update_is_bounded_as_exactly_as_ever(dtype: torch.dtype) -> None:
    """A million ones have norm 1000, however small one of them is beside their sum."""
    made = Two(torch.ones(10**6, dtype=dtype), torch.zeros((), dtype=dtype))
    data = wire.encode(made)
    for bound in (1000.0, 1000.1, 1112.0, 1e9):
        assert torch.equal(opened_update(data, made, Two, bound).many, made.many)
    for bound in (999.9, 890.0, 10.0):
        with pytest.raises(Refused, match="the norm is 1e\\+03"):
            opened_update(data, made, Two, bound)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -float("inf")])
def test_a_number_that_is_not_finite_is_found_anywhere(value: float) -> None:
    made = Two(torch.ones(10**6), torch.zeros(()))
    made.many[-1] = value
    with pytest.raises(Refused, match="NOT_FINITE: many"):
        opened_update(wire.encode(made), made, Two, 1e6)


@pytest.mark.parametrize("place", [0, 8191, 8192, 99_999])
@pytest.mark.parametrize("value", [float("nan"), -float("inf"), 1e30, 3000.0])
def test_updates_that_are_like_one_that_was_right_are_held_to_the_same_bounds(place: int, value: float) -> None:
    """Their numbers are looked at where they are, without reading what describes them again."""
    checker, made = payload.Checker(Two(torch.ones(10**5), torch.zeros(())), Two, 2000.0), torch.ones(10**5)
    for _ in range(2):
        checker.check(wire.encode(Two(made, torch.zeros(()))))
    made[place] = value
    with pytest.raises(Refused, match=r"NOT_FINITE|NORM_TOO_LARGE"):
        checker.check(wire.encode(Two(made, torch.zeros(()))))
    for other in (wire.encode(Two(torch.ones(10**5), torch.zeros(())))[:-4], wire.encode(made)):
        with pytest.raises(Refused, match=r"BAD_PAYLOAD|BAD_NAMES"):
            checker.check(other)


def test_two_threads_may_write_one_journal(tmp_path: Path) -> None:
    """The event loop writes of refusals while the worker thread writes of updates."""
    journal = Journal(tmp_path / "journal.jsonl")

    def write(who: int) -> None:
        for number in range(200):
            journal.write("refused", durable=False, who=who, number=number)

    threads = [threading.Thread(target=write, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = sorted((entry["who"], entry["number"]) for entry in Journal(tmp_path / "journal.jsonl").entries)
    assert found == [(who, number) for who in range(4) for number in range(200)]


def offers(of: Rounds, numbers: range, payloads: dict[int, bytes] | None = None) -> list[Offer]:
    going = of._open
    made = []
    for number in numbers:
        data = (payloads or {}).get(number, upload(of, number))
        update = Update(round=going.number, model=going.letters.digest, samples=50)
        made.append(Offer(device(number), update, data, digest_of(data)))
    return made


def test_updates_that_wait_are_made_durable_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many they are: their file, its name once a round, and the journal. What is refused is not written."""
    synced: list[str] = []
    fsync = os.fsync

    def spy(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    with enrolled(tmp_path / "run", 20) as server:
        server.begin()
        server.open_next()
        monkeypatch.setattr(os, "fsync", spy)
        outcomes = server.accept_all(offers(server, range(10), {3: b"nothing"}))
        assert [getattr(one, "code", one) for one in outcomes] == [*3 * [False], Code.BAD_PAYLOAD, *6 * [False]]
        assert synced == ["000000.updates", "updates", "journal.jsonl"]
        synced.clear()
        assert server.accept_all(offers(server, range(20)))[:4] == [True, True, True, False]
        assert synced == ["000000.updates", "journal.jsonl"]
        assert sorted(server._open.taken) == list(range(20))
        server.close()


def test_memory_is_given_back_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates come and go in pieces that leave holes, which a process keeps for itself."""
    given: list[int] = []
    with enrolled(tmp_path / "run", 20) as server:
        server.begin()
        server.open_next()
        monkeypatch.setattr(updates, "give_memory_back", lambda: given.append(len(server._open.taken)))
        monkeypatch.setattr(updates, "_MANY", 5 * len(upload(server, 0)))
        for number in range(20):
            server.accept_all(offers(server, range(number, number + 1)))
    assert given == [5, 11, 17]


def test_an_update_that_a_journal_does_not_speak_of_is_written_over(tmp_path: Path) -> None:
    """A server that is killed between the two goes on with those that it had accepted."""
    with enrolled(tmp_path / "run", 4) as server:
        server.begin()
        server.open_next()
        server.accept_all(offers(server, range(2)))
        server._updates.write(offers(server, range(2, 4)))
    with Rounds(server.recipe, tmp_path / "run") as again:
        assert sorted(again._open.taken) == [0, 1]
        assert again.accept_all(offers(again, range(4))) == [True, True, False, False]
        again.close()
    with enrolled(tmp_path / "other", 4) as straight:
        straight.begin()
        take_all(straight)
        straight.close()
    assert wire.encode(again._server.state) == wire.encode(straight._server.state)


def test_a_run_of_version_0_1_goes_on_with_the_updates_that_it_had(tmp_path: Path) -> None:
    """It had a file for each of them."""
    with enrolled(tmp_path / "run", 2) as server:
        server.begin()
        server.open_next()
        data = upload(server, 0)
        (tmp_path / "run" / "updates" / "000000-000000.safetensors").write_bytes(data)
        server.journal.write("accepted", round=0, number=0, digest=digest_of(data))
    with Rounds(server.recipe, tmp_path / "run") as again:
        again.accept_all(offers(again, range(1, 2)))
        assert again.close().taken == (0, 1)
        assert list((tmp_path / "run" / "updates").iterdir()) == []


def test_a_header_is_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it describes is known then; numbers are looked at in each update."""
    looked: list[int] = []
    opened = payload.opened_update
    monkeypatch.setattr(payload, "opened_update", lambda *given: (looked.append(1), opened(*given))[1])
    with enrolled(tmp_path / "run", 8) as server:
        server.begin()
        server.open_next()
        bad = bytearray(upload(server, 5))
        bad[-4:] = np.array([np.inf], dtype=np.float32).tobytes()
        short = upload(server, 6)[:-4]
        outcomes = server.accept_all(offers(server, range(8), {5: bytes(bad), 6: short}))
    assert [getattr(one, "code", one) for one in outcomes[5:]] == [Code.NOT_FINITE, Code.BAD_PAYLOAD, False]
    assert outcomes[:5] == 5 * [False]
    assert len(looked) == 2  # the first, and the one that is not finite


def test_updates_that_come_while_the_worker_is_busy_are_kept_together(tmp_path: Path) -> None:
    """Those of one device are, one after another."""
    batches: list[list[int]] = []

    async def sent() -> None:
        server = Server.__new__(Server)
        server._offers, server._keeping, server._changed = deque(), None, Bell()
        server._worker, busy = ThreadPoolExecutor(1), threading.Event()

        def accept_all(taken: list[Offer]) -> list[bool | Refused]:
            batches.append([offer.number for offer in taken])
            return [Refused(Code.BUSY, "no") if offer.number == 3 else False for offer in taken]

        server._rounds = SimpleNamespace(accept_all=accept_all)  # type: ignore[assignment]
        server._worker.submit(busy.wait)
        update = Update(round=0, model="0" * 64, samples=1)
        waiting = [asyncio.create_task(server._kept(Offer(device(n), update, b"", ""))) for n in (1, 2, 3, 1, 4)]
        await asyncio.sleep(0)
        busy.set()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert [getattr(one, "code", one) for one in found] == [False, False, Code.BUSY, False, False]
        server._worker.shutdown()

    asyncio.run(sent())
    assert batches == [[1, 2, 3], [1, 4]]


def test_clipped_updates_are_looked_at_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that lie in the file one is mapped at a time, however many there are: memory does not grow with them."""
    maps = Maps(monkeypatch)
    with enrolled(tmp_path / "run", 20) as server:
        server.begin()
        take_all(server)
        server.close()
    assert maps.made >= 40  # all were looked at, and added up after that
    assert maps.most <= 2
