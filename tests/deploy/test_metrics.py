"""The page of numbers: Prometheus's own parser reads it, kills lose nothing, and nobody who asks can harm a server."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from clouds import cloud_recipe
from offline import Offline, quick_recipe
from prometheus_client.parser import text_string_to_metric_families

from personafl.core import wire
from personafl.deploy import pki
from personafl.deploy.device.condition import Condition
from personafl.deploy.device.pages import shown
from personafl.deploy.device.state import DeviceState
from personafl.deploy.net import scraping
from personafl.deploy.net.exposition import Histogram, counter, gauge, info, rendered
from personafl.deploy.net.messages import Announce, Code, Join, Refused, Update
from personafl.deploy.net.scraping import MOST, Page, scraped
from personafl.deploy.net.transport import Channel
from personafl.deploy.server import service
from personafl.deploy.server.agreement import fingerprint
from personafl.deploy.server.coordination import Coordination
from personafl.deploy.server.coordinator import _Coordinator
from personafl.deploy.server.rounds import Rounds
from personafl.deploy.server.server import Server, ServerConfig
from personafl.deploy.server.tally import Tally
from personafl.errors import BadInput, StorageFailed
from personafl.simulate.cloud import without_own
from personafl.storage import journal as journals
from personafl.storage.journal import Journal

Numbers = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: str) -> Numbers:
    """Return the samples of a page, by name and labels."""
    families = text_string_to_metric_families(text)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def named(numbers: Numbers, name: str, /, **labels: str) -> float:
    return numbers[f"personafl_{name}", tuple(sorted(labels.items()))]


def tallied(path: Path) -> Numbers:
    """Return what a journal comes to for a process that begins to read it now."""
    tally = Tally()
    Journal(path).follow(tally.hear)
    return parsed(rendered(tally.metrics()))


def test_the_parser_of_prometheus_reads_a_page() -> None:
    waits = Histogram((1, 2.5))
    for value in (0.5, 0.5, 2.5, 9):
        waits.observe(value)
    odd = 'a "quoted"\nname with a \\'
    page = rendered(
        [
            counter("rounds", "Rounds,\nin two lines.", 3),
            counter("refused", "By code.", {"BUSY": 2, odd: 1}, "code"),
            gauge("share", "A number.", 0.25),
            info("run", "What is run.", name=odd),
            waits.metric("wait_seconds", "Seconds."),
        ]
    )
    kinds = {family.name: family.type for family in text_string_to_metric_families(page)}
    assert kinds == {
        "personafl_rounds": "counter",
        "personafl_refused": "counter",
        "personafl_share": "gauge",
        "personafl_run_info": "gauge",
        "personafl_wait_seconds": "histogram",
    }
    found = parsed(page)
    assert named(found, "rounds_total") == 3
    assert named(found, "refused_total", code=odd) == 1
    assert named(found, "run_info", name=odd) == 1
    assert named(found, "share") == 0.25
    assert [named(found, "wait_seconds_bucket", le=le) for le in ("1", "2.5", "+Inf")] == [2, 3, 4]
    assert (named(found, "wait_seconds_sum"), named(found, "wait_seconds_count")) == (12.5, 4)


@contextlib.contextmanager
def served(run: Offline, folder: Path) -> Iterator[Server]:
    """Give a server that has the rounds of a run, and answers nobody."""
    if not (folder / "pki").exists():
        pki.init(folder / "pki")
    files = pki.issue(folder / "pki", "server")
    config = ServerConfig(
        recipe=run.recipe, out=folder, files=files, revocations=folder / "pki" / "revoked.pem", listen="localhost:0"
    )
    with ThreadPoolExecutor(1) as worker:
        yield Server(config, run.rounds, worker, lambda event: None)


def numbers_of(server: Server) -> Numbers:
    status, text = server._metrics()
    assert status == 200
    return parsed(text)


def counters(numbers: Numbers) -> Numbers:
    return {key: value for key, value in numbers.items() if "_total" in key[0] or "round_seconds" in key[0]}


def test_a_server_tells_what_happened_and_a_new_process_tells_the_same(tmp_path: Path) -> None:
    with Offline(quick_recipe(), tmp_path) as run:
        run.go_on(2).open()
        run.train(0)
        sent = len(run.clients[0].state.pending.update)  # type: ignore[union-attr]
        run.settle(0)
        run.rounds.drop("device-1", by="coordinator")
        with served(run, tmp_path) as server:
            server._refused("device-1", Refused(Code.DROPPED, "was dropped"))
            server._refused("unknown", Refused(Code.NO_CERTIFICATE, "none"))
            server._refused("unknown", Refused(Code.NO_CERTIFICATE, "none"))
        before = numbers_of(server)
        handed = sum(entry["size"] for entry in Journal(tmp_path / "run" / "journal.jsonl").entries
                     if entry["event"] == "handed")  # fmt: skip
    assert named(before, "rounds_total") == named(before, "rounds_done") == named(before, "round_seconds_count") == 2
    assert named(before, "rounds_planned") == 4
    assert named(before, "updates_accepted_total") == 5
    assert named(before, "update_bytes_total") == 5 * sent
    assert named(before, "broadcast_bytes_total") == handed > 0
    assert named(before, "refused_total", code="NO_CERTIFICATE") == 2
    assert named(before, "refused_total", code="DROPPED") == 1
    assert [named(before, "peers_total", event=event) for event in ("enrolled", "dropped", "left")] == [2, 1, 0]
    assert named(before, "devices_enrolled") == 1
    assert named(before, "devices_selected") == 2
    assert named(before, "round_updates") == 1
    assert named(before, "disk_full") == 0
    assert named(before, "certificate_end_seconds") > named(before, "start_time_seconds")
    with Rounds(run.recipe, tmp_path / "run") as again:  # as after a kill: nothing was said of an end
        assert parsed(rendered(again.tally.metrics())) == counters(before)
        assert again.open is not None
        again.open.taken.clear()
        assert again.task(0, True) is not None  # it had its broadcast before
        assert parsed(rendered(again.tally.metrics())) == counters(before)


def test_a_kill_between_a_checkpoint_and_its_line_loses_no_round(tmp_path: Path) -> None:
    with Offline(quick_recipe(), tmp_path) as run:
        run.go_on(1).open()
        for number in range(2):
            run.train(number)
            run.settle(number)
        state = run.rounds._server
        updates = run.rounds._joined()
        run.rounds._commit(state.updated(state.state, updates, 1), updates, 2)  # and is killed there
    assert named(tallied(tmp_path / "run" / "journal.jsonl"), "rounds_total") == 1
    with Offline(quick_recipe(), tmp_path) as run:
        assert run.rounds.last is not None
        assert (run.rounds.last.number, run.rounds.last.taken, run.rounds.done) == (1, (0, 1), 2)
    found = tallied(tmp_path / "run" / "journal.jsonl")
    assert named(found, "rounds_total") == named(found, "round_seconds_count") == 2
    with Offline(quick_recipe(), tmp_path):  # once
        assert tallied(tmp_path / "run" / "journal.jsonl") == found


def test_wherever_a_journal_is_torn_its_whole_lines_count_and_what_was_shown_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal, live = Journal(path), Tally()
    journal.follow(live.hear)
    shown: dict[int, Numbers] = {0: parsed(rendered(live.metrics()))}
    for number in range(3):
        journal.write("opened", round=number, cohort=[0, 1], wanted=2)
        journal.write("accepted", round=number, number=0, digest="0" * 64, size=10)
        journal.write("refused", durable=False, who="device-1", code=Code.BUSY, text="")
        journal.write("refusals", durable=False, codes={"BUSY": 4})
        journal.write("closed", round=number, taken=(0,), selected=2, loss=None)
        shown[len(path.read_bytes())] = parsed(rendered(live.metrics()))
    whole = path.read_bytes()
    for length in range(0, len(whole), 61):
        path.write_bytes(whole[:length])
        found = tallied(path)
        last = max(size for size in shown if size <= length)
        assert all(found[key] >= value for key, value in shown[last].items())
        assert all(value <= shown[len(whole)][key] for key, value in found.items())
    path.write_bytes(whole)
    assert tallied(path) == shown[len(whole)]
    assert named(shown[len(whole)], "refused_total", code="BUSY") == 15


def test_refusals_beyond_those_with_a_line_are_counted_in_lines_of_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MOST_REFUSALS", 3)
    with Offline(quick_recipe(), tmp_path) as run:
        with served(run, tmp_path) as server:
            for _ in range(9):
                server._refused("device-0", Refused(Code.MALFORMED, "no"))
        assert named(numbers_of(server), "refused_total", code="MALFORMED") == 3  # what is shown is written down
        server._count_refusals()
        server._count_refusals()
        assert named(numbers_of(server), "refused_total", code="MALFORMED") == 9
    with Offline(quick_recipe(), tmp_path) as run, served(run, tmp_path) as server:
        assert server._refusals == {Code.MALFORMED: 9}
        assert named(numbers_of(server), "refused_total", code="MALFORMED") == 9


def test_refusals_on_a_full_disk_are_counted_when_there_is_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise StorageFailed("full")

    with Offline(quick_recipe(), tmp_path) as run:
        with served(run, tmp_path) as server:
            monkeypatch.setattr(journals, "append", full)
            server._refused("device-0", Refused(Code.BUSY, "later"))
        monkeypatch.undo()
        server._count_refusals()
        assert named(numbers_of(server), "refused_total", code="BUSY") == 1


def test_waits_for_the_disk_are_counted(tmp_path: Path) -> None:
    tries: list[int] = []

    def work() -> str:
        tries.append(len(tries))
        if len(tries) < 2:
            raise StorageFailed("full")
        return "done"

    with Offline(quick_recipe(), tmp_path) as run:
        with served(run, tmp_path) as server:

            async def waited() -> tuple[float, str]:
                task = asyncio.create_task(server._surely(work))
                while not tries or not server._full:
                    await asyncio.sleep(0.001)
                return named(numbers_of(server), "disk_full"), await task

            assert asyncio.run(waited()) == (1, "done")
        found = numbers_of(server)
        assert (named(found, "disk_waits_total"), named(found, "disk_full")) == (1, 0)
        assert named(found, "disk_wait_seconds_total") >= 0.5


def test_what_a_refusal_was_about_is_in_its_line(tmp_path: Path) -> None:
    with Offline(quick_recipe(), tmp_path) as run, served(run, tmp_path) as server:
        refused = Refused(Code.WRONG_ROUND, "not open")
        refused.about = {"kind": Update.kind, "round": 7, "digest": "0" * 64}
        server._refused("device-0", refused)
    (line,) = [e for e in Journal(tmp_path / "run" / "journal.jsonl").entries if e["event"] == "refused"]
    assert {key: line[key] for key in ("who", "code", "round", "digest")} == {
        "who": "device-0", "code": "WRONG_ROUND", "round": 7, "digest": "0" * 64,
    }  # fmt: skip


def test_who_is_revoked_is_written_down_once(tmp_path: Path) -> None:
    with Offline(quick_recipe(), tmp_path) as run:
        run.rounds.revoked = frozenset({1})
        run.rounds.note_revoked()
        run.rounds.note_revoked()
    with Offline(quick_recipe(), tmp_path) as run:
        run.rounds.revoked = frozenset({1})
        run.rounds.note_revoked()
    path = tmp_path / "run" / "journal.jsonl"
    assert [entry["name"] for entry in Journal(path).entries if entry["event"] == "revoked"] == ["device-1"]
    assert named(tallied(path), "peers_total", event="revoked") == 1


def test_a_server_is_ready_while_it_can_be_called(tmp_path: Path) -> None:
    with Offline(quick_recipe(), tmp_path) as run, served(run, tmp_path) as server:
        assert server._readiness()[0] == 503

        async def serving() -> int:
            async with server._serving(2**20):
                return server._readiness()[0]

        assert asyncio.run(serving()) == 200
        assert server._readiness()[0] == 503


def test_a_coordinator_tells_of_its_servers_and_a_new_process_tells_the_same(tmp_path: Path) -> None:
    """cloud-0 is mixed alone twice; what cloud-1 hands in for the first round then is stale by two."""
    recipe = cloud_recipe("fedbcd", 4, cloud={"servers": 2, "protocol": "async", "first": 1})
    pki.init(tmp_path / "pki")
    files = pki.issue(tmp_path / "pki", "coordinator")
    config = service.ServiceConfig(
        recipe=recipe, out=tmp_path, files=files, revocations=tmp_path / "pki" / "revoked.pem", listen="localhost:0"
    )

    def page(made: Coordination) -> Numbers:
        with ThreadPoolExecutor(1) as worker:
            return parsed(_Coordinator(config, made, worker, lambda event: None)._metrics()[1])

    with Coordination(recipe, tmp_path / "run") as made:
        for server in range(2):
            made.join(server, Join(weight=2, recipe=fingerprint(recipe)))
        payload = wire.encode(without_own(made._base.serving().state))
        for server, round_ in ((0, 0), (0, 1), (1, 0)):
            made.announce(server, Announce(round=round_, clients=2), payload)
        made.lose(1)
        before = page(made)
    assert named(before, "rounds_total") == named(before, "rounds_done") == 3
    assert [named(before, "server_mixes_total", server=f"cloud-{server}") for server in range(2)] == [2, 1]
    assert [named(before, "server_staleness", server=f"cloud-{server}") for server in range(2)] == [0, 2]
    assert named(before, "update_bytes_total") == 3 * len(payload)
    assert (named(before, "servers_joined"), named(before, "servers_gone")) == (2, 1)
    assert [named(before, "peers_total", event=event) for event in ("joined", "gone")] == [2, 1]
    with Coordination(recipe, tmp_path / "run") as made:
        assert counters(page(made)) == counters(before)


def test_a_device_tells_how_it_is(tmp_path: Path) -> None:
    pki.init(tmp_path / "pki")
    files, now = pki.issue(tmp_path / "pki", "device-0"), Condition()

    async def looked() -> tuple[bytes, bytes, bytes]:
        async with shown("127.0.0.1:0", files, now) as port:
            assert port is not None
            alone = await ask(port, b"GET /readyz HTTP/1.1\r\n\r\n")
            now.channel = cast(Channel, SimpleNamespace(answered=time.monotonic()))
            now.state = DeviceState(tmp_path / "state", "run", 0)
            now.state.rounds = [0, 2]
            ready = await ask(port, b"GET /readyz HTTP/1.1\r\n\r\n")
            return alone, ready, await ask(port, b"GET /metrics HTTP/1.1\r\n\r\n")

    alone, ready, page = asyncio.run(looked())
    assert alone.startswith(b"HTTP/1.1 503")
    assert ready.startswith(b"HTTP/1.1 200")
    found = parsed(page.partition(b"\r\n\r\n")[2].decode())
    assert (named(found, "device_rounds"), named(found, "device_pending"), named(found, "device_in_contact")) == (
        2,
        0,
        1,
    )
    assert named(found, "certificate_end_seconds") > 0


# Who asks


def ok() -> tuple[int, str]:
    return 200, "ok\n"


def broken() -> tuple[int, str]:
    raise RuntimeError("a page that cannot be made")


PAGES: dict[str, Page] = {"/healthz": ok, "/metrics": lambda: (200, "x 1\n" * 5_000), "/broken": broken}


async def ask(port: int, words: bytes = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n") -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(words)
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (b"GET /healthz HTTP/1.1\r\n\r\n", b"HTTP/1.1 200 OK"),
        (b"GET /healthz?x=1 HTTP/1.0\r\nHost: a\r\n\r\n", b"HTTP/1.1 200 OK"),
        (b"HEAD /healthz HTTP/1.1\r\n\r\n", b"HTTP/1.1 200 OK"),
        (b"GET / HTTP/1.1\r\n\r\n", b"HTTP/1.1 404 Not Found"),
        (b"GET /../../etc/passwd HTTP/1.1\r\n\r\n", b"HTTP/1.1 404 Not Found"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"HTTP/1.1 405 Method Not Allowed"),
        (b"GET /broken HTTP/1.1\r\n\r\n", b"HTTP/1.1 500 Internal Server Error"),
        (b"\r\n\r\n", b"HTTP/1.1 405 Method Not Allowed"),
        (b"\xff\xfe\x00 \xff\r\n\r\n", b""),
        (b"GET /healthz HTTP/1.1\r\n" + b"X: " + b"a" * 100_000 + b"\r\n\r\n", b""),
        (b"a" * 100_000, b""),
    ],
)
def test_whatever_is_asked_is_answered_or_hung_up_on(words: bytes, answer: bytes) -> None:
    async def asked() -> tuple[bytes, bytes]:
        async with scraped("127.0.0.1:0", PAGES) as port:
            assert port is not None
            return await ask(port, words), await ask(port)

    first, after = asyncio.run(asked())
    assert first.partition(b"\r\n")[0] == answer
    assert after.endswith(b"\r\n\r\nok\n")
    if words.startswith(b"HEAD"):
        assert first.endswith(b"Content-Length: 3\r\nConnection: close\r\n\r\n")


def test_a_crowd_that_says_nothing_and_reads_nothing_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times as many as have room stay connected, silent, half-way, or with a page that they do not read."""
    monkeypatch.setattr(scraping, "_PAUSE", 0.0)
    words = [b"", b"GET /hea", b"GET /metrics HTTP/1.1\r\n\r\n"]

    async def asked() -> tuple[bytes, int]:
        async with scraped("127.0.0.1:0", PAGES) as port:
            assert port is not None
            held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3 * MOST)]
            for place, (_, writer) in enumerate(held):
                writer.write(words[place % 3])
            found = await ask(port)
            for place, (_, writer) in enumerate(held):
                if place % 2:
                    writer.transport.abort()
            again = await ask(port)
            for _, writer in held:
                writer.transport.abort()
            return found, len(again)

    found, length = asyncio.run(asked())
    assert found.endswith(b"ok\n")
    assert length == len(found)


@pytest.mark.parametrize("turns", range(5))
def test_a_connection_that_comes_at_the_end_is_closed(turns: int) -> None:
    """Whichever turn of the loop the end comes at: what was taken by then is no socket that nobody closes."""

    async def ended() -> bytes:
        async def taken() -> None:
            (await scraping._next(asyncio.get_running_loop(), listener)).close()

        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            taking = asyncio.create_task(taken())
            for _ in range(3):  # it waits by then
                await asyncio.sleep(0)
            with socket.create_connection(listener.getsockname()) as one:
                for _ in range(turns):
                    await asyncio.sleep(0)
                taking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await taking
                listener.close()
                with contextlib.suppress(ConnectionResetError):  # it was not taken
                    return one.recv(1)
        return b""

    assert asyncio.run(ended()) == b""
    gc.collect()


def test_neither_pages_nor_the_process_wait_for_each_other() -> None:
    """A page comes while the loop of the process stands still, and one that takes long does not hold that up."""
    going, begun = threading.Event(), threading.Event()

    def slow() -> tuple[int, str]:
        begun.set()
        going.wait()
        return ok()

    async def asked() -> tuple[bytes, bytes]:
        async with scraped("127.0.0.1:0", {"/healthz": ok, "/slow": slow}) as port:
            assert port is not None
            with socket.create_connection(("127.0.0.1", port)) as one:  # this blocks the loop that it is in
                one.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
                first = b"".join(iter(lambda: one.recv(4096), b""))
            asking = asyncio.create_task(ask(port, b"GET /slow HTTP/1.1\r\n\r\n"))
            while not begun.is_set():
                await asyncio.sleep(0.001)
            going.set()
            return first, await asking

    first, second = asyncio.run(asked())
    assert first.endswith(b"ok\n")
    assert second.endswith(b"ok\n")


@pytest.mark.parametrize("address", ["here", "localhost", "127.0.0.1:99999", "127.0.0.1:-1", "300.1.1.1:80"])
def test_an_address_that_is_none_is_named(address: str) -> None:
    async def asked() -> None:
        async with scraped(address, PAGES):
            pass

    with pytest.raises(BadInput, match=r"--metrics .*: (give HOST:PORT|cannot be listened at)"):
        asyncio.run(asked())


def test_a_port_alone_is_of_this_machine_alone() -> None:
    async def asked(address: str) -> bytes:
        async with scraped(address, PAGES) as port:
            assert port is not None
            with socket.create_connection(("127.0.0.1", port)) as one:
                return one.getpeername()[0].encode()

    assert asyncio.run(asked("0")) == b"127.0.0.1"


def test_without_an_address_there_are_no_pages() -> None:
    async def asked() -> int | None:
        async with scraped(None, PAGES) as port:
            return port

    assert asyncio.run(asked()) is None


def test_threads_take_shorter_turns_while_pages_are_shown() -> None:
    before = sys.getswitchinterval()

    async def shown() -> float:
        async with scraped("127.0.0.1:0", PAGES):
            return sys.getswitchinterval()

    assert asyncio.run(shown()) < before / 5
    assert sys.getswitchinterval() == before
