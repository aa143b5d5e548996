"""The `[evaluation]` part of a recipe."""

from typing import Annotated, Literal

from pydantic import Field

from personafl.evaluate import CAUTION
from personafl.options import Positive, Strict


class EvaluationSection(Strict):
    """When models are scored during training; at the end they always are."""

    every: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"  # rounds; 0: only at the end; auto: ten times a run
    clients: Positive = 10_000  # scored during training, always the same; if there are more, drawn
    # During training; validation: the test data stay unread, as in a sweep, at the end too.
    split: Literal["test", "validation", "both"] = "test"
    train: bool = False  # score each client's training data too, as they are without augmentation
    caution: Annotated[float, Field(gt=0, le=0.5)] = CAUTION  # a device leaves global if P(worse) is below
