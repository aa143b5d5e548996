"""The times of servers made of devices, the pace with kept work, the proposal, and the command."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from personafl import cli
from personafl.cloud.clock import Phases, play
from personafl.cloud.protocol import Coordinator
from personafl.cloud.topology import Topology
from personafl.errors import BadInput
from personafl.latency.laws import Constant, Exponential, Law, Pareto, Trace, Weibull
from personafl.latency.order import expected_times
from personafl.latency.samples import Sample
from personafl.latency.waiting import analyse, kept_pace, rigorous_pace, round_times, server_times

PAPER: tuple[Law, Law] = (Exponential(mean=2.0), Exponential(mean=1.0))


def test_ratios_of_the_papers_latencies() -> None:
    """10 servers of 10 devices, 3 active, Exp(2) + U{1..5} · Exp(1): about .22, .32 and .46 for B = 3, 5, 7."""
    times = expected_times(server_times(*PAPER, devices=10, active=3, seed=0), 10, np.array([3, 5, 7, 10]))
    np.testing.assert_allclose(times[:3] / times[3], [0.22, 0.32, 0.46], atol=0.005)


def test_paces_of_the_papers_latencies() -> None:
    """In units of sync's: .140, .263 and .424 with kept work, .460, .512 and .594 where late servers go on alone."""
    law = server_times(*PAPER, devices=10, active=3, seed=0)
    sync = expected_times(law, 10, np.array([10]))[0]
    for pace, wanted in ((kept_pace, [0.140, 0.263, 0.424]), (rigorous_pace, [0.460, 0.512, 0.594])):
        found = [pace(law, 10, first)[0] / sync for first in (3, 5, 7)]
        np.testing.assert_allclose(found, wanted, atol=0.008)


def test_the_rigorous_pace_is_that_of_the_cloud() -> None:
    law = Weibull(shape=2.0)
    draw = np.random.default_rng(0)
    drawn = iter(law.quantile(draw.random(20_000)).tolist())
    events = play(Coordinator(4, 2, rigorous=True), lambda server, number: (np.array([server]), next(drawn)))
    for _ in range(100):
        begin = next(events).time
    for _ in range(2000):
        end = next(events).time
    pace, error = rigorous_pace(law, 4, 2)
    assert (end - begin) / 2000 == pytest.approx(pace, rel=0.03)
    assert error < 0.01 * pace
    assert rigorous_pace(law, 4, 1) == (law.mean, 0.0)
    assert rigorous_pace(law, 4, 4) == kept_pace(law, 4, 4)


def test_waiting_for_one_alone_is_warned_of() -> None:
    law = Exponential(mean=1.0)
    assert any(note.startswith("B = 1: nothing is mixed") for note in analyse(law, 4, first=1).notes)
    assert not analyse(law, 4, first=2).notes
    assert not analyse(law, 1, first=1).notes


def test_a_server_takes_as_long_as_its_last_device() -> None:
    one = server_times(Exponential(mean=2.0), Constant(seconds=0.0), devices=4, active=2, seed=0)
    assert one.mean == pytest.approx(2 * (1 / 4 + 1 / 3), rel=0.01)  # the second of four
    two = server_times(Constant(seconds=1.0), Constant(seconds=0.5), steps=3, devices=2, active=2, seed=0)
    assert set(two.values) == {1.5, 2.0, 2.5}
    assert two.mean == pytest.approx((1 * 1.5 + 3 * 2.0 + 5 * 2.5) / 9, rel=0.01)  # the most of two of 1, 2, 3 steps
    assert server_times(*PAPER, devices=3, active=2, seed=1, rounds=5).values.tolist() != one.values[:5].tolist()


def phases(active: int) -> Phases:
    return Phases(
        topology=Topology(home=np.arange(40) // 10, devices=tuple(np.arange(10 * n, 10 * n + 10) for n in range(4))),
        active=active,
        arrival=PAPER[0],
        step=PAPER[1],
        steps=lambda devices, number: 1 + (devices + number) % 5,
        seed=0,
    )


def test_simulated_servers_are_those_of_the_cloud() -> None:
    drawn = np.array([phases(3)(server, number)[1] for number in range(500) for server in range(4)])
    expected = server_times(*PAPER, devices=10, active=3, seed=5)
    assert abs(drawn.mean() - expected.mean) < 4 * drawn.std() / np.sqrt(len(drawn))


def test_the_pace_is_that_of_the_cloud() -> None:
    """The protocol, played in virtual time, mixes as often as the analysis says."""
    law = Weibull(shape=2.0)
    draw = np.random.default_rng(0)
    events = play(Coordinator(4, 2), lambda server, number: (np.array([server]), float(law.quantile(draw.random()))))
    for _ in range(100):
        begin = next(events).time
    for _ in range(2000):
        end = next(events).time
    pace, error = kept_pace(law, 4, 2)
    assert (end - begin) / 2000 == pytest.approx(pace, rel=0.04)
    assert error < 0.01 * pace


def test_pace_without_memory_is_that_of_a_fresh_start() -> None:
    """Of exponential times, what is left is exponential again: kept work is no gain."""
    law = Exponential(mean=2.0)
    expected = expected_times(law, 6, np.arange(1, 7))
    for first in range(1, 7):
        pace, error = kept_pace(law, 6, first)
        assert abs(pace - expected[first - 1]) <= 4 * error + 1e-9
    assert kept_pace(law, 6, 3) == kept_pace(law, 6, 3) != kept_pace(law, 6, 3, seed=1)


@pytest.mark.parametrize(("first", "mixes"), [(1, 10), (2, 5), (3, 3), (4, 2), (5, 2), (6, 1), (10, 1)])
def test_pace_of_constant_times(first: int, mixes: int) -> None:
    """Every second all 10 servers are there, new or left over from the last: ⌊10/B⌋ mixes, and the rest waits on."""
    pace, error = kept_pace(Constant(seconds=1.0), 10, first)
    assert error == pytest.approx(0.0, abs=1e-12)
    assert pace == pytest.approx(1 / mixes, rel=0.02)


def test_proposal_of_memoryless_servers_by_hand() -> None:
    """(B−1)/Σ 1/i over N−B < i ≤ N, N = 10: 4.74, 5.95, 6.26, 6.19, 5.91, … for B = 2, 3, …: the most at B = 4."""
    waiting = analyse(Exponential(mean=3.0), 10)
    assert waiting.proposed.first == 4
    assert waiting.near == (0.3, 0.5)
    assert waiting.proposed.agreement == pytest.approx(3 / 9 * 2.9290 / 0.4790, rel=0.02)
    last = waiting.choices[-1]
    assert (last.first, last.ratio, last.pace, last.work, last.agreement) == (10, 1.0, 1.0, 1.0, 1.0)
    assert (last.bound, last.weibull) == (None, None)
    assert waiting.choices[2].weibull == pytest.approx(waiting.choices[2].bound)
    assert waiting.choices[0].agreement == 0.0
    assert waiting.notes == ()


def test_servers_that_take_equally_long_are_all_waited_for() -> None:
    assert analyse(Constant(seconds=2.0), 10).proposed.first == 10
    assert analyse(Weibull(shape=30.0), 10).proposed.first == 10
    assert analyse(Exponential(mean=1.0), 1).proposed.first == 1
    assert analyse(Exponential(mean=1.0), 2).proposed.first == 2


def test_choices_of_many_servers_are_spaced_and_include_the_one_asked_for() -> None:
    waiting = analyse(Exponential(mean=1.0), 50, first=7)
    numbers = [choice.first for choice in waiting.choices]
    assert len(numbers) == 21
    assert {1, 7, 50} <= set(numbers)
    assert [choice.first for choice in waiting.only(7).choices] == [7]
    assert waiting.only(None) == waiting


def test_notes(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.arange(1.0, 20.0))
    assert "19 times for 4 servers" in analyse(Trace(file=str(tmp_path / "t.npy")), 4).notes[0]
    assert "so heavy" in analyse(Pareto(shape=1.8), 4).notes[0]
    assert "so heavy" in analyse(Weibull(shape=0.1), 10).notes[0]
    rare = analyse(Sample.of([0.0] * 99_999 + [1.0]), 4)
    assert all(np.isfinite([choice.work, choice.agreement]).all() for choice in rare.choices)


@pytest.mark.parametrize(
    ("law", "servers", "first", "message"),
    [
        (Exponential(mean=1.0), 0, None, "servers 0: must be from 1 to 1000"),
        (Exponential(mean=1.0), 1001, None, "servers 1001"),
        (Exponential(mean=1.0), 10, 11, "first 11: must be from 1 to the number of servers, 10"),
        (Exponential(mean=1.0), 10, 0, "first 0"),
        (Constant(seconds=0.0), 10, None, "all times are 0"),
    ],
)
def test_bad_questions(law: Law, servers: int, first: int | None, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        analyse(law, servers, first=first)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"latency": "exponential:mean=1", "trace": Path("a")}, "--latency and --trace"),
        ({"trace": Path("a"), "steps": 3}, "--trace and --steps"),
        ({"latency": "exponential:mean=1", "devices": 0}, "--latency and --devices"),
        ({"devices": 3, "active": 4}, "active 4: must be from 1 to the number of devices, 3"),
        ({"devices": 0}, "active 0"),
        ({"steps": 0}, "steps 0: must be 1 or more"),
        ({"arrival": "never"}, "latency 'never' is unknown"),
    ],
)
def test_bad_times(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        round_times(**given)


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """Run the command line in this process; return what it printed."""

    def run(*words: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["personafl", "latency", *words])
        for name in ("out", "err"):
            monkeypatch.setattr(getattr(cli, name), "_width", 100)
        with pytest.raises(SystemExit) as stop:
            cli.main()
        printed = capsys.readouterr()
        return (printed.out, printed.err) if stop.value.code == 0 else (f"code {stop.value.code}", printed.err)

    return run


def test_the_command_prints_a_table_and_draws(main: Callable[..., tuple[str, str]], tmp_path: Path) -> None:
    svg = tmp_path / "a.svg"
    out, err = main("--latency", "weibull:shape=2", "--servers", "6", "--svg", str(svg))
    assert "N = 6 servers" in out
    assert "weibull:shape=2" in out
    assert "proposal: β = " in out
    assert sum(line.lstrip()[:1].isdigit() for line in out.splitlines()) == 6
    assert f"picture: {svg}" in err
    text = svg.read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert "Weibull closed form" in text
    assert main("--latency", "weibull:shape=2", "--servers", "6", "--svg", str(svg))[0] == out
    assert svg.read_text() == text


def test_the_command_prints_json(main: Callable[..., tuple[str, str]], tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("\n".join(map(str, range(1, 100))))
    found = json.loads(main("--trace", str(tmp_path / "t.txt"), "--servers", "4", "--first", "3", "--json")[0])
    assert [choice["first"] for choice in found["choices"]] == [3]
    assert found["choices"][0]["bound"] == 1.0
    assert "99 measured rounds" in found["times"]
    assert found["servers"] == 4
    assert 1 <= found["proposed"]["first"] <= 4


def test_the_command_says_what_is_wrong(main: Callable[..., tuple[str, str]]) -> None:
    for words, message in [
        (["--first", "11"], "error: first 11: must be from 1 to the number of servers, 10"),
        (["--servers", "0"], "error: servers 0"),
        (["--latency", "gauss:mean=1"], "error: latency 'gauss' is unknown"),
        (["--trace", "none.txt"], "error: none.txt: cannot read the trace"),
        (["--latency", "exponential:mean=-1"], "mean: Input should be greater than 0"),
    ]:
        out, err = main(*words)
        assert out == "code 2"
        assert message in err
        assert err.count("\n") == 1
