"""What a run is about: who learns what, and how."""

import functools
from dataclasses import dataclass

import torch

from personafl.core import rng
from personafl.core.algorithm import Algorithm, Problem
from personafl.core.tree import Params, Tree
from personafl.data.federated import Clients, FederatedData
from personafl.simulate.buffer import Buffer
from personafl.simulate.cohort import Sampling
from personafl.simulate.engine import Engine
from personafl.simulate.servers import Cloud
from personafl.simulate.serverside import Roster, ServerSide, Weights
from personafl.simulate.trainer import Learners
from personafl.simulate.workers.local import Count


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

    @functools.cached_property
    def learners(self) -> Learners:
        """What its clients know."""
        rule = self.algorithm.client
        return Learners(rule, self.data, self.problems, self.problem_of, self.engines, self.seed, self.dtype)

    @functools.cached_property
    def roster(self) -> Roster:
        """What its server knows of them."""
        samples, rule = self.data.train.sizes_of, self.algorithm.server
        return Roster(self.data.seen, samples, self.problem_of, self.problems, self.weights, rule)

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
