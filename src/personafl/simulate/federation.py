"""What a run is about: who learns what, and how."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from personafl.cloud.clock import Aggregation, Delay, Phases, play
from personafl.cloud.mixing import among, full, matrices
from personafl.cloud.protocol import Coordinator
from personafl.cloud.topology import Topology
from personafl.core import rng
from personafl.core.algorithm import Algorithm, Problem
from personafl.core.tree import Params, Tree
from personafl.data.federated import Clients, FederatedData
from personafl.recipe.cloud import CloudSection
from personafl.simulate.attack import Attack
from personafl.simulate.buffer import Buffer
from personafl.simulate.cohort import Sampling
from personafl.simulate.engine import Engine
from personafl.simulate.protection import Protection
from personafl.simulate.serverside import Roster, ServerSide, Weights
from personafl.simulate.trainer import Learners
from personafl.simulate.workers.local import Count


def coordinator_of(section: CloudSection) -> Coordinator:
    """Return who decides what a recipe's servers wait for."""
    return Coordinator(section.servers, section.first or section.servers, rigorous=section.protocol == "rigorous")


def mixing_of(section: CloudSection, members: Sequence[int], number: int) -> NDArray[np.float64]:
    """Return how servers mix their models in an aggregation: row n is what that of the n-th of them is made of."""
    if section.mixing is None:
        return full(len(members))
    several = matrices(section.mixing, section.servers)
    return among(several[number % len(several)], members)


@dataclass(frozen=True, kw_only=True)
class Cloud:
    """What a recipe says about servers, for the clients at hand."""

    section: CloudSection
    topology: Topology
    steps: Callable[[Clients, int], NDArray[np.int64]]  # (devices, round) -> K_i
    seed: int
    delays: tuple[Delay, ...] = ()  # of devices that take longer or shorter than others

    def aggregations(self) -> Iterator[Aggregation]:
        """Play what happens, from the beginning and without end, in virtual time."""
        section = self.section
        phases = Phases(
            topology=self.topology,
            active=section.active,
            arrival=section.arrival,
            step=section.step,
            steps=self.steps,
            seed=self.seed,
            own=self.delays,
        )
        return play(coordinator_of(section), phases)

    def mixing(self, aggregation: Aggregation) -> NDArray[np.float64]:
        """Return how the members of an aggregation mix their models: row n is what server n's is made of."""
        return mixing_of(self.section, [turn.server for turn in aggregation.members], aggregation.number)


@dataclass(frozen=True)
class Federation:
    """Who learns what, how: all that decides the numbers of a run. Each half knows its own part of it."""

    algorithm: Algorithm
    data: FederatedData
    problems: tuple[Problem, ...]  # all with the same `net`
    problem_of: Clients  # [clients] which problem each one solves
    engines: tuple[Engine, ...]  # one per problem
    seed: int
    cohort: int
    sampling: Sampling
    weights: Weights
    dtype: torch.dtype
    start: Params | None = None  # of the shared model; None: drawn
    offline: int | float = 0  # clients of a server that train without contact in a round: a count, or a share of all
    cloud: Cloud | None = None  # several servers; None: one, that draws its cohorts
    buffer: Buffer | None = None  # that server does not wait for everyone; None: it does
    workers: Count = 1  # processes that train
    protection: Protection | None = None  # of single samples
    attack: Attack | None = None  # by some of the clients; None: all are honest

    @functools.cached_property
    def learners(self) -> Learners:
        """What its clients know."""
        what = self.algorithm.client, self.data, self.problems, self.problem_of, self.engines
        return Learners(*what, self.seed, self.dtype, self.protection)

    @functools.cached_property
    def roster(self) -> Roster:
        """What its server knows of them."""
        rule = self.algorithm.server
        return Roster(self.data.seen, self._samples, self.problem_of.take, self.problems, self.weights, rule)

    def _samples(self, clients: Clients) -> Clients:
        """Return how many samples clients say they have."""
        sizes = self.data.train.sizes_of(clients)
        return sizes if self.attack is None else self.attack.claimed(clients, sizes)

    def serving(self, roster: Roster | None = None) -> ServerSide:
        """Return a server before its first round; of other clients, if they are given."""
        return ServerSide(self.first_model, roster or self.roster)

    @property
    def first_model(self) -> Params:
        """The shared model before the first round."""
        start: Params = self.learners.cast(self.start or self.problems[0].net.init(rng.generator(self.seed, "start")))
        return start

    def first_message(self) -> Tree:
        """Return what a newcomer is sent before the first round, for its structure; nobody needs a server for that."""
        return self.algorithm.client.expects(self.problems[0], self.first_model)
