"""What methods with several shared models have in common: K of them in the slots of one message, [K, …] each weight."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from personafl.algorithms.averaging import Model
from personafl.algorithms.training import OnePassClient
from personafl.core import rng
from personafl.core.algorithm import Problem
from personafl.core.batches import Batch, Batches, Steps
from personafl.core.tree import Params


@dataclass(frozen=True, kw_only=True)
class SlotsClient(OnePassClient):
    """Base of client rules that look at all models before they train, and as newcomers only look."""

    look: Steps = field(default_factory=lambda: Steps(epochs=1))
    count: int = 1  # K

    @property
    def phases(self) -> Mapping[str, Steps]:
        """A pass that only looks, and one of training."""
        return {"look": self.look, "local": self.training.work}

    @property
    def tuning(self) -> Mapping[str, Steps]:
        """A newcomer looks."""
        return {"tune": self.look}

    def expects(self, problem: Problem, start: Params) -> Model:
        """Return the models."""
        return Model(slots(start, self.count))


def slots(start: Params, count: int) -> Params:
    """Return `count` starts: the given one, and others with the entries of each of its weights in another order.

    So they differ as draws of one law do, and follow from the run's seed by the start alone. What a pre-trained start
    knows is in the first slot only.
    """
    return {name: torch.stack([_shuffled(value, name, k) for k in range(count)]) for name, value in start.items()}


def _shuffled(value: Tensor, name: str, slot: int) -> Tensor:
    if slot == 0:
        return value
    order = torch.randperm(value.numel(), generator=rng.generator("slot", name, slot))
    return value.flatten()[order.to(value.device)].reshape(value.shape)


def chosen(models: Params, index: Tensor) -> Params:
    """Return one of the models, by a number [] that may differ between stacked clients."""
    return {name: value.index_select(0, index.reshape(1)).squeeze(0) for name, value in models.items()}


def size(models: Params) -> int:
    """Return K."""
    return len(next(iter(models.values())))


def losses_of(problem: Problem, models: Params, batch: Batch) -> Tensor:
    """Return the losses of all models, [batch, K]."""
    names, parts = list(models), zip(*(value.unbind() for value in models.values()), strict=True)
    each = (problem.net.apply(dict(zip(names, part, strict=True)), batch.x, batch.real, batch.key) for part in parts)
    return torch.stack([problem.loss(outputs, batch.y) for outputs in each], -1)


def looked_at(problem: Problem, models: Params, batches: Batches) -> tuple[Tensor, Tensor]:
    """Return the losses of all models without dropout, [samples, K], and which samples are real."""
    like = next(iter(models.values()))
    losses, real = [like.new_zeros((0, size(models)))], [batches.real.new_zeros((0,))]
    for batch in batches.each():
        losses.append(losses_of(problem, models, batch._replace(key=None)))  # type: ignore[arg-type]
        real.append(batch.real)
    return torch.cat(losses), torch.cat(real)
