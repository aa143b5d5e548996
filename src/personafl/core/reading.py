"""The record of how a source of data is read."""

from typing import Annotated, Literal

from pydantic import Field

from personafl.options import Positive, Strict


class Reading(Strict):
    """How a source is read: the keys of `[data]` that say so. They also tell how another file is read alike.

    Who reads decides what may be found out from the file: for `all` clients' data it is everything that is not given,
    a `device` must mean by its labels and columns what the others mean, and data to `predict` need no labels.
    """

    task: Literal["auto", "classification", "regression", "multilabel"] = "auto"
    label: str | tuple[str, ...] | None = None
    user: str | None = None
    split: str | None = None
    text: str | None = None
    prompt: str | None = None
    features: tuple[str, ...] | None = None
    drop: tuple[str, ...] = ()
    categories: dict[str, tuple[str, ...]] | None = None
    missing: Literal["error", "mean"] | dict[str, float] = "error"
    classes: tuple[str, ...] | None = None
    size: Positive | None = None
    length: Positive = 80
    vocabulary: Annotated[int, Field(ge=2)] = 10_000
    unit: Literal["character", "word"] = "character"
    tokenizer: str | None = None
    who: Literal["all", "device", "predict"] = "all"


AS_FOUND = Reading()  # everything found out from the file
