"""Running one pure function for many clients: one by one, or stacked in chunks that fit memory. Equal results.

No algorithm code here: the function is a client rule's `update` or `personalize`, or a model applied to data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.func import vmap

from personafl.core import rng, tree
from personafl.core.algorithm import Problem
from personafl.core.batches import Batches, Data, Steps, draw, drawn_steps
from personafl.core.tree import Tree
from personafl.data.federated import FederatedData

__all__ = ["Engine", "Strategy", "gather", "local_steps", "paces"]

Strategy = Literal["stacked", "sequential"]


@dataclass(frozen=True)
class Engine:
    """How clients are run. `chunk` bounds how many are stacked at a time."""

    strategy: Strategy
    chunk: int

    @classmethod
    def fitted(cls, problem: Problem, strategy: str, memory: int, device: torch.device) -> Engine:
        """Choose for a problem: "auto" stacks, except convolutions on a CPU, where stacking them is slower.

        The choice depends on the recipe alone, never on a measurement, so that runs repeat bit for bit. A stacked
        client is reckoned at 8 copies of its model (weights, gradients, optimizer, states, uploads and their
        temporaries) and as much again for activations.
        """
        if strategy == "auto":
            convolutional = problem.net.convolutional or problem.personal_net.convolutional
            strategy = "sequential" if convolutional and device.type == "cpu" else "stacked"
        parameters = max(problem.net.parameters, problem.personal_net.parameters)
        chunk = max(1, memory // (16 * 4 * parameters))
        return cls("sequential" if strategy == "sequential" else "stacked", min(chunk, 1024))

    def chunks(self, clients: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """Cut a group of clients into chunks."""
        for start in range(0, len(clients), self.chunk):
            yield clients[start : start + self.chunk]

    def train(self, function: Callable[..., Any], down: Tree, states: Tree, data: Data) -> Tree:
        """Return function(down, state, data) for every client, stacked; `states` and `data` come stacked."""
        if self.strategy == "stacked":
            stacked = Data(dict.fromkeys(data.phases, _STACKED_BATCHES), 0, None)  # type: ignore[arg-type]
            return vmap(function, in_dims=(None, 0, stacked))(down, states, data)
        count = len(data.examples)
        return tree.stack([function(down, tree.take(states, row), _one(data, row)) for row in range(count)])


_STACKED_BATCHES = Batches(None, None, 0, 0, 0)  # type: ignore[arg-type]  # vmap's axes: the pool is shared


def _one(data: Data, row: int) -> Data:
    """Return one client's data, without the steps that only pad it to the others' length."""

    def own(batches: Batches) -> Batches:
        steps = int(batches.real[row].any(-1).sum())
        return Batches(
            batches.pool_x,
            batches.pool_y,
            batches.rows[row, :steps],
            batches.real[row, :steps],
            batches.key[row, :steps],
        )

    phases = {name: own(batches) for name, batches in data.phases.items()}
    return Data(phases, data.examples[row], data.round)


def paces(clients: NDArray[np.int64], seed: int, round_: int) -> rng.Words:
    """Return the randomness from which `drawn_steps` has how many steps clients take in a round."""
    return rng.mix(seed, "steps", round_, clients)


def local_steps(work: Steps, seed: int) -> Callable[[NDArray[np.int64], int], NDArray[np.int64]]:
    """Return K_i as a function of (clients, round): local steps, or epochs where training is in epochs."""

    def steps(clients: NDArray[np.int64], round_: int) -> NDArray[np.int64]:
        if work.epochs is not None:
            return np.full(len(clients), work.epochs)
        return drawn_steps(work, paces(clients, seed, round_))

    return steps


def gather(
    data: FederatedData, clients: NDArray[np.int64], phases: Mapping[str, Steps], seed: int, round_: int
) -> Data:
    """Draw the batches of a chunk of clients for each phase, from (seed, client, round, phase)."""
    train = data.train
    starts = train.offset[clients]
    sizes = train.offset[clients + 1] - starts
    pool, pace = (data.x, data.y), paces(clients, seed, round_)
    batches = {
        name: draw(pool, train.flat, starts, sizes, steps, rng.mix(seed, "batches", name, round_, clients), pace)
        for name, steps in phases.items()
    }
    device = data.x.device
    examples = torch.from_numpy(sizes).to(device)
    dtype = data.x.dtype if data.x.is_floating_point() else torch.get_default_dtype()
    return Data(batches, examples, torch.tensor(float(round_), device=device, dtype=dtype))
