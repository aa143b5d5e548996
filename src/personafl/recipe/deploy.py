"""The `[deploy]` part of a recipe: what a server must know that has no data, and how long it waits."""

import math
from typing import Annotated

from pydantic import Field

from personafl.core.shape import DataShape
from personafl.options import Positive

Seconds = Annotated[float, Field(gt=0)]


class DeploySection(DataShape):
    """How devices and a server run a recipe as processes of their own, and what the devices' data look like."""

    devices: Positive = 1  # the first round begins when so many have enrolled, of each server
    deadline: Seconds = 600.0  # of a round, from when the first device has begun it
    over_selection: Annotated[float, Field(ge=1)] = 1.0  # devices selected, per update that is wanted
    min_completion: Annotated[float, Field(gt=0, le=1)] = 0.8  # share of those updates that a deadline must find
    patience: Positive = 3  # deadlines after which a round closes with the updates that are there, if there are any
    norm_bound: Annotated[float, Field(gt=0)] = 1e6  # Euclidean norm of an update
    max_samples: Positive = 10**6  # that a device may say it has: updates are weighted by them
    heartbeat: Seconds = 5.0  # between two signs of life
    checkpoints: Positive = 3  # that a server keeps: it can go back by one round less
    offline_after: Seconds = 60.0  # without an answer, after which a device trains a round alone; another after as many
    server_timeout: Seconds = 60.0  # without one, after which a coordinator does not wait for a cloud server

    def wanted(self, size: int) -> int:
        """Return how many devices to select for a cohort of a size."""
        return math.ceil(self.over_selection * size - 1e-9)

    def least(self, size: int) -> int:
        """Return how many updates of a cohort are enough at the deadline."""
        return max(1, math.ceil(self.min_completion * size - 1e-9))
