"""FedAvg: one shared model, the mean of locally trained ones.

H. B. McMahan et al., *Communication-Efficient Learning of Deep Networks from Decentralized Data*, AISTATS 2017.

    client i:  w_i = τ steps of SGD on f_i from w_t
    server:    w_{t+1} = Σ_i p_i w_i,   p_i ∝ n_i (or uniform) over the cohort
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from personafl.algorithms.averaging import PLAIN_MEAN, Averaging, Change, Model, SharedModelClient
from personafl.algorithms.training import Training
from personafl.core.algorithm import Algorithm, Empty, Problem
from personafl.core.batches import Data
from personafl.core.descend import Quadratic, descent
from personafl.core.optim import OptimizerSpec
from personafl.core.prox import shrink


@dataclass(frozen=True, kw_only=True)
class FedAvgClient(SharedModelClient):
    """Client rule: train the shared model on one's own data.

    `proximal` holds it to the received one (FedProx's μ; 0 = FedAvg); a `rank_penalty` λ is applied in every step, by
    the nuclear prox (FedSLR's alternative LPGD).
    """

    by_gradients: ClassVar[bool] = True
    proximal: float = 0.0
    rank_penalty: float = 0.0

    def init(self, problem: Problem, down: Model, generator: torch.Generator) -> Empty:
        """Keep nothing."""
        return Empty()

    def update(self, problem: Problem, down: Model, state: Empty, data: Data) -> tuple[Empty, Change]:
        """Return w_i − w_t."""
        optimizer = self.training.optimizer
        held = Quadratic(anchor=down.model, strength=self.proximal) if self.proximal else None
        prox = shrink("low-rank", self.rank_penalty * optimizer.rate(data.round)) if self.rank_penalty else None
        return state, Change(
            *descent(problem.mean_loss, down.model, data.phases["local"], optimizer.at(data.round), prox, held)
        )


def fedavg(training: Training, *, server: OptimizerSpec = PLAIN_MEAN) -> Algorithm:
    """One shared model: the mean of locally trained ones."""
    return Algorithm("fedavg", FedAvgClient(training=training), Averaging(optimizer=server))
