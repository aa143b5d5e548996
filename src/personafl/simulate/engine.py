"""Running one pure function for many clients: one by one, or stacked in chunks that fit memory. Equal results.

No algorithm code here: the function is a client rule's `update` or `personalize`, or a model applied to data.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from personafl.core import rng, tree
from personafl.core.algorithm import Problem
from personafl.core.batches import Batches, Data, Padding, Steps, counted_steps, drawn_work
from personafl.core.tree import Tree
from personafl.data.federated import FederatedData
from personafl.errors import BadInput
from personafl.fast.bfloat16 import rounded_products
from personafl.fast.drawing import drawn, padding_of
from personafl.fast.stack import Stack, stacked
from personafl.fast.table import enabled
from personafl.simulate.protection import Protected, Protection

if TYPE_CHECKING:
    from personafl.fast.cuda_graphs import Graphs

Strategy = Literal["stacked", "sequential"]
_CACHED = 2**23  # bytes of stacked weights that a processor's cache holds from one step to the next
_LEAST_WORK = 2**19  # parameters of stacked clients at which a step's arithmetic takes longer than calling it


@dataclass(frozen=True)
class Engine:
    """How clients are run. `chunk` bounds how many are stacked at a time, `least` is how many are worth a stack."""

    strategy: Strategy
    chunk: int
    least: int = 1
    graphs: Graphs | None = None  # where stacked clients are trained from recordings
    bfloat16: bool = False  # whether products and convolutions are rounded to it

    @classmethod
    def fitted(
        cls,
        problem: Problem,
        strategy: str,
        memory: int,
        device: torch.device,
        *,
        batch: int = 1,
        bfloat16: bool = False,
    ) -> Engine:
        """Choose for a problem: "auto" stacks, except convolutions on a CPU, where stacking them is mostly slower.

        This depends on the recipe alone; a run then measures where it is in doubt (`calibrate`). A stacked client is
        reckoned at 8 copies of its model (weights, gradients, optimizer, states, uploads and their temporaries) and as
        much again for activations; or, where a large part of it is frozen and costs activations alone, at what was
        counted for a `batch`.
        """
        given = strategy
        if strategy == "auto":
            convolutional = problem.net.convolutional or problem.personal_net.convolutional
            on_cpu = "sequential" if convolutional else "stacked"
            strategy = {"cpu": on_cpu, "cuda": "graphs"}.get(device.type, "stacked")
        if problem.unstackable:
            if given in ("stacked", "graphs"):
                why = f"torch.func cannot batch {problem.unstackable}"
                raise BadInput(f'engine.strategy: {given!r} is not possible: {why}; use "auto"')
            strategy = "sequential"
        nets = problem.net, problem.personal_net
        parameters = max(net.parameters for net in nets)
        copies = 8 * 4 * parameters
        activations = max((batch * net.sample_bytes for net in nets if net.constant), default=0)
        chunk = max(1, memory // (copies + max(copies, activations)))
        if device.type == "cpu":
            chunk = min(chunk, max(4, _CACHED // (4 * parameters)))
        least = min(max(_LEAST_WORK // parameters, 4), 64)
        if device.type == "cuda":
            least = 1024  # larger stacks take hardly longer there, and vary less
        elif strategy == "graphs":
            raise BadInput(f'engine.strategy: "graphs" needs a CUDA device, not {device.type}; use "auto"')
        if strategy == "sequential":  # one at a time: so there are chunks for all worker processes
            return cls("sequential", 1, least, None, bfloat16)
        graphs = None
        if strategy == "graphs":
            from personafl.fast.cuda_graphs import Graphs  # for a GPU alone

            graphs = Graphs()
        return cls("stacked", min(chunk, 1024), least, graphs, bfloat16)

    def chunks(self, clients: NDArray[np.int64], steps: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """Cut a group of clients into chunks: if they are stacked, those with the most steps first.

        Stacked clients wait for the one with the most steps, so a chunk with enough clients ends where the next one has
        fewer steps than its last. Others come in order, so that a server need not know their data to add up as here.
        """
        if self.strategy == "sequential":
            steps = np.zeros_like(steps)
        order = np.argsort(-steps, kind="stable")
        ends = np.flatnonzero(np.diff(steps[order])) + 1  # where the number of steps changes
        start = 0
        while start < len(clients):
            full = min(start + self.chunk, len(clients))
            enough = ends[(ends >= start + self.least) & (ends < full)]
            end = int(enough[0]) if len(enough) else full
            if len(clients) - end < self.least and full == len(clients):
                end = full  # the rest is not worth a chunk of its own
            yield clients[order[start:end]]
            start = end

    def train(self, function: Callable[..., Any], down: Tree, states: Tree, data: Data) -> Tree:
        """Return function(down, state, data) for every client, stacked; `states` and `data` come stacked."""
        return self.kept(self.train_for_now(function, down, states, data))

    def train_for_now(self, function: Callable[..., Any], down: Tree, states: Tree, data: Data) -> Tree:
        """Return the same; the next call may write over it, unless it is `kept`."""
        with enabled(), rounded_products(data.examples.device) if self.bfloat16 else contextlib.nullcontext():
            if self.strategy == "stacked":
                every = _for_all(function)
                return every(down, states, data) if self.graphs is None else self.graphs.run(every, down, states, data)
            results = [function(down, tree.take(states, row), _one(data, row)) for row in range(len(data.examples))]
            if len(results) == 1:  # without a copy
                return tree.map(lambda leaf: leaf.unsqueeze(0), results[0])
            return tree.stack(results)

    def kept(self, results: Tree) -> Tree:
        """Return results that no later call writes over."""
        return results if self.graphs is None else tree.map(torch.clone, results)


def _for_all(function: Callable[..., Any]) -> Callable[..., Tree]:
    """Return a function of one client for stacked ones: states and data come stacked, but for the shared pool."""

    def own(batches: Batches, each: Callable[[torch.Tensor], torch.Tensor]) -> Batches:
        guard = tree.map(each, batches.guard)
        return batches._replace(rows=each(batches.rows), real=each(batches.real), key=each(batches.key), guard=guard)

    @functools.wraps(function)
    def every(down: Tree, states: Tree, data: Data) -> Tree:
        def one(stack: Stack) -> Tree:
            phases = {name: own(batches, stack.each) for name, batches in data.phases.items()}
            seen = Data(phases, stack.each(data.examples), data.round)
            return tree.map(stack.plain, function(down, tree.map(stack.each, states), seen))

        return stacked(len(data.examples), one)

    return every


def _one(data: Data, row: int) -> Data:
    """Return one client's data, without what only pads it to others' steps and batches: as a device alone has it."""

    def own(batches: Batches) -> Batches:
        real, guard = batches.real[row], tree.take(batches.guard, row)
        alive = guard.taken if guard else real.any(-1)
        steps, width = int(alive.sum()), max(int(real.any(0).sum()), 1 if guard else 0)
        padding = Padding(gaps=False)  # of protected samples, where steps may be without any
        if not guard:
            padding = padding_of(batches.real[row : row + 1, :steps].cpu().numpy(), int(data.examples[row]))
        return Batches(
            batches.pool_x,
            batches.pool_y,
            batches.rows[row, :steps, :width],
            real[:steps, :width],
            batches.key[row, :steps],
            padding=padding,
            augment=batches.augment,
            guard=guard.first(steps) if guard else (),
        )

    phases = {name: own(batches) for name, batches in data.phases.items()}
    return Data(phases, data.examples[row], data.round)


def largest_batch(data: FederatedData, phases: Mapping[str, Steps]) -> int:
    """Return the most samples that a client goes through at once."""
    sizes = int(data.train.sizes.max(initial=1))
    return max((min(work.batch or sizes, sizes) for work in phases.values()), default=1)


def paces(clients: NDArray[np.int64], seed: int, round_: int) -> rng.Words:
    """Return the randomness from which `drawn_work` has how many steps or epochs clients train in a round."""
    return rng.mix(seed, "steps", round_, clients)


def local_steps(work: Steps, seed: int) -> Callable[[NDArray[np.int64], int], NDArray[np.int64]]:
    """Return K_i as a function of (clients, round): local steps, or epochs where training is in epochs."""
    return lambda clients, round_: drawn_work(work, paces(clients, seed, round_))


def steps_of(
    data: FederatedData,
    clients: NDArray[np.int64],
    phases: Mapping[str, Steps],
    seed: int,
    round_: int,
    counted: Callable[[Steps, NDArray[np.int64], rng.Words], NDArray[np.int64]] = counted_steps,
) -> NDArray[np.int64]:
    """Return how many steps clients take in all phases of a round, or what else is `counted`."""
    sizes, pace = data.train.sizes_of(clients), paces(data.drawing(clients), seed, round_)
    return sum((counted(work, sizes, pace) for work in phases.values()), np.zeros_like(clients))


def gather(
    data: FederatedData,
    clients: NDArray[np.int64],
    phases: Mapping[str, Steps],
    seed: int,
    round_: int,
    protection: Protection | None = None,
) -> Data:
    """Draw the batches of a chunk of clients for each phase, from (seed, client, round, phase)."""
    sizes, numbers = data.train.sizes_of(clients), data.drawing(clients)
    pace = paces(numbers, seed, round_)
    pool, device = data.pool(clients), data.device

    def phase(name: str, work: Steps) -> Batches:
        if protection is not None and name not in protection.open:
            who = Protected.of(protection, clients, numbers, seed, name, round_)
            drawn_by = who.batches((pool.x, pool.y), pool.rows, pool.starts, sizes, work, pace)
            return drawn_by._replace(augment=data.augment)
        keys = rng.mix(seed, "batches", name, round_, numbers)
        batches = drawn((pool.x, pool.y), pool.rows, pool.there, pool.starts, sizes, work, keys, pace)
        return batches._replace(augment=data.augment)

    batches = {name: phase(name, work) for name, work in phases.items()}
    examples = tree.on(device, sizes)
    dtype = data.x.dtype if data.x.is_floating_point() else torch.get_default_dtype()
    return Data(batches, examples, torch.full((), float(round_), device=device, dtype=dtype))
