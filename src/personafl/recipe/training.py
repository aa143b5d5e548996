"""The section [training] of a recipe."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from pydantic import Field, model_validator

from personafl.algorithms.training import Training
from personafl.core.batches import Steps
from personafl.core.optim import Accelerated, Adaptive, Sgd
from personafl.core.schedule import Constant, Exponential, Linear, Step
from personafl.options import NonNegative, Positive, Strict


class TrainingSection(Strict):
    """How a client trains in a round, for every method."""

    optimizer: Literal["sgd", "adam", "adamw", "accelerated"] = (
        "sgd"  # accelerated: projected gradient that looks ahead
    )
    lr: Annotated[float, Field(gt=0)] = 0.05
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    nesterov: bool = False
    box: Annotated[float, Field(gt=0)] | None = None  # of accelerated: weights stay in [−box, box]
    weight_decay: NonNegative = 0.0
    clip: Annotated[float, Field(gt=0)] | None = None  # gradient norm per step
    epochs: Positive | None = None  # passes over the client's data; 1 unless steps is given
    least_epochs: Positive | None = None  # then: drawn for each client and round, from this many up to epochs
    steps: Positive | None = None  # or a number of minibatches
    least_steps: Positive | None = None  # then: drawn for each client and round, from this many up to steps
    batch: Positive | Literal["all"] = 10
    # Each sample's loss counts by the weight of its class; balanced: as if all clients' classes were equally frequent.
    class_weights: Literal["balanced"] | Annotated[tuple[NonNegative, ...], Field(min_length=2)] | None = None
    schedule: Annotated[Constant | Exponential | Step | Linear, Field(discriminator="kind")] = Constant()

    @model_validator(mode="after")
    def _consistent(self) -> TrainingSection:
        if self.epochs is not None and self.steps is not None:
            raise ValueError("give either epochs or steps, not both")
        if self.optimizer in ("adam", "adamw") and (self.momentum or self.nesterov):
            raise ValueError(f"momentum and nesterov are for sgd; {self.optimizer} has its own")
        if self.optimizer == "accelerated" and (self.nesterov or not self.momentum):
            raise ValueError("accelerated needs momentum, such as 0.9, and has no nesterov")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs momentum")
        if self.box is not None and self.optimizer != "accelerated":
            raise ValueError(f'box is for optimizer = "accelerated", not {self.optimizer}')
        if self.least_steps is not None and self.least_steps > (self.steps or 0):
            raise ValueError("least_steps needs steps, and may be at most that")
        if self.least_epochs is not None and self.least_epochs > (self.epochs or 0):
            raise ValueError("least_epochs needs epochs, and may be at most that")
        return self

    def build(self) -> Training:
        """Return it as the methods take it."""
        epochs = None if self.steps is not None else (self.epochs or 1)
        batch = None if self.batch == "all" else self.batch
        work = Steps(epochs=epochs, steps=self.steps, least=self.least_steps or self.least_epochs, batch=batch)
        kind = {"sgd": Sgd, "accelerated": Accelerated}.get(self.optimizer, Adaptive)
        known = type(self).model_fields.keys() & {field.name for field in dataclasses.fields(kind)}
        return Training(work=work, optimizer=kind(**{name: getattr(self, name) for name in known}))
