"""What methods with one shared model have in common: the server that averages it, and clients that only use it.

S. Reddi et al., *Adaptive Federated Optimization*, ICLR 2021, Algorithm 1 (FedOpt): the mean change of the cohort,

    Δ_t = Σ_i p_i (w_i − w_t),

is a pseudo-gradient −Δ_t for a server optimizer. SGD with rate 1 gives w_{t+1} = Σ_i p_i w_i: FedAvg.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from personafl.algorithms.training import OnePassClient
from personafl.core import tree
from personafl.core.algorithm import Problem, Reduced, ServerRule
from personafl.core.optim import OptimizerSpec, Sgd
from personafl.core.tree import Params, Tree

PLAIN_MEAN = Sgd(lr=1.0)


class Model(NamedTuple):
    """Down: the shared model w_t."""

    model: Params


class Change(NamedTuple):
    """Up: how training moved the shared model, w_i − w_t, and the mean training loss on the way."""

    change: Params
    loss: Tensor


class Shared(NamedTuple):
    """State of the server: the shared model and what its optimizer keeps."""

    model: Params
    optimizer: Tree


@dataclass(frozen=True, kw_only=True)
class SharedModelClient(OnePassClient):
    """Base of client rules without a personal model: one pass of local training a round, and nothing to personalize."""

    def models(self, problem: Problem, down: Any, state: Tree) -> dict[str, Params]:
        """Everyone uses the shared model."""
        return {"global": down.model}


@dataclass(frozen=True, kw_only=True)
class Averaging(ServerRule):
    """Server rule: step the shared model along the mean change."""

    averages: ClassVar[bool] = True
    optimizer: OptimizerSpec = PLAIN_MEAN

    def init(self, problem: Problem, start: Params, population: float) -> Shared:
        """Start at the given model."""
        return Shared(start, self.optimizer.at(torch.tensor(0.0)).init(start))

    def broadcast(self, state: Shared) -> Model:
        """Send the shared model."""
        return Model(state.model)

    def update(self, state: Shared, uploads: Reduced, round_: int) -> Shared:
        """Apply the server optimizer to −Δ_t."""
        gradient: Any = tree.scale(uploads.mean().change, -1.0)
        optimizer = self.optimizer.at(torch.tensor(float(round_)))
        step, kept = optimizer.update(gradient, state.optimizer, state.model)
        return Shared(tree.add(state.model, step), kept)
