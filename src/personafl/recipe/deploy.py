"""The `[deploy]` part of a recipe: what a server must know that has no data, and how long it waits."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field

from personafl.data.federated import FederatedData, TaskName
from personafl.options import Positive, Strict

Seconds = Annotated[float, Field(gt=0)]


class DeploySection(Strict):
    """How devices and a server run a recipe as processes of their own."""

    input_shape: tuple[Positive, ...]  # of a sample
    classes: Positive
    task: TaskName = "classification"
    target_shape: tuple[Positive, ...] = ()  # of a label, where it is a sequence
    vocabulary: Positive | None = None  # where inputs are tokens
    devices: Positive = 1  # the first round begins when so many have enrolled, of each server
    deadline: Seconds = 600.0  # of a round, from when the first device has begun it
    over_selection: Annotated[float, Field(ge=1)] = 1.0  # devices selected, per update that is wanted
    min_completion: Annotated[float, Field(gt=0, le=1)] = 0.8  # share of those updates that a deadline must find
    norm_bound: Annotated[float, Field(gt=0)] = 1e6  # Euclidean norm of an update
    max_samples: Positive = 10**6  # that a device may say it has: updates are weighted by them
    heartbeat: Seconds = 5.0  # between two signs of life
    server_timeout: Seconds = 60.0  # without one, after which a coordinator does not wait for a cloud server

    def wanted(self, size: int) -> int:
        """Return how many devices to select for a cohort of a size."""
        return math.ceil(self.over_selection * size - 1e-9)

    def least(self, size: int) -> int:
        """Return how many updates of a cohort are enough at the deadline."""
        return max(1, math.ceil(self.min_completion * size - 1e-9))

    @staticmethod
    def shape_of(data: FederatedData) -> dict[str, object]:
        """Return the keys that describe data."""
        tokens = not data.x.is_floating_point()
        vocabulary = (data.vocabulary or int(data.x.max()) + 1) if tokens else None
        shape = {
            "input_shape": list(data.x.shape[1:]),
            "target_shape": list(data.y.shape[1:]),
            "classes": data.classes,
            "task": data.task,
            "vocabulary": vocabulary,
        }
        return {key: value for key, value in shape.items() if value is not None}
