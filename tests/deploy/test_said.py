"""What a peer says does not reach a terminal or a log as more than text, and not without end."""

from __future__ import annotations

import asyncio
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from deploy_harness import answering, identity_of
from processes import recipe_of

from personafl import cli
from personafl.deploy import pki
from personafl.deploy.net.identity import Identity
from personafl.deploy.net.messages import Code, Hello, Refused, Report, Said
from personafl.deploy.server import members, service
from personafl.deploy.server.rounds import Rounds
from personafl.deploy.server.server import Server, ServerConfig
from personafl.errors import printable

HOSTILE = "\x1b]0;owned\x07\x1b[2J\nround 9: update accepted \u202e\x9b31m"  # a title, a clean screen, a line, colours


def test_signs_that_are_none_are_written_out() -> None:
    assert printable("naïve 日本 –") == "naïve 日本 –"
    assert printable("a\x1b[2J\r\n\x00\x9b\u202e\ud800") == "a\\x1b[2J\\r\\n\\x00\\x9b\\u202e\\ud800"


def plain(text: str) -> bool:
    return all(sign.isprintable() or sign == "\n" for sign in text)


def test_a_servers_texts_reach_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pki.init(tmp_path / "pki")
    device, coordinator = (pki.issue(tmp_path / "pki", name) for name in ("device-0", "coordinator"))
    refusals = [Refused(Code.BUSY, HOSTILE), Refused(Code.REVOKED, HOSTILE)]

    async def refuse(identity: Identity, said: Said) -> Said:
        if identity.name == "coordinator":
            rows = [{"name": HOSTILE, "number": 1, "samples": 2, "left": False, "alive": True}]
            rows[0] |= {"dropped": False, "revoked": False}
            facts: dict[str, Any] = {"name": HOSTILE, "method": HOSTILE, "rounds": 3, "done": 1, "finished": False}
            facts |= {"open": None, "devices": rows, "refused": {HOSTILE: 1}}
            return Said(Report(), json.dumps(facts).encode())
        raise refusals.pop(0)

    def command(*words: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["personafl", *words])
        try:
            cli.main()
        except SystemExit as ended:
            return ended.code

    async def asked() -> tuple[Any, Any]:
        async with answering(tmp_path / "pki", refuse) as port:
            where = ["--server", f"localhost:{port}", "--identity"]
            own = ["--data", "x.npz", "--state", str(tmp_path / "state")]
            first = await asyncio.to_thread(command, "device", *where, str(device.certificate), *own)
            return first, await asyncio.to_thread(command, "status", *where, str(coordinator.certificate))

    assert asyncio.run(asked()) == (2, 0)
    printed = capsys.readouterr()
    assert "does not answer (BUSY: \\x1b]0;owned" in printed.out
    assert "refused this device: REVOKED: \\x1b]0;owned" in printed.err
    assert printed.out.count("\\x1b]0;owned") >= 4
    assert plain(printed.out)
    assert plain(printed.err)


def test_refusals_are_told_and_written_down_only_so_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MOST_REFUSALS", 3)
    recipe = recipe_of("fedavg", 2)
    pki.init(tmp_path / "pki")
    files = pki.issue(tmp_path / "pki", "server")
    told: list[str] = []
    with Rounds(recipe, tmp_path / "run") as rounds, ThreadPoolExecutor(1) as worker:
        listed = tmp_path / "pki" / "revoked.pem"
        config = ServerConfig(recipe=recipe, out=tmp_path, files=files, revocations=listed, listen="localhost:0")
        serving = Server(config, rounds, worker, lambda event: told.append(str(event)))
        for _ in range(9):
            serving._refused("device-0", Refused(Code.MALFORMED, HOSTILE * 1000))
        assert serving._refusals == {Code.MALFORMED: 9}
    assert len(told) == 3
    assert max(map(len, told)) < 300
    journal = (tmp_path / "run" / "journal.jsonl").read_text()
    assert journal.count("MALFORMED") == 3
    assert plain(journal)


def test_one_that_comes_and_goes_does_not_fill_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "_MOST_LEAVES", 3)
    pki.init(tmp_path / "pki")
    who = identity_of(tmp_path / "pki", "device-0")
    recipe = recipe_of("fedavg", 2).model_dump(mode="json", exclude_none=True)
    recipe["data"]["normalize"] = "none"
    with Rounds(type(recipe_of("fedavg")).parse(recipe), tmp_path / "run") as rounds:
        for _ in range(20):
            rounds.enrol(who, Hello(samples=9, input_shape=[1, 8, 8], classes=10))
            rounds.leave(0)
    events = [json.loads(line)["event"] for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    assert (events.count("enrolled"), events.count("left")) == (4, 3)
