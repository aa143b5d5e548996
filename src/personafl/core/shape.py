"""The record of what data look like: all that building a network needs to know of them."""

from typing import Literal

from personafl.options import Positive, Strict

# What a target is: a class, the next token at each place, a sequence without alignment (0: blank), real numbers, or
# for each label whether it is there.
TaskName = Literal["classification", "next-token", "ctc", "regression", "multilabel"]


class DataShape(Strict):
    """What a sample and its label are."""

    input_shape: tuple[Positive, ...]  # of a sample
    classes: Positive  # or real numbers, or labels, of a target
    task: TaskName = "classification"
    target_shape: tuple[Positive, ...] = ()  # of a target, where it is more than one class
    vocabulary: Positive | None = None  # where inputs are tokens

    @property
    def counted(self) -> str:
        """What `classes` counts."""
        return {"regression": "targets", "multilabel": "labels"}.get(self.task, "classes")

    @property
    def whole(self) -> bool:
        """Whether targets are classes, whole numbers."""
        return self.task not in ("regression", "multilabel")
