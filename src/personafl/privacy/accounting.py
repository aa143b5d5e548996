"""How much privacy rounds of clipped sums with Gaussian noise cost clients, and what a given privacy costs.

`noise` is the multiplier: the noise's standard deviation over the clip, the most that one client can change a sum by.
`rate` is the chance with which each client takes part in a round, by itself (Poisson sampling); 1 claims nothing of how
clients are drawn. Neighbours are federations with and without one client. All answers err to the safe side: an epsilon
or delta is not below the true one, noise and rounds keep to the budget.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral, Real
from typing import Any, Literal

import numpy as np
from scipy.optimize import brentq

from personafl.errors import BadInput
from personafl.privacy.kinds import EXCESS
from personafl.privacy.library import library, unheard
from personafl.privacy.losses import Group, distribution

# whole: rdp at whole orders, which holds for discrete noise too; shares: for sums of that, which are a little off
Accountant = Literal["pld", "rdp", "whole", "shares"]
LEAST_NOISE, MOST_NOISE, MOST_ROUNDS = 1e-3, 1e6, 10**7
LEAST_DELTA = 1e-12  # of distributions: what they cut off and round is well below it
SLACK = 1e-9  # more than the closed form and its roots are off


@dataclass(frozen=True)
class Spent:
    """The rounds that a ledger has: each noise and rate once, and how many rounds had them."""

    groups: tuple[Group, ...] = ()

    def add(self, noise: float, rate: float = 1.0, count: int = 1) -> "Spent":
        """Return it with further rounds."""
        _check(noise=noise, rate=rate, rounds=count)
        counts = {(was, at): many for was, at, many in self.groups}
        counts[noise, rate] = counts.get((noise, rate), 0) + count
        return Spent(tuple((*pair, many) for pair, many in counts.items()))

    def epsilon(self, delta: float, accountant: Accountant = "pld") -> float:
        """Return epsilon of all rounds together; 0 before the first."""
        _check(delta=delta, accountant=accountant)
        if not self.groups:
            return 0.0
        if accountant != "pld":
            orders, divergences = self._renyi(accountant)
            return float(library().rdp.compute_epsilon(orders, divergences, delta)[0])
        if (noise := self._unsampled()) is not None:
            return _gaussian_epsilon(noise, delta)
        if delta < LEAST_DELTA:
            raise BadInput(f"delta: {delta} is too small for distributions; give {LEAST_DELTA} or more, or use rdp")
        return float(distribution(self.groups).get_epsilon_for_delta(delta))

    def delta(self, epsilon: float, accountant: Accountant = "pld") -> float:
        """Return delta of all rounds together at an epsilon."""
        _check(epsilon=epsilon, accountant=accountant)
        if accountant != "pld":
            delta = library().rdp.rdp_privacy_accountant.compute_delta(*self._renyi(accountant), epsilon)[0]
        elif (noise := self._unsampled()) is not None:
            delta = _gaussian_delta(noise, epsilon)
        else:
            delta = max(LEAST_DELTA, distribution(self.groups).get_delta_for_epsilon(epsilon))
        return min(1.0, float(delta))

    def _renyi(self, accountant: Accountant) -> tuple[Any, Any]:
        """Return orders, and the divergence of all rounds at each of them."""
        orders = np.asarray(library().rdp.RdpAccountant().orders, dtype=np.float64)
        total = sum(count * _renyi(noise, rate) for noise, rate, count in self.groups)
        if accountant == "shares":
            total = total + 3 * EXCESS * sum(count for _, _, count in self.groups)
        chosen = np.ones(len(orders), bool) if accountant == "rdp" else orders == np.floor(orders)
        return orders[chosen], np.asarray(total)[chosen]

    def _unsampled(self) -> float | None:
        """Return the noise of one round that is as good as all of them, if none of them is of a sample."""
        if any(rate < 1 for _, rate, _ in self.groups):
            return None
        return math.sqrt(1 / sum(count / noise**2 for noise, _, count in self.groups))


def compose(rounds: Iterable[Group], delta: float, accountant: Accountant = "pld") -> float:
    """Return epsilon of rounds that differ, each given as (noise, rate, how many)."""
    spent = Spent()
    for noise, rate, count in rounds:
        spent = spent.add(noise, rate, count)
    return spent.epsilon(delta, accountant)


def epsilon(noise: float, rounds: int, delta: float, rate: float = 1.0, accountant: Accountant = "pld") -> float:
    """Return epsilon of rounds that are all alike."""
    return Spent().add(noise, rate, rounds).epsilon(delta, accountant)


def delta_for(epsilon: float, noise: float, rounds: int, rate: float = 1.0, accountant: Accountant = "pld") -> float:
    """Return the delta that rounds have at an epsilon."""
    return Spent().add(noise, rate, rounds).delta(epsilon, accountant)


def noise_for(epsilon: float, delta: float, rounds: int, rate: float = 1.0, accountant: Accountant = "pld") -> float:
    """Return the least noise with which rounds keep to an epsilon."""
    _check(epsilon=epsilon, delta=delta, rounds=rounds, rate=rate, accountant=accountant)
    return least_noise(lambda noise: Spent().add(noise, rate, rounds).epsilon(delta, accountant), epsilon)


def noise_for_all(epsilon: float, delta: float, sampled: tuple[tuple[float, int], ...]) -> float:
    """Return noise with which steps of several rates, each (rate, how many), keep to an epsilon: all but 0.2 % of it.

    Sought from that of one Gaussian step, times √(Σ rate² · steps), where it is in the limit of many steps.
    """
    size = math.sqrt(sum(rate**2 * count for rate, count in sampled))
    noise = noise_for(epsilon, delta, 1) * size
    for _ in range(20):
        noise = min(max(noise, LEAST_NOISE), MOST_NOISE)
        spent = compose([(noise, *each) for each in sampled], delta)
        if 0.998 * epsilon <= spent <= epsilon or (spent <= epsilon and noise == LEAST_NOISE):
            return noise
        noise *= min(max(spent / (0.999 * epsilon), 0.5), 2.0)  # epsilon goes about with 1/noise
    return least_noise(lambda noise: compose([(noise, *each) for each in sampled], delta), epsilon)


def rounds_for(epsilon: float, delta: float, noise: float, rate: float = 1.0, accountant: Accountant = "pld") -> int:
    """Return how many rounds keep to an epsilon, at most ten million."""
    _check(epsilon=epsilon, delta=delta, noise=noise, rate=rate, accountant=accountant)
    return most_rounds(lambda rounds: Spent().add(noise, rate, rounds).epsilon(delta, accountant), epsilon)


def tree_epsilon(noise: float, rounds: int, delta: float, trees: int = 1) -> float:
    """Return epsilon of DP-FTRL with tree aggregation (Kairouz et al. 2021), which needs no sampling; by RDP.

    `rounds` are those of a tree, and in each tree a client takes part once at most; `trees` follow each other. `noise`
    is that of a node. Neighbours are federations in which one client's updates are zero or not.
    """
    _check(delta=delta)
    return float(_tree(noise, rounds, trees).get_epsilon(delta))


def tree_delta_for(epsilon: float, noise: float, rounds: int, trees: int = 1) -> float:
    """Return the delta that trees have at an epsilon."""
    _check(epsilon=epsilon)
    return min(1.0, float(_tree(noise, rounds, trees).get_delta(epsilon)))


def tree_noise_for(epsilon: float, delta: float, rounds: int, trees: int = 1) -> float:
    """Return the least noise of a node with which trees keep to an epsilon."""
    _check(epsilon=epsilon, delta=delta, rounds=rounds, trees=trees)
    return least_noise(lambda noise: tree_epsilon(noise, rounds, delta, trees), epsilon)


def tree_rounds_for(epsilon: float, delta: float, noise: float, trees: int = 1) -> int:
    """Return how many rounds a tree may have to keep to an epsilon, at most ten million."""
    _check(epsilon=epsilon, delta=delta, noise=noise, trees=trees)
    return most_rounds(lambda rounds: tree_epsilon(noise, rounds, delta, trees), epsilon)


def trees_epsilon(noise: float, trees: Iterable[tuple[int, int]], delta: float) -> float:
    """Return epsilon of trees that differ, each given as (rounds, how many)."""
    _check(delta=delta)
    accountant: Any = None
    for rounds, many in trees:
        accountant = _tree(noise, rounds, many, accountant) if many else accountant
    return 0.0 if accountant is None else float(accountant.get_epsilon(delta))


def _tree(noise: float, rounds: int, trees: int, before: Any = None) -> Any:
    _check(noise=noise, rounds=rounds, trees=trees)
    dp = library()
    accountant = before or dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_SPECIAL)
    return accountant.compose(dp.SingleEpochTreeAggregationDpEvent(float(noise), rounds), trees)


@lru_cache(maxsize=64)
def _renyi(noise: float, rate: float) -> Any:
    """Return the Rényi divergences of a round, at the orders that the accountant takes of itself."""
    dp = library()
    event = dp.GaussianDpEvent(noise)
    with unheard():
        return dp.rdp.RdpAccountant().compose(event if rate == 1 else dp.PoissonSampledDpEvent(rate, event)).rdp


def _gaussian_epsilon(noise: float, delta: float) -> float:
    with np.errstate(divide="ignore"):  # the log of a delta that is 0, where epsilon is sought far off
        found = float(library().get_epsilon_gaussian(noise, delta))
    return found and found * (1 + SLACK) + SLACK


def _gaussian_delta(noise: float, epsilon: float) -> float:
    """Return delta of one Gaussian round: the one whose epsilon is this, for there is no function the other way."""
    low, high = 1e-150, 1.0
    while high > low * (1 + SLACK):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _gaussian_epsilon(noise, middle) > epsilon else (low, middle)
    return high


def least_noise(spent: Callable[[float], float], budget: float) -> float:
    """Return the least noise that keeps to a budget, where more noise spends less."""
    low = high = 1.0
    while spent(high) > budget:
        low, high = high, high * 2
        if high > MOST_NOISE:
            raise BadInput(f"epsilon: no noise up to {MOST_NOISE:g} keeps to {budget:g}; give a larger one")
    while low == high or spent(low) <= budget:
        if low == LEAST_NOISE:
            return low
        low, high = max(low / 2, LEAST_NOISE), low
    found = brentq(lambda noise: spent(noise) - budget, low, high, xtol=1e-7 * low)
    more = 1e-7
    while spent(found) > budget:
        found, more = found * (1 + more), more * 2
    return float(found)


def most_rounds(spent: Callable[[int], float], budget: float) -> int:
    """Return the most rounds that keep to a budget, where more rounds spend more."""
    low, high = 0, 1
    while spent(high) <= budget:
        if high == MOST_ROUNDS:
            return high
        low, high = high, min(2 * high, MOST_ROUNDS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if spent(middle) <= budget else (low, middle)
    if low == 0:
        raise BadInput(f"epsilon: one round takes more than {budget:g}; give a larger one, or more noise")
    return low


def _is_count(value: Any) -> bool:
    return isinstance(value, Integral) and 1 <= int(value) <= MOST_ROUNDS


def checked(**given: Any) -> int:
    """Return a count that was given, or fail on one that no rounds can have."""
    _check(**given)
    (value,) = given.values()
    return int(value)


def _check(**given: Any) -> None:
    """Fail on an argument that no rounds can have, by its name."""
    rules: dict[str, tuple[Callable[[Any], bool], str]] = {
        "noise": (lambda x: LEAST_NOISE <= x <= MOST_NOISE, f"a number from {LEAST_NOISE:g} to {MOST_NOISE:g}"),
        "rate": (lambda x: 0 < x <= 1, "above 0, and 1 at most"),
        "delta": (lambda x: 0 < x < 1, "between 0 and 1"),
        "epsilon": (lambda x: 0 < x < math.inf, "a number above 0"),
        "rounds": (_is_count, f"a whole number from 1 to {MOST_ROUNDS:,}"),
        "apart": (_is_count, f"a whole number from 1 to {MOST_ROUNDS:,}"),
        "trees": (_is_count, f"a whole number from 1 to {MOST_ROUNDS:,}"),
        "accountant": (lambda x: x in ("pld", "rdp", "whole", "shares"), "pld or rdp"),
    }
    for name, value in given.items():
        holds, must = rules[name]
        if not isinstance(value, str if name == "accountant" else Real) or not holds(value):
            raise BadInput(f"{name}: {value!r} is not possible; it must be {must}")
