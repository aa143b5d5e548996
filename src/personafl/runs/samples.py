"""From the section [sample_privacy] to what protects the samples of each client, and to what each has spent."""

import dataclasses
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from personafl.core import rng, wire
from personafl.data.federated import Clients
from personafl.privacy.accounting import compose, noise_for_all
from personafl.privacy.library import library
from personafl.recipe.recipe import Recipe
from personafl.runs.guarding import check_protectable, looks, open_phases
from personafl.simulate.cohort import draw_cohort
from personafl.simulate.federation import Federation
from personafl.simulate.protection import ALWAYS, Protection

Sampled = tuple[tuple[float, int], ...]  # steps by their rate of Poisson sampling: (rate, how many)


@dataclass(frozen=True)
class Ledger:
    """What each client has spent of its samples' privacy, in the order of the clients' numbers."""

    epsilon: NDArray[np.float64]  # [clients]
    noise: NDArray[np.float64]  # [clients] z_i
    delta: float
    personal: bool  # whether what clients keep is covered too

    def facts(self, clients: Clients) -> dict[str, float | str]:
        """Return what a result's row has of some clients: the largest epsilon."""
        most, covers = float(self.epsilon[clients].max(initial=0.0)), "all" if self.personal else "sent"
        return {"sample_epsilon": most, "sample_delta": self.delta, "sample_covers": covers}

    def columns(self, clients: Clients) -> dict[str, list[float]]:
        """Return what the clients' table has."""
        return {"sample_epsilon": self.epsilon[clients].tolist(), "sample_noise": self.noise[clients].tolist()}


def protected(recipe: Recipe, federation: Federation) -> Federation:
    """Return the federation with samples protected as [sample_privacy] has it; fail if that cannot be."""
    section, data = recipe.sample_privacy, federation.data
    if section is None:
        return federation
    check_protectable(recipe, federation.algorithm.name, federation.learners)
    library()  # before any work, for the ledgers need it
    costs, noise, until = _Costs(recipe, federation), np.zeros(data.clients), np.full(data.clients, ALWAYS)
    budget = section.epsilon
    for client in costs.everyone:
        whole = costs.of(client, recipe.rounds if client in costs.members else 0)
        if not whole:
            continue  # nothing of it is looked at, or nothing that is covered
        if section.noise is None:
            assert budget is not None  # the section says one of them
            noise[client] = _noise(budget, section.delta, whole)
            continue
        noise[client] = section.noise
        if budget is not None and _epsilon(section.noise, section.delta, whole) > budget:
            until[client] = costs.spent_at(client, section.noise, budget, section.delta)
    guard = Protection(section.clip, noise, until, section.sampling, costs.open)
    engines = federation.engines
    if section.sampling == "poisson":  # minibatches of another size every time are not worth a recording
        engines = tuple(dataclasses.replace(engine, graphs=None) for engine in engines)
    return dataclasses.replace(federation, protection=guard, engines=engines)


def ledger(recipe: Recipe, federation: Federation, rounds: int) -> Ledger | None:
    """Return what some rounds of a run, and fine-tuning at its end, come to; None: samples are not protected."""
    section, protection, data = recipe.sample_privacy, federation.protection, federation.data
    if section is None or protection is None:
        return None
    costs = _Costs(recipe, federation)
    counts = costs.participations(rounds, protection.until)
    spent = np.zeros(data.clients)
    for client in costs.everyone:
        tunes = rounds < protection.until[client] and rounds == recipe.rounds
        steps = costs.of(client, int(counts[client]), tunes=bool(tunes))
        if steps:
            spent[client] = _epsilon(float(protection.noise[client]), section.delta, steps)
    return Ledger(spent, protection.noise, section.delta, section.personal)


class _Costs:
    """How often a client's samples are looked at: by Poisson samples of which rates, or by how many whole passes."""

    def __init__(self, recipe: Recipe, federation: Federation) -> None:
        section, rule, data = recipe.sample_privacy, federation.algorithm.client, federation.data
        assert section is not None  # else nobody asks
        self._recipe, self._data, self._cohort = recipe, data, federation.cohort
        self._poisson = section.sampling == "poisson"
        self.open = open_phases(section, rule)
        self._phases = [work for name, work in rule.phases.items() if name not in self.open]
        self._tuning = [work for name, work in rule.tuning.items() if name not in self.open]
        self.members = frozenset(data.seen.tolist())
        self.everyone: list[int] = [*data.seen.tolist(), *data.unseen.tolist()]
        # Who has a model in its state after its first round does not fine-tune, unless the recipe says so.
        self._tuned_at_end = recipe.finetune or not _has_own_model(federation)

    def of(self, client: int, rounds: int, *, tunes: bool | None = None) -> Sampled:
        """Return the steps that look at a client's samples in so many rounds, and in fine-tuning if that follows.

        `tunes` None: it does if it may, in a cohort of some a member may be as new as others in the end.
        """
        size = int(self._data.train.sizes[client])
        found = looks(self._phases, size, rounds, poisson=self._poisson)
        some = self._cohort < len(self.members) or self._recipe.federation.sampling == "bernoulli"
        may = self._tuned_at_end or not rounds or (tunes is None and some)
        if may and tunes is not False:
            found += looks(self._tuning, size, 1, poisson=self._poisson)
        return tuple(sorted(found.items()))

    def participations(self, rounds: int, until: Clients) -> Clients:
        """Return in how many of the first rounds each client trained, [clients]."""
        counts = np.zeros(self._data.clients, dtype=np.int64)
        for number in range(rounds):
            cohort = self._drawn(number)
            counts[cohort[number < until[cohort]]] += 1
        return counts

    def spent_at(self, client: int, noise: float, epsilon: float, delta: float) -> int:
        """Return the round from which on a client's budget is spent."""
        low, high = 0, self._recipe.rounds + 1  # rounds that it can take part in: low can be paid for
        if client not in self.members:
            return 0
        while high - low > 1:
            middle = (low + high) // 2
            steps = self.of(client, middle, tunes=False)
            low, high = (middle, high) if _epsilon(noise, delta, steps) <= epsilon else (low, middle)
        taken = 0
        for number in range(self._recipe.rounds):
            if client in self._drawn(number):
                if taken == low:
                    return number
                taken += 1
        return self._recipe.rounds  # no fine-tuning any more

    def _drawn(self, number: int) -> Clients:
        recipe = self._recipe
        return draw_cohort(self._data.seen, self._cohort, recipe.federation.sampling, recipe.seed, number)


def _has_own_model(federation: Federation) -> bool:
    """Say whether a client that took part has a model in its state."""
    rule, problem, down = federation.algorithm.client, federation.problems[0], wire.dense(federation.first_message())
    return "personal" in rule.models(problem, down, rule.init(problem, down, rng.generator("shape")))


@lru_cache(maxsize=4096)
def _noise(budget: float, delta: float, steps: Sampled) -> float:
    return noise_for_all(budget, delta, steps)


@lru_cache(maxsize=4096)
def _epsilon(noise: float, delta: float, steps: Sampled) -> float:
    return compose([(noise, rate, count) for rate, count in steps], delta)
