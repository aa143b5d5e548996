"""What the methods with a whole personal model share: its state, and how it is trained."""

import dataclasses
from typing import NamedTuple, TypeVar

from personafl.algorithms.training import Training
from personafl.core.optim import LocalOptimizer
from personafl.core.schedule import Constant
from personafl.core.tree import Params

T = TypeVar("T", bound=LocalOptimizer)


class Personal(NamedTuple):
    """State of a client: its own model. It never leaves the device."""

    model: Params


def retrained(
    training: Training, *, lr: float | None, epochs: int | None, steps: int | None = None, decay: float | None = None
) -> Training:
    """Return the training with another learning rate, weight decay, or amount of work, then a fixed one.

    None keeps what is there.
    """
    optimizer = training.optimizer if lr is None else dataclasses.replace(training.optimizer, lr=lr)
    optimizer = optimizer if decay is None else dataclasses.replace(optimizer, weight_decay=decay)
    work = training.work
    if epochs is not None:
        work = dataclasses.replace(work, epochs=epochs, steps=None, least=None)
    if steps is not None:
        work = dataclasses.replace(work, epochs=None, steps=steps, least=None)
    return Training(work=work, optimizer=optimizer)


def steady(optimizer: T) -> T:
    """Return the optimizer with its learning rate as it is, whatever the round."""
    return dataclasses.replace(optimizer, schedule=Constant())


def fine_tuning(
    training: Training,
    *,
    lr: float | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    decay: float | None = None,
) -> Training:
    """Return what clients do once the rounds are over: retrained, at a constant rate.

    A schedule counts rounds, and has often come down to 0 by then.
    """
    tuned = retrained(training, lr=lr, epochs=epochs, steps=steps, decay=decay)
    return dataclasses.replace(tuned, optimizer=steady(tuned.optimizer))
