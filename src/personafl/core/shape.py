"""The record of what data look like: all that building a network needs to know of them."""

from typing import Literal

from personafl.options import Positive, Strict

TaskName = Literal["classification", "next-token", "ctc"]  # of core.losses.TASKS


class DataShape(Strict):
    """What a sample and its label are."""

    input_shape: tuple[Positive, ...]  # of a sample
    classes: Positive
    task: TaskName = "classification"
    target_shape: tuple[Positive, ...] = ()  # of a label, where it is a sequence
    vocabulary: Positive | None = None  # where inputs are tokens
