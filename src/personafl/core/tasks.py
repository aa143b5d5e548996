"""What is learned: the loss that is trained, the score that is reported, and how far outputs are from a teacher's."""

from dataclasses import dataclass

from torch import Tensor

from personafl.core import losses
from personafl.core.losses import Loss
from personafl.core.shape import TaskName


@dataclass(frozen=True)
class Task:
    """A loss [batch], a score [batch] of at most 1 that should be high, and its name.

    `divergence(teacher, pupil)` [batch] is what distillation makes small.
    """

    name: TaskName
    loss: Loss
    correct: Loss
    divergence: Loss = losses.divergence
    score: str = "accuracy"


@dataclass(frozen=True, eq=False)
class Weighted:
    """A loss of classes times the weight of each sample's class."""

    loss: Loss
    weights: Tensor  # [classes]

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return [batch]."""
        return self.weights.to(outputs.device)[targets] * self.loss(outputs, targets)


def task_named(name: TaskName) -> Task:
    """Return a task; what few devices have is imported when it is asked for."""
    if name == "ctc":
        from personafl.core.ctc import ctc_correct, ctc_loss

        return Task(name, ctc_loss, ctc_correct)  # outputs [batch, frames, classes], targets [batch, length]
    if name in ("classification", "next-token"):  # outputs […, classes], targets [batch] or [batch, length]
        return Task(name, losses.cross_entropy, losses.correct)
    from personafl.core import targets

    if name == "regression":  # outputs and targets [batch, targets] of real numbers, standardised
        return Task(name, targets.squared_error, targets.explained, targets.squared_error, "r2")
    # outputs [batch, labels], targets [batch, labels] 0 or 1
    return Task(name, targets.binary_cross_entropy, targets.label_f1, targets.binary_divergence, "f1")
