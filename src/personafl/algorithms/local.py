"""Local: every client trains alone. The baseline that says what federation is worth.

    client i:  x_i ← τ steps of SGD on f_i from x_i,   x_i drawn at random at its first round

Nothing is sent in either direction but the mean training loss. A client may have its own architecture.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from personafl.algorithms.personal import Personal, fine_tuning
from personafl.algorithms.training import Count, OnePassClient, Training
from personafl.core.algorithm import Algorithm, Empty, Problem, Reduced, ServerRule
from personafl.core.batches import Batches, Data, Steps
from personafl.core.descend import descend
from personafl.core.tree import Params


class Report(NamedTuple):
    """Up: the mean training loss."""

    loss: Tensor


@dataclass(frozen=True, kw_only=True)
class LocalClient(OnePassClient):
    """Client rule: train one's own model."""

    by_gradients: ClassVar[bool] = True
    kept_phases: ClassVar[tuple[str, ...]] = ("local",)
    alone: Training = field(default_factory=Training)  # of a client that did not take part

    @property
    def tuning(self) -> Mapping[str, Steps]:
        """A newcomer trains alone, all at once."""
        return {"alone": self.alone.work}

    def init(self, problem: Problem, down: Empty, generator: torch.Generator) -> Personal:
        """Draw a model."""
        return Personal(problem.personal_net.init(generator))

    def update(self, problem: Problem, down: Empty, state: Personal, data: Data) -> tuple[Personal, Report]:
        """Continue training."""
        model, loss = self._train(problem, state.model, data.phases["local"], self.training, data.round)
        return Personal(model), Report(loss)

    def personalize(self, problem: Problem, down: Empty, state: Personal, data: Data) -> Personal:
        """Train from the start."""
        return Personal(self._train(problem, state.model, data.phases["alone"], self.alone, data.round)[0])

    def models(self, problem: Problem, down: Empty, state: Personal) -> dict[str, Params]:
        """There is no global model."""
        return {"personal": state.model}

    def _train(
        self, problem: Problem, start: Params, batches: Batches, training: Training, round_: Tensor
    ) -> tuple[Params, Tensor]:
        return descend(problem.personal_loss, start, batches, training.optimizer.at(round_))


@dataclass(frozen=True)
class NoServer(ServerRule):
    """Server rule that keeps and sends nothing."""

    def init(self, problem: Problem, start: Params, population: float) -> Empty:
        """Keep nothing."""
        return Empty()

    def broadcast(self, state: Empty) -> Empty:
        """Send nothing."""
        return Empty()

    def update(self, state: Empty, uploads: Reduced, round_: int) -> Empty:
        """Learn nothing."""
        return state


def local(training: Training, *, alone_epochs: Count = 20) -> Algorithm:
    """Every client trains alone."""
    alone = fine_tuning(training, epochs=alone_epochs)
    return Algorithm("local", LocalClient(training=training, alone=alone), NoServer(), own_networks=True)
