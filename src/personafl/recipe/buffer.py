"""The section [buffer] of a recipe: one server that does not wait for everyone."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from personafl.errors import BadInput
from personafl.options import Positive
from personafl.recipe.cloud import TimesSection, check_no_cohorts


class BufferSection(TimesSection):
    """How many uploads make a new version of the model, how many clients train at a time, and how long they take."""

    size: Positive  # uploads per version; 1: fully asynchronous; as many as concurrency: synchronous
    concurrency: Positive | None = None  # clients that train at a time; None: all
    max_staleness: Annotated[int, Field(ge=0)] | None = None  # older uploads are dropped; None: none are
    discount: Literal["polynomial", "none"] = "polynomial"  # a change s versions late counts 1/√(1 + s), or whole


def check_buffer(buffer: BufferSection | None, federation: Mapping[str, Any], *, on_cloud: bool) -> None:
    """Fail if values do not go together, whatever the data; `federation` is the recipe's section."""
    if buffer is None:
        return
    if on_cloud:
        raise BadInput("buffer: it is for one server, and [cloud] has several; remove one of the two sections")
    check_no_cohorts(federation, "with [buffer] who is free takes part; remove it, and set buffer.concurrency")
    if buffer.concurrency is not None:
        check_size(buffer.size, buffer.concurrency)


def check_size(size: int, concurrency: int) -> None:
    """Fail if a buffer would never be full."""
    if size > concurrency:
        raise BadInput(
            f"buffer.size: waits for {size} uploads, but only {concurrency} clients train at a time; lower it, or "
            "raise buffer.concurrency"
        )
