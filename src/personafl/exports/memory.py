"""What training needs of a device's memory: the formula of Pillutla et al. 2022 (B.4), and a measurement.

    memory = 3·size(u) + 2·size(v) + backprop

u is shared (as received, as trained, its gradient), v personal (as trained, its gradient); backprop is what a gradient
of one batch needs besides. Without a split u is everything; with a whole personal model v is everything too.
"""

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from personafl.core import rng
from personafl.core.algorithm import Problem, for_returning
from personafl.core.batches import Batch, Batches, Data
from personafl.core.descend import gradient_and_value
from personafl.core.seam import using
from personafl.core.tree import Params
from personafl.fast import minibatches
from personafl.fast.table import FASTER, enabled
from personafl.runs.job import Job
from personafl.simulate.engine import gather
from personafl.simulate.federation import Federation


@dataclass(frozen=True)
class Memory:
    """Bytes for one client's training: by the formula for three ways to personalize, and measured for this method."""

    none: int
    partial: int
    full: int
    measured: int

    @property
    def saving(self) -> float:
        """What partial personalization saves against a whole personal model."""
        return 1 - self.partial / self.full


def training_memory(job: Job) -> Memory:
    """Reckon and measure one round of the first client."""
    fed = job.federation
    problem, client = fed.problems[0], int(fed.data.seen[0])
    start = _start(fed)
    backprop = _backprop(problem, start, next(next(iter(_one_round(fed, client).phases.values())).each()))
    u, v = problem.divide(start) if problem.split is not None else (start, {})
    whole = _size(start)
    return Memory(
        none=3 * whole + backprop,
        partial=3 * _size(u) + 2 * _size(v) + backprop,
        full=3 * whole + 2 * whole + backprop,
        measured=round_memory(fed, problem, client),
    )


def round_memory(fed: Federation, problem: Problem, client: int) -> int:
    """Measure two steps of each phase of a client's round.

    What training keeps of all samples of a phase, to take fewer operations (`fast`), is counted.
    """
    rule, start, data = fed.algorithm, _start(fed), _one_round(fed, client)
    down = rule.client.expects(problem, start)
    state = rule.client.init(problem, down, rng.generator(fed.seed, "memory"))
    with using(FASTER | {Batches.each: _two_steps}):
        measured = _peak(lambda: rule.client.update(problem, for_returning(down), state, data))
    return measured + _size(start)  # what was received is there before


def _start(fed: Federation) -> Params:
    return {name: value.to(fed.data.device, fed.dtype) for name, value in (fed.start or {}).items()}


def _one_round(fed: Federation, client: int) -> Data:
    """Return the batches of a client's first round."""
    stacked = gather(fed.data, np.array([client]), fed.algorithm.client.phases, fed.seed, 0)
    phases = {n: b._replace(rows=b.rows[0], real=b.real[0], key=b.key[0]) for n, b in stacked.phases.items()}
    return Data(phases, stacked.examples[0], stacked.round)


def _two_steps(batches: Batches) -> Iterator[Batch]:
    """Yield the first two steps of a phase: the others need no more memory."""
    return itertools.islice(minibatches.each(batches), 2)


def _backprop(problem: Problem, params: Params, batch: Batch) -> int:
    """Return the peak of a gradient's memory beyond the gradient itself."""
    with enabled() if problem.net.unstackable else contextlib.nullcontext():  # torch.func may not be able to
        peak = _peak(lambda: gradient_and_value(problem.mean_loss, params, batch))
    return max(0, peak - _size(params))


def _size(params: Params) -> int:
    return sum(value.numel() * value.element_size() for value in params.values())


def _peak(work: Callable[[], Any]) -> int:
    """Return the greatest number of bytes that tensors made by `work` took at any one time."""
    allocations = _Allocations()
    with allocations:
        work()
    return allocations.peak


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages from when an operation makes them until nobody refers to them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live, self.peak = 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(t.untyped_storage()) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and id(leaf.untyped_storage()) not in given | self._known:
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)

        def gone() -> None:
            self._known.discard(key)
            self.live -= size

        weakref.finalize(storage, gone)
