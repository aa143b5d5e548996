"""What a network says of samples: classes by name, sets of labels, or numbers; and how probable each is."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from personafl.core.reading import Reading
from personafl.core.shape import DataShape, TaskName
from personafl.errors import BadInput
from personafl.storage.csvtext import csv_text

_BATCH = 1024
SUPPORTED = ("classification", "regression", "multilabel")


@dataclass(frozen=True)
class Predictions:
    """A network's outputs [samples, k] for samples, and what its k columns are called: classes, labels or targets."""

    outputs: Tensor
    names: tuple[str, ...]
    task: TaskName = "classification"
    truth: Tensor | None = None  # where the samples have labels

    @property
    def values(self) -> NDArray[np.generic]:
        """Class numbers [samples], which labels are there [samples, labels], or numbers [samples, targets]."""
        if self.task == "classification":
            return self.outputs.argmax(-1).numpy()
        return (self.outputs > 0).numpy() if self.task == "multilabel" else self.outputs.numpy()

    @property
    def named(self) -> list[str]:
        """One text per sample: the name of its class, those of its labels, or its numbers."""
        values = self.values
        if self.task == "classification":
            return [self.names[label] for label in values.tolist()]
        if self.task == "multilabel":
            return [" ".join(np.array(self.names)[row]) for row in values]
        return [" ".join(f"{value:.7g}" for value in row) for row in values.tolist()]

    @property
    def probabilities(self) -> NDArray[np.generic]:
        """How probable each class or label is, [samples, k]."""
        if self.task == "regression":
            raise BadInput("probabilities: a regression predicts numbers, not classes; leave them out")
        scores = self.outputs.to(torch.float64)
        return (scores.softmax(-1) if self.task == "classification" else scores.sigmoid()).numpy()

    @property
    def score(self) -> float | None:
        """The share of right classes, the mean F1 of sets of labels, or R² against the variance of these targets."""
        truth = self.truth
        if truth is None:
            return None
        if self.task == "classification":
            return float((self.outputs.argmax(-1) == truth).to(torch.float64).mean())
        if self.task == "multilabel":
            from personafl.core.targets import label_f1

            return float(label_f1(self.outputs, truth).to(torch.float64).mean())
        wrong = (self.outputs.to(torch.float64) - truth).square().mean(0)
        return float((1 - wrong / truth.to(torch.float64).var(0, correction=0)).mean())

    def to_csv(self, probabilities: bool = False) -> str:
        """Return a line per sample: what is predicted, and how probable each class or label is if asked for."""
        columns = ["prediction"] if self.task == "classification" else list(self.names)
        rows = [[name] for name in self.named] if self.task == "classification" else (1 * self.values).tolist()
        if probabilities:
            columns += [f"probability {name}" for name in self.names]
            rows = [[*row, *own] for row, own in zip(rows, self.probabilities.tolist(), strict=True)]
        return csv_text([["sample", *columns], *([number, *row] for number, row in enumerate(rows))])


def output_names(shape: DataShape, reading: Reading) -> tuple[str, ...]:
    """Return what the outputs of a network for data that were read so are called."""
    if reading.classes is not None:
        return reading.classes
    label = (reading.label,) if isinstance(reading.label, str) else reading.label or ()
    if shape.task == "regression" and (len(label) == shape.classes or shape.classes == 1):
        return label or ("target",)
    return tuple(str(number) for number in range(shape.classes))


@torch.no_grad()
def predictions(network: nn.Module, x: Tensor, task: TaskName, names: tuple[str, ...]) -> Predictions:
    """Apply a network to samples, a few at a time."""
    if task not in SUPPORTED:
        raise BadInput(f"predict: the task {task} has an output for each place of a sequence; call the network itself")
    parts = [network(x[start : start + _BATCH]).cpu() for start in range(0, len(x), _BATCH)]
    return Predictions(torch.cat(parts), names, task)
