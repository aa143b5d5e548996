"""What servers and devices print: words as before, or a line of JSON each."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import personafl
from personafl.api.deployment import _failing, _heard
from personafl.deploy.net.telling import Told
from personafl.deploy.server.history import Closed
from personafl.deploy.server.service import Event
from personafl.errors import BadInput

CLOSED = Event("closed", "", round=2, closed=Closed(2, (0, 1), 3, 0.25))
SAID = [
    (Event("enrolled", "device-7, 50 samples", "device-7"), "enrolled: device-7, 50 samples", "info"),
    (CLOSED, "round 3: 2 of 3 updates, loss 0.2500", "info"),
    (Event("refused", "device-7: BUSY: later", "device-7", 2), "refused: device-7: BUSY: later", "warning"),
    (Event("gone", "cloud-1; it is not waited for", "cloud-1"), "gone: cloud-1; it is not waited for", "warning"),
    (Told("accepted", "round 3: update accepted, 9 bytes", "device-7", 2), "round 3: update accepted, 9 bytes", "info"),
]


@pytest.mark.parametrize(("told", "words", "level"), SAID)
def test_a_line_of_words_is_as_it_was_and_one_of_json_has_its_facts(told: Told, words: str, level: str) -> None:
    lines: list[str] = []
    _heard(lines.append, "text")(told)
    _heard(lines.append, "json")(told)
    assert lines[0] == words
    assert "\n" not in lines[1]
    found = json.loads(lines[1])
    assert datetime.fromisoformat(found.pop("time")).tzinfo is not None
    assert found == {
        "level": level,
        "event": told.what,
        "text": told.text or words,
        **({"device" if told.who.startswith("device") else "peer": told.who} if told.who else {}),
        **({"round": 3} if told.round == 2 else {}),
    }


def test_what_others_say_stays_one_line_of_plain_signs() -> None:
    lines: list[str] = []
    _heard(lines.append, "json")(Event("refused", "\x1b]0;owned\x07\nlevel: info", "unknown"))
    (line,) = lines
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line)["text"] == "\x1b]0;owned\x07\nlevel: info"


@pytest.mark.parametrize(("log_format", "events"), [("text", []), ("json", ["failed"])])
def test_the_error_that_ends_a_process_is_in_a_log_for_programs(log_format: str, events: list[str]) -> None:
    lines: list[str] = []
    with pytest.raises(BadInput), _failing(_heard(lines.append, log_format), "device-7"):
        raise BadInput("the server: refused this device")
    found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    assert [line["event"] for line in found] == events
    assert all(line["level"] == "error" and line["device"] == "device-7" for line in found)


def test_another_format_is_named(tmp_path: Path) -> None:
    personafl.make_authority(tmp_path)
    personafl.issue_certificates(tmp_path, ["device-0"])
    given: dict[str, Any] = {"data": "x", "identity": tmp_path / "device-0.pem", "state": tmp_path / "state"}
    with pytest.raises(BadInput, match="--log-format xml: text or json"):
        personafl.run_device("localhost:1", **given, log_format="xml")
