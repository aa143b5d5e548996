"""A mean keeps the dtype of each field of an upload, whichever comes first."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from personafl.algorithms import Training
from personafl.algorithms.averaging import Averaging, Model
from personafl.algorithms.fedavg import FedAvgClient, fedavg
from personafl.core.algorithm import Algorithm, Problem, Reduced
from personafl.core.batches import Data, Steps
from personafl.core.tree import Params, flatten
from personafl.testing import check_algorithm, make_case


class Rounds(NamedTuple):
    """State of a client: the rounds that it took part in."""

    rounds: Tensor


class Counted(NamedTuple):
    """Up: integers, booleans and two precisions; counts come first."""

    samples: Tensor
    novice: Tensor
    rough: Tensor
    change: Params
    loss: Tensor


@dataclass(frozen=True, kw_only=True)
class CountingClient(FedAvgClient):
    """FedAvg's client, that also says how many samples it has and whether it is new."""

    def init(self, problem: Problem, down: Model, generator: torch.Generator) -> Rounds:  # type: ignore[override]
        return Rounds(torch.zeros((), dtype=torch.int64))

    def update(  # type: ignore[override]
        self, problem: Problem, down: Model, state: Rounds, data: Data
    ) -> tuple[Rounds, Counted]:
        _, sent = super().update(problem, down, None, data)  # type: ignore[arg-type]
        count, new = data.phases["local"].real.any(-1).sum(), state.rounds == 0
        return Rounds(state.rounds + 1), Counted(count, new, sent.loss.float(), sent.change, sent.loss)


class Counts(NamedTuple):
    """State of the server: FedAvg's, and the means of the counts."""

    shared: NamedTuple
    samples: Tensor
    novices: Tensor


@dataclass(frozen=True, kw_only=True)
class CountingServer(Averaging):
    """FedAvg's server, that keeps the mean counts."""

    def init(self, problem: Problem, start: Params, population: float) -> Counts:  # type: ignore[override]
        none = torch.zeros((), dtype=torch.float64)
        return Counts(super().init(problem, start, population), none, none)

    def broadcast(self, state: Counts) -> Model:  # type: ignore[override]
        return super().broadcast(state.shared)  # type: ignore[arg-type]

    def update(self, state: Counts, uploads: Reduced, round_: int) -> Counts:  # type: ignore[override]
        mean = uploads.mean()
        return Counts(super().update(state.shared, uploads, round_), mean.samples, mean.novice)  # type: ignore[arg-type]


def test_a_rule_that_counts_averages_as_one_that_does_not() -> None:
    """Clients of 3, 11, 6, 14 and 1 samples take 3, 9, 6, 12 and 3 minibatches: weighted by samples 315/35 = 9."""
    training = Training(work=Steps(epochs=3, batch=4))
    counting = Algorithm("counting", CountingClient(training=training), CountingServer())
    check_algorithm(counting)
    with make_case(counting).simulation() as counted, make_case(fedavg(training)).simulation() as plain:
        for number in range(2):
            counted.step(number)
            plain.step(number)
        for path, leaf in flatten(plain.server).items():
            assert torch.equal(leaf, flatten(counted.server.shared)[path])
        assert counted.server.samples == 9.0
        assert counted.server.novices == 0.0
        assert counted.store.get(1)["rounds"].dtype == torch.int64
