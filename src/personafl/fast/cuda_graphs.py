"""CUDA graphs: all the kernels of one training of stacked clients, recorded once and then launched as one.

Small models leave a GPU idle between kernels, because each takes longer to launch than to run. A function of tensors
alone runs the same kernels every time, so for inputs of one shape they are recorded, and later calls copy their inputs
to where the recording reads them. Equal results, to the bit.

A recording takes a moment, so a shape is recorded when it comes for the second time. Where clients have unequal data,
the number of steps differs from round to round: it is then filled up to a few round numbers with steps that do nothing.
"""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from personafl.core import tree
from personafl.core.batches import Batches, Data, Padding
from personafl.core.tree import Tree
from personafl.fast.drawing import round_number

Steps = tuple[int, ...]  # of each phase
_MOST = 16  # recordings that are kept; each holds the memory of its function


@dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tree, Tree, Data]
    outputs: Tree

    def replay(self, *inputs: Tree) -> Tree:
        for place, value in zip(tree.leaves(self.inputs), tree.leaves(inputs), strict=True):
            if place.data_ptr() != value.data_ptr():  # the data pool is where it was
                place.copy_(value)
        self.graph.replay()
        return self.outputs


class Graphs:
    """The recordings of one engine's functions, by name and by the shapes of their inputs."""

    def __init__(self) -> None:
        self._recordings: OrderedDict[Hashable, _Recording] = OrderedDict()
        self._met: dict[Hashable, Steps] = {}
        self._refused = False

    def run(self, function: Callable[..., Tree], down: Tree, states: Tree, data: Data) -> Tree:
        """Return function(down, states, data), from a recording if there is one or it is time for one.

        The next call may write over it.
        """
        name, steps = _name(function, down, states, data), _steps(data)
        met = self._met.setdefault(name, steps)
        if self._refused or met is steps:
            return function(down, states, data)
        if met != steps:
            self._met[name] = ()  # they vary, from now on
            data = _filled(data, tuple(map(round_number, steps)))
        key = name, _steps(data), tuple(batches.padding for batches in data.phases.values())
        if key not in self._recordings:
            try:
                recording = _record(function, down, states, data)
            except RuntimeError as error:
                self._refused = True
                reason = str(error).strip().splitlines()[0]
                warnings.warn(f"engine: trained without CUDA graphs, as they refuse: {reason}", stacklevel=2)
                return function(down, states, data)
            self._recordings[key] = recording
            if len(self._recordings) > _MOST:
                self._recordings.popitem(last=False)
        self._recordings.move_to_end(key)
        return self._recordings[key].replay(down, states, data)


def _name(function: Callable[..., Any], down: Tree, states: Tree, data: Data) -> Hashable:
    """Return what tells recordings apart, but for the number of steps."""
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in tree.leaves((down, states)))
    phases = tuple((name, b.pool_x.data_ptr(), b.rows.shape[0], b.rows.shape[2]) for name, b in data.phases.items())
    return function.__qualname__, shapes, phases


def _steps(data: Data) -> Steps:
    return tuple(batches.rows.shape[1] for batches in data.phases.values())


def _filled(data: Data, steps: Steps) -> Data:
    """Return data with more steps, which have no real samples."""

    def more(batches: Batches, count: int) -> Batches:
        missing = count - batches.rows.shape[1]
        again = batches.rows[:, -1:].expand(-1, missing, -1)  # rows that the clients have anyway
        return batches._replace(
            rows=torch.cat([batches.rows, again], 1),
            real=functional.pad(batches.real, (0, 0, 0, missing)),
            key=functional.pad(batches.key, (0, missing)),
            padding=Padding(most=batches.padding.most),
            guard=batches.guard.with_more(missing) if batches.guard else (),
        )

    phases = {name: more(batches, count) for (name, batches), count in zip(data.phases.items(), steps, strict=True)}
    return data._replace(phases=phases)


def _record(function: Callable[..., Tree], down: Tree, states: Tree, data: Data) -> _Recording:
    """Record a function. The data pool is read where it is, all else from copies that later calls fill anew."""
    pools = {leaf.data_ptr() for batches in data.phases.values() for leaf in (batches.pool_x, batches.pool_y)}

    def place(leaf: Tensor) -> Tensor:
        return leaf if leaf.data_ptr() in pools else leaf.clone(memory_format=torch.contiguous_format)

    inputs = tree.map(place, (down, states, data))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function(*inputs)
    return _Recording(graph, inputs, outputs)
