"""From the section [privacy] to a private method, and to what a run has spent."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from personafl.core.algorithm import Algorithm
from personafl.data.federated import FederatedData
from personafl.errors import BadInput
from personafl.privacy.kinds import CORRELATED
from personafl.privacy.mechanisms import Accounted
from personafl.privacy.noise import make_key
from personafl.recipe.privacy import PrivacySection, check_moments
from personafl.recipe.recipe import Recipe
from personafl.simulate.federation import Federation
from personafl.uploads.distributed import SharedNoiseServer, shared
from personafl.uploads.private import PrivateServer, private


@dataclass(frozen=True)
class Guarantee:
    """What everyone who sees the shared models may learn of whether a client took part: (ε, δ)."""

    epsilon: float
    delta: float
    noise: float
    rate: float  # of Poisson sampling; 1: nothing is claimed of how clients are sampled
    assumption: str  # what must be true of the rounds

    def facts(self) -> dict[str, Any]:
        """Return what a row of results has of it."""
        return {"epsilon": self.epsilon, "delta": self.delta, "assumption": self.assumption}


def made_private(recipe: Recipe, algorithm: Algorithm, data: FederatedData, cohort: int) -> Algorithm:
    """Return the method as [privacy] has it; fail if not one round of it is within the recipe's budget."""
    section = recipe.privacy
    if section is None:
        return algorithm
    computed, scaled = data.moments is not None, data.scale is not None
    check_moments(recipe.data.normalize, recipe.data.scale, computed=computed, scaled=scaled)
    return with_noise(recipe, algorithm, _accounted(recipe, cohort, len(data.seen)), cohort, make_key(recipe.seed))


def with_noise(recipe: Recipe, algorithm: Algorithm, accounted: Accounted, cohort: int, key: bytes) -> Algorithm:
    """Return the method with the noise that [privacy] asks for."""
    section = recipe.privacy
    assert section is not None
    noise = _noise(section, accounted, recipe.rounds)
    how: dict[str, Any] = {"mechanism": accounted.mechanism, "apart": accounted.apart}
    made = private(algorithm, clip=section.clip, noise=noise, cohort=float(cohort), key=key, **how)
    if section.mechanism != "distributed":
        return made
    assert recipe.secure is not None  # as the recipe was checked
    return shared(made, cohort, recipe.secure.honest(cohort))


def check_sums(algorithm: Algorithm, upload: Any) -> None:
    """Fail if sums of uploads like this one cannot have the noise that clients are to add."""
    if isinstance(algorithm.server, SharedNoiseServer):
        algorithm.server.lattice(upload)


def guarantee(recipe: Recipe, federation: Federation, rounds: int) -> Guarantee | None:
    """Return what some rounds of a run come to; None: it is not private."""
    if recipe.privacy is None:
        return None
    accounted = _accounted(recipe, federation.cohort, len(federation.data.seen))
    return spent_by(federation.algorithm, accounted, [rounds])


def spent_by(algorithm: Algorithm, accounted: Accounted, stretches: Sequence[int]) -> Guarantee:
    """Return what rounds come to, of each stretch of a run that was taken back."""
    server, rate, assumption = algorithm.server, accounted.rate, accounted.assumption
    if not isinstance(server, PrivateServer):  # nothing was sent
        return Guarantee(0.0, accounted.delta, 0.0, rate, assumption)
    return Guarantee(accounted.epsilon(server.noise, stretches), accounted.delta, server.noise, rate, assumption)


def affordable(recipe: Recipe, federation: Federation) -> int:
    """Return how many of a recipe's rounds its budget allows."""
    server, section = federation.algorithm.server, recipe.privacy
    if section is None or section.epsilon is None or section.noise is None or not isinstance(server, PrivateServer):
        return recipe.rounds  # the noise is computed for all of them
    accounted = _accounted(recipe, federation.cohort, len(federation.data.seen))
    if accounted.epsilon(section.noise, [recipe.rounds]) <= section.epsilon:
        return recipe.rounds
    return accounted.rounds_for(section.epsilon, section.noise)


def charged(recipe: Recipe, federation: Federation, clip: float) -> dict[str, Any]:
    """Return what the ledger says of a round."""
    server, accounted = federation.algorithm.server, _accounted(recipe, federation.cohort, len(federation.data.seen))
    return charge(server, accounted, clip) if isinstance(server, PrivateServer) else {}


def charge(server: PrivateServer, accounted: Accounted, clip: float) -> dict[str, Any]:
    """Return what a ledger says of a round: which noise, with which clip, and what is claimed of who takes part."""
    apart = {"apart": accounted.apart} if accounted.mechanism in CORRELATED else {}
    facts = {"mechanism": accounted.mechanism, "noise": server.noise, "rate": accounted.rate, **apart}
    return {**facts, "clip": clip, "attempt": server.attempt}


def _accounted(recipe: Recipe, cohort: int, clients: int) -> Accounted:
    """Return how rounds of a simulation are accounted for.

    Poisson sampling is claimed for coins alone; of other cohorts nothing is: a client may be in all of them.
    """
    section, federation = recipe.privacy, recipe.federation
    assert section is not None
    rate = cohort / clients if federation.sampling == "bernoulli" else 1.0
    apart = federation.apart_in(clients) if federation.sampling == "cyclic" else 1
    return Accounted(mechanism=section.mechanism, delta=section.delta, rate=rate, apart=apart)


def _noise(section: PrivacySection, accounted: Accounted, rounds: int) -> float:
    """Return the noise multiplier; fail if the first round takes more than the budget with it."""
    if section.noise is None:
        assert section.epsilon is not None  # the section says one of them
        return _computed(accounted, section.epsilon, max(1, rounds))
    if section.epsilon is not None and accounted.epsilon(section.noise, [1]) > section.epsilon:
        raise BadInput(
            f"privacy.epsilon: one round with noise {section.noise:g} spends more than {section.epsilon:g}; raise "
            "privacy.noise, or leave that out to have it computed"
        )
    return section.noise


@lru_cache(maxsize=64)
def _computed(accounted: Accounted, budget: float, rounds: int) -> float:
    """Return the noise that a budget allows: once for all runs of a comparison, for it takes seconds."""
    return accounted.noise_for(budget, rounds)
