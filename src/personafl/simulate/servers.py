"""The cloud of a run: its servers and devices, and what happens in it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from personafl.cloud.clock import Aggregation, Phases, play
from personafl.cloud.mixing import Weights, full, matrices
from personafl.cloud.protocol import Coordinator
from personafl.cloud.topology import Topology
from personafl.data.federated import Clients
from personafl.recipe.cloud import CloudSection


def coordinator_of(section: CloudSection) -> Coordinator:
    """Return who decides what a recipe's servers wait for."""
    return Coordinator(section.servers, section.first or section.servers, rigorous=section.protocol == "rigorous")


@dataclass(frozen=True, kw_only=True)
class Cloud:
    """What a recipe says about servers, for the clients at hand."""

    section: CloudSection
    topology: Topology
    steps: Callable[[Clients, int], NDArray[np.int64]]  # (devices, round) -> K_i
    seed: int

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
        )
        return play(coordinator_of(section), phases)

    def mixing(self, aggregation: Aggregation) -> Weights:
        """Return how the members of an aggregation mix their models: row n is what server n's is made of."""
        if self.section.mixing is None:
            return full(len(aggregation.members))
        several = matrices(self.section.mixing, self.section.servers)
        return several[aggregation.number % len(several)]
