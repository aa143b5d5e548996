"""What a run is about: who learns what, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from personafl.core import tree
from personafl.core.algorithm import Algorithm, Problem
from personafl.core.tree import Params, Tree
from personafl.data.federated import FederatedData
from personafl.simulate.buffer import Buffer
from personafl.simulate.cohort import Sampling
from personafl.simulate.engine import Engine
from personafl.simulate.servers import Cloud
from personafl.simulate.workers.local import Count

Weights = Literal["examples", "uniform"]
Clients = NDArray[np.int64]


@dataclass(frozen=True)
class Federation:
    """Who learns what, how: all that decides the numbers of a run."""

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

    def cast(self, values: Tree) -> Tree:
        """Move fresh parameters to the run's device and precision; what is not real numbers keeps its dtype."""
        moved = tree.map(lambda leaf: leaf.to(self.data.device), values)
        return tree.map(lambda leaf: leaf.to(self.dtype) if leaf.is_floating_point() else leaf, moved)

    @property
    def population(self) -> float:
        """The weight of all clients that may take part."""
        return self.weight_of(self.data.seen)

    def weight_of(self, clients: Clients) -> float:
        """Return how much clients weigh together."""
        return float(self.weights_of(clients).sum())

    def weights_of(self, clients: Clients) -> NDArray[Any]:
        """Return how much each client weighs: n_i or 1, times γ_i where devices have penalties of their own."""
        weights = self.data.train.sizes_of(clients) if self.weights == "examples" else np.ones_like(clients)
        own = [problem.penalty for problem in self.problems]
        return weights if None in own else weights * np.array(own, dtype=np.float64)[self.problem_of[clients]]

    def weighing(self, clients: Clients) -> torch.Tensor:
        """Return the same where clients are computed with."""
        return tree.on(self.data.device, self.weights_of(clients))
