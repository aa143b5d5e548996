"""The command and its function: any of the four numbers is found, and what it rests on is said."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

pytest.importorskip("dp_accounting", reason="the extra privacy is not installed")
import personafl
from personafl import cli
from personafl.errors import BadInput
from personafl.privacy.answers import answer

PROMISE = {"epsilon": 4.0, "delta": 1e-5, "noise": 10.0, "rounds": 100}


def typed(*words: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["personafl", "privacy", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--noise", 1.5, "--rate", 0.04, "--rounds", 2250, "--delta", 1e-5)
    assert typed(*words, monkeypatch=monkeypatch) == 0
    promise, assumption, method = capsys.readouterr().out.splitlines()
    assert promise == "epsilon 6.77, with delta 1e-05, noise 1.5, 2,250 rounds"
    assert "Poisson sampling: in each round every client takes part with chance 0.04" in assumption
    assert "PLD" in method
    assert typed(*words, "--json", monkeypatch=monkeypatch) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["epsilon"] == pytest.approx(6.7694, abs=1e-4)
    assert found["found"] == "epsilon"


def test_the_command_names_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed("--noise", 1.5, monkeypatch=monkeypatch) == 2
    assert "give three of them, and the fourth is computed; 1 given" in capsys.readouterr().err


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"rate": 0.2},
        {"accountant": "rdp"},
        {"mechanism": "tree"},
        {"mechanism": "banded", "apart": 3},
        {"mechanism": "discrete"},
        {"mechanism": "distributed"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", PROMISE)
def test_any_of_the_four_is_found(name: str, how: dict[str, Any]) -> None:
    """And the promise holds: with the number that was found, epsilon is not above the one that was asked for."""
    found = personafl.account_privacy(**{key: value for key, value in PROMISE.items() if key != name}, **how)
    assert found.found == name
    assert found.promise.startswith(name if name != "rounds" else f"{found.rounds:,} round")
    three = {"delta": found.delta, "noise": found.noise, "rounds": found.rounds}
    assert answer(**three, **how).epsilon <= found.epsilon * (1 + 1e-9)


def test_the_assumption_is_said() -> None:
    three: dict[str, Any] = {"delta": 1e-5, "noise": 2.0, "rounds": 10}
    assert "no amplification" in answer(**three).assumption
    assert "closed form" in answer(**three).method
    assert "RDP" in answer(**three, accountant="rdp").method
    assert "takes part once at most," in answer(**three, mechanism="tree").assumption
    assert "in each of 4 trees" in answer(**three, mechanism="tree", trees=4).assumption
    banded = answer(**three, mechanism="banded", apart=5)
    assert "takes part once at most in 5 rounds" in banded.assumption
    assert banded.epsilon == answer(delta=1e-5, noise=2.0, rounds=2).epsilon
    assert "whole orders" in answer(**three, mechanism="discrete").method
    shared = answer(**three, mechanism="distributed")
    assert "zero or not" in shared.assumption
    assert "what sums are off" in shared.method
    assert answer(**three, mechanism="discrete").epsilon < shared.epsilon
    assert shared.epsilon < answer(**three, mechanism="discrete").epsilon + 1e-9


def test_numbers_found_are_rounded_up() -> None:
    found = answer(delta=1e-5, noise=2.0, rounds=10)
    assert found.epsilon <= float(found.promise.split()[1].rstrip(",")) <= found.epsilon * 1.001


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"epsilon": 1.0}, "^epsilon, delta, noise, rounds: give three of them"),
        (
            {"mechanism": "laplace"},
            "^mechanism: unknown 'laplace'; valid: banded, discrete, distributed, gaussian, tree",
        ),
        ({"mechanism": "tree", "rate": 0.1}, "^rate: mechanism tree claims no sampling"),
        ({"mechanism": "distributed", "rate": 0.1}, "^rate: mechanism distributed claims no sampling"),
        ({"mechanism": "tree", "accountant": "pld"}, "^accountant: mechanism tree has one of its own"),
        ({"mechanism": "discrete", "accountant": "pld"}, "^accountant: mechanism discrete has one of its own"),
        ({"mechanism": "banded"}, "^apart: .*give it, such as 20"),
        ({"mechanism": "banded", "apart": 0}, "^apart: 0 is not possible"),
        ({"apart": 3}, "^apart: .*leave it out"),
        ({"trees": 2}, "^trees: mechanism gaussian has none"),
        ({"accountant": "moments"}, "^accountant: 'moments' is not possible; it must be pld or rdp"),
    ],
)
def test_a_wrong_question_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        answer(**{"delta": 1e-5, "noise": 2.0, "rounds": 10} | wrong)
