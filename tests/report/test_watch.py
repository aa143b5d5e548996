"""Watching: where runs stand by their files, in the terminal and as a page of this machine."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from personafl import cli
from personafl.errors import BadInput
from personafl.report.load import load
from personafl.report.progress import State, changed_at, overall, states
from personafl.report.serve import served
from personafl.report.watch import view, watch

Copied = Callable[[Path], Path]
COMMAND = [sys.executable, "-c", "from personafl.cli import main; main()"]


def halved(path: Path, rounds: int = 2) -> list[dict[str, float]]:
    """Take a finished run back to where some of its rounds were done; return these."""
    (path / "result.json").unlink()
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    kept = [line for line in lines if line["number"] < rounds]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    return [line for line in kept if line["event"] == "round"]


def ended(path: Path, whole: Path) -> None:
    """Let a run that was taken back end, as it did in another directory."""
    for name in ("metrics.jsonl", "result.json"):
        (path / name).write_bytes((whole / name).read_bytes())


def fetched(address: str, host: str | None = None) -> tuple[int, str]:
    request = urllib.request.Request(address, headers={"Host": host} if host else {})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.system
def test_states_of_a_comparison_in_progress(comparison: Path, copied: Copied) -> None:
    """Two rounds that took t seconds leave two that take t; a run that has not begun is as its method's other seed."""
    path = copied(comparison)
    rounds = halved(path / "ditto-seed1")
    for name in ("local-seed0", "local-seed1"):
        (path / name).rename(path.parent / name)
    found = {state.name: state for state in states(load([path]))}
    spent = sum(entry["seconds"] for entry in rounds)
    on = found["ditto seed 1"]
    assert (on.done, on.rounds, on.finished) == (2, 4, False)
    assert on.left == pytest.approx(spent)
    assert on.speed == pytest.approx(sum(entry["clients"] for entry in rounds) / spent)
    scored = [json.loads(line) for line in (path / "ditto-seed1/metrics.jsonl").read_text().splitlines()]
    assert on.accuracy == [line["mean"] for line in scored if line.get("model") == "personal"][-1]
    done = found["ditto seed 0"]
    assert (done.finished, done.left) == (True, 0.0)
    known = [e["seconds"] for source in load([path]) for run in source.runs for e in run.trained]
    assert found["local seed 0"].left == pytest.approx(4 * sum(known) / len(known))
    left = overall(list(found.values()))
    assert left == pytest.approx(spent + 8 * sum(known) / len(known))


def test_nothing_to_reckon_by() -> None:
    blank = State(name="a", done=0, rounds=5, finished=False, loss=None, accuracy=None, speed=None, left=None)
    assert overall([blank]) is None
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(view([blank] * 30, 0.0, "", 80))
    text = console.export_text()
    assert "0 of 30 runs finished" in text
    assert "and 10 more" in text


def test_a_run_that_nobody_continues_says_how(comparison: Path, copied: Copied) -> None:
    path = copied(comparison)
    halved(path / "ditto-seed1")
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(view(states(load([path])), 3700.0, "personafl resume x", 300))
    assert "nothing new for 1:01:40; if nothing is running it: personafl resume x" in console.export_text()


def test_watch_ends_when_the_last_run_does(comparison: Path, copied: Copied) -> None:
    path = copied(comparison)
    halved(path / "ditto-seed1")
    looks = []

    def pause(_: float) -> None:
        looks.append(len(looks))
        if len(looks) == 2:
            ended(path / "ditto-seed1", comparison / "ditto-seed1")

    console = Console(width=100, record=True, file=io.StringIO())
    watch([path], console, pause=pause)
    assert looks == [0, 1]


def test_the_page_is_for_this_machine_and_follows_the_run(comparison: Path, copied: Copied) -> None:
    path = copied(comparison)
    halved(path / "ditto-seed1")
    with served([path]) as address:
        assert address.startswith("http://127.0.0.1:")
        status, text = fetched(address)
        assert status == 200
        assert "ditto, seed 1: 2 of 4 rounds" in text
        assert "<body data-live>" in text
        before = fetched(address + "version")
        ended(path / "ditto-seed1", comparison / "ditto-seed1")
        os.utime(path / "ditto-seed1/result.json", (time.time() + 5, time.time() + 5))
        assert fetched(address + "version") != before
        assert "6 of 6 runs finished" in fetched(address)[1]
        for link in re.findall(r'href="([^"#]*\.toml)"', text):
            assert fetched(address + link) == (200, (path / link).read_text())
        for stranger in ("../secret", "ditto-seed0/result.json", "etc/passwd", "%2e%2e/x"):
            assert fetched(address + stranger)[0] == 404
        assert fetched(address, host="evil.example")[0] == 403
        (path / "ditto-seed0/split.json").write_text("{")
        assert "ditto-seed0/split.json: cannot be read" in fetched(address)[1]
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(address)


def test_a_port_that_is_taken_is_named(comparison: Path) -> None:
    with served([comparison]) as address:
        port = int(address.rsplit(":", 1)[1].strip("/"))
        with pytest.raises(BadInput, match=rf"--port: {port} cannot be used on 127.0.0.1"), served([comparison], port):
            raise AssertionError


def test_changes_are_seen_by_the_files(comparison: Path) -> None:
    written = [path.stat().st_mtime for path in comparison.glob("*/result.json")]
    assert changed_at(load([comparison])) == max(written)


def test_commands(
    comparison: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`watch` of a finished comparison prints its table and ends; with a page it ends by Ctrl-C, with no error."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["personafl", *words])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        return int(exit_.value.code or 0), *capsys.readouterr()

    code, out, err = run("watch", str(comparison))
    assert code == 0, err
    assert "6 of 6 runs finished" in out
    assert "mean ± std over 2 seeds" in out
    assert run("report", str(comparison), "--out", "x.html") == (0, "report: x.html\n", "")
    assert (tmp_path / "x.html").exists()
    code, _, err = run("report", "nowhere")
    assert code == 2
    assert "nowhere: not a run directory" in err


@pytest.mark.system
def test_ctrl_c_ends_the_page(comparison: Path) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [*COMMAND, "watch", str(comparison), "--page"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # whoever runs the tests may ignore it
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    address = re.search(r"http://127\.0\.0\.1:\d+/", first)
    assert address, first
    assert fetched(address[0])[0] == 200
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert errors == ""
