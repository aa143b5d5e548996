"""One question on privacy: of epsilon, delta, noise and rounds three are given, and the fourth is found."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from decimal import ROUND_CEILING, Context
from typing import Any, cast

from personafl.errors import BadInput, did_you_mean
from personafl.privacy import accounting
from personafl.privacy.kinds import CORRELATED, MECHANISMS, Mechanism
from personafl.privacy.mechanisms import ACCOUNTANTS, SHARED


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What rounds with noise promise to each client, which of it was computed (`found`), and what it rests on."""

    epsilon: float
    delta: float
    noise: float
    rounds: int
    rate: float  # of Poisson sampling; 1: none is claimed
    trees: int  # of the tree mechanism, of so many rounds each
    apart: int  # of the banded mechanism: rounds from a client's turn to its next, at least
    mechanism: Mechanism
    accountant: accounting.Accountant
    found: str

    @property
    def promise(self) -> str:
        """The four numbers: first the one that was found, rounded so that the promise holds, then those given."""
        values = {"epsilon": self.epsilon, "delta": self.delta, "noise": self.noise}
        parts = {name: f"{name} {_up(value) if name == self.found else value:.12g}" for name, value in values.items()}
        parts["rounds"] = f"{self.rounds:,} round{'s' * (self.rounds > 1)}"
        first = parts.pop(self.found)
        return f"{first}, with {', '.join(parts.values())}"

    @property
    def assumption(self) -> str:
        """What must be true of the rounds."""
        if self.mechanism == "tree":
            often = "once at most" if self.trees == 1 else f"once at most in each of {self.trees:,} trees"
            return f"assumed: one client's updates zero or not; it takes part {often}, however clients are drawn"
        if self.mechanism == "banded":
            often = f"once at most in {self.apart:,} rounds" if self.apart > 1 else "in all rounds"
            return f"assumed: one client's updates zero or not; it takes part {often}, however clients are drawn"
        if self.mechanism == "distributed":
            return f"assumed: {SHARED}"
        if self.rate == 1:
            return "assumed: one client more or less, in all rounds, however clients are drawn (no amplification)"
        chance = f"in each round every client takes part with chance {self.rate:g}, by itself"
        return f"assumed: one client more or less; Poisson sampling: {chance}"

    @property
    def method(self) -> str:
        """Which accountant says so."""
        if self.accountant == "shares":
            return "accountant: RDP (Rényi divergences) at whole orders, and what sums are off, by dp-accounting"
        if self.accountant == "whole":
            return "accountant: RDP (Rényi divergences) at whole orders, exact for discrete noise, by dp-accounting"
        if self.accountant == "rdp":
            return "accountant: RDP (Rényi divergences), an upper bound, by dp-accounting"
        if self.rate == 1:
            return "accountant: the closed form of Gaussian noise (Balle & Wang 2018), by dp-accounting"
        return "accountant: PLD (distributions of privacy loss), rounded up, by dp-accounting"

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON has it."""
        return asdict(self) | {"assumption": self.assumption, "method": self.method}


def answer(
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    noise: float | None = None,
    rounds: int | None = None,
    rate: float | None = None,
    mechanism: str = "gaussian",
    trees: int | None = None,
    apart: int | None = None,
    accountant: str | None = None,
) -> Answer:
    """Find the one of epsilon, delta, noise and rounds that is not given."""
    given = {"epsilon": epsilon, "delta": delta, "noise": noise, "rounds": rounds}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) != 1:
        raise BadInput(f"{', '.join(given)}: give three of them, and the fourth is computed; {4 - len(missing)} given")
    found, rest = missing[0], {name: value for name, value in given.items() if value is not None}
    if mechanism not in MECHANISMS:
        raise BadInput(f"mechanism: unknown {mechanism!r}; {did_you_mean(mechanism, MECHANISMS)}")
    if trees is not None and mechanism != "tree":
        raise BadInput(f"trees: mechanism {mechanism} has none; leave it out, or set mechanism tree")
    if (apart is not None) != (mechanism == "banded"):
        only = "after how many rounds a client may take part again is for mechanism banded, and it needs that"
        raise BadInput(f"apart: {only}; {'leave it out' if apart is not None else 'give it, such as 20'}")
    if mechanism != "gaussian" and accountant is not None and not (mechanism == "tree" and accountant == "rdp"):
        raise BadInput(f"accountant: mechanism {mechanism} has one of its own; leave it out")
    if mechanism in (*CORRELATED, "distributed") and rate is not None:
        raise BadInput(f"rate: mechanism {mechanism} claims no sampling; leave it out")
    how: dict[str, Any] = {"rate": 1.0, "trees": 1, "apart": 1, "mechanism": mechanism}
    if mechanism == "tree":
        how |= {"trees": 1 if trees is None else trees, "accountant": "rdp"}
        value = _TREE[found](**rest, trees=how["trees"])
    elif mechanism == "banded":
        how |= {"apart": accounting.checked(apart=apart), "accountant": "pld"}
        value = _banded(found, rest, how["apart"])
    else:
        how |= {"rate": 1.0 if rate is None else rate}
        how |= {"accountant": ACCOUNTANTS.get(mechanism, accountant or "pld")}
        value = _GAUSSIAN[found](**rest, rate=how["rate"], accountant=how["accountant"])
    return Answer(**{**given, found: value}, **how, found=found)


def _banded(found: str, rest: Mapping[str, Any], apart: int) -> float | int:
    """Return an answer for k = ⌈rounds/apart⌉ turns of a client, of which each is one Gaussian."""
    if found == "rounds":
        return min(accounting.MOST_ROUNDS, apart * accounting.rounds_for(**rest))
    turns = math.ceil(accounting.checked(rounds=rest["rounds"]) / apart)
    return cast(float, _GAUSSIAN[found](**{**rest, "rounds": turns}))


_GAUSSIAN: dict[str, Any] = {
    "epsilon": accounting.epsilon,
    "delta": accounting.delta_for,
    "noise": accounting.noise_for,
    "rounds": accounting.rounds_for,
}
_TREE: dict[str, Any] = {
    "epsilon": accounting.tree_epsilon,
    "delta": accounting.tree_delta_for,
    "noise": accounting.tree_noise_for,
    "rounds": accounting.tree_rounds_for,
}


def _up(value: float) -> float:
    """Return four digits, rounded up: more epsilon, delta or noise is safe."""
    return float(Context(prec=4, rounding=ROUND_CEILING).create_decimal_from_float(value))
