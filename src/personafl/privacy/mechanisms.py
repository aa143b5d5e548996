"""Which noise, and what rounds of it cost: the one place where each mechanism is accounted for.

gaussian  one Gaussian a round; amplified where cohorts are Poisson samples
discrete  the same in whole numbers, by Rényi divergences (`privacy.discrete`)
tree      trees of b rounds, in each of which a client takes part once at most (`privacy.correlated`)
banded    one Gaussian with z/√k, for k = ⌈T/b⌉ rounds of one client in T, b apart at least (`privacy.correlated`)
distributed   sums of discrete Gaussians, one of each client, that are nearly one (`privacy.distributed`)

A run that was taken back is several stretches of rounds, and all are paid for: what was released stays so. Each begins
tree and banded noise anew.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from personafl.privacy.accounting import Accountant, Spent, least_noise, most_rounds, trees_epsilon
from personafl.privacy.kinds import CORRELATED, Mechanism

ACCOUNTANTS: dict[str, Accountant] = {"discrete": "whole", "distributed": "shares"}  # of the others: PLD
SHARED = (
    "one client's updates zero or not, in all rounds, however clients are drawn (no amplification); all but the "
    "devices that [secure] allows to be lost or corrupt add their noise"
)


@dataclass(frozen=True, kw_only=True)
class Accounted:
    """What rounds of a mechanism cost at a delta."""

    mechanism: Mechanism
    delta: float
    rate: float = 1.0  # of Poisson sampling; 1: nothing is claimed of how clients are sampled
    apart: int = 1  # b, of tree and banded

    def epsilon(self, noise: float, stretches: Sequence[int]) -> float:
        """Return epsilon of so many rounds, of each stretch; 0 before the first."""
        stretches = [rounds for rounds in stretches if rounds]
        if not stretches:
            return 0.0
        if self.mechanism == "tree":
            whole = sum(rounds // self.apart for rounds in stretches)
            begun = [rounds % self.apart for rounds in stretches if rounds % self.apart]
            return trees_epsilon(noise, [(self.apart, whole), *((rounds, 1) for rounds in begun)], self.delta)
        if self.mechanism == "banded":
            often = sum(math.ceil(rounds / self.apart) for rounds in stretches)
            return Spent().add(noise, 1.0, often).epsilon(self.delta)
        spent = Spent().add(noise, self.rate, sum(stretches))
        return spent.epsilon(self.delta, ACCOUNTANTS.get(self.mechanism, "pld"))

    def noise_for(self, budget: float, rounds: int) -> float:
        """Return the least noise with which rounds keep to a budget."""
        return least_noise(lambda noise: self.epsilon(noise, [rounds]), budget)

    def rounds_for(self, budget: float, noise: float) -> int:
        """Return how many rounds keep to a budget."""
        return most_rounds(lambda rounds: self.epsilon(noise, [rounds]), budget)

    @property
    def assumption(self) -> str:
        """What must be true of the rounds."""
        if self.mechanism in CORRELATED:
            return (
                f"assumed: one client's updates zero or not; it takes part once at most in {self.apart:,} rounds, "
                "which is enforced, however clients are drawn (no amplification)"
            )
        if self.mechanism == "distributed":
            return f"assumed: {SHARED}"
        if self.rate == 1:
            return "assumed: one client more or less, in all rounds, however clients are drawn (no amplification)"
        chance = f"in each round every client takes part with chance {self.rate:g}, by itself"
        return f"assumed: one client more or less; Poisson sampling: {chance}"
